"""``kvladder eval``: the effect of codecs on a model's answers, and limits to it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvladder.cli import main
from kvladder.cli.evaluate import _chosen
from kvladder.errors import ConfigError
from tests.connectors.test_transformers import make_model, prompts_of
from tests.connectors.test_transformers_states import make_model as hybrid_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and prompts for both."""
    folder = tmp_path_factory.mktemp("eval")
    for name in ("llama", "gemma3"):
        make_model(name, initializer_range=0.1).save_pretrained(folder / name)
    lines = [json.dumps(prompt) for prompt in prompts_of(3, shared=40, own=33)]
    (folder / "prompts").write_text("\n\n".join(lines))
    return folder


def report(
    folder: Path, capsys: Any, *more: str, model: str = "llama", prompts: str = "prompts"
) -> tuple[int, str, str]:
    files = ["--model", str(folder / model), "--prompts", str(folder / prompts)]
    code = main(["eval", *files, *more])
    said = capsys.readouterr()
    return code, said.out, said.err


def numbers(out: str) -> dict[str, list[float]]:
    """Return the numbers of a report by their labels."""
    lines = [line.partition(" ") for line in out.splitlines()[1:]]
    return {
        name: [float(one.rstrip("%")) for one in re.findall(r"[-+]?\d[\d.e+-]*%?", rest)]
        for name, _, rest in lines
    }


def test_a_lossless_codec_changes_no_output(folder: Path, capsys: Any) -> None:
    limits = ["--max-divergence", "0", "--min-agreement", "1"]
    for codec in ("zstd", "[{name: zstd, level: 3, min_saving: 0}, checksum]"):
        code, out, err = report(folder, capsys, "--codec", codec, *limits)
        assert (code, err) == (0, "")
        told = numbers(out)
        assert told["divergence"] == [0, 0]
        assert told["perplexity"][0] == told["perplexity"][1]
        assert told["agreement"] == [100]
        assert "3 prompts, 126 tokens compared" in out  # all but two blocks of each


def test_a_lossier_codec_changes_more_output_and_saves_bytes(folder: Path, capsys: Any) -> None:
    """Gemma 3: windows alone, layers with full attention alone, and both."""
    found = {}
    for kinds in ("window", "full", "window,full"):
        said = ["--codec", "fp8", "--kinds", kinds]
        code, out, _ = report(folder, capsys, *said, model="gemma3")
        assert code == 0
        found[kinds] = numbers(out)
        assert ("not on full" in out) == (kinds == "window")
        ratio = found[kinds]["bytes"][-1]
        assert ratio == pytest.approx((32 + 4) / (32 * 4), abs=0.001)  # 8 bits and a scale a row
    both = found["window,full"]
    assert both["divergence"][0] > 1e-6
    assert all(found[one]["divergence"][0] < both["divergence"][0] for one in ("window", "full"))
    assert both["divergence"][1] >= both["divergence"][0]


def test_narrower_types_and_windows_of_pools_cost_more(folder: Path, capsys: Any) -> None:
    """Llama and Gemma 3; the model's own type and its own windows change nothing."""
    sizes = {"float32": 1.0, "bfloat16": 0.5, "fp8": 40 / 128, "float8_e5m2": 40 / 128}
    found: dict[str, list[float]] = {}
    for model in ("llama", "gemma3"):
        for dtype, ratio in sizes.items():
            given = ["--gpu", f"{{dtype: {dtype}}}", "--tokens", "80"]
            code, out, err = report(folder, capsys, *given, model=model)
            assert (code, err) == (0, "")
            assert f"pools with dtype {dtype}; 3 prompts, 126 tokens compared" in out
            told = numbers(out)
            assert told["bytes"][-1] == pytest.approx(ratio, abs=0.02)
            found[dtype] = told["divergence"]
        least, *_ = costs = [found[dtype][0] for dtype in sizes]
        assert costs == sorted(costs)
        assert least < 1e-9 < costs[1] < costs[2] < costs[3]
    for windows, own in (("[1000]", True), ("[4, 0]", False), ("[4]", False)):
        given = ["--gpu", f"{{windows: {windows}}}", "--tokens", "80"]
        _, out, _ = report(folder, capsys, *given)
        found[windows] = numbers(out)["divergence"]
        assert (found[windows][0] < 1e-9) == own
        assert (numbers(out)["bytes"][-1] == 1) == own
    assert found["[4, 0]"][0] < found["[4]"][0]
    limits = ["--max-divergence", str(found["[4]"][0] / 2)]
    code, _, err = report(folder, capsys, "--gpu", "{windows: [4], dtype: fp8}", *limits)
    assert code == 1
    assert "expected at most" in err


