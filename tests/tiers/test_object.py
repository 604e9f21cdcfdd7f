"""The object store tier against a real server and a folder: the suite for tiers, and purges."""

from __future__ import annotations

from random import randbytes

import pytest

from kvladder.testing import TierTests
from kvladder.testing.fixtures import MakeTier
from kvladder.tiers.label import LABEL_BYTES
from kvladder.tiers.object.tier import ObjectTier
from tests.kit.objectserver import ObjectServer
from tests.tiers.coded import CodedTier
from tests.tiers.objecttests import Folder, Server, name_of
from tests.tiers.test_edge import Shrinking

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ObjectServer(tmp_path_factory.mktemp("objects")) as server:
        yield server


class ObjectTierTests(TierTests):
    """The suite, and tests of objects, over any store given by the fixture ``store``."""

    real = True

    @pytest.fixture
    def make(self, store):
        return lambda: ObjectTier(store.options)

    @pytest.fixture
    def capacity(self):
        return 12

    @pytest.fixture(autouse=True)
    def _store(self, store):
        self.store = store

    async def raw_get(self, tier, ref):
        data = self.store.get(name_of(tier, ref))
        return None if data is None else data[LABEL_BYTES:]

    async def raw_put(self, tier, ref, label, data):
        self.store.put(name_of(tier, ref), label + data)

    async def raw_corrupt(self, tier, ref):
        name = name_of(tier, ref)
        data = self.store.get(name)
        self.store.put(name, data[:-1] + bytes([data[-1] ^ 1]))

    async def test_the_first_writer_of_a_block_wins(self, tier, blocks):
        (first,) = await blocks.store(tier, [blocks.some(0)[0].of(priority=80)])
        before = self.store.get(name_of(tier, first))
        (second,) = await blocks.store(tier, [first.of(priority=10)])
        assert self.store.get(name_of(tier, first)) == before
        await blocks.store(tier, [second._replace(replace=True)])
        after = self.store.get(name_of(tier, first))
        assert after == blocks.label(second) + blocks.data(second)
        assert after != before

    @pytest.mark.parametrize("size", [0, 1, LABEL_BYTES - 1, LABEL_BYTES, LABEL_BYTES + 1, 3000])
    async def test_a_truncated_object_is_a_miss_and_is_replaced(self, tier, blocks, size):
        (block, other) = await blocks.put(tier, 0, 1)
        name = name_of(tier, block)
        self.store.put(name, self.store.get(name)[:size])
        assert await blocks.get(tier, [block, other]) == [False, True]
        assert blocks.refused.total() == 1
        assert await blocks.contains(tier, [block]) == [size > LABEL_BYTES]
        await blocks.store(tier, [block])
        assert await blocks.get(tier, [block, other]) == [True, True]

    @pytest.mark.parametrize("size", [5, 6000 + LABEL_BYTES, 1 << 20])
    async def test_a_foreign_object_in_the_place_of_a_block_is_replaced(self, tier, blocks, size):
        block, other = await blocks.put(tier, 0, 1)
        self.store.put(name_of(tier, block), b"x" * size)
        assert await blocks.get(tier, [block, other]) == [False, True]
        assert blocks.refused.total() == 1
        await blocks.store(tier, [block])
        assert await blocks.get(tier, [block, other]) == [True, True]

    async def test_another_block_in_the_place_of_a_block_is_replaced(self, tier, blocks):
        block, other = await blocks.put(tier, 0, 1)
        self.store.put(name_of(tier, block), self.store.get(name_of(tier, other)))
        assert await blocks.get(tier, [block]) == [False]
        await blocks.store(tier, [block])
        assert await blocks.get(tier, [block, other]) == [True, True]

    async def test_an_expired_object_is_a_miss_and_is_replaced(self, tier, blocks, context):
        wall_s = context.clock.wall()
        old, young = blocks.some(0, 1)
        await blocks.store(tier, [old.of(expires_wall_s=wall_s - 1.0)])
        await blocks.store(tier, [young.of(expires_wall_s=wall_s + 1e5)])
        assert await blocks.get(tier, [old, young]) == [False, True]
        assert not blocks.refused, "it is no damage"
        await blocks.store(tier, [old])
        assert await blocks.get(tier, [old, young]) == [True, True]

    async def test_two_engines_share_blocks(self, tier, blocks, context, make):
        other = make()
        await other.open(context)
        mine, theirs = await blocks.put(tier, 0), await blocks.put(other, 1)
        for one in (tier, other):
            assert await blocks.contains(one, [*mine, *theirs]) == [True, True]
            assert await blocks.get(one, [*mine, *theirs]) == [True, True]
        assert await other.purge(None, lambda *_: None) == 2
        assert await blocks.get(tier, [*mine, *theirs]) == [False, False]
        await other.aclose()

    async def test_a_purge_leaves_foreign_objects_alone(self, tier, blocks):
        (block,) = await blocks.put(tier, 0)
        own = name_of(tier, block)
        strangers = [
            f"kvladder/{0:032d}/1/{0:064d}",  # of another namespace
            own.rpartition("/")[0] + "/README",
            own.partition("/1/")[0] + "/notes.txt",
            own.partition("/1/")[0] + "0/1/" + "0" * 64,
            "kvladder.txt",
        ]
        for stranger in strangers:
            self.store.put(stranger, b"somebody else's")
        told: list[tuple[int, int]] = []
        assert await tier.purge(b"8 bytes!", lambda *numbers: told.append(numbers)) == 0
        assert told
        assert await tier.purge(None, lambda *_: None) == 1
        assert [self.store.get(stranger) for stranger in strangers] == [b"somebody else's"] * 5

    async def test_a_purge_of_a_salt_removes_unreadable_objects_too(self, tier, blocks):
        """Cut or damaged blocks, and those of other versions, which this version cannot read."""
        kept, cut, damaged, empty = await blocks.put(tier, 0, 1, 2, 3)
        self.store.put(name_of(tier, empty), b"")
        for block, size in ((cut, 100), (damaged, 1000)):
            name = name_of(tier, block)
            self.store.put(name, b"?" + self.store.get(name)[1:size])
        older = name_of(tier, kept).replace("/1/", "/0/")
        self.store.put(older, b"of another version")
        assert await tier.purge(b"8 bytes!", lambda *_: None) == 4
        assert self.store.get(older) is None
        found = await blocks.get(tier, [kept, cut, damaged, empty])
        assert found == [True, False, False, False]

    async def test_a_purge_goes_through_all_pages(self, tier, blocks, capacity):
        space = name_of(tier, blocks.some(0)[0]).rpartition("/")[0]
        for number in range(120):
            self.store.put(f"{space}/{number:064x}", b"x")
        await blocks.put(tier, *range(capacity))
        assert await tier.purge(None, lambda *_: None) == 120 + capacity


class TestObject(ObjectTierTests):
    @pytest.fixture
    def store(self, server):
        return Server(server, randbytes(8).hex())


class TestObjectFolder(ObjectTierTests):
    @pytest.fixture
    def store(self, tmp_path):
        return Folder(tmp_path / "objects")


class TestCodedObject(Shrinking, TierTests):
    real = True

    @pytest.fixture
    def capacity(self):
        return 12

    @pytest.fixture
    def store(self, server):
        return Server(server, randbytes(8).hex())

    @pytest.fixture
    def make(self, codecs, store) -> MakeTier:
        return lambda: CodedTier(ObjectTier(store.options), codecs())

    @pytest.mark.parametrize("codecs", ["zstd", "encrypted"], indirect=True)
    async def test_encoded_objects_are_smaller(self, tier, blocks, store):
        (block,) = await blocks.put(tier, 0)
        assert LABEL_BYTES < len(store.get(name_of(tier, block))) < 1200
