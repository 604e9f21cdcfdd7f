"""The tier of docs/how-to/write-a-tier.md passes the suite, and is the one in the examples."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvladder.errors import ConfigError, TierFull, Unavailable
from kvladder.keys import Namespace
from kvladder.testing.fixtures import MakeTier, Opener, SampleBlocks
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Medium, Tier
from kvladder.tiers.label import Ref

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_tier.py"
PAGE = ROOT / "docs" / "how-to" / "write-a-tier.md"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE.with_stem(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example: Any = loaded("custom_tier")


class TestSqlite(TierTests):
    survives = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeTier:
        options = example.SqliteOptions(path=str(tmp_path / "blocks.db"))
        return lambda: example.SqliteTier(options)

    async def raw_get(self, tier: Any, ref: Ref) -> bytes | None:
        with tier._lock:  # the file is locked: there is no other connection
            query = "SELECT data FROM blocks WHERE key = ?"
            row = tier._database.execute(query, [ref.key]).fetchone()
        return None if row is None else row[0]

    async def raw_put(self, tier: Any, ref: Ref, label: bytes, data: bytes) -> None:
        with tier._lock, tier._database as database:
            database.execute(
                "INSERT OR REPLACE INTO blocks VALUES (NULL, ?, ?, ?, ?, ?)",
                [tier.context.namespace, ref.key, ref.place, label, data],
            )

    async def raw_corrupt(self, tier: Any, ref: Ref) -> None:
        data = bytearray(await self.raw_get(tier, ref) or b"")
        data[0] ^= 1
        with tier._lock, tier._database as database:
            database.execute("UPDATE blocks SET data = ? WHERE key = ?", [data, ref.key])

    async def test_a_second_engine_is_refused_until_the_first_has_closed(
        self, opened: Opener, make: MakeTier, context: Any
    ) -> None:
        first = await opened()
        second = make()
        with pytest.raises(Unavailable, match="database is locked .make sure that it is writable"):
            await second.open(context)
        await first.aclose()
        await second.open(context)
        await second.aclose()

    async def test_blocks_of_another_model_go_at_the_next_start(
        self, opened: Opener, make: MakeTier, blocks: SampleBlocks, context: Any
    ) -> None:
        first: Any = await opened()
        await blocks.put(first, 0, 1)
        await first.aclose()
        second: Any = make()
        await second.open(replace(context, namespace=Namespace(b"another model".ljust(32))))
        assert second._database.execute("SELECT count(*) FROM blocks").fetchone() == (0,)
        await second.aclose()

    async def test_a_full_database_is_tier_full(self, opened: Opener, blocks: SampleBlocks) -> None:
        tier: Any = await opened()
        kept = await blocks.put(tier, 0)
        tier._database.execute("PRAGMA max_page_count = 1")
        items = blocks.some(*range(1, 1 + tier.batch_max))
        blocks.fill(items)
        with pytest.raises(TierFull):
            await tier.put(blocks.writes(items))
        assert await blocks.get(tier, [*kept, *items]) == [True] + [False] * len(items)

    async def test_an_impossible_path_is_refused(self, context: Any, tmp_path: Path) -> None:
        tier = example.SqliteTier(example.SqliteOptions(path=str(tmp_path / "none" / "x")))
        with pytest.raises(ConfigError, match=r"path: .*none is not a folder"):
            await tier.open(context)
        tier = example.SqliteTier(example.SqliteOptions(path=str(tmp_path)))
        with pytest.raises(Unavailable, match="unable to open .* is writable"):
            await tier.open(context)
        await tier.aclose()


class TestSqliteInThreads(TestSqlite):
    real = True


def code_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_page_counts_the_methods_and_names_them_all() -> None:
    page = PAGE.read_text(encoding="utf-8")
    said = re.search(r"A tier has six methods: (.*?)\.", page)
    assert said is not None
    six = re.findall(r"`(\w+)`", said[1])
    assert len(six) == 6
    kinds = {example.SqliteTier: "recover", loaded("shared_folder").FolderTier: "purge"}
    for tier, seventh in kinds.items():
        written = {name for name, value in vars(tier).items() if callable(value) and name[0] != "_"}
        assert written - {"Options"} == {*six, seventh}
    offered = {name for name in dir(Tier) if name[0] != "_"}
    of_few = {name for name in vars(Medium) if name[0] != "_"} | {"resizes", "resize"}
    assert of_few <= set(re.findall(r"`(\w+)[`(]", page.split("## What few tiers need")[1]))
    assert offered - of_few == {*six, *kinds.values(), "batch_max", "durable", "shared"}


def test_the_page_shows_the_examples() -> None:
    """Joined together, the blocks up to each tier's end are its file up to its ``serve``."""

    def bare(source: str) -> str:
        """Return a text on one line, without imports, so that line breaks do not matter."""
        imports = re.compile(r"^(import|from) ([^(\n]*|.*?\))\n", re.MULTILINE | re.DOTALL)
        source = imports.sub("", source)
        return "".join(source.split())

    blocks = code_of(PAGE.read_text(encoding="utf-8"))
    shown = [b for b in blocks if "TierTests" not in b and "register(" not in b]
    private, shared = bare("".join(shown[:-1])), bare(shown[-1])
    assert len(private) > 2500
    assert private in bare(EXAMPLE.read_text(encoding="utf-8"))
    second = bare(EXAMPLE.with_stem("shared_folder").read_text(encoding="utf-8"))
    assert second.partition("defmain(")[0].endswith(shared)
    ours = re.findall(r"^(?:from|import) (kvladder[.\w]*)", "".join(shown), re.MULTILINE)
    assert {*ours} == {"kvladder.tiers"}, "one door is enough"
