"""Cases U: the blocks that a prompt is served, and the blocks that it stores."""

from __future__ import annotations

import pytest

from kvladder.errors import ConfigError, NotHeld, NotReady, OutOfBlocks
from kvladder.gpu.pool.pool import Partial
from kvladder.gpu.requests.sequence import Sequences
from kvladder.keys import KeyScheme, namespace
from kvladder.policy.retention import Retention
from tests.gpu.engine import Engine, priority_of

PARTIAL = pytest.mark.parametrize("partial", ["take", "copy"])


def stored(engine: Engine) -> list[tuple[int, ...]]:
    return [block.tokens for event in engine.pool.snapshot() for block in event.blocks]


@PARTIAL
def test_u1_a_release_stores_full_blocks_and_the_tail(partial: Partial) -> None:
    engine = Engine(8, partial=partial)
    sequence = engine.begin(range(9))
    assert (sequence.cached, len(sequence.table), engine.pool.used) == (0, 3, 3)
    engine.generate(sequence, [9, 10])
    assert len(sequence.table) == 3
    engine.release(sequence)
    assert engine.pool.free == 8
    assert stored(engine) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


@PARTIAL
def test_u2_the_same_prompt_shares_two_blocks_and_stores_no_tail_twice(partial: Partial) -> None:
    engine = Engine(8, partial=partial)
    engine.run(range(9), [9, 10])
    old = engine.pool.match(engine.keys(range(8)))
    sequence = engine.begin(range(9))
    assert sequence.cached == 8
    assert sequence.table[:2] == old
    assert len(sequence.table) == 3
    engine.generate(sequence, [9, 10])
    engine.release(sequence)
    assert stored(engine) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert engine.pool.stats.stored == 3


def test_u3_a_partial_tail_is_taken_over_once() -> None:
    engine = Engine(8)
    engine.run(range(9), [9, 10])
    sequence = engine.begin(range(10))
    assert sequence.cached == 9
    other = engine.begin(range(11))
    assert other.cached == 8
    assert engine.pool.used == 4
    engine.release(sequence)
    engine.release(other)
    assert engine.pool.free == 8


def test_u3_with_copying_every_request_gets_the_tail() -> None:
    engine = Engine(8, partial="copy")
    engine.run(range(9), [9, 10])
    first, second = engine.begin(range(10)), engine.begin(range(11))
    assert (first.cached, second.cached) == (9, 10)
    assert engine.pool.used == 4
    assert (8, 9) in stored(engine)


@pytest.mark.parametrize(("partial", "cached"), [("take", 8), ("copy", 10)])
def test_u3_a_block_that_another_request_holds_is_only_copied(
    partial: Partial, cached: int
) -> None:
    engine = Engine(8, partial=partial)
    engine.run(range(12))
    holder = engine.begin(range(13))
    assert holder.cached == 12
    other = engine.begin([*range(10), 50, 51])
    assert other.cached == cached
    engine.release(other)
    engine.release(holder)
    assert engine.begin([*range(10), 60, 61]).cached == 10


@PARTIAL
def test_u4_block_0_is_shared_by_two_live_requests(partial: Partial) -> None:
    engine = Engine(8, partial=partial)
    engine.run(range(9))
    first, second = engine.begin(range(5)), engine.begin(range(5))
    assert second.cached == 4
    assert first.table[0] == second.table[0]
    assert first.table[1] != second.table[1]


@PARTIAL
def test_u5_at_most_all_but_the_last_token_are_served(partial: Partial) -> None:
    engine = Engine(8, partial=partial)
    engine.run(range(9), [9, 10])
    assert engine.run([*range(10), 11]) == 10


@PARTIAL
def test_u8_a_prompt_of_one_token_is_computed(partial: Partial) -> None:
    engine = Engine(8, partial=partial)
    engine.run([0])
    assert engine.run([0]) == 0


@pytest.mark.parametrize(("partial", "served"), [("take", 7), ("copy", 7), ("off", 4)])
def test_u9_a_prompt_of_cached_blocks_alone_computes_its_last_token(
    partial: Partial, served: int
) -> None:
    engine = Engine(8, partial=partial)
    engine.run(range(8))
    assert engine.run(range(8)) == served


@pytest.mark.parametrize(("partial", "served"), [("take", 4), ("copy", 7)])
def test_u9_an_inner_block_is_only_copied(partial: Partial, served: int) -> None:
    engine = Engine(8, partial=partial)
    engine.run(range(12))
    assert engine.run(range(8)) == served


