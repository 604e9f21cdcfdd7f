"""Both halves of the vLLM connector against an engine that checks every byte it reads."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from kvladder.arena import Arena
from kvladder.connectors.vllm.requests.find import Find
from kvladder.connectors.vllm.requests.lookup import LookupState
from kvladder.errors import ConfigError
from kvladder.gpu.copy.pages import Parts
from kvladder.gpu.copy.registration import Registration
from kvladder.gpu.copy.streams import StreamCopier
from tests.connectors.scripted import TOKENS, Engine, Request
from tests.kit.played import PlayedDevice

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds

HOST = {"host": "1 MiB"}
COLD = {  # room for eight blocks on the host, and more below
    "arena": {"size": "32 KiB"},
    "fetch": {"budget": "100 %"},
    "tiers": [{"type": "host"}, {"type": "memory", "capacity": "2 MiB", "when": "commit"}],
}


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Import it once, with whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines that the test made; all are closed, and must have given everything back."""
    made: list[Engine] = []
    yield made
    for engine in made:
        manager = engine.half.connector.manager
        engine.half.settle()
        manager.check()
        engine.close()
        assert engine.half._answers.pins == 0
        manager.check()
        assert manager.arena.free == manager.arena.slots


@pytest.mark.parametrize(("given_s", "expected_s"), [(0, 10), (5, 10), (30, 30)])
def test_closing_writes_for_as_long_as_vllm_lets_it(
    given_s: int, expected_s: int, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    engine.half._vllm_config.shutdown_timeout = given_s
    manager, asked = engine.half.connector.manager, []
    close = manager.close

    def closing(*, timeout_s: float) -> None:
        asked.append(timeout_s)
        close(timeout_s=timeout_s)

    monkeypatch.setattr(manager, "close", closing)
    engine.close()
    assert asked == [expected_s]


def prompt(seed: int, length: int = 30) -> list[int]:
    return Random(seed).choices(range(50), k=length)


def served(engine: Engine, tokens: Sequence[int], **options: Any) -> Request:
    request = engine.add(tokens, **options)
    engine.run()
    return request


@pytest.mark.parametrize("load", ["async", "sync", "layers"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_computed_blocks_are_loaded(engines: list[Engine], load: str, ranks: int) -> None:
    engine = Engine(HOST, load=load, ranks=ranks)
    engines.append(engine)
    served(engine, prompt(1))
    assert engine.loaded == 0
    served(engine, [*prompt(1), 7])
    assert engine.loaded == 30 // TOKENS
    served(engine, prompt(1)[:28])  # a whole number of blocks: one token is computed all the same
    assert engine.loaded == 30 // TOKENS + 27 // TOKENS


def test_blocks_of_generated_tokens_are_saved_unless_disabled(engines: list[Engine]) -> None:
    for wanted, blocks in ((True, 49 // TOKENS), (False, 30 // TOKENS)):
        engine = Engine(HOST, save_decode=wanted)
        engines.append(engine)
        served(engine, prompt(1), length=50)
        engine.half.settle()
        assert engine.half.stats()["host"]["blocks"] == blocks


@pytest.mark.parametrize("load", ["async", "sync", "layers"])
@pytest.mark.parametrize("source", [HOST, COLD], ids=["host", "cold"])
@pytest.mark.parametrize("seed", range(12))
def test_no_request_reads_bytes_that_were_not_written(
    engines: list[Engine], load: str, source: dict[str, Any], seed: int
) -> None:
    """Shared prefixes, preemption, aborts, failing copies: reads are checked in every step."""
    random = Random(seed)
    engine = Engine(source, blocks=random.choice([18, 40]), seed=seed, load=load,
                    ranks=random.choice([1, 2]))  # fmt: skip
    engines.append(engine)
    trunks = [prompt(n, 24) for n in range(3)]
    for _ in range(150):
        if random.random() < 0.3 and len(engine.entries) < 6:
            trunk = random.choice(trunks)[: random.randrange(1, 25)]
            engine.add([*trunk, *prompt(random.randrange(5), random.randrange(1, 9))],
                       length=len(trunk) + random.randrange(10, 20))  # fmt: skip
        alive = [i for i, e in engine.entries.items() if e.state != "aborted"]
        if alive and random.random() < 0.05:
            engine.abort(random.choice(alive))
        running = [i for i, e in engine.entries.items() if e.state == "running"]
        if running and random.random() < 0.05:
            engine.preempt(random.choice(running))
        for copier in engine.copiers:
            copier.failing = random.choice([0.0, 0.0, 0.2])
        engine.step(budget=random.choice([5, 16, 64]))
    for copier in engine.copiers:
        copier.failing = 0.0
    engine.run()
    assert engine.loaded > 0
    assert engine.read > 0


def test_a_step_that_writes_to_blocks_that_are_being_saved_waits(engines: list[Engine]) -> None:
    engine = Engine(HOST, blocks=9)  # room for one request
    engines.append(engine)
    served(engine, prompt(5))
    engine.copiers[0].held = True
    engine.add(prompt(1))
    engine.step(64)
    assert not engine.entries
    engine.add(prompt(2))
    step = engine.step(64)
    assert step.fence
    engine.copiers[0].held = False
    engine.run()
    served(engine, prompt(1))
    assert engine.loaded == 30 // TOKENS


def test_a_running_request_does_not_wait_for_its_own_saves(engines: list[Engine]) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    served(engine, prompt(5))
    engine.copiers[0].held = True
    engine.add(prompt(1), length=60)
    engine.step(64)
    assert engine.half.connector.saving
    for _ in range(20):
        assert engine.step(64).fence == []
    engine.copiers[0].held = False
    engine.run()


@pytest.mark.parametrize("load", ["async", "sync", "layers"])
def test_a_request_with_a_failed_load_is_computed_and_saved_again(
    engines: list[Engine], load: str
) -> None:
    engine = Engine(HOST, load=load)
    engines.append(engine)
    served(engine, prompt(1))
    engine.copiers[0].failing, engine.copiers[0].failing_way = 1.0, "onboard"
    request = engine.add(prompt(1), length=40)
    state = engine.half._states[request.request_id]
    while state.lookup.state is not LookupState.COMPUTES:
        engine.step(64)
    assert engine.half.ask(request, 0) == (0, False)
    assert engine.half.stats()["host"]["blocks"] == 0  # unusable blocks are forgotten
    engine.run(steps_max=40)
    assert engine.loaded == 7  # it was tried, once
    engine.copiers[0].failing = 0.0
    engine.half.settle()
    assert engine.half.stats()["host"]["blocks"] == 39 // TOKENS
    served(engine, prompt(1))
    assert engine.loaded == 14


def test_the_answer_is_kept_while_a_request_cannot_be_allocated(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    served(engine, prompt(1))
    request = Request("waits", prompt(1))
    half = engine.half
    half.arrived(request)
    looked_for = [0]
    original = half.connector.manager.fetch

    def fetch(keys: Any, **options: Any) -> Any:
        looked_for[0] += 1
        return original(keys, **options)

    monkeypatch.setattr(half.connector.manager, "fetch", fetch)
    assert {half.ask(request, 0) for _ in range(200)} == {(28, True)}
    assert looked_for[0] == 0  # it was brought up when the request arrived
    assert {half.ask(request, 8) for _ in range(200)} == {(20, True)}
    half.finished(request)
    assert half._answers.pins == 0


def test_blocks_that_vllm_has_itself_are_not_fetched(engines: list[Engine]) -> None:
    class Pool:
        def get_cached_block(self, block_hash: bytes, groups: list[int]) -> object:
            return object() if block_hash in Request("", prompt(1)[:20]).block_hashes else None

    engine = Engine(HOST, pool=Pool())
    engines.append(engine)
    served(engine, prompt(1))
    request = Request("partly", prompt(1))
    engine.half.arrived(request)
    assert engine.half._answers.pins == 2  # of seven blocks vLLM has five
    assert engine.half.ask(request, 20) == (8, True)
    assert engine.half.ask(request, 0) == (28, True)  # it has lost them since
    assert engine.half.ask(request, 28) == (0, False)
    engine.half.finished(request)


def test_an_answer_is_dropped_when_vllms_own_blocks_change(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvladder.connectors.vllm.requests import answers as module

    engine = Engine(HOST)
    engines.append(engine)
    served(engine, prompt(1))
    half = engine.half
    request = Request("waits", prompt(1))
    monkeypatch.setattr(module, "held_by_vllm", lambda *_: 8)
    half.arrived(request)
    assert half.ask(request, 8) == (20, True)
    with monkeypatch.context() as patch:
        patch.setattr(Find, "done", property(lambda _: False))
        assert half.ask(request, 0) == (None, False)  # another search, still in progress
    assert half.ask(request, 8) == (20, True)
    half.allocated(request, [[30, 31, 32, 33, 34, 35, 36]], 20)
    (load,) = half._loads.in_flight.values()
    assert load.job.blocks == (32, 33, 34, 35, 36)
    half.finished(request)
    half.connector.close()


def test_an_abort_before_the_answer_was_used_unpins(engines: list[Engine]) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    served(engine, prompt(1))
    request = engine.add(prompt(1))
    assert engine.half._answers.pins == 7
    engine.abort(request.request_id)
    assert engine.half._answers.pins == 0


def test_unreported_saves_count_when_both_halves_are_in_one_process(
    engines: list[Engine],
) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    served(engine, prompt(5))
    engine.copiers[0].held = True
    engine.add(prompt(1))
    engine.step(64)
    assert not engine.entries
    assert engine.half.busy
    engine.copiers[0].wait([job.id for job in engine.copiers[0]._waiting])
    engine.add(prompt(1))  # no step in between
    engine.copiers[0].held = False
    engine.run()
    assert engine.loaded == 7


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_step_loses_only_its_saves(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    served(engine, prompt(1))
    half = engine.half
    engine.add(prompt(1))
    engine.add(prompt(2))
    last = engine.add(prompt(3))
    original = half._saver.full

    def save(state: Any, *arguments: Any) -> None:
        if state.request is last:
            boom()
        original(state, *arguments)

    with monkeypatch.context() as patch:
        if late:  # once all that is to be copied is in the step
            patch.setattr(half._weights, "prepare", boom)
        else:
            patch.setattr(half._saver, "full", save)
        with pytest.raises(RuntimeError, match="boom"):
            engine.step(100)
    assert not half.connector.saving  # too late for the second one's blocks
    assert [load.request_id[:2] for load in half._loads.lost] == ["r0"]
    for entry in engine.entries.values():
        entry.new = True
    engine.run()
    assert engine.loaded == 7


@pytest.mark.parametrize("load", ["sync", "layers"])
@pytest.mark.parametrize("late", [False, True])
def test_no_forward_pass_reads_the_blocks_that_a_failed_step_was_to_load(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, load: str, late: bool
) -> None:
    """The engine computes in that very step, so its workers report the loads as failed."""
    engine = Engine(HOST, load=load)
    engines.append(engine)
    served(engine, prompt(1))
    half = engine.half
    engine.expects = lambda error: "boom" in str(error)
    engine.add(prompt(1))
    with monkeypatch.context() as patch:
        patch.setattr(half._weights if late else half, "prepare" if late else "_save", boom)
        engine.step(100)
    engine.run()
    assert not half._loads.in_flight
    served(engine, prompt(1))
    assert not engine.entries, "all that was saved, before and after, is right"


def test_a_match_that_overlaps_vllms_blocks_is_loaded_from_their_end(
    engines: list[Engine],
) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    served(engine, prompt(1))
    half = engine.half
    request = Request("partly", prompt(1))
    half.arrived(request)
    assert half.ask(request, 20) == (8, True)
    find = half._states["partly"].lookup.find
    assert find is not None
    slots = find.held[0].match.slots[:7]
    half.allocated(request, [[30, 31, 32, 33, 34, 35, 36, 37]], 8)
    assert half.sources(request) == {"host": 8}
    step = half.build(engine._output({}))
    (load,) = step.loads
    assert (load.job.blocks, load.job.slots) == ((35, 36), tuple(slots[5:7]))
    half.finished(request)
    worker = engine.workers[0]
    worker.load(step)
    engine.copiers[0].wait([load.job.id])
    assert worker.received() == {"partly"}
    report = worker.report()
    assert report is not None
    half.report(report)
    assert not half.busy


def boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def test_an_allocation_that_fails_in_the_connector_is_a_failed_load(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    served(engine, prompt(1))
    half = engine.half
    request = engine.add(prompt(1))
    monkeypatch.setattr(half._loads, "begin", boom)
    original = half.allocated

    def allocated(*arguments: Any) -> None:  # as the connector's edge to vLLM does
        with suppress(RuntimeError):
            original(*arguments)

    monkeypatch.setattr(half, "allocated", allocated)
    engine.run(steps_max=40)
    assert request.num_tokens == 31


def test_a_block_pool_given_after_the_start_is_refused(engines: list[Engine]) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    with pytest.raises(ConfigError, match="block pool"):
        engine.scheduler.bind(object())


def test_a_start_that_fails_closes_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its arena stays mapped, which ``conftest.py`` notices."""
    from kvladder.connectors.vllm import scheduler as module

    monkeypatch.setattr(module, "enabled", lambda _: True)
    with pytest.raises(ConfigError, match=r"events\.max"):
        Engine({**HOST, "events": {"max": 0}})


def test_a_cleared_cache_serves_no_blocks(engines: list[Engine]) -> None:
    engine = Engine(COLD)
    engines.append(engine)
    served(engine, prompt(1))
    waiting = Request("waits", prompt(1))
    engine.half.arrived(waiting)
    engine.half.reset()
    assert engine.half.ask(waiting, 0) == (None, False), "the ranks look at their weights first"
    engine.step()
    assert not engine.half.connector.manager.resetting
    assert engine.half.ask(waiting, 0) == (0, False)
    engine.half.finished(waiting)
    served(engine, prompt(1))
    assert engine.loaded == 0


def test_messages_between_the_halves_can_be_pickled(engines: list[Engine]) -> None:
    engine = Engine(HOST)
    engines.append(engine)
    engine.add(prompt(1))
    step = engine.step(64)
    assert step.saves
    again = pickle.loads(pickle.dumps(step))
    assert (again.saves, again.attach) == (step.saves, step.attach)
    described = engine.workers[0].describe()
    assert described.worker is engine.workers[0]
    copy = pickle.loads(pickle.dumps(described))
    assert copy.worker is None
    assert copy.fields == described.fields
    engine.run()


def test_slots_are_used_once_the_devices_of_all_ranks_have_registered_them(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[PlayedDevice] = []

    def make(parts: Parts, arena: Arena) -> StreamCopier:
        device = PlayedDevice()
        devices.append(device)
        return StreamCopier(device.parts(parts), arena, device)

    options: Any = Registration.__init__.__kwdefaults__
    monkeypatch.setitem(options, "piece_bytes", 64 * 4096)
    engine = Engine(HOST, ranks=2, make_copier=make)
    engines.append(engine)
    arena = engine.half.connector.manager.arena

    def serve() -> None:
        engine.add(prompt(1), length=31)
        for _ in range(40):
            engine.step()
            for device in devices:
                device.run_on(0.01)
        assert not engine.entries

    serve()
    assert len(devices) == 2, "with the first step, not with the first copy"
    assert (arena.admitted, engine.loaded) == (0, 0)
    devices[0].work_in_background()
    serve()
    assert (arena.admitted, engine.loaded) == (0, 0)
    devices[1].step_background()
    for _ in range(3):  # the first begins before the news, and leaves its first blocks out
        serve()
    assert arena.admitted >= 64
    assert engine.loaded > 0
    devices[1].work_in_background()
    serve()
    assert arena.admitted == arena.slots == 256
    assert all(device.host_waits == [] for device in devices)
    step = engine.half.build(engine._output({}))
    assert step.attach is None, "everybody has it"
    engine.run()
