"""The shared tier of docs/how-to/write-a-tier.md passes the suite, as it is and below codecs."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from kvladder.compose import open_cache
from kvladder.config import registry
from kvladder.keys import KeyScheme
from kvladder.layout import Layout
from kvladder.testing.fixtures import MakeTier, SampleBlocks
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Tier
from kvladder.tiers.label import LABEL_BYTES, Ref
from tests.patience import PATIENCE_S
from tests.tiers.coded import CodedTests, CodedTier
from tests.tiers.test_custom_tier import loaded

example: Any = loaded("shared_folder")


class TestFolder(TierTests):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeTier:
        options = example.FolderOptions(path=str(tmp_path / "kv"))
        return lambda: example.FolderTier(options)

    def file(self, tier: Any, ref: Ref) -> Path:
        return Path(tier.options.path, tier.context.namespace.hex(), ref.key.hex())

    async def raw_get(self, tier: Tier, ref: Ref) -> bytes | None:
        return self.file(tier, ref).read_bytes()[LABEL_BYTES:]

    async def raw_put(self, tier: Tier, ref: Ref, label: bytes, data: bytes) -> None:
        self.file(tier, ref).write_bytes(label + data)

    async def raw_corrupt(self, tier: Tier, ref: Ref) -> None:
        data = bytearray(self.file(tier, ref).read_bytes())
        data[-1] ^= 1
        self.file(tier, ref).write_bytes(data)

    async def test_purge_removes_one_salt_or_all(self, tier: Tier, blocks: SampleBlocks) -> None:
        salted = await blocks.store(tier, [b.of(salt=b"8 bytes!") for b in blocks.some(0, 1)])
        others = await blocks.put(tier, 2)
        assert await tier.purge(b"8 bytes!", lambda *_: None) == 2
        assert await blocks.contains(tier, [*salted, *others]) == [False, False, True]
        assert await tier.purge(None, lambda *_: None) == 1


class TestFolderInThreads(TestFolder):
    real = True


class TestCodedFolder(CodedTests, TierTests):
    @pytest.fixture
    def make(self, codecs: Any, tmp_path: Path) -> MakeTier:
        options = example.FolderOptions(path=str(tmp_path / "kv"))
        return lambda: CodedTier(example.FolderTier(options), codecs())


def test_the_example_is_as_short_as_the_page_says() -> None:
    """The class has at most 60 lines with code, and the file 90 before its test code."""
    text, _, tried = Path(example.__file__).read_text(encoding="utf-8").partition("\n\ndef main(")
    assert tried
    lines = {number for number, line in enumerate(text.splitlines(), start=1) if line.strip()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    (tier,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "FolderTier")
    assert len(lines & {*range(tier.lineno, (tier.end_lineno or 0) + 1)}) <= 60
    assert len(lines) <= 90


@pytest.mark.slow
@pytest.mark.real
def test_two_caches_share_a_folder_and_purge_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    monkeypatch.setitem(registry._registered, ("tiers", "folder"), example.FolderTier)
    level = {"type": "folder", "path": str(tmp_path), "capacity": "1 MiB", "when": "commit"}
    level["codecs"] = ["zstd", "aes-gcm"]  # type: ignore[assignment]
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, level]}
    layout = Layout(block_tokens=16, block_bytes=4096, fields={"model": "demo"})
    with open_cache(source, layout=layout) as one, open_cache(source, layout=layout) as two:
        keys = KeyScheme(one.namespace, block_tokens=16).chain(range(64))
        save = one.save(keys, salt="tenant")
        for number, slot in zip(save.indices, save.slots, strict=True):
            one.arena.view(slot)[:] = bytes([number]) * layout.slot_bytes
        save.commit()
        assert one.flush(timeout_s=PATIENCE_S)
        fetch = two.fetch(keys, salt="tenant")
        fetch.wait()
        assert fetch.sources == ["folder"] * 4
        assert [two.arena.view(slot)[0] for slot in fetch.slots] == [0, 1, 2, 3]
        fetch.release()
        assert list(tmp_path.glob("*/*"))
        list(two.purge("tenant"))
        assert two.flush(timeout_s=PATIENCE_S)
    assert not list(tmp_path.glob("*/*"))
