"""Session hints on a trace: what an agent would say of its sessions, told to a level.

A trace may not name sessions. Then a request continues the session that used its deepest known
block last, if at least half of its blocks are known; else it begins a session. Three hints are
told, in the calls of kvladder:

- ``ends``: a session ends with its last request. Then the blocks that only it has used get priority
  0, as by ``CacheManager.end_session``.
- ``calls``: with a request, the agent calls a tool and will be back soon. The request's blocks are
  retained: they are saved with a higher priority, and keep it for a minute. Traces do not tell
  tools from people: a call is assumed where the next request of the session comes within that
  minute.
- ``returns``: ten seconds before the session's next request comes after a longer time, as when
  a person begins to type. What is left of its last request is retained again. In a level below
  another one, a prefetch would also bring what is absent; here that stays absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final

from benchmarks.policies.level import Level, outcome_of
from benchmarks.policies.native import NativeLevel
from benchmarks.policies.peers import Outcome
from benchmarks.policies.traces import Prompt, Trace
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MIN
from kvladder.policy.sessions import Sessions

ENDS: Final = "ends"
CALLS: Final = "calls"
RETURNS: Final = "returns"
EVERY: Final = (ENDS, CALLS, RETURNS)
RETAINED: Final = 50
"""Priority of retained blocks."""
RETAINED_S: Final = 60.0
"""Time for which blocks are retained; a longer pause is one that waits for a person."""
LEAD_S: Final = 10.0
"""Time before its next request at which a session is said to return."""


def sessions_of(prompts: Sequence[Prompt]) -> list[int]:
    """Return the number of the session of each prompt."""
    user: dict[int, int] = {}
    found: list[int] = []
    for prompt in prompts:
        known = next((at for at, block in enumerate(prompt) if block not in user), len(prompt))
        is_new = not known or 2 * known < len(prompt)
        session = len(found) if is_new else user[prompt[known - 1]]
        found.append(session)
        user.update(dict.fromkeys(prompt, session))
    return found


def served_with_hints(
    level: Level | NativeLevel, trace: Trace, told: Sequence[str] = (ENDS,)
) -> Outcome:
    """Return what an empty level serves that is told these hints; all but ``ends`` need times."""
    hinted = Hinted(level, trace, told)
    return outcome_of(trace, [hinted.request(number) for number in range(len(trace.prompts))])


class Hinted:
    """A level, and what an agent says of each session of a trace."""

    def __init__(self, level: Level | NativeLevel, trace: Trace, told: Sequence[str]) -> None:
        self._level, self._trace, self._told = level, trace, told
        self._named = trace.sessions or sessions_of(trace.prompts)
        self._next: list[int | None] = [None] * len(self._named)
        """Number of the next request of the same session."""
        later: dict[int, int] = {}
        for number in reversed(range(len(self._named))):
            self._next[number] = later.get(self._named[number])
            later[self._named[number]] = number
        self._sessions, self._seen = Sessions(), set[int]()
        self._block = {key: block for block, key in enumerate(level.keys)}
        self._until_s: dict[int, float] = {}
        """Time at which the retention of each block expires."""
        self._events: list[tuple[float, int, int, Callable[[float, int], None]]] = []
        """Time of each event that is to come, a number that orders them, request and call."""
        self._told_of = count()

    def request(self, number: int) -> int:
        """Serve a request, then tell hints; return how many leading blocks were there."""
        prompt, time_s = self._trace.prompts[number], self._time_s(number)
        while self._events and self._events[0][0] <= time_s:
            then_s, _, one, call = heappop(self._events)
            call(then_s, one)
        following = self._next[number]
        calls = CALLS in self._told and self._comes_soon(number)
        priority = RETAINED if calls else PRIORITY_DEFAULT
        self._level.rank(prompt, priority)  # what is there is saved again
        named = bool(self._told)
        known = self._level.request(prompt, whole=False, in_session=named, priority=priority)
        for block in prompt:  # what was retained before this request is retained no longer
            self._until_s.pop(block, None)
        self._note(prompt, str(self._named[number]))
        if following is None:
            if ENDS in self._told:
                gone = self._sessions.end(str(self._named[number]))
                self._level.rank([self._block[key] for key in gone], PRIORITY_MIN)
        elif calls:
            self._retain(time_s, number)
        elif RETURNS in self._told and not self._comes_soon(number):
            self._later(self._time_s(following) - LEAD_S, number, self._retain)
        return known

    def _comes_soon(self, number: int) -> bool:
        """Return whether the next request of the session comes while blocks are retained."""
        following = self._next[number]
        if following is None:
            return False
        return self._time_s(following) - self._time_s(number) <= RETAINED_S

    def _time_s(self, number: int) -> float:
        return self._trace.times_s[number] if self._trace.times_s else 0.0

    def _note(self, prompt: Prompt, name: str) -> None:
        """Record the blocks of a request of a session, as engines do."""
        keys = self._level.keys
        self._sessions.brought(name, [keys[block] for block in prompt if block not in self._seen])
        self._seen.update(prompt)
        self._sessions.use(name, [[keys[block] for block in prompt]])

    def _later(self, then_s: float, number: int, call: Callable[[float, int], None]) -> None:
        heappush(self._events, (then_s, next(self._told_of), number, call))

    def _retain(self, now_s: float, number: int) -> None:
        prompt, until_s = self._trace.prompts[number], now_s + RETAINED_S
        self._level.rank(prompt, RETAINED)
        self._until_s.update(dict.fromkeys(prompt, until_s))
        self._later(until_s, number, self._expire)

    def _expire(self, now_s: float, number: int) -> None:
        prompt = self._trace.prompts[number]
        expired = [block for block in prompt if self._until_s.get(block, now_s + 1) <= now_s]
        for block in expired:
            del self._until_s[block]
        self._level.rank(expired, PRIORITY_DEFAULT)
