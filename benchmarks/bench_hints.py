"""Measures the processor time of hints: an action about blocks that are in host, and none.

Both figures are of the calling thread, which is the engine's or that of the HTTP port. The limit of
an action is what the ladder takes to rank its blocks; the rest is the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final

import kvladder
from benchmarks.instant import keys_of
from benchmarks.row import Row
from kvladder.hints import HintExecutor
from kvladder.hints.scopes import OwnRequest
from kvladder.keys import salt_digest
from kvladder.tiers.ladder.upkeep.commands import Ranking

ACTIONS: Final = 16
"""Number of actions in an envelope."""
ENVELOPES: Final = 100
PASSES: Final = 5
BLOCKS: Final = (1, 16)
"""Numbers of blocks that an action is about."""
GOAL: Final = "5 us beyond the limit"
LAYOUT: Final = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "benchmark"})
STACK: Final = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}]}


def best_us(run: Callable[[int], object], calls: int) -> float:
    """Return the processor time of a call in the best pass, in microseconds."""
    found = inf
    for number in range(PASSES):
        begun_s = time.thread_time()
        run(number)
        found = min(found, time.thread_time() - begun_s)
    return found / calls * 1e6


def envelope(number: int, message: int) -> dict[str, Any]:
    """Return an envelope that pins the request's own blocks, again and again, for other times."""
    action = {"action_type": "pin", "action_version": "1"}
    actions = [
        {"action_id": f"{n}", **action, "payload": {"ttl_s": 60.0 + n}} for n in range(ACTIONS)
    ]
    return {"protocol_version": "0.1", "message_id": f"{number} {message}", "actions": actions}


def rows() -> Iterator[Row]:
    """Measure pins of one block and of a short prompt."""
    with kvladder.open_cache(STACK, layout=LAYOUT) as cache:
        executor, salt = HintExecutor.of(cache), salt_digest(cache.namespace, "tenant")
        for blocks in BLOCKS:
            keys = list(keys_of(f"hinted {blocks}", blocks))
            cache.save(keys, salt="tenant").commit()
            request = OwnRequest(keys, "tenant")
            sent = [
                [envelope(blocks, p * ENVELOPES + n) for n in range(ENVELOPES)]
                for p in range(PASSES)
            ]

            def hint(number: int, sent: Any = sent, request: OwnRequest = request) -> None:
                for one in sent[number]:
                    executor.apply(one, request=request)

            def rank(_: int, keys: Any = keys) -> None:
                for n in range(ENVELOPES * ACTIONS):
                    cache.commands.rank([Ranking(keys, salt, 100, 1e9 + n, is_prefix=True)])

            limit = best_us(rank, ENVELOPES * ACTIONS)
            ours = best_us(hint, ENVELOPES * ACTIONS)
            note = f"{ours - limit:.1f} us are the protocol; {ACTIONS} actions an envelope"
            yield Row(
                name=f"pin {blocks} blocks by a hint",
                unit="us",
                limit=limit,
                ours=ours,
                goal=GOAL,
                note=note,
            )
