"""The label of a block: its fields, and the treatment of invalid ones."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from struct import pack, pack_into

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvladder import tiers
from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.codecs.aesgcm import AesGcmCodec
from kvladder.tiers.codecs.base import Codec, Subject
from kvladder.tiers.codecs.chain import Chain
from kvladder.tiers.codecs.zstd import ZstdCodec
from kvladder.tiers.label import (
    LABEL_BYTES,
    Coding,
    Facts,
    Labels,
    LevelRead,
    Outcome,
    SlotAccess,
    Write,
    told,
)

SIZE = 512
LAYOUT = Layout(block_tokens=16, block_bytes=SIZE)
SPACE = LAYOUT.namespace()
KEY, OTHER = (BlockKey(hashlib.sha256(name).digest()) for name in (b"key", b"other"))
BLOCK = bytes(number % 7 for number in range(SIZE))
LABELS = Labels(SPACE, SIZE, verify=True)

FACTS = st.builds(
    Facts,
    st.integers(0, 100),
    st.integers(0, 100),
    st.none() | st.floats(0, 1e12),
    st.just(b"") | st.binary(min_size=8, max_size=8).filter(any),
    st.integers(0, 7),
)


@given(st.binary(min_size=32, max_size=32), FACTS, st.binary(max_size=448 - 8))
def test_a_label_round_trips(key: bytes, facts: Facts, steps: bytes) -> None:
    label = LABELS.pack(BlockKey(key), BLOCK, facts, Coding(SIZE, steps))
    assert len(label) == LABEL_BYTES
    assert told(label) == (key, SPACE, SIZE, facts, xxh3_128_digest(BLOCK))
    outcome, coding = LABELS.check(BlockKey(key), label, memoryview(BLOCK))
    assert (outcome, coding) == (Outcome.GOOD, Coding(SIZE, steps))


def test_the_head_of_a_label_keeps_its_position() -> None:
    """Every release of this version reads the labels of all others, so the head never moves."""
    label = LABELS.pack(KEY, BLOCK, Facts(35, 40, 1.5, b"8 bytes!", 5), Coding(SIZE, b"steps"))
    head = pack(
        "<8sHBxHxxQ32s32sBBB5xd8s16s",
        b"kvlabel\0",
        1,
        1,
        5,
        SIZE,
        KEY,
        SPACE,
        35,
        40,
        5,
        1.5,
        b"8 bytes!",
        xxh3_128_digest(BLOCK),
    )
    body = (head + b"steps").ljust(568, b"\0")
    assert label == body + pack("<Q", xxh3_64_intdigest(body))


def test_labels_of_other_namespaces_or_keys_are_stale() -> None:
    label = LABELS.pack(KEY, BLOCK)
    stored = memoryview(BLOCK)
    foreign = Labels(LAYOUT.namespace(salt="other"), SIZE, verify=True)
    assert LABELS.check(OTHER, label, stored) == (Outcome.STALE, None)
    assert foreign.check(KEY, label, stored) == (Outcome.STALE, None)
    unchecked = Labels(SPACE, SIZE, verify=False)
    assert LABELS.check(KEY, unchecked.pack(KEY, BLOCK), stored) == (Outcome.STALE, None)
    assert unchecked.check(KEY, label, memoryview(bytes(SIZE)))[0] is Outcome.GOOD


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1, 1 << 40, (1 << 64) - 1])
def test_a_wrong_length_is_damage(length: int) -> None:
    for verify in (True, False):
        labels = Labels(SPACE, SIZE, verify=verify)
        label = repaired(labels.pack(KEY, BLOCK), {16: pack("<Q", length)})
        assert labels.check(KEY, label, memoryview(BLOCK * 2))[0] is Outcome.CORRUPT


def repaired(label: bytes, changes: dict[int, bytes]) -> bytes:
    """The label with other bytes at some places, and a check that is right for them."""
    changed = bytearray(label)
    for at, data in changes.items():
        changed[at : at + len(data)] = data
    pack_into("<Q", changed, LABEL_BYTES - 8, xxh3_64_intdigest(bytes(changed[:-8])))
    return bytes(changed)


def read_of(label: bytes, length: int) -> LevelRead:
    side = SlotAccess(LABELS, lambda _: memoryview(bytearray(BLOCK)))
    read = side.read(KEY, 0, Slot(0))
    read.came(label, length)
    return read


@pytest.mark.parametrize("length", [-1, 0, SIZE - 1, SIZE + 1, 1 << 62])
def test_impossible_byte_counts_are_damage(length: int) -> None:
    read = read_of(LABELS.pack(KEY, BLOCK), length)
    assert not read.check()
    assert read.verdict == (Outcome.CORRUPT, None)


def test_the_last_delivery_of_a_read_counts() -> None:
    read = read_of(LABELS.pack(OTHER, BLOCK), SIZE)
    assert not read.check()
    read.came(LABELS.pack(KEY, BLOCK), SIZE)
    assert read.check()
    read.came(b"", 0)
    assert read.verdict == (None, None), "nothing came after all, and nobody counts it"


def test_a_label_is_made_once() -> None:
    view = memoryview(bytearray(BLOCK))
    write = Write(LABELS, KEY, 0, Slot(0), view)
    label = write.label()
    view[:] = bytes(SIZE)
    assert write.label() is label


# ---- labels made by attackers or by chance


class Fuzz:
    """Makes invalid labels, and returns a level's verdict on them."""

    def __init__(self, seed: int, *codecs: Codec) -> None:
        self.random = Random(seed)
        for codec in codecs:
            codec.open(LAYOUT, SPACE)
        known = {codec.id: codec for codec in (ZstdCodec(), *codecs)}
        self.chain = Chain(codecs, layout=LAYOUT, find=known.get)
        found, coding = self.chain.encode(
            Subject(KEY, b"8 bytes!"), memoryview(BLOCK), memoryview(bytearray(SIZE))
        )
        self.stored = bytes(found)
        self.label = LABELS.pack(KEY, self.stored, Facts(salt=b"8 bytes!"), coding)
        self.slot = memoryview(bytearray(SIZE))

    def outcome(self, label: bytes, stored: bytes) -> Outcome:
        """Return the verdict, and assert that no wrong byte is accepted."""
        self.slot[: len(stored)] = stored
        told(label)
        outcome, coding = LABELS.check(KEY, label, self.slot[: len(stored)])
        if coding is not None:
            outcome = self.chain.decode(KEY, coding, self.slot)
        return outcome

    def damaged(self, data: bytes) -> bytes:
        """Return a label with inverted bits, cut, moved, or replaced by noise."""
        random, changed = self.random, bytearray(data)
        match random.randrange(5):
            case 0:
                return data[: random.randrange(len(data))]
            case 1:
                return random.randbytes(len(data))
            case 2:
                at = random.randrange(1, len(data))
                return data[at:] + data[:at]
            case _:
                for _ in range(random.choice((1, 1, 2, 20))):
                    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
                return bytes(changed)

    def forged(self) -> bytes:
        """Return a label with some changed fields and a right check."""
        random, changes = self.random, dict[int, bytes]()
        for _ in range(random.choice((1, 1, 2, 5))):
            at, size = random.choice(
                ((8, 2), (10, 1), (12, 2), (16, 8), (24, 32), (56, 32), (88, 3), (96, 8), (112, 16))
            )
            changes[at] = random.choice((bytes(size), b"\xff" * size, random.randbytes(size)))
            if random.random() < 0.5:
                at = random.randrange(128, LABEL_BYTES - 8)
                changes[at] = random.randbytes(random.randrange(1, LABEL_BYTES - 8 - at + 1))
        return repaired(self.label, changes)


