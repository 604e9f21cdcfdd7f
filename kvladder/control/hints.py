"""Hints over HTTP: bounded in size and in the processor time that they may take."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, Final

from kvladder.control.http import HttpRequest, HttpResponse, as_json, refusal

PATH: Final = "/hints"
HINTS_BYTES_MAX: Final = 1 << 20
"""Largest size of an envelope: a prompt of about 130,000 tokens."""
SHARE: Final = 0.1
"""Largest part of a core that hints take, on average."""
BURST_S: Final = 1.0
"""Processor seconds that hints may take at once after a pause."""
Apply = Callable[[bytes, Mapping[str, str]], Sequence[Any]]
"""Does what an envelope asks that came with these headers.

Returns a named tuple for each action, or raises ValueError.
"""


class Allowance:
    """The processor time that hints may take: a bucket that fills at ``SHARE`` of the time.

    Parameters
    ----------
    now, busy:
        The injected clocks: monotonic seconds, and processor seconds of the calling thread.
    """

    def __init__(self, now: Callable[[], float], busy: Callable[[], float]) -> None:
        self._now = now
        self._busy = busy
        self._left_s = BURST_S
        self._at_s = now()

    def wait_s(self) -> float:
        """Return the seconds until hints may take time again; 0 if they may now."""
        now_s = self._now()
        self._left_s = min(BURST_S, self._left_s + (now_s - self._at_s) * SHARE)
        self._at_s = now_s
        return max(0.0, -self._left_s / SHARE)

    @contextmanager
    def spending(self) -> Generator[None]:
        """Take the processor time of the block from what is left; it may become a debt."""
        begun_s = self._busy()
        try:
            yield
        finally:
            self._left_s -= self._busy() - begun_s


class HintAnswers:
    """Answers ``POST /hints``, an envelope as JSON, with the outcome of each action."""

    def __init__(self, apply: Apply, allowance: Allowance) -> None:
        self._apply = apply
        self._allowance = allowance

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Return the outcomes, or why the envelope is refused as a whole."""
        wait_s = self._allowance.wait_s()
        if wait_s > 0:
            after_s = max(1, ceil(wait_s))
            why = f"hints have taken their share of the processor: send it again in {after_s} s"
            return refusal(429, why, ("Retry-After", str(after_s)))
        with self._allowance.spending():
            try:
                results = self._apply(request.body, request.headers)
            except ValueError as error:
                return refusal(400, str(error))
            return as_json({"hints": [result._asdict() for result in results]})
