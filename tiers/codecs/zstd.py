"""The zstd codec: compression without loss that separates high and low bytes of numbers."""

from __future__ import annotations

import threading
from struct import Struct
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import zstandard

from kvladder.layout import Layout
from kvladder.schema import Settings
from kvladder.tiers.codecs.base import Codec, Stage, Subject

_PARAMS = Struct("<Q")


class ZstdOptions(Settings, frozen=True, kw_only=True):
    """Options of the zstd codec."""

    level: Annotated[int, msgspec.Meta(ge=-7, le=19, description="a level from -7 to 19")] = 1
    """Compression level of zstd. Higher levels are slower, and shrink few blocks of KV further."""
    min_saving: Annotated[
        float, msgspec.Meta(ge=0, lt=1, description="a number from 0 up to 1, such as 0.05")
    ] = 0.05
    """Smallest share by which a block must shrink; else it is stored uncompressed."""


class ZstdCodec(Codec):
    """Stores a block as one zstd frame, or two for 2-byte elements; no dictionary, no checksum.

    2-byte elements are split into two planes: a frame of all low bytes, then one of all high bytes.
    High bytes hold sign and exponent, and only few values of these are common. Interleaved with
    the noise of the low bytes, zstd would not find that. The parameters are the length of the first
    frame.
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
        parts = [data]
        half, odd = divmod(len(data), 2)
        if self._planes and not odd:
            parts = [target[:half], target[half : 2 * half]]
            low, high = (np.frombuffer(part, np.uint8) for part in parts)
            numbers = np.frombuffer(data, "<u2")
            np.copyto(low, numbers, casting="unsafe")
            np.right_shift(numbers, 8, out=high, casting="unsafe")
        compressor = self._compressor()
        frames = [compressor.compress(part) for part in parts]
        length = sum(map(len, frames))
        if length > len(data) * (1 - self.options.min_saving):
            return None
        first = len(frames[0])
        target[:first] = frames[0]
        target[first:length] = b"".join(frames[1:])
        return target[:length], _PARAMS.pack(first)

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        if len(params) != _PARAMS.size:
            return None
        (first,) = _PARAMS.unpack(params)
        parts = [data[:first], data[first:]] if first < len(data) else [data]
        try:
            if not all(0 <= zstandard.frame_content_size(p) <= len(target) for p in parts):
                return None
            planes = [self._decompressor().decompress(part) for part in parts]
        except zstandard.ZstdError:
            return None
        size = sum(map(len, planes))
        if size > len(target) or len(planes[0]) != len(planes[-1]):
            return None
        found = target[:size]
        if len(planes) == 1:
            found[:] = planes[0]
        else:
            low, high = (np.frombuffer(plane, np.uint8) for plane in planes)
            numbers = np.frombuffer(found, "<u2")
            np.left_shift(high, 8, out=numbers, dtype="<u2")
            np.bitwise_or(numbers, low, out=numbers)
        return found

    def _compressor(self) -> zstandard.ZstdCompressor:
        """Return this thread's compressor: it keeps its memory and is not safe for two threads."""
        found: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if found is None:
            level = self.options.level
            if level == 1 and self._planes:
                # planes hardly repeat: these settings are four times as fast and shrink more
                params = zstandard.ZstdCompressionParameters(
                    compression_level=1,
                    strategy=zstandard.STRATEGY_FAST,
                    min_match=7,
                    hash_log=6,
                )
                found = zstandard.ZstdCompressor(compression_params=params)
            else:
                found = zstandard.ZstdCompressor(level=level)
            self._local.compressor = found
        return found

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        found: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if found is None:
            found = self._local.decompressor = zstandard.ZstdDecompressor()
        return found