def rounds() -> int:
    """A million in the profile ``night``."""
    return settings.default.max_examples * 100 if settings.default else 5000


@pytest.mark.slow
def test_no_damage_of_a_label_gives_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    seen = Counter[Outcome]()
    kinds = [Fuzz(1), Fuzz(2, ZstdCodec()), Fuzz(3, ZstdCodec(), AesGcmCodec())]
    for number in range(rounds()):
        fuzz = kinds[number % 3]
        label, stored = fuzz.label, fuzz.stored
        which = fuzz.random.randrange(3)
        label = fuzz.damaged(label) if which else label
        stored = fuzz.damaged(stored) if which != 1 else stored
        outcome = fuzz.outcome(label, stored)
        seen[outcome] += 1
        assert outcome is not Outcome.GOOD or (
            (label, stored) == (fuzz.label, fuzz.stored) and fuzz.slot == BLOCK
        )
    assert seen[Outcome.CORRUPT] > rounds() // 2


@pytest.mark.slow
def test_no_forged_label_gives_a_wrong_decrypted_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    seen = Counter[Outcome]()
    secret, open_ = Fuzz(4, ZstdCodec(), AesGcmCodec()), Fuzz(5, ZstdCodec())
    for _ in range(rounds()):
        outcome = secret.outcome(secret.forged(), secret.stored)
        seen[outcome] += 1
        assert outcome is not Outcome.GOOD or secret.slot == BLOCK
        assert open_.outcome(open_.forged(), open_.stored) in Outcome
    assert {*seen} == {*Outcome} - {Outcome.EXPIRED}, "without a clock nothing expires"


