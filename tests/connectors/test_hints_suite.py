"""Each engine's connector keeps the rules of the hint protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvladder.testing import HintedSample, HintTests
from kvladder.testing.engines.hints import MakeHinted
from tests.connectors.executor import BLOCK, BLOCKS
from tests.connectors.test_suite_inline import of_the_page
from tests.connectors.test_suite_trtllm import RANK_BYTES, SPARE, TrtllmEngine
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


class TestInline(HintTests):
    patience_s = 15.0
    block_bytes = of_the_page()["TestMine"].block_bytes

    @pytest.fixture
    def make(self) -> MakeHinted:
        engine = of_the_page()["MyEngine"]

        def make(stack: Mapping[str, Any]) -> HintedSample:
            return HintedSample(engine(stack, 32), block_tokens=16, blocks=range(5, 32))

        return make
