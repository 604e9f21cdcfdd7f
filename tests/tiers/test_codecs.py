"""The shipped codecs pass the suite; chains of them give back what they were given, or nothing."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from random import Random
from struct import pack, unpack_from

import pytest
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvladder.errors import ConfigError
from kvladder.keys import BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.testing.codecs import CodecTests, MakeCodec
from kvladder.tiers.base import NOTE_BYTES, Item, Outcome
from kvladder.tiers.codecs import aesgcm
from kvladder.tiers.codecs.aesgcm import AesGcmCodec, AesGcmOptions
from kvladder.tiers.codecs.base import ChecksumCodec, Codec, Subject
from kvladder.tiers.codecs.chain import Chain
from kvladder.tiers.codecs.zstd import ZstdCodec, ZstdOptions
from tests.kit.mirror import MirrorCodec

SIZE = 4096
LAYOUT = Layout(block_tokens=16, block_bytes=SIZE, element="bfloat16")
SPACE = LAYOUT.namespace()
ITEM = Item(BlockKey(hashlib.sha256(b"key").digest()), 7, salt=b"12345678")
OTHER = ITEM._replace(key=BlockKey(hashlib.sha256(b"other").digest()))


class TestChecksum(CodecTests):
    @pytest.fixture
    def make(self) -> MakeCodec:
        return ChecksumCodec


class TestMirror(CodecTests):
    @pytest.fixture
    def make(self) -> MakeCodec:
        return MirrorCodec


class TestZstd(CodecTests):
    @pytest.fixture(params=[1, 3, -5])
    def make(self, request: pytest.FixtureRequest) -> MakeCodec:
        return lambda: ZstdCodec(ZstdOptions(level=request.param))


class TestZstdOfBytes(TestZstd):
    @pytest.fixture
    def layout(self) -> Layout:
        return Layout(block_tokens=16, block_bytes=8191)


def chain(*codecs: Codec, checked: bool = False, space: Namespace = SPACE, **more) -> Chain:
    for codec in codecs:
        codec.open(LAYOUT, space)
    find = more.pop("find", lambda _: None)
    return Chain(codecs, layout=LAYOUT, namespace=space, find=find, checked=checked)


def numbers(seed: int = 0) -> bytes:
    """Sixteen-bit numbers with few exponents, as KV has them."""
    random = Random(seed)
    return b"".join(
        bytes((random.randrange(256), random.choice(b"\x3e\x3f\xbe"))) for _ in range(SIZE // 2)
    )


def encoded(sender: Chain, block: bytes, item: Item = ITEM) -> tuple[bytes, bytes]:
    stored, note = sender.encode(item, memoryview(block), memoryview(bytearray(SIZE)))
    assert len(note) <= NOTE_BYTES
    return bytes(stored), note


def decoded(
    reader: Chain, stored: bytes | bytearray, note: bytes | bytearray, item: Item = ITEM
) -> bytes | Outcome:
    slot = bytearray(stored.ljust(SIZE, b"\xa5"))
    outcome = reader.decode(item, bytes(note), memoryview(slot))
    return bytes(slot) if outcome is Outcome.GOOD else outcome


def steps_of(note: bytes) -> list[tuple[int, bytes]]:
    """Id and parameters of each codec that a note names."""
    at, steps = 10, []
    while at < len(note) - 8:
        codec, size = unpack_from("<HB", note, at)
        at += 3 + size
        steps.append((codec, note[at - size : at]))
    return steps


def note_of(
    item: Item, steps: list[tuple[int, bytes]], length: int, *, count: int | None = None
) -> bytes:
    """A note as somebody makes it who knows the format and no key."""
    note = pack("<BBQ", 1, len(steps) if count is None else count, length)
    note += b"".join(pack("<HB", codec, len(params)) + params for codec, params in steps)
    return note + pack("<Q", xxh3_64_intdigest(SPACE + item.key + note))


def test_the_checksum_is_of_what_crosses_the_edge():
    codec = ChecksumCodec()
    data = memoryview(bytearray(b"data"))
    stored, tag = codec.encode(data, memoryview(bytearray(4)), Subject(ITEM.key))
    assert stored is data
    assert tag == xxh3_128_digest(b"data")


def test_byte_planes_are_what_makes_numbers_shrink():
    codec = ZstdCodec()
    codec.open(LAYOUT, SPACE)
    block = numbers()
    done = codec.encode(memoryview(block), memoryview(bytearray(SIZE)), Subject(ITEM.key))
    assert done is not None
    plain = zstandard.compress(block, 1)
    assert len(done[0]) < 0.9 * len(plain)
    assert len(done[0]) < 0.7 * SIZE


def test_what_does_not_shrink_is_stored_as_it_is():
    sender = chain(ZstdCodec(), ChecksumCodec(), checked=True)
    block = Random(1).randbytes(SIZE)
    data, target = memoryview(block), memoryview(bytearray(SIZE))
    stored, note = sender.encode(ITEM, data, target)
    assert stored is data
    assert decoded(sender, block, note) == block


def test_a_frame_that_claims_to_be_huge_is_not_unpacked():
    codec = ZstdCodec()
    codec.open(LAYOUT, SPACE)
    bomb = zstandard.compress(bytes(1 << 24), 1)
    target = memoryview(bytearray(SIZE))
    for params in (len(bomb), 0):
        found = codec.decode(memoryview(bomb), pack("<Q", params), target, Subject(ITEM.key))
        assert found is None


PARTS = st.binary(min_size=1, max_size=64).map(lambda part: (part * SIZE)[:SIZE])


@given(PARTS | st.integers().map(numbers))
def test_chains_round_trip(block: bytes):
    for codecs in ([], [ChecksumCodec()], [ZstdCodec()], [ZstdCodec(), ChecksumCodec()]):
        sender = chain(*codecs)
        assert decoded(sender, *encoded(sender, block)) == block


@pytest.mark.slow
def test_every_single_bit_counts():
    sender = chain(ZstdCodec(), ChecksumCodec(), checked=True)
    stored, note = encoded(sender, numbers())
    for place in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[place // 8] ^= 1 << place % 8
        assert decoded(sender, damaged, note) is Outcome.CORRUPT
    for place in range(8 * len(note)):
        damaged = bytearray(note)
        damaged[place // 8] ^= 1 << place % 8
        assert decoded(sender, stored, damaged) is Outcome.CORRUPT


def test_what_is_cut_short_is_not_believed():
    sender = chain(ZstdCodec(), ChecksumCodec(), checked=True)
    stored, note = encoded(sender, numbers())
    for size in range(0, len(stored), 7):
        assert decoded(sender, stored[:size], note) is Outcome.CORRUPT
    for size in range(1, len(note)):
        assert decoded(sender, stored, note[:size]) is Outcome.CORRUPT
    assert decoded(sender, stored, b"") is Outcome.STALE


@pytest.mark.parametrize("count", [0, 2, 7, 200, 255])
def test_a_note_of_another_length_than_its_steps_is_damage(count):
    sender = chain(ZstdCodec(), ChecksumCodec(), checked=True)
    stored, note = encoded(sender, numbers())
    forged = note_of(ITEM, steps_of(note), len(stored), count=count)
    assert (
        (decoded(sender, stored, forged) == numbers())
        if count == 2
        else (decoded(sender, stored, forged) is Outcome.CORRUPT)
    )


def test_another_block_s_note_is_not_believed():
    sender = chain(ZstdCodec(), ChecksumCodec(), checked=True)
    stored, note = encoded(sender, numbers())
    other_stored, other_note = encoded(sender, numbers(1), OTHER)
    assert decoded(sender, stored, other_note) is Outcome.CORRUPT
    assert decoded(sender, other_stored, note) is Outcome.CORRUPT
    assert decoded(sender, other_stored, other_note) is Outcome.CORRUPT
    stranger = chain(ZstdCodec(), space=LAYOUT.namespace(salt="other"))
    assert decoded(stranger, stored, note) is Outcome.CORRUPT


@given(st.binary(max_size=NOTE_BYTES), st.binary(max_size=SIZE))
def test_nothing_made_up_is_believed(note: bytes, stored: bytes):
    sender = chain(ZstdCodec(), ChecksumCodec(), checked=True)
    assert decoded(sender, stored, note) in {Outcome.CORRUPT, Outcome.STALE}


def test_a_reader_needs_no_configuration():
    block = numbers()
    stored, note = encoded(chain(ZstdCodec(), ChecksumCodec()), block)
    known = {codec.id: codec for codec in (ZstdCodec(), ChecksumCodec())}
    assert decoded(chain(find=known.get), stored, note) == block
    assert decoded(chain(find=known.get, checked=True), stored, note) == block


def test_an_unknown_codec_is_a_miss():
    stored, note = encoded(chain(ZstdCodec(), ChecksumCodec()), numbers())
    assert decoded(chain(ChecksumCodec(), checked=True), stored, note) is Outcome.STALE


def test_where_blocks_are_checked_one_without_a_checksum_is_a_miss():
    stored, note = encoded(chain(ZstdCodec()), numbers())
    checking = chain(ZstdCodec(), ChecksumCodec(), checked=True)
    assert decoded(checking, stored, note) is Outcome.STALE


class Half(Codec):
    """Keeps every other byte of blocks whose bytes come in pairs."""

    name = "half"
    id = 300

    def encode(self, data, target, subject):
        if data[::2] != data[1::2]:
            return None
        target[: len(data) // 2] = data[::2]
        return target[: len(data) // 2], b""

    def decode(self, data, params, target, subject):
        target[: 2 * len(data) : 2] = data
        target[1 : 2 * len(data) : 2] = data
        return target[: 2 * len(data)]


class Quarter(Half):
    id = 301


class Eighth(Half):
    id = 302


@pytest.mark.parametrize("pairs", [1, 2, 4, 8])
def test_codecs_that_leave_a_block_out_do_not_disturb_the_others(pairs):
    """Between them the bytes go back and forth, whoever takes part."""
    random = Random(pairs)
    block = b"".join(bytes((random.randrange(256),)) * pairs for _ in range(SIZE // pairs))
    for codecs in (
        [Half(), Quarter(), Eighth()],
        [Half(), ZstdCodec(), Quarter(), Eighth(), ChecksumCodec()],
        [Half(), Quarter(), Eighth(), ZstdCodec(ZstdOptions(min_saving=0.9))],
    ):
        sender = chain(*codecs)
        assert decoded(sender, *encoded(sender, block)) == block


MASTER, ROTATED = "11" * 32, "22" * 32


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLADDER_KEY", MASTER)


@pytest.mark.usefixtures("master")
class TestAesGcm(CodecTests):
    @pytest.fixture
    def make(self) -> MakeCodec:
        return AesGcmCodec


@pytest.mark.usefixtures("master")
class TestAesGcmOfBytes(TestAesGcm):
    @pytest.fixture(params=[1, 15, 16, 17, 31, 32, 33, 8191])
    def layout(self, request: pytest.FixtureRequest) -> Layout:
        return Layout(block_tokens=16, block_bytes=request.param)


@pytest.mark.usefixtures("master")
def test_what_is_encrypted_can_be_read_by_anybody_who_knows_the_master_key():
    """With primitives alone, as the documentation of the codec says."""
    block = numbers()
    codec = AesGcmCodec()
    codec.open(LAYOUT, SPACE)
    subject = Subject(ITEM.key, ITEM.salt, b"steps")
    stored, params = codec.encode(memoryview(block), memoryview(bytearray(SIZE)), subject)
    nonce, tag, epoch, salt = params[8:20], params[20:36], params[36:48], params[48:]
    assert salt == ITEM.salt
    info = b"kvladder aes-gcm v2\0key\0" + SPACE + epoch + salt
    key = HKDF(SHA256(), 32, None, info).derive(bytes.fromhex(MASTER))
    bound = SPACE + ITEM.key + bytes([8]) + salt.ljust(16, b"\0") + b"steps"
    assert AESGCM(key).decrypt(nonce, bytes(stored) + tag, bound) == block


@pytest.mark.usefixtures("master")
def test_nothing_is_encrypted_twice_alike():
    sender = chain(AesGcmCodec())
    block = bytes(SIZE)
    found = {encoded(sender, block)[0] for _ in range(20)}
    found |= {encoded(sender, block, ITEM._replace(salt=b"another!"))[0] for _ in range(20)}
    assert len(found) == 40
    assert not any(block[:16] in stored for stored in found)


@pytest.mark.slow
@pytest.mark.usefixtures("master")
@pytest.mark.parametrize("packed", [False, True])
def test_every_single_bit_of_an_encrypted_block_counts(packed):
    sender = chain(*([ZstdCodec()] if packed else []), AesGcmCodec())
    stored, note = encoded(sender, numbers())
    assert decoded(sender, stored, note) == numbers()
    for place in range(0, 8 * len(stored), 7):
        damaged = bytearray(stored)
        damaged[place // 8] ^= 1 << place % 8
        assert decoded(sender, damaged, note) is Outcome.CORRUPT
    for place in range(8 * len(note)):
        damaged = bytearray(note)
        damaged[place // 8] ^= 1 << place % 8
        assert decoded(sender, stored, damaged) is Outcome.CORRUPT


@pytest.mark.usefixtures("master")
def test_a_block_is_bound_to_its_key_and_namespace():
    """Also for whoever can make notes that are right for another block."""
    codec = AesGcmCodec()
    codec.open(LAYOUT, SPACE)
    target = memoryview(bytearray(SIZE))
    stored, params = codec.encode(memoryview(numbers()), target, Subject(ITEM.key, ITEM.salt))
    plain = memoryview(bytearray(SIZE))
    assert codec.decode(stored, params, plain, Subject(ITEM.key)) == numbers()
    assert codec.decode(stored, params, plain, Subject(OTHER.key)) is None
    codec.open(LAYOUT, LAYOUT.namespace(salt="other"))
    assert codec.decode(stored, params, plain, Subject(ITEM.key)) is None


@pytest.mark.usefixtures("master")
def test_a_block_is_bound_to_what_was_done_to_it_before():
    """Somebody who can write to the medium cannot have it unpacked in another way."""
    known = {ChecksumCodec.id: ChecksumCodec()}
    sender = chain(ZstdCodec(), AesGcmCodec(), find=known.get)
    stored, note = encoded(sender, numbers())
    steps = steps_of(note)
    assert [codec for codec, _ in steps] == [ZstdCodec.id, AesGcmCodec.id]
    assert decoded(sender, stored, note_of(ITEM, steps, len(stored))) == numbers()
    (packed, params), encrypted = steps
    forged = [
        [encrypted],
        [(ChecksumCodec.id, params), encrypted],
        [(packed, params[:-1] + bytes([params[-1] ^ 1])), encrypted],
        [(packed, params), (packed, params), encrypted],
        [encrypted, (packed, params)],
        [(packed, params), encrypted, (packed, params)],
        [(packed, params), encrypted, encrypted],
    ]
    for made_up in forged:
        assert decoded(sender, stored, note_of(ITEM, made_up, len(stored))) is Outcome.CORRUPT
    wrapped = zstandard.ZstdCompressor().compress(bytes(stored))
    outer = (packed, pack("<Q", len(wrapped)))
    twice = note_of(ITEM, [*steps, outer], len(wrapped))
    assert decoded(sender, wrapped, twice) is Outcome.CORRUPT, "nothing is unpacked unchecked"


@pytest.mark.usefixtures("master")
def test_no_key_encrypts_more_blocks_than_random_nonces_allow(monkeypatch):
    monkeypatch.setattr(aesgcm, "BLOCKS_MAX", 3)
    monkeypatch.setattr(aesgcm, "KEYS_MAX", 2)
    codec = AesGcmCodec()
    codec.open(LAYOUT, SPACE)
    used: Counter[tuple[bytes, bytes]] = Counter()
    for number in range(60):
        subject = Subject(ITEM.key, b"salt %d" % (number % 3 if number > 20 else 0))
        target = memoryview(bytearray(SIZE))
        stored, params = codec.encode(memoryview(numbers()), target, subject)
        used[params[36:48], subject.salt] += 1
        plain = memoryview(bytearray(SIZE))
        assert codec.decode(stored, params, plain, Subject(ITEM.key)) == numbers()
        assert len(codec._writers) <= 2
    assert max(used.values()) == 3


def test_after_a_rotation_old_blocks_are_misses(monkeypatch):
    monkeypatch.setenv("KVLADDER_KEY", MASTER)
    stored, note = encoded(chain(AesGcmCodec()), numbers())
    monkeypatch.setenv("KVLADDER_KEY", ROTATED)
    assert decoded(chain(AesGcmCodec()), stored, note) is Outcome.STALE


@pytest.mark.usefixtures("master")
def test_where_blocks_are_encrypted_no_other_is_taken():
    """Somebody who can write to the medium cannot have the engine read what he wrote."""
    stored, note = encoded(chain(ZstdCodec(), ChecksumCodec()), numbers())
    known = {ChecksumCodec.id: ChecksumCodec()}
    encrypting = chain(ZstdCodec(), AesGcmCodec(), find=known.get)
    assert decoded(encrypting, stored, note) is Outcome.STALE
    assert decoded(encrypting, numbers(), b"") is Outcome.STALE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "KVLADDER_KEY is not set"),
        ("11" * 31, "does not hold a key"),
        ("secret secret secret secret secret", "does not hold a key"),
        ("c2hvcnQ=", "does not hold a key"),
    ],
)
def test_a_key_that_is_none_is_refused(monkeypatch, text, says):
    monkeypatch.setenv("KVLADDER_KEY", text)
    with pytest.raises(ConfigError, match=says) as refused:
        AesGcmCodec().open(LAYOUT, SPACE)
    assert "openssl rand" in str(refused.value)
    assert not text or text not in str(refused.value)


def test_hexadecimal_and_base64_are_the_same_key(monkeypatch):
    monkeypatch.setenv("KVLADDER_KEY", MASTER)
    stored, note = encoded(chain(AesGcmCodec()), numbers())
    monkeypatch.setenv("OTHER_KEY", base64.b64encode(bytes.fromhex(MASTER)).decode())
    other = chain(AesGcmCodec(AesGcmOptions(variable="OTHER_KEY")))
    assert decoded(other, stored, note) == numbers()
