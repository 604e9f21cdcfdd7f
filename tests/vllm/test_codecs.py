"""A real vLLM with compressed and encrypted blocks in files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS, Run, environment

ALL = len(PROMPTS) * HITS
KEY = {"KVLADDER_KEY": "5a" * 32}
STEPS = [["each", {"prompts": PROMPTS}], ["stats"], ["shutdown"]]


def over_files(directory: Path, *codecs: str) -> dict[str, Any]:
    level = {"type": "files", "path": str(directory), "capacity": "64 MiB", "when": "commit"}
    tiers = [{"type": "host"}, {**level, "codecs": list(codecs)}]
    return {"arena": {"size": "64 MiB"}, "fetch": {"deadline": "1 m"}, "tiers": tiers}


@pytest.fixture(scope="module")
def sealed(
    model: Path, reference: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A directory of blocks that are compressed and encrypted."""
    directory = tmp_path_factory.mktemp("sealed")
    extra = over_files(directory / "kv", "zstd", "aes-gcm")
    spec = {"model": str(model), "extra": extra, "steps": STEPS}
    cold, stats, _ = Run(directory, spec, environment(**KEY)).finish()
    assert (cold["tokens"], cold["external"]) == (reference, 0)
    files = stats["files"]
    assert 0 < files["encoded_bytes"] < 0.95 * files["stored_bytes"], "they are compressed"
    return directory / "kv"


@pytest.fixture
def files(sealed: Path, tmp_path: Path) -> Path:
    """A copy of them, for the test to use up."""
    shutil.copytree(sealed, tmp_path / "kv")
    return tmp_path / "kv"


@pytest.mark.parametrize("codecs", [("zstd", "aes-gcm"), ("checksum",)])
def test_blocks_from_encrypted_files_give_the_same_answers(
    start: Start, files: Path, reference: list[list[int]], codecs: tuple[str, ...]
) -> None:
    """A reader with the key needs no other configuration."""
    warm, stats, _ = start(over_files(files, *codecs), *STEPS, env=KEY).finish()
    assert (warm["tokens"], warm["external"]) == (reference, ALL)
    assert stats["files"]["hits"] * BLOCK == ALL


def test_encrypted_blocks_without_the_key_are_misses(
    start: Start, files: Path, reference: list[list[int]]
) -> None:
    locked, stats, _ = start(over_files(files, "checksum"), *STEPS).finish()
    assert (locked["tokens"], locked["external"]) == (reference, 0)
    assert (stats["files"]["unreadable"] > 0, stats["files"]["corrupt"]) == (True, 0)


def test_the_key_in_a_file_changes_while_an_engine_runs(
    start: Start, tmp_path: Path, reference: list[list[int]]
) -> None:
    """Old blocks are hits as long as the file has their key."""
    old, new = "11" * 32, "22" * 32
    for name, lines in {"old": [old], "both": [new, old], "new": [new]}.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / name).chmod(0o600)
    link = tmp_path / "key"
    link.symlink_to(tmp_path / "old")
    extra = over_files(tmp_path / "kv", "zstd")
    extra["tiers"][1]["codecs"].append({"name": "aes-gcm", "key_file": str(link)})

    def served(*prompts: list[int]) -> list[list[Any]]:
        emptied = [
            "call",
            {"function": "tests.vllm.life:empty_host"},
        ]  # so that all hits are decrypted
        return [["reset"], emptied, ["each", {"prompts": prompts}], ["stats"]]

    def renamed(name: str) -> list[Any]:
        return ["point", {"link": str(link), "target": str(tmp_path / name)}]

    first, *others = PROMPTS
    steps = [*served(first), renamed("both"), *served(*PROMPTS), renamed("new")]
    found = start(extra, *steps, *served(*others), *served(first), ["shutdown"]).finish()
    cold, both, without, gone = (one for one in found if isinstance(one, dict) and "tokens" in one)
    assert (cold["tokens"], cold["external"]) == (reference[:1], 0)
    assert (both["tokens"], both["external"]) == (reference, HITS)
    assert (without["tokens"], without["external"]) == (reference[1:], 2 * HITS)
    assert (gone["tokens"], gone["external"]) == (reference[:1], 0)
    assert found[-2]["files"]["unreadable"] > 0
