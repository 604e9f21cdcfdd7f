"""The halves for TensorRT-LLM, which copy step by step, keep the rules of every connector."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvladder.connectors.trtllm.options import PATIENCE, STACK
from kvladder.errors import TierError
from kvladder.manager import CacheManager
from kvladder.testing import ConnectorTests, SampleEngine
from kvladder.testing.engines.suite import MakeEngine
from tests.connectors.executor import BLOCK, BLOCKS, ELEMENTS, LAYERS, Executor, RequestData
from tests.patience import PATIENCE_S

RANK_BYTES = LAYERS * 2 * ELEMENTS * 4
SPARE = BLOCKS - 1
"""The block of the token that TensorRT-LLM computes in any case."""


class TrtllmEngine(SampleEngine):
    """Drives both halves through an executor, one request for each save or load."""

    def __init__(self, ranks: int) -> None:
        self.executor = Executor(ranks=ranks)
        if ranks > 1:
            self.executor.until(lambda: self.executor.scheduler._cache.complete)
        self.block_bytes = RANK_BYTES * ranks

    @property
    def manager(self) -> CacheManager:
        manager: CacheManager = self.executor.manager
        return manager

    def write(self, block: int, data: bytes) -> None:
        parts = np.frombuffer(data, np.uint8).reshape(len(self.executor.ranks), -1)
        for rank, part in zip(self.executor.ranks, parts, strict=True):
            rank.pool[block].view(torch.uint8).numpy().reshape(-1)[:] = part

    def read(self, block: int) -> bytes:
        return b"".join(rank.pool[block].numpy().tobytes() for rank in self.executor.ranks)

    def _request(self, tokens: Sequence[int], salt: str) -> Any:
        return self.executor.request([*tokens, 1], cache_salt=salt or None)

    def _end(self, request: Any, blocks: Sequence[int]) -> None:
        if self.executor.scheduler.request_finished(request, [*blocks, SPARE]):
            self.executor._kept[request.request_id] = [*blocks]
            self.executor.finish([request.request_id])

    def save(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        pieces: Sequence[int] = (),
        priorities: Sequence[int] | None = None,
        salt: str = "",
    ) -> None:
        ids, request = [*blocks, SPARE], self._request(tokens, salt)
        parts, position, known = pieces or [len(blocks)], 0, len(tokens) // BLOCK * BLOCK
        matched, _ = self.executor.scheduler.get_num_new_matched_tokens(request, known)
        assert not matched, "the engine has these blocks itself"
        for number, length in enumerate(parts):
            step = length * BLOCK + (number == len(parts) - 1)
            data = RequestData(
                request.request_id,
                [] if number else [*tokens, 1],
                [] if number else ids,
                position,
                step,
                priorities=None if priorities is None or number else [*priorities, 35],
                cache_salt=salt or None,
            )
            self.executor.step([] if number else [data], [data] if number else [])
            position += step
        self._end(request, blocks)

    def match(self, tokens: Sequence[int], *, salt: str = "") -> Any:
        request = self._request(tokens, salt)
        matched, _ = self.executor.scheduler.get_num_new_matched_tokens(request, 0)
        return request, matched

    def found(self, match: Any) -> int:
        return int(match[1]) // BLOCK

    def load(self, match: Any, blocks: Sequence[int]) -> int:
        request, _ = match
        ids = [*blocks, SPARE]
        tokens = request.get_tokens(0)
        self.executor.scheduler.update_state_after_alloc(request, ids)
        data = RequestData(request.request_id, tokens, ids, 0, 1)
        try:
            self.executor.step([data], [])
        except TierError:  # ends TensorRT-LLM, so no request reads the blocks
            return 0
        self._end(request, blocks)
        return len(blocks)

    def loaded(self, load: int) -> int:
        return load

    def drop(self, match: Any) -> None:
        self._end(match[0], [])

    def step(self) -> None:
        self.executor.step([], [])

    def reusable(self, block: int) -> bool:
        return not any(block in blocks for blocks in self.executor._kept.values())

    @property
    def busy(self) -> bool:
        return bool(self.executor.scheduler._cache.connector.busy or self.executor._kept)

    def close(self) -> None:
        for rank in reversed(self.executor.ranks):
            rank.worker.close()


class TestTrtllm(ConnectorTests):
    patience_s = PATIENCE_S
    ranks = 1
    block_tokens = BLOCK
    block_bytes = RANK_BYTES
    recovers = False

    @pytest.fixture
    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
        def make(stack: Mapping[str, Any], blocks: int) -> SampleEngine:
            assert blocks < BLOCKS
            path = tmp_path / "stack.yaml"
            path.write_text(json.dumps(stack))  # which YAML includes
            monkeypatch.setenv(STACK, str(path))
            monkeypatch.setenv(PATIENCE, "50 ms")
            return TrtllmEngine(self.ranks)

        return make


class TestTrtllmOfTwoRanks(TestTrtllm):
    ranks = 2
    block_bytes = 2 * RANK_BYTES
