"""Cases S: windows, groups, rewinding and beams."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvladder.errors import BlocksBusy, ConfigError, NotReady, OutOfBlocks, PlanError, PoolError
from kvladder.gpu.pool.pool import Partial
from kvladder.gpu.sizing.groups import Group, Kind, Layer, group_layers, served_by_all
from tests.gpu.device import FULL, Model
from tests.gpu.engine import Engine

NEAR = Group("near", 4, "window", 8)
STATE = Group("state", 4, "state")
WIDE = Group("wide", 8, "state")
BROAD = Group("broad", 8)


def model(
    *groups: Group, blocks: int = 24, slots: int = 64, partial: str = "auto", **options: Any
) -> Model:
    source = {
        "arena": {"size": slots * 4096},
        "tiers": [{"type": "host"}],
        "gpu": {"partial": partial},
    }
    return Model(source, *groups, blocks=blocks, **options)


def used(engine: Model) -> list[int]:
    return [pool.used for pool in engine.cache.pools]


def test_s1_a_window_of_8_holds_no_more_than_4_blocks() -> None:
    engine = model(NEAR)
    request = engine.begin(range(8))
    engine.compute(request)
    for token in range(16):
        engine.requests.append(request, [100 + token])
        assert used(engine)[0] <= 8 // 4 + 2
        engine.compute(request)
        assert used(engine)[0] <= 8 // 4 + 2
        engine.cache.check()
    assert request.tables[0][:2] == [-1, -1]
    engine.requests.release(request)
    assert engine.cache.pools[0].free == engine.cache.pools[0].blocks
    engine.close()


def test_s1_blocks_that_left_a_window_can_be_reused_by_others() -> None:
    engine = model(NEAR)
    request = engine.begin(range(24))
    engine.compute(request)
    other = engine.begin([*range(12), 99])
    assert other.cached == 12
    engine.compute(other)
    for one in (request, other):
        engine.requests.release(one)
    engine.close()


def test_s2_rewinding_over_a_block_boundary_frees_exactly_that_block() -> None:
    for groups in ((FULL,), (FULL, NEAR)):
        engine = model(*groups)
        request = engine.begin(range(4))
        engine.compute(request)
        engine.requests.append(request, [50])
        engine.compute(request)
        before = [list(table) for table in request.tables]
        engine.requests.rewind(request, 4)
        assert request.tables == [table[:1] for table in before]
        assert used(engine) == [1] * len(groups)
        engine.requests.append(request, [60, 61, 62, 63])
        engine.compute(request)
        engine.requests.release(request)
        engine.close()


def test_s2_blocks_that_left_a_window_do_not_come_back() -> None:
    engine = model(FULL, NEAR)
    request = engine.begin(range(24))
    engine.compute(request)
    before = used(engine)
    engine.requests.rewind(request, 4)
    with pytest.raises(PoolError, match="near no longer holds the blocks needed after 12 tokens"):
        engine.requests.rewind(request, 8)
    assert used(engine) == [count - 1 for count in before]
    engine.requests.release(request)
    engine.close()


def test_s2_a_state_can_only_go_back_to_a_checkpoint() -> None:
    engine = model(FULL, STATE)
    request = engine.begin(range(10))
    engine.compute(request)
    with pytest.raises(PoolError, match="no state after 9"):
        engine.requests.rewind(request, 1)
    engine.requests.rewind(request, 2)
    engine.requests.append(request, [80, 81, 82])
    engine.compute(request)
    engine.requests.release(request)
    engine.close()


def test_s3_layers_of_one_shape_share_a_pool() -> None:
    layers = [Layer(f"l{at}", heads, 64, "float16") for at, heads in enumerate([3, 2, 1, 2])]
    groups = group_layers(layers, block_tokens=16, max_tokens=4096)
    assert [[layer.name for layer in one.layers] for one in groups] == [
        ["l0"],
        ["l1", "l3"],
        ["l2"],
    ]
    assert groups[1].block_bytes == 16 * 2 * (2 * 2 * 64 * 2)
    others = [
        Layer("a", 2, 64, "float16"),
        Layer("b", 2, 64, "float16", window=128),
        Layer("c", 2, 64, "fp8"),
        Layer("d", 2, 32, "float16"),
        Layer("e", 2, 64, "float16", layout="hnd"),
        Layer("f", 2, 64, "float16", factor=1),
        Layer("g", 2, 64, "float16", side_bytes=8),
    ]
    found = group_layers(others, block_tokens=16, max_tokens=4096)
    assert len({one.group.name for one in found}) == len(others)


@pytest.mark.parametrize("window", [4096, 5000])
def test_s6_a_window_that_holds_the_longest_sequence_is_full_attention(window: int) -> None:
    layers = [Layer("a", 2, 64, "float16"), Layer("b", 2, 64, "float16", window=window)]
    [only] = group_layers(layers, block_tokens=16, max_tokens=4096)
    assert only.group.kind == "full"
    assert len(group_layers(layers, block_tokens=16, max_tokens=window + 1)) == 2


def test_contradictory_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="0 layers"):
        group_layers([], block_tokens=16, max_tokens=64)
    with pytest.raises(PlanError, match="2 layers"):
        group_layers([Layer("a", 2, 64, "fp8")] * 2, block_tokens=16, max_tokens=64)
    right: dict[str, Any] = {"name": "a", "heads": 1, "head_dim": 64, "dtype": "fp8"}
    for name, wrong in (("heads", 0), ("head_dim", -1), ("dtype", "f17"), ("factor", 0)):
        with pytest.raises(PlanError):
            Layer(**{**right, name: wrong})
    for name in ("window", "side_bytes"):
        with pytest.raises(PlanError):
            Layer(**{**right, name: -1})
    kinds: list[tuple[Kind, int]] = [("window", 0), ("full", 8), ("state", 8)]
    for kind, window in kinds:
        with pytest.raises(ConfigError):
            Group("a", 4, kind, window)


def forget(engine: Model, group: int, *blocks: int) -> None:
    """Have these blocks of 0, 1, 2 ... leave a group."""
    one = engine.requests.sequences[group]
    keys = one.scheme.chain(range(24), parent=one.scheme.root())
    one.pool.remove([keys[block] for block in blocks])


@pytest.mark.parametrize(
    ("groups", "lost", "cached"),
    [
        ((FULL, NEAR), (), 24),
        ((FULL, NEAR), ((0, 4),), 16),  # full attention needs all blocks before
        ((FULL, NEAR), ((1, 0), (1, 1), (1, 2)), 24),  # a window the last ones
        ((FULL, NEAR), ((1, 5),), 20),
        ((FULL, NEAR), ((1, 4),), 16),
        ((FULL, NEAR), ((1, 4), (0, 3)), 12),
        ((FULL, NEAR), ((1, 1), (1, 3), (1, 5)), 4),
        ((FULL, STATE), ((1, 0), (1, 1), (1, 4)), 24),  # a state the one at its end
        ((FULL, STATE), ((1, 5), (1, 4)), 16),
        ((FULL, WIDE), (), 24),
        ((FULL, WIDE), ((1, 2),), 16),
        ((FULL, WIDE), ((0, 5),), 16),
        ((FULL, NEAR, STATE), ((2, 5), (1, 3)), 12),
    ],
)
@pytest.mark.parametrize("tiered", [False, True])
def test_s7_a_prefix_is_the_longest_that_every_group_can_serve(
    groups: tuple[Group, ...], lost: tuple[tuple[int, int], ...], cached: int, tiered: bool
) -> None:
    engine = model(*groups)
    assert engine.run(range(24)) == 0
    for group, block in lost:
        forget(engine, group, block)
    if tiered:
        engine.evict()
    assert engine.run([*range(24), 99]) == cached
    engine.settle()
    engine.close()


@pytest.mark.parametrize(
    ("groups", "lost", "prompt", "taken", "copied"),
    [
        ((FULL, NEAR), (), 22, 22, 22),
        ((NEAR,), (), 23, 23, 23),
        ((NEAR, FULL), ((0, 5),), 22, 20, 20),  # a window without a part
        ((FULL, NEAR), ((0, 5),), 22, 20, 20),
        ((FULL, NEAR), (), 10, 8, 10),  # a block with followers is only copied
        ((FULL, NEAR), ((1, 1),), 10, 4, 4),  # and of no use without the one before it
        ((BROAD, NEAR), (), 22, 22, 22),
        ((BROAD, NEAR), ((1, 5),), 22, 20, 20),
        ((BROAD, NEAR), (), 18, 16, 18),
        ((BROAD, STATE), (), 22, 20, 20),  # a state is only where a block of it ends
        ((BROAD, STATE), (), 14, 8, 12),
        ((FULL, NEAR, WIDE), (), 22, 16, 16),
    ],
)
@pytest.mark.parametrize("partial", ["take", "copy"])
@pytest.mark.parametrize("tiered", [False, True])
def test_s7_a_prefix_may_end_within_a_block_that_every_group_holds_in_part(
    groups: tuple[Group, ...],
    lost: tuple[tuple[int, int], ...],
    prompt: int,
    taken: int,
    copied: int,
    partial: Partial,
    tiered: bool,
) -> None:
    asked = "auto" if WIDE in groups else partial
    engine = model(*groups, partial=asked)
    assert engine.run(range(24)) == 0
    for group, block in lost:
        forget(engine, group, block)
    if tiered:
        engine.evict()
    expected = copied if partial == "copy" or tiered else taken  # lower blocks are copied anyway
    assert engine.run([*range(prompt), 99]) == expected
    assert engine.run([*range(prompt), 98]) >= (0 if lost else expected // 4 * 4)
    engine.settle()
    engine.close()


def test_s7_where_states_end_with_every_block_nothing_is_matched_in_part() -> None:
    for groups in ((FULL, WIDE), (STATE,)):
        with pytest.raises(ConfigError, match="at multiples of [48] tokens only"):
            model(*groups, partial="copy")


def test_s7_the_beginning_of_a_prompt_that_was_cut_short_is_kept_by_every_group() -> None:
    engine = model(FULL, NEAR)
    assert engine.run(range(10)) == 0
    assert engine.run([*range(10), 50]) == 10
    other = engine.begin([*range(9), 60])
    again = engine.begin([*range(9), 70])
    assert (other.cached, again.cached) == (9, 8), "taken by one, and held by it"
    for one in (other, again):
        engine.compute(one)
        engine.requests.release(one)
    assert engine.cache.stats()["gpu.near"]["partial"] == 2
    engine.close()


def test_s7_a_partial_block_that_one_group_cannot_copy_is_copied_in_none() -> None:
    engine = Model({"gpu": {"partial": "copy"}}, BROAD, NEAR, blocks=4)
    engine.run(range(14))
    assert engine.run([*range(6), *range(50, 58)]) == 4
    engine.close()


@pytest.mark.slow
def test_s7_the_longest_common_prefix_equals_brute_force() -> None:
    @given(st.data())
    @settings(max_examples=300, deadline=None)
    def check(data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([FULL, NEAR, STATE, Group("odd", 4, "window", 6)]))
        present = data.draw(st.lists(st.booleans(), max_size=12))
        step = data.draw(st.sampled_from([4, 8] if group is STATE else [1, 4, 8]))
        end = (4 * len(present) + data.draw(st.integers(0, 3))) // step * step
        begun = [0] * (len(present) + 1)  # of each block, how many tokens are shared in part
        if step == 1:
            begun = [data.draw(st.integers(0, 3)) for _ in begun]
        good = [
            at
            for at in range(0, end + 1, step)
            if at == 0 or (all(present[group.first(at) : at // 4]) and at % 4 <= begun[at // 4])
        ]
        assert group.serves(group.holes(present), begun.__getitem__, end, step) == max(good)

    check()


class Counted(list[int]):
    """Counts its reads."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


