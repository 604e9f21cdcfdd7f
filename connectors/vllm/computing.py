"""How long vLLM takes to compute tokens of prompts, and how many wait to be computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from kvladder.connectors.vllm.requests import RequestState

DECODES = 16
"""How many steps without a prompt are remembered."""


class _Begun(NamedTuple):
    """A step under way."""

    at_s: float
    prompt_tokens: int
    decodes: bool
    """Whether it computes one token of each request."""


class Computing:
    """Measures the engine's steps.

    A step takes from its scheduling, or the end of the step before, until it is reported to have
    ended. What one that only decodes takes is taken off those that compute prompts, too.

    Parameters
    ----------
    now:
        Monotonic seconds.
    prefilled:
        Told tokens and seconds; see ``CacheManager.prefilled``.
    """

    def __init__(self, now: Callable[[], float], prefilled: Callable[[int, float], None]) -> None:
        self._now = now
        self._prefilled = prefilled
        self._decodes: deque[float] = deque(maxlen=DECODES)
        self._begun: dict[int, _Begun] = {}
        self._steps = 0
        self._ended_s = 0.0
        self.waiting = 0
        """Tokens of requests that are neither computed nor loaded yet."""

    def expect(self, state: RequestState, tokens: int) -> None:
        """So many tokens of a request are left to compute."""
        self.waiting += tokens - state.left
        state.left = tokens

    def begin(self, scheduled: Sequence[tuple[RequestState | None, int]], *, timed: bool) -> int:
        """A step computes so many tokens of these requests: its number, 0 if it is not timed."""
        prompt_tokens, decodes = 0, True
        for state, count in scheduled:
            decodes = decodes and count == 1
            if state is not None and state.left:
                computed = min(state.left, count)
                prompt_tokens += computed
                self.expect(state, state.left - computed)
        if not timed or not scheduled:
            return 0
        self._steps += 1
        self._begun[self._steps] = _Begun(self._now(), prompt_tokens, decodes)
        return self._steps

    def end(self, number: int) -> None:
        """The step of this number has ended."""
        begun = self._begun.get(number)
        if begun is None:
            return
        self._begun = {at: step for at, step in self._begun.items() if at > number}
        now_s = self._now()
        seconds = now_s - max(begun.at_s, self._ended_s)
        self._ended_s = now_s
        if begun.decodes:
            self._decodes.append(seconds)
        elif begun.prompt_tokens:
            usual_s = median(self._decodes) if self._decodes else 0.0
            self._prefilled(begun.prompt_tokens, max(0.0, seconds - usual_s))
