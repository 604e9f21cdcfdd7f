"""Actions on engines request by request; runs inside an engine's process."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import msgspec

from kvladder.config import registry
from kvladder.errors import TierError
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.label import Read, Write
from kvladder.tiers.memory import MemoryTier
from tests.kit.memory import resident_bytes
from tests.patience import PATIENCE_S

DELAY_S = 2.0
"""Seconds of each call of the slow tier."""

STEP_S = 0.02
"""The interval at which the paced tier checks whether to wait longer."""


class SlowTier(MemoryTier):
    """Takes its time for every batch, and remembers which blocks it gave when."""

    batch_max = 8
    given: ClassVar[list[tuple[BlockKey, float]]] = []

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        await asyncio.sleep(DELAY_S)
        found = await super().get(reads)
        self.given.extend((item.key, time.monotonic()) for item in reads)
        return found


class PacedTier(MemoryTier):
    """A tier that takes ``block_s`` for each block; waiting reads learn of a change at once."""

    batch_max = 8
    block_s: ClassVar[float] = 0.0
    asked: ClassVar[int] = 0
    """The number of blocks requested from it."""

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        PacedTier.asked += len(reads)
        waited_s = 0.0
        while waited_s < self.block_s * len(reads):
            await asyncio.sleep(STEP_S)
            waited_s += STEP_S
        return await super().get(reads)


class MoodyTier(MemoryTier):
    """Fails, hangs and loses blocks, each now and then."""

    random: ClassVar[Random] = Random(1)
    held: ClassVar[dict[BlockKey, tuple[bytes, bytes]]] = {}
    """The blocks of the last one that was made."""

    def __init__(self) -> None:
        super().__init__()
        MoodyTier.held = self._blocks

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        chance = self.random.random()
        if chance < 0.1:
            raise TierError("not in the mood", temporary=chance < 0.05)
        if chance < 0.12:
            await asyncio.Event().wait()
        if chance < 0.3:
            for item in reads:
                self._blocks.pop(item.key, None)
        return await super().get(reads)

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        if self.random.random() < 0.05:
            raise TierError("not in the mood", temporary=True)
        return await super().put(writes)


class HangingGet(MemoryTier):
    """Stores blocks and never gives one back."""

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class HangingPut(MemoryTier):
    """Never ends a write."""

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


TIERS = {
    "slow": SlowTier,
    "paced": PacedTier,
    "moody": MoodyTier,
    "hanging-get": HangingGet,
    "hanging-put": HangingPut,
}


def register() -> None:
    """Make the tiers above known."""
    for name, tier in TIERS.items():
        registry.register("tiers", name, tier)


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def share(
    engine: Any, *, prefixes: list[list[int]], count: int, others: list[list[int]]
) -> dict[str, Any]:
    """Serve ``count`` requests that share some prefixes, all at once, and ``others`` without.

    Returns for each request the times of its prefix's last block, of its lookup's answer and of
    its first token, in seconds after its arrival; the longest step; and how often each block was
    fetched.
    """
    llm, half = engine.llm.llm_engine, engine.half
    SlowTier.given.clear()
    arrived: dict[str, float] = {}
    answered: dict[str, float] = {}
    spoke: dict[str, float] = {}
    needs: dict[str, list[BlockKey]] = {}
    ask = half.ask

    def asked(request: Any, computed: int) -> Any:
        answer = ask(request, computed)
        name = request.request_id.split("-")[0]
        state = half._states[request.request_id]
        if answer[0] is not None and name not in answered:
            answered[name] = time.monotonic()
            main = half._groups.main
            needs[name] = state.keys(main, 0, (computed + answer[0]) // main.tokens)
        return answer

    half.ask = asked
    prompts = [[*prefixes[n % len(prefixes)], 5 + n, *range(9, 20)] for n in range(count)]
    for n, prompt in enumerate([*prompts, *others]):
        arrived[f"r{n}"] = time.monotonic()
        llm.add_request(f"r{n}", {"prompt_token_ids": prompt}, sampling(2))
    longest = 0.0
    while llm.has_unfinished_requests():
        before = time.monotonic()
        for output in llm.step():
            spoke.setdefault(output.request_id.split("-")[0], time.monotonic())
        longest = max(longest, time.monotonic() - before)
    half.ask = ask
    came: dict[BlockKey, float] = dict(SlowTier.given)
    return {
        "needed": [
            max([came[key] for key in needs[name] if key in came], default=begun) - begun
            for name, begun in arrived.items()
        ],
        "answered": [answered[name] - begun for name, begun in arrived.items()],
        "spoke": [spoke[name] - begun for name, begun in arrived.items()],
        "longest_step": longest,
        "fetched": sorted(Counter(key for key, _ in SlowTier.given).values()),
    }


def churn(
    engine: Any,
    *,
    prompts: list[list[int]],
    requests: int = 40,
    seconds: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Serve random requests for these prompts, with aborts and resets at any step.

    The engine computes the right answers first. The test ends after a number of requests, or once
    that many have finished and some seconds have passed.
    """
    random, llm = Random(seed), engine.llm.llm_engine
    tokens = 24
    right = engine.each(prompts=prompts, tokens=tokens, recompute=True)["tokens"]
    external = engine.external_hits()
    live: dict[str, int] = {}
    result: Counter[str] = Counter(added=0, finished=0, aborted=0, wrong=0, failed=0, resets=0)
    end = None if seconds is None else time.monotonic() + seconds
    memory: list[tuple[float, int, int]] = []
    while True:
        if end is None:
            more = result["added"] < requests
        else:
            more = result["finished"] < requests or time.monotonic() < end
        if not more and not live:
            break
        while more and len(live) < 6 and random.random() < 0.5:
            chosen, name = random.randrange(len(prompts)), f"c{seed}x{result['added']}"
            prompt: dict[str, Any] = {"prompt_token_ids": prompts[chosen]}
            if random.random() < 0.2:
                prompt["cache_salt"] = "tenant"
            llm.add_request(name, prompt, sampling(tokens), priority=random.randrange(3))
            live[name] = chosen
            result["added"] += 1
        if live and random.random() < 0.04:
            name = random.choice(sorted(live))
            llm.abort_request([name])
            del live[name]
            result["aborted"] += 1
        if random.random() < 0.04:
            given_up, forgotten = random.random() < 0.5, random.random() < 0.1
            with suppress(RuntimeError):  # vLLM cannot while blocks are being loaded
                llm.reset_prefix_cache(given_up, reset_connector=forgotten)
            result["resets"] += 1
        for output in llm.step():
            if output.finished and output.request_id in live:
                chosen, said = live.pop(output.request_id), output.outputs[0]
                result["finished"] += 1
                result["failed"] += said.finish_reason != "length"
                result["wrong"] += list(said.token_ids) != right[chosen]
        if result["finished"] // 10 > len(memory):
            files = len([*Path("/proc/self/fd").iterdir()])
            held = sum(len(data) for data, _ in [*MoodyTier.held.values()])
            memory.append((time.monotonic(), resident_bytes() - held, files))
    return {
        **result,
        "external": engine.external_hits() - external,
        "preemptions": engine.preemptions(),
        "memory": memory,
    }


