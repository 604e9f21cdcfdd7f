"""The fingerprint of a rank's weights covers every tensor, and writes are noticed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvladder.connectors.vllm.identity.loaded import OFFLOADER, Loaded, models_of, tensors_of
from kvladder.errors import ConfigError


class Packed(nn.Module):
    """A linear layer as vLLM's on a CPU, with packed weights that cannot be read."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.input_size_per_partition = weight.shape[1]
        self.params_dtype = weight.dtype
        self.hidden = lambda x: torch.nn.functional.linear(x, weight)
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: layer.hidden(x))


class Layer(nn.Module):
    """One of a model's layers; its parts may be of any kind."""

    attention: Any
    norm: Any
    up: Any

    def __init__(self, number: int, weight: torch.Tensor) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.register_buffer("_k_scale", torch.tensor(1.0))
        self.norm = nn.Linear(4, 4).requires_grad_(False)
        self.norm.weight.copy_(torch.arange(16.0).view(4, 4) + number)
        self.norm.bias.zero_()
        self.up = Packed(weight)


class Model(nn.Module):
    """A model with attention layers and a method to load a checkpoint."""

    def __init__(self, *, inputs: int = 8, shift: float = 0.0) -> None:
        super().__init__()
        weight = torch.arange(6.0 * inputs).view(6, inputs) + shift
        self.layers: Any = nn.ModuleList([Layer(number, weight) for number in range(2)])
        self.cache: Any
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def load_weights(self, weights: Any) -> set[str]:
        for name, value in weights:
            self.get_parameter(name).data.copy_(value)  # vLLM's loaders write in this way
        return set()


def layers_of(model: Any, prefix: str = "model") -> dict[str, Any]:
    return {f"{prefix}.{n}": layer.attention for n, layer in enumerate(model.layers)}


@pytest.fixture
def load() -> Iterator[Callable[[Any], Loaded]]:
    found: list[Loaded] = []

    def begin(model: Any) -> Loaded:
        found.append(Loaded(layers_of(model)))
        return found[-1]

    yield begin
    for one in found:
        one.close()
        one.close()


@pytest.mark.slow
def test_the_models_around_the_layers_are_found_drafts_included() -> None:
    model, draft, other = Model(), Model(), Model()
    layers = {**layers_of(model, "m"), **layers_of(draft, "draft"), "no module": object()}
    assert models_of(layers) == {"draft.0": draft, "m.0": model}
    wrapper = nn.Sequential(model)
    assert models_of(layers_of(model)) == {"model.0": wrapper}
    with pytest.raises(ConfigError, match="the model that computes the KV is not found"):
        Loaded({"l0": object()})
    del other, wrapper
    gc.collect()


@pytest.mark.slow
def test_every_tensor_names_blocks_unless_the_configuration_implies_it(
    load: Callable[[Any], Loaded],
) -> None:
    model = Model()
    loaded = load(model)
    first = loaded.fingerprint()
    assert load(Model()).fingerprint() == first, "of another process, too"
    found = {first}
    tensors: list[Any] = [*model.parameters(), *(one.attention._k_scale for one in model.layers)]
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.data.view(-1)
            flat[-1] += 1
            found.add(loaded.fingerprint())
            flat[-1] -= 1
    assert len(found) == 1 + 4 + 2
    model.cache += 1
    assert loaded.fingerprint() == first


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [8, 128, 129, 1000])
def test_packed_weights_name_blocks(load: Callable[[Any], Loaded], inputs: int) -> None:
    model = Model(inputs=inputs)
    loaded = load(model)
    found = {loaded.fingerprint()}
    weight = torch.arange(6.0 * inputs).view(6, inputs)
    changed = [weight.clone() for _ in range(3)]
    changed[0][3, -1] += 1
    changed[1][:, 0] = -1
    changed[2][:, [0, inputs - 1]] = weight[:, [inputs - 1, 0]]
    for one in changed:
        model.layers[0].up.hidden = lambda x, one=one: torch.nn.functional.linear(x, one)
        found.add(loaded.fingerprint())
    assert len(found) == 4
    model.layers[0].up.hidden = lambda x: torch.nn.functional.linear(x, weight)
    assert loaded.fingerprint() in found


