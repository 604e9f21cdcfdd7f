"""``record`` of a stack: how it is written, refused and shown, and that it costs nothing if off."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvladder
from kvladder.cli import main
from kvladder.compose import open_manager
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.policy.fetch_cost import ANYTHING
from kvladder.traces.recording import RecordingManager, recorder_of

LAYOUT = kvladder.Layout(block_tokens=4, block_bytes=4096, fields={"model": "m"})
KEYS = [BlockKey(number.to_bytes(2) * 16) for number in range(300)]


def stack(**sections: Any) -> dict[str, Any]:
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}], **sections}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def cache(path: Path) -> Iterator[CacheManager]:
    with kvladder.open_cache(stack(record=str(path)), layout=LAYOUT) as cache:
        yield cache


def recorded(cache: CacheManager, path: Path) -> list[int]:
    """Close a cache; return the number of blocks of each line."""
    cache.close()
    return [len(json.loads(text)["hash_ids"]) for text in path.read_text().splitlines()]


def test_a_path_is_short_for_the_section(path: Path) -> None:
    short, long = (
        load_config(stack(record=one), env={}) for one in (str(path), {"path": str(path)})
    )
    assert short.record == long.record
    assert (short.record.size_bytes, short.record.files) == (64 << 20, 8)
    shown = {row.path: row.value for row in short.rows()}
    assert shown["record.path"] == str(path)
    other = load_config(stack(), env={"KVLADDER__RECORD__PATH": str(path)})
    assert other.record.path == str(path)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("", r"record\.path: ''"),
        ({"path": "a\0b"}, r"record\.path: 'a\\x00b'"),
        ({"files": 3}, r"record\.path: missing"),
        ({"path": "t", "files": 0}, r"record\.files: 0"),
        ({"path": "t", "size": "0 B"}, r"record\.size: "),
        ({"path": "t", "fils": 3}, r"record\.fils: unknown key.*files"),
        (7, r"record: 7|record\.path"),
    ],
)
def test_wrong_settings_are_refused(record: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(stack(record=record), env={})


@pytest.mark.parametrize("wrong", ["none/trace.jsonl", "."])
def test_a_place_where_no_file_can_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    record = {"path": str(tmp_path / wrong)}
    with pytest.raises(ConfigError, match=r"record\.path: .*director"):
        kvladder.open_cache(stack(record=record), layout=LAYOUT)
    file = tmp_path / "stack.yaml"
    file.write_text(json.dumps(stack(record=record)))
    assert main(["check", str(file)]) == 2
    assert "record.path: " in capsys.readouterr().err


def test_a_server_records_nothing(path: Path) -> None:
    config = load_config(stack(record=str(path)), env={})
    with pytest.raises(ConfigError, match=r"record: has no effect here .*a cache server's clients"):
        open_manager(config, LAYOUT, serves=True)


def test_without_it_the_manager_is_the_plain_one(path: Path) -> None:
    with kvladder.open_cache(stack(), layout=LAYOUT) as plain:
        assert type(plain) is CacheManager
        assert recorder_of(plain) is None
        assert "record" not in plain.stats()


def test_lookups_are_lines_and_prefetches_are_not(cache: CacheManager, path: Path) -> None:
    assert isinstance(cache, RecordingManager)
    cache.fetch(KEYS[:3], session="s").release()
    cache.save(KEYS[:3], session="s").commit()
    cache.sessions.use("s", [KEYS[:3]])
    for one in cache.prefetch("s"):
        one.release()
    cache.fetch(KEYS[:5], saves=ANYTHING).release()
    cache.fetch_set(KEYS[:7]).release()
    cache.fetch(KEYS[:4]).release()
    assert recorded(cache, path) == [3, 4]


def test_a_prompt_that_is_fetched_in_pieces_is_one_line(cache: CacheManager, path: Path) -> None:
    cache.save(KEYS[:250]).commit()
    paced = cache.fetch_paced(KEYS[:250])
    paced.wait()
    pieces = 0
    while not paced.over:
        pieces += 1
        paced.advance()
        paced.wait()
    assert pieces > 1
    paced.close()
    assert recorded(cache, path) == [250]


def test_engines_of_one_configuration_have_files_of_their_own(path: Path) -> None:
    config = load_config(stack(record=str(path)), env={})
    for instance in (0, 1):
        with open_manager(config, LAYOUT, instance=instance) as cache:
            cache.fetch(KEYS[: instance + 1]).release()
    assert {file.name for file in path.parent.iterdir()} == {"trace.jsonl", "trace-dp1.jsonl"}


def test_statistics_have_its_counts(cache: CacheManager, path: Path, capsys: Any) -> None:
    assert cache.stats()["record"] == {
        "requests": 0,
        "bytes": 0,
        "dropped": 0,
        "unnamed": 0,
        "failures": 0,
    }
    from kvladder.cli.stats import _table

    assert "record: requests 0, bytes 0, dropped 0" in [*_table("socket", cache.stats())][-1]


def test_a_directory_that_goes_away_hurts_no_request(
    cache: CacheManager, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.rename(path.parent.with_name("moved"))
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            cache.fetch(KEYS[number : number + 1]).release()
            cache.save(KEYS[number : number + 1]).commit()
        cache.close()
    said = [text for text in caplog.messages if "requests are not recorded" in text]
    assert len(said) == 1
    assert "No such file or directory; serving does not depend on it" in said[0]
    path.parent.with_name("moved").rename(path.parent)
