"""Checks before the first step that the engine is supported, and finds its blocks' layout."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvladder.connectors.naming import device_kind
from kvladder.connectors.vllm.groups import VllmGroups, groups_of, layer_specs
from kvladder.connectors.vllm.identity.fingerprint import model_fields
from kvladder.connectors.vllm.identity.weights import combined
from kvladder.connectors.vllm.options import WHERE
from kvladder.errors import ConfigError, LayoutError
from kvladder.gpu.copy.pages import BlockPages, common_element
from kvladder.layout import Kind, Layout

if TYPE_CHECKING:  # importing it needs vLLM, and only types need it here
    from kvladder.connectors.vllm.step import RankDescription

HASHES: Final = ("sha256", "sha256_cbor")
"""vLLM's hash algorithms that never give two prefixes the same hash."""

_FEATURES: Final = {
    "handle_preemptions": "fencing saves before their blocks are reused",
    "build_connector_worker_meta": "reporting finished copies to the scheduler",
    "get_block_ids_with_load_errors": "recomputing what could not be loaded",
    "set_xfer_handshake_metadata_pp_aware": "describing the workers' KV tensors to the scheduler",
    "has_pending_push_work": "ending saves when no request runs",
    "on_new_request": "fetching early",
    "get_transfer_results": "asynchronous loads",
}


def check_features(base: type) -> None:
    """Raise ConfigError unless vLLM's connector interface has all needed hooks.

    Parameters
    ----------
    base:
        vLLM's base class of connectors.
    """
    for name, purpose in _FEATURES.items():
        if not hasattr(base, name):
            what = f"the connectors of this version of vLLM lack {name}, needed for {purpose}"
            raise ConfigError(what, hint="use vLLM 0.32 or later")


def check_engine(vllm_config: Any) -> None:
    """Raise ConfigError unless the engine's configuration is supported."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for option in (
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
    ):
        size = getattr(parallel, option, 1)
        if size != 1:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{size}", path=flag, hint="kvladder supports only 1")
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in HASHES:
        what = f"{algorithm!r} can give two prefixes the same hash"
        where = "--prefix-caching-hash-algo"
        raise ConfigError(what, path=where, hint=f"expected {' or '.join(HASHES)}")
    if getattr(cache, "calculate_kv_scales", False):
        what = "scales computed at run time are not stored with a block"
        raise ConfigError(what, path="--calculate-kv-scales", hint="use scales from the checkpoint")


def check_roles(role: str | None, whole: str | None) -> None:
    """Raise ConfigError unless an engine in the role ``whole`` may have a connector in ``role``.

    A step may still write to a block that was given to a new request. vLLM delays loads into such
    blocks only if its own role says that blocks are loaded. The connectors within MultiConnector
    have roles of their own, so vLLM's role may miss that one of them loads.
    """
    if role != "kv_producer" and whole == "kv_producer":
        what = f"{whole!r}, but kvladder, beside other connectors, loads blocks as {role!r}"
        hint = "use kv_both for MultiConnector itself; each of its connectors has a role of its own"
        raise ConfigError(what, path="--kv-transfer-config kv_role", hint=hint)


def check_groups(vllm_config: Any, kv_cache_config: Any, *, load: str) -> None:
    """Raise LayoutError or ConfigError unless every kind of KV cache is supported."""
    model = str(vllm_config.model_config.model)
    groups = groups_of(kv_cache_config, model=model)
    if load != "async" and (len(groups) > 1 or groups.partial):
        kinds = ", ".join(group.kind for group in groups)
        what = f"vLLM cannot recompute single blocks of {model} (KV cache: {kinds})"
        raise ConfigError(what, path=f"{WHERE}.load", hint="use async")
    if load == "layers" and vllm_config.speculative_config is not None:
        what = "the layers of draft models do not report when they read"
        raise ConfigError(what, path=f"{WHERE}.load", hint="use async, or no --speculative-config")
    states = any(group.kind == "state" for group in groups)
    if states and vllm_config.speculative_config is not None:
        raise ConfigError(
            f"with drafts, vLLM moves the recurrent states of {model} after it passed them on",
            path="--speculative-config",
            hint="leave it out for this model",
        )


def check_layers(vllm_config: Any, names: Iterable[str]) -> None:
    """Raise ConfigError unless each layer with KV cache calls the hook before it reads.

    vLLM's own attention layers do.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    for name in names:
        if not isinstance(layers.get(name), Attention | MLAAttention):
            what = f"{name}, a {type(layers.get(name)).__name__}, does not report when it reads"
            raise ConfigError(what, path=f"{WHERE}.load", hint="use async")


