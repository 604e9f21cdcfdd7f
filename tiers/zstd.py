"""The zstd codec: fewer bytes without loss, by sorting the bytes of numbers by significance."""

from __future__ import annotations

import threading
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import zstandard

from kvladder.layout import Layout
from kvladder.tiers.codecs import Codec, Stage, Subject

_PLAIN, _PLANES = b"\0", b"\1"


class ZstdOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a configuration says about zstd."""

    level: Annotated[int, msgspec.Meta(ge=-7, le=19, description="a level from -7 to 19")] = 1
    """Higher ones are slower and make little less of KV."""
    min_saving: Annotated[
        float, msgspec.Meta(ge=0, lt=1, description="a number from 0 up to 1, such as 0.05")
    ] = 0.05
    """A block that does not shrink by this share is stored as it is."""


class ZstdCodec(Codec):
    """One zstd frame a block, without dictionary or checksum of its own.

    Blocks of 2-byte elements are split into two planes before: first all the low bytes, then all
    the high ones. The high bytes hold sign and exponent, which repeat; next to the noise of the
    low ones zstd would not find that.
    """

    name = "zstd"
    id = 2
    stage = Stage.COMPRESS
    Options: ClassVar[type[ZstdOptions]] = ZstdOptions

    def __init__(self, options: ZstdOptions | None = None) -> None:
        self.options = options or ZstdOptions()
        self._planes = False
        self._local = threading.local()

    def open(self, layout: Layout, namespace: bytes) -> Layout:
        self._planes = layout.element_bytes == 2
        return layout

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes] | None:
        planes = self._planes and len(data) % 2 == 0
        if planes:
            halves = np.frombuffer(target, np.uint8).reshape(2, -1)
            numbers = np.frombuffer(data, "<u2")
            np.copyto(halves[0], numbers, casting="unsafe")
            np.right_shift(numbers, 8, out=halves[1], casting="unsafe")
        packed = self._compressor().compress(target if planes else data)
        if len(packed) > len(data) * (1 - self.options.min_saving):
            return None
        target[: len(packed)] = packed
        return target[: len(packed)], _PLANES if planes else _PLAIN

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        try:
            size = zstandard.frame_content_size(data)
            if not 0 <= size <= len(target) or params not in {_PLAIN, _PLANES}:
                return None
            plain = self._decompressor().decompress(data)
        except zstandard.ZstdError:
            return None
        if len(plain) != size or (params == _PLANES and size % 2):
            return None
        found = target[:size]
        if params == _PLAIN:
            found[:] = plain
        else:
            low, high = np.frombuffer(plain, np.uint8).reshape(2, -1)
            numbers = np.frombuffer(found, "<u2")
            np.left_shift(high, 8, out=numbers, dtype="<u2")
            np.bitwise_or(numbers, low, out=numbers)
        return found

    def _compressor(self) -> zstandard.ZstdCompressor:
        """The thread's own: they keep their memory, and no two threads may use one."""
        found: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if found is None:
            found = self._local.compressor = zstandard.ZstdCompressor(level=self.options.level)
        return found

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        found: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if found is None:
            found = self._local.decompressor = zstandard.ZstdDecompressor()
        return found
