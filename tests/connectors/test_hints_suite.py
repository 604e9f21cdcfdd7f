"""Each engine's connector keeps the rules of the hint protocol."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvladder.connectors.trtllm.options import PATIENCE, STACK
from kvladder.hints import ActionResult, HintExecutor
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.testing import HintedEngine, HintedSample, HintTests, Served
from kvladder.testing.engines.hints import MakeHinted
from tests.connectors import sglang_stub
from tests.connectors.executor import BLOCK
from tests.connectors.scripted import LAYERS, TOKENS, Engine, Request
from tests.connectors.sglang_controller import PAGE, PAGE_BYTES, Controller, Pool, config, rows
from tests.connectors.test_suite_inline import of_the_page
from tests.connectors.test_suite_trtllm import RANK_BYTES, TrtllmEngine
from tests.patience import PATIENCE_S, until

sglang_stub.install()
from kvladder.connectors.sglang.hints import notes_of  # noqa: E402
from kvladder.connectors.sglang.storage import KVLadderStorage  # noqa: E402
from kvladder.connectors.sglang.tree import KVLadderRadixCache  # noqa: E402

pytestmark = pytest.mark.slow


class TestInline(HintTests):
    patience_s = PATIENCE_S
    block_bytes = of_the_page()["TestMine"].block_bytes

    @pytest.fixture
    def make(self) -> MakeHinted:
        engine = of_the_page()["MyEngine"]
        return lambda stack: HintedSample(engine(stack, 8), block_tokens=16, blocks=range(8))


class TestTrtllm(HintTests):
    """TensorRT-LLM carries no hints with requests, so they come at the port only."""

    patience_s = PATIENCE_S
    block_tokens = BLOCK
    block_bytes = RANK_BYTES
    carries_hints = False

    @pytest.fixture
    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeHinted:
        def make(stack: Mapping[str, Any]) -> HintedEngine:
            path = tmp_path / "stack.yaml"
            path.write_text(json.dumps(stack))  # which YAML includes
            monkeypatch.setenv(STACK, str(path))
            monkeypatch.setenv(PATIENCE, "50 ms")
            return HintedSample(TrtllmEngine(1), block_tokens=BLOCK, blocks=range(8))

        return make


class SaltedRequest(Request):
    """A request of the scripted vLLM with a salt in its names, as vLLM has it."""

    def __init__(self, request_id: str, tokens: Sequence[int], salt: str) -> None:
        self._salt = salt
        super().__init__(request_id, tokens)
        self.cache_salt = salt or None

    def hash(self) -> None:
        while (len(self.block_hashes) + 1) * TOKENS <= len(self.tokens):
            end = (len(self.block_hashes) + 1) * TOKENS
            named = repr((self._salt, self.tokens[:end])).encode()
            self.block_hashes.append(hashlib.sha256(named).digest())


class VllmHinted(HintedEngine):
    """Both halves in the scripted vLLM, which checks each byte that a request reads."""

    def __init__(self, stack: Mapping[str, Any]) -> None:
        self._engine = Engine(stack)
        self._number = 0
        HintExecutor.of(self.manager).name_blocks = lambda tokens, salt: [
            [BlockKey(one) for one in SaltedRequest("", tokens, salt).block_hashes]
        ]

    @property
    def manager(self) -> CacheManager:
        found: CacheManager = self._engine.half.connector.manager
        return found

    def serve(
        self, tokens: Sequence[int], *, salt: str = "", hints: Mapping[str, Any] | None = None
    ) -> Served:
        engine, before = self._engine, self._engine.loaded
        self._number += 1
        request = SaltedRequest(f"{self._number}", [*tokens, 1], salt)
        if hints is not None:
            request.kv_transfer_params = {"kv_hints": hints}
        engine.arrive(request)

        def is_over() -> bool:
            if engine.entries or engine.half.busy:
                engine.step()
            return not engine.entries and not engine.half.busy and self.manager.idle()

        until(is_over, every_s=0.0005)
        report = engine.reports[request.request_id] or {}
        results = [ActionResult(**one) for one in report.get("hints", ())]
        return Served(engine.loaded - before, results)

    def close(self) -> None:
        self._engine.close()


class TestVllm(HintTests):
    patience_s = PATIENCE_S
    block_tokens = TOKENS
    block_bytes = LAYERS * TOKENS * 8

    @pytest.fixture
    def make(self) -> MakeHinted:
        pytest.importorskip("vllm")
        return VllmHinted


class SglangHinted(HintedEngine):
    """A tree of SGLang's over the storage; each request's pages lie at the pool's start."""

    def __init__(self, stack: Mapping[str, Any]) -> None:
        sglang_stub.give("m")
        named = {"backend_name": "kvladder", "module_path": "m", "class_name": "c"}
        fetch = {**stack["fetch"], "deadline": "4 s"}  # SGLang's calls end after ten seconds
        extra = {**stack, **named, "interface_v1": 1, "fetch": fetch}
        self._pool = Pool()
        self._storage = KVLadderStorage(config(extra), {})
        self._storage.register_mem_pool_host(self._pool)
        self._storage.on_host_pools_registered()
        self._controller = Controller(self._storage)
        self._tree: Any = KVLadderRadixCache(self._controller)
        self._tree.drain_storage_control_queues()
        found = self._storage.manager
        assert found is not None
        self._manager = found
        self._number = 0

    @property
    def manager(self) -> CacheManager:
        return self._manager

    def serve(
        self, tokens: Sequence[int], *, salt: str = "", hints: Mapping[str, Any] | None = None
    ) -> Served:
        self._number += 1
        key = sglang_stub.RadixKey(array("q", tokens), cache_salt=salt or None)
        keys = sglang_stub.get_storage_hash_str(key, None, PAGE)
        request = SimpleNamespace(
            rid=self._number,
            keys=keys,
            cache_salt=salt or None,
            extra_key=None,
            finished=lambda: True,
            full_untruncated_fill_ids=key.token_ids,
            kv_hints=hints,
            priority=None,
            session_id=None,
        )
        self._tree.match_prefix(SimpleNamespace(key=key, req=request))
        self._pool.fill(self._number)  # other numbers than any prompt's
        loaded = self._controller.prefetch(keys, rows(0, len(keys)))
        for row, name in enumerate(keys):
            right = self._page(name)
            if row < loaded:
                assert torch.equal(self._pool.page(row), right), f"wrong bytes in page {row}"
            self._pool.kv[:, row] = right
        self._tree.checkpoint_into_tree(request, up_to=len(tokens))
        self._tree.write_backup_storage(request.rid)
        until(self._manager.idle)
        notes = notes_of(request)
        results = () if notes is None or notes.hints is None else notes.hints.results
        return Served(loaded, results)

    def _page(self, name: str) -> torch.Tensor:
        shape = self._pool.kv[:, 0].shape
        numbers = torch.Generator().manual_seed(Random(name).getrandbits(60))
        return torch.randn(shape, generator=numbers).to(self._pool.dtype)

    def close(self) -> None:
        self._controller.detach()


