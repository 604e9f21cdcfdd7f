"""Handlers pass the suite for third parties: kvladder's, and one of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvladder.config import registry
from kvladder.device.memory import PlanMemory
from kvladder.device.opening import open_device
from kvladder.errors import ConfigError, PlanError
from kvladder.gpu.sizing.base import ResourceHandler, require
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.handlers import (
    ConvState,
    PerSequence,
    Side,
    State,
    StateHandler,
    Unpaged,
)
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.planning.collecting import collected, handlers
from kvladder.testing.handlers import STACK, HandlerTests

Make = Callable[[str], ResourceHandler]
STATE = State("state", 2, 8, 4, "float32")


def attention(**more: Any) -> SimpleNamespace:
    keys, values = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16)
    return SimpleNamespace(keys=keys, values=values, **more)


def recurrent() -> SimpleNamespace:
    return SimpleNamespace(
        recurrent_states={0: torch.zeros(1, 2, 8, 4)}, conv_states={0: torch.zeros(1, 24, 4)}
    )


class TestLayer(HandlerTests):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: Layer(name, 2, 8, "bfloat16")

    @pytest.fixture
    def layer(self) -> Any:
        return attention(sliding_window=8)


class TestLatent(HandlerTests):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: Layer(name, 1, 24, "fp8", factor=1, layout="hnd", side_bytes=3)


class TestState(HandlerTests):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: State(name, 2, 8, 4, "float32")

    @pytest.fixture
    def layer(self) -> Any:
        return recurrent()


class TestConvState(HandlerTests):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: ConvState(name, 2 * 8 + 2 * 4, 3, "bfloat16")

    @pytest.fixture
    def beside(self) -> Sequence[ResourceHandler]:
        return [Layer("kv", 1, 16, "float32"), STATE]

    @pytest.fixture
    def layer(self) -> Any:
        return recurrent()


class TestSide(HandlerTests):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: Side(name, "kv", 3)

    @pytest.fixture
    def beside(self) -> Sequence[ResourceHandler]:
        return [Layer("kv", 2, 16, "float32")]


class TestPerSequence(HandlerTests):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: PerSequence(name, (3, 5), "float16")


class TestUnpaged(HandlerTests):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: Unpaged(name, 7, "float32")


@dataclass(frozen=True, slots=True)
class Memory(StateHandler):
    """A resource of an author's own: the matrix of one head of an xLSTM, with its normalizer."""

    name: str
    size: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require(self.name, self.dtype, self.size)

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        return self.size, self.size + 1

    @classmethod
    def collect(cls, at: int, layer: Any) -> Iterable[ResourceHandler]:
        held = getattr(layer, "matrix", None)
        if held is not None:
            yield cls(f"{at}.memory", held.shape[-2])


class TestMemory(HandlerTests):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: Memory(name, 6)

    @pytest.fixture
    def layer(self) -> Any:
        return SimpleNamespace(matrix=torch.zeros(1, 6, 7))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("handlers", "memory", Memory)


@pytest.mark.usefixtures("registered")
def test_handlers_of_other_packages_collect_beside_kvladders_own() -> None:
    assert handlers()[-1] is Memory
    layers = [attention(), recurrent(), SimpleNamespace(matrix=torch.zeros(1, 6, 7)), object()]
    names = [[one.name for one in kept] for kept in collected(layers)]
    assert names == [["0.kv"], ["1.state", "1.conv"], ["2.memory"], []]


def test_a_class_that_is_not_a_handler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("handlers", "none", dict)
    with pytest.raises(ConfigError, match="'none': expected a class derived from ResourceHandler"):
        handlers()


def planned(*resources: ResourceHandler, **options: Any) -> CachePlan:
    return CachePlan(resources, **{"block_tokens": 16, "max_tokens": 64, **options})


# ---- views


