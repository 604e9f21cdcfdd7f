"""The identity and the layout of an engine's blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, Final, cast

import torch

from kvladder.connectors.naming import (
    LIBRARIES_SWITCHES,
    device_kind,
    folder_fields,
    model_folder,
    prefixed,
    text_of,
    versions,
)
from kvladder.connectors.weights import read_weights_digest
from kvladder.errors import ConfigError, LayoutError
from kvladder.gpu.copy.pages import BlockPages
from kvladder.layout import Layout

LEFT_OUT: Final[Mapping[str, str]] = {
    "model": "a path: the weights and the files in it name the blocks",
    "tokenizer": "blocks are named by tokens",
    "skip_tokenizer_init": "blocks are named by tokens",
    "kv_connector_config": "where the connector is",
    "kv_cache_config": "its fields are taken separately",
    "kv_cache_config.max_tokens": "how much the pool holds",
    "kv_cache_config.free_gpu_memory_fraction": "how much the pool holds",
    "kv_cache_config.max_gpu_total_bytes": "how much the pool holds",
    "kv_cache_config.host_cache_size": "how much its own host memory holds",
    "kv_cache_config.event_buffer_max_size": "how many events are kept",
    "max_batch_size": "how many requests run at once",
    "max_num_tokens": "how many tokens a step computes",
    "scheduler_config": "which request comes next",
    "cuda_graph_config": "how the same kernels are launched",
    "return_perf_metrics": "which facts of requests are reported",
    "iter_stats_max_iterations": "which facts of steps are reported",
    "request_stats_max_iterations": "which facts of requests are reported",
    "postprocess_tokenizer_dir": "how answers become text",
    "num_postprocess_workers": "how answers become text",
    "garbage_collection_gen0_threshold": "when Python collects garbage",
}
"""Arguments of the engine that do not name blocks, with reasons; all others do."""

SWITCHES: Final = (
    "DISABLE_LAMPORT_REDUCE_NORM_FUSION",
    "ENABLE_CONFIGURABLE_MOE",
    "ENABLE_PERFECT_ROUTER",
    "FORCE_ALL_REDUCE_DETERMINISTIC",
    "FORCE_DETERMINISTIC",
    "OVERRIDE_QUANT_ALGO",
    "TRITON_MOE_MXFP4_NUM_WARPS",
)
"""Environment variables of TensorRT-LLM that change results but have none of its prefixes."""
PREFIXES: Final = ("TRTLLM_", "TLLM_", "TRT_LLM_", "FLA_")
SWITCHES_LEFT_OUT: Final[Mapping[str, str]] = {
    "TRTLLM_KVLADDER*": "how this connector works",
    "TLLM_SPAWN_PROXY_PROCESS*": "how the processes of one run find each other",
    "*_DISAGG_*": "which part of a deployment a server is",
    "*_RAY_*": "where processes run",
    "*_LOG_*": "what is logged",
    "*_DEBUG": "what is logged",
    "*_PROFILE_*": "what is measured",
    "*_TRACE*": "what is measured",
    "*_NVTX*": "what is measured",
    "*_PATH": "where something is written",
    "*_DISABLE_GC": "when Python collects garbage",
}
"""Variables with these prefixes that do not name blocks, with reasons; all others do."""

LIBRARIES: Final = ("tensorrt_llm", "tensorrt", "torch", "transformers", "flashinfer-python")


def pages_of(tensors: Mapping[str, torch.Tensor]) -> BlockPages:
    """Return the pages of a rank's blocks.

    Raises
    ------
    LayoutError
        A block's bytes are not contiguous in each of the tensors.
    """
    blocks = min((tensor.shape[0] for tensor in tensors.values()), default=0)
    return BlockPages.of(tensors, blocks=blocks)


def regions_of(layout: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the second version of TensorRT-LLM's KV cache manager.

    Raises
    ------
    LayoutError
        The manager has blocks of several kinds, or of windows.
    """
    groups = list(layout.groups)
    if len(groups) != 1 or groups[0].window_size is not None:
        kinds = [getattr(group, "window_size", None) for group in groups]
        hint = "expected a model with full attention in every layer"
        raise LayoutError(f"groups of layers with windows {kinds}", hint=hint)
    return {f"region {n}": region.as_tensor() for n, region in enumerate(groups[0].regions)}


def rank_fields(pages: BlockPages) -> dict[str, str]:
    """Return what must agree among ranks' tensors before they may share bytes."""
    return {
        "kv.pages": pages.describe(),
        "kv.shapes": ",".join(sorted(pages.shapes)),
        "device": device_kind(pages.device),
    }


def layout_of(
    llm_args: Any, pages: BlockPages, *, tokens: int, ranks: int, fingerprint: str
) -> Layout:
    """Return the layout of a slot: the parts of all ranks, of equal length, one after the other.

    Raises
    ------
    ConfigError
        The model's weights are not on this machine, and no fingerprint stands for them.
    """
    revision = getattr(llm_args, "revision", None)
    folder = model_folder(llm_args.model, revision=revision)
    if fingerprint == "auto":
        weights = read_weights_digest(str(llm_args.model), revision=revision)
    else:
        weights = f"given {fingerprint}"
    fields = {
        "engine": "tensorrt-llm",
        "weights": weights,
        "ranks": str(ranks),
        **rank_fields(pages),
        **prefixed("llm_args", arguments(llm_args)),
        **prefixed("environment", switches()),
        **prefixed("library", versions(LIBRARIES)),
        **folder_fields({} if folder is None else {"model": folder}),
    }
    return Layout(tokens, ranks * pages.block_bytes, fields, pages.element[0])


def switches() -> dict[str, str]:
    """Return the environment variables that are set and that name blocks."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in (*LIBRARIES_SWITCHES, *SWITCHES)
        or (
            name.startswith(PREFIXES)
            and not any(fnmatch(name, known) for known in SWITCHES_LEFT_OUT)
        )
    }


def arguments(llm_args: Any) -> dict[str, str]:
    """Return the engine's arguments that name blocks, as text."""
    given = _fields(llm_args)
    given |= prefixed("kv_cache_config", _fields(given.get("kv_cache_config")))
    return {
        name: text_of(value, lambda one: _fields(one).items())
        for name, value in sorted(given.items())
        if name not in LEFT_OUT
    }


def _fields(value: Any) -> dict[str, Any]:
    return {} if value is None else {**cast("dict[str, Any]", vars(value))}


def ranks_of(llm_args: Any) -> int:
    """Return how many processes compute each step together.

    Raises
    ------
    ConfigError
        They run on several nodes.
    """
    ranks = int(getattr(llm_args, "tensor_parallel_size", 1) or 1)
    nodes = ranks / int(getattr(llm_args, "gpus_per_node", None) or ranks)
    if nodes > 1:
        what, hint = f"{ranks} ranks on {nodes:g} nodes", "expected ranks on one machine"
        raise ConfigError(what, path="llm_args.tensor_parallel_size", hint=hint)
    return ranks
