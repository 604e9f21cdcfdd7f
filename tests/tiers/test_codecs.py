"""The shipped codecs pass the suite; chains of them return the original bytes or nothing."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from random import Random
from struct import pack
from typing import NamedTuple

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
from kvladder.tiers.codecs import aesgcm
from kvladder.tiers.codecs.aesgcm import AesGcmCodec, AesGcmOptions
from kvladder.tiers.codecs.base import ChecksumCodec, Codec, Subject
from kvladder.tiers.codecs.chain import Chain, Find
from kvladder.tiers.codecs.zstd import ZstdCodec, ZstdOptions
from kvladder.tiers.label import (
    LABEL_BYTES,
    STEPS_MAX,
    Coding,
    Facts,
    Labels,
    Outcome,
    packed_step,
    steps_of,
    told,
)
from tests.kit.mirror import MirrorCodec

SIZE = 4096
LAYOUT = Layout(block_tokens=16, block_bytes=SIZE, element="bfloat16")
SPACE = LAYOUT.namespace()
SUBJECT = Subject(BlockKey(hashlib.sha256(b"key").digest()), b"12345678")
OTHER = SUBJECT._replace(key=BlockKey(hashlib.sha256(b"other").digest()))


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


class Side(NamedTuple):
    """A level's codecs and labels."""

    chain: Chain
    labels: Labels


def chain(
    *codecs: Codec, space: Namespace = SPACE, find: Find = lambda _: None, checked: bool = False
) -> Side:
    for codec in codecs:
        codec.open(LAYOUT, space)
    own = [codec for codec in codecs if not isinstance(codec, ChecksumCodec)]
    verify = checked or any(codec.checks for codec in codecs)
    return Side(Chain(own, layout=LAYOUT, find=find), Labels(space, SIZE, verify=verify))


