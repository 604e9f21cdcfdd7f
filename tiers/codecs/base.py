"""Codecs: what happens to a block's bytes at the edge of a level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.label import PARAMS_BYTES as PARAMS_BYTES

FOREIGN_ID_MIN = 256
"""Ids of codecs that do not come with kvladder: from here to 65535."""


class Stage(IntEnum):
    """Where in a chain a codec belongs; a chain goes up only."""

    REDUCE = 0
    """Makes less of the numbers: it has to see them as the engine wrote them."""
    COMPRESS = 1
    """Makes fewer bytes of them, without loss."""
    ENCRYPT = 2
    """What comes out looks random: nothing shrinks any more."""
    CHECK = 3
    """Covers the bytes that cross the edge."""


class Subject(NamedTuple):
    """The block that a codec works on, for what it binds or derives."""

    key: BlockKey
    salt: bytes = b""
    """``Facts.salt``, which is known when a block is encoded and not when it is decoded."""
    steps: bytes = b""
    """What the codecs before this one did: id, length and parameters of each, as stored."""
    kind: str = ""
    """Of ``Layout.kinds``; known when a block is encoded, if at all, and not when it is decoded."""


class Codec(ABC):
    """Turns the bytes of a block into what crosses the edge of a level, and back.

    Any thread may call it, several at once. ``id`` is written beside every block and never changes
    its meaning: ids below ``FOREIGN_ID_MIN`` are kvladder's. ``name`` is what a configuration says.
    A codec without ``Options`` is made without arguments, any other with one; all options have
    defaults with which ``decode`` works, so that a reader needs no configuration.
    """

    name: ClassVar[str]
    id: ClassVar[int]
    stage: ClassVar[Stage] = Stage.COMPRESS
    lossy: ClassVar[bool] = False
    """Whether ``decode`` gives back less than ``encode`` took."""
    checks: ClassVar[bool] = False
    """Whether ``decode`` finds any change of the stored bytes and of what they belong to."""
    Options: ClassVar[Any] = None
    """A frozen ``msgspec.Struct``, or None."""
    allowed: frozenset[str] | None = None
    """Set from outside: the kinds of layers whose blocks it encodes; None for all blocks."""

    def open(self, layout: Layout, namespace: bytes) -> Layout:
        """Get ready for blocks of this layout and namespace: called once, before all else.

        Returns the layout as the next codec finds it: other than it was if elements change.

        Raises
        ------
        ConfigError
            It cannot work on such blocks, or lacks what it needs.
        """
        del namespace
        return layout

    @abstractmethod
    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes] | None:
        """What to go on with instead of ``data``, and at most ``PARAMS_BYTES`` to store beside it.

        Either the beginning of ``target``, which is as long as ``data`` and does not overlap it,
        or ``data`` itself, which is not written. None leaves this block out.
        """

    def reads(self, params: bytes) -> bool:
        """Whether it has what it takes to decode what was stored with these parameters: a key."""
        del params
        return True

    @abstractmethod
    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        """What ``encode`` was given: the beginning of ``target``, or ``data`` itself.

        None if ``data`` and ``params`` cannot have come from ``encode``. ``target`` has the length
        of a whole block and does not overlap ``data``.
        """


class ChecksumCodec(Codec):
    """A word of the configuration: labels have a checksum of what crosses the edge, and it counts.

    In a chain it does nothing.
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
