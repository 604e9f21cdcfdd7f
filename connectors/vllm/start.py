"""Before the first step: is the engine one that is supported, and how do its blocks lie?"""

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

if TYPE_CHECKING:  # which needs vLLM, and is asked for nothing else
    from kvladder.connectors.vllm.step import RankDescription

HASHES: Final = ("sha256", "sha256_cbor")
"""vLLM's block hashes that no two prefixes share."""

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
    """Raise ConfigError unless vLLM's connector interface has all that is needed.

    Parameters
    ----------
    base:
        vLLM's base class of connectors.
    """
    for name, purpose in _FEATURES.items():
        if not hasattr(base, name):
            what = f"this vLLM's connectors lack {name}, needed for {purpose}"
            raise ConfigError(what, hint="use vLLM 0.32 or later")


def check_engine(vllm_config: Any) -> None:
    """Raise ConfigError unless the engine is set up in a way that is supported."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for option in (
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
    ):
        size = getattr(parallel, option, 1)
        if size != 1:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{size}", path=flag, hint="kvladder supports 1")
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in HASHES:
        what = f"{algorithm!r} can give two prefixes one name"
        where = "--prefix-caching-hash-algo"
        raise ConfigError(what, path=where, hint=f"expected {' or '.join(HASHES)}")
    if getattr(cache, "calculate_kv_scales", False):
        what = "scales that are found at run time are not part of a block"
        raise ConfigError(what, path="--calculate-kv-scales", hint="use scales from the checkpoint")


def check_roles(role: str | None, whole: str | None) -> None:
    """Raise ConfigError unless an engine in the role ``whole`` may have a connector in ``role``.

    vLLM keeps blocks from being filled that a step still writes to only where the role that it
    was given itself says that blocks are loaded; MultiConnector's connectors have their own.
    """
    if role != "kv_producer" and whole == "kv_producer":
        what = f"{whole!r}, and kvladder beside other connectors is to load as {role!r}"
        hint = "use kv_both for MultiConnector itself; each of its connectors has a role of its own"
        raise ConfigError(what, path="--kv-transfer-config kv_role", hint=hint)


def check_groups(vllm_config: Any, kv_cache_config: Any, *, load: str) -> None:
    """Raise LayoutError or ConfigError unless every kind of KV cache is supported."""
    model = str(vllm_config.model_config.model)
    groups = groups_of(kv_cache_config, model=model)
    if load != "async" and (len(groups) > 1 or groups.partial):
        kinds = ", ".join(group.kind for group in groups)
        what = f"vLLM cannot recompute single blocks of {model}, whose KV cache is {kinds}"
        raise ConfigError(what, path=f"{WHERE}.load", hint="use async")
    if load == "layers" and vllm_config.speculative_config is not None:
        what = "the drafts' layers do not say when they read"
        raise ConfigError(what, path=f"{WHERE}.load", hint="use async, or no --speculative-config")
    states = any(group.kind == "state" for group in groups)
    if states and vllm_config.speculative_config is not None:
        raise ConfigError(
            f"with drafts, vLLM moves the recurrent states of {model} after they were handed over",
            path="--speculative-config",
            hint="leave it out for this model",
        )


def check_layers(vllm_config: Any, names: Iterable[str]) -> None:
    """Raise ConfigError unless every layer with KV cache says when it reads, as vLLM's own do."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    for name in names:
        if not isinstance(layers.get(name), Attention | MLAAttention):
            what = f"{name}, a {type(layers.get(name)).__name__}, does not say when it reads"
            raise ConfigError(what, path=f"{WHERE}.load", hint="use async")


def runs_v2(vllm_config: Any) -> bool:
    """Return whether vLLM runs model runner V2; a vLLM that does not say so is taken to.

    V2 writes to blocks before it calls ``handle_preemptions``. V1 calls that first.
    """
    return bool(getattr(vllm_config, "use_v2_model_runner", True))


def check_recompute(vllm_config: Any, policy: str, *, load: str) -> None:
    """Raise ConfigError if vLLM would compute wrongly what a failed load did not bring.

    It sets a running request back to its last valid token. Model runner V2 of vLLM 0.32 and 0.33
    takes that over on the host alone, and goes on computing from the old position on the device.
    Requests that load between steps do not run yet, so V2 begins them anew.
    """
    if load != "async" and policy == "recompute" and runs_v2(vllm_config):
        what = f"{load!r}, and vLLM's model runner V2 recomputes a failed load of it wrongly"
        hint = (
            "use async, or kv_load_failure_policy fail, or VLLM_USE_V2_MODEL_RUNNER=0 for runner V1"
        )
        raise ConfigError(what, path=f"{WHERE}.load", hint=hint)