def test_models_with_states_have_types_too(tmp_path: Path, capsys: Any) -> None:
    hybrid_model("qwen3-next", initializer_range=0.1).save_pretrained(tmp_path / "hybrid")
    (tmp_path / "prompts").write_text(json.dumps(prompts_of(1)[0]))
    costs = []
    for dtype in ("auto", "fp8"):
        given = ["--gpu", f"{{dtype: {dtype}}}", "--tokens", "64"]
        code, out, err = report(tmp_path, capsys, *given, model="hybrid")
        assert (code, err) == (0, "")
        costs.append(numbers(out)["divergence"][0])
    assert costs[0] < 1e-9 < costs[1]


def test_a_limit_that_is_exceeded_exits_with_1_after_the_report(folder: Path, capsys: Any) -> None:
    said = ["--codec", "fp8", "--max-divergence", "1e-9", "--min-agreement", "1.01"]
    code, out, err = report(folder, capsys, *said)
    assert code == 1
    assert "perplexity" in out
    divergence, agreement = err.removeprefix("kvladder: ").split("; ")
    assert re.fullmatch(r"divergence \S+: expected at most 1e-09", divergence)
    assert re.fullmatch(r"agreement \S+: expected at least 1.01\n", agreement)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--codec", "fp9"], r"--codec: .*'fp9'.*fp8"),
        (["--codec", "[zstd, fp8]"], r"--codec: .*as the engine wrote them"),
        (["--codec", "{name: zstd, levle: 3}"], r"--codec: .*level"),
        (["--codec", "[zstd"], r"--codec: '\[zstd' .*a list of them"),
        ([], r"--codec: missing .*--codec or --gpu"),
        (["--codec", "fp8", "--gpu", "{dtype: fp8}"], r"--codec: given with --gpu"),
        (["--gpu", "{dtype: fp8}", "--kinds", "full"], r"--kinds: full .*leave it out"),
        (["--gpu", "{dtype: fp7}"], r"gpu.dtype: .*'fp8'"),
        (["--gpu", "{windows: [-1]}"], r"gpu.windows\[0\]: "),
        (["--gpu", "{windows: [1, 2, 3, 4]}"], r"gpu.windows: 4 windows .*at most 3"),
        (["--gpu", "{memory: 1 GiB}"], r"--gpu: '{memory: 1 GiB}' .*dtype"),
        (["--gpu", "fp8"], r"--gpu: 'fp8' .*dtype"),
        (["--gpu", "{dtype"], r"--gpu: '{dtype' .*dtype"),
        (["--codec", "fp8", "--kinds", "whole"], r"--kinds: 'whole' .*full, window"),
        (["--codec", "fp8", "--kinds", "window"], r"--kinds: 'window' .*layers are full"),
        (["--codec", "fp8", "--block-tokens", "64"], r"prompts:1: 73 tokens .*128 tokens, or more"),
        (["--codec", "fp8", "--block-tokens", "0"], r"--block-tokens: 0 .*1 or more"),
        (["--codec", "fp8", "--tokens", "31"], r"--tokens: 31 .*32 or more"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, capsys: Any, more: list[str], says: str) -> None:
    code, out, err = report(folder, capsys, *more)
    assert (code, out) == (2, "")
    assert re.search(says, err), err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"--prompts: .*prompts.txt is empty"),
        ("some words", r"--prompts: .*prompts.txt:1 is text, but .*llama has no usable tokenizer"),
        (json.dumps([1] * 40 + [256]), r"prompts.txt:1: token 256 \(expected 0 to 255"),
    ],
)
def test_prompts_that_cannot_be_run_are_refused(
    folder: Path, capsys: Any, text: str, says: str
) -> None:
    (folder / "prompts.txt").write_text(text)
    code, _, err = report(folder, capsys, "--codec", "fp8", prompts="prompts.txt")
    assert code == 2
    assert re.search(says, err), err
    code, _, err = report(folder, capsys, "--codec", "fp8", model="none")
    assert code == 2
    assert re.search(r"--model: .*none.*expected a folder", err), err


def test_codecs_that_encode_no_layer_are_refused_with_the_flag_that_chose_them():
    run = SimpleNamespace(changed=set(), spared={"linear"})
    for said, expected in (
        (None, "--codec: codecs encode no layer: the model's layers are linear"),
        ("full", "--kinds: 'full' selects none: the model's layers are linear"),
    ):
        chosen = _chosen("fp8", None, said)
        with pytest.raises(ConfigError, match=f"^{expected}$"):
            chosen.report(run)
