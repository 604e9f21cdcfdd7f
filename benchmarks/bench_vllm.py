"""Measures the connector's cost in vLLM's scheduler thread, against vLLM's own offloading.

A prompt of 131,072 tokens has 8,192 blocks of 16. Both sides do the in-memory work of their
scheduler half for all of them, without an engine: look up, reserve room for a save and end it, pin
for a load and end it. Ours goes through the connector's search and jobs. vLLM's goes through its
tiering manager over its CPU manager, as its connector calls them. The limit of a poll is a call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from benchmarks.row import Row
from kvladder.keys import BlockKey

BLOCKS = 8192
ROUNDS = 15
HASHES = [BlockKey(hashlib.sha256(number.to_bytes(4)).digest()) for number in range(BLOCKS)]


class Ours:
    """Our side: the connector's scheduler half over a manager with room for two prompts."""

    def __init__(self) -> None:
        from kvladder.config.stack import load_config
        from kvladder.connectors.vllm.options import VllmOptions
        from kvladder.connectors.vllm.scheduler import SchedulerHalf
        from kvladder.connectors.vllm.start import this_node
        from kvladder.connectors.vllm.step import RankDescription
        from kvladder.notices import Notices

        source = {
            "arena": {"size": 2 * BLOCKS * 4096},
            "events": {"max": 0},
            "tiers": [{"type": "host"}],
        }
        spec = type("FullAttentionSpec", (), {"block_size": 16})()
        group = SimpleNamespace(layer_names=["l"], kv_cache_spec=spec)
        scheduler = SchedulerHalf(
            SimpleNamespace(
                model_config=SimpleNamespace(
                    model="bench", hf_config=SimpleNamespace(to_dict=dict)
                ),
                load_config=SimpleNamespace(load_format="dummy"),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
                kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
            ),
            SimpleNamespace(kv_cache_groups=[group]),
            options=VllmOptions(),
            config=load_config(source),
            notices=Notices(lambda: 0.0),
        )
        described = RankDescription(0, this_node(), (4096,), fields={}, weights=b"digest")
        self.half = scheduler.start({0: described})
        self.connector = self.half.connector
        self.manager = self.connector.manager
        self.request = SimpleNamespace(
            request_id="r",
            block_hashes=HASHES,
            num_tokens=BLOCKS * 16 + 1,
            num_prompt_tokens=BLOCKS * 16 + 1,
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
            lora_request=None,
        )
        self.blocks = list(range(1, BLOCKS + 1))
        self._job: Any = None

    def lookup(self) -> None:
        assert self.manager.lookup(HASHES).total in (0, BLOCKS)

    def reserve(self) -> None:
        self._job = self.connector.save(HASHES, self.blocks).job
        assert self._job is not None

    def commit(self) -> None:
        self._end()

    def pin(self) -> None:
        self.half.arrived(self.request)
        found, _ = self.half.ask(self.request, 0)
        assert found == BLOCKS * 16

    def load(self) -> None:
        self.half.allocated(self.request, [self.blocks], BLOCKS * 16)
        (self._job,) = self.half._states["r"].lookup.loading  # pyright: ignore[reportPrivateUsage]

    def loaded(self) -> None:
        self._end()

    def _end(self) -> None:
        from kvladder.connectors.vllm.step import Report
        from kvladder.gpu.copy.copier import Finished

        self.connector.take()
        self.half.report(Report([Finished(self._job, True, 0, 0.0)]))

    def poll(self) -> None:
        for _ in range(1000):
            self.half.ask(self.request, 0)

    def finish(self) -> None:
        self.half.finished(self.request)

    def clear(self) -> None:
        self.manager.clear()


class Native:
    """vLLM's side: its tiering manager over its CPU manager."""

    def __init__(self) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.manager import (
            CPUPrimaryTierOffloadingManager,
            TieringOffloadingManager,
        )

        region: Any = SimpleNamespace(
            create_kv_memoryview=lambda: memoryview(bytes(2 * BLOCKS)), cleanup=lambda: None
        )
        primary = CPUPrimaryTierOffloadingManager(2 * BLOCKS, region)
        self.manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[])
        self.context = ReqContext("r")
        self.manager.on_new_request(self.context)
        self.keys = [make_offload_key(block_hash, 0) for block_hash in HASHES]

    def lookup(self) -> None:
        look, context = self.manager.lookup, self.context
        for key in self.keys:
            look(key, context)

    def reserve(self) -> None:
        assert self.manager.prepare_store(self.keys, self.context) is not None

    def commit(self) -> None:
        self.manager.complete_store(self.keys, self.context)

    def pin(self) -> None:
        self.lookup()

    def load(self) -> None:
        self.manager.prepare_load(self.keys, self.context)

    def loaded(self) -> None:
        self.manager.complete_load(self.keys, self.context)

    def finish(self) -> None:
        self.manager.on_request_finished(self.context)
        self.manager.on_new_request(self.context)

    def clear(self) -> None:
        self.manager.reset_cache()


PARTS = {
    "lookup": "of a prefix that is held",
    "reserve": "slots for a whole prompt, none of it there",
    "commit": "the copies of a whole prompt have ended",
    "pin": "from the request's arrival to its answer; vLLM's own: lookup",
    "load": "hand over what is to be copied",
    "loaded": "the copies have ended",
}


def rows() -> Iterable[Row]:
    """Measure microseconds of the scheduler's thread per block, and per poll."""
    ours, native = Ours(), Native()
    seconds: dict[tuple[str, str], list[float]] = {}
    polls: list[float] = []
    try:
        for _ in range(ROUNDS):
            for name, side in (("native", native), ("ours", ours)):
                for part in ("reserve", "commit", "lookup", "pin", "load", "loaded"):
                    if part == "load" and name == "ours":
                        polls.append(timed(ours.poll) / 1000)
                    took = timed(getattr(side, part))
                    seconds.setdefault((part, name), []).append(took)
                side.finish()
                side.clear()
        for part, note in PARTS.items():
            each = {name: median(seconds[part, name]) / BLOCKS * 1e6 for name in ("native", "ours")}
            yield Row(
                name=f"scheduler {part}, {BLOCKS} blocks",
                unit="us/block",
                peer=each["native"],
                ours=each["ours"],
                goal="ratio <= 0.33" if part in ("lookup", "reserve", "commit") else "",
                note=note,
            )
        yield Row(
            name="scheduler repeated poll",
            unit="us",
            limit=timed(lambda: [None for _ in map(len, HASHES)]) / BLOCKS * 1e6,
            ours=median(polls) * 1e6,
            goal="< 20",
            note=f"get_num_new_matched_tokens again for a request of {BLOCKS} blocks",
        )
    finally:
        ours.manager.close()


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    begun = perf_counter()
    run()
    return perf_counter() - begun
