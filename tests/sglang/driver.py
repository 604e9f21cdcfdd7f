"""A real engine in its own process, driven by lines of JSON on its input.

``python driver.py ARGUMENTS``, in JSON; its replies are lines that begin with ``REPLY``.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.patience import until

T = TypeVar("T")

# Here, since each process that begins others has a server of its own, and executes this file.
multiprocessing.set_forkserver_preload(["sglang.srt.managers.data_parallel_controller"])


def prompt(first: int, tokens: int) -> list[int]:
    """Return a prompt that differs from others in its first number."""
    value, out = first, []
    for _ in range(tokens):
        value = (value * 1103515245 + 12345) % 2**31
        out.append(3 + (value >> 8) % 1000)
    return out


def answer(found: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of SGLang's answer that tests use."""
    meta = found["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    told = json.loads(details.get("kvladder", "{}"))
    return {
        "ids": found["output_ids"],
        "cached": meta.get("cached_tokens", 0),  # none of a request that was given up
        "storage": details.get("storage", 0),
        "hints": told.pop("hints", []),
        "told": told,
        "reason": (meta.get("finish_reason") or {}).get("type"),
    }


class Driver:
    """The engine and its commands."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(**arguments)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        found: T = self._engine.loop.run_until_complete(work)
        return found

    async def _one(
        self, first: int, tokens: int, new: int = 8, more: int = 0, **options: Any
    ) -> dict[str, Any]:
        """Answer a prompt; ``more`` tokens of another prompt follow it."""
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        asked = prompt(first, tokens) + prompt(first + 1000, more)
        return answer(
            await self._engine.async_generate(input_ids=asked, sampling_params=sampling, **options)
        )

    def generate(self, **asked: Any) -> dict[str, Any]:
        """Answer one prompt."""
        return self._run(self._one(**asked))

    def together(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer several at once."""

        async def all_of() -> list[dict[str, Any]]:
            return list(await asyncio.gather(*(self._one(**asked) for asked in prompts)))

        return self._run(all_of())

    def abort(self, after_s: float, **asked: Any) -> str:
        """Begin to answer a prompt and give it up; why it ended."""

        async def given_up() -> str:
            task = asyncio.create_task(self._one(rid="given-up", **asked))
            await asyncio.sleep(after_s)
            self._engine.tokenizer_manager.abort_request(rid="given-up")
            return str((await task)["reason"])

        return self._run(given_up())

    def flush(self) -> None:
        """Empty the engine's own pools, as soon as nothing runs."""
        until(lambda: getattr(self._engine.flush_cache(), "success", True), every_s=0.1)

    def detach(self) -> str:
        """Take the storage away, as soon as nothing runs."""
        return self._patiently(self._engine.tokenizer_manager.detach_hicache_storage)

    def attach(
        self, extra: dict[str, Any], policy: str | None = None, backend: str = "dynamic"
    ) -> str:
        """Attach another storage; return the error, if any. ``policy`` is that of writes."""
        attach = self._engine.tokenizer_manager.attach_hicache_storage
        return self._patiently(
            lambda: attach(
                hicache_storage_backend=backend,
                hicache_storage_backend_extra_config_json=json.dumps(extra),
                hicache_write_policy=policy,
            )
        )

    def _patiently(self, call: Any) -> str:
        found: Any = None

        def is_over() -> bool:
            nonlocal found
            found = self._run(call())
            return found.success or "idle" not in found.message.lower()

        until(is_over, every_s=0.2)
        return "" if found.success else found.message

    def update(self, path: str) -> str:
        """Take the weights of another folder."""
        done, message, *_ = self._engine.update_weights_from_disk(path)
        return "" if done else message

    def load(self, path: str) -> str:
        """Take the weights of another folder as tensors, and leave the cache as it is."""
        from safetensors.torch import load_file

        tensors = list(load_file(f"{path}/model.safetensors").items())
        self._engine.begin_weight_update()
        done, message, *_ = self._engine.update_weights_from_tensor(tensors, flush_cache=False)
        self._engine.end_weight_update()
        return "" if done else message

    def readapt(self, adapter: str, path: str) -> str:
        """Reload an adapter from its old path."""
        for found in (
            self._engine.unload_lora_adapter(adapter),
            self._engine.load_lora_adapter(adapter, path),
        ):
            if not found.success:
                return str(found.error_message)
        return ""

    def clear(self) -> None:
        """Forget all stored pages."""
        self._run(self._engine.tokenizer_manager.clear_hicache_storage())


def main() -> None:
    """Serve until the input ends."""
    arguments = json.loads(sys.argv[1])
    # Processes of the engine are forked; SGLang makes each import everything again. Replicas are
    # begun by threads, some of which a fork would lose: they are forked from a process without.
    if arguments.get("dp_size", 1) > 1:
        multiprocessing.set_start_method("forkserver")
    multiprocessing.set_start_method = lambda *_, **__: None
    driver = Driver(arguments)
    print("REPLY null", flush=True)
    for line in sys.stdin:
        name, asked = json.loads(line)
        print("REPLY " + json.dumps(getattr(driver, name)(**asked)), flush=True)


if __name__ == "__main__":
    main()
