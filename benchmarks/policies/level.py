"""A level in virtual time: calls a policy as a level does, without bytes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import islice

from benchmarks.policies.peers import Outcome, work
from benchmarks.policies.traces import Prompt, Trace
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT, EvictionPolicy, KeyedPolicy


class Level:
    """Serves prompts from so many places, with one policy.

    A prompt is asked for, what is there is used, and the rest is saved. With ``whole`` that is in
    one step: what is there is pinned, room is made for all of the rest, then both are pushed, the
    tail first. Without, the blocks come one by one, the tail first, as peers' policies are
    simulated.
    """

    def __init__(self, policy: EvictionPolicy, size: int, keys: Sequence[BlockKey]) -> None:
        self.policy = policy
        self.keyed = policy if isinstance(policy, KeyedPolicy) else None
        self.keys = keys
        self.at: dict[int, int] = {}
        """Handle of each block that is there."""
        self.priority: dict[int, int] = {}
        """Priority of each block that is there."""
        self.block = [-1] * size
        self.free = [*range(size)][::-1]
        self.number = 0
        self._saved_at = PRIORITY_DEFAULT
        if self.keyed is not None:
            number = {key: block for block, key in enumerate(keys)}
            self.keyed.attached(size, lambda some: [self.at.get(number[key]) for key in some])
        policy.reserve(size)

    def request(
        self,
        prompt: Prompt,
        *,
        whole: bool,
        in_session: bool = False,
        priority: int = PRIORITY_DEFAULT,
    ) -> int:
        """Serve a prompt, maybe of a named session; return how many leading blocks were there.

        Blocks that are saved get ``priority``.
        """
        self.number += 1
        self._saved_at = priority
        if self.keyed is not None:
            told = self.keyed.requested_in_session if in_session else self.keyed.requested
            told([self.keys[block] for block in prompt], self.number)
        known = next((at for at, b in enumerate(prompt) if b not in self.at), len(prompt))
        if whole:
            self._serve(prompt, known)
            return known
        for block in reversed(prompt):
            handle = self.at.get(block)
            if handle is not None:
                self.policy.touch(handle)
            else:
                self._save(self._room(1), [block])
        return known

    def rank(self, blocks: Sequence[int], priority: int) -> None:
        """Change the priority of those that are held, the tail first, as an index does."""
        for block in reversed(blocks):
            handle = self.at.get(block)
            if handle is not None and self.priority.get(block) != priority:
                self.policy.remove(handle)
                self.policy.push(handle, priority)
                self.priority[block] = priority

    def _serve(self, prompt: Prompt, known: int) -> None:
        pinned = [self.at[block] for block in reversed(prompt[:known])]
        self.policy.remove_all(pinned)
        behind = [self.at[block] for block in reversed(prompt[known:]) if block in self.at]
        self.policy.touch_all(behind)
        absent = [block for block in prompt[known:] if block not in self.at]
        handles = self._room(len(absent))
        self._save(handles[::-1], absent[: len(handles)][::-1])
        self.policy.push_all(pinned, PRIORITY_DEFAULT)

    def _room(self, count: int) -> list[int]:
        """Return up to ``count`` free handles; evict for them."""
        if (missing := count - len(self.free)) > 0:
            gone = self.victims(missing)
            self.policy.remove_all(gone)
            for handle in gone:
                del self.at[self.block[handle]]
                del self.priority[self.block[handle]]
            if self.keyed is not None and gone:
                self.keyed.dropped(gone, evicted=True)
            self.free += gone[::-1]
        return [self.free.pop() for _ in range(min(count, len(self.free)))]

    def victims(self, count: int) -> list[int]:
        """Return the blocks that go first."""
        return [*islice(self.policy, count)]

    def _save(self, handles: Sequence[int], blocks: Sequence[int]) -> None:
        for block, handle in zip(blocks, handles, strict=True):
            self.at[block], self.block[handle] = handle, block
            self.priority[block] = self._saved_at
        if self.keyed is not None and blocks:
            self.keyed.inserted(handles, [self.keys[block] for block in blocks], self.number)
        self.policy.push_all(handles, self._saved_at)


def keys_of(trace: Trace) -> list[BlockKey]:
    """Return a key for each block of a trace."""
    return [BlockKey(sha256(b"%d" % block).digest()) for block in range(trace.unique)]


def served(
    policy: EvictionPolicy, trace: Trace, size: int, keys: Sequence[BlockKey], *, whole: bool
) -> Outcome:
    """Return what a level with this policy serves of a trace."""
    level = Level(policy, size, keys)
    return outcome_of(trace, [level.request(prompt, whole=whole) for prompt in trace.prompts])


def outcome_of(trace: Trace, known: Sequence[int]) -> Outcome:
    """Return the outcome of requests that found so many leading blocks each."""
    cut = sum(map(int.__lt__, known, _most(trace)))
    return Outcome(sum(known), sum(map(work, known)), cut)


def unbounded(trace: Trace) -> Outcome:
    """Return what a level without a bound serves."""
    return outcome_of(trace, _most(trace))


def _most(trace: Trace) -> list[int]:
    """Return how many leading blocks of each request were asked for before."""
    seen: set[int] = set()
    found: list[int] = []
    for prompt in trace.prompts:
        known = next((at for at, block in enumerate(prompt) if block not in seen), len(prompt))
        found.append(known)
        seen.update(prompt)
    return found
