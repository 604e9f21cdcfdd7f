"""Digests of models in memory: whatever differs is seen, on the host and on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig

from kvladder.connectors import weights
from kvladder.connectors.weights import model_digest, on_device, on_host

Digest = Callable[[torch.Tensor], bytes]
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex128,
    torch.float8_e4m3fn, torch.int8, torch.bool,
]  # fmt: skip


@pytest.fixture(params=[on_host, on_device])
def digest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Digest:
    """Return the digest made in two ways, once in pieces that end inside a tensor."""
    monkeypatch.setattr(weights, "PIECE", 16)
    found: Digest = request.param
    return found


def changes(flat: torch.Tensor) -> list[torch.Tensor]:
    """A tensor with each of its elements negated, with neighbours swapped, and turned around."""
    found = [flat.clone() for _ in range(2 * len(flat) - 1)]
    for at, one in enumerate(found[: len(flat)]):
        one[at] *= -1
    for at, one in enumerate(found[len(flat) :]):
        one[at], one[at + 1] = flat[at + 1], flat[at]
    return [*found, flat.flip(0), flat * -1, flat + 1]


def test_every_element_and_its_place_count(digest: Digest) -> None:
    flat = torch.arange(1.0, 41.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        variants = [flat.to(dtype), *changes(flat.to(dtype))]
        assert len({digest(one) for one in variants}) == len(variants)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_has_a_digest(digest: Digest, dtype: torch.dtype) -> None:
    zeros = torch.zeros(5, 7).to(dtype)
    ones = [zeros.clone() for _ in range(35)]
    for at, one in enumerate(ones):
        one.view(-1)[at] = torch.ones(()).to(dtype)
    assert len({digest(one) for one in [zeros, *ones]}) == 36
    assert digest(zeros) == digest(zeros.t().contiguous().t())
    assert digest(zeros[:0]) == digest(zeros[:0])
    assert digest(zeros[0, 0]) != digest(ones[0][0, 0])


@pytest.mark.gpu
def test_a_device_gives_the_sum_that_the_host_gives() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    flat = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    assert on_device(flat.cuda()) == on_device(flat)


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
