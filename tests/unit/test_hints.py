"""Session hints of the benchmark of policies."""

from __future__ import annotations

from benchmarks.policies.hints import served_with_hints, sessions_of
from benchmarks.policies.level import keys_of, served
from benchmarks.policies.traces import Trace
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
        assert served_with_hints(make(), trace, 9, keys).hits == 4