def test_u10_to_u12_blocks_with_different_tokens_are_not_served() -> None:
    engine = Engine(8)
    assert engine.run(range(8)) == 0
    assert engine.run([0, 1, 2, 3, 99, 100, 101, 102]) == 4
    assert engine.run(range(50, 58)) == 0


@PARTIAL
def test_u14_namespaces_never_share_blocks(partial: Partial) -> None:
    engine = Engine(40, partial=partial)
    images = [(5, b"image one")], [(5, b"image two")]
    for served in (0, 10):
        for lora in ("", "0", "1"):
            assert engine.run(range(11), lora=lora) == served
        for salt in ("a", "b"):
            assert engine.run(range(11), salt=salt) == served
    assert engine.run(range(11), extra=images[0]) == (5 if partial == "copy" else 4)
    assert engine.run(range(11), extra=images[0]) == 10
    assert engine.run(range(11), extra=images[1]) == (5 if partial == "copy" else 4)
    assert engine.run(range(11), extra=images[1]) == 10


def test_u14_a_block_is_shared_up_to_the_first_image_in_it() -> None:
    engine = Engine(8, partial="copy")
    assert engine.run(range(8), extra=[(6, b"one")]) == 0
    assert engine.run(range(8), extra=[(6, b"two")]) == 6
    assert engine.run(range(8)) == 6


def test_u15_live_requests_share_full_blocks() -> None:
    engine = Engine(10)
    first = engine.begin([*range(8), 100])
    second = engine.begin([*range(8), 200])
    assert second.cached == 8
    assert engine.pool.used == 4
    engine.release(first)
    engine.release(second)
    assert engine.pool.free == 10


def test_u15_requests_that_compute_the_same_blocks_share_them_afterwards() -> None:
    engine = Engine(10)
    first, second = (engine.sequences.begin(range(9)) for _ in range(2))
    assert engine.pool.used == 6
    engine.compute(first)
    engine.compute(second)
    assert first.table[:2] == second.table[:2]
    assert engine.pool.used == 4
    assert engine.pool.stats.duplicates == 2


