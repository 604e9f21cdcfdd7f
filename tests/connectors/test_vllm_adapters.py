"""LoRA adapters that change under one name and path: blocks are named by the adapter in memory."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from kvladder.arena import Arena, Slot
from kvladder.connectors.vllm.identity.adapters import Adapters, digest_of
from kvladder.connectors.vllm.step import Attach, Load, StepMetadata, Wanted
from kvladder.connectors.vllm.worker import WorkerHalf
from kvladder.gpu.copy.copier import CopyJob, JobId
from kvladder.notices import Notices
from tests.connectors.loaded import FakeLoaded
from tests.connectors.loras import Loras, Server
from tests.connectors.mixes import MODELS
from tests.connectors.scripted import LAYERS, TOKENS, configs
from tests.connectors.simulated import Simulation
from tests.connectors.test_vllm_simulated import HOST, disturb, moody, prompt, windows_or_states
from tests.connectors.test_vllm_simulated import registered as registered
from tests.patience import until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NAMES = "abc"
Start = Callable[..., Simulation]


@pytest.fixture
def start(tmp_path: Path, registered: None) -> Iterator[Start]:
    """Return a function that starts engines with the adapter ``a``, of content 1."""
    del registered
    found: list[Simulation] = []

    def begin(source: Any = HOST, model: str = "full", **options: Any) -> Simulation:
        one = Simulation(tmp_path, {"on_reset": "keep", **source}, model, **options)
        one.server.put("a", 1)
        found.append(one)
        return one

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield begin
    for one in found:
        one.close()


def hits(one: Simulation, seed: int = 1, *, adapter: str | None = "a", keep: bool = False) -> int:
    """Return a prompt's tokens from the connector, with vLLM's cache emptied or kept."""
    if not keep:
        one.reset()
    before = one.hits
    one.add(prompt(seed), adapter=adapter)
    one.run()
    return one.hits - before


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_finds_its_own_blocks(start: Start, lazy: bool, ranks: int) -> None:
    one = start(ranks=ranks)
    one.server.load("a", lazy=lazy)
    assert [hits(one), hits(one), hits(one, adapter=None)] == [0, 28, 0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_replaced_before_the_first_request_do_not_change_the_name(
    start: Start, ranks: int
) -> None:
    one = start(ranks=ranks)
    one.server.load("a")
    one.server.put("a", 2)
    assert [hits(one), hits(one)] == [0, 28], "vLLM has those that it read"
    one.server.load("a")
    assert [hits(one), hits(one)] == [0, 28]
    one.server.put("a", 1)
    one.server.load("a")
    assert hits(one) == 28, "what the first ones made"


@pytest.mark.parametrize("way", ["unloaded", "in place"])
def test_vllms_own_blocks_of_a_replaced_adapter_are_not_saved(start: Start, way: str) -> None:
    one = start()
    one.server.load("a")
    assert hits(one) == 0
    one.server.put("a", 2)
    if way == "unloaded":
        one.server.unload("a")
    one.server.load("a", in_place=way == "in place")
    assert hits(one, keep=True) == 0, "vLLM errs here, too"
    longer = [*prompt(1), *prompt(2)]
    one.add(longer, adapter="a")
    one.run()
    assert hits(one, seed=3, keep=True) == 0
    assert [hits(one), hits(one), hits(one, seed=3)] == [0, 28, 28]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ["in place", "makes way"])
def test_blocks_computed_by_two_adapters_are_not_saved(
    start: Start, way: str, overlap: bool
) -> None:
    """The step after the change was made by a scheduler half that did not know of it."""
    one = start(overlap=overlap, budget=8)
    one.server.load("a")
    request = one.add(prompt(1), adapter="a", length=40)
    for _ in range(6):
        one.step()
    one.server.put("a", 2)
    for rank in one.ranks:
        if way == "in place":
            one.server.load("a", in_place=True)
        else:
            rank.loras.remove_adapter(1)
    one.run()
    one.server.put("a", 1)
    one.server.load("a")
    one.reset()
    one.add([*prompt(1), *one.answers[request]], adapter="a")
    one.run()
    assert 0 < one.hits <= 36, "what it had before"
    one.server.put("a", 2)
    one.server.load("a")
    assert hits(one) == 0
    one.reset()
    one.add([*prompt(1), *one.answers[request]], adapter="a")
    one.run()  # it checks that later blocks were not saved under the second one's name


@pytest.mark.parametrize("anew", [False, True])
def test_adapter_files_that_vllm_reads_again_change_the_name(start: Start, anew: bool) -> None:
    """vLLM reads them for each step of a request, or after it has evicted the adapter."""
    one = start(adapters=1)
    one.server.put("b", 3)
    one.server.load("b", lazy=True)
    one.server.load("a", in_place=anew)
    assert [hits(one), hits(one)] == [0, 28]
    one.server.put("a", 2)
    if not anew:
        assert hits(one) == 28, "it has the old ones"
        assert hits(one, adapter="b") == 0
    assert hits(one) == 0
    one.server.put("a", 1)
    hits(one, adapter="b")
    assert hits(one) == 28


def test_adapters_that_take_turns_are_found_each_time(start: Start) -> None:
    """With room for one adapter, vLLM's default, each request reads its adapter again."""
    one = start(adapters=1)
    for name, content in zip(NAMES, (1, 2, 3), strict=True):
        one.server.put(name, content)
        one.server.load(name, lazy=True)
    assert [hits(one, adapter=name) for name in NAMES * 3] == [0] * 3 + [28] * 6
    assert one.ranks[0].loras.reads == 9, "once for each, as without a connector"


