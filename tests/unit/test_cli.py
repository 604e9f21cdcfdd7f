"""The command line: output and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from kvladder.cli import main
from kvladder.cli.stats import COLUMNS, _table
from kvladder.errors import ConfigError, LayoutError
from kvladder.planning.models import bytes_per_token

STACK = """
arena: {size: 1 GiB}
tiers:
  - {type: host}
  - {name: cold, type: memory, capacity: 4 GiB}
"""
WARNED = "  - {name: far, type: memory, capacity: 4 GiB, codecs: [zstd]}\n"
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch):
    monkeypatch.delenv("KVLADDER__ARENA__SIZE", raising=False)


@pytest.fixture
def stack(tmp_path):
    path = tmp_path / "stack.yaml"
    path.write_text(STACK)
    return path


@pytest.fixture
def model(tmp_path):
    """Write a model's config.json; returns its path."""

    def write(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_check_prints_the_resolved_stack(stack, capsys):
    assert main(["check", str(stack)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("OK\n\nstack of 2 levels")
    assert "level 1: cold (memory)" in out
    assert "blocks," not in out


def test_check_begins_with_the_verdict_and_shows_changed_settings(stack, capsys):
    def settings(*more):
        assert main(["check", str(stack), *more]) == 0
        out = capsys.readouterr().out
        return out, {line.split()[0] for line in out.splitlines() if re.match(r"  \w", line)}

    brief, given = settings("--offline")
    whole, known = settings("--offline", "--all")
    assert given - {"fetch.when"} == {"arena.size", "type", "capacity", "name"}
    assert known > given | {"arena.reserve", "timeout"}
    assert "default" not in brief.replace("settings that are not defaults", "")
    assert brief.startswith("OK\n\n")
    assert whole.startswith("OK\n\n")
    stack.write_text(STACK + WARNED + WARNED.replace("far", "farther"))
    (answer, first, second, *_) = settings("--offline")[0].splitlines()
    assert answer == "OK, 2 warnings"
    assert first.startswith("  warning: tiers[2].codecs: without checksum")
    assert second.startswith("  warning: tiers[3].codecs: without checksum")
    stack.write_text(STACK + WARNED)
    assert settings("--offline")[0].startswith("OK, 1 warning\n  warning: tiers[2]")


def test_sizes_are_printed_in_readable_units(stack, capsys):
    stack.write_text(STACK.replace("4 GiB", "60499407667"))
    assert main(["check", str(stack), "--all"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"capacity +56\.34 GiB +file", out)
    assert "bytes" not in out


def test_check_with_a_model_prints_blocks_and_tokens(stack, model, capsys):
    arguments = ["check", str(stack), "--model", str(model(LLAMA)), "--block-tokens", "128"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    block = 128 * 2 * 32 * 8 * 128 * 2
    assert block == 16 << 20
    assert "1 block = 128 tokens = 16 MiB\n" in out
    assert "64 blocks, 8192 tokens" in out
    assert "assumed" not in out


def test_check_prints_its_assumptions(stack, model, capsys):
    path = model({**LLAMA, "head_dim": 64})
    assert main(["check", str(stack), "--model", str(path.parent), "--dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    assert 16 * 2 * 32 * 8 * 64 == 512 << 10
    assert "1 block = 16 tokens = 512 KiB\n" in out
    assert "assumed 16 tokens per block: set --block-tokens to the engine's number" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "fp8"], "kvladder: --dtype: has no effect without a model (add --model)"),
        (["--block-tokens", "0"], "kvladder: --block-tokens: 0 (expected 1 or more)"),
        (["--model", "/no/such/file"], "kvladder: /no/such/file: No such file"),
    ],
)
def test_wrong_arguments_exit_with_2(stack, capsys, arguments, says):
    assert main(["check", str(stack), *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_an_unknown_dtype_exits_with_2_and_names_those_that_are_known(stack, model, capsys):
    arguments = ["check", str(stack), "--model", str(model(LLAMA)), "--dtype", "fp3"]
    assert main(arguments) == 2
    assert (
        "unsupported dtype 'fp3' (set --dtype to one of: bfloat16, float16,"
        in capsys.readouterr().err
    )


def test_a_wrong_file_exits_with_2_and_says_where(stack, capsys):
    stack.write_text(STACK.replace("capacity", "capasity"))
    assert main(["check", str(stack)]) == 2
    expected = f"kvladder: {stack}: tiers[1].capasity: unknown key (did you mean 'capacity'?)\n"
    assert capsys.readouterr().err == expected


def test_blocks_that_do_not_fit_exit_with_2(stack, model, capsys):
    stack.write_text(STACK.replace("4 GiB", "1 MiB"))
    assert main(["check", str(stack), "--model", str(model(LLAMA))]) == 2
    assert "tiers[1].capacity: 1 MiB holds 0 blocks" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_pipe", "code", "says"),
    [(True, 141, ""), (False, 1, "kvladder: standard output: No space left on device\n")],
    ids=["a pipe without a reader", "a full disk"],
)
def test_a_closed_or_full_output_ends_a_command_without_a_traceback(stack, *, is_pipe, code, says):
    read, write = os.pipe() if is_pipe else (None, os.open("/dev/full", os.O_WRONLY))
    if read is not None:
        os.close(read)
    command = "import sys; from kvladder.cli import main; sys.exit(main())"
    run = subprocess.run(
        [sys.executable, "-c", command, "check", str(stack)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (code, says)


@pytest.mark.parametrize("told", ["1.2.3", "(run from its source tree)"])
def test_the_version_is_printed(capsys, monkeypatch, told):
    def version(name):
        if told.startswith("("):
            raise PackageNotFoundError(name)
        return told

    monkeypatch.setattr("kvladder.cli.version", version)
    for flag in ("--version", "-V"):
        assert main([flag]) == 0
        assert capsys.readouterr().out == f"kvladder {told}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["check"], ["chekc", "x"], ["check", "x", "--block-tokens", "x"]]
)
def test_usage_errors_exit_with_2(capsys, arguments):
    assert main(arguments) == 2
    assert "Usage: kvladder" in capsys.readouterr().err


# ---- bytes per token of models


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LLAMA, 2 * 32 * 8 * 128 * 2),
        ({**LLAMA, "num_key_value_heads": None}, 2 * 32 * 32 * 128 * 2),
        ({**LLAMA, "dtype": "float32"}, 2 * 32 * 8 * 128 * 4),
        ({**LLAMA, "head_dim": 80}, 2 * 32 * 8 * 80 * 2),
        (
            {
                **LLAMA,
                "layer_types": ["full_attention", "sliding_attention"] * 16,
                "sliding_window": 64,
            },
            2 * 32 * 8 * 128 * 2,
        ),
        ({"architectures": ["X"], "text_config": LLAMA}, 2 * 32 * 8 * 128 * 2),
        (
            {**LLAMA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            61 * (512 + 64) * 2,
        ),
    ],
    ids=["gqa", "mha", "dtype", "head_dim", "sliding", "multimodal", "mla"],
)
def test_bytes_per_token_follow_the_configuration(model, content, expected):
    assert bytes_per_token(model(content)) == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers: '32'"),
        ({**LLAMA, "kv_lora_rank": 512}, "qk_rope_head_dim: missing"),
        ({**LLAMA, "torch_dtype": "int3"}, "dtype 'int3'"),
        ({**LLAMA, "layer_types": ["odd"] * 32}, "layer_types: unknown kinds odd"),
        ({**LLAMA, "layer_types": ["attention"]}, "1 kinds for 32 layers"),
        ({**LLAMA, "mamba_d_state": 16}, "mamba_d_state: kvladder does not know"),
        ({"model_type": "mamba", "dtype": "float32"}, "some layers cache something other than"),
    ],
)
def test_a_layout_is_not_guessed(model, content, says):
    with pytest.raises(LayoutError, match=says):
        bytes_per_token(model(content))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_files_without_a_model_configuration_are_refused(model, content):
    with pytest.raises(ConfigError, match=r"not JSON|not a JSON object"):
        bytes_per_token(model(content))


def test_columns_of_statistics_do_not_run_together():
    level = dict.fromkeys(COLUMNS, 12_345_678_901)
    states = {"get": 2, "put": 2}
    counts = {
        "arena": {"slots": 1, "free": 1},
        "a-level-with-a-long-name": level,
        "nvme": {**level, "blocks": 1, "breakers": states},
    }
    first, header, *rows = _table("socket", counts)
    assert header.split() == [*COLUMNS, "breaker"]
    for row, name in zip(rows, ("a-level-with-a-long-name", "nvme"), strict=True):
        cells = re.split(" {2,}", row)
        assert cells[0] == name
        assert len(cells) == len(COLUMNS) + 2
    assert rows[1].endswith("  open: get, open: put")
    assert len({len(line) for line in (header, *rows)}) == 1
    misses = {"none": {"never_seen": 812}, "nvme": {"late": 4, "evicted": 96}}
    *same, last = _table("socket", {**counts, "misses": {"blocks": misses}})
    assert same == [first, header, *rows]
    assert last == "blocks not served: 812 never_seen, 96 evicted (nvme), 4 late (nvme)"
