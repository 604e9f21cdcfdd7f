"""Removal of blocks from all levels of a stack: by key, by salt, or all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.terms import EVERYTHING
from kvladder.tiers.ladder.saves import StackSaves

RESET_STEPS = 16
"""Steps of a reset that its caller takes; the loop thread takes the others."""


MISSED_MAX = 1 << 16
"""Most removals that are remembered for a detached level; with more, it has to forget all."""
TOO_MANY = b"too many"
"""Stands for more removals than that; no key has its length, and no digest of a salt is text."""


def note_missed(
    missed: set[BlockKey | bytes | None], removed: Iterable[BlockKey | bytes | None]
) -> None:
    """Add removals to those that a detached level misses; None stands for everything."""
    if TOO_MANY not in missed:
        missed.update(removed)
    if len(missed) > MISSED_MAX:
        missed.clear()
        missed.add(TOO_MANY)


class StackRemovals(StackSaves):
    """Removes blocks from a stack, and recalls their transfers: no transfer brings one back."""

    away: dict[str, set[BlockKey | bytes | None]]
    """Removals since levels were detached, by the identity of their media: keys, salts, or None
    for everything."""
    _post: Callable[..., object]
    _resetting: Generator[object] | None = None

    def remove(self, keys: Sequence[BlockKey], *, for_all: bool = True) -> Callable[[], bool]:
        """Forget these blocks, in shared tiers ``for_all``; no transfer brings one back.

        Returns a function that says whether a tier has still to forget one of them, or to make that
        survive a power cut.
        """
        unique = list(dict.fromkeys(keys))
        for start in range(0, len(unique), STEP):
            part = unique[start : start + STEP]
            with self.lock:
                self._saving.discard(part)
                self.loader.recall(part)
                self.host.remove(part)
                for level in self.levels:
                    (level.remove if for_all else level.discard)(part)
                for missed in self.away.values() if for_all else ():
                    note_missed(missed, part)
        with self.lock:
            marks = {level: level.purges.removals for level in self.levels}
        return partial(self._is_left, unique, marks)

    def _is_left(self, keys: Sequence[BlockKey], marks: Mapping[Level, int]) -> bool:
        """Return whether a level that is still here owes one of these removals; see ``remove``."""
        for start in range(0, len(keys), STEP):
            part = keys[start : start + STEP]
            with self.lock:
                if any(level.owes(part, marks[level]) for level in self.levels if level in marks):
                    return True
        return False

    def clear(self, *, erase: bool = False) -> Iterator[object]:
        """Forget every block; ``erase`` has tiers overwrite what they keep.

        Works in steps, as ``purge`` does: nothing is stored until the iteration is over or closed.
        """
        return self._forget(self.levels, None, erase=erase)

    def purge(
        self, salt: bytes | None, levels: Sequence[Level] | None = None
    ) -> Generator[dict[str, int]]:
        """Forget every block of a salt, None for all, in host and ``levels`` (None: in all).

        Yields after each step how many are gone by level so far. Nothing of this salt is stored
        until the iteration is over or closed. No step holds the lock for long. Any thread may take
        steps.
        """
        return self._forget(self.levels if levels is None else levels, salt, erase=True)

    def purge_keys(
        self, keys: Sequence[BlockKey], levels: Sequence[Level] | None = None
    ) -> Generator[dict[str, int]]:
        """Forget these blocks, each named once, like ``purge``; tiers overwrite what they keep.

        A block that is stored after the step that removes it is new and stays.
        """
        below = self.levels if levels is None else levels
        counts = {self.host.name: 0, **{level.name: 0 for level in below}}
        for start in range(0, len(keys), STEP):
            part = keys[start : start + STEP]
            with self.lock:
                self._saving.discard(part)
                self.loader.recall(part)
                counts[self.host.name] += self.host.remove(part)
                for level in below:
                    counts[level.name] += level.remove(part)
            yield dict(counts)
        with self.lock:
            for level in below:
                if level.tier.erases:
                    level.purge(None)  # overwrites only what was forgotten
        yield counts

    @contextmanager
    def storing_nothing(self) -> Generator[None]:
        """Take no block into any level while the context lasts, so that none moves unseen."""
        with self.lock:
            self.shared.purging[EVERYTHING] += 1
        try:
            yield
        finally:
            with self.lock:
                self.shared.purging[EVERYTHING] -= 1
                if not self.shared.purging[EVERYTHING]:
                    del self.shared.purging[EVERYTHING]

    def every_block(self) -> Iterator[tuple[list[BlockKey], list[bytes | None]]]:
        """Yield every block that is here or under way, in steps, with its salt, None if unknown.

        A block may come several times. One that moves meanwhile may be missed: see
        ``storing_nothing``.
        """
        with self.lock:
            coming = [*self._saving, *self.loader.arrivals]
            for level in self.levels:
                coming += level.coming()
        for start in range(0, len(coming), STEP):
            part = coming[start : start + STEP]
            yield part, [None] * len(part)
        for each in self._all_levels:
            start = 0
            while start < each.index.places:
                with self.lock:
                    keys = each.index.held(start, start + STEP)
                    salts = each.index.salts(start, start + STEP)
                start += STEP
                if keys:
                    yield keys, salts

    def reset(self) -> None:
        """Forget what no other engine has: blocks of the host level and of private tiers.

        Returns at once, however many there are. Nothing is stored while ``resetting`` is true.
        Shared tiers keep what they have.
        """
        with self.lock:
            if self._resetting is not None:
                return
            private = [level for level in self.levels if not level.tier.shared]
            self._resetting = self._forget(private, None, erase=False)
        self._reset_on(RESET_STEPS)

    @property
    def resetting(self) -> bool:
        """True while a reset is in progress."""
        return self._resetting is not None

    def _reset_on(self, steps: int = 1) -> None:
        resetting = self._resetting
        if resetting is None:
            return
        for _ in range(steps):
            if self._closed or next(resetting, self) is self:
                resetting.close()
                self._resetting = None
                return
        self._post(self._reset_on)

    def _forget(
        self, levels: Sequence[Level], salt: bytes | None, *, erase: bool
    ) -> Generator[dict[str, int]]:
        """Forget host's and these levels' blocks of a salt, None for all, in steps.

        Meanwhile no level takes a block of the salt, so none that moves between levels can be
        missed. Shared tiers are purged, also of what others put. Yields after each step how many
        are gone by level.
        """
        refused = EVERYTHING if salt is None else salt
        levels = [*levels]  # others may be attached meanwhile: ``purging`` is what they look at
        all_levels: Sequence[HostLevel | Level] = (self.host, *levels)
        counts = {level.name: 0 for level in all_levels}
        with self.lock:
            self.shared.purging[refused] += 1
            for missed in self.away.values():
                note_missed(missed, [salt])
            for lower in levels:
                lower.condemn(salt)
                if lower.tier.shared:
                    lower.purge(salt)
        try:
            for _ in self._recall(levels, salt):
                yield dict(counts)
            for level in all_levels:
                start = 0
                while start < level.index.places:
                    with self.lock:
                        held, start = level.index.salted(salt, start)
                        counts[level.name] += level.remove(held)
                    yield dict(counts)
            yield counts
        finally:
            for _ in self._recall(levels, salt):  # reads that began meanwhile
                pass
            with self.lock:
                for level in levels:
                    if erase and level.tier.erases:
                        level.purge(salt)
                self.shared.purging[refused] -= 1
                if not self.shared.purging[refused]:
                    del self.shared.purging[refused]

    def _recall(self, levels: Sequence[Level], salt: bytes | None) -> Iterator[None]:
        """Cancel all transfers under way of a salt, None for any, in steps."""
        with self.lock:
            self.loader.prober.void()
            coming = list(self._saving)
        with self.lock:
            coming += self.loader.arrivals
        for level in levels:
            with self.lock:
                coming += level.coming()
        for start in range(0, len(coming), STEP):
            part = coming[start : start + STEP]
            with self.lock:
                self._saving.discard(part, salt)
                self.loader.recall(part, salt)
                for level in levels:
                    level.recall(part, salt)
            yield
