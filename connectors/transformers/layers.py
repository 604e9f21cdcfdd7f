"""A model's layers in the blocks of a plan's pools, and their view for the model in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvladder.device.memory import PlanMemory
from kvladder.errors import LayoutError
from kvladder.gpu.sizing.adapt import SCALES
from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.planning.collecting import collected

_KNOWN = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
)


class LayerShape(NamedTuple):
    """Keys and values that one layer caches per token, for each of ``heads`` heads."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int
    """Number of tokens that the layer sees; 0 for all."""


class StateShape(NamedTuple):
    """Shapes of one recurrent state of a layer and of its convolution, as in transformers."""

    recurrent: torch.Size
    inputs: torch.Size
    """Channels, and the inputs that transformers keeps; blocks may keep fewer, the newest ones."""


class LayerResources(NamedTuple):
    """Everything that one layer of a model caches."""

    shape: LayerShape | None
    """Shape of its keys and values; None if it has none."""
    states: list[StateShape]
    handlers: list[ResourceHandler]


# ---- learned by running the model


def cache_name(model: Any) -> str:
    """Return the name of the parameter that takes the cache in a model's ``forward``."""
    taken = signature(model.forward).parameters
    return "cache_params" if "cache_params" in taken else "past_key_values"


def takes_positions(model: Any) -> bool:
    """Return whether ``forward`` takes positions; else the model counts the cache's tokens."""
    return "position_ids" in signature(model.forward).parameters


def cache_after(model: Any, *passes: int, cache: Any = None) -> Any:
    """Run passes of these numbers of tokens; return the cache, a new one if none is given."""
    held = DynamicCache(config=model.config) if cache is None else cache
    for count in passes:
        ids = torch.zeros(1, count, dtype=torch.long, device=model.device)
        with torch.inference_mode():
            model(ids, **{cache_name(model): held}, use_cache=True)
    return held


def kept_by_layers(model: Any, *, context: int) -> list[LayerResources]:
    """Return what the layers of ``model`` cache, learned by running it on one token.

    A window of ``context`` tokens or more counts as full attention.

    Raises
    ------
    LayoutError
        A layer caches something that pools cannot hold, or keeps it outside the cache.
    """
    for name, module in model.named_modules():
        if hasattr(module, "recurrent_states"):  # RecurrentGemma, for example
            what = f"{name} keeps its state in the model, not in the cache"
            raise LayoutError(what, hint="expected a model that keeps all its states in the cache")
    kind = type(model).__name__
    hint = "expected a model that keeps everything in transformers' own cache"
    try:
        layers = cache_after(model, 1).layers
    except (AttributeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        what = f"{kind} does not accept transformers' cache: {type(error).__name__}: {said}"
        raise LayoutError(what, hint=hint) from error
    found: list[LayerResources] = []
    for number, (layer, handlers) in enumerate(zip(layers, collected(layers), strict=True)):
        if type(layer) not in _KNOWN:
            what = f"layer {number} caches a {type(layer).__name__}"
            raise LayoutError(what, hint="expected keys and values per token, states, or both")
        found.append(LayerResources(_shape(layer, context), _states(number, layer), handlers))
    if not any(one.handlers for one in found):
        raise LayoutError(f"{kind} does not use the cache object passed to it", hint=hint)
    return found


def _shape(layer: Any, context: int) -> LayerShape | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    window = int(layer.sliding_window) if layer.is_sliding else 0
    window = window if window < context else 0
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window)


def _states(number: int, layer: Any) -> list[StateShape]:
    recurrent: Mapping[int, Any] = getattr(layer, "recurrent_states", {})
    inputs: Mapping[int, Any] = getattr(layer, "conv_states", {})
    kept = [at for at in recurrent if recurrent[at] is not None or inputs[at] is not None]
    for at in kept:  # a layer of experts alone, as in Nemotron-H, has neither
        if recurrent[at] is None or inputs[at] is None:
            what = (
                "a convolution without a state"
                if recurrent[at] is None
                else "a state without a convolution"
            )
            hint = "expected a recurrent state and the convolution before it"
            raise LayoutError(f"layer {number}: {what}", hint=hint)
    return [StateShape(recurrent[at].shape[1:], inputs[at].shape[1:]) for at in kept]


def goes_on(model: Any) -> bool:
    """Return whether a pass of several tokens continues from the states in the cache.

    The classes of Jamba and Mamba 1 start such a pass from nothing. The test: a change of the state
    before the pass must change the state after it.
    """
    one = cache_after(model, 1)
    at = next(at for at, layer in enumerate(one.layers) if hasattr(layer, "recurrent_states"))
    other = deepcopy(one)
    other.layers[at].recurrent_states[0].add_(1.0)
    after = [cache_after(model, 2, cache=cache).layers[at] for cache in (one, other)]
    return not torch.equal(*(layer.recurrent_states[0] for layer in after))


# ---- in the blocks


