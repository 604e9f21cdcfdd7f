"""Questions to shared tiers: blocks that others put there, asked ahead and remembered briefly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.policy.fetch_cost import Pace
from kvladder.tiers.answers import Results
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.plan import among
from kvladder.tiers.ladder.records.terms import ANYWHERE

ABSENT_MAX = 4096
"""Most keys that are remembered as absent."""
Asked = tuple[BlockKey, int]
"""The first key of a question, and the bits of the levels that are asked."""


@dataclass(eq=False)
class Question:
    """A question in flight; tasks with the same question wait for its answer."""

    answered: asyncio.Event = field(default_factory=asyncio.Event)
    is_void: bool = False
    """True if everything was removed meanwhile."""
    removed: set[BlockKey] = field(default_factory=set[BlockKey])
    """Blocks that were removed meanwhile: they may be gone, whatever the answer says."""
    failed: set[str] = field(default_factory=set[str])
    """Names of the levels that were asked and gave no answer."""

    def void(self) -> None:
        """Note that everything was removed."""
        self.is_void = True


class Prober:
    """Asks the shared levels of a stack how a prefix continues, and has them adopt what is there.

    Adopted blocks are in the index of their level like any that were put from here. The index is
    only a guess: a read that finds no block takes it out again. Sync methods are called with the
    stack's lock held, unless they take it. Coroutines run on the loop thread.

    Parameters
    ----------
    known:
        Returns whether a block is in one of some levels, or on its way, without asking.
    pace:
        Measured time of answers, with the stack's lock held.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        shared: Shared,
        known: Callable[[BlockKey, int], bool],
        pace: Pace,
    ) -> None:
        self._all = levels
        self._shared = shared
        self._known = known
        self._absent: dict[BlockKey, dict[int, float]] = {}
        """Until when a block is taken to be absent from levels, by their bits."""
        self._questions: dict[Asked, Question] = {}
        self.pace = pace

    def _levels(self, mask: int) -> Sequence[Level]:
        """Return the shared ones of these levels, as they are now."""
        return [level for level in among(self._all, mask) if level.tier.shared]

    def may_know(self, key: BlockKey, mask: int) -> bool:
        """Return whether one of these levels may have ``key`` and the rest, if it is asked now."""
        if not any(level.answers for level in self._levels(mask)):
            return False
        absent = self._absent.get(key)
        if absent is None:
            return True
        until_s = max(absent.get(asked, 0.0) for asked in (mask, ANYWHERE))
        return until_s <= self._shared.clock.now()

    def first(self, mask: int) -> str:
        """Return the name of the hottest of these shared levels that can be asked now."""
        return next((lv.name for lv in self._levels(mask) if lv.answers), "")

    def recall(self, keys: Sequence[BlockKey]) -> None:
        """Note removed blocks: no answer to an earlier question brings one back."""
        for question in self._questions.values():
            question.removed.update(keys)

    def stored(self, keys: Sequence[BlockKey], mask: int) -> None:
        """Note that these levels stored blocks: they are no longer absent from a shared one."""
        if self._absent and self._levels(mask):
            for key in keys:
                self._absent.pop(key, None)

    def forget_absent(self) -> None:
        """Ask again about blocks that were absent: there is another level to ask."""
        self._absent.clear()

    def void(self) -> None:
        """Discard the answers to earlier questions: everything was removed."""
        for question in self._questions.values():
            question.void()

    async def ask(self, keys: Sequence[BlockKey], salt: bytes, mask: int) -> Sequence[str]:
        """Ask these levels how a prefix of a salt continues with ``keys``; the first is not known.

        After it the levels' indexes have what is there, up to the first block that is not. Returns
        the names of the levels that gave no answer.
        """
        asked = keys[0], mask
        question = self._questions.get(asked)
        if question is not None:
            await question.answered.wait()
            return sorted(question.failed)
        question, found = Question(), dict[BlockKey, Level]()
        with self._shared.lock:  # removals on other threads look through the questions
            self._questions[asked] = question
            mark = self.pace.asked(1, self._shared.clock.now())
        try:
            await self._find(keys, found, question, mask)
        finally:
            try:
                self._adopt(keys, salt, found, question, mask)
            finally:
                with self._shared.lock:
                    self.pace.came(mark, 1, self._shared.clock.now(), found=True)
                    del self._questions[asked]
                question.answered.set()
        return sorted(question.failed)

    async def _find(
        self,
        keys: Sequence[BlockKey],
        found: dict[BlockKey, Level],
        question: Question,
        mask: int,
    ) -> None:
        """Ask the levels, hottest first, batch by batch until one has a hole."""
        asked = self._levels(mask)
        unique, unknown = list(dict.fromkeys(keys)), list[BlockKey]()
        for start in range(0, len(unique), STEP):
            with self._shared.lock:
                new = [key for key in unique[start : start + STEP] if not self._known(key, mask)]
                leaving = (k for k in new if any(level.leaving(k) for level in asked))
                question.removed.update(leaving)  # they may be gone when the answer is here
            unknown += new
        step = min((lv.tier.probe_max or lv.tier.batch_max for lv in asked), default=STEP)
        for start in range(0, len(unknown), step):
            left = unknown[start : start + step]
            for level in asked:
                answers = await self._answers(level, left, question)
                found.update((key, level) for key, ok in zip(left, answers, strict=True) if ok)
                left = [key for key in left if key not in found]
                if not left:
                    break
            if left:
                return

    async def _answers(
        self, level: Level, keys: Sequence[BlockKey], question: Question
    ) -> Sequence[bool]:
        """Return whether a shared tier says that it has these; False without an answer in time."""
        results: Results | None = None
        if level.answers:
            results = (await level.client.contains(keys)).results
            level.stats.probed += len(keys)
            if results is None:
                question.failed.add(level.name)
        return [False] * len(keys) if results is None else [*map(bool, results)]

    def _adopt(
        self,
        keys: Sequence[BlockKey],
        salt: bytes,
        found: dict[BlockKey, Level],
        question: Question,
        mask: int,
    ) -> None:
        """Have the levels adopt what was found, head first and without a hole."""
        spare = set(keys)
        for start in range(0, len(keys), STEP):
            with self._shared.lock:
                if question.is_void:
                    return
                wanted: dict[Level, list[BlockKey]] = {}
                part = keys[start : start + STEP]
                is_whole = self._wanted(part, found, question, mask, wanted)
                for level, adopted in wanted.items():
                    if level in self._all:  # or it was detached meanwhile
                        level.adopt(adopted, salt, spare)
            if not is_whole:
                return

    def _wanted(
        self,
        keys: Sequence[BlockKey],
        found: dict[BlockKey, Level],
        question: Question,
        mask: int,
        wanted: dict[Level, list[BlockKey]],
    ) -> bool:
        """Sort ``keys`` by the level that is to adopt them; False where a hole ends the prefix."""
        for key in keys:
            if self._known(key, mask):
                continue
            level = found.get(key)
            if level is None or key in question.removed:
                self._remember(key, mask)
                return False
            wanted.setdefault(level, []).append(key)
        return True

    def _remember(self, key: BlockKey, mask: int) -> None:
        """Remember for a while that these levels do not have the block, so no fetch asks again."""
        while len(self._absent) >= ABSENT_MAX:
            del self._absent[next(iter(self._absent))]
        absent = self._absent[key] = self._absent.pop(key, {})
        longest = max((level.tier.probe_cache_s for level in self._levels(mask)), default=0.0)
        absent[mask] = self._shared.clock.now() + longest
