"""Steps of vLLM's two model runners: their real code, with stand-ins for what they only pass on.

The order of writes and hooks is vLLM's own. A test gives the writes, the forward pass, and the
connector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.sequence import IntermediateTensors
from vllm.v1.worker import gpu_model_runner, kv_connector_model_runner_mixin
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

PARALLEL = SimpleNamespace(data_parallel_size=1, use_sequence_parallel_moe=False)


class Enough(Exception):
    """The forward pass would begin."""


def enough() -> None:
    raise Enough


@dataclass
class Writes:
    """What a step does to blocks, beside its connector."""

    zero: Callable[[Sequence[int]], Any]
    forward: Callable[[], Any] = enough
    copy: Callable[..., Any] | None = None
    """Replaces vLLM's own function."""
    move_states: Callable[[], Any] = lambda: None
    kv_caches: Sequence[Any] = ()
    blocks: int = 0
    vllm_config: Any = field(default_factory=lambda: MagicMock(parallel_config=PARALLEL))


def output(
    *,
    tokens: int,
    zeroed: Sequence[int] | None = (7,),
    copies: Sequence[tuple[int, int]] | None = ((3, 7),),
    metadata: Any = None,
    sync: bool = False,
) -> Any:
    """A step that zeroes a block and copies another, unless told otherwise."""
    made = MagicMock()
    made.new_block_ids_to_zero = zeroed and list(zeroed)
    made.kv_cache_block_copies = copies and list(copies)
    made.total_num_scheduled_tokens = tokens
    made.num_scheduled_tokens = {"r": tokens} if tokens else {}
    made.scheduled_cached_reqs.req_ids = []
    made.scheduled_cached_reqs.num_computed_tokens = []
    made.scheduled_cached_reqs.new_block_ids = []
    made.scheduled_encoder_inputs = {}
    made.has_sync_kv_loads = sync
    made.finished_req_ids = set()
    if metadata is not None:
        made.kv_connector_metadata = metadata
    return made


