"""The layout of one block's bytes, and what identifies the model that made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvladder.errors import ConfigError
from kvladder.keys import Namespace, namespace

PAGE_BYTES = 4096
"""Slots are multiples of this, so that O_DIRECT and huge pages can take them as they are."""


Kind = Literal["full", "window", "local", "state"]
"""What layers keep: every token, those of a window or of a section, or a recurrent state."""

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}


def align(size: int, to: int = PAGE_BYTES) -> int:
    """The smallest multiple of ``to`` that is at least ``size``."""
    return -(-size // to) * to


@dataclass(frozen=True, slots=True)
class Layout:
    """What one block is: how many tokens, how many bytes, and whose.

    Parameters
    ----------
    block_tokens:
        Tokens whose KV one block holds.
    block_bytes:
        Bytes of one block, all layers and all ranks together; a slot is this rounded up to 4 KiB.
    fields:
        What else must agree before bytes may be shared: model, weights, dtype, KV layout, ranks ...
    element:
        What a block consists of, as torch names it: ``bfloat16``, ``uint8`` ...; empty if that is
        not known or not the same everywhere in it.
    row_elements:
        How many neighbours of them belong to one token and one head; 0 if that is not known.
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
            raise ConfigError(f"{self.block_tokens} tokens", path="block.tokens", hint="1 or more")
        if self.block_bytes < 1:
            raise ConfigError(
                f"{self.block_bytes} bytes per block", path="layout", hint="1 or more"
            )

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds one block: ``block_bytes`` rounded up to 4 KiB."""
        return align(self.block_bytes)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element; 0 if that is not known."""
        return _ELEMENT_BYTES.get(self.element, 0)

    @property
    def all_fields(self) -> dict[str, str]:
        """``fields`` and the sizes: what the namespace is a digest of, but for the salt."""
        sizes = {"block.tokens": str(self.block_tokens), "block.bytes": str(self.block_bytes)}
        return {**self.fields, **sizes}

    def namespace(self, *, salt: str = "") -> Namespace:
        """The namespace of blocks of this layout under a deployment's salt."""
        return namespace(self.all_fields, salt=salt)
