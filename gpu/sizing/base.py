"""What every handler is: one thing that a model keeps, with its shape, its type and its memory."""

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
"""Bytes of an element by the name of its type."""

Kept = Literal["paged", "state", "alone"]


class ResourceHandler(ABC):
    """Something that a model keeps, under a name of its own: a frozen dataclass.

    A plan collects handlers, checks them, decides which are managed together, and places each.
    """

    __slots__ = ()

    kind: ClassVar[Kept]
    """``paged``: something of each token, in blocks (a ``Layer``). ``state``: what a prefix leaves
    behind, of one size whatever its length; checkpoints of it are blocks. ``alone``: allocated by
    itself for every sequence, and never reused."""
    why: ClassVar[str] = "not paged"
    """Said of what is alone."""
    name: str
    dtype: str
    """A name in ``ITEM_BYTES``."""

    @abstractmethod
    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Of its elements for so many tokens: of a block if it is paged, else of a sequence."""

    def size_bytes(self, tokens: int) -> int:
        """What these take."""
        return prod(self.shape_of(tokens)) * ITEM_BYTES[self.dtype]

    def family(self) -> Hashable:
        """What has to be equal in two of a kind for them to be managed together."""
        return self.shape_of(1), self.dtype

    def check(self, others: Mapping[str, ResourceHandler]) -> None:
        """Raise PlanError if it contradicts the others of its plan, given by name."""

    @classmethod
    def collect(cls, at: int, layer: Any) -> Iterable[ResourceHandler]:
        """What such handlers there are for layer ``at`` of a Hugging Face cache.

        One token went through it. Layers that the handler does not know have none.
        """
        return ()


def require(name: str, dtype: str, *sizes: int) -> None:
    """Raise PlanError unless there are sizes, each 1 or more, of a type that is known."""
    if dtype not in ITEM_BYTES:
        raise PlanError(f"dtype {dtype!r}", path=name, hint=f"one of: {', '.join(ITEM_BYTES)}")
    if not sizes or min(sizes) < 1:
        raise PlanError(f"sizes {list(sizes)}", path=name, hint="each 1 or more")


def type_name(tensor: Any) -> str:
    """The name of a tensor's type, as in ``ITEM_BYTES``."""
    return str(tensor.dtype).removeprefix("torch.")