def run_v2(connector: Any, writes: Writes, step: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a step of model runner V2, as the first of two stages; return its output."""
    active = object.__new__(ActiveKVConnector)
    vars(active).update(
        kv_connector=connector,
        _disabled=False,
        _pending_load_kwargs=None,
        vllm_config=writes.vllm_config,
    )
    runner = object.__new__(model_runner.GPUModelRunner)
    real = {"update_requests", "execute_model", "sample_tokens"}
    for name in dir(model_runner.GPUModelRunner):
        if not name.startswith("__") and name not in real:
            vars(runner)[name] = MagicMock()
    tokens = step.total_num_scheduled_tokens
    made = SimpleNamespace(num_computed_tokens_np=np.zeros(4, int), req_id_to_index={})
    made.prefill_len = SimpleNamespace(np=np.zeros(4, int))
    made.num_computed_prefill_tokens = np.zeros(4, int)
    made.num_computed_tokens = MagicMock()
    state = MagicMock()
    state.preprocess_state = lambda *_, **__: writes.move_states()
    state.prepare_inputs = lambda *_, **__: {}
    vars(runner).update(
        req_states=made, kv_connector=active, kv_caches=list(writes.kv_caches), model_state=state,
        kv_block_zeroer=SimpleNamespace(zero_block_ids=writes.zero),
        is_first_pp_rank=True, is_last_pp_rank=False, dp_size=1, dp_rank=0, dcp_size=1,
        kv_cache_config=MagicMock(num_blocks=writes.blocks), block_tables=MagicMock(),
        cudagraph_manager=MagicMock(), parallel_config=MagicMock(), decode_query_len=1,
        observability_config=MagicMock(cudagraph_metrics=False), input_buffers=MagicMock(),
        attn_groups=[], model_config=MagicMock(), eplb=MagicMock(), step_timing=MagicMock(),
        vllm_config=writes.vllm_config, ec_connector=MagicMock(), pp_handler=MagicMock(),
        is_encoder_decoder=False, uses_inputs_embeds=False, encoder_cache=None,
        aux_output_connector=None, pcp_manager=None, lora_config=None, ubatch_runner=None,
        adaptive_verification=None, execute_model_state=None, enable_eplb=False,
        prepare_attn=lambda *_: (MagicMock(), MagicMock()),
        gather_batch_req_state=lambda *_: (MagicMock(num_tokens=tokens, has_prefill=False), tokens),
    )  # fmt: skip
    runner.__dict__["_merge_ec_connector_no_forward"] = lambda _, empty: empty

    def model(**_: Any) -> Any:
        writes.forward()
        return IntermediateTensors({})

    runner.__dict__["model"] = model
    described = SimpleNamespace(
        num_tokens=tokens, cg_mode="none", num_ubatches=1, num_reqs=1, num_active_loras=0
    )
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "dispatch_cg_and_sync_dp", lambda *_, **__: (described, None))
        patch.setattr(
            model_runner, "set_forward_context", lambda *_, **__: contextlib.nullcontext()
        )
        patch.setattr(model_runner, "build_slot_mappings_by_layer", MagicMock())
        if writes.copy is not None:
            patch.setattr(model_runner, "copy_kv_cache_blocks_inplace", writes.copy)
        ended = model_runner.GPUModelRunner.execute_model(runner, step)
        if tokens:
            ended = model_runner.GPUModelRunner.sample_tokens(runner, None)
    return ended


def run_v1(connector: Any, writes: Writes, step: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a step of model runner V1, as the first of two stages; return its output."""
    runner = object.__new__(gpu_model_runner.GPUModelRunner)
    real = {
        "_update_states", "execute_model", "maybe_get_kv_connector_output", "sample_tokens",
        "_get_kv_connector_output", "kv_connector_no_forward",
    }  # fmt: skip
    for name in dir(gpu_model_runner.GPUModelRunner):
        if not name.startswith("__") and name not in real:
            with contextlib.suppress(AttributeError):
                vars(runner)[name] = MagicMock()

    def update(scheduled: Any) -> None:
        with contextlib.suppress(*() if writes.forward is enough else (Enough,)):
            # after its writes
            gpu_model_runner.GPUModelRunner._update_states(runner, scheduled)

    def forward(**_: Any) -> Any:
        writes.forward()
        return IntermediateTensors({})

    tokens = step.total_num_scheduled_tokens
    described = SimpleNamespace(num_tokens=tokens, num_reqs=1)
    vars(runner).update(
        execute_model_state=None, speculative_config=None, eplb_state=None, requests={},
        routed_experts_initialized=False, num_prompt_logprobs={}, kv_connector_output=None,
        _zero_block_ids=writes.zero, _update_states=update, _model_forward=forward,
        _process_encoder_cache_scheduler_output=lambda *_: enough(),
        late_interaction_runner=MagicMock(), input_batch=MagicMock(req_ids=["r"], num_reqs=1),
        kv_caches=list(writes.kv_caches), synchronize_input_prep=contextlib.nullcontext,
        kv_cache_config=MagicMock(num_blocks=writes.blocks, kv_cache_groups=[]),
        vllm_config=writes.vllm_config, use_async_scheduling=False, broadcast_pp_output=False,
        model_config=MagicMock(is_encoder_decoder=False), observability_config=MagicMock(),
        cache_config=MagicMock(kv_sharing_fast_prefill=False, mamba_cache_mode="none"),
        use_aux_hidden_state_outputs=False, encoder_cache=None, parallel_config=MagicMock(),
        _prepare_inputs=lambda *_: (None, None, 1),
        _determine_batch_execution_and_padding=lambda **_: (
            CUDAGraphMode.NONE, described, False, None, None,
        ),
        _get_slot_mappings=lambda **_: (None, None),
        _build_attention_metadata=lambda **_: (None, None),
        _preprocess=lambda *_: (None, None, None, None, {}, None),
        _prepare_padding_mask=lambda *_: None,
    )  # fmt: skip
    runner.input_batch.req_ids = ["r"]
    group = SimpleNamespace(is_last_rank=False, is_first_rank=True)
    with monkeypatch.context() as patch:
        for module in (gpu_model_runner, kv_connector_model_runner_mixin):
            patch.setattr(module, "has_kv_transfer_group", lambda: True)
            patch.setattr(module, "get_kv_transfer_group", lambda: connector)
        patch.setattr(gpu_model_runner, "get_pp_group", lambda: group)
        if writes.copy is not None:
            patch.setattr(gpu_model_runner, "copy_kv_cache_blocks_inplace", writes.copy)
        ended = gpu_model_runner.GPUModelRunner.execute_model(runner, step)
        if tokens:
            ended = gpu_model_runner.GPUModelRunner.sample_tokens(runner, None)
    return ended


RUNNERS = {"V1": run_v1, "V2": run_v2}