def numbers(seed: int = 0) -> bytes:
    """Sixteen-bit numbers with few exponents, as KV has them."""
    random = Random(seed)
    return b"".join(
        bytes((random.randrange(256), random.choice(b"\x3e\x3f\xbe"))) for _ in range(SIZE // 2)
    )


def encoded(sender: Side, block: bytes, subject: Subject = SUBJECT) -> tuple[bytes, bytes]:
    stored, coding = sender.chain.encode(subject, memoryview(block), memoryview(bytearray(SIZE)))
    facts = Facts(salt=subject.salt)
    return bytes(stored), sender.labels.pack(subject.key, bytes(stored), facts, coding)


def decoded(
    reader: Side, stored: bytes | bytearray, label: bytes | bytearray, subject: Subject = SUBJECT
) -> bytes | Outcome:
    slot = memoryview(bytearray(stored.ljust(SIZE, b"\xa5")))
    outcome, coding = reader.labels.check(subject.key, bytes(label), slot[: len(stored)])
    if coding is not None:
        outcome = reader.chain.decode(subject.key, coding, slot)
    return bytes(slot) if outcome is Outcome.GOOD else outcome


def coding_of(side: Side, stored: bytes, label: bytes) -> Coding:
    outcome, coding = side.labels.check(SUBJECT.key, label, memoryview(stored))
    assert outcome is Outcome.GOOD
    assert coding is not None
    return coding


def forged(stored: bytes, steps: Sequence[tuple[int, bytes]]) -> bytes:
    """Return a label as an attacker without a key makes it."""
    packed = b"".join(packed_step(codec, params) for codec, params in steps)
    labels = Labels(SPACE, SIZE, verify=True)
    return labels.pack(SUBJECT.key, stored, coding=Coding(len(stored), packed))


def test_the_checksum_covers_the_encoded_bytes():
    stored, label = encoded(chain(ZstdCodec(), ChecksumCodec()), numbers())
    said = told(label)
    assert said is not None
    assert said.checksum == xxh3_128_digest(stored)
    said = told(encoded(chain(ZstdCodec()), numbers())[1])
    assert said is not None
    assert said.checksum == b""


def test_byte_planes_make_numbers_compressible():
    codec = ZstdCodec()
    codec.open(LAYOUT, SPACE)
    block = numbers()
    done = codec.encode(memoryview(block), memoryview(bytearray(SIZE)), Subject(SUBJECT.key))
    assert done is not None
    plain = zstandard.compress(block, 1)
    assert len(done[0]) < 0.9 * len(plain)
    assert len(done[0]) < 0.7 * SIZE


def test_a_block_that_does_not_shrink_is_stored_unchanged():
    sender = chain(ZstdCodec(), ChecksumCodec())
    block = Random(1).randbytes(SIZE)
    data, target = memoryview(block), memoryview(bytearray(SIZE))
    stored, coding = sender.chain.encode(SUBJECT, data, target)
    assert stored is data
    assert not coding.steps
    assert decoded(sender, *encoded(sender, block)) == block


def test_a_frame_that_claims_to_be_huge_is_not_unpacked():
    codec = ZstdCodec()
    codec.open(LAYOUT, SPACE)
    bomb = zstandard.compress(bytes(1 << 24), 1)
    target = memoryview(bytearray(SIZE))
    for params in (len(bomb), 0):
        found = codec.decode(memoryview(bomb), pack("<Q", params), target, Subject(SUBJECT.key))
        assert found is None


PARTS = st.binary(min_size=1, max_size=64).map(lambda part: (part * SIZE)[:SIZE])


@given(PARTS | st.integers().map(numbers))
def test_chains_round_trip(block: bytes):
    for codecs in ([], [ChecksumCodec()], [ZstdCodec()], [ZstdCodec(), ChecksumCodec()]):
        sender = chain(*codecs)
        assert decoded(sender, *encoded(sender, block)) == block


@pytest.mark.slow
def test_every_single_bit_counts():
    sender = chain(ZstdCodec(), ChecksumCodec())
    stored, label = encoded(sender, numbers())
    for place in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[place // 8] ^= 1 << place % 8
        assert decoded(sender, damaged, label) is Outcome.CORRUPT
    for place in range(8 * len(label)):
        damaged = bytearray(label)
        damaged[place // 8] ^= 1 << place % 8
        assert decoded(sender, stored, damaged) is Outcome.CORRUPT


def test_truncated_bytes_or_labels_are_damage():
    sender = chain(ZstdCodec(), ChecksumCodec())
    stored, label = encoded(sender, numbers())
    for size in range(0, len(stored), 7):
        assert decoded(sender, stored[:size], label) is Outcome.CORRUPT
    for size in range(len(label)):
        assert decoded(sender, stored, label[:size]) is Outcome.CORRUPT


def test_a_label_with_truncated_steps_is_damage():
    sender = chain(ZstdCodec(), ChecksumCodec())
    stored, label = encoded(sender, numbers())
    coding = coding_of(sender, stored, label)
    for size in range(len(coding.steps) + 1):
        cut = sender.labels.pack(
            SUBJECT.key, stored, coding=Coding(len(stored), coding.steps[:size])
        )
        is_whole = size == len(coding.steps)
        assert decoded(sender, stored, cut) == (numbers() if is_whole else Outcome.CORRUPT)


def test_more_steps_than_a_label_has_are_damage():
    sender = chain(Half(), checked=True)
    for count in (STEPS_MAX + 1, 130):
        label = forged(bytes(SIZE >> 1), [(Half.id, b"")] * count)
        assert decoded(sender, bytes(SIZE >> 1), label) is Outcome.CORRUPT


def test_more_bytes_of_steps_than_a_label_has_are_damage():
    """Also if its check is right."""
    sender = chain(ZstdCodec(), ChecksumCodec())
    stored, label = encoded(sender, numbers())
    for size in (449, 576, 65535):
        body = label[:12] + pack("<H", size) + label[14:-8]
        assert decoded(sender, stored, body + pack("<Q", xxh3_64_intdigest(body))) is (
            Outcome.CORRUPT
        )


def test_a_label_of_another_block_is_refused():
    sender = chain(ZstdCodec(), ChecksumCodec())
    stored, label = encoded(sender, numbers())
    other_stored, other_label = encoded(sender, numbers(1), OTHER)
    assert decoded(sender, stored, other_label) is Outcome.STALE
    assert decoded(sender, other_stored, label) is Outcome.CORRUPT
    assert decoded(sender, other_stored, other_label) is Outcome.STALE
    stranger = chain(ZstdCodec(), space=LAYOUT.namespace(salt="other"))
    assert decoded(stranger, stored, label) is Outcome.STALE


@given(st.binary(max_size=LABEL_BYTES), st.binary(max_size=SIZE))
def test_forged_labels_are_refused(label: bytes, stored: bytes):
    sender = chain(ZstdCodec(), ChecksumCodec())
    assert decoded(sender, stored, label) in {Outcome.CORRUPT, Outcome.STALE}


def test_a_reader_needs_no_configuration():
    block = numbers()
    stored, label = encoded(chain(ZstdCodec(), ChecksumCodec()), block)
    known = {codec.id: codec for codec in (ZstdCodec(), ChecksumCodec())}
    assert decoded(chain(find=known.get), stored, label) == block
    assert decoded(chain(find=known.get), stored, label) == block


def test_an_unknown_codec_is_a_miss():
    stored, label = encoded(chain(ZstdCodec(), ChecksumCodec()), numbers())
    assert decoded(chain(ChecksumCodec()), stored, label) is Outcome.UNREADABLE


def test_where_blocks_are_checked_one_without_a_checksum_is_a_miss():
    stored, label = encoded(chain(ZstdCodec()), numbers())
    checking = chain(ZstdCodec(), ChecksumCodec())
    assert decoded(checking, stored, label) is Outcome.STALE


class Half(Codec):
    """Keeps every other byte of blocks with bytes in pairs."""

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
def test_a_codec_that_skips_a_block_does_not_disturb_the_others(pairs):
    """The bytes alternate between two buffers, whichever codecs take part."""
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
def test_a_block_can_be_decrypted_with_the_master_key_and_the_documentation():
    """With primitives alone, as in the documentation of the codec."""
    block = numbers()
    codec = AesGcmCodec()
    codec.open(LAYOUT, SPACE)
    subject = SUBJECT._replace(steps=b"steps")
    stored, params = codec.encode(memoryview(block), memoryview(bytearray(SIZE)), subject)
    nonce, tag, epoch, salt = params[8:20], params[20:36], params[36:48], params[48:]
    assert salt == SUBJECT.salt
    info = b"kvladder aes-gcm v2\0key\0" + SPACE + epoch + salt
    key = HKDF(SHA256(), 32, None, info).derive(bytes.fromhex(MASTER))
    bound = SPACE + SUBJECT.key + bytes([8]) + salt.ljust(16, b"\0") + b"steps"
    assert AESGCM(key).decrypt(nonce, bytes(stored) + tag, bound) == block


@pytest.mark.usefixtures("master")
def test_encrypting_a_block_twice_gives_different_bytes():
    sender = chain(AesGcmCodec())
    block = bytes(SIZE)
    found = {encoded(sender, block)[0] for _ in range(20)}
    found |= {encoded(sender, block, SUBJECT._replace(salt=b"another!"))[0] for _ in range(20)}
    assert len(found) == 40
    assert not any(block[:16] in stored for stored in found)


@pytest.mark.slow
@pytest.mark.usefixtures("master")
@pytest.mark.parametrize("packed", [False, True])
def test_every_single_bit_of_an_encrypted_block_counts(packed):
    sender = chain(*([ZstdCodec()] if packed else []), AesGcmCodec())
    stored, label = encoded(sender, numbers())
    assert decoded(sender, stored, label) == numbers()
    for place in range(0, 8 * len(stored), 7):
        damaged = bytearray(stored)
        damaged[place // 8] ^= 1 << place % 8
        assert decoded(sender, damaged, label) is Outcome.CORRUPT
    for place in range(8 * len(label)):
        damaged = bytearray(label)
        damaged[place // 8] ^= 1 << place % 8
        assert decoded(sender, stored, damaged) is Outcome.CORRUPT


@pytest.mark.usefixtures("master")
def test_a_block_is_bound_to_its_key_and_namespace():
    """Also against an attacker with valid labels of another block."""
    codec = AesGcmCodec()
    codec.open(LAYOUT, SPACE)
    target = memoryview(bytearray(SIZE))
    stored, params = codec.encode(memoryview(numbers()), target, SUBJECT)
    plain = memoryview(bytearray(SIZE))
    assert codec.decode(stored, params, plain, Subject(SUBJECT.key)) == numbers()
    assert codec.decode(stored, params, plain, Subject(OTHER.key)) is None
    codec.open(LAYOUT, LAYOUT.namespace(salt="other"))
    assert codec.decode(stored, params, plain, Subject(SUBJECT.key)) is None


@pytest.mark.usefixtures("master")
def test_encryption_binds_a_block_to_its_earlier_steps():
    """An attacker with access to the medium cannot change how a block is decoded."""
    known = {ChecksumCodec.id: ChecksumCodec()}
    sender = chain(ZstdCodec(), AesGcmCodec(), find=known.get)
    stored, label = encoded(sender, numbers())
    found = steps_of(coding_of(sender, stored, label))
    assert found is not None
    steps = [(step.codec, step.params) for step in found]
    assert [codec for codec, _ in steps] == [ZstdCodec.id, AesGcmCodec.id]
    assert decoded(sender, stored, forged(stored, steps)) == numbers()
    (packed, params), encrypted = steps
    lies = [
        [encrypted],
        [(ChecksumCodec.id, params), encrypted],
        [(packed, params[:-1] + bytes([params[-1] ^ 1])), encrypted],
        [(packed, params), (packed, params), encrypted],
        [encrypted, (packed, params)],
        [(packed, params), encrypted, (packed, params)],
        [(packed, params), encrypted, encrypted],
    ]
    for made_up in lies:
        assert decoded(sender, stored, forged(stored, made_up)) is Outcome.CORRUPT
    wrapped = zstandard.ZstdCompressor().compress(bytes(stored))
    outer = (packed, pack("<Q", len(wrapped)))
    twice = forged(wrapped, [*steps, outer])
    assert decoded(sender, wrapped, twice) is Outcome.CORRUPT, "nothing is unpacked unchecked"


@pytest.mark.usefixtures("master")
def test_encryption_binds_steps_that_keep_the_length_too():
    """Left out or repeated, they would make a whole block of other bytes."""
    sender = chain(MirrorCodec(), AesGcmCodec())
    stored, label = encoded(sender, numbers())
    steps = steps_of(coding_of(sender, stored, label))
    assert steps is not None
    mirrored, encrypted = [(step.codec, step.params) for step in steps]
    assert decoded(sender, stored, forged(stored, [mirrored, encrypted])) == numbers()
    for made_up in ([encrypted], [mirrored, mirrored, encrypted]):
        assert decoded(sender, stored, forged(stored, made_up)) is Outcome.CORRUPT


@pytest.mark.usefixtures("master")
def test_no_key_encrypts_more_blocks_than_random_nonces_allow(monkeypatch):
    monkeypatch.setattr(aesgcm, "BLOCKS_MAX", 3)
    monkeypatch.setattr(aesgcm, "KEYS_MAX", 2)
    codec = AesGcmCodec()
    codec.open(LAYOUT, SPACE)
    used: Counter[tuple[bytes, bytes]] = Counter()
    for number in range(60):
        subject = Subject(SUBJECT.key, b"salt %d" % (number % 3 if number > 20 else 0))
        target = memoryview(bytearray(SIZE))
        stored, params = codec.encode(memoryview(numbers()), target, subject)
        used[params[36:48], subject.salt] += 1
        plain = memoryview(bytearray(SIZE))
        assert codec.decode(stored, params, plain, Subject(SUBJECT.key)) == numbers()
        assert len(codec._keys._writers) <= 2
    assert max(used.values()) == 3


def test_after_a_rotation_old_blocks_are_misses(monkeypatch):
    monkeypatch.setenv("KVLADDER_KEY", MASTER)
    stored, label = encoded(chain(AesGcmCodec()), numbers())
    monkeypatch.setenv("KVLADDER_KEY", ROTATED)
    assert decoded(chain(AesGcmCodec()), stored, label) is Outcome.UNREADABLE


def test_the_key_in_a_file_changes_while_blocks_are_read_and_written(tmp_path, caplog):
    """The new key is for new blocks; blocks of the old one are read while its line is there."""
    file = tmp_path / "keys"
    write_new(file, MASTER)
    running = chain(AesGcmCodec(AesGcmOptions(key_file=str(file))))
    old, old_label = encoded(running, numbers())
    write_new(file, ROTATED, MASTER)
    new, new_label = encoded(running, numbers())
    assert decoded(running, old, old_label) == numbers()
    assert decoded(running, new, new_label) == numbers()
    write_new(file, ROTATED)
    assert decoded(running, old, old_label) is Outcome.UNREADABLE
    assert decoded(running, new, new_label) == numbers()
    changes = [text for text in caplog.messages if "has changed" in text]
    assert changes == [f"{file} has changed; secrets in effect now: {n}" for n in (2, 1)]
    alone = chain(AesGcmCodec(AesGcmOptions(key_file=str(file))))
    assert decoded(alone, new, new_label) == numbers()


def write_new(file, *lines):
    """Put another file in its place, as Kubernetes does."""
    fresh = file.with_name("fresh")
    fresh.write_text("\n".join(lines) + "\n")
    fresh.replace(file)


def test_a_wrong_file_of_keys_leaves_those_in_effect(tmp_path, caplog):
    file = tmp_path / "keys"
    write_new(file, MASTER)
    running = chain(AesGcmCodec(AesGcmOptions(key_file=str(file))))
    stored, label = encoded(running, numbers())
    write_new(file, "short", MASTER)
    assert decoded(running, stored, label) == numbers()
    file.unlink()
    assert decoded(running, stored, label) == numbers()
    assert "aes-gcm.key_file: a line does not hold a key" in caplog.text
    assert f"{file}: No such file or directory" in caplog.text
    assert "kvladder keeps the secrets that it had" in caplog.text
    assert "short" not in caplog.text
    write_new(file, ROTATED)
    assert decoded(running, stored, label) is Outcome.UNREADABLE


def test_a_file_without_a_key_is_refused(tmp_path):
    options = AesGcmOptions(key_file=str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="No such file"):
        AesGcmCodec(options).open(LAYOUT, SPACE)
    write_new(tmp_path / "keys", "")
    with pytest.raises(ConfigError, match="a line does not hold a key"):
        AesGcmCodec(options).open(LAYOUT, SPACE)


@pytest.mark.usefixtures("master")
def test_with_encryption_plain_blocks_are_refused():
    """An attacker with access to the medium cannot make the engine read chosen bytes."""
    stored, label = encoded(chain(ZstdCodec(), ChecksumCodec()), numbers())
    known = {ChecksumCodec.id: ChecksumCodec()}
    encrypting = chain(ZstdCodec(), AesGcmCodec(), find=known.get)
    assert decoded(encrypting, stored, label) is Outcome.UNREADABLE
    assert decoded(encrypting, numbers(), forged(numbers(), [])) is Outcome.UNREADABLE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "KVLADDER_KEY is not set"),
        ("11" * 31, "does not hold a key"),
        ("secret secret secret secret secret", "does not hold a key"),
        ("c2hvcnQ=", "does not hold a key"),
    ],
)
def test_an_invalid_key_is_refused(monkeypatch, text, says):
    monkeypatch.setenv("KVLADDER_KEY", text)
    with pytest.raises(ConfigError, match=says) as refused:
        AesGcmCodec().open(LAYOUT, SPACE)
    assert "openssl rand" in str(refused.value)
    assert not text or text not in str(refused.value)


def test_hexadecimal_and_base64_are_the_same_key(monkeypatch):
    monkeypatch.setenv("KVLADDER_KEY", MASTER)
    stored, label = encoded(chain(AesGcmCodec()), numbers())
    monkeypatch.setenv("OTHER_KEY", base64.b64encode(bytes.fromhex(MASTER)).decode())
    other = chain(AesGcmCodec(AesGcmOptions(variable="OTHER_KEY")))
    assert decoded(other, stored, label) == numbers()
