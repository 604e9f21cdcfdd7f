"""The time that the engine's steps take to compute prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from kvladder.connectors.vllm.requests.state import RequestState

DECODES = 16
"""Number of recent decode-only steps for which the duration is kept."""


class _Begun(NamedTuple):
    """A step in flight."""

    at_s: float
    prompt_tokens: int
    decodes: bool
    """True if it computes only one token of each request."""


class Computing:
    """Measures the time that the engine's steps take to compute prompts.

    A step's time begins when it is scheduled, or when the step before it ends if that is later. It
    ends with the report of the step's end. From a step with prompt tokens, the median time of
    decode-only steps is subtracted.

    Parameters
    ----------
    now:
        Returns monotonic seconds.
    prefilled:
        Called with prompt tokens and seconds; see ``CacheManager.prefilled``.
    """

    def __init__(self, now: Callable[[], float], prefilled: Callable[[int, float], None]) -> None:
        self._now = now
        self._prefilled = prefilled
        self._decodes: deque[float] = deque(maxlen=DECODES)
        self._begun: dict[int, _Begun] = {}
        self._steps = 0
        self._ended_s = 0.0
        self.waiting = 0
        """Number of tokens of all requests that are neither computed nor loaded yet."""

    def expect(self, state: RequestState, tokens: int) -> None:
        """Set the number of tokens that a request has left to compute."""
        self.waiting += tokens - state.left
        state.left = tokens

    def begin(self, scheduled: Sequence[tuple[RequestState | None, int]], *, timed: bool) -> int:
        """Record that a step begins; return its number, or 0 if it is not timed.

        ``scheduled`` has each request's state, or None, and its number of tokens in the step.
        """
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
        """Record that the step with this number has ended. Unknown numbers are ignored."""
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