class TokenPlaces(NamedTuple):
    """Places of tokens: their blocks, and their positions in these, each ``[rows, tokens]``."""

    blocks: torch.Tensor
    within: torch.Tensor

    def last(self, count: int) -> TokenPlaces:
        """Return the places of the last ``count`` tokens of each row."""
        return TokenPlaces(self.blocks[:, -count:], self.within[:, -count:])


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer in its group's blocks: ``[blocks, tokens, heads, size]``."""

    group: int
    shape: LayerShape
    window: int
    """Number of tokens that the layer sees, the model's own window or fewer; 0 for all."""
    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None
    """uint8 ``[blocks, tokens, heads, bytes]``: float32 scales of keys and of values, or one for
    both; None unless the type has 8 bits."""

    @property
    def narrowed(self) -> int:
        """The window, if it is narrower than the model's own; else 0."""
        return 0 if self.window == self.shape.window else self.window

    def seen(self, longest: int, new: int) -> int:
        """Return how many of the longest row's newest tokens a pass of ``new`` tokens reads."""
        return min(longest, self.window - 1 + new) if self.window else longest

    def write(self, places: TokenPlaces, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values ``[rows, heads, tokens, size]`` to these places."""
        at = places.blocks, places.within
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self.scales is None:
            self.keys[at], self.values[at] = keys.to(self.keys.dtype), values.to(self.values.dtype)
            return
        scales = self._scales_of(keys.float(), values.float())
        self.scales[at] = scales.contiguous().view(torch.uint8)
        for memory, states, part in ((self.keys, keys, 0), (self.values, values, -1)):
            scaled = (states.float() / scales[..., part, None]).to(memory.dtype)
            memory.view(torch.uint8)[at] = scaled.view(torch.uint8)

    def _scales_of(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return scales ``[rows, tokens, heads, parts]``; the largest value becomes the type's."""
        assert self.scales is not None
        most = torch.stack((keys.abs().amax(-1), values.abs().amax(-1)), -1)
        if self.scales.shape[-1] == most.element_size():  # one scale for keys, values and all heads
            most = most.amax((-1, -2), keepdim=True)
        return (most / torch.finfo(self.keys.dtype).max).clamp(min=torch.finfo(torch.float32).tiny)

    def read(self, places: TokenPlaces) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values ``[rows, heads, tokens, size]`` at these places."""
        at, dtype = (places.blocks, places.within), self.shape.dtype
        if self.scales is None:
            found = [memory[at].to(dtype) for memory in (self.keys, self.values)]
        else:
            scales = self.scales[at].view(torch.float32)
            found = [
                (memory.view(torch.uint8)[at].view(memory.dtype).float() * part).to(dtype)
                for memory, part in (
                    (self.keys, scales[..., 0, None]),
                    (self.values, scales[..., -1, None]),
                )
            ]
        return found[0].transpose(1, 2), found[1].transpose(1, 2)


@dataclass(frozen=True)
class StateBlocks:
    """One recurrent state of a layer and its convolution, in the blocks of their group."""

    group: int
    shape: StateShape
    recurrent: torch.Tensor
    inputs: torch.Tensor
    """``[blocks, channels, inputs]``: the newest inputs, without the oldest one."""


class PagedLayer(NamedTuple):
    """Everything that one layer of a model keeps in the pools."""

    kv: PagedKV | None
    states: list[StateBlocks]


def in_blocks(kept: Sequence[LayerResources], memory: PlanMemory) -> list[PagedLayer]:
    """Return views of each layer of a model in the memory of its plan.

    Raises
    ------
    LayoutError
        A layer keeps something outside the pools, or of a kind that passes do not support.
    """
    groups = {name: group for group, pool in enumerate(memory.plan.pools) for name in pool.members}
    apart = {one.name: one.why for one in memory.plan.alone}
    found: list[PagedLayer] = []
    for at, layer in enumerate(kept):
        names = {f"{at}.state{n or ''}" for n in range(len(layer.states))}
        names |= {f"{at}.conv{n or ''}" for n in range(len(layer.states))}
        for one in layer.handlers:
            if one.name in apart:
                hint = "expected a state and a convolution that its pool takes"
                raise LayoutError(f"{one.name} fits into no pool: {apart[one.name]}", hint=hint)
            if one.name not in {*names, f"{at}.kv", f"{at}.latent"}:
                hint = "such layers can be planned, but need an engine of your own to run"
                raise LayoutError(f"layer {at} keeps {one.name}", hint=hint)
        states = [
            StateBlocks(
                groups[f"{at}.state{n or ''}"],
                shape,
                memory.states(f"{at}.state{n or ''}"),
                memory.convolutions(f"{at}.conv{n or ''}"),
            )
            for n, shape in enumerate(layer.states)
        ]
        kv = None if layer.shape is None else _kv(at, layer.shape, groups, memory)
        found.append(PagedLayer(kv, states))
    return found


def _kv(at: int, shape: LayerShape, groups: Mapping[str, int], memory: PlanMemory) -> PagedKV:
    heads, key_size = shape.heads, shape.key_size
    name = f"{at}.kv" if f"{at}.kv" in groups else f"{at}.latent"
    plan = memory.plan
    kinds = {one.name: one for one in plan.resources}
    window = getattr(kinds[name], "window", None) or 0
    window = window if window < plan.max_tokens else 0
    scales = memory.sides(f"{name}{SCALES}") if f"{name}{SCALES}" in kinds else None
    if name == f"{at}.kv":
        both = memory.buffers(name)
        return PagedKV(groups[name], shape, window, both[:, 0], both[:, 1], scales)
    flat = memory.buffers(name)[:, 0, :, 0]
    blocks, tokens, _ = flat.shape
    keys = flat[..., : heads * key_size].view(blocks, tokens, heads, key_size)
    values = flat[..., heads * key_size :].view(blocks, tokens, heads, shape.value_size)
    return PagedKV(groups[name], shape, window, keys, values, scales)


# ---- in one pass


class PassPlan(NamedTuple):
    """One pass: it computes ``new`` tokens behind those that each row has."""

    places: Sequence[TokenPlaces]
    """Places of all tokens of each row, by group; left padding stands at a row's first token."""
    longest: int
    new: int
    begun: bool
    """True if the rows have states already: either all of them do, or none."""

    def before(self, group: int) -> torch.Tensor:
        """Return the block of each row's last token before this pass."""
        return self.places[group].blocks[:, -self.new - 1]

    def after(self, group: int) -> torch.Tensor:
        """Return the block of each row's last token after this pass."""
        return self.places[group].blocks[:, -1]


class _KVLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer as a model sees them in one pass."""

    def __init__(self, kv: PagedKV, step: PassPlan) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._see(kv, step)

    def _see(self, kv: PagedKV, step: PassPlan) -> None:
        self._kv = kv
        self._step = step
        self.is_sliding = kv.shape.window > 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the blocks exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens; return the keys and values that the layer sees."""
        places = self._step.places[self._kv.group]
        self._kv.write(places.last(self._step.new), key_states, value_states)
        return self._kv.read(places.last(self._kv.seen(self._step.longest, self._step.new)))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens the model's own mask covers, and how many precede these."""
        window, longest = self._kv.shape.window, self._step.longest
        seen = min(longest, window - 1 + query_length) if window else longest
        return seen, longest - seen

    def get_seq_length(self) -> int:
        """Return how many tokens the longest row had before this pass."""
        return self._step.longest - self._step.new

    def get_max_length(self) -> int:
        """Return the model's window, or -1 if it has none."""
        return self._kv.shape.window or -1

    def get_max_cache_shape(self) -> int:
        """Return ``get_max_length()``; earlier versions of transformers use this name."""
        return self.get_max_length()


class _StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """States of one layer as a model sees them in one pass: copies of the blocks' contents."""

    conv_states: dict[int, Any]
    recurrent_states: dict[int, Any]

    def __init__(self, states: Sequence[StateBlocks], step: PassPlan) -> None:
        super().__init__(number_of_states=len(states))  # pyright: ignore[reportUnknownMemberType]
        for number, state in enumerate(states if step.begun else ()):
            blocks = step.before(state.group)
            inputs = state.inputs[blocks]
            lacking = state.shape.inputs[-1] - inputs.shape[-1]
            inputs = torch.nn.functional.pad(inputs, (lacking, 0))
            recurrent = state.recurrent[blocks].reshape(len(blocks), *state.shape.recurrent)
            self.lazy_initialization(conv_states=inputs, state_idx=number)
            self.lazy_initialization(recurrent_states=recurrent, state_idx=number)
            self.conv_states[number].copy_(inputs)
            self.recurrent_states[number].copy_(recurrent)
            self.has_previous_state[number] = True

    def keep(self, states: Sequence[StateBlocks], step: PassPlan) -> None:
        """Write the states after the pass to the blocks of each row's last token."""
        for number, state in enumerate(states):
            blocks = step.after(state.group)
            recurrent = self.recurrent_states[number]
            state.recurrent[blocks] = recurrent.reshape(len(blocks), *state.recurrent.shape[1:])
            width = state.inputs.shape[-1]
            state.inputs[blocks] = self.conv_states[number][..., -width:]


class _BothLayer(_StateLayer, _KVLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer with both states and keys and values."""

    def __init__(self, kv: PagedKV, states: Sequence[StateBlocks], step: PassPlan) -> None:
        _StateLayer.__init__(self, states, step)
        self._see(kv, step)


class Pass:
    """The layers of one pass; ``keep`` writes the states back after it."""

    def __init__(self, layers: Sequence[PagedLayer], step: PassPlan) -> None:
        self._step = step
        self._layers = layers
        self.layers: list[Any] = [self._seen(layer) for layer in layers]

    def _seen(self, layer: PagedLayer) -> Any:
        if layer.kv is None:
            return _StateLayer(layer.states, self._step)
        if not layer.states:
            return _KVLayer(layer.kv, self._step)
        return _BothLayer(layer.kv, layer.states, self._step)

    def keep(self) -> None:
        """Write the states after the pass to their blocks."""
        for layer, seen in zip(self._layers, self.layers, strict=True):
            if layer.states:
                seen.keep(layer.states, self._step)
