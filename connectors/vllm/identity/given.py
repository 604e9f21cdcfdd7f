"""Everything that vLLM was given, as text, but for what no block depends on.

A setting that nobody has looked at names the blocks: the list below says what does not, and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

SETTINGS_LEFT_OUT: Final[Mapping[str, str]] = {
    "who this process is, and where it is reached": """
        VllmConfig.instance_id VllmConfig.shutdown_timeout VllmConfig.watchdog_config
        ModelConfig.served_model_name ModelConfig.hf_token
        ModelConfig.allowed_local_media_path ModelConfig.allowed_media_domains
        ParallelConfig.master_addr ParallelConfig.master_port ParallelConfig.node_rank
        ParallelConfig._coord_store_port ParallelConfig._data_parallel_master_port_list
        ParallelConfig._api_process_count ParallelConfig._api_process_rank
        ParallelConfig.distributed_timeout_seconds ParallelConfig.cpu_distributed_timeout_seconds
        ParallelConfig.enable_fault_tolerance ParallelConfig.fault_tolerance_config""",
    "what is logged, measured and traced": """
        VllmConfig.observability_config VllmConfig.logging_config VllmConfig.profiler_config
        CompilationConfig.debug_dump_path LoadConfig.use_tqdm_on_load
        EPLBConfig.log_balancedness EPLBConfig.log_balancedness_interval""",
    "how the next token is chosen: a block is named by the tokens that were": """
        VllmConfig.structured_outputs_config VllmConfig.reasoning_config
        VllmConfig.watermark_config ModelConfig.seed ModelConfig.max_logprobs
        ModelConfig.logprobs_mode ModelConfig.use_fp64_gumbel ModelConfig.return_sampling_mask
        ModelConfig.logits_processors ModelConfig.generation_config
        ModelConfig.override_generation_config""",
    "how much there is room for, and what runs beside what: a token's numbers are its prefix's": """
        CacheConfig.gpu_memory_utilization CacheConfig.kv_cache_memory_bytes
        CacheConfig.num_gpu_blocks_override CacheConfig.num_gpu_blocks CacheConfig.num_cpu_blocks
        CacheConfig.kv_cache_size_tokens CacheConfig.kv_cache_max_concurrency
        CacheConfig.enable_prefix_caching CacheConfig.prefix_cache_retention_interval
        SchedulerConfig.max_num_batched_tokens SchedulerConfig.max_num_scheduled_tokens
        SchedulerConfig.max_num_seqs SchedulerConfig.max_num_active_seqs
        SchedulerConfig.max_num_queued_reqs SchedulerConfig.max_num_queued_tokens
        SchedulerConfig.long_prefill_token_threshold
        SchedulerConfig.long_prefill_token_threshold_adaptive
        SchedulerConfig.enable_chunked_prefill SchedulerConfig.max_num_encoder_input_tokens
        SchedulerConfig.encoder_cache_size SchedulerConfig.policy SchedulerConfig.watermark
        SchedulerConfig.scheduler_reserve_full_isl SchedulerConfig.prefill_schedule_interval
        SchedulerConfig.async_scheduling SchedulerConfig.stream_interval
        ModelConfig.renderer_num_workers MultiModalConfig.mm_processor_cache_gb
        MultiModalConfig.mm_processor_cache_type MultiModalConfig.mm_shm_cache_max_object_size_mb
        MultiModalConfig.mm_tensor_ipc MultiModalConfig.mm_ipc_gpu_memory_gb
        MultiModalConfig.skip_mm_profiling LoRAConfig.max_loras LoRAConfig.max_cpu_loras""",
    "where blocks are kept and who is told; what groups there are is a field of its own": """
        SchedulerConfig.disable_hybrid_kv_cache_manager VllmConfig.kv_transfer_config
        VllmConfig.kv_events_config VllmConfig.ec_transfer_config
        CacheConfig.kv_offloading_size CacheConfig.kv_offloading_backend
        CacheConfig.simple_cpu_offload_num_blocks""",
    "where the weights lie and how they come in; what they are is a field of its own": """
        VllmConfig.offload_config VllmConfig.weight_transfer_config LoadConfig.download_dir
        LoadConfig.safetensors_load_strategy LoadConfig.safetensors_prefetch_num_threads
        LoadConfig.safetensors_prefetch_block_size LoadConfig.pt_load_map_location
        ParallelConfig.max_parallel_loading_workers
        ModelConfig.enable_sleep_mode ModelConfig.sleep_preserve_parameter_names
        ModelConfig.sleep_mode_backend ModelConfig.sleep_mode_offload_cudagraph
        ModelConfig.enable_nccl_comm_suspend ModelConfig.enable_cumem_allocator""",
    "which processes and cores do the work: the ranks' layout is a field of its own": """
        ParallelConfig.tensor_parallel_size ParallelConfig.pipeline_parallel_size
        ParallelConfig.world_size ParallelConfig.rank ParallelConfig.distributed_executor_backend
        ParallelConfig.data_parallel_size ParallelConfig.data_parallel_size_local
        ParallelConfig.data_parallel_rank ParallelConfig.data_parallel_rank_local
        ParallelConfig.data_parallel_index ParallelConfig.data_parallel_master_ip
        ParallelConfig.data_parallel_master_port ParallelConfig.data_parallel_rpc_port
        ParallelConfig.data_parallel_backend ParallelConfig.data_parallel_external_lb
        ParallelConfig.data_parallel_hybrid_lb ParallelConfig.dp_sync_interval
        ParallelConfig.disable_nccl_for_dp_synchronization
        ParallelConfig.disable_custom_all_reduce ParallelConfig.enable_shm_tensor_arena
        ParallelConfig.ray_workers_use_nsight ParallelConfig.ray_runtime_env
        ParallelConfig.placement_group ParallelConfig.elastic_ep_max_dp_size
        ParallelConfig.numa_bind ParallelConfig.numa_bind_nodes
        ParallelConfig.numa_bind_cpus ParallelConfig.assigned_physical_gpu_ids
        PassConfig.fuse_allreduce_rms PassConfig.fi_allreduce_fusion_max_size_mb""",
    "how compiled code and graphs are made, kept and launched, not what they compute": """
        CompilationConfig.cache_dir CompilationConfig.local_cache_dir
        CompilationConfig.compile_cache_save_format CompilationConfig.compile_sizes
        CompilationConfig.compile_ranges_endpoints CompilationConfig.cudagraph_mode
        CompilationConfig.cudagraph_num_of_warmups CompilationConfig.cudagraph_capture_sizes
        CompilationConfig.max_cudagraph_capture_size CompilationConfig.cudagraph_copy_inputs
        CompilationConfig.decoder_replay_cudagraph_capture_sizes
        CompilationConfig.encoder_cudagraph_token_budgets
        CompilationConfig.encoder_cudagraph_max_vision_items_per_batch
        CompilationConfig.encoder_cudagraph_max_frames_per_batch
        KernelConfig.enable_cutedsl_warmup KernelConfig.enable_jit_warmup""",
    "what vLLM works out from the rest, or writes down while it runs": """
        VllmConfig.quant_config
        SpeculativeConfig.target_model_config SpeculativeConfig.target_parallel_config
        CacheConfig.user_specified_block_size CacheConfig.effective_attention_block_size
        CacheConfig.hash_block_size CacheConfig.cache_hit_alignment_tokens
        CacheConfig._block_size_resolved ParallelConfig._allow_auto_resolve_cp_interleave_size
        CompilationConfig.static_forward_context CompilationConfig.static_all_moe_layers
        CompilationConfig.traced_files CompilationConfig.compilation_time
        CompilationConfig.encoder_compilation_time CompilationConfig.enabled_custom_ops
        CompilationConfig.disabled_custom_ops""",
}
"""Reasons, and the fields of vLLM's configuration that each is true of."""

