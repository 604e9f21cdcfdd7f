"""Random requests to an engine, some aborted, while its tier fails and its storage is reattached.

Every answer is compared with the engine's answer without a storage.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from tests.patience import RUN_S
from tests.sglang.engine import Answer, Engine

PROMPTS = [
    {"first": first, "tokens": tokens, "more": more, "new": 4}
    for first in range(100, 104)
    for tokens, more in ((700, 0), (1500, 0), (1500, 300))
]
"""Prompts; those with the same first number have the same beginning."""
FAILS = "0.3"
"""The share of the tier's calls that raise."""
WARM = 0.3
"""After so much of the time nothing is touched for the first time."""
SAMPLES_MIN = 3
"""The number of memory samples needed to tell growth."""


class Soak:
    """The actions on an engine with ``extra`` for its storage, and their results."""

    def __init__(self, engine: Engine, extra: dict[str, Any], *, seed: int = 0) -> None:
        self._engine = engine
        self._extra = extra
        self._random = Random(seed)
        self._trouble = engine.folder / "hangs"
        self.done: Counter[str] = Counter()
        self.memory: list[int] = []
        """Bytes that all of the engine's processes held, from time to time."""
        assert engine.do("detach") == ""
        engine.do("flush")
        said = engine.do("together", prompts=PROMPTS)
        self._said = [one["ids"] for one in said]

    def run(self, seconds: float) -> None:
        """Run this long, and until enough has happened.

        Leaves the storage attached and the tier working.
        """
        self._attach()
        ways: list[tuple[Callable[[], None], int]] = [
            (self._ask, 12), (self._give_up, 2), (self._flush, 4), (self._reattach, 1),
            (self._fail, 2), (self._hang, 1), (self._heal, 3),
        ]  # fmt: skip
        steps, weights = zip(*ways, strict=True)
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds or not self._has_shown():
            assert passed < seconds + RUN_S, self.done
            [step] = self._random.choices(steps, weights)
            step()
            self.done[step.__name__.strip("_")] += 1
            if passed > WARM * seconds:
                self.memory.append(self._engine.memory())
        self._heal()

    def _has_shown(self) -> bool:
        return self.done["tokens from kvladder"] > 0 and len(self.memory) >= SAMPLES_MIN

    @property
    def memory_grew(self) -> int:
        """Return by how many bytes memory grew, from the middle of the time to its end."""
        third = max(1, len(self.memory) // 3)
        return max(self.memory[-third:]) - max(self.memory[:third])

    def __str__(self) -> str:
        told = ", ".join(f"{name} {count:,}" for name, count in self.done.items())
        begin, end = (f"{value >> 20:,}" for value in (self.memory[0], self.memory[-1]))
        return f"{told}; MiB held: {begin} at first, {end} in the end"

    def _ask(self) -> None:
        """Send up to four prompts at once, some with priorities, some with a salt."""
        chosen = self._random.sample(range(len(PROMPTS)), self._random.randint(1, 4))
        asked = [{**PROMPTS[at], **self._random.choice(OPTIONS)} for at in chosen]
        for at, found in zip(chosen, self._engine.do("together", prompts=asked), strict=True):
            answer = Answer(**found)
            assert answer.ids == self._said[at], (PROMPTS[at], answer)
            assert answer.reason == "length"
            self.done["requests"] += 1
            self.done["tokens from kvladder"] += answer.storage

    def _give_up(self) -> None:
        asked = self._random.choice(PROMPTS) | {"new": 1000}
        after_s = self._random.uniform(0, 0.5)
        assert self._engine.do("abort", after_s=after_s, **asked) in {"abort", "length"}

    def _flush(self) -> None:
        self._engine.do("flush")

    def _reattach(self) -> None:
        assert self._engine.do("detach") == ""
        self._attach()

    def _attach(self) -> None:
        told = {"extra": self._extra, "policy": "write_through"}
        assert self._engine.do("attach", **told) == ""

    def _fail(self) -> None:
        self._trouble.write_text(FAILS)

    def _hang(self) -> None:
        self._trouble.write_text("")

    def _heal(self) -> None:
        self._trouble.unlink(missing_ok=True)


OPTIONS: list[dict[str, Any]] = [{}, {}, {"priority": 80}, {"cache_salt": "tenant"}]
