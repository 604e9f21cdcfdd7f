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
from tests.connectors.scripted import LAYERS, TOKENS, configs
from tests.kit.gpu import FakeDevice, Operation

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


class Enough(Exception):
    """The forward pass would begin."""


def output(*, tokens: int) -> Any:
    """A step that zeroes a block and copies another."""
    made = MagicMock()
    made.new_block_ids_to_zero = [7]
    made.kv_cache_block_copies = [(3, 7)]
    made.total_num_scheduled_tokens = tokens
    made.num_scheduled_tokens = {"r": tokens} if tokens else {}
    made.scheduled_cached_reqs.req_ids = []
    made.scheduled_cached_reqs.num_computed_tokens = []
    made.scheduled_cached_reqs.new_block_ids = []
    made.has_sync_kv_loads = False
    return made


def run_v2(order: list[str], monkeypatch: pytest.MonkeyPatch, *, tokens: int) -> None:
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    connector = object.__new__(ActiveKVConnector)
    vars(connector).update(
        kv_connector=Connector(order),
        _disabled=False,
        _pending_load_kwargs=None,
        vllm_config=MagicMock(),
        _start_load_kv=lambda: None,
        _build_load_kwargs=lambda *_: {},
    )
    runner = object.__new__(model_runner.GPUModelRunner)
    real = {"update_requests", "execute_model"}
    for name in dir(model_runner.GPUModelRunner):
        if not name.startswith("__") and name not in real:
            vars(runner)[name] = MagicMock()
    made = SimpleNamespace(num_computed_tokens_np=np.zeros(4, int), req_id_to_index={})
    made.prefill_len = SimpleNamespace(np=np.zeros(4, int))
    made.num_computed_prefill_tokens = np.zeros(4, int)
    made.num_computed_tokens = MagicMock()
    runner.__dict__.update(
        req_states=made,
        kv_connector=connector,
        kv_block_zeroer=SimpleNamespace(zero_block_ids=lambda ids: order.append("zero")),
        kv_caches=[],
    )
    state = MagicMock()
    state.preprocess_state = lambda *_, **__: order.append("move states")
    runner.__dict__["model_state"] = state
    for name in ("aux_output_connector", "pcp_manager", "lora_config", "ubatch_runner"):
        runner.__dict__[name] = None
    for name in ("is_encoder_decoder", "uses_inputs_embeds"):
        runner.__dict__[name] = False
    runner.__dict__.update(
        is_first_pp_rank=True, is_last_pp_rank=True, dp_size=1, dp_rank=0, dcp_size=1,
        kv_cache_config=MagicMock(), block_tables=MagicMock(), encoder_cache=None,
        cudagraph_manager=MagicMock(), parallel_config=MagicMock(), decode_query_len=1,
        observability_config=MagicMock(cudagraph_metrics=False), input_buffers=MagicMock(),
        attn_groups=[], model_config=MagicMock(), eplb=MagicMock(), step_timing=MagicMock(),
        vllm_config=MagicMock(), ec_connector=MagicMock(), adaptive_verification=None,
    )  # fmt: skip
    described = SimpleNamespace(
        num_tokens=tokens, cg_mode="none", num_ubatches=1, num_reqs=1, num_active_loras=0
    )
    monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", lambda *_, **__: (described, None))
    monkeypatch.setattr(
        model_runner, "copy_kv_cache_blocks_inplace", lambda *_: order.append("copy")
    )
    monkeypatch.setattr(
        model_runner, "set_forward_context", lambda *_, **__: contextlib.nullcontext()
    )
    monkeypatch.setattr(model_runner, "build_slot_mappings_by_layer", MagicMock())
    runner.__dict__["prepare_attn"] = lambda *_: (MagicMock(), MagicMock())
    runner.__dict__["gather_batch_req_state"] = lambda *_: (
        MagicMock(num_tokens=tokens, has_prefill=False),
        tokens,
    )
    runner.__dict__["model"] = MagicMock(side_effect=Enough)
    model_runner.GPUModelRunner.execute_model(runner, output(tokens=tokens))


def run_v1(order: list[str], monkeypatch: pytest.MonkeyPatch, *, tokens: int) -> None:
    from vllm.v1.worker import gpu_model_runner

    runner = object.__new__(gpu_model_runner.GPUModelRunner)
    for name in dir(gpu_model_runner.GPUModelRunner):
        if not name.startswith("__") and name not in {"_update_states", "execute_model"}:
            with contextlib.suppress(AttributeError):
                vars(runner)[name] = MagicMock()

    def leave(*_: Any) -> None:
        raise Enough

    vars(runner).update(
        execute_model_state=None,
        speculative_config=None,
        _zero_block_ids=lambda ids: order.append("zero"),
        _process_encoder_cache_scheduler_output=leave,
        routed_experts_initialized=False,
        requests={},
        num_prompt_logprobs={},
        late_interaction_runner=MagicMock(),
        input_batch=MagicMock(),
        kv_caches=[],
        kv_cache_config=MagicMock(),
        synchronize_input_prep=contextlib.nullcontext,
        vllm_config=MagicMock(),
    )
    for name in ("model_config", "cache_config", "observability_config"):
        vars(runner)[name] = MagicMock()
    monkeypatch.setattr(gpu_model_runner, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_model_runner, "get_kv_transfer_group", lambda: Connector(order))
    monkeypatch.setattr(
        gpu_model_runner, "copy_kv_cache_blocks_inplace", lambda *_: order.append("copy")
    )
    made = output(tokens=tokens)
    made.finished_req_ids = set()
    gpu_model_runner.GPUModelRunner.execute_model(runner, made)


@pytest.mark.parametrize(
    ("tokens", "written"), [(0, ["zero", "copy"]), (1, ["zero", "copy", "move states"])]
)
def test_model_runner_v2_writes_before_the_connector_can_fence(
    monkeypatch: pytest.MonkeyPatch, tokens: int, written: list[str]
) -> None:
    order: list[str] = []
    with contextlib.suppress(Enough):
        run_v2(order, monkeypatch, tokens=tokens)
    assert order[: len(written) + 1] == [*written, "handle_preemptions"]


def test_model_runner_v1_lets_the_connector_fence_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    with contextlib.suppress(Enough):
        run_v1(order, monkeypatch, tokens=1)
    assert order == ["handle_preemptions", "zero", "copy"]


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
        self.device = FakeDevice()
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
        self.half.register({f"l{n}": self.kv[n] for n in range(LAYERS)})
        self.half._registers = True  # as on a device, which these tensors stand for
        self.arena = Arena.create(4, 4096)
        self.attach = Attach(self.arena.handle, ((0,),))
        self.job = CopyJob(JobId(1), "offload", (1,), (Slot(0),))
        step = StepMetadata(attach=self.attach, saves=[self.job])
        self.half.begin(step)
        self.device.work_in_background()
        self.device.told(None, Operation(0.02, lambda: None, lambda: self._fill(7)))
        self.half.save(step)

    def _fill(self, value: int) -> None:
        self.kv[:, 1] = value

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
