"""The reference connector keeps the rules of every connector, under the engine of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvladder
from kvladder.connectors.inline import InlineConnector
from kvladder.testing import ConnectorTests
from kvladder.testing.engines.suite import MakeEngine
from tests.patience import PATIENCE_S
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-connector.md"


def of_the_page() -> dict[str, Any]:
    """The names that the last block of the page defines."""
    scope: dict[str, Any] = {
        "torch": torch,
        "kvladder": kvladder,
        "InlineConnector": InlineConnector,
        "__name__": __name__,
    }
    exec(blocks(PAGE, "python")[-1][1], scope)
    return scope


class TestInline(ConnectorTests):
    patience_s = PATIENCE_S
    block_bytes = of_the_page()["TestMine"].block_bytes

    @pytest.fixture
    def make(self) -> MakeEngine:
        engine: MakeEngine = of_the_page()["MyEngine"]
        return engine
