"""The conformance suite for codecs: the rules for every codec, as tests to inherit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import NamedTuple

import pytest

from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.codecs.base import PARAMS_BYTES, Codec, Stage, Subject
from kvladder.tiers.codecs.chain import Chain
from kvladder.tiers.label import Facts, Labels, Outcome

MakeCodec = Callable[[], Codec]
SUBJECT = Subject(BlockKey(hashlib.sha256(b"block").digest()), b"saltsalt")
OTHER = Subject(BlockKey(hashlib.sha256(b"other").digest()))


class EncodedBlock(NamedTuple):
    """The stored form of a block: its encoded bytes and the codec's parameters."""

    data: bytes
    params: bytes


class CodecTests:
    """Conformance tests. Inherit, name the class ``Test...`` and define a fixture ``make``::

        class TestMine(CodecTests):
            @pytest.fixture
            def make(self):
                return lambda: MyCodec(MyCodec.Options(level=3))

    ``make`` returns a function. The function makes a codec that is not opened yet.
    """

    @pytest.fixture
    def make(self) -> MakeCodec:
        """Return a function that makes a codec; must be overridden."""
        raise NotImplementedError("give the class a fixture `make` that returns a function")

    @pytest.fixture
    def layout(self) -> Layout:
        """Return the layout of the blocks; override it if the codec needs another one."""
        return Layout(block_tokens=16, block_bytes=8192, element="bfloat16", row_elements=64)

    @pytest.fixture
    def codec(self, make: MakeCodec, layout: Layout) -> Codec:
        """Return an opened codec."""
        codec = make()
        codec.open(layout, layout.namespace())
        return codec

    @pytest.fixture(params=["numbers", "noise", "zeros", "ones", "text"])
    def block(self, request: pytest.FixtureRequest, layout: Layout) -> bytes:
        """Return a block's bytes, one test for each kind; override it if the codec needs others."""
        size, random = layout.block_bytes, Random(7)
        kinds = {
            "numbers": lambda: bytes(
                random.randrange(256) if i % 2 == 0 else 0x3C + (i * i) % 5 for i in range(size)
            ),
            "noise": lambda: random.randbytes(size),
            "zeros": lambda: bytes(size),
            "ones": lambda: b"\xff" * size,
            "text": lambda: (b"the quick brown fox " * size)[:size],
        }
        return kinds[request.param]()

    def close_enough(self, found: bytes, block: bytes) -> bool:
        """Return whether ``found`` is a valid decoding of ``block``; override for lossy codecs."""
        return found == block

    # ---- helpers

    def encode(self, codec: Codec, block: bytes) -> EncodedBlock | None:
        """Encode a block; None if the codec leaves it out. Checks that it writes only to target."""
        data, beyond = bytearray(block), 64
        target = memoryview(bytearray(b"\xa5") * (len(block) + beyond))
        done = codec.encode(memoryview(data), target[: len(block)], SUBJECT)
        assert data == block, "the codec wrote into the block"
        assert target[len(block) :] == b"\xa5" * beyond, "the codec wrote beyond the target"
        if done is None:
            return None
        view, params = done
        assert len(params) <= PARAMS_BYTES
        assert len(view) <= len(block)
        is_known = bytes(view) in {bytes(data), bytes(target[: len(view)])}
        assert is_known, "the codec returned neither the data nor the target"
        return EncodedBlock(bytes(view), params)

    def decode(self, codec: Codec, stored: EncodedBlock, size: int) -> bytes | None:
        """Decode a stored block; None if refused. Checks that the codec writes only to target."""
        data, beyond = bytearray(stored.data), 64
        target = memoryview(bytearray(b"\xa5") * (size + beyond))
        found = codec.decode(memoryview(data), stored.params, target[:size], SUBJECT)
        assert data == stored.data, "the codec wrote into the stored data"
        assert target[size:] == b"\xa5" * beyond, "the codec wrote beyond the target"
        return None if found is None else bytes(found)

    def chain(self, codecs: list[Codec], layout: Layout) -> Chain:
        """Open these codecs and return a chain of them."""
        after = layout
        for codec in codecs:
            after = codec.open(after, layout.namespace())
        return Chain(codecs, layout=layout, find=lambda _: None)

    # ---- declarations

    def test_declares_what_it_is(self, make: MakeCodec) -> None:
        codec = make()
        assert codec.name
        assert 0 < codec.id < 1 << 16
        assert codec.stage in Stage
        has_defaults = codec.Options is None or codec.Options() is not None
        assert has_defaults, "expected a default for each option: readers use them"

    def test_keeps_or_tells_the_layout(self, make: MakeCodec, layout: Layout) -> None:
        after = make().open(layout, layout.namespace())
        assert (after.block_tokens, after.block_bytes) == (layout.block_tokens, layout.block_bytes)

    # ---- round trips

    def test_round_trips(self, codec: Codec, block: bytes) -> None:
        stored = self.encode(codec, block)
        if stored is not None:
            found = self.decode(codec, stored, len(block))
            assert found is not None
            assert self.close_enough(found, block)

    def test_another_one_of_its_kind_reads_it(
        self, make: MakeCodec, codec: Codec, layout: Layout, block: bytes
    ) -> None:
        stored = self.encode(codec, block)
        if stored is not None:
            other = make()
            other.open(layout, layout.namespace())
            found = self.decode(other, stored, len(block))
            assert found is not None
            assert self.close_enough(found, block)

    def test_many_threads_may_use_it(self, codec: Codec, block: bytes) -> None:
        blocks = [bytes(Random(n).sample(block, len(block))) for n in range(8)]

        def trip(block: bytes) -> bool:
            for _ in range(4):
                stored = self.encode(codec, block)
                if stored is not None:
                    found = self.decode(codec, stored, len(block))
                    assert found is not None
                    assert self.close_enough(found, block)
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(trip, blocks))

    # ---- damage

    def test_damage_raises_nothing(self, codec: Codec, block: bytes) -> None:
        stored = self.encode(codec, block)
        if stored is None:
            return
        random, size = Random(1), len(block)
        for _ in range(50):
            found = self.decode(
                codec, EncodedBlock(flipped(stored.data, random), stored.params), size
            )
            assert found is None or len(found) <= size
            if codec.checks:
                assert found is None
            if stored.params:
                found = self.decode(
                    codec, EncodedBlock(stored.data, flipped(stored.params, random)), size
                )
                assert found is None or len(found) <= size
        for params in (b"", b"\xff" * PARAMS_BYTES, flipped(stored.params + b"\0", random)):
            assert isinstance(codec.reads(params), bool)
        for cut in (0, 1, len(stored.data) // 2, len(stored.data) - 1):
            self.decode(codec, EncodedBlock(stored.data[:cut], stored.params), size)
            self.decode(codec, EncodedBlock(stored.data, b"\xff" * PARAMS_BYTES), size)
            self.decode(codec, EncodedBlock(stored.data, b""), size)
            self.decode(codec, EncodedBlock(random.randbytes(cut), stored.params), size)

    def test_no_damage_passes_a_level_that_checks(
        self, codec: Codec, layout: Layout, block: bytes
    ) -> None:
        chain, size = self.chain([codec], layout), layout.block_bytes
        labels = Labels(layout.namespace(), size, verify=not codec.checks)
        view, coding = chain.encode(SUBJECT, memoryview(block), memoryview(bytearray(size)))
        stored, random, slot = bytes(view), Random(2), bytearray(size)
        label = labels.pack(SUBJECT.key, stored, Facts(salt=SUBJECT.salt), coding)

        def outcome(key: BlockKey, label: bytes, data: bytes) -> Outcome:
            slot[: len(data)] = data
            found, coding = labels.check(key, label, memoryview(slot)[: len(data)])
            return found if coding is None else chain.decode(key, coding, memoryview(slot))

        assert outcome(SUBJECT.key, label, stored) is Outcome.GOOD
        assert self.close_enough(bytes(slot), block)
        for _ in range(50):
            assert outcome(SUBJECT.key, label, flipped(stored, random)) is not Outcome.GOOD
            assert outcome(SUBJECT.key, flipped(label, random), stored) is not Outcome.GOOD
        assert outcome(OTHER.key, label, stored) is not Outcome.GOOD


def flipped(data: bytes, random: Random) -> bytes:
    """Return ``data`` with one random bit inverted."""
    damaged = bytearray(data)
    damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)
