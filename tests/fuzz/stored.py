"""Fuzz targets of what lies on media: labels with their blocks, logs, META, receipts."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from kvladder.errors import ConfigError
from kvladder.forgetting.receipt import LevelResult, Receipt, Signer, read_receipt, seconds
from kvladder.keys import BlockKey, Namespace
from kvladder.layout import PAGE_BYTES, Layout
from kvladder.tiers import label as labels
from kvladder.tiers.codecs.base import Codec, Subject
from kvladder.tiers.codecs.chain import Chain
from kvladder.tiers.codecs.fp8 import Fp8Codec
from kvladder.tiers.codecs.zstd import ZstdCodec
from kvladder.tiers.files.header import HEADER_BYTES, read_header, write_header
from kvladder.tiers.files.log import RECORD_BYTES, IndexLog, kept_of
from kvladder.tiers.files.meta import MAGIC, VERSION, DirectoryMeta, read_meta, sealed
from kvladder.tiers.files.purge import purge_files, survey_files
from kvladder.tiers.label import LABEL_BYTES, Coding, Facts, Labels, Outcome, RecoveredBlock
from tests.fuzz.target import Input, Target, explained
from tests.kit.disk import FakeDisk

SPACE = Namespace(hashlib.sha256(b"fuzz").digest())
BLOCK = 256
HOME = Path("/home") / SPACE.hex()[:16]
PLACES = 32


def key_of(number: int) -> BlockKey:
    """Return the key of a sample block."""
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


@cache
def _chain() -> Chain:
    """Return a chain that decodes what zstd and fp8 have encoded."""
    layout = Layout(1, BLOCK, {}, "bfloat16", 16)
    known: dict[int, Codec] = {codec.id: codec for codec in (Fp8Codec(), ZstdCodec())}
    for codec in known.values():
        codec.open(layout, SPACE)
    return Chain([*known.values()], layout=layout, find=known.get)


# ---- labels


def label(data: bytes) -> None:
    """Check a label with the bytes behind it, as it is and with a valid check of its own.

    What passes has the wanted name and length, and is described as its writer described it.
    """
    body = data[: LABEL_BYTES - 8].ljust(LABEL_BYTES - 8, b"\0")
    whole = body + xxh3_64_intdigest(body).to_bytes(8, "little")
    stored = data[LABEL_BYTES:]
    wanted = key_of(0)
    level = Labels(SPACE, BLOCK, verify=False)
    for one in (data[:LABEL_BYTES], whole):
        told = labels.told(one)
        if told is None:
            assert level.check(wanted, one, memoryview(stored)) == (Outcome.CORRUPT, None)
            continue
        outcome, coding = level.check(told.key, one, memoryview(stored))
        assert (outcome is Outcome.GOOD) == (coding is not None)
        if told.checksum and outcome is Outcome.GOOD:
            _, named = Labels(SPACE, BLOCK, verify=True).check(told.key, one, memoryview(stored))
            assert (named is not None) == told.is_of([stored[: told.length]])
        if coding is not None:
            assert 0 < coding.length <= min(BLOCK, len(stored))
            _decoded(told.key, coding, stored)
        facts = told.facts
        packed = level.pack(told.key, stored[:BLOCK], facts)
        again = labels.told(packed)
        assert again is not None
        assert repr(again.facts) == repr(facts)  # there may be a NaN
    page = memoryview(bytearray(whole + data[:16]).ljust(HEADER_BYTES, b"\0"))
    if read_header(page) is None and labels.told(whole) is not None:
        write_header(page, whole, 3, 7)
        found = read_header(page)
        assert found is not None
        assert (found.place, found.sequence) == (3, 7)


def _decoded(key: BlockKey, coding: Coding, stored: bytes) -> None:
    slot = memoryview(bytearray(BLOCK))
    slot[: coding.length] = stored[: coding.length]
    outcome = _chain().decode(key, coding, slot)
    assert outcome in {Outcome.GOOD, Outcome.CORRUPT, Outcome.UNREADABLE}


def _labels() -> Iterable[bytes]:
    level = Labels(SPACE, BLOCK, verify=True)
    block = bytes(range(256))
    facts = Facts(80, 35, 1.8e9, b"saltsalt", 3)
    for some in (Facts(), facts):
        yield level.pack(key_of(0), block, some) + block
    view, slot = memoryview(bytes(BLOCK)), memoryview(bytearray(BLOCK))
    stored, coding = _chain().encode(Subject(key_of(0)), view, slot)
    yield level.pack(key_of(0), stored, facts, coding) + bytes(stored)


# ---- the index log


def log(data: bytes) -> None:
    """Load a log with any records, half of them with valid checks; then append, and load again.

    All its blocks are at places that there are, and a block that was put is found again.
    """
    given = Input(data)
    mode = given.number(4)
    disk = FakeDisk(HOME)
    new = IndexLog(disk, HOME, SPACE, places_max=PLACES, slack_records=8)
    new.load()
    new.close()
    header = disk.content(new.path)
    if mode == 0:
        content = given.rest
    elif mode == 1:
        content = header + given.rest
    else:
        seed = int.from_bytes(SPACE[:8], "little")
        parts = [given.rest[at : at + 56] for at in range(0, len(given.rest), 56)]
        bodies = [part.ljust(56, b"\0") for part in parts]
        content = header + b"".join(
            xxh3_64_intdigest(body, seed).to_bytes(8, "little") + body for body in bodies
        )
    disk.put(new.path, content)
    before = _loaded(disk)
    if before is None:
        return
    more = RecoveredBlock(key_of(1), 5, Facts(80, 35, 1.5e9, b"saltsalt", 3))
    own = IndexLog(disk, HOME, SPACE, places_max=PLACES, slack_records=8)
    own.load()
    try:
        own.put([more])
    except struct.error:  # a number of a record that this writer never reaches
        return
    finally:
        own.close()
    after = _loaded(disk)
    assert after is not None
    expected = {**before, more.place: more}
    assert after == expected
    assert disk.open_fds == 0


def _loaded(disk: FakeDisk) -> dict[int, RecoveredBlock] | None:
    """Return the blocks of a log by place; None if it is of a newer version."""
    one = IndexLog(disk, HOME, SPACE, places_max=PLACES, slack_records=8)
    try:
        found = one.load()
    except ConfigError:
        return None
    finally:
        one.close()
    kept = kept_of(found.records)
    assert all(0 <= block.place < PLACES for block in kept)
    assert {block.place for block in kept} == {at for at, tag in enumerate(found.tags) if tag}
    return {block.place: block for block in kept}


def _logs() -> Iterable[bytes]:
    disk = FakeDisk(HOME)
    one = IndexLog(disk, HOME, SPACE, places_max=PLACES, slack_records=8)
    one.load()
    blocks = [RecoveredBlock(key_of(n), n, Facts(50, 35, None, b"", 0)) for n in range(4)]
    one.put(blocks)
    one.remove(blocks[1:2])
    one.put([RecoveredBlock(key_of(9), 1, Facts(80, 80, 1.6e9, b"saltsalt", 5))])
    one.close()
    content = disk.content(one.path)
    records = content[RECORD_BYTES:]
    bodies = [records[at + 8 : at + 64] for at in range(0, len(records), RECORD_BYTES)]
    return b"\0" + content, b"\1" + records, b"\2" + b"".join(bodies)


# ---- META


def meta(data: bytes) -> None:
    """Read a META, as it is and with a valid digest; survey and purge the directory behind it."""
    line = data.replace(b"\n", b"")
    for content in (data, sealed(line)):
        disk = FakeDisk(Path("/home"))
        disk.mkdir(HOME)
        disk.put(HOME / "META", content)
        try:
            found = read_meta(disk, HOME)
            if isinstance(found, DirectoryMeta):
                if found.capacity_blocks > 1 << 12:  # the index of so many takes memory and time
                    continue
                assert read_meta(_with_meta(found), HOME) == found
                assert found.size(0) > 0
            survey_files(disk, Path("/home"), space=SPACE, salt=None)
            for salt in ("salt", None):
                purge_files(disk, Path("/home"), space=SPACE, salt=salt, progress=lambda *_: None)
        except ConfigError as error:
            explained(error)


def _with_meta(found: DirectoryMeta) -> FakeDisk:
    disk = FakeDisk(Path("/home"), HOME)
    disk.put(HOME / "META", sealed(msgspec.json.encode(found)))
    return disk


def _metas() -> Iterable[bytes]:
    good = DirectoryMeta(
        namespace=SPACE.hex(),
        block_bytes=BLOCK,
        stride=HEADER_BYTES + PAGE_BYTES,
        segment_places=4,
        capacity_blocks=16,
    )
    line = msgspec.json.encode(good)
    older = msgspec.json.encode({"magic": MAGIC, "version": VERSION - 1})
    newer = msgspec.json.encode({"magic": MAGIC, "version": VERSION + 1})
    return sealed(line), line, older, newer


# ---- receipts


def receipt(data: bytes) -> None:
    """Read a receipt; what is one is the same after it was written, and its signature is valid."""
    try:
        found = read_receipt(data, "receipt.json")
    except ConfigError as error:
        explained(error)
        return
    again = read_receipt(found.as_json(), "receipt.json")
    assert msgspec.json.encode(again) == msgspec.json.encode(found)
    signer = Signer("key")
    assert signer.wrong(found)
    signer.sign(found)
    assert not signer.wrong(found)
    found.mark += 1
    assert signer.wrong(found)
    try:
        seconds(found.asked_at)
    except ConfigError as error:
        explained(error)


def _receipts() -> Iterable[bytes]:
    level = LevelResult(name="nvme", type="files", state="done", blocks=3, bytes=99, why="x")
    one = Receipt(
        id="20261126T010203-00000000",
        deployment="d",
        namespace=SPACE.hex(),
        version="1",
        asked_at="2026-11-26T01:02:03.000004+00:00",
        scope={"kind": "prefix", "ends": [key_of(1).hex()]},
        levels=[level, LevelResult(name="far", type="redis", shared=True)],
    )
    Signer("other").sign(one)
    return one.as_json(), msgspec.json.encode(one)


TARGETS = {
    "label": Target("a label and the bytes behind it", label, _labels, (labels.MAGIC,)),
    "log": Target("the index log of a files tier", log, _logs, (b"kvindex\0",)),
    "meta": Target(
        "META of a files tier",
        meta,
        _metas,
        (b'"stride":', b'"capacity_blocks":', b'"segment_places":', b"0", b"-1", b"1e3", b"[[[["),
    ),
    "receipt": Target(
        "a receipt of a purge",
        receipt,
        _receipts,
        (b'"signature"', b'"levels"', b'"scope"', b"null", b"[", b"{", b"9" * 30, b"\\ud800"),
    ),
}
