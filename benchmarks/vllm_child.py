"""A vLLM engine that obeys commands as lines of JSON: ``python vllm_child.py SPEC``.

SPEC is JSON with ``model``, ``transfer`` (vLLM's settings of a connector, or null) and ``engine``.
Each line on standard input names a function below and its arguments. The result is one line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvladder.config import registry
from kvladder.tiers.label import Read, Write
from kvladder.tiers.memory import MemoryTier


class Hanging(MemoryTier):
    """A tier that never ends a call."""

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        return await self._hang()

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        return await self._hang()

    async def _hang(self) -> Sequence[bool]:
        await asyncio.Event().wait()
        return []


class Slow(MemoryTier):
    """A tier that takes a second for each block."""

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        await asyncio.sleep(len(reads))
        return await super().get(reads)


def _runner(worker: Any) -> str:
    inner = getattr(worker, "worker", worker)  # vLLM wraps the worker
    return type(inner.model_runner).__module__


class Child:
    """The engine, with the commands that it obeys."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        registry.register("tiers", "hanging", Hanging)
        registry.register("tiers", "slow", Slow)
        transfer = spec["transfer"]
        arguments: dict[str, Any] = {
            "model": spec["model"],
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "kv_cache_memory_bytes": 256 << 20,
            "max_model_len": 4096,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        if transfer is not None:
            arguments["kv_transfer_config"] = transfer
        self._llm: Any = LLM(**arguments | spec["engine"])
        self._count = 0

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Serve all prompts at once.

        Returns the total seconds, the seconds of each step, those until each first token, and each
        prompt's generated tokens.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        begun = time.perf_counter()
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            self._count += 1
            answers[f"r{self._count}"] = []
            engine.add_request(f"r{self._count}", {"prompt_token_ids": prompt}, sampling)
        steps: list[float] = []
        first: dict[str, float] = {}
        while engine.has_unfinished_requests():
            before = time.perf_counter()
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - begun)
                answers[output.request_id] = list(output.outputs[0].token_ids)
            steps.append(time.perf_counter() - before)
        seconds = time.perf_counter() - begun
        found = {"seconds": seconds, "steps": steps, "first": sorted(first.values())}
        return found | {"tokens": [*answers.values()]}

    def runner(self) -> str:
        """Return the module of the model runner that vLLM chose."""
        (found,) = self._llm.collective_rpc(_runner)
        return str(found)

    def hits(self) -> int:
        """Return the tokens that came from the connector, as vLLM counts them."""
        name = "vllm:external_prefix_cache_hits"
        return int(sum(m.value for m in self._llm.get_metrics() if m.name == name))

    def reset(self) -> bool:
        """Drop vLLM's own prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    def stats(self) -> dict[str, Any]:
        """Return the counters of our cache, once it has nothing left to write."""
        whole = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        running = whole.scheduler.running
        while True:
            running.settle()
            if not running.busy and running.connector.manager.idle():
                return {**running.stats()}
            time.sleep(0.01)

    def settle(self, seconds: float) -> None:
        """Sleep, so that pending writes can end."""
        time.sleep(seconds)

    def shutdown(self) -> None:
        """Shut the engine down cleanly."""
        self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output must not look like an answer
    child = Child(json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(child, name)(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