class TestSglang(HintTests):
    patience_s = PATIENCE_S
    block_tokens = PAGE
    block_bytes = PAGE_BYTES

    @pytest.fixture
    def make(self) -> MakeHinted:
        return SglangHinted


class TransformersHinted(HintedEngine):
    """A tiny Llama whose prompts begin with stored prefixes."""

    def __init__(self, stack: Mapping[str, Any]) -> None:
        from kvladder.connectors.transformers import Prefixes
        from tests.connectors.test_transformers import make_model

        self._model = make_model()
        self._prefixes = Prefixes(self._model, stack, block_tokens=16)

    @property
    def manager(self) -> CacheManager:
        return self._prefixes.manager

    def serve(
        self, tokens: Sequence[int], *, salt: str = "", hints: Mapping[str, Any] | None = None
    ) -> Served:
        prompt = [*tokens, 1]
        cache = self._prefixes.begin(prompt, salt=salt, hints=hints)
        loaded = cache.get_seq_length()
        assert sum(cache.served_from.values()) == loaded
        with torch.inference_mode():
            said = self._model(torch.tensor([prompt[loaded:]]), past_key_values=cache).logits[0, -1]
            right = self._model(torch.tensor([prompt])).logits[0, -1]
        assert torch.allclose(said, right, atol=1e-4), "wrong bytes in the prefix"
        self._prefixes.keep(cache, prompt, salt=salt)
        until(self.manager.idle)
        return Served(loaded // 16, () if cache.hints is None else cache.hints.results)

    def close(self) -> None:
        self._prefixes.close()


class TestTransformers(HintTests):
    patience_s = PATIENCE_S
    block_bytes = 16 * 3 * 2 * 2 * 16 * 4

    @pytest.fixture
    def make(self) -> MakeHinted:
        pytest.importorskip("transformers")
        return TransformersHinted
