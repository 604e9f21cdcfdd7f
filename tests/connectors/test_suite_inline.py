"""The reference connector keeps the rules of every connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from kvladder import Layout, open_cache
from kvladder.connectors.inline import InlineConnector
from kvladder.testing import ConnectorEngine, ConnectorTests
from kvladder.testing.engines.suite import MakeEngine
from tests.patience import PATIENCE_S


class InlineEngine(ConnectorEngine):
    """An engine with one tensor for its KV cache."""

    def __init__(self, stack: Mapping[str, Any], blocks: int) -> None:
        self.kv = torch.zeros(blocks, 2, 16, 64)
        layout = Layout(block_tokens=16, block_bytes=self.kv[0].nbytes, fields={"model": "suite"})
        super().__init__(InlineConnector(open_cache(stack, layout=layout), self.kv))

    def write(self, block: int, data: bytes) -> None:
        self.kv[block].view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(data, np.uint8)

    def read(self, block: int) -> bytes:
        return self.kv[block].numpy().tobytes()


class TestInline(ConnectorTests):
    patience_s = PATIENCE_S
    block_bytes = 8192

    @pytest.fixture
    def make(self) -> MakeEngine:
        return InlineEngine