def test_layers_made_for_adapters_have_the_same_names() -> None:
    plain, lora = Model(), Model()
    for layer in lora.layers:
        inner, layer.norm = layer.norm, nn.Module()
        layer.norm.base_layer = inner
    names = [[name for name, _ in tensors_of(one)] for one in (plain, lora)]
    assert sorted(names[0]) == sorted(names[1])


@pytest.mark.slow
def test_every_write_to_the_weights_is_noticed(load: Callable[[Any], Loaded]) -> None:
    model = Model()
    loaded = load(model)
    parameter = model.layers[0].norm.weight

    def in_place() -> None:
        with torch.no_grad():
            parameter.copy_(parameter + 1)

    def in_inference() -> None:
        with torch.inference_mode():
            parameter.copy_(parameter + 1)

    ways: list[Callable[[], object]] = [
        in_place,
        in_inference,
        lambda: model.load_weights([("layers.0.norm.weight", torch.zeros(4, 4))]),
        lambda: model.layers[1].norm.register_parameter("weight", nn.Parameter(torch.ones(4, 4))),
        lambda: setattr(model.layers[1].norm, "bias", nn.Parameter(torch.ones(4))),
    ]
    found = {loaded.fingerprint()}
    for write in ways:
        assert not loaded.touched()
        write()
        assert loaded.touched()
        found.add(loaded.fingerprint())
    assert len(found) == 1 + len(ways)
    Model()
    assert not loaded.touched(), "that was another model"
    parameter.data.copy_(torch.ones(4, 4) * 9)
    assert not loaded.touched(), "what the page says needs a reset"
    assert loaded.fingerprint() not in found


def test_half_loaded_weights_have_no_name(load: Callable[[Any], Loaded]) -> None:
    model = Model()
    loaded = load(model)
    first = loaded.fingerprint()
    norm = model.layers[0].norm
    weight = norm.weight
    norm.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"norm\.weight is not in memory"):
            loaded.fingerprint()
        assert loaded.touched(), "until they are all there"
    norm.weight = weight
    assert loaded.fingerprint() == first
    assert not loaded.touched()


@pytest.mark.slow
def test_prefetched_weights_are_read_where_they_stay(
    load: Callable[[Any], Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers share a buffer on the device, and the parameters are that buffer."""
    plain, model = Model(), Model()
    kept = [layer.norm.weight.data.clone() for layer in model.layers]
    buffer = torch.zeros(4, 4)
    offloaders = []
    for layer, stays in zip(model.layers, kept, strict=True):
        layer.norm.weight.data = buffer
        one = SimpleNamespace(_param=layer.norm.weight, _cpu_storage=stays)
        offloaders.append(SimpleNamespace(_param_offloaders={"norm.weight": one}))
    prefetching = SimpleNamespace(module_offloaders=offloaders)
    module = SimpleNamespace(get_offloader=lambda: prefetching)
    monkeypatch.setitem(sys.modules, OFFLOADER, module)
    loaded, found = load(model), set[bytes]()
    for needed in (*kept, torch.ones(4, 4)):
        buffer.copy_(needed)
        assert not loaded.touched() or not found, "a layer's turn is no change"
        found.add(loaded.fingerprint())
    for stays in kept:
        stays[-1, -1] += 1
        found.add(loaded.fingerprint())
    assert len(found) == 3
    del offloaders[0]._param_offloaders["norm.weight"]._cpu_storage
    with pytest.raises(RuntimeError, match="does not show where offloaded weights are"):
        loaded.fingerprint()
    prefetching.module_offloaders = []
    for layer, stays in zip(model.layers, kept, strict=True):
        stays[-1, -1] -= 1
        layer.norm.weight.data = stays
    assert load(plain).fingerprint() == loaded.fingerprint() in found, "the flag may change"


@pytest.mark.slow
def test_watching_leaves_nothing_on_a_model() -> None:
    model = Model()
    loaded = Loaded(layers_of(model))
    assert "load_weights" in vars(model)
    loaded.close()
    assert "load_weights" not in vars(model)