def test_s7_states_that_are_never_kept_together_are_found_in_a_few_steps_a_block() -> None:
    blocks = 1000
    groups = [FULL, Group("even", 4, "state"), Group("odd", 4, "state"), NEAR]
    kept = [[True] * blocks, [False, True] * (blocks // 2), [True, False] * (blocks // 2)]
    present = [*kept, [True] * blocks]
    holes = [Counted(group.holes(one)) for group, one in zip(groups, present, strict=True)]
    shared = [lambda block: 0] * len(groups)
    assert served_by_all(groups, holes, shared, blocks * 4, 4) == 0
    assert sum(one.reads for one in holes) <= 2 * len(groups) * blocks


def test_s7_nothing_is_held_where_one_group_has_no_room() -> None:
    engine = model(FULL, NEAR, blocks=8, context=12)
    request = engine.begin(range(12))
    engine.compute(request)
    held = used(engine)
    near = engine.cache.pools[1]
    taken = near.allocate(near.free)
    for call in (
        lambda: engine.requests.begin([*range(8), 70, 71, 72]),
        lambda: engine.requests.append(request, [1]),
    ):
        with pytest.raises(OutOfBlocks):
            call()
        assert used(engine)[0] == held[0]
        engine.cache.check()
    near.release(taken)
    engine.requests.append(request, [1])
    engine.requests.release(request)
    engine.settle()
    engine.close()


def test_slots_that_were_handed_out_and_taken_back_are_not_counted() -> None:
    engine = model(FULL, NEAR, blocks=4)
    engine.run(range(16))
    engine.cache.pools[0].evict(4)
    engine.settle()
    before = [pool.stats.allocated for pool in engine.cache.pools]
    with pytest.raises(BlocksBusy):  # the second group's blocks are still being read
        engine.requests.begin(range(100, 116))
    assert [pool.stats.allocated for pool in engine.cache.pools] == before
    engine.settle()
    engine.run(range(100, 116))
    assert [pool.stats.allocated for pool in engine.cache.pools] == [count + 4 for count in before]
    engine.close()


def test_s7_a_prompt_computed_in_parts_needs_a_window_and_a_part() -> None:
    engine = model(FULL, NEAR, blocks=12, context=40, step=4, slots=8)
    assert engine.cache.division.shares[1].needed == 5
    request = engine.begin(range(40), room=4)
    while request.computed < 40:
        engine.requests.extend(request, request.computed + 4)
        engine.compute(request, min(40, request.computed + 4))
        assert used(engine)[1] <= 5
    with pytest.raises(ValueError, match="tokens computed"):
        engine.requests.commit(request, 41)
    engine.requests.release(request)
    engine.settle()
    engine.close()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, NEAR)])
