"""Cases P: caches that are not plain paged KV, and the phases of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from kvladder.errors import ConfigError, PlanError
from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.handlers import ConvState, PerSequence, Side, State, Unpaged
from kvladder.gpu.sizing.plan import CachePlan

KV = Layer("kv", 2, 64, "float16")
STATE = State("state", 8, 64, 16, "float32")
CONV = ConvState("conv", 8 * 64 + 2 * 3 * 16, 3, "float16")


def plan(*resources: ResourceHandler, **options: Any) -> CachePlan:
    given: dict[str, Any] = {"block_tokens": 16, "max_tokens": 1024, **options}
    return CachePlan(resources, **given).check().group()


@pytest.mark.parametrize(
    ("other", "together"),
    [
        (Layer("b", 4, 64, "float16"), True),
        (Layer("b", 2, 64, "float16", window=128), True),
        (Layer("b", 2, 32, "float16"), False),
        (Layer("b", 2, 64, "fp8"), False),
        (Layer("b", 1, 64, "float16", factor=1), False),
        (Layer("b", 2, 64, "float16", layout="hnd"), False),
    ],
)
def test_p1_paged_kv_is_pooled_where_all_but_the_heads_agree(other: Layer, together: bool) -> None:
    pooled = plan(KV, other).pooled
    assert pooled == ([("kv", "b")] if together else [("kv",), ("b",)])


@pytest.mark.parametrize(
    ("other", "together"),
    [
        (State("b", 8, 64, 16, "float32"), True),
        (State("b", 4, 64, 16, "float32"), False),
        (State("b", 8, 64, 32, "float32"), False),
        (State("b", 8, 64, 16, "float16"), False),
    ],
)
def test_p2_states_are_pooled_where_shape_and_type_agree(other: State, together: bool) -> None:
    made = plan(STATE, other)
    assert made.pooled == ([("state", "b")] if together else [("state",), ("b",)])
    assert made.pools[0].block_bytes == STATE.bytes * (1 + together)


@pytest.mark.parametrize(
    ("conv_dim", "joins"),
    [(512, True), (512 + 32, True), (512 + 96, True), (512 + 16, False), (512 - 32, False)],
)
def test_p2_a_convolution_joins_the_state_that_has_its_inputs(conv_dim: int, joins: bool) -> None:
    conv = ConvState("conv", conv_dim, 3, "float16")
    made = plan(STATE, conv)
    assert made.pooled == [("state", "conv") if joins else ("state",)]
    assert [one.name for one in made.alone] == ([] if joins else ["conv"])
    if not joins:
        assert f"conv_dim {conv_dim} is not" in made.alone[0].why
        assert f"separate conv: {conv.bytes} bytes" in str(made)
    assert [one.name for one in plan(KV, conv).alone] == ["conv"]


@pytest.mark.parametrize(
    ("second", "together"),
    [
        (ConvState("b", 512, 3, "float16"), True),
        (ConvState("b", 608, 3, "float16"), False),
        (ConvState("b", 512, 4, "float16"), False),
        (ConvState("b", 512, 3, "float32"), False),
        (ConvState("b", 608, 3, "float32"), False),
    ],
)
def test_p2_convolutions_share_a_pool_where_shape_and_type_agree(
    second: ConvState, together: bool
) -> None:
    made = plan(STATE, ConvState("a", 512, 3, "float16"), second, checkpoint_tokens=64)
    assert made.pooled == [("state", "a", "b") if together else ("state", "a")]
    assert [one.name for one in made.alone] == ([] if together else ["b"])
    if not together:
        assert "its shape or type differs from a's: " in made.alone[0].why
        assert made.no_reuse == "b is not paged"
    wider = State("wide", 8, 64, 4, "float32")
    other = plan(STATE, wider, ConvState("a", 512, 3, "float16"), second, checkpoint_tokens=64)
    pools = [("state", "a", "b"), ("wide",)] if together else [("state", "a"), ("wide", "b")]
    assert other.pooled == pools
    assert not other.no_reuse


@pytest.mark.parametrize(
    ("resources", "every", "reuse", "partial"),
    [
        ([KV], 0, True, True),
        ([KV, STATE], 0, False, False),
        ([KV, STATE], 64, True, False),
        ([KV, STATE, CONV], 64, True, False),
        ([KV, CONV], 0, False, False),
        ([KV, CONV], 64, False, False),
        ([KV, PerSequence("x", (2, 3), "fp8")], 64, False, False),
        ([KV, Unpaged("x", 3, "fp8")], 64, False, False),
        ([KV, Side("scale", "kv", 4)], 0, True, True),
    ],
)
def test_p3_reuse_needs_blocks_or_checkpoints(
    resources: list[ResourceHandler], every: int, reuse: bool, partial: bool
) -> None:
    made = plan(*resources, checkpoint_tokens=every)
    assert (not made.no_reuse, made.partial) == (reuse, partial)
    assert f"reuse of blocks: {'on' if reuse else 'off'}" in str(made)
    assert f"partial copies: {'on' if partial else 'off'}" in str(made)


def test_p4_the_phases_come_in_order_and_can_be_printed() -> None:
    made = CachePlan([KV, STATE, CONV], block_tokens=16, max_tokens=64)
    seen: list[tuple[str, int, int]] = []

    def allocate(name: str, count: int, size: int) -> bytearray:
        seen.append((name, count, size))
        return bytearray(count * size)

    for early in (made.group, lambda: made.allocate(allocate), lambda: made.resize(0)):
        with pytest.raises(PlanError, match="cannot .* a plan in phase collect .expected phase"):
            early()
    steps = (
        made.check,
        made.group,
        lambda: made.size(8 << 20, fraction=0.5, sequences=2, peak=1 << 20),
        lambda: made.allocate(allocate),
        lambda: made.resize(4 << 20),
    )
    texts = [str(made), *(str(step()) for step in steps)]
    phases = ("collect", "check", "group", "size", "allocate", "resize")
    for phase, text in zip(phases, texts, strict=True):
        assert f"after phase {phase}" in text
    before, after = seen[:2], seen[2:]
    assert [name for name, _, _ in before] == ["2x64-float16", "state-8x64x16-float32"]
    for (_, more, _), (_, fewer, _) in zip(before, after, strict=True):
        assert more > fewer > 0
    held = [len(memory) for memory in made.memory.values() if isinstance(memory, bytearray)]
    assert len(held) == 2
    assert sum(held) <= (4 << 20) // 2
    with pytest.raises(PlanError, match="cannot check a plan in phase resize"):
        made.check()


def test_p4_resources_outside_the_pools_are_allocated_for_every_sequence() -> None:
    rest = PerSequence("cross", (4, 64), "float16")
    made = plan(KV, rest, Unpaged("scores", 8, "float32"))
    assert [(one.name, one.bytes) for one in made.alone] == [("cross", 512), ("scores", 32 * 1024)]
    made.size(8 << 20, fraction=0.5, sequences=3)
    assert made.division is not None
    assert made.division.memory == int(0.5 * ((8 << 20) - 3 * (512 + 32 * 1024)))


def test_side_buffers_travel_with_their_blocks() -> None:
    [pool] = plan(KV, Side("scale", "kv", 4)).pools
    assert pool.block_bytes == 16 * 2 * (2 * 64 * 2 + 4)
    other = plan(KV, Layer("b", 2, 64, "float16"), Side("scale", "b", 4))
    assert len(other.pools) == 2


@pytest.mark.parametrize(
    ("resources", "options", "says"),
    [
        ([], {}, "no resources"),
        ([KV, KV], {}, "two resources are named 'kv'"),
        ([KV, Side("scale", "k", 4)], {}, "'k' is not a paged layer"),
        ([Layer("a", 2, 64, "fp8", factor=1)], {}, "a latent of 2 heads"),
        ([KV], {"block_tokens": 12}, "12 tokens"),
        ([KV], {"block_tokens": 1}, "1 tokens"),
        ([KV], {"block_tokens": 0}, "0 tokens"),
        ([KV], {"max_tokens": 0}, "0 tokens"),
        ([KV, STATE], {"checkpoint_tokens": 8}, "8 tokens .expected a multiple of 16"),
        ([KV, STATE], {"checkpoint_tokens": -8}, "-8 tokens"),
    ],
)
def test_resources_that_contradict_each_other_are_refused(
    resources: list[ResourceHandler], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        plan(*resources, **options)


def test_wrong_shapes_are_refused() -> None:
    for make in (
        lambda: State("a", 0, 1, 1, "fp8"),
        lambda: State("a", 1, 1, 1, "fp9"),
        lambda: ConvState("a", 4, 0, "fp8"),
        lambda: PerSequence("a", (), "fp8"),
        lambda: Unpaged("a", -1, "fp8"),
        lambda: Side("a", "b", 0),
        lambda: plan(KV).size(1 << 20, fraction=0.5, sequences=0),
        lambda: plan(KV).size(1 << 20, fraction=1.0, sequences=1),
        lambda: plan(KV).size(1 << 10, fraction=0.5, sequences=1),
    ):
        with pytest.raises(PlanError):
            make()


def test_settings_give_layers_another_type_with_scales_and_narrower_windows() -> None:
    layers = [Layer(f"{at}.kv", 2, 64, "float16", window=(None, 8)[at % 2]) for at in range(5)]
    made = CachePlan([*layers, STATE], block_tokens=16, max_tokens=1024)
    made.adapt(dtype="fp8", windows=[32, 0, 4]).check().group()
    kept = {one.name: one for one in made.resources}
    windows = [one.window for one in made.resources if isinstance(one, Layer)]
    assert windows == [32, 8, 4, 8, None]
    assert {kept[f"{at}.kv"].dtype for at in range(5)} == {"fp8"}
    assert kept["0.kv.scales"] == Side("0.kv.scales", "0.kv", 8)
    assert kept["state"] == STATE
    [pool] = [pool for pool in made.pools if "0.kv" in pool.members]
    assert pool.block_bytes == 16 * 2 * (2 * 64 + 8)
    with pytest.raises(
        PlanError, match=r"cannot adapt a plan in phase group .*expected phase collect"
    ):
        made.adapt(dtype="auto")


def test_a_list_of_windows_is_no_longer_than_the_layers() -> None:
    made = CachePlan([KV], block_tokens=16, max_tokens=1024)
    with pytest.raises(
        ConfigError, match=r"gpu\.windows: 2 windows \(expected at most 1, one for each layer"
    ):
        made.adapt(windows=[8, 16])
