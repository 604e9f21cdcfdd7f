"""Which weights blocks are named after: those that the ranks have in memory."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvladder.connectors.vllm.step import Report, Step

PATIENCE: Final = 1000
"""Steps after which requests do not wait any more for ranks that do not answer."""
STEPS_MAX: Final = 16
"""Steps remembered that ranks may not have begun yet; vLLM has two at most."""


def combined(digests: Sequence[bytes]) -> bytes:
    """Digest of all ranks' weights."""
    return hashlib.sha256(b"kvladder weights of ranks 1" + b"".join(digests)).digest()


class Weights:
    """What the scheduler half knows of the ranks' weights.

    The namespace is that of the weights at start. After a change every name has a mark of the new
    ones; with the old ones the old names return. While there is a doubt no name is used: ranks
    look at their memory in a step in which the engine is awake, before its forward pass, and the
    answer comes with the report. A step tells each rank which of its changes are known: a rank
    that has seen another one copies nothing in it.
    """

    def __init__(self, digests: Sequence[bytes]) -> None:
        self._digests = list(digests)
        self._changes = [0] * len(self._digests)
        self._first = self.digest
        self._doubt = 0
        self._looked = [0] * len(self._digests)
        self._awake = False
        self._steps = 0
        self._unanswered = 0
        self._caches: deque[tuple[int, object]] = deque(maxlen=STEPS_MAX)
        """By step, what vLLM's own prefix cache was."""
        self._outdated: object = self

    @property
    def digest(self) -> bytes:
        """Of the weights of all ranks, as far as they were looked at."""
        return combined(self._digests)

    @property
    def mark(self) -> int:
        """What is added to names, bit by bit without carry; nothing for the weights at start."""
        digest = self.digest
        return 0 if digest == self._first else int.from_bytes(digest)

    @property
    def known(self) -> bool:
        """Whether all ranks have looked since the last doubt."""
        return min(self._looked) >= self._doubt

    @property
    def patient(self) -> bool:
        """Whether it is worth to wait until they are known."""
        return self._unanswered < PATIENCE

    def doubt(self) -> None:
        """They may be others by now."""
        self._doubt += 1
        self._unanswered = 0

    def awake(self) -> None:
        """A request may be scheduled: the weights are in memory, also after a sleep."""
        self._awake = True

    def prepare(self, step: Step, *, runs: bool, cache: object) -> None:
        """Complete a step; ``runs``: it has a forward pass. ``cache`` is vLLM's own."""
        self._steps += 1
        step.turn, step.weights = self._steps, tuple(self._changes)
        if not self.known and (runs or self._awake):
            step.doubt = self._doubt
            self._unanswered += 1
        self._awake = False
        if runs or step.loads:
            self._caches.append((self._steps, cache))

    def report(self, report: Report) -> bool:
        """Take in what ranks saw; True if the weights of one have changed.

        Those of the others may have, too: unless all have looked by now, all look again.
        """
        changed, was_known = False, self.known
        for rank, seen in report.seen.items():
            self._looked[rank] = seen.doubt
            if seen.changes == self._changes[rank]:
                continue
            changed = True
            self._changes[rank], self._digests[rank] = seen.changes, seen.digest
            before = [cache for step, cache in self._caches if step < seen.step]
            self._outdated = before[-1] if before else self
        if changed and was_known and len(report.seen) < len(self._changes):
            self.doubt()
        return changed

    def outdated(self, cache: object) -> bool:
        """Whether vLLM's own prefix cache may have KV that other weights made."""
        return cache is self._outdated