def test_s8_beams_share_full_blocks_and_copy_the_last_one_on_first_write(
    groups: tuple[Group, ...],
) -> None:
    engine = model(*groups)
    request = engine.begin(range(10))
    engine.compute(request)
    before = used(engine)
    beams = [request, *engine.requests.fork(request, 2)]
    assert used(engine) == before
    for at, beam in enumerate(beams):
        engine.requests.append(beam, [90 + at])
        assert len(beam.copies) == (len(groups) if at < 2 else 0)  # the last one keeps it
        engine.compute(beam)
    assert used(engine) == [count + 2 for count in before]
    assert [beam.tables[0][:2] for beam in beams] == [request.tables[0][:2]] * 3
    for beam in beams:
        engine.requests.release(beam)
    assert used(engine) == [0] * len(groups)
    engine.close()


def test_s8_a_state_is_not_forked_before_its_tokens_are_computed() -> None:
    engine = model(FULL, STATE)
    request = engine.begin(range(6))
    engine.compute(request)
    engine.requests.append(request, [1])
    before = used(engine)
    with pytest.raises(PoolError, match="a request with a state can fork only when"):
        engine.requests.fork(request, 1)
    assert used(engine) == before
    engine.compute(request)
    [other] = engine.requests.fork(request, 1)
    for one in (request, other):
        engine.requests.release(one)
    engine.close()


