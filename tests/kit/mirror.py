"""A codec for tests: it changes every block, and what it makes of it is easy to see."""

from __future__ import annotations

from kvladder.tiers.codecs.base import FOREIGN_ID_MIN, Codec, Subject


class MirrorCodec(Codec):
    """Turns the bytes of a block around."""

    name = "mirror"
    id = FOREIGN_ID_MIN

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes]:
        target[: len(data)] = data[::-1]
        return target[: len(data)], b""

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        if len(data) > len(target):
            return None
        target[: len(data)] = data[::-1]
        return target[: len(data)]