def runs_v2(vllm_config: Any) -> bool:
    """Return whether vLLM runs model runner V2; True if vLLM does not say.

    V2 writes to blocks before it calls ``handle_preemptions``. V1 calls that first.
    """
    return bool(getattr(vllm_config, "use_v2_model_runner", True))


def check_recompute(vllm_config: Any, policy: str, *, load: str) -> None:
    """Raise ConfigError if vLLM would wrongly recompute the blocks of a failed load.

    vLLM sets a running request back to its last valid token. Model runner V2 of vLLM 0.32 and 0.33
    applies that on the host only, and on the device it continues from the old position. Requests
    that load between steps do not run yet, so V2 starts them again correctly.
    """
    if load != "async" and policy == "recompute" and runs_v2(vllm_config):
        what = f"{load!r}: vLLM's model runner V2 wrongly recomputes such a load if it fails"
        hint = "use async, kv_load_failure_policy fail, or VLLM_USE_V2_MODEL_RUNNER=0 for runner V1"
        raise ConfigError(what, path=f"{WHERE}.load", hint=hint)


def overwrites(kv_cache_config: Any) -> bool:
    """Return whether steps write to blocks before their forward pass: zeroing, copied states."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", True))


def runs_layers(forward_context: Any) -> bool:
    """Return whether a forward pass runs its layers in order and calls the hook before each.

    A CUDA graph of the whole pass calls no hooks. Micro-batches run on several streams.
    """
    mode = getattr(forward_context, "cudagraph_runtime_mode", None)
    return (
        bool(getattr(forward_context, "attn_metadata", None))
        and getattr(mode, "name", "FULL") != "FULL"
        and getattr(forward_context, "ubatch_slices", None) is None
    )


def group_pages(
    group: Any, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], *, blocks: int
) -> BlockPages | None:
    """Return where the bytes of a group's blocks lie on this rank; None if it has no such layer.

    Raises
    ------
    LayoutError
        A layer has no tensor, or its tensors do not match vLLM's own specification.
    """
    found: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    for name, spec in layer_specs(group).items():
        given = tensors.get(name)
        parts = [given] if isinstance(given, torch.Tensor) else [*(given or ())]
        expected = _part_bytes(spec, whole=len(parts) == 1)
        if len(parts) != len(expected):
            raise LayoutError(
                f"{len(parts)} KV tensors for {name}", hint=f"expected {len(expected)}"
            )
        for number, (part, size) in enumerate(zip(parts, expected, strict=True)):
            key = name if len(parts) == 1 else f"{name}.{number}"
            found[key], sizes[key] = part, size
    return BlockPages.of(found, blocks=blocks, page_bytes=sizes) if found else None


def _part_bytes(spec: Any, *, whole: bool) -> list[int]:
    """Return the bytes that a block takes in each of a layer's tensors, without padding."""
    if not hasattr(spec, "shapes"):
        return [getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)]
    parts = [  # of a recurrent state, which vLLM gives as one tensor of bytes or part by part
        prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    return [sum(parts)] if whole else parts


def tensor_fields(
    vllm_config: Any, groups: Mapping[int, BlockPages], names: Sequence[str]
) -> dict[str, str]:
    """Return the properties of this rank's KV tensors that must be equal to share their bytes.

    ``names`` are the names of its layers. On a CPU, attention kernels pack pages in an order that
    depends on the instruction set. Devices of different kinds compute different numbers.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found = [layers[name] for name in names if name in layers]
    backends = {layer.attn_backend.get_name() for layer in found if hasattr(layer, "attn_backend")}
    fields = {"attention": ",".join(sorted(backends))}
    for index, pages in groups.items():
        fields[f"kv.pages.{index}"] = pages.describe()
        fields[f"kv.shapes.{index}"] = ",".join(sorted(pages.shapes))
    element, run = common_element(pages.element for pages in groups.values())
    if any(pages.device.type == "cpu" for pages in groups.values()):
        run = 0
        packed = sorted({str(getattr(layer, "isa", "unknown")) for layer in found})
        capability = torch.backends.cpu.get_cpu_capability()
        fields["cpu"] = f"{platform.machine()} {capability} {','.join(packed)}"
    fields["device"] = ",".join(sorted({device_kind(pages.device) for pages in groups.values()}))
    fields["kv.element"] = f"{element} {run}"
    return fields


def this_node() -> str:
    """Return a name for this boot of this machine; shared memory reaches no further."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()}/{boot}"


def layout_of(
    ranks: Mapping[int, RankDescription],
    vllm_config: Any,
    kv_cache_config: Any,
    groups: VllmGroups,
    *,
    fingerprint: str,
) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
    """Return the layout of a slot, and by rank and group the offset of a rank's bytes in it.

    A slot holds one block of any group: the parts of all ranks one after the other. Ranks that
    hold the same bytes share one part. A slot is as large as the largest group needs.
    ``fingerprint`` stands for the weights: text from the user, or "auto" for those that the ranks
    have in memory.

    Raises
    ------
    ConfigError
        A rank is missing, runs on another machine, or differs from the others of its stage.
    """
    parallel = vllm_config.parallel_config
    width: int = parallel.tensor_parallel_size
    count = width * getattr(parallel, "pipeline_parallel_size", 1)
    if sorted(ranks) != list(range(count)):
        raise ConfigError(
            f"ranks {sorted(ranks)} described their KV tensors", hint=f"expected 0 .. {count - 1}"
        )
    # The ranks of a stage must have equal fields; each stage has layers of its own.
    fields: dict[str, str] = {}
    for rank, described in sorted(ranks.items()):
        if described.node != this_node():
            what = f"rank {rank} runs on {described.node.partition('/')[0]}"
            raise ConfigError(what, hint="expected all ranks on one machine")
        stage = f"stage.{rank // width}." if rank >= width else ""
        for name, value in described.fields.items():
            if fields.setdefault(f"{stage}{name}", value) != value:
                hint = f"rank {rank // width * width} has {fields[f'{stage}{name}']}"
                raise ConfigError(f"rank {rank} has {name} {value!r}", hint=hint)
    # A rank's bytes follow those of the ranks before it; replicas share the first one's bytes.
    ends = [0] * len(groups)
    offsets: list[tuple[int, ...]] = []
    for rank in range(count):
        if rank % ranks[rank].replicas == 0:
            offsets.append(tuple(ends))
            ends = [end + size for end, size in zip(ends, ranks[rank].sizes, strict=True)]
        else:
            offsets.append(offsets[-1])
    # Everything that distinguishes these bytes from others is a field of the namespace.
    weights = f"given {fingerprint}"
    if fingerprint == "auto":
        weights = combined([described.weights for _, described in sorted(ranks.items())]).hex()
    fields = {
        **model_fields(vllm_config),
        **fields,
        "weights": weights,
        "kv.groups": ";".join(
            f"{g.kind} {g.tokens} {g.reach} {size}" for g, size in zip(groups, ends, strict=True)
        ),
        "kv.layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "ranks": str(len(set(offsets))),
    }
    # Codecs that work on numbers need the same element type in all ranks and groups.
    elements = {text for name, text in fields.items() if name.endswith("kv.element")}
    element, _, run = elements.pop().partition(" ") if len(elements) == 1 else ("", "", "0")
    kinds: tuple[Kind, ...] = tuple(group.kind for group in groups)
    layout = Layout(groups.main.tokens, max(ends), fields, element, int(run), kinds)
    return layout, tuple(offsets)


def instance_of(parallel_config: Any) -> int:
    """Return the index of this data-parallel engine; each engine has its own cache."""
    # data_parallel_rank and _size do not tell: vLLM resets them for engines that exchange nothing
    return int(getattr(parallel_config, "data_parallel_index", 0))
