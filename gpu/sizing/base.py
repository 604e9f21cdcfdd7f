"""Base of all handlers: each is one resource of a model, with its shape, type and size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from math import prod
from typing import Any, ClassVar, Final, Literal

from kvladder.errors import PlanError

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of an element, by the name of its type."""

Kept = Literal["paged", "state", "alone"]


class ResourceHandler(ABC):
    """A resource that a model keeps, with a unique name. Subclasses are frozen dataclasses.

    A plan collects handlers, checks them, decides which are managed together, and places each.
    """

    __slots__ = ()

    kind: ClassVar[Kept]
    """``paged``: data of each token, in blocks (a ``Layer``). ``state``: data of constant size that
    depends on the whole prefix; its checkpoints are blocks. ``alone``: allocated separately for
    every sequence, and never reused."""
    why: ClassVar[str] = "not paged"
    """Reason given for a resource that is alone."""
    name: str
    dtype: str
    """Name of its element type, a key of ``ITEM_BYTES``."""

    @abstractmethod
    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Return the shape for ``tokens`` tokens: that of a block if paged, else of a sequence."""

    def size_bytes(self, tokens: int) -> int:
        """Return the bytes of its elements for ``tokens`` tokens."""
        return prod(self.shape_of(tokens)) * ITEM_BYTES[self.dtype]

    def family(self) -> Hashable:
        """Return what must be equal in two handlers of a kind to manage them together."""
        return self.shape_of(1), self.dtype

    def check(self, others: Mapping[str, ResourceHandler]) -> None:
        """Raise PlanError if it contradicts other handlers of its plan, given by name."""

    @classmethod
    def collect(cls, at: int, layer: Any) -> Iterable[ResourceHandler]:
        """Return handlers of this class for layer ``at`` of a Hugging Face cache.

        The cache holds one token. For unknown kinds of layers there are none.
        """
        return ()


def require(name: str, dtype: str, *sizes: int) -> None:
    """Raise PlanError unless the type is known and there are sizes, each 1 or more."""
    if dtype not in ITEM_BYTES:
        hint = f"expected one of: {', '.join(ITEM_BYTES)}"
        raise PlanError(f"dtype {dtype!r}", path=name, hint=hint)
    if not sizes or min(sizes) < 1:
        raise PlanError(f"sizes {list(sizes)}", path=name, hint="expected 1 or more for each")


def type_name(tensor: Any) -> str:
    """Return the name of a tensor's type, as in ``ITEM_BYTES``."""
    return str(tensor.dtype).removeprefix("torch.")
