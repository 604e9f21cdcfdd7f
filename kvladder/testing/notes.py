"""The part of the suite for tiers that is about notes: what codecs need of a tier."""

from __future__ import annotations

import pytest

from kvladder.testing.fixtures import Blocks, Opener, TierFixtures
from kvladder.tiers.base import Tier


class NoteTests(TierFixtures):
    """Part of ``TierTests``; skipped by tiers that keep no notes."""

    async def test_keeps_notes_and_lengths(self, tier: Tier, blocks: Blocks) -> None:
        self.only_with_notes(tier)
        for length, note in ((1, b"n"), (4097, bytes(range(256)) * 2), (6000, b"whole")):
            items = blocks.batch(tier)
            blocks.fill(items)
            await tier.put([i._replace(length=length, note=bytearray(note)) for i in items])
            blocks.poison(items)
            asked = [item._replace(note=bytearray(b"old")) for item in items]
            assert list(await tier.get(asked)) == [True] * len(items)
            for item in asked:
                assert bytes(item.note or b"") == note
                assert blocks.bytes_in(item.slot)[:length] == blocks.data(item)[:length]
            await blocks.remove(tier, items)

    async def test_a_block_without_a_note_has_none(self, tier: Tier, blocks: Blocks) -> None:
        self.only_with_notes(tier)
        (item,) = await blocks.put(tier, 0)
        asked = item._replace(note=bytearray(b"old"))
        assert await blocks.get(tier, [asked]) == [True]
        assert not asked.note

    async def test_a_block_with_a_note_is_a_miss_for_whom_cannot_read_it(
        self, tier: Tier, blocks: Blocks
    ) -> None:
        self.only_with_notes(tier)
        items = blocks.items(0)
        blocks.fill(items)
        await tier.put([items[0]._replace(length=10, note=bytearray(b"note"))])
        assert await blocks.get(tier, items) == [False]

    async def test_notes_survive(self, opened: Opener, blocks: Blocks) -> None:
        tier = await opened()
        self.only_with_notes(tier)
        items = blocks.items(0)
        blocks.fill(items)
        await tier.put([items[0]._replace(length=10, note=bytearray(b"note"))])
        tier = await opened()
        self.only_if_it_survives(opened)
        asked = [items[0]._replace(note=bytearray())]
        assert list(await tier.get(asked)) == [True]
        assert bytes(asked[0].note or b"") == b"note"
        assert blocks.bytes_in(items[0].slot)[:10] == blocks.data(items[0])[:10]

    def only_with_notes(self, tier: Tier) -> None:
        """The rest of a test is for tiers that keep notes."""
        if not tier.notes:
            pytest.skip("it keeps no notes")
