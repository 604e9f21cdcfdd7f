"""``kvladder replay`` and ``kvladder plan``: what they print, and what they refuse."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvladder.cli import commands, main
from kvladder.cli.bench import _mapping
from kvladder.measuring.targets import target
from tests.patience import PATIENCE_S

LLAMA = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}
STACK = """
arena: {size: 1 MiB}
tiers:
  - {type: host}
  - {name: cold, type: memory, capacity: 8 MiB, when: commit}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for n in range(400):
            ids = [*range(n % 40 * 10, n % 40 * 10 + 1 + n % 7)]
            entry = {"timestamp": n * 500, "input_length": len(ids) * 512, "hash_ids": ids}
            file.write(json.dumps({**entry, "output_length": 3}) + "\n")
    return path


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(STACK)
    return path


def test_replay_prints_a_table_with_bounds(trace: Path, stack: Path, capsys: Any) -> None:
    arguments = ["replay", str(trace), "--config", str(stack), "--block-bytes", "4 KiB"]
    assert main([*arguments, "--prefill", "2000", "--speeds", "cold=2GB:1GB"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith(f"{trace}: 400 requests in 200 s, ")
    assert lines[1:3] == ["requests are served one after the other", "a block is 4 KiB (given)"]
    head = next(line for line in lines if line.startswith("policy"))
    assert head.split()[:4] == ["policy", "hits", "host", "cold"]
    assert lines[lines.index(head) + 1].startswith("prioritized-lru ")
    assert lines[-2].startswith("Belady ")
    assert lines[-1].startswith("no limit ")
    assert captured.err == ""


def test_replay_says_whether_requests_overlap_as_in_the_run(
    tmp_path: Path, stack: Path, capsys: Any
) -> None:
    lines = [
        {"timestamp": n, "input_length": 512, "hash_ids": [n], "output_length": 0, "order": order}
        for n, order in enumerate([(1, 3, 5), (2, 4, 6)])
    ]
    path = tmp_path / "ordered.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["replay", str(path), "--config", str(stack), "--block-bytes", "4 KiB"]
    assert main(arguments) == 0
    assert "\nrequests overlap as in the run\n" in capsys.readouterr().out
    del lines[1]["order"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"]["overlaps"] is False


def test_replay_prints_json(trace: Path, stack: Path, capsys: Any) -> None:
    arguments = ["replay", str(trace), "--config", str(stack), "--block-bytes", "4 KiB"]
    assert main([*arguments, "--prefill", "2000", "--ratios", "cold=0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trace"]["requests"] == 400
    assert found["token_s"] == 0.0005
    first = found["results"][0]
    assert first["policy"] == "prioritized-lru"
    assert first["written_bytes"]["cold"] == first["written"]["cold"] * 2048
    assert first["ratio"] <= found["bounds"]["Belady"] <= found["bounds"]["no limit"]
    assert {*first["saved_s"]} == {"host", "cold"}


def test_replay_takes_a_model_and_says_what_it_assumes(
    trace: Path, stack: Path, tmp_path: Path, capsys: Any
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    stack.write_text(STACK.replace("1 MiB", "100 MiB").replace("8 MiB", "800 MiB"))
    arguments = ["replay", str(trace), "--config", str(stack), "--model", str(config)]
    assert main([*arguments, "--policies", "prioritized-lru"]) == 0
    out = capsys.readouterr().out
    assert f"a block is 128 KiB (of {config})" in out
    assert "computing takes no time: give --prefill for seconds saved" in out
    assert "cold: stored bytes are 1 of a block's" in out


def test_a_codec_of_known_ratio_counts_in_bytes(trace: Path, stack: Path, capsys: Any) -> None:
    codec = "codecs: [{name: fp8, allow_lossy: [full]}, checksum]"
    stack.write_text(STACK.replace("when: commit", f"when: commit, {codec}"))
    arguments = ["replay", str(trace), "--config", str(stack), "--block-bytes", "4 KiB", "--json"]
    assert main([*arguments, "--policies", "prioritized-lru"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["written_bytes"]["cold"] == result["written"]["cold"] * 2048


def test_a_stack_for_other_blocks_is_replayed_with_the_traces(
    trace: Path, stack: Path, capsys: Any
) -> None:
    stack.write_text("block: {tokens: 16}\nrecord: /nowhere/trace.jsonl\n" + STACK)
    arguments = ["replay", str(trace), "--config", str(stack), "--block-bytes", "4 KiB"]
    assert main(arguments) == 0
    assert "blocks of 512 tokens" in capsys.readouterr().out


def test_warnings_and_progress_go_to_standard_error(trace: Path, stack: Path, capsys: Any) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 1')
    arguments = ["replay", str(trace), "--config", str(stack), "--block-bytes", "4 KiB", "--json"]
    assert main([*arguments, "--progress", "--policies", "prioritized-lru"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["trace"]["warnings"]
    assert f"kvladder: warning: {trace}:401: the last line is cut" in captured.err
    assert "replay prioritized-lru: 400 of 400, 0 s left" in captured.err


WRONG = [
    ("replay", "", "--model: the size of a block is not known (expected --model"),
    ("plan", "", "--model: the size of a block is not known (expected --model"),
    ("plan", "--block-bytes many", "--block-bytes: 'many'"),
    ("plan", "--block-bytes 4096 --model x", "--block-bytes: given with --model"),
    ("plan", "--block-bytes 4096 --block-tokens 0", "--block-tokens: 0"),
    ("plan", "--block-bytes 4096 --prefill -1", "--prefill: -1.0"),
    ("plan", "--block-bytes 4096 --prefill nan", "--prefill: nan"),
    ("plan", "--block-bytes 4096 --prices memory=-2", "--prices: -2.0"),
    ("plan", "--block-bytes 4096 --prices ram=2", "--prices: 'ram=2' (expected NAME=VALUE"),
    ("plan", "--block-bytes 4096 --prices disk=low", "--prices: 'low' (expected a number)"),
    ("plan", "--block-bytes 4096 --disk-read fast", "--disk-read: 'fast'"),
    ("plan", "--block-bytes 4096 --budget 0", "--budget: 0.0"),
    ("plan", "--block-bytes 4096 --policy best", "--policy: unknown policy 'best'"),
    ("plan", "--block-bytes 4096 --prices /none.yaml", "/none.yaml: No such file"),
    ("plan", "--block-bytes 1GiB --most disk=2GiB", "--most disk: 2 GiB holds 1 block, less"),
    ("plan", "--block-bytes 1GiB --most memory=2GiB", "--most memory: 2 GiB holds 2 blocks"),
    ("replay", "--block-bytes 4096 --policies a,b", "--policies: unknown policy 'a'"),
    ("replay", "--block-bytes 4096 --speeds far=1GB", "--speeds: 'far=1GB' (expected NAME="),
    ("replay", "--block-bytes 4096 --speeds cold=x", "--speeds: 'x'"),
    ("replay", "--block-bytes 4096 --ratios cold=7", "--ratios: '7'"),
    ("replay", "--block-bytes 4096 --ratios cold", "--ratios: 'cold' (expected NAME="),
    ("replay", "--block-bytes 1MiB", "tiers[1].capacity: 8 MiB holds 8 blocks, less"),
]


@pytest.mark.parametrize(("command", "more", "says"), WRONG)
def test_wrong_arguments_are_refused(
    trace: Path, stack: Path, capsys: Any, command: str, more: str, says: str
) -> None:
    config = ["--config", str(stack)] if command == "replay" else []
    assert main([command, str(trace), *config, *more.split()]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("kvladder: ")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "not a mapping (expected memory, disk, gpu)"),
        ("ram: 3", ": ram: unknown key (expected numbers for memory, disk, gpu)"),
        ("memory: cheap", ": memory: 'cheap'"),
        ("disk: -1", ": disk: -1.0 (expected 0 or more)"),
        ("disk: [", "expected valid YAML"),
    ],
)
def test_wrong_prices_are_refused(
    trace: Path, tmp_path: Path, capsys: Any, text: str, says: str
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(text)
    assert main(["plan", str(trace), "--block-bytes", "4 KiB", "--prices", str(prices)]) == 2
    assert says in capsys.readouterr().err


def test_a_stack_without_tiers_is_refused(trace: Path, stack: Path, capsys: Any) -> None:
    stack.write_text("gpu: {memory: 1 GiB}")
    assert main(["replay", str(trace), "--config", str(stack), "--block-bytes", "4096"]) == 2
    assert f"{stack}: it has no tiers to replay over" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_a_wrong_line_is_named(trace: Path, stack: Path, capsys: Any, command: str) -> None:
    trace.write_text('{"timestamp": 1, "input_length": 4, "hash_ids": [null]}\n')
    config = ["--config", str(stack)] if command == "replay" else []
    assert main([command, str(trace), *config, "--block-bytes", "4 KiB"]) == 2
    assert capsys.readouterr().err == (
        f"kvladder: {trace}:1: hash_ids[0]: null None (expected a number or text, and no hole)\n"
    )


@pytest.mark.slow
def test_the_command_runs_as_a_process(trace: Path, stack: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvladder", "plan", trace, "--block-bytes", "4 KiB"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "plan: " in done.stdout


def test_the_commands_of_the_page_are_understood() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "plan.md"
    lines = [text for text in page.read_text().splitlines() if text.startswith("kvladder ")]
    assert {text.split()[1] for text in lines} == {"bench", "plan", "replay"}
    for text in lines:
        words = shlex.split(text, comments=True)[1:]
        _, given, _ = commands().parse(words)
        if words[0] == "bench":
            target(given["medium"], _mapping(given["settings"])).level(1 << 30)
        else:
            assert given["trace"] == Path("trace.jsonl")
