"""Codecs: what happens to a block's bytes at the edge of a level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from xxhash import xxh3_128_digest

TAG_BYTES = 16
"""Room for a codec's tag in what a tier stores beside a block."""


class Codec(ABC):
    """Turns a block's payload into what a medium stores, and back.

    Stateless and pure, so that any thread may call it. ``id`` is written beside every block and
    never changes its meaning; 0 means no codec. ``name`` is what a configuration says.
    """

    name: ClassVar[str]
    id: ClassVar[int]

    @abstractmethod
    def encode(self, payload: memoryview) -> tuple[memoryview, bytes]:
        """What to store for ``payload``, and a tag of at most ``TAG_BYTES`` to store beside it.

        The bytes to store may be ``payload`` itself, which belongs to the caller.
        """

    @abstractmethod
    def decode(self, stored: memoryview, tag: bytes, target: memoryview) -> bool:
        """Put the payload of ``stored`` into ``target``, which may be ``stored`` itself.

        False if ``stored`` is not what ``encode`` returned together with ``tag``.
        """


class ChecksumCodec(Codec):
    """Stores the payload as it is, with its xxh3-128; the digest is taken without the GIL."""

    name = "checksum"
    id = 1

    def encode(self, payload: memoryview) -> tuple[memoryview, bytes]:
        return payload, xxh3_128_digest(payload)

    def decode(self, stored: memoryview, tag: bytes, target: memoryview) -> bool:
        if xxh3_128_digest(stored) != tag:
            return False
        if target is not stored:
            target[:] = stored
        return True