SWITCHES_LEFT_OUT: Final[Mapping[str, str]] = {
    "how vLLM was built: its version names the blocks": """
        MAX_JOBS NVCC_THREADS CMAKE_BUILD_TYPE VERBOSE VLLM_USE_PRECOMPILED
        VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX
        VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
        VLLM_IMAGE_TAG""",
    "where things lie on this machine": """
        VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_RPC_BASE_PATH VLLM_DEBUG_DUMP_PATH
        VLLM_XLA_CACHE_PATH VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_MEDIA_CACHE
        VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_LORA_RESOLVER_CACHE_DIR
        VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME LD_LIBRARY_PATH
        CUDA_HOME VLLM_RUST_FRONTEND_PATH VLLM_DISABLE_COMPILE_CACHE
        VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_ENABLE_STARTUP_PLAN VLLM_FORCE_AOT_LOAD""",
    "who this process is, and where it and others are reached": """
        VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK
        VLLM_DP_RANK_LOCAL VLLM_DP_SIZE LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_PROCESS_NAME_PREFIX
        VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST
        VLLM_P2P_SIDE_CHANNEL_PORT VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S
        VLLM_P2P_IDLE_TIMEOUT_S VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
        VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT
        VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_STORE_TIER_LOG
        VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO
        MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME S3_ACCESS_KEY_ID
        S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_API_KEY VLLM_SERVER_DEV_MODE""",
    "what is logged, counted and traced": """
        VLLM_LOGGING_LEVEL VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX
        VLLM_LOGGING_COLOR VLLM_CONFIGURE_LOGGING VLLM_LOG_STATS_INTERVAL
        VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_DISABLE_LOG_LOGO
        VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_REQUEST_BODY_LOG_LEVEL VLLM_DEBUG_MFU_METRICS
        VLLM_DEBUG_WORKSPACE VLLM_GC_DEBUG VLLM_PATTERN_MATCH_DEBUG VLLM_TRACE_FUNCTION
        VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_USAGE_STATS_SERVER
        VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_RINGBUFFER_WARNING_INTERVAL
        NO_COLOR FORCE_COLOR""",
    "how long somebody waits, and what a request may ask for": """
        VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT
        VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_URL_ALLOW_REDIRECTS
        VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB
        VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_ENGINE_READY_TIMEOUT_S
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_REGEX_COMPILATION_TIMEOUT_S
        VLLM_XGRAMMAR_CACHE_MB VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS
        VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING
        VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES""",
    "how much memory and which cores and processes there are": """
        VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU
        VLLM_CPU_CI_ENV VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD
        VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_MSGPACK_ZERO_COPY_THRESHOLD
        VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
        VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
        VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
        VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS""",
}
"""Reasons, and the environment variables of vLLM's that each is true of."""

