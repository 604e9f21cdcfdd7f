"""A codec of your own: zlib from the standard library. See docs/how-to/write-a-codec.md."""

from __future__ import annotations

import time
import zlib
from typing import Annotated, ClassVar

import msgspec

import kvladder
from kvladder.config.registry import register
from kvladder.tiers.codecs import Codec, Stage, Subject


class ZlibOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that stand beside the codec's name."""

    level: Annotated[int, msgspec.Meta(ge=1, le=9, description="a level from 1 to 9")] = 1


class ZlibCodec(Codec):
    """A zlib stream a block, unless that is longer than the block."""

    name = "zlib"
    id = 4242
    stage = Stage.COMPRESS
    Options: ClassVar = ZlibOptions

    def __init__(self, options: ZlibOptions) -> None:
        self.options = options

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes] | None:
        packed = zlib.compress(data, self.options.level)
        if len(packed) >= len(data):
            return None
        target[: len(packed)] = packed
        return target[: len(packed)], b""

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        unpacker = zlib.decompressobj()
        try:
            plain = unpacker.decompress(data, len(target))
        except zlib.error:
            return None
        if not unpacker.eof or unpacker.unused_data:
            return None
        target[: len(plain)] = plain
        return target[: len(plain)]


def main() -> None:
    """Save four blocks and have them written; what they came to."""
    layout = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "demo"})
    codecs = [{"name": "zlib", "level": 6}, "checksum"]
    level = {"type": "memory", "capacity": "16 MiB", "when": "commit", "codecs": codecs}
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, level]}
    with kvladder.open_cache(source, layout=layout) as cache:
        save = cache.save(kvladder.KeyScheme(cache.namespace, block_tokens=16).chain(range(64)))
        for number, slot in zip(save.indices, save.slots, strict=True):
            cache.arena.view(slot)[:] = bytes([number]) * layout.slot_bytes
        save.commit()
        while not cache.idle():
            time.sleep(0.01)
        counts = cache.stats()["memory"]
    assert counts["stored"] == 4
    print(f"{counts['stored_bytes']} bytes were stored as {counts['encoded_bytes']}")


if __name__ == "__main__":
    register("codecs", "zlib", ZlibCodec)
    main()