def test_views_are_found_by_layer_and_state() -> None:
    kv = Layer("0.kv", 2, 8, "bfloat16")
    hnd = Layer("1.kv", 2, 8, "bfloat16", layout="hnd")
    conv = ConvState("2.conv", 24, 3, "bfloat16")
    rest = [PerSequence("mask", (3, 5), "float16"), Unpaged("scores", 7, "float32")]
    plan = planned(kv, hnd, STATE, conv, *rest, Side("scale", "1.kv", 4), checkpoint_tokens=32)
    plan.check().group().size(1 << 20, sequences=3)
    memory = PlanMemory(plan)
    assert plan.division is not None
    blocks = {share.group.name: share.blocks for share in plan.division.shares}
    nhd, other, state = (blocks[pool.group.name] for pool in plan.pools)
    assert memory.buffers("0.kv").shape == (nhd, 2, 16, 2, 8)
    assert memory.buffers("1.kv").shape == (other, 2, 2, 16, 8)
    assert memory.sides("scale").shape == (other, 16, 2, 4)
    assert memory.states("state").shape == (state, 2, 8, 4)
    assert memory.convolutions("2.conv").shape == (state, 24, 3)
    assert memory.convolutions("2.conv").dtype == torch.bfloat16
    assert memory.apart("mask").shape == (3, 3, 5)
    assert memory.apart("scores").shape == (3, 64, 7)
    for wrong, ask, says in (
        ("kv", memory.buffers, "'kv' is not a layer.*did you mean '[01].kv'"),
        ("0.kv", memory.states, "'0.kv' is not a state .expected one of: state"),
        ("2.con", memory.convolutions, "did you mean '2.conv'"),
        (
            "x",
            PlanMemory(planned(kv).check().group().size(1 << 20)).apart,
            "has no resource outside pools",
        ),
    ):
        with pytest.raises(PlanError, match=says):
            ask(wrong)


@pytest.mark.parametrize("heads", [8, 2, 1])
def test_blocks_are_as_large_as_the_heads_of_keys_and_values(heads: int) -> None:
    """The number of the model's query heads does not matter."""
    plan = planned(Layer("0", heads, 64, "float16"), Layer("1", heads, 64, "float16"))
    plan.check().group().size(1 << 20)
    [pool] = plan.pools
    assert pool.block_bytes == 2 * 2 * 16 * heads * 64 * 2  # layers, keys and values, tokens
    memory = PlanMemory(plan)
    blocks = memory.buffers("0").shape[0]
    assert blocks == (1 << 20) // pool.block_bytes
    assert memory.buffers("1").shape == (blocks, 2, 16, heads, 64)


def test_memory_outside_the_pools_moves_and_pools_stay() -> None:
    plan = planned(Layer("kv", 2, 8, "float16"), PerSequence("x", (3,), "float32"))
    memory = PlanMemory(plan.check().group().size(1 << 20))
    memory.move("meta")
    assert memory.apart("x").device.type == "meta"
    assert memory.buffers("kv").device.type == "cpu"


# ---- opened


def test_a_plan_is_measured_over_one_sequence_and_resized() -> None:
    seen: list[int] = []

    def forward(memory: PlanMemory) -> int:
        seen.append(len(memory.buffers("kv")))
        return 1 << 20

    def opened(**options: Any) -> int:
        plan = planned(Layer("kv", 2, 8, "float16"))
        tiers = {"arena": STACK["arena"], "tiers": STACK["tiers"]}
        with open_device(tiers, plan, fields={}, free_bytes=2 << 20, **options) as cache:
            return len(cache.memory.buffers("kv"))

    measured, told, whole = opened(forward=forward), opened(peak_bytes=1 << 20), opened()
    assert seen == [4]
    assert measured == told < whole
    assert whole == int(0.9 * (2 << 20)) // (16 * 64)


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ([], "no resources"),
        ([Layer("a", 2, 8, "float16"), Side("s", "b", 4)], "s: 'b' is not a paged layer.*plan: a"),
        (
            [PerSequence("x", (3,), "float32")],
            "plan: nothing can be pooled; allocated separately: x",
        ),
        ([Layer("a", 2, 1 << 20, "float32")], "do not hold one sequence of 64 tokens"),
        (
            [Layer("a", 2, 8, "float16"), PerSequence("x", (1 << 23,), "float32")],
            "16777216 bytes: 1 sequences take 33554432 outside",
        ),
    ],
)
def test_plans_that_disagree_or_do_not_fit_are_refused(resources: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        open_device(STACK, planned(*resources), fields={})


@dataclass(frozen=True)
class Pages(ResourceHandler):
    """Paged, and no layer."""

    kind = "paged"
    name: str = "pages"
    dtype: str = "uint8"

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        return (tokens,)


def test_a_paged_resource_must_be_a_layer() -> None:
    with pytest.raises(
        PlanError, match=r"pages: Pages is paged, but is not a Layer or Side \(derive it"
    ):
        planned(Pages()).check()
