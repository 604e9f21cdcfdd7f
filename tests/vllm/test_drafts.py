"""Speculative decoding: tokens that were drafted and not accepted leave nothing in the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS, make, stack

ALL = len(PROMPTS) * HITS
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
Tokens = list[list[int]]


def test_answers_with_drafts_from_the_text_are_found_in_the_next_turn(
    start: Start, tmp_path: Path
) -> None:
    spec: dict[str, Any] = {"model": str(make(tmp_path, kind="gemma3"))}
    first = ["each", {"prompts": PROMPTS, "tokens": 60}]
    (alone,) = start(None, first, **spec).finish()
    turns = [[*p, *said] for p, said in zip(PROMPTS, alone["tokens"], strict=True)]
    run = start(
        stack(tmp_path / "kv"),
        first,
        ["drafts"],
        ["reset"],
        ["each", {"prompts": turns}],
        ["reset"],
        ["each", {"prompts": turns, "recompute": True}],
        ["reset"],
        ["damage"],
        ["each", {"prompts": turns}],
        ["shutdown"],
        engine={
            "speculative_config": NGRAMS,
            "prefix_cache_retention_interval": BLOCK,  # windows are kept for answers, too
        },
        **spec,
    )
    cold, (drafted, right), _, warm, _, computed, _, _, wrong, _ = run.finish()
    assert 0 < right < drafted
    assert (cold["external"], cold["tokens"]) == (0, alone["tokens"])
    turn = (len(turns[0]) - 2) // BLOCK * BLOCK  # the last token has no KV yet
    assert turn > HITS
    whole = len(turns) * turn
    assert [one["external"] for one in (warm, computed, wrong)] == [whole, 0, whole]
    assert warm["tokens"] == computed["tokens"]
    assert all(a != b for a, b in zip(wrong["tokens"], warm["tokens"], strict=True))


def eagle_head(model: Path, folder: Path) -> Path:
    """Make a head that drafts from the hidden states of ``model``, using its first layer."""
    kept = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(model / "model.safetensors").items()
        if name.startswith(("model.layers.0.", "model.embed_tokens."))
        and "input_layernorm" not in name
    }
    kept["fc.weight"] = torch.eye(256).repeat(1, 2)
    folder.mkdir()
    save_file(kept, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_blocks_of_drafting_layers_are_kept_beside_the_models(
    start: Start, model: Path, files: Path, tmp_path: Path, reference: Tokens, method: str
) -> None:
    """A draft model with the same weights is right, unless its own KV does not come back."""
    drafter = eagle_head(model, tmp_path / "head") if method == "eagle" else model
    each = ["each", {"prompts": PROMPTS}]
    drafting = {"method": method, "model": str(drafter), "num_speculative_tokens": 2}
    run = start(
        stack(files),  # blocks without a draft model's have other names
        each,
        ["drafts"],
        ["reset"],
        each,
        ["drafts"],
        ["reset"],
        ["damage"],
        each,
        ["shutdown"],
        engine={"speculative_config": drafting},
    )
    cold, before, _, warm, after, _, _, wrong, _ = run.finish()
    assert [one["tokens"] for one in (cold, warm)] == [reference] * 2
    assert [one["external"] for one in (cold, warm, wrong)] == [0, ALL, ALL]
    drafted, right = before
    assert after == [2 * drafted, 2 * right]
    assert drafted > 0
    assert right == (drafted if method == "draft_model" else 0)
    assert all(a != b for a, b in zip(wrong["tokens"], reference, strict=True))