def test_an_adapter_in_use_is_not_replaced_by_a_requested_one(start: Start) -> None:
    one = start(adapters=2)
    for name in "bc":
        one.server.put(name, 2)
        one.server.load(name, lazy=True)
    one.server.load("a")
    one.add(prompt(1), adapter="a", length=60)
    for name in "bcbc":
        one.add(prompt(2), adapter=name)
        for _ in range(8):
            one.step()
    assert one.requests, "the first one runs all the time"
    one.run()
    assert one.ranks[0].loras.reads == 5, "the first one once, the others in turns"


def test_an_adapter_that_cannot_be_read_is_computed_without_a_cache(start: Start) -> None:
    one = start()
    one.server.load("a", lazy=True)
    (rank,) = one.ranks
    rank.loras.failing = OSError("gone")
    one.add(prompt(1), adapter="a")
    for _ in range(9):
        one.step()
    assert not one.answers, "it waits"
    rank.loras.failing = None
    rank.loras._adapter_manager.lora_config.max_cpu_loras = 0  # and there is no room
    one.step()
    rank.loras._adapter_manager.lora_config.max_cpu_loras = 2
    one.run()
    assert one.answers
    assert one.half.stats()["host"]["stored"] == 0
    assert [hits(one), hits(one)] == [0, 28]


def test_an_adapter_with_unknown_parts_is_not_cached(start: Start) -> None:
    one = start()
    lora = one.server.load("a")
    held: Any = one.ranks[0].loras._adapter_manager.list_adapters()[lora.lora_int_id]
    held.later = object()
    assert [hits(one), hits(one)] == [0, 0]


@pytest.mark.parametrize(
    ("kept", "pinned", "left"),
    [
        ("", "", "bc"),  # the least recently used one is evicted
        ("a", "", "ac"),
        ("", "a", "ac"),
        ("ab", "", "ab"),
        ("a", "b", "ab"),
        ("c", "", "bc"),
    ],
)
def test_a_requested_adapter_replaces_none_that_is_used_or_pinned(
    registered: None, tmp_path: Path, kept: str, pinned: str, left: str
) -> None:
    del registered
    loras = Loras()
    server = Server(tmp_path, [loras])
    numbers = {}
    for name in NAMES:
        server.put(name, 1)
        numbers[name] = server.load(name, lazy=name == "c").lora_int_id
    for name in pinned:
        loras._adapter_manager._registered_adapters.pin(numbers[name])
    held = frozenset(numbers[name] for name in kept)
    adapters = Adapters(loras, Notices(lambda: 0.0))
    adapters.read(Wanted(server.served["c"], 0, held))
    assert set(loras.contents()) == {numbers[name] for name in left}


