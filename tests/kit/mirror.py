"""A codec for tests that changes every block in an obvious way."""

from __future__ import annotations

from kvladder.testing.fakes import Record
from kvladder.tiers.codecs.base import FOREIGN_ID_MIN, Codec, Subject
from kvladder.tiers.label import Labels, told


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


def plain(record: Record) -> bytes:
    """Return the block as it was before the codec, if its label names the codec."""
    said = told(record.label)
    assert said is not None
    labels = Labels(said.namespace, said.length, verify=False)
    _, coding = labels.check(record.key, record.label, memoryview(record.data))
    assert coding is not None
    return record.data[::-1] if coding.steps else record.data
