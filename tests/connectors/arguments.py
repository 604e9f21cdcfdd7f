"""Names of engines' blocks, each engine with one argument of vLLM's changed.

``python arguments.py MODEL OTHER RESULTS [plain]``: MODEL is the folder of a tiny LLaVA, OTHER a
link to it. Writes JSON: the fields of a plain engine's name, and for each field of vLLM's
EngineArgs ``same``, ``other``, why the engine was refused, or that no change is defined. An
argument that is impossible here (on a CPU, with this model) is listed in ``ELSEWHERE`` with the
field of vLLM's configuration that it becomes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 64 << 20,
    "load_format": "dummy",
    "enforce_eager": True,
}
LORA = {"enable_lora": True}
OURS = {
    "kv_connector": "KVLadderConnector",
    "kv_connector_module_path": "kvladder.connectors.vllm",
    "kv_role": "kv_both",
}
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2}

BESIDE: dict[str, dict[str, Any]] = {
    "max_loras": LORA,
    "max_lora_rank": LORA,
    "default_mm_loras": LORA,
    "fully_sharded_loras": LORA,
    "max_cpu_loras": LORA,
    "lora_dtype": LORA,
    "lora_target_modules": LORA,
    "enable_tower_connector_lora": LORA,
    "specialize_active_lora": LORA,
    "enable_mixed_moe_lora_format": LORA,
    "enable_moe_shared_loras": LORA,
    "max_lora_cls_labels": LORA,
    "mm_shm_cache_max_object_size_mb": {"mm_processor_cache_type": "shm"},
    "collect_detailed_traces": {"otlp_traces_endpoint": "x"},
    "kv_transfer_config": {"kv_transfer_config": OURS},
    "per_request_spec_decode_metrics": {"speculative_config": NGRAM},
    "numa_bind_nodes": {"numa_bind": True},
    "numa_bind_cpus": {"numa_bind": True},
    "quantization": {"dtype": "bfloat16"},
}
"""Settings needed, with and without an argument, for it to have an effect."""

VALUES: dict[str, Any] = {
    "model_weights": "x", "served_model_name": "x", "runner": "generate", "convert": "none",
    "tokenizer_mode": "hf", "allowed_local_media_path": "x", "allowed_media_domains": ["x"],
    "download_dir": "x", "safetensors_load_strategy": "eager", "load_format": "safetensors",
    "config_format": "hf", "dtype": "bfloat16", "kv_cache_dtype": "fp8",
    "cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 2,
    "distributed_executor_backend": "uni", "master_addr": "x", "distributed_timeout_seconds": 2,
    "cpu_distributed_timeout_seconds": 2, "numa_bind_nodes": [0], "numa_bind_cpus": ["0"],
    "dcp_q_replicate": True, "cp_kv_cache_interleave_size": 2, "dcp_comm_backend": "a2a",
    "data_parallel_start_rank": 2, "data_parallel_address": "x", "data_parallel_rpc_port": 2,
    "data_parallel_backend": "ray", "moe_backend": "triton", "linear_backend": "cutlass",
    "sparse_indexer_topk_backend": "persistent", "all2all_backend": "mori_low_latency",
    "disable_nccl_for_dp_synchronization": True, "eplb_config": {"window_size": 7},
    "expert_placement_strategy": "round_robin", "_api_process_rank": -1,
    "max_parallel_loading_workers": 2, "block_size": 64, "enable_prefix_caching": False,
    "prefix_caching_hash_algo": "sha256_cbor", "prefix_cache_retention_interval": 1,
    "offload_backend": "uva", "cpu_offload_params": {"x"}, "offload_params": {"x"},
    "max_num_batched_tokens": 4096, "max_num_scheduled_tokens": 2, "max_num_seqs": 2,
    "max_num_active_seqs": 2, "max_num_queued_reqs": 2, "max_num_queued_tokens": 2,
    "logprobs_mode": "raw_logits", "revision": "x", "code_revision": "x", "hf_token": "x",
    "hf_overrides": {"rope_theta": 5.0}, "model_class_overrides": {"X": "x:Y"},
    "tokenizer_revision": "x", "quantization": "fp8", "elastic_ep_max_dp_size": 2,
    "limit_mm_per_prompt": {"image": 3}, "media_io_kwargs": {"image": {"x": 1}},
    "mm_processor_kwargs": {"do_normalize": False},
    "mm_processor_cache_type": "shm", "mm_hasher_algorithm": "sha256",
    "mm_encoder_attn_backend": "TORCH_SDPA",
    "io_processor_plugin": "x", "video_pruning_rate": 0.5, "video_pruning_method": "vidcom2",
    "mm_tensor_ipc": "torch_shm", "mm_processor_device": "cpu", "max_lora_rank": 32,
    "default_mm_loras": {"image": "x"}, "lora_dtype": "float16", "lora_target_modules": ["q_proj"],
    "max_cpu_loras": 2, "max_lora_cls_labels": 2, "num_gpu_blocks_override": 2,
    "model_loader_extra_config": {"x": 1}, "ignore_patterns": ["x"],
    "enable_chunked_prefill": False, "disable_hybrid_kv_cache_manager": True,
    "structured_outputs_config": {"backend": "guidance"},
    "reasoning_parser_plugin": "x", "speculative_config": NGRAM,
    "diffusion_config": {"canvas_length": 4},
    "show_hidden_metrics_for_version": "0.9", "otlp_traces_endpoint": "x",
    "collect_detailed_traces": ["model"], "per_request_spec_decode_metrics": "summary",
    "custom_histogram_buckets": {"request_latency": [1.0]}, "jit_monitor_mode": "error",
    "scheduling_policy": "priority", "scheduler_cls": "x.Y",
    "compilation_config": {"custom_ops": ["none"]}, "attention_config": {"flash_attn_version": 2},
    "kernel_config": {"moe_backend": "triton"},
    "mamba_config": {"stochastic_rounding_philox_rounds": 1},
    "enable_flashinfer_autotune": False, "worker_cls": "x.Y", "worker_extension_cls": "x.Y",
    "profiler_config": {"delay_iterations": 3}, "log_level": "INFO",
    "kv_transfer_config": OURS | {"kv_connector_extra_config": {"host": "2 GiB"}},
    "kv_events_config": {"enable_kv_cache_events": False, "topic": "x"},
    "ec_transfer_config": {"ec_connector": "x", "ec_role": "ec_both"},
    "ec_manager_config": {"encoder_cache_manager_cls": "x.Y"}, "generation_config": "vllm",
    "sleep_preserve_parameter_names": ["x"], "override_generation_config": {"top_k": 1},
    "model_impl": "vllm", "attention_backend": "CPU_ATTN", "kv_cache_dtype_skip_layers": ["0"],
    "mamba_cache_dtype": "float16", "mamba_block_size": 2, "prefix_match_unit": 2,
    "additional_config": {"x": 1}, "pt_load_map_location": "cuda", "logits_processors": ["x:Y"],
    "async_scheduling": True, "optimization_level": 3, "performance_mode": "throughput",
    "kv_offloading_size": 0.5,
    "kv_offloading_backend": "lmcache", "weight_transfer_config": {"backend": "nccl"},
}  # fmt: skip
"""Another value for each argument. Numbers and switches not listed are counted up and flipped."""

ELSEWHERE = {
    "enable_return_routed_experts": "AuxOutputConfig.enable_return_routed_experts",
    "return_sampling_mask": "ModelConfig.return_sampling_mask",
    "ir_op_priority": "KernelConfig.ir_op_priority",
    "nnodes": "ParallelConfig.nnodes",
    "device_ids": "ParallelConfig.assigned_physical_gpu_ids",
    "prefill_context_parallel_size": "ParallelConfig.prefill_context_parallel_size",
    "decode_context_parallel_size": "ParallelConfig.decode_context_parallel_size",
    "data_parallel_rank": "ParallelConfig.data_parallel_rank",
    "data_parallel_size_local": "ParallelConfig.data_parallel_size_local",
    "data_parallel_hybrid_lb": "ParallelConfig.data_parallel_hybrid_lb",
    "data_parallel_external_lb": "ParallelConfig.data_parallel_external_lb",
    "enable_expert_parallel": "ParallelConfig.enable_expert_parallel",
    "enable_batch_sharded_sampling": "ParallelConfig.enable_batch_sharded_sampling",
    "enable_elastic_ep": "ParallelConfig.enable_elastic_ep",
    "enable_dbo": "ParallelConfig.enable_dbo",
    "enable_eplb": "ParallelConfig.enable_eplb",
    "disable_cascade_attn": "ModelConfig.disable_cascade_attn",
    "enable_trace_replay": "ModelConfig.enable_trace_replay",
    "quantization_config": "ModelConfig.quantization_config",
    "mm_encoder_attn_dtype": "MultiModalConfig.mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path": "MultiModalConfig.mm_encoder_fp8_scale_path",
    "mm_encoder_fp8_scale_save_path": "MultiModalConfig.mm_encoder_fp8_scale_save_path",
    "mm_encoder_tp_mode": "MultiModalConfig.mm_encoder_tp_mode",
    "mm_device_do_normalize": "MultiModalConfig.mm_device_do_normalize",
    "ray_workers_use_nsight": "ParallelConfig.ray_workers_use_nsight",
    "aux_output_config": "VllmConfig.aux_output_config",
    "reasoning_parser": "VllmConfig.structured_outputs_config",
    "spec_method": "SpeculativeConfig.method",
    "spec_model": "SpeculativeConfig.model",
    "spec_tokens": "SpeculativeConfig.num_speculative_tokens",
    "watermark_config": "VllmConfig.watermark_config",
    "pooler_config": "ModelConfig.pooler_config",
    "engram_config": "VllmConfig.engram_config",
    "logging_config": "VllmConfig.logging_config",
    "log_config_file": "VllmConfig.logging_config",
    "reasoning_config": "VllmConfig.reasoning_config",
    "enable_sleep_mode": "ModelConfig.enable_sleep_mode",
    "sleep_mode_backend": "ModelConfig.sleep_mode_backend",
    "enable_cumem_allocator": "ModelConfig.enable_cumem_allocator",
    "mamba_cache_mode": "CacheConfig.mamba_cache_mode",
    "mamba_ssm_cache_dtype": "CacheConfig.mamba_ssm_cache_dtype",
    "mamba_backend": "MambaConfig.backend",
    "mamba_ssu_algorithm": "MambaConfig.ssu_algorithm",
    "use_replayssm": "CacheConfig.use_replayssm",
    "enable_mamba_cache_stochastic_rounding": "MambaConfig.enable_stochastic_rounding",
    "fault_tolerance_config": "ParallelConfig.fault_tolerance_config",
    "enable_fault_tolerance": "ParallelConfig.enable_fault_tolerance",
    "gdn_prefill_backend": "VllmConfig.additional_config",
    "kda_prefill_backend": "VllmConfig.additional_config",
    "kda_decode_backend": "VllmConfig.additional_config",
    "watchdog_config": "VllmConfig.watchdog_config",
    "monokernel": "KernelConfig.monokernel",
}


def changed(field: Field[Any], model: str, other: str) -> Any:
    """Return another value for an argument; raise KeyError if there is none."""
    if field.name in ("model", "tokenizer", "hf_config_path"):
        return other
    if field.name in VALUES:
        return VALUES[field.name]
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    value = BASE.get(field.name, default)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 + 0.1
    raise KeyError(field.name)


def main() -> None:
    from tests.vllm.pictures import without_torchvision

    without_torchvision()
    from vllm.engine.arg_utils import EngineArgs

    from kvladder.connectors.vllm.identity import fingerprint as vllm_fingerprint

    model, other, results, *only = sys.argv[1:]
    code = vllm_fingerprint.code_fields()
    vllm_fingerprint.code_fields = lambda: code  # looked for on the disk, and no argument's matter
    without: dict[str, dict[str, str]] = {}
    """The name of an engine with only the settings beside an argument, by those settings."""

    def name(arguments: dict[str, Any]) -> dict[str, str]:
        given = EngineArgs(**BASE | {"model": model} | arguments)
        return vllm_fingerprint.model_fields(given.create_engine_config())

    def plain(beside: dict[str, Any]) -> dict[str, str]:
        if repr(beside) not in without:
            without[repr(beside)] = name(beside)
        return without[repr(beside)]

    found: dict[str, Any] = {"": plain({})}
    for field in fields(EngineArgs) if not only else ():
        if field.name in ELSEWHERE:
            continue
        beside = BESIDE.get(field.name, {})
        try:
            value = changed(field, model, other)
            same = plain(beside) == name(beside | {field.name: value})
            found[field.name] = "same" if same else "other"
        except KeyError:
            found[field.name] = "nobody has said how to change it"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - vLLM refuses in many ways
            found[field.name] = f"refused: {error}"
    Path(results).write_text(json.dumps(found))
    os._exit(0)  # vLLM's leftovers in this process need not end


if __name__ == "__main__":
    main()
