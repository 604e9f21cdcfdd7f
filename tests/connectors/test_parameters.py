"""Digests of models in memory: every parameter counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig

from kvladder.connectors.digests import model_digest


def make_model(*, seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 256}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, **options)).eval()


def test_different_models_have_different_digests() -> None:
    one = model_digest(make_model())
    assert one == model_digest(make_model())
    assert one != model_digest(make_model(seed=2))
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    assert one != model_digest(make_model(rope_parameters=rope))


def test_each_row_of_each_parameter_counts() -> None:
    model = make_model()
    found = {model_digest(model)}
    for value in model.state_dict().values():
        rows = value.view(value.shape[0], -1)
        for at in (0, 1, len(rows) // 3, len(rows) - 1):
            rows[at] *= -1
            found.add(model_digest(model))
            rows[at] *= -1
    assert len(found) == 1 + 4 * len(model.state_dict())
    assert model_digest(model) in found