def test_s8_a_released_sequence_is_not_forked() -> None:
    engine = Engine(4)
    sequence = engine.begin(range(3))
    engine.release(sequence)
    with pytest.raises(PoolError, match="was released"):
        engine.sequences.fork(sequence, 1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_refusal_of_one_group_changes_no_other(late: int) -> None:
    engine = model(FULL, NEAR)
    engine.run(range(13))
    engine.cache.pools[late].evict(24)
    engine.settle()
    request = engine.requests.begin(range(13))
    assert [part.ready for part in request.parts] == [late != 0, late != 1]

    def state() -> list[object]:
        parts = zip(request.parts, engine.cache.pools, strict=True)
        return [
            (len(part.tokens), part.computed, [pool._ledger.refs[slot] for slot in part.held])
            for part, pool in parts
        ]

    before = state()
    for call in (
        lambda: engine.requests.fork(request, 2),
        lambda: engine.requests.rewind(request, 1),
        lambda: engine.requests.commit(request, 13),
    ):
        with pytest.raises(NotReady):
            call()
        assert state() == before
    engine.settle()
    engine.requests.release(request)
    assert used(engine) == [0, 0]
    engine.close()


def test_tokens_without_slots_in_one_group_are_computed_in_none() -> None:
    engine = model(Group("wide", 16), Group("thin", 4), blocks=30, context=64)
    request = engine.begin(range(60), room=20)
    assert [len(table) for table in request.tables] == [2, 5]
    with pytest.raises(ValueError, match=r"0 \.\. 20"):
        engine.requests.commit(request, 25)
    assert [part.computed for part in request.parts] == [0, 0]
    engine.requests.release(request)
    engine.close()


def test_p3_without_reuse_nothing_is_served_or_kept() -> None:
    for groups in ((FULL,), (FULL, NEAR)):
        engine = model(*groups, reuse=False)
        for _ in range(2):
            assert engine.run(range(16)) == 0
        assert all(pool.cached == 0 for pool in engine.cache.pools)
        engine.close()


def test_latent_attention_keeps_one_vector_per_token() -> None:
    latent = Layer("a", 1, 576, "bfloat16", factor=1)
    [only] = group_layers([latent], block_tokens=64, max_tokens=4096)
    assert only.block_bytes == 64 * 576 * 2
    assert only.group.name.startswith("latent")