LIBRARIES_SWITCHES: Final = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Environment variables that vLLM does not know of and that change numbers all the same."""

_NOT_THE_MODELS: Final = ("_name_or_path", "_commit_hash", "transformers_version")
"""What a model's configuration says of where it was read and who wrote it."""

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def left_out(lists: Mapping[str, str]) -> dict[str, str]:
    """By name, why something does not name blocks."""
    return {name: reason for reason, names in lists.items() for name in names.split()}


_SETTINGS: Final = left_out(SETTINGS_LEFT_OUT)
_SWITCHES: Final = left_out(SWITCHES_LEFT_OUT)


def settings(vllm_config: Any) -> dict[str, str]:
    """Every field of vLLM's configuration that names blocks, and its value as text.

    The text is the same in every process. A path of a file brings the file's digest with it.
    """
    found: dict[str, str] = {}
    for name, value in _parts(vllm_config):
        if name == "speculative_config" and not keeps_drafts(value):
            continue
        parts = dict(_parts(value)) if _is_configuration(value) else {"": value}
        for part, inner in parts.items():
            found[f"{name}.{part}" if part else name] = _text(inner)
    # A length that vLLM fitted to memory is found after the model was made for another one.
    model = getattr(vllm_config, "model_config", None)
    found["fitted length"] = str(getattr(model, "original_max_model_len", None) == -1)
    return found


def switches() -> dict[str, str]:
    """Every environment variable that names blocks, and its value as vLLM reads it."""
    try:
        from vllm.envs import environment_variables
    except ImportError:
        environment_variables = {}
    known = cast("Mapping[str, Any]", environment_variables)
    found = {name: os.environ.get(name, "") for name in LIBRARIES_SWITCHES}
    for name, read in known.items():
        if name not in _SWITCHES:
            try:
                found[name] = _text(read())
            except Exception:  # noqa: BLE001 - vLLM cannot read it either; what it is counts
                found[name] = os.environ.get(name, "")
    return found


def keeps_drafts(speculative: Any) -> bool:
    """Whether the model that makes the drafts has KV of its own: n-grams and suffixes have none."""
    return speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix")


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | Enum) and not callable(value)


def _parts(configuration: Any) -> Iterator[tuple[str, Any]]:
    """The fields of one of vLLM's classes that name blocks."""
    kind = type(configuration).__name__
    names: list[str] = [*cast("dict[str, Any]", vars(configuration))]
    if is_dataclass(configuration):
        names = [field.name for field in fields(configuration)]
    for name in names:
        if f"{kind}.{name}" not in _SETTINGS:
            yield name, getattr(configuration, name, None)


def _text(value: Any) -> str:
    return json.dumps(_plain(value, ()), sort_keys=True)


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    """The value in words of JSON: no addresses, no order that depends on the process."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return [value, digest(value)] if _is_file(value) else value
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, bytes):
        return value.hex()
    if id(value) in above:
        return "above"
    above = (*above, id(value))
    if _is_mapping(value):
        return {str(k): _plain(v, above) for k, v in value.items() if k not in _NOT_THE_MODELS}
    if _is_collection(value):
        items = [_plain(one, above) for one in value]
        if isinstance(value, Set):
            items.sort(key=lambda one: json.dumps(one, sort_keys=True))
        return items
    return _object(value, above)


def _is_file(text: str) -> bool:
    """Whether a text is a path of a file, which long ones and those with a slash need not be."""
    try:
        return os.sep in text and Path(text).is_file()
    except OSError:  # too long a name, or in a folder that may not be looked into
        return False


def _is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _is_collection(value: object) -> TypeGuard[Collection[Any]]:
    return isinstance(value, Set | Sequence)


def _object(value: Any, above: tuple[int, ...]) -> Any:
    """Something that is no value of JSON: what it says of itself, else what it consists of."""
    name = getattr(value, "__qualname__", None)
    if name is not None:  # a class or a function
        return f"{value.__module__}.{name}"
    if hasattr(value, "to_dict"):  # a model's configuration
        return _plain(value.to_dict(), above)
    kind = str(value.__class__.__name__)
    if is_dataclass(value):
        return [kind, {name: _plain(part, above) for name, part in _parts(value)}]
    if hasattr(value, "compute_hash"):  # vLLM's way to tell platforms' own settings apart
        return [kind, str(value.compute_hash())]
    named = _ADDRESS.sub("", repr(value))
    if named != repr(value) and hasattr(value, "__dict__"):
        return [named, _plain(vars(value), above)]
    return named


def digest(file: str | Path) -> str:
    """Digest of a file's content; what is wrong with it, if it cannot be read."""
    try:
        with Path(file).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"
