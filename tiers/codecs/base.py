"""The interface of codecs, which change a block's bytes between a level and its tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.label import PARAMS_BYTES as PARAMS_BYTES

FOREIGN_ID_MIN = 256
"""Smallest id of codecs that are not part of kvladder; their ids go up to 65535."""


class Stage(IntEnum):
    """The position of a codec in a chain; along a chain the stage never goes down."""

    REDUCE = 0
    """Lowers the precision of numbers; needs them as the engine wrote them."""
    COMPRESS = 1
    """Makes fewer bytes, without loss."""
    ENCRYPT = 2
    """Makes bytes that look random, so that no later codec can shrink them."""
    CHECK = 3
    """Covers the bytes that the tier stores."""


class Subject(NamedTuple):
    """Facts about the block that a codec works on, e.g. to authenticate them or to derive a key."""

    key: BlockKey
    salt: bytes = b""
    """``Facts.salt``. Known to ``encode``, empty in ``decode``."""
    steps: bytes = b""
    """Steps of the codecs before this one: id, length and parameters of each, as stored."""
    kind: str = ""
    """Kind of the block's layers, of ``Layout.kinds``. Empty in ``decode``, or if unknown."""


class Codec(ABC):
    """Encodes a block's bytes before its tier stores them, and decodes them after reading.

    Several threads may call it at once. ``id`` is stored beside every block, so its meaning never
    changes; ids below ``FOREIGN_ID_MIN`` are kvladder's. ``name`` is its name in a configuration.

    A codec without ``Options`` is constructed without arguments, any other with its options. All
    options have defaults, and ``decode`` works with these, so that a reader needs no configuration.
    """

    name: ClassVar[str]
    id: ClassVar[int]
    stage: ClassVar[Stage] = Stage.COMPRESS
    lossy: ClassVar[bool] = False
    """True if ``decode`` does not return exactly the numbers that ``encode`` got."""
    checks: ClassVar[bool] = False
    """True if every change of the stored bytes, or of the key they belong to, is detected."""
    Options: ClassVar[Any] = None
    """Type of the options, a frozen ``msgspec.Struct``, or None."""
    allowed: frozenset[str] | None = None
    """Kinds of layers with blocks that it may encode; None for all blocks. Set from outside."""

    def open(self, layout: Layout, namespace: bytes) -> Layout:
        """Get ready for blocks of this layout and namespace; called once, before any other call.

        Returns the layout for the next codec, which differs if this codec changes the elements.

        Raises
        ------
        ConfigError
            The codec cannot encode such blocks, or something that it needs is missing.
        """
        del namespace
        return layout

    @abstractmethod
    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes] | None:
        """Encode ``data``; return the encoded bytes, and parameters to store beside the block.

        The encoded bytes are the beginning of ``target``, or ``data`` itself, which must stay
        unchanged. ``target`` is as long as ``data`` and does not overlap it. There are at most
        ``PARAMS_BYTES`` of parameters. Return None to skip this codec for this block.
        """

    def reads(self, params: bytes) -> bool:
        """Return whether it can decode bytes stored with these parameters, e.g. has their key."""
        del params
        return True

    @abstractmethod
    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        """Decode ``data``; return the bytes that ``encode`` got.

        They are the beginning of ``target``, or ``data`` itself. ``target`` is as long as a whole
        block and does not overlap ``data``. Return None if ``data`` and ``params`` cannot be a
        result of ``encode``.
        """


class ChecksumCodec(Codec):
    """The name ``checksum`` of the configuration: the level stores and compares checksums.

    The checksum is in the label and covers the stored bytes. In a chain this codec does nothing.
    """

    name = "checksum"
    id = 1
    stage = Stage.CHECK
    checks = True

    def encode(self, data: memoryview, target: memoryview, subject: Subject) -> None:
        return None

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview:
        return data
