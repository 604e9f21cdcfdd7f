"""What levels are asked, by loads and by writers that hand blocks down: reads and questions."""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.keys import BlockKey
from kvladder.tiers.label import LevelRead
from kvladder.tiers.ladder.gate import Results
from kvladder.tiers.ladder.level import Level


async def read(level: Level, blocks: Sequence[LevelRead]) -> Sequence[bool]:
    """Fill the blocks' slots; False where that failed, for whatever reason.

    The caller called ``places.begin_reads``, which this ends, and holds its own claims on the
    slots. A block that the tier turns out not to have leaves the index.
    """
    results: list[bool] = []
    begun = 0
    try:
        async with level.door.reads:
            while begun < len(blocks):
                batch = blocks[begun : begun + level.batch_max]
                begun += len(batch)
                results += await _read_batch(level, batch)
    finally:
        with level.shared.lock:
            level.read_ended(blocks[begun:])
    return results


async def _read_batch(level: Level, blocks: Sequence[LevelRead]) -> Sequence[bool]:
    clock, lock = level.shared.clock, level.shared.lock
    begun_s = clock.now()
    answer = await level.door.get(blocks, lambda: level.read_ended(blocks))
    with lock:
        level.stats.loaded_s += clock.now() - begun_s
        if answer.quiet:
            level.read_ended(blocks)
        return _settle(level, blocks, answer.results)


def _settle(level: Level, blocks: Sequence[LevelRead], results: Results | None) -> list[bool]:
    """What was read is used, the tail first; what the tier has no longer leaves the index."""
    if results is None:
        return [False] * len(blocks)
    places = level.index.places_of([block.key for block in blocks])
    both = zip(blocks, results, places, strict=True)
    held = [(block, ok) for block, ok, place in both if place == block.place]
    held.reverse()
    lost = [block.key for block, ok in held if ok is False]  # None: it may be there later
    level.stats.misses += len(lost)
    level.forget(lost, "lost")
    level.index.touch([block.place for block, ok in held if ok])
    level.stats.errors += None in results
    found = [*map(bool, results)]
    level.stats.loaded += sum(found)
    level.stats.loaded_bytes += sum(found) * level.shared.block_bytes
    return found


async def ask(level: Level, keys: Sequence[BlockKey]) -> Sequence[bool]:
    """Whether a shared tier says that it has these blocks; False if it says nothing in time."""
    if not level.answers:
        return [False] * len(keys)
    answer = await level.door.contains(keys)
    level.stats.probed += len(keys)
    return [False] * len(keys) if answer.results is None else [*map(bool, answer.results)]
