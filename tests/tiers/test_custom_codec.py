"""The codec of docs/how-to/write-a-codec.md passes the suite, and is the one in the examples."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from kvladder.testing.codecs import CodecTests, MakeCodec

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_codec.py"
PAGE = ROOT / "docs" / "how-to" / "write-a-codec.md"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("custom_codec", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = loaded()


class TestZlib(CodecTests):
    @pytest.fixture(params=[1, 6])
    def make(self, request: pytest.FixtureRequest) -> MakeCodec:
        return lambda: example.ZlibCodec(example.ZlibOptions(level=request.param))


def test_the_page_shows_the_example() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shown = blocks[0].partition("\n\n\n")[2].strip()
    assert len(shown) > 1000
    assert shown in EXAMPLE.read_text()
