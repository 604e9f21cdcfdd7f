"""The tier of docs/write-a-tier.md passes the suite, and is the one in the examples."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvladder.errors import ConfigError, TierFull
from kvladder.testing.fixtures import Blocks, MakeTier, Opener
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Item, Tier

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_tier.py"
PAGE = ROOT / "docs" / "write-a-tier.md"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_tier", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example: Any = loaded()


class TestSqlite(TierTests):
    survives = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeTier:
        options = example.SqliteOptions(path=str(tmp_path / "blocks.db"))
        return lambda: example.SqliteTier(options)

    def database(self, tier: Any) -> sqlite3.Connection:
        return sqlite3.connect(tier.options.path)

    async def raw_get(self, tier: Tier, item: Item) -> bytes | None:
        database = self.database(tier)
        row = database.execute("SELECT data FROM blocks WHERE key = ?", [item.key]).fetchone()
        database.close()
        return None if row is None else row[0]

    async def raw_corrupt(self, tier: Tier, item: Item) -> None:
        database = self.database(tier)
        data = bytearray(await self.raw_get(tier, item) or b"")
        data[0] ^= 1
        with database:
            database.execute("UPDATE blocks SET data = ? WHERE key = ?", [data, item.key])
        database.close()

    async def test_a_full_database_is_tier_full(self, opened: Opener, blocks: Blocks) -> None:
        tier: Any = await opened()
        kept = await blocks.put(tier, 0)
        tier._database.execute("PRAGMA max_page_count = 1")
        items = blocks.items(*range(1, 1 + tier.batch_max))
        blocks.fill(items)
        with pytest.raises(TierFull):
            await tier.put(items)
        assert await blocks.get(tier, [*kept, *items]) == [True] + [False] * len(items)

    async def test_a_path_that_cannot_be_is_refused(self, context: Any, tmp_path: Path) -> None:
        tier = example.SqliteTier(example.SqliteOptions(path=str(tmp_path / "none" / "x")))
        with pytest.raises(ConfigError, match=r"path: .*unable to open"):
            await tier.open(context)
        await tier.aclose()


class TestSqliteInThreads(TestSqlite):
    real = True


def code_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_page_shows_the_example() -> None:
    """Joined together, the blocks up to the tests are the file up to its ``serve``."""

    def bare(source: str) -> str:
        """Without imports and empty lines; in one line, so that its breaks do not matter."""
        lines = [line for line in source.splitlines() if not re.match(r"(import|from) ", line)]
        return "".join("".join(lines).split())

    blocks = code_of(PAGE.read_text(encoding="utf-8"))
    shown = bare("".join(b for b in blocks if "TierTests" not in b and "register(" not in b))
    whole = bare(EXAMPLE.read_text(encoding="utf-8"))
    assert len(shown) > 3000
    assert shown in whole
