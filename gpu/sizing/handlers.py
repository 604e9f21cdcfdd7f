"""Handlers besides a layer's paged KV: states, side buffers and others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from kvladder.errors import PlanError
from kvladder.gpu.sizing.base import Kept, ResourceHandler, require, type_name
from kvladder.gpu.sizing.groups import Layer
from kvladder.policy.numbers import settle, whole


class StateHandler(ResourceHandler):
    """Base of handlers of states: data of constant size that one layer keeps for a prefix."""

    __slots__ = ()
    kind: ClassVar[Kept] = "state"

    @property
    def bytes(self) -> int:
        """Bytes per sequence and per checkpoint."""
        return self.size_bytes(1)


@dataclass(frozen=True, slots=True)
class State(StateHandler):
    """A recurrent state of one layer: ``heads x head_dim x d_state`` elements per sequence."""

    name: str
    heads: int
    head_dim: int
    d_state: int
    dtype: str

    def __post_init__(self) -> None:
        settle(self, "heads", "head_dim", "d_state")
        require(self.name, self.dtype, self.heads, self.head_dim, self.d_state)

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Return ``[heads, head_dim, d_state]``."""
        return self.heads, self.head_dim, self.d_state

    def feeds(self, conv: ConvState) -> bool:
        """Return whether a convolution feeds this state: ``conv_dim`` must fit its sizes.

        The inputs are ``head_dim x heads`` values, and two vectors of ``d_state`` for each group.
        """
        rest = conv.conv_dim - self.head_dim * self.heads
        return rest >= 0 and rest % (2 * self.d_state) == 0

    @classmethod
    def collect(cls, at: int, layer: Any) -> Iterable[ResourceHandler]:
        """Yield handlers of a layer's recurrent states."""
        convolutions = {one.name: one for one in ConvState.collect(at, layer)}
        for number, tensor in _tensors(layer, "recurrent_states").items():
            sizes: list[int] = [1, 1, *tensor.shape[1:]]
            *heads, head_dim, d_state = sizes
            count = prod(heads)
            state = cls(f"{at}.state{number or ''}", count, head_dim, d_state, type_name(tensor))
            conv = convolutions.get(f"{at}.conv{number or ''}")
            if conv is not None and not state.feeds(conv):  # a delta net's state has keys first
                state = cls(state.name, count, d_state, head_dim, state.dtype)
            yield state


@dataclass(frozen=True, slots=True)
class ConvState(StateHandler):
    """The last ``width`` inputs of a layer's convolution, ``conv_dim`` elements each."""

    name: str
    conv_dim: int
    width: int
    dtype: str

    def __post_init__(self) -> None:
        settle(self, "conv_dim", "width")
        require(self.name, self.dtype, self.conv_dim, self.width)

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Return ``[conv_dim, width]``."""
        return self.conv_dim, self.width

    @classmethod
    def collect(cls, at: int, layer: Any) -> Iterable[ConvState]:
        """Yield handlers of a layer's convolutions; engines keep one input fewer than the cache."""
        for number, tensor in _tensors(layer, "conv_states").items():
            width = max(1, tensor.shape[-1] - 1)
            yield cls(f"{at}.conv{number or ''}", tensor.shape[1], width, type_name(tensor))


@dataclass(frozen=True, slots=True)
class PerSequence(ResourceHandler):
    """A resource of fixed shape per sequence that is not a state of the prefix; not pooled."""

    kind: ClassVar[Kept] = "alone"
    why: ClassVar[str] = "one per sequence, not paged"
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(whole(size, "shape") for size in self.shape))
        require(self.name, self.dtype, *self.shape)

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Return its shape, which does not depend on ``tokens``."""
        return self.shape


@dataclass(frozen=True, slots=True)
class Unpaged(ResourceHandler):
    """A contiguous resource that grows by ``width`` elements per token."""

    kind: ClassVar[Kept] = "alone"
    why: ClassVar[str] = "grows in one piece, not paged"
    name: str
    width: int
    dtype: str

    def __post_init__(self) -> None:
        settle(self, "width")
        require(self.name, self.dtype, self.width)

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Return ``[tokens, width]``."""
        return tokens, self.width


@dataclass(frozen=True, slots=True)
class Side(ResourceHandler):
    """A buffer beside a layer's KV that travels with its blocks, such as quantization scales."""

    kind: ClassVar[Kept] = "paged"
    name: str
    of: str
    """Name of the layer."""
    head_bytes: int
    """Bytes per token and head."""
    dtype: str = "uint8"

    def __post_init__(self) -> None:
        settle(self, "head_bytes")
        if self.head_bytes < 1:
            hint = "expected 1 or more"
            raise PlanError(f"{self.head_bytes} bytes", path=self.name, hint=hint)

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Return ``[tokens, bytes]`` of one head."""
        return tokens, self.head_bytes

    def check(self, others: Mapping[str, ResourceHandler]) -> None:
        """Raise PlanError unless its layer is in the plan."""
        if not isinstance(others.get(self.of), Layer):
            layers = ", ".join(name for name, one in others.items() if isinstance(one, Layer))
            hint = f"paged layers of the plan: {layers or 'none'}"
            raise PlanError(f"{self.of!r} is not a paged layer", path=self.name, hint=hint)


def _tensors(layer: Any, name: str) -> dict[int, Any]:
    found: Mapping[int, Any] = getattr(layer, name, {})
    return {number: state for number, state in found.items() if state is not None}