def test_an_adapter_that_was_replaced_for_a_while_is_not_trusted(start: Start) -> None:
    """No request began with it, but one continued with it, and vLLM's own cache has the result."""
    one = start(budget=8)
    one.server.load("a")
    request = one.add(prompt(1), adapter="a", length=60)
    for content in (2, 1):
        for _ in range(8):
            one.step()
        one.server.put("a", content)
        one.server.load("a", in_place=True)
    one.run()
    longer = [*prompt(1), *one.answers[request], *prompt(2)]
    one.add(longer, adapter="a")
    one.run()
    one.reset()
    before = one.hits
    one.add(longer, adapter="a")
    one.run()
    assert 0 < one.hits - before <= 40, "what it had before"


@pytest.fixture
def half(registered: None) -> Iterator[tuple[WorkerHalf, Loras, Attach]]:
    """A rank's half with room for two adapters, and a mapped arena."""
    del registered
    vllm_config, kv_config = configs()
    kv_config.num_blocks = 4
    loras = Loras()
    made = WorkerHalf(
        vllm_config,
        kv_config,
        rank=0,
        notices=Notices(lambda: 0.0),
        make_loaded=FakeLoaded(loras=loras),
    )
    kv = torch.zeros(LAYERS, 4, 1, TOKENS, 1, dtype=torch.int64)
    made.register({f"l{n}": kv[n] for n in range(LAYERS)})
    arena = Arena.create(4, 4096)
    yield made, loras, Attach(arena.handle, ((0,),))
    made.close()
    arena.close()


