"""Session hints of the benchmark of policies."""

from __future__ import annotations

from benchmarks.policies.hints import ENDS, EVERY, Hinted, served_with_hints, sessions_of
from benchmarks.policies.level import Level, keys_of, served
from benchmarks.policies.traces import Trace, renumbered
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import PrioritizedLRU


def test_a_request_continues_the_session_with_most_of_its_blocks() -> None:
    prompts = [[0, 1, 2], [0, 3, 4, 5], [0, 1, 2, 6], [0, 3, 4, 5, 7], [8], [0, 1, 2, 6, 9]]
    assert sessions_of(prompts) == [0, 1, 0, 1, 4, 0]


def test_the_end_of_a_session_gives_its_blocks_up_first() -> None:
    """Finished chats, and one that pauses longer than LRU remembers."""
    paused = [0, 1, 2, 3]
    chats = [[*range(first, first + 4)] for first in range(100, 140, 4)]
    prompts = [paused, *chats, [*paused, 4]]
    numbers: dict[int, int] = {}
    small = [[numbers.setdefault(block, len(numbers)) for block in one] for one in prompts]
    trace = Trace("agents", small, True)
    keys = keys_of(trace)
    for make in (PrioritizedLRU, Adaptive):
        assert served(PrioritizedLRU(), trace, 9, keys, whole=False).hits == 0
        assert served_with_hints(Level(make(), 9, keys), trace).hits == 4


def test_a_tool_call_keeps_a_session_for_a_minute_and_a_return_keeps_the_rest() -> None:
    """Other chats, twice as many blocks as the level has, come while an agent is away."""
    agent = [0, 1, 2, 3]
    for away_s, told, hits in ((40, EVERY, 4), (40, (ENDS,), 0), (100, EVERY, 0), (20, EVERY, 4)):
        numbers, prompts, times_s = [0], [agent], [0.0]
        for number, first in enumerate(range(10, 26, 4), 1):
            prompts.append([*range(first, first + 4)])
            times_s.append(float(number))
            numbers.append(number)
        prompts.append(agent)
        times_s.append(float(away_s))
        numbers.append(0)
        trace = Trace("agents", renumbered(prompts), True, times_s, numbers)
        # the other sessions never end, so only the retention says which blocks to keep
        trace = trace._replace(
            prompts=[*trace.prompts, *trace.prompts[1:5]],
            times_s=[*times_s, *(500.0 + at for at in range(4))],
            sessions=[*numbers, 1, 2, 3, 4],
        )
        hinted = Hinted(Level(PrioritizedLRU(), 9, keys_of(trace)), trace, told)
        known = [hinted.request(number) for number in range(6)]
        assert known[5] == hits
