"""Reasons of misses: why the next block of a prefix is not served, and counts by reason."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from kvladder.keys import BlockKey
from kvladder.metrics import NEVER_SEEN, MissCause, Missed
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.pending import RECALLED, PendingRead
from kvladder.tiers.ladder.saving import Saving

NO_LEVEL = "none"
"""Name that stands for no level in statistics."""


class MissExplainer:
    """Finds the one cause of each miss, and counts blocks by cause.

    The first block that is not served decides the cause of a request's miss. The blocks behind it
    that were here once have the same cause: without it they could have been served. Blocks behind
    them were never seen. If a shared tier was not asked, they have the same cause, too.

    The stack's lock is held around every call, which looks up a few blocks.

    Parameters
    ----------
    arrivals:
        Pending reads, by key.
    saving:
        Blocks that are being saved.
    """

    def __init__(
        self,
        host: HostLevel,
        levels: Sequence[Level],
        shared: Shared,
        arrivals: Mapping[BlockKey, PendingRead],
        saving: Saving,
    ) -> None:
        self._host = host
        self._levels = levels
        self._ghosts = shared.ghosts
        self._arrivals = arrivals
        self._saving = saving
        self.counts: Counter[MissCause] = Counter()
        """Blocks that requests asked for and did not get, by cause."""

    def cause(self, key: BlockKey, mask: int) -> MissCause:
        """Return why a request that may read the levels of ``mask`` does not find the block."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            is_gone = arrival.state is RECALLED
            return MissCause(arrival.level.name, "removed" if is_gone else "levels")
        if key in self._host.index and not mask & self._host.bit:
            return MissCause(self._host.name, "levels")
        for level in self._levels:
            if key in level.index:
                if not mask & level.bit:
                    return MissCause(level.name, "levels")
                if not level.readable:
                    return MissCause(level.name, "unavailable")
        if key in self._host.index or key in self._saving:
            return MissCause(self._host.name, "saving")
        for level in self._levels:
            if level.holds(key):
                return MissCause(level.name, "saving")
        return self._ghosts.get(key) or self._unasked(mask)

    def _unasked(self, mask: int) -> MissCause:
        """Return the cause for a block that is not known: a shared tier could not be asked?"""
        for level in self._levels:
            if level.tier.shared and level.bit & mask and not level.answers:
                return MissCause(level.name, "unavailable")
        return NEVER_SEEN

    def count(self, keys: Sequence[BlockKey], first: int, cause: MissCause) -> tuple[Missed, ...]:
        """Count the blocks from position ``first`` on as missed, the first one for ``cause``.

        Returns them by cause, in order.
        """
        end = len(keys)
        if cause is not NEVER_SEEN and self._was_here(keys[first]):
            rest = range(first + 1, end)  # parents are saved first and leave last
            end = first + 1 + bisect_left(rest, 1, key=lambda at: not self._was_here(keys[at]))
        found = [Missed(*cause, end - first)]
        if end < len(keys):
            found.append(Missed(*NEVER_SEEN, len(keys) - end))
        for level, reason, blocks in found:
            self.counts[MissCause(level, reason)] += blocks
        return tuple(found)

    def left_out(self, keys: Sequence[BlockKey], found: Sequence[BlockKey], mask: int) -> None:
        """Count those blocks of a set that are not ``found``, each for its own cause."""
        if len(found) < len(keys):
            here = {*found}
            for key in keys:
                if key not in here:
                    self.count([key], 0, self.cause(key, mask))

    def _was_here(self, key: BlockKey) -> bool:
        return (
            key in self._host.index
            or key in self._arrivals
            or key in self._saving
            or any(key in level.index for level in self._levels)
            or self._ghosts.get(key) is not None
        )

    def as_dict(self, block_tokens: int) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counts in blocks and in tokens, each by level and reason."""
        blocks: dict[str, dict[str, int]] = {}
        for (level, reason), count in sorted(self.counts.items()):
            blocks.setdefault(level or NO_LEVEL, {})[reason] = count
        tokens = {
            level: {reason: count * block_tokens for reason, count in each.items()}
            for level, each in blocks.items()
        }
        return {"blocks": blocks, "tokens": tokens}