@pytest.mark.parametrize("moment", ["begin", "load", "save"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_an_adapter_that_is_read_again_within_a_step_is_noticed(
    half: tuple[WorkerHalf, Loras, Attach], tmp_path: Path, moment: str, by_layer: bool
) -> None:
    """Model runner V1 reads adapters after the first hook; the forward pass waits for the load.

    ``moment`` is the next hook.
    """
    worker, loras, attach = half
    server = Server(tmp_path, [loras])
    server.put("a", 1)
    number = server.load("a").lora_int_id
    worker.begin(StepMetadata(turn=1))
    load = Load(CopyJob(JobId(1), "onboard", (1,), (Slot(0),)), "r", sync=True)
    save = CopyJob(JobId(2), "offload", (2,), (Slot(1),))
    step = StepMetadata(
        attach, loads=[load], saves=[save], turn=2,
        owners={JobId(1): number, JobId(2): number}, adapters={number: (1,)},
    )  # fmt: skip
    for hook in ("begin", "load", "save"):
        if hook == moment:
            server.put("a", 2)
            server.load("a", in_place=True)
        more = {"by_layer": by_layer} if hook == "load" else {}
        getattr(worker, hook)(step, **more)
    report = worker.report()
    assert report is not None
    ended = {finished.id: finished.ok for finished in report.ended}
    assert not ended[JobId(2)], "another adapter computed it"
    assert ended[JobId(1)] == (moment == "save"), "it was there before"
    assert worker.bad_blocks() == (set() if ended[JobId(1)] else {1})


def test_a_load_in_flight_fails_once_its_adapter_has_changed(
    half: tuple[WorkerHalf, Loras, Attach], tmp_path: Path
) -> None:
    """Its request did not run yet, so the adapter in memory computes it."""
    worker, loras, attach = half
    server = Server(tmp_path, [loras])
    server.put("a", 1)
    number = server.load("a").lora_int_id
    worker.begin(StepMetadata(turn=1))
    loads = [
        Load(CopyJob(JobId(n), "onboard", (n,), (Slot(n),)), f"r{n}", sync=False) for n in (1, 2)
    ]
    step = StepMetadata(
        attach, loads=loads, turn=2, owners={JobId(1): number}, adapters={number: (1,)}
    )  # fmt: skip
    for hook in (worker.begin, worker.load, worker.save):
        hook(step)
    server.put("a", 2)
    server.load("a", in_place=True)
    worker.begin(StepMetadata(turn=3))
    received = set[str]()

    def all_received() -> bool:
        received.update(worker.received())
        return received == {"r1", "r2"}

    until(all_received)
    assert worker.bad_blocks() == {1}, "the other one has no adapter"


def test_every_part_of_an_adapter_but_its_number_names_blocks() -> None:
    def made(number: int = 1, **changes: Any) -> Any:
        packed = [torch.ones(2, 1), None, torch.zeros(2, 1)]
        layer = {"module_name": "l", "rank": 1, "scaling": 1}
        layer |= {"lora_a": torch.ones(1, 2), "lora_b": packed}
        layer |= {name: value for name, value in changes.items() if name in layer}
        full = SimpleNamespace(weight=torch.ones(2), bias=None)
        whole = {"id": number, "rank": 1, "modules_to_save": {"head": full}}
        whole |= {name: value for name, value in changes.items() if name not in layer}
        return SimpleNamespace(**whole, loras={"l": SimpleNamespace(**layer)})

    plain = digest_of(made())
    assert digest_of(made(number=2)) == plain
    changes: list[dict[str, Any]] = [
        {"scaling": 2},
        {"lora_a": torch.tensor([[1.0, 2.0]])},
        {"lora_a": torch.ones(1, 2, dtype=torch.bfloat16)},
        {"lora_b": [None, torch.ones(2, 1), torch.zeros(2, 1)]},
        {"modules_to_save": {}},
        {"is_3d_lora_weight": True},
    ]
    found = {digest_of(made(**change)) for change in changes}
    assert len(found) == len(changes)
    assert plain not in found
    with pytest.raises(TypeError, match=r"later: expected a tensor, number or text, found object"):
        digest_of(made(later=object()))


@pytest.mark.parametrize("source", ["host", "moody"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_no_request_reads_bytes_of_another_adapter(
    start: Start, model: str, source: str, seed: int
) -> None:
    """Adapters are replaced, loaded lazily and in place, reloaded and evicted in between."""
    random = Random(f"adapters {model} {source} {seed}")
    given = HOST if source == "host" else moody(12, seed=seed)
    one = start(
        {**given, "on_reset": random.choice(["forget", "keep"])},
        model,
        seed=seed,
        blocks=len(MODELS[model]) * random.choice([20, 30]),
        budget=random.choice([6, 16, 48]),
        ranks=random.choice([1, 2]),
        overlap=random.random() < 0.4,
        interval=random.choice([None, None, 0, 32]) if windows_or_states(model) else None,
        adapters=random.choice([1, 2, 3]),
        late_hooks=random.random() < 0.3,
    )
    for name in NAMES:
        one.server.put(name, 1)
        one.server.load(name, lazy=random.random() < 0.5)
    trunks = [prompt(n, 40) for n in range(2)]
    for _ in range(200):
        if random.random() < 0.3 and len(one.requests) < 6:
            one.add(
                [
                    *random.choice(trunks)[: random.randrange(1, 41)],
                    *prompt(random.randrange(4), 5),
                ],
                length=random.randrange(1, 12),
                priority=random.randrange(3),
                adapter=random.choice([None, *fitting(one), *fitting(one)]),
                recompute=random.random() < 0.05,
            )
        replace(one, random)
        disturb(one, random, weights=0.02)
        one.step()
    for rank in one.ranks:
        if rank.copier is not None:
            rank.copier.failing, rank.copier.held = 0.0, False
    one.run()
    assert one.reads > 0


def fitting(one: Simulation) -> list[str]:
    """Return the adapters that fit beside those of unfinished requests.

    vLLM's scheduler fails an assertion if running requests have more.
    """
    used = {r.lora_request.lora_int_id for r in one.requests.values() if r.lora_request}
    served = one.server.served.items()
    return [n for n, lora in served if len(used | {lora.lora_int_id}) <= one.adapters]


def replace(one: Simulation, random: Random) -> None:
    """Whatever may happen to adapters between two steps."""
    name = random.choice(NAMES)
    if random.random() < 0.05:
        one.server.put(name, random.randrange(1, 4))
    if random.random() < 0.05:
        ways = [{"in_place": True}, {"lazy": True}, {}]
        before = one.server.served[name]
        one.server.load(name, **random.choice(ways))
        if random.random() < 0.5:
            for rank in one.ranks:
                rank.loras.remove_adapter(before.lora_int_id)
