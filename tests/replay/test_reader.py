"""Traces are read as far as that is safe, and refused with the line where it is not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.traces.reader import TraceError, read_trace

GOOD: dict[str, Any] = {
    "timestamp": 0,
    "input_length": 1000,
    "output_length": 5,
    "hash_ids": [1, 2],
}


def line(**changed: Any) -> str:
    return json.dumps({**GOOD, **changed})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_requests_have_times_lengths_and_numbered_blocks(path: Path) -> None:
    path.write_text(line() + "\n" + line(timestamp=1500, hash_ids=[1, 7]) + "\n")
    trace = read_trace(path)
    assert [(one.at_s, one.input_tokens, one.output_tokens) for one in trace.requests] == [
        (0.0, 1000, 5),
        (1.5, 1000, 5),
    ]
    assert [list(one.blocks) for one in trace.requests] == [[0, 1], [0, 2]]
    assert (trace.unique, trace.blocks, trace.block_tokens) == (3, 4, 512)
    assert (trace.seconds, trace.warnings) == (1.5, ())


def test_gzip_is_found_by_its_content(path: Path) -> None:
    path.write_bytes(gzip.compress((line() + "\n").encode()))
    assert read_trace(path).unique == 2


@pytest.mark.parametrize("ids", [["a", "b"], [2**80, 2**90], [-1, 0], ["1", 1]])
def test_ids_may_be_huge_or_text(path: Path, ids: list[Any]) -> None:
    path.write_text(line(hash_ids=ids) + "\n")
    assert list(read_trace(path).requests[0].blocks) == [0, 1]


def test_a_cut_end_is_left_out_with_a_warning(path: Path) -> None:
    path.write_text(line() + "\n" + line(timestamp=3)[:20])
    trace = read_trace(path)
    assert len(trace.requests) == 1
    assert trace.warnings == (f"{path}:2: the last line is cut: it was skipped",)


def test_a_tail_of_zeros_is_left_out(path: Path) -> None:
    path.write_bytes((line() + "\n").encode() + bytes(5000))
    assert len(read_trace(path).requests) == 1


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_cut_gzip_is_read_up_to_there(path: Path, cut: int) -> None:
    lines = "".join(line(timestamp=n, hash_ids=[n]) + "\n" for n in range(4000))
    whole = gzip.compress(lines.encode())
    path.write_bytes(whole[:-cut])
    trace = read_trace(path)
    assert 3000 < len(trace.requests) <= 4000
    assert any("gzip data end early" in text for text in trace.warnings)


def test_unsorted_requests_are_sorted_with_a_warning(path: Path) -> None:
    path.write_text(line(timestamp=5) + "\n" + line(timestamp=1) + "\n")
    trace = read_trace(path)
    assert [one.at_s for one in trace.requests] == [0.001, 0.005]
    assert trace.warnings == (
        f"{path}: the timestamps are not in order: the requests were sorted by them",
    )


def test_empty_lines_and_missing_output_lengths_are_warnings(path: Path) -> None:
    short = {name: value for name, value in GOOD.items() if name != "output_length"}
    path.write_text("\n" + json.dumps(short) + "\n\n" + line() + "\n")
    trace = read_trace(path)
    assert [one.output_tokens for one in trace.requests] == [0, 5]
    assert trace.warnings == (
        f"{path}:1: an empty line was skipped (2 times)",
        f"{path}:2: no output_length: 0 is taken",
    )


def test_ids_that_are_no_prefixes_are_warnings(path: Path) -> None:
    path.write_text(line(hash_ids=[1, 2, 1, 3]) + "\n" + line(hash_ids=[5, 2]) + "\n")
    trace = read_trace(path)
    assert [len(one.blocks) for one in trace.requests] == [2, 2]
    assert trace.warnings[:2] == (
        f"{path}:1: an id stands twice in one request: the rest of it was left out",
        f"{path}:2: an id follows different ids: ids have to stand for whole prefixes",
    )


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("", "", "no request"),
        ("\n\n", "", "no request"),
        ("hello\n" + line(), ":1", "not JSON: hello (expected a line of Mooncake's format"),
        (line() + "\n{\n" + line(), ":2", "not JSON: {"),
        ("[1, 2]\n", ":1", "a list, not an object"),
        ('{"prompt": "x", "ts": 1}\n', ":1", "no timestamp, but prompt, ts"),
        (json.dumps({"timestamp": 1, "input_length": 4}), ":1", "no hash_ids, but timestamp"),
        (line(timestamp="now"), ":1", "timestamp: text now (expected a number)"),
        (line(timestamp=None), ":1", "timestamp: null None (expected a number)"),
        (line(timestamp=1e300), ":1", "timestamp: 1e+300 (expected milliseconds)"),
        (line(input_length=-1), ":1", "input_length: -1 (expected a number of tokens"),
        (line(input_length=1.5), ":1", "input_length: 1.5 (expected a whole number"),
        (line(input_length=2**70), ":1", "input_length: 1180591620717411303424"),
        (line(output_length=-4), ":1", "output_length: -4"),
        (line(output_length=True), ":1", "output_length: true or false True"),
        (line(hash_ids="abc"), ":1", "hash_ids: text abc (expected a list of ids)"),
        (line(hash_ids=[1, None, 3]), ":1", "hash_ids[1]: null None (expected a number or text"),
        (line(hash_ids=[[1]]), ":1", "hash_ids[0]: a list [1]"),
        (line(hash_ids=[1.5]), ":1", "hash_ids[0]: a number 1.5"),
        (line(hash_ids=[]), "", "no request has a block"),
        (line(asked=3), ":1", "asked: 3 (expected two positions in hash_ids, such as [0, 3])"),
        (line(asked=[0, 1, 2]), ":1", "asked: [0, 1, 2] (expected two positions"),
        (line(asked=[0, True]), ":1", "asked: [0, True] (expected two positions"),
        (line(asked=[0, 3]), ":1", "asked: [0, 3] of 2 hash_ids (expected two positions"),
        (line(asked=[2, 1]), ":1", "asked: [2, 1] of 2 hash_ids"),
        (line(asked=[-1, 1]), ":1", "asked: [-1, 1] of 2 hash_ids"),
        (line(order=[3, 1]), ":1", "order: [3, 1] (expected three numbers, none less than"),
        (line(order=[3, 1, 4]), ":1", "order: [3, 1, 4] (expected three numbers, none less than"),
        (line(order=[1, 2, 3.5]), ":1", "order: [1, 2, 3.5] (expected three numbers"),
        (line(output_hash_ids=8), ":1", "output_hash_ids: a number 8 (expected a list of ids)"),
        (line(output_hash_ids=[8, None]), ":1", "output_hash_ids[1]: null None (expected a number"),
        ("[" * 100_000 + "\n" + line(), ":1", "not JSON: [["),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(
    path: Path, text: str, where: str, says: str
) -> None:
    path.write_text(text)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(refused.value).startswith(f"{path}{where}: ")
    assert says in str(refused.value)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TraceError, match=r"\(expected a readable trace\)"):
            read_trace(path)


@given(content=st.binary(max_size=300))
def test_no_content_crashes_the_reader(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)


def test_a_line_that_is_no_text_is_said(path: Path) -> None:
    wrong = line(hash_ids=["a"]).encode().replace(b'"a"', b'"\xcea"') + b"\n"
    path.write_bytes(wrong + line().encode())
    with pytest.raises(TraceError, match=":1: not JSON"):
        read_trace(path)
    path.write_bytes(line().encode() + b"\n" + wrong)
    assert read_trace(path).warnings == (f"{path}:2: the last line is cut: it was skipped",)


@given(
    size=st.sampled_from([16, 48, 64, 112, 512, 784]),
    tokens=st.lists(st.integers(1, 9000), min_size=9),
)
@pytest.mark.parametrize("whole", [True, False])
def test_the_tokens_of_a_block_agree_with_the_lengths(
    tmp_path_factory: Any, whole: bool, size: int, tokens: list[int]
) -> None:
    """Whether blocks that are filled in part count, as in Mooncake's own traces, or not."""
    path = tmp_path_factory.mktemp("any") / "trace"
    tokens = [*tokens, 100 * size + size // 2, 99 * size]  # long prompts tell one size
    counts = [count // size if whole else -(-count // size) for count in tokens]
    lines = (
        line(input_length=n, hash_ids=[*range(m)]) for n, m in zip(tokens, counts, strict=True)
    )
    path.write_text("\n".join(lines))
    assert read_trace(path).block_tokens == size
    assert read_trace(path, block_tokens=48).block_tokens == 48


def test_lengths_that_do_not_agree_are_a_warning(path: Path) -> None:
    path.write_text("\n".join(line(input_length=n, hash_ids=[*range(100)]) for n in (6400, 10)))
    trace = read_trace(path)
    assert trace.block_tokens == 64
    assert "blocks of 64 tokens agree with 1 of 2 requests" in trace.warnings[0]


def test_a_prompt_longer_than_any_block_is_read(path: Path) -> None:
    path.write_text(line(input_length=1_001_000, hash_ids=[2]) + "\n")
    trace = read_trace(path)
    assert trace.block_tokens == 512
    assert "no number agrees with the lengths, so 512 is taken" in trace.warnings[0]


def test_a_recording_tells_what_the_engine_asked_for_and_saved(path: Path) -> None:
    first = line(asked=[1, 2], output_hash_ids=[5, 6], order=[1, 2, 2])
    path.write_text(f"{first}\n{line(timestamp=9, hash_ids=[1, 2, 5])}\n")
    trace = read_trace(path, block_tokens=400)
    one, other = trace.requests
    assert (list(one.blocks), list(one.answer), one.asked) == ([0, 1], [2, 3], (1, 2))
    assert (list(one.wanted), list(one.used)) == ([1], [0, 1, 2, 3])
    assert (one.order, other.order) == ((1, 2, 2), None)
    assert list(other.wanted) == list(other.used) == list(other.blocks) == [0, 1, 2]
    assert (trace.blocks, trace.own, trace.unique, trace.warnings) == (4, 1, 4, ())


def test_older_files_of_the_same_recording_are_read_first(path: Path) -> None:
    older, oldest, other = (path.with_name(f"{path.name}.{number}") for number in (1, 2, 3))
    path.write_text(line(timestamp=30, hash_ids=[3]) + "\n")
    older.write_text(line(timestamp=10) + "\n" + line(timestamp=20, hash_ids=[2]) + "\n")
    oldest.write_text(line(timestamp=9) + "\n")
    other.write_text(line(timestamp=500) + "\n")
    assert [one.at_s for one in read_trace(path).requests] == [0.009, 0.01, 0.02, 0.03]