def overwrites(kv_cache_config: Any) -> bool:
    """Return whether steps write to blocks before their forward pass: zero them, copy states."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", True))


def runs_layers(forward_context: Any) -> bool:
    """Whether a forward pass runs its layers one after the other, each of which says so.

    A graph of all of it does not, and micro-batches are computed on several streams.
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
    """Where the bytes of a group's blocks lie on this rank; None if it has none of the layers.

    Raises
    ------
    LayoutError
        There is no tensor for a layer, or it is not what vLLM's own specification says.
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
    """Bytes that a block takes in each of a layer's tensors, padding not counted."""
    if not hasattr(spec, "shapes"):
        return [getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)]
    parts = [  # of a state, which vLLM gives as one tensor of bytes or part by part
        prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    return [sum(parts)] if whole else parts


def tensor_fields(
    vllm_config: Any, groups: Mapping[int, BlockPages], names: Sequence[str]
) -> dict[str, str]:
    """What of this rank's KV tensors must agree before their bytes may be shared.

    ``names`` are those of its layers. On a CPU the attention kernels pack pages in an order of
    their own, which depends on the instruction set. Devices of another kind compute otherwise.
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
    """Names this machine, and this boot of it: shared memory reaches no further."""
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
    """The layout of a slot, and by rank and group where in it a rank's bytes begin.

    A slot holds one block of any group: the parts of all ranks one after the other, of ranks that
    hold the same bytes only one. It is as large as the largest group needs. ``fingerprint`` is
    what stands for the weights: a user's text, or "auto" for those that the ranks have in memory.

    Raises
    ------
    ConfigError
        A rank is missing, runs elsewhere, or has blocks of another shape.
    """
    parallel = vllm_config.parallel_config
    width: int = parallel.tensor_parallel_size
    count = width * getattr(parallel, "pipeline_parallel_size", 1)
    if sorted(ranks) != list(range(count)):
        raise ConfigError(
            f"ranks {sorted(ranks)} described their KV tensors", hint=f"expected 0 .. {count - 1}"
        )
    # The ranks of a stage agree on what their bytes are; stages have layers of their own.
    fields: dict[str, str] = {}
    for rank, described in sorted(ranks.items()):
        if described.node != this_node():
            what = f"rank {rank} runs on {described.node.partition('/')[0]}"
            raise ConfigError(what, hint="kvladder supports ranks on one machine")
        stage = f"stage.{rank // width}." if rank >= width else ""
        for name, value in described.fields.items():
            if fields.setdefault(f"{stage}{name}", value) != value:
                hint = f"rank {rank // width * width} has {fields[f'{stage}{name}']}"
                raise ConfigError(f"rank {rank} has {name} {value!r}", hint=hint)
    # A rank's bytes lie behind those of the ranks before it, or are those of its first replica.
    ends = [0] * len(groups)
    offsets: list[tuple[int, ...]] = []
    for rank in range(count):
        if rank % ranks[rank].replicas == 0:
            offsets.append(tuple(ends))
            ends = [end + size for end, size in zip(ends, ranks[rank].sizes, strict=True)]
        else:
            offsets.append(offsets[-1])
    # All that tells these bytes from others is a field of the namespace.
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
    # Codecs that see numbers need one type of them for all ranks and groups.
    elements = {text for name, text in fields.items() if name.endswith("kv.element")}
    element, _, run = elements.pop().partition(" ") if len(elements) == 1 else ("", "", "0")
    kinds: tuple[Kind, ...] = tuple(group.kind for group in groups)
    layout = Layout(groups.main.tokens, max(ends), fields, element, int(run), kinds)
    return layout, tuple(offsets)


def instance_of(parallel_config: Any) -> int:
    """Which of several data-parallel engines this is; each has a cache of its own."""
    # not data_parallel_rank and _size: vLLM resets them for engines that exchange nothing
    return int(getattr(parallel_config, "data_parallel_index", 0))
