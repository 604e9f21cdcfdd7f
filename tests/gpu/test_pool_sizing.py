"""Cases Q: exact numbers, from a model's configuration to blocks and sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvladder.cli import main
from kvladder.errors import PlanError
from kvladder.gpu.sizing.divide import blocks_of, divide, kv_bytes_per_token, needed, pool_bytes
from kvladder.gpu.sizing.groups import Group, Layer
from kvladder.gpu.sizing.handlers import ConvState
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.planning.models import kept_by
from tests.gpu import models
from tests.gpu.engine import Engine

GIB = 1 << 30


def test_q1_bytes_per_token_follow_the_layers() -> None:
    assert kv_bytes_per_token(80, 8, 128, 2) == 327_680
    assert kv_bytes_per_token(80, 8, 128, 1) == 163_840
    assert kv_bytes_per_token(80, 64, 128, 2) == 2_621_440
    for at in range(4):
        for wrong in (0, -1):
            sizes = [80, 8, 128, 2]
            sizes[at] = wrong
            with pytest.raises(PlanError, match="expected 1 or more"):
                kv_bytes_per_token(*sizes)


def test_q2_250_000_tokens_take_327_gb() -> None:
    assert kv_bytes_per_token(80, 1, 4096, 1) == 2 * 4096 * 80 == 655_360
    assert kv_bytes_per_token(80, 1, 4096, 2) == 1_310_720
    assert kv_bytes_per_token(80, 1, 4096, 2) * 250_000 == 327_680_000_000


@pytest.mark.parametrize(
    ("itemsize", "context", "fit"), [(1, 8192, 32), (2, 8192, 16), (1, 8193, 31)]
)
def test_q3_sequences_in_40_gib(itemsize: int, context: int, fit: int) -> None:
    block = 16 * kv_bytes_per_token(80, 8, 128, itemsize)
    division = divide([(Group("kv", 16), block)], 40 * GIB, context=context)
    assert division.sequences == fit
    if itemsize == 1:
        assert division.shares[0].blocks * 16 == 32 * 8192
    assert f"{fit} sequences of {context} tokens" in str(division)


def test_q4_pages_of_47_tokens_from_a_list_of_evens_first() -> None:
    assert [blocks_of(tokens, 16) for tokens in (0, 16, 17)] == [0, 1, 2]
    engine = Engine(8, block_tokens=16)
    slots = engine.pool.allocate(8)
    engine.pool.release([slot for slot in slots if slot % 2 == 0])
    engine.pool.release([slot for slot in slots if slot % 2])
    sequence = engine.begin(range(47))
    assert sequence.table == [0, 2, 4]
    memory = np.full((8, 16), -1)
    for position in range(47):
        memory[sequence.table[position // 16], position % 16] = position
    assert memory[sequence.table].reshape(-1)[:47].tolist() == list(range(47))


def test_q5_paging_holds_twelve_where_reserving_holds_two() -> None:
    lengths = [40, 55, 33, 61, 48, 39, 44, 52, 30, 58, 41, 47]
    assert sum(blocks_of(length, 16) for length in lengths) == 39
    engine = Engine(64, block_tokens=16)
    for at, length in enumerate(lengths):
        engine.begin(range(1000 * at, 1000 * at + length))
    assert engine.pool.used == 39
    assert 64 * 16 // 512 == divide([(Group("kv", 16), 1)], 64, context=512).sequences == 2


def test_q6_a_latent_is_counted_once() -> None:
    assert kv_bytes_per_token(61, 1, 576, 2, factor=1) == 61 * 576 * 2
    assert Layer("a", 1, 576, "bfloat16", factor=1).token_bytes == 1152
    assert Layer("a", 1, 576, "bfloat16").token_bytes == 2304


def test_q7_the_first_difference_ends_the_prefix() -> None:
    engine = Engine(32, block_tokens=16, partial="off")
    prompt = list(range(49))
    engine.run(prompt)
    assert engine.run(prompt) == 3 * 16
    for token, hit in ((19, 1), (0, 0)):
        other = list(prompt)
        other[token] += 1000
        assert engine.run(other) == hit * 16
    assert engine.run(prompt, lora="a") == engine.run(prompt, salt="a") == 0


def test_q8_the_least_recently_used_goes_first() -> None:
    engine = Engine(3)
    for start in (0, 100, 200):
        engine.run(range(start, start + 4))
    engine.pool.release(engine.pool.acquire(engine.keys(range(4))))
    engine.run(range(300, 304))
    here = [bool(engine.pool.match(engine.keys(range(s, s + 4)))) for s in (0, 100, 200, 300)]
    assert here == [True, False, True, True]


def test_q9_the_pool_takes_the_smaller_of_two_bounds() -> None:
    left = {"free": 1000, "other": 100, "peak": 300}
    assert pool_bytes(fraction=0.5, **left) == 300
    assert pool_bytes(fraction=0.5, max_tokens=100, token_bytes=2, **left) == 200
    assert pool_bytes(fraction=0.5, max_tokens=200, token_bytes=2, **left) == 300
    for wrong in (0.0, 1.0, -0.1, 1.5):
        with pytest.raises(PlanError, match="gpu.fraction"):
            pool_bytes(fraction=wrong, **left)
    for short in ({"free": 400}, {"peak": 900}):
        with pytest.raises(PlanError, match="bytes free"):
            pool_bytes(fraction=0.5, **{**left, **short})
    with pytest.raises(PlanError, match="max_tokens"):
        pool_bytes(fraction=0.5, max_tokens=0, **left)


def test_memory_is_divided_by_the_needs_of_each_group() -> None:
    full, near, state = Group("a", 16), Group("b", 16, "window", 128), Group("c", 512, "state")
    assert [needed(one, 4096, 4096) for one in (full, near, state)] == [256, 256, 8]
    assert [needed(one, 4096, 64) for one in (full, near, state)] == [256, 14, 3]
    even = divide([(full, 10), (near, 10)], 27_000, context=4096, step=64)
    assert [share.blocks for share in even.shares] == [2560, 140]
    asked = divide([(full, 10), (near, 10)], 27_000, context=4096, step=64, shares=[3, 1])
    assert [share.blocks for share in asked.shares] == [2025, 675]
    assert "explicit" in str(asked)
    assert "window 128" in str(asked)
    for wrong in ([1], [1, 0], [1, -1]):
        with pytest.raises(PlanError, match="for each of a, b"):
            divide([(full, 10), (near, 10)], 27_000, context=64, shares=wrong)
    with pytest.raises(PlanError, match="hold one sequence"):
        divide([(full, 10)], 100, context=4096)


# ---- real models

KV = "kv"
KINDS = {
    "LLAMA_3_70B": (80, 327_680, {}, 0),
    "MISTRAL_7B": (32, 131_072, {4096: 32}, 0),
    "QWEN2_7B": (28, 57_344, {}, 0),
    "FALCON_7B": (32, 8_192, {}, 0),
    "GPT2": (12, 73_728, {}, 0),
    "DEEPSEEK_V3": (61, 70_272, {}, 0),
    "GEMMA_2_9B": (42, 688_128, {4096: 21}, 0),
    "GEMMA_3_4B": (34, 139_264, {1024: 29}, 0),
    "GEMMA_3_12B": (48, 393_216, {1024: 40}, 0),
    "GEMMA_3N": (20, 40_960, {512: 16}, 0),
    "GLM_4_9B": (40, 40_960, {}, 0),
    "GPT_OSS_20B": (24, 49_152, {128: 12}, 0),
    "JAMBA": (4, 16_384, {}, 28 * (8192 * 16 + 8192 * 3) * 2),
    "QWEN3_NEXT": (12, 24_576, {}, 36 * (32 * 128 * 128 + 8192 * 3) * 2),
    "BAMBA_9B": (3, 12_288, {}, 29 * (128 * 64 * 128 + (8192 + 256) * 3) * 2),
    "NEMOTRON_H_8B": (4, 16_384, {}, 24 * (128 * 64 * 128 + (8192 + 2048) * 3) * 2),
    "FALCON_H1": (36, 18_432, {}, 36 * (48 * 64 * 256 + (3072 + 512) * 3) * 2),
    "ZAMBA_2_7B": (13, 372_736, {}, 81 * (112 * 64 * 64 + (7168 + 256) * 3) * 2),
    "CODESTRAL_MAMBA": (0, 0, {}, 64 * (128 * 64 * 128 + (8192 + 2048) * 3) * 2),
    "LLAMA_4": (48, 196_608, {8192: 36}, 0),
}


def config(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(getattr(models, name)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_real_models_have_their_known_sizes(name: str, tmp_path: Path) -> None:
    count, token_bytes, windows, state_bytes = KINDS[name]
    found = kept_by(config(name, tmp_path)).resources
    layers = [one for one in found if isinstance(one, Layer)]
    assert len(layers) == count
    assert sum(layer.token_bytes for layer in layers) == token_bytes
    near = [layer.window for layer in layers if layer.window is not None]
    assert {window: near.count(window) for window in near} == windows
    plan = CachePlan(found, block_tokens=16, max_tokens=32768).check().group()
    assert sum(one.bytes for one in plan.states) == state_bytes
    assert not plan.alone  # every convolution joins its states
    kinds = [pool.group.kind for pool in plan.pools]
    assert len(kinds) == len(set(kinds))


def test_convolutions_without_states_are_planned_alone(tmp_path: Path, capsys: Any) -> None:
    model = ["--model", str(config("LFM2_1B", tmp_path)), "--memory", "1GiB", "--context", "4096"]
    stack = tmp_path / "stack.yaml"
    stack.write_text("{host: 1 GiB}")
    code, text = size(capsys, *model, "--stack", str(stack), "--checkpoint-tokens", "1024")
    assert code == 0
    assert "a token takes 12 KiB of KV in 6 layers" in text
    assert 10 * 2 * 2048 * 2 == 80 << 10
    assert "a sequence takes 80 KiB of state in 10 layers" in text
    assert "reuse off: 0.conv is not paged" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["QWEN3_NEXT", "NEMOTRON_H_8B", "JAMBA", "LFM2_1B"])
def test_convolutions_keep_the_type_of_the_model(name: str, tmp_path: Path) -> None:
    def convolutions(dtype: str | None) -> list[int]:
        found = kept_by(config(name, tmp_path), dtype=dtype).resources
        return [one.bytes for one in found if isinstance(one, ConvState)]

    assert convolutions("fp8") == convolutions(None) != []


def size(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["size", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.slow
def test_q3_the_command_prints_the_sequences(tmp_path: Path, capsys: Any) -> None:
    model = ["--model", str(config("LLAMA_3_70B", tmp_path)), "--memory", "40GiB"]
    code, text = size(capsys, *model, "--context", "8192", "--dtype", "fp8")
    assert code == 0
    assert "40 GiB: 32 sequences" in text
    assert "a token takes 160 KiB of KV in 80 layers" in text
    assert "16384 blocks of 16 tokens" in text
    assert "40 GiB: 16 sequences" in size(capsys, *model, "--context", "8192")[1]
    assert "31 sequences" in size(capsys, *model, "--context", "8193", "--dtype", "fp8")[1]


@pytest.mark.slow
def test_a_window_holds_its_tokens_and_one_step(tmp_path: Path, capsys: Any) -> None:
    model = ["--model", str(config("GEMMA_3_4B", tmp_path)), "--memory", "40GiB"]
    whole, default, small = (
        size(capsys, *model, "--context", "131072", *step)[1]
        for step in (("--step", "131072"), (), ("--step", "2048"))
    )
    assert "40 GiB: 2 sequences" in whole
    assert "40 GiB: 11 sequences" in default
    assert "computed 8192 at a time" in default
    assert "40 GiB: 14 sequences" in small
    short = size(capsys, *model, "--context", "512", "--step", "1024")[1]
    assert "512 tokens, computed 512 at a time" in short


@pytest.mark.slow
def test_the_command_sizes_a_hybrid_model_with_the_tiers_of_a_stack(
    tmp_path: Path, capsys: Any
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(
        "arena: {size: 1 GiB}\n"
        "tiers:\n- {type: host}\n- {type: files, path: /tmp/kv, capacity: 8 GiB}\n"
    )
    model = str(config("QWEN3_NEXT", tmp_path))
    arguments = ["--model", model, "--memory", "8 GiB", "--context", "4096"]
    code, text = size(capsys, *arguments, "--stack", str(stack))
    assert code == 0
    assert "in 36 layers" in text
    assert "reuse off: 0.state is not paged and no checkpoints are kept" in text
    assert "prefixes" not in text
    code, text = size(capsys, *arguments, "--stack", str(stack), "--checkpoint-tokens", "1024")
    assert "blocks of 1024 tokens" in text
    assert "host: 27 blocks, 0 prefixes of 4096 tokens" in text
    assert "files: 217 blocks" in text
    assert "reuse off" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", "the same number of sequences in each; "),
        (", shares: [3, 1]", "by explicit shares; "),
        (", reuse: false", "reuse off: gpu.reuse is false"),
        (", windows: [0, 64]", "window 64"),
        (", dtype: float32", "2x16-float32"),
    ],
)
def test_the_command_sizes_a_device_by_the_settings_of_a_stack(
    more: str, says: str, tmp_path: Path, capsys: Any
) -> None:
    made = {"model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 128}
    (tmp_path / "config.json").write_text(json.dumps({**made, **heads, "dtype": "bfloat16"}))
    stack = tmp_path / "stack.yaml"
    given = {"--model": str(tmp_path), "--memory": "16 MiB", "--context": "2048", "--step": "64"}
    arguments = [*[part for pair in given.items() for part in pair], "--stack", str(stack)]
    for tiers in ("arena: {size: 1 MiB}\ntiers: [{type: host}]", ""):
        stack.write_text(f"gpu: {{memory: 16 MiB{more}}}\n{tiers}")
        code, text = size(capsys, *arguments)
        assert code == 0
        assert ("host: " in text) == (bool(tiers) and "reuse" not in more)
        assert says in text or not tiers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"--memory": "40 Gib"}, "--memory"),
        ({"--memory": "1 MiB"}, "holds no sequence of 8192 tokens"),
        ({"--step": "0"}, "--step: 0 (expected 1 token or more)"),
        ({"--context": "0"}, "--context: 0 (expected 1 token or more)"),
        ({"--block-tokens": "12"}, "--block-tokens: 12 tokens (expected a power of two above 1)"),
        (
            {"--state-dtype": "fp9"},
            "unsupported state dtype 'fp9' (set --state-dtype to one of: bfloat16,",
        ),
        ({"--checkpoint-tokens": "8"}, "--checkpoint-tokens: 8 tokens"),
        ({"--model": "/nowhere"}, "No such file"),
    ],
)
def test_wrong_arguments_exit_with_2(
    changed: dict[str, str], says: str, tmp_path: Path, capsys: Any
) -> None:
    given = {"--memory": "40 GiB", "--context": "8192"}
    given = {"--model": str(config("LLAMA_3_70B", tmp_path)), **given, **changed}
    code, text = size(capsys, *[part for pair in given.items() for part in pair])
    assert code == 2
    assert says in text
