"""The misses that a simulated run must have: each block that was asked for is served or counted."""

from __future__ import annotations

from kvladder.keys import BlockKey
from kvladder.manager import SetFetch
from kvladder.testing.stacks import SimCache
from kvladder.tiers.ladder.loading.fetch import Fetch


class Misses:
    """Follows the fetches of one cache, and compares their misses with its counts."""

    def __init__(self) -> None:
        self._open: list[tuple[Fetch, set[BlockKey]]] = []
        self._here: set[BlockKey] = set()
        """Blocks that were in a level at any check."""
        self._missed = 0

    def asked(self, fetch: Fetch) -> None:
        """Follow a fetch that was just begun."""
        self._open.append((fetch, {*self._here}))

    def left_out(self, blocks: int) -> None:
        """Count blocks of a set that no level has."""
        self._missed += blocks

    def check(self, cache: SimCache) -> None:
        """Assert that the blocks that fetches asked for and did not get are those counted."""
        for fetch, here in [one for one in self._open if one[0]._is_final]:
            self._open.remove((fetch, here))
            served = len(fetch.found if isinstance(fetch, SetFetch) else fetch.slots)
            assert sum(blocks for _, _, blocks in fetch.missed) == len(fetch.keys) - served
            self._missed += len(fetch.keys) - served
            self._check_first(fetch, here)
        blocks = cache.manager.stats()["misses"]["blocks"]
        assert sum(sum(each.values()) for each in blocks.values()) == self._missed
        self._here.update(*(level.index for level in cache.stack._all_levels))

    def _check_first(self, fetch: Fetch, here: set[BlockKey]) -> None:
        """Assert that no block that was here before is said to be never seen."""
        if fetch.missed and not isinstance(fetch, SetFetch):
            is_known = fetch.keys[fetch.blocks] in here
            assert not is_known or fetch.missed[0].reason != "never_seen"
