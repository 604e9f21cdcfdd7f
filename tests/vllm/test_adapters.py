"""LoRA adapters and the model itself over one cache: each finds only its own blocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.vllm.conftest import Start
from tests.vllm.harness import HITS, PROMPTS, stack

PAIR = PROMPTS[:2]
ALL = len(PAIR) * HITS
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def adapter(folder: Path, seed: int) -> Path:
    """A random adapter of rank 8 for tests' llama."""
    random, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(4):
        for name, size in (("q_proj", 256), ("v_proj", 128)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(8, 256, generator=random) * 0.3
            tensors[f"{path}.lora_B.weight"] = torch.randn(size, 8, generator=random) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def ask(number: int = 0, path: Path | None = None) -> list[Any]:
    """A step: the prompts, of the model alone or with an adapter that has this number."""
    named = {} if path is None else {"adapter": [number, str(path)]}
    return ["each", {"prompts": PAIR, **named}]


def replaced(late: Path, soon: Path, other: Path) -> list[Any]:
    """Return steps in which two adapters get the files of another, under their names and paths.

    One changes before its first request, the other between its unload and its reload.
    """
    anew = {"unload": 4, "replace": [str(soon), str(other)], "load": [5, str(soon)]}
    return [
        ["adapters", {"load": [3, str(late)]}],
        ["adapters", {"replace": [str(late), str(other)]}],
        *[ask(3, late), ask(4, soon), ["adapters", anew], ask(5, soon), ["reset"], ask(5, soon)],
    ]


def test_adapters_find_only_their_own_blocks(start: Start, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", 1), adapter(tmp_path / "other", 2)
    three = [ask(), ask(1, one), ask(2, other)]
    reference = [found["tokens"] for found in start(None, *three, engine=LORA).finish()]
    assert len({str(tokens) for tokens in reference}) == 3
    late, soon = (shutil.copytree(one, tmp_path / name) for name in ("late", "soon"))
    extra = stack(tmp_path / "kv")
    steps = [*three, ["reset"], *three, *replaced(late, soon, other), ["reset"], ["damage"]]
    run = start(extra, *steps, ask(1, one), ["shutdown"], engine=LORA)
    *found, _, damaged, wrong, _ = run.finish()
    cold, warm = found[:3], found[4:7]
    unasked, before, _, begun, _, fresh = found[9:15]
    assert [each["tokens"] for each in (unasked, before)] == [reference[1]] * 2, "what vLLM read"
    assert sum(begun["cached"]) == ALL, "vLLM's own cache has blocks of the adapter before"
    assert (fresh["tokens"], fresh["external"]) == (reference[2], 0), "which are nobody's"
    assert [each["tokens"] for each in cold] == [each["tokens"] for each in warm] == reference
    assert [each["external"] for each in cold] == [0, 0, 0]
    assert [each["external"] for each in (*warm, wrong)] == [ALL] * 4
    assert damaged > 0
    assert all(a != b for a, b in zip(wrong["tokens"], reference[1], strict=True))
    shutil.rmtree(other)
    shutil.copytree(one, other)  # other weights under the same name and path
    later = [ask(3, late), ask(4, soon)]
    run = start(extra, ask(1, other), ask(2, one), ask(), *later, ["shutdown"], engine=LORA)
    changed, same, plain, unasked, fresh, _ = run.finish()
    assert [each["external"] for each in (changed, same, plain)] == [0, ALL, ALL]
    assert [each["tokens"] for each in (changed, same)] == [reference[1]] * 2
    assert [each["tokens"] for each in (unasked, fresh)] == [reference[2]] * 2
    assert [each["external"] for each in (unasked, fresh)] == [0, ALL]
    assert plain["tokens"] == reference[0]
