"""The layout of one block's bytes, and what identifies the model that made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvladder.errors import ConfigError
from kvladder.keys import Namespace, namespace

PAGE_BYTES = 4096
"""Slots are multiples of this, so that O_DIRECT and huge pages can use them as they are."""


Kind = Literal["full", "window", "local", "state"]
"""What layers keep: every token, the tokens of a window or a section, or a recurrent state."""

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}


def align(size: int, to: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of ``to`` that is at least ``size``."""
    return -(-size // to) * to


@dataclass(frozen=True, slots=True)
class Layout:
    """Size and identity of one block: its tokens, its bytes, and the model that made them.

    Parameters
    ----------
    block_tokens:
        Number of tokens in one block.
    block_bytes:
        Bytes of one block, all layers and all ranks together; a slot is this rounded up to 4 KiB.
    fields:
        Other values that must agree to share bytes: model, weights, dtype, KV layout, ranks ...
    element:
        Type of the elements, as torch names it: ``bfloat16``, ``uint8`` ...; empty if it is
        unknown or differs within a block.
    row_elements:
        Number of neighbouring elements that belong to one token and one head; 0 if unknown.
    kinds:
        What layers keep, by group; a block that holds several kinds counts as full.
    """

    block_tokens: int
    block_bytes: int
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    element: str = ""
    row_elements: int = 0
    kinds: tuple[Kind, ...] = ("full",)

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            hint = "expected 1 or more"
            raise ConfigError(f"{self.block_tokens} tokens", path="block.tokens", hint=hint)
        if self.block_bytes < 1:
            raise ConfigError(
                f"{self.block_bytes} bytes per block", path="layout", hint="expected 1 or more"
            )

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds one block: ``block_bytes`` rounded up to 4 KiB."""
        return align(self.block_bytes)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element; 0 if unknown."""
        return _ELEMENT_BYTES.get(self.element, 0)

    @property
    def all_fields(self) -> dict[str, str]:
        """``fields`` and the sizes: with the salt, the input of the namespace's digest."""
        sizes = {"block.tokens": str(self.block_tokens), "block.bytes": str(self.block_bytes)}
        return {**self.fields, **sizes}

    def namespace(self, *, salt: str = "") -> Namespace:
        """Return the namespace of blocks of this layout under a deployment's salt."""
        return namespace(self.all_fields, salt=salt)