def at_a_pace(engine: Any, *, block_s: float, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Serve one prompt after the other while the paced tier takes ``block_s`` for a block.

    Returns for each prompt the answer, the tokens from the cache, the blocks that the tier was
    asked for, those that were given up as late, how often vLLM had to wait, and the page faults of
    its thread.
    """
    PacedTier.block_s = block_s
    found: list[dict[str, Any]] = []
    half, ask = engine.half, engine.half.ask

    def asked(request: Any, computed: int) -> Any:
        answer = ask(request, computed)
        waits.append(answer[0] is None)
        return answer

    def given_up() -> int:
        late: int = half.stats()["paced"]["late"]
        return late

    half.ask = asked
    for prompt in prompts:
        engine.reset()
        before, late, waits, pages = PacedTier.asked, given_up(), list[bool](), faults()
        said = engine.generate([prompt], tokens=64)
        counts = {"asked": PacedTier.asked - before, "late": given_up() - late, "waits": sum(waits)}
        found.append(said | counts | {"faults": faults() - pages})
    half.ask = ask
    return found


def until_fetched(engine: Any, *, prompts: list[list[int]], hits: int) -> list[dict[str, Any]]:
    """Repeat a prompt until this number of its tokens comes from the cache."""
    found: list[dict[str, Any]] = []
    end = time.monotonic() + PATIENCE_S
    while not found or found[-1]["external"] < hits:
        assert time.monotonic() < end
        prompt = prompts[len(found) % len(prompts)]
        found += at_a_pace(engine, block_s=0.0, prompts=[prompt])
    return found


def forget(engine: Any) -> None:
    """Empty every tier; vLLM and other connectors keep their blocks."""
    engine.half.reset()


def empty_host(engine: Any) -> None:
    """Evict all blocks from host memory; levels below keep theirs."""
    manager = engine.half.connector.manager
    with manager._stack.lock:
        slots = manager._stack.host.room(manager.arena.slots, PRIORITY_MAX)
        manager.arena.release(slots)
        assert len(slots) == manager.arena.slots


def faults() -> int:
    """Return the page faults for which this thread had to wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def load(engine: Any, *, way: str) -> int:
    """Have blocks loaded this way from now on; how often a layer has waited for its own before."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector, half = get_kv_transfer_group(), engine.half
    half._options = msgspec.structs.replace(half._options, load=way)
    connector._layers = way == "layers"
    copies = connector.worker
    waited, order = getattr(copies, "waited", 0), type(copies)._order
    copies.waited = 0

    def counted(copier: Any, loads: Any, layer: str | None = None) -> None:
        copies.waited += layer is not None
        order(copies, copier, loads, layer)

    copies._order = counted
    return int(waited)
