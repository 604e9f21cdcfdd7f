"""The order in which vLLM's model runners write to blocks and let a connector fence its saves.

Their real ``execute_model`` runs with recorders in place of the writes. These tests notice a runner
with another order; the last ones show the consequences of the order.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvladder.arena import Arena, Slot
from kvladder.connectors.vllm import KVLadderConnector
from kvladder.connectors.vllm.start import overwrites, runs_v2
from kvladder.connectors.vllm.step import Attach, StepMetadata
from kvladder.connectors.vllm.worker import WorkerHalf
from kvladder.errors import ConfigError
from kvladder.gpu.copy.copier import CopyJob, JobId
from kvladder.gpu.copy.streams import StreamCopier
from kvladder.notices import Notices
from tests.connectors.loaded import FakeLoaded
from tests.connectors.mixes import MODELS, vllm_configs
from tests.connectors.runners import Enough, Writes, output, run_v1, run_v2
from tests.connectors.scripted import LAYERS, TOKENS, configs
from tests.kit.played import Operation, PlayedDevice, plain

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Connector:
    """Writes down which of its hooks are called."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            self._order.append(name)
            return MagicMock()

        return hook


def recorded(order: list[str]) -> Writes:
    """Write down what a step does to blocks, up to its forward pass."""
    return Writes(
        zero=lambda _: order.append("zero"),
        copy=lambda *_: order.append("copy"),
        move_states=lambda: order.append("move states"),
    )


@pytest.mark.parametrize(
    ("tokens", "written"), [(0, ["zero", "copy"]), (1, ["zero", "copy", "move states"])]
)
def test_model_runner_v2_writes_before_the_connector_can_fence(
    monkeypatch: pytest.MonkeyPatch, tokens: int, written: list[str]
) -> None:
    order: list[str] = []
    with contextlib.suppress(Enough):
        run_v2(Connector(order), recorded(order), output(tokens=tokens), monkeypatch)
    assert order[: len(written) + 1] == [*written, "handle_preemptions"]


def test_model_runner_v1_lets_the_connector_fence_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    with contextlib.suppress(Enough):
        run_v1(Connector(order), recorded(order), output(tokens=1), monkeypatch)
    assert order[:3] == ["handle_preemptions", "zero", "copy"]


def test_model_runner_v2_does_not_set_a_running_request_back_on_its_device() -> None:
    """Loads that a step waits for are refused for it, until this fails."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = object.__new__(GPUModelRunner)
    states = SimpleNamespace(
        req_id_to_index={"r": 0},
        num_computed_tokens_np=np.array([64]),
        prefill_len=SimpleNamespace(np=np.array([80])),
        num_computed_prefill_tokens=np.array([64]),
        num_computed_tokens=MagicMock(),  # the device computes positions from this
    )
    vars(runner).update(req_states=states, block_tables=MagicMock())
    made = output(tokens=1)
    made.new_block_ids_to_zero = made.kv_cache_block_copies = None
    made.scheduled_cached_reqs.req_ids = ["r"]
    made.scheduled_cached_reqs.num_computed_tokens = [16]
    made.scheduled_cached_reqs.new_block_ids = [None]
    GPUModelRunner.update_requests(runner, made)
    assert states.num_computed_tokens_np[0] == 16
    assert not states.num_computed_tokens.mock_calls


def test_the_runner_and_the_zeroing_of_blocks_are_read_from_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    found = {}
    for name in ("full", "window", "state"):
        config, cache = vllm_configs(tmp_path, {"host": "1 MiB"}, MODELS[name])
        found[name] = overwrites(cache)
        for version, first in (("0", False), ("1", True)):
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", version)
            assert runs_v2(config) is first
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    assert found == {"full": False, "window": False, "state": True}
    assert runs_v2(SimpleNamespace())  # it does not say which runner it has: the worse is assumed
    assert overwrites(SimpleNamespace())


@pytest.mark.parametrize("load", ["sync", "layers"])
def test_vllm_refuses_loads_that_it_would_recompute_wrongly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: str
) -> None:
    """It refuses them with kvladder alone, and beside connectors with the engine's own policy."""
    source = {"host": "1 MiB", "load": load}
    config, cache = vllm_configs(tmp_path, source, MODELS["full"])
    transfer = config.kv_transfer_config
    refused = pytest.raises(ConfigError, match="runner V2 wrongly recomputes such a load")
    for name in ("get_tp_group", "get_pp_group"):
        group = SimpleNamespace(world_size=1, rank_in_group=0)
        monkeypatch.setattr(parallel_state, name, lambda group=group: group)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for role in KVConnectorRole:
        with refused:
            KVLadderConnector(config, role, cache)
    transfer.kv_load_failure_policy = "fail"
    KVLadderConnector(config, KVConnectorRole.SCHEDULER, cache).shutdown()
    beside = KVLadderConnector(config, KVConnectorRole.WORKER, cache)
    engine = SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute")
    whole = SimpleNamespace(_kv_transfer_config=engine)
    monkeypatch.setattr(KVLadderConnector, "_whole", whole)
    with refused:
        beside.register_kv_caches({})
    transfer.kv_load_failure_policy = "recompute"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    KVLadderConnector(config, KVConnectorRole.SCHEDULER, cache).shutdown()


