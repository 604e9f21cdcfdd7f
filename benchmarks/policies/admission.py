"""Two levels, host over files, with and without an admission: hits, and writes to the files.

Host is an LRU of ``host`` blocks over an LRU of ``files``. A block that leaves host is written to
files unless they have it, or the admission leaves it out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from benchmarks.policies.traces import Prompt
from kvladder.keys import BlockKey
from kvladder.policy.admission import Above


class Admission(Protocol):
    """The calls of an admission."""

    def requested(self, keys: Sequence[BlockKey], above: Above) -> None: ...
    def wants(self, keys: Sequence[BlockKey]) -> list[bool]: ...
    def left(self, keys: Sequence[BlockKey]) -> None: ...


class Served(NamedTuple):
    """What both levels served, and how many blocks were written to the lower one."""

    hits: int
    writes: int


def two_levels(
    prompts: Sequence[Prompt],
    keys: Sequence[BlockKey],
    host: int,
    files: int,
    admission: Admission | None,
) -> Served:
    """Return what the levels serve of these prompts; None for ``admission`` takes every block."""
    near, far = OrderedDict[int, None](), OrderedDict[int, None]()
    number = {key: block for block, key in enumerate(keys)}
    hits = writes = 0
    for prompt in prompts:
        known = (at for at, block in enumerate(prompt) if block not in near and block not in far)
        hits += next(known, len(prompt))
        if admission is not None:
            asked = [keys[block] for block in prompt]
            admission.requested(asked, lambda some: [number[key] in near for key in some])
        steps = _through_host(prompt, near, host)
        gone = [keys[block] for _, block in steps if block >= 0]
        wanted = [True] * len(gone) if admission is None else admission.wants(gone)
        if admission is not None:
            admission.left(gone)
        wants = iter(wanted)
        for used, left in steps:
            if used in far:
                far.move_to_end(used)
            if left < 0:
                continue
            is_wanted = next(wants)
            if left in far:
                far.move_to_end(left)
            elif is_wanted:
                if len(far) >= files:
                    far.popitem(last=False)
                far[left] = None
                writes += 1
    return Served(hits, writes)


def _through_host(prompt: Prompt, near: OrderedDict[int, None], host: int) -> list[tuple[int, int]]:
    """Bring a prompt into host, tail first; return blocks that came, each with the one it evicted.

    That is -1 where there was room.
    """
    steps: list[tuple[int, int]] = []
    for block in reversed(prompt):
        if block in near:
            near.move_to_end(block)
            continue
        gone = near.popitem(last=False)[0] if len(near) >= host else -1
        steps.append((block, gone))
        near[block] = None
    return steps