@pytest.mark.parametrize("count", [9, 10, 11, 13])
def test_u16_statistics_are_counted_per_request_and_per_pool(count: int) -> None:
    engine = Engine(8, partial="copy")
    first, second = engine.begin(range(count)), engine.begin(range(count))
    blocks, reused = -(-count // 4), count // 4
    assert (first.stats.reused, first.stats.missed) == (0, blocks)
    assert (second.stats.reused, second.stats.missed) == (reused, blocks - reused)
    assert second.stats.hit_rate == reused / blocks
    assert len(set(second.table) - set(first.table)) == second.stats.missed
    assert engine.pool.stats.hit_rate == reused / (2 * blocks)
    assert engine.pool.stats.allocated == 2 * blocks - reused
    assert engine.pool.stats.as_dict()["reused"] == reused
    assert Engine(8).pool.stats.hit_rate == 0.0


def test_u16_blocks_of_a_prompt_are_counted_once_if_it_is_computed_in_parts() -> None:
    engine = Engine(64)
    first = engine.sequences.begin(range(100), room=8)
    for end in range(8, 101, 4):
        engine.sequences.extend(first, end)
        engine.sequences.commit(first, end)
    second = engine.sequences.begin([*range(40), *range(1000, 1060)], room=8)
    assert (first.stats.reused, first.stats.missed) == (0, 25)
    assert (second.stats.reused, second.stats.missed, second.stats.hit_rate) == (10, 15, 0.4)
    assert (engine.pool.stats.reused, engine.pool.stats.missed) == (10, 40)


def test_u17_after_a_reset_running_requests_neither_serve_nor_store_blocks() -> None:
    engine = Engine(8, host=4)
    engine.run(range(9))
    engine.pool.evict(1)
    running = engine.begin(range(50, 59))
    engine.pool.reset()
    assert not engine.host.blocks
    assert engine.pool.used == 3
    engine.generate(running, range(9))
    engine.release(running)
    assert len(engine.pool._ledger.index) == 0
    assert engine.run(range(9)) == 0
    assert engine.run(range(9)) == 8


# ---- further of the same kind


def test_a_removed_block_is_not_found_and_takes_its_followers_along() -> None:
    engine = Engine(8)
    engine.run(range(12))
    running = engine.begin([*range(12), 12])
    engine.pool.remove(engine.keys(range(8))[1:])
    assert len(engine.pool.match(engine.keys(range(12)))) == 1
    engine.generate(running, range(13, 18))
    engine.release(running)
    assert stored(engine) == [(0, 1, 2, 3)]
    assert engine.run(range(12)) == 4


def test_rewound_content_is_not_served_to_others() -> None:
    for partial in ("take", "copy"):
        engine = Engine(8, partial=partial)
        sequence = engine.begin(range(8))
        engine.sequences.rewind(sequence, 2)
        assert (sequence.computed, len(sequence.table)) == (6, 2)
        engine.generate(sequence, [50, 51, 52])
        assert (4, 5, 6, 7) in stored(engine) or partial == "take"
        engine.release(sequence)
        assert engine.run([0, 1, 2, 3, 4, 5, 50, 51, 9]) == 8
        engine.check()


def test_wrong_calls_change_nothing() -> None:
    engine = Engine(4)
    with pytest.raises(ValueError, match="no tokens"):
        engine.sequences.begin([])
    for wrong in ([-1], [1 << 32], [0.5]):
        with pytest.raises(ValueError, match="token ids"):
            engine.sequences.begin(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="extra"):
        engine.sequences.begin([1], extra=[(1, b"")])
    sequence = engine.begin(range(5))
    for computed in (4, 6):
        with pytest.raises(ValueError, match="computed"):
            engine.sequences.commit(sequence, computed)
    for count in (-1, 6):
        with pytest.raises(ValueError, match="expected 0"):
            engine.sequences.rewind(sequence, count)
    with pytest.raises(ValueError, match="forks"):
        engine.sequences.fork(sequence, -1)
    with pytest.raises(OutOfBlocks):
        engine.sequences.append(sequence, range(12))
    assert (len(sequence.tokens), len(sequence.table), engine.pool.used) == (5, 2, 2)
    engine.release(sequence)
    for call in (
        lambda: engine.sequences.fork(sequence, 1),
        lambda: engine.sequences.append(sequence, [1]),
        lambda: engine.sequences.commit(sequence, 5),
        lambda: engine.sequences.rewind(sequence, 1),
        lambda: engine.sequences.release(sequence),
    ):
        with pytest.raises(NotHeld):
            call()
    engine.check()
    with pytest.raises(ConfigError, match="keys of 8"):
        Sequences(engine.pool, KeyScheme(namespace({}), block_tokens=8))


def test_a_sequence_with_pending_copies_does_not_run() -> None:
    engine = Engine(8, partial="copy")
    engine.run(range(6))
    sequence = engine.sequences.begin(range(6))
    [copy] = sequence.copies
    assert (copy.tokens, copy.after) == (1, None)
    for call in (
        lambda: engine.sequences.commit(sequence, 6),
        lambda: engine.sequences.append(sequence, [1]),
        lambda: engine.sequences.fork(sequence, 1),
    ):
        with pytest.raises(NotReady):
            call()
    engine.sequences.release(sequence)
    assert engine.pool.used == 2
    engine.sequences.copied(sequence)
    engine.sequences.copied(sequence)
    assert engine.pool.used == 0
    engine.check()


def test_the_best_of_many_children_is_found() -> None:
    engine = Engine(400, partial="copy")
    for first in range(100):
        engine.run([first % 10, first // 10, 7, 7, 1])
    assert engine.run([3, 5, 7, 8]) == 3
    assert engine.run([3, 77, 7, 8]) == 1
    assert engine.run([3, 5, 7, 7, 1, 1]) == 5
    engine.check()


def test_a_retention_by_default_reaches_the_blocks_no_range_names() -> None:
    engine = Engine(8)
    engine.run(range(8), retention=Retention(default=60))
    assert [priority_of(engine.pool, key) for key in engine.keys(range(8))] == [60, 60]
    engine.run(range(9), retention=Retention(default=10))
    assert [priority_of(engine.pool, key) for key in engine.keys(range(8))] == [60, 60]


def test_without_room_for_copies_a_run_takes_over_all_blocks_that_it_alone_holds() -> None:
    engine = Engine(6)
    sequences = engine.sequences
    first = sequences.begin([0] * 8)
    [other] = sequences.fork(first, 1)
    [third] = sequences.fork(first, 1)
    sequences.append(third, [1])  # three blocks of its own
    engine.compute(first)
    sequences.release(first)
    table = list(other.table)
    assert all(engine.pool.knows(key) for key in engine.keys([0] * 8))
    sequences.append(other, [1])  # one slot is left, and copies would need two more
    assert other.table[:2] == table
    assert not any(engine.pool.knows(key) for key in engine.keys([0] * 8))
    engine.check()