def test_labels_with_a_clock_refuse_expired_blocks() -> None:
    now_s, stored = 1000.0, memoryview(BLOCK)
    clocked = Labels(SPACE, SIZE, verify=True, wall=lambda: now_s)
    for ends_s, outcome in (
        (None, Outcome.GOOD),
        (now_s + 0.5, Outcome.GOOD),
        (now_s, Outcome.EXPIRED),
        (-1.0, Outcome.EXPIRED),
    ):
        label = LABELS.pack(KEY, BLOCK, Facts(expires_wall_s=ends_s))
        assert clocked.check(KEY, label, stored)[0] is outcome
        assert LABELS.check(KEY, label, stored)[0] is Outcome.GOOD
        assert clocked.check(OTHER, label, stored)[0] is Outcome.STALE


@pytest.mark.parametrize("size", [449 - 8, 441, 576, 65535])
def test_steps_that_a_label_has_no_room_for_are_damage(size: int) -> None:
    label = repaired(LABELS.pack(KEY, BLOCK), {12: pack("<H", size)})
    assert LABELS.check(KEY, label, memoryview(BLOCK)) == (Outcome.CORRUPT, None)


PACKING = re.compile(r"^(?:from|import) (?:struct|xxhash|zlib|hashlib)\b", re.MULTILINE)
OTHERS = {
    "codecs/aesgcm.py": "what a step needs to be undone",
    "codecs/fp8.py": "what a step needs to be undone",
    "codecs/zstd.py": "what a step needs to be undone",
    "fields.py": "long and secret values of a namespace's fields",
    "files/meta.py": "META",
    "files/header.py": "where a page lies, before its label",
    "files/log.py": "records",
    "nixl/curve.py": "names of clients for operators",
    "nixl/tier.py": "which server a key goes to",
}
"""Other modules that pack bytes or take checksums, and their subjects: never a block."""


def test_labels_are_packed_and_checked_in_one_module() -> None:
    folder = Path(tiers.__file__).parent
    texts = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.py")
    }
    assert [name for name, text in texts.items() if "xxh3_128" in text] == ["label.py"]
    assert {name for name, text in texts.items() if PACKING.search(text)} == {"label.py", *OTHERS}


RISEN = """
from kvladder.tiers import label
before = label.VERSION
from kvladder.tiers.{0} import VERSION as now
import sys
for name in [name for name in sys.modules if name.startswith("kvladder.tiers.{1}")]:
    del sys.modules[name]
label.VERSION = before + 1
from kvladder.tiers.{0} import VERSION as then
print(then - now)
"""


@pytest.mark.parametrize("module", ["files.meta", "nixl.messages"])
def test_a_tier_that_compares_versions_does_not_find_blocks_of_an_older_label(module: str) -> None:
    code = RISEN.format(module, module.partition(".")[0])
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"