class Worker:
    """A rank's half on a simulated device, with one block that a step has computed and saves."""

    def __init__(self) -> None:
        self.device = PlayedDevice()
        vllm_config, kv_config = configs()
        kv_config.num_blocks = 4
        self.kv = self.device.own(torch.zeros(LAYERS, 4, 1, TOKENS, 1, dtype=torch.int64))
        self.half = WorkerHalf(
            vllm_config,
            kv_config,
            rank=0,
            notices=Notices(lambda: 0.0),
            make_copier=lambda parts, arena: StreamCopier(parts, arena, self.device),
            make_loaded=FakeLoaded(),
        )
        with self.device.played:
            self.half.register({f"l{n}": self.kv[n] for n in range(LAYERS)})
        self.arena = Arena.create(4, 4096)
        self.attach = Attach(self.arena.handle, ((0,),))
        self.job = CopyJob(JobId(1), "offload", (1,), (Slot(0),))
        step = StepMetadata(attach=self.attach, saves=[self.job])
        self.half.begin(step)
        self.device.work_in_background()
        self.device.told(None, Operation(0.02, lambda: None, lambda: self._fill(7)))
        self.half.save(step)

    def _fill(self, value: int) -> None:
        plain(self.kv)[:, 1] = value

    def next_step(self, *, early: bool, late: bool) -> None:
        """Give the block again: zero it before or after the half may fence."""
        step = StepMetadata(attach=self.attach, fence=[JobId(1)], late=late)
        zero = Operation(1e-5, lambda: self._fill(0), lambda: None)
        if early:
            self.device.told(None, zero)
        self.half.begin(step)
        if not early:
            self.device.told(None, zero)
        self.device.settle()
        self.half.save(step)

    def ended(self) -> tuple[bool, bool]:
        """Return whether the save was reported, and whether its stored bytes are right."""
        self.half.received()
        report = self.half.report()
        assert report is not None
        (finished,) = report.ended
        held = bytes(self.arena.view(Slot(0))[: LAYERS * TOKENS * 8])
        return finished.ok, held == (7).to_bytes(8, "little") * (LAYERS * TOKENS)

    def close(self) -> None:
        self.half.close()
        self.arena.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.close()


@pytest.mark.parametrize(
    ("early", "late", "reported", "right"),
    [
        (False, False, True, True),
        (True, True, False, False),
        (True, False, True, False),  # the defect: the reported bytes are not the computed ones
    ],
    ids=["fence first", "writes first", "writes first, and the half is not told"],
)
def test_a_save_of_an_overwritten_block_is_not_reported(
    worker: Worker, early: bool, late: bool, reported: bool, right: bool
) -> None:
    worker.next_step(early=early, late=late)
    assert worker.ended() == (reported, right)


def test_a_save_that_had_ended_before_its_block_was_overwritten_is_reported(
    worker: Worker,
) -> None:
    worker.device.settle()
    assert worker.ended() == (True, True)
    worker.next_step(early=True, late=True)
    assert worker.half.report() is None
    assert not worker.half._distrusted  # it would stay for good
