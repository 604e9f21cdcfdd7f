"""What names SGLang's pages beside their tokens: all that SGLang's own hash leaves out."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, cast

import torch
import yaml
from sglang.srt import runtime_context
from sglang.srt.environ import Envs
from sglang.version import __version__

from kvladder.config.stack import StackConfig
from kvladder.connectors.lines import abstract
from kvladder.connectors.naming import (
    LIBRARIES,
    LIBRARIES_SWITCHES,
    folder_fields,
    model_folder,
    plugins,
    prefixed,
    text_of,
    versions,
)
from kvladder.connectors.sglang.pools import Pool
from kvladder.connectors.weights import downloaded, weights_digest
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.schema import is_mapping

PLUGINS: Final = ("sglang.srt.plugins", "sglang.srt.platforms")
SETTINGS_LEFT_OUT: Final = (
    # where and how files are read: what they hold is digested
    "model_path", "load_format", "download_dir", "*weight_loader*", "startup_weight_load_mode",
    "weight_cache_*", "remote_instance_*", "modelexpress_*", "engine_info_*", "checkpoint_engine_*",
    "decrypted_*", "delete_ckpt_*", "model_checksum", "modelopt_*_path", "lora_paths",
    "speculative_draft_model_path",
    # what is done to logits and to answers
    "sampling_*", "grammar_*", "watermark*", "enable_watermark", "enable_custom_logit_processor",
    "enable_return_*", "return_*", "aux_hidden_*", "disable_outlines_*",
    # how a step is recorded, and where its memory comes from
    "*cuda_graph*", "*_nvtx_*", "enable_memory_saver", "*_weights_cpu_backup", "pre_warm_nccl",
)  # fmt: skip
engine: Any = runtime_context  # it types none of its settings
SWITCHES_LEFT_OUT: Final[Mapping[str, str]] = yaml.safe_load(
    Path(__file__).with_name("left_out.yaml").read_text(encoding="utf-8")
)
"""By reason, names of environment variables that name no page."""
_LEFT_OUT: Final = frozenset(" ".join(SWITCHES_LEFT_OUT.values()).split())


def is_spread(ranks: Any) -> bool:
    """Whether ranks that keep the same pages are on several machines."""
    parallel = engine.get_parallel()
    machines = getattr(parallel, "nnodes", 1)
    whole: int = getattr(parallel, "tp_size", ranks.tp_size) * ranks.pp_size
    return bool(machines > 1 and ranks.tp_size > max(1, whole // machines))


def address_of(ranks: Any, layout: Layout, settings: StackConfig) -> str | None:
    """Where the ranks of this server meet that may have one stack; None if there is one rank.

    Those may that name pages alike, whatever part of a page each has, and have the same settings.
    """
    parallel = engine.get_parallel()
    several = getattr(parallel, "num_dp_ranks", 1) * ranks.tp_size * ranks.attn_cp_size
    if several == 1:
        return None
    server = os.environ.get("SGLANG_RUN_ID") or f"process {os.getppid()}"
    space = layout.namespace(salt=settings.block.salt)
    told = f"{server} {space.hex()} {settings.describe(layout)}"
    return abstract(f"sglang-{hashlib.sha256(told.encode()).hexdigest()}")


def require_named() -> None:
    """Raise ConfigError if SGLang's hash of a page leaves its content open."""
    if getattr(engine.get_mm(), "trust_mm_content_hashes", False):
        what = "clients name images: two may come under one name"
        raise ConfigError(what, path="--trust-mm-content-hashes", hint="leave it out")


def layout_of(pools: Sequence[Pool], ranks: Any, fingerprint: str) -> Layout:
    """The layout of a page of SGLang's host pools, of which keys and values are first, and whose.

    A slot takes a page of any of them. Which part of a page a rank has is not told here: that is
    in the names of its pages, and ranks may share a stack.

    ``fingerprint`` is what stands for the weights: a user's text, or "auto" for their files.

    Raises
    ------
    ConfigError
        The weights, or those of an adapter or a draft model, are not on this machine.
    """
    pool, model, drafts = pools[0].held, engine.get_model(), engine.get_spec()
    weights = f"given {fingerprint}"
    if fingerprint == "auto":
        weights = _weights(model.model_path, model.revision)
    named = {"model": (model.model_path, model.revision)}
    draft = getattr(drafts, "speculative_draft_model_path", None)
    if draft is not None:
        named["draft"] = draft, drafts.speculative_draft_model_revision
    folders = {
        role: model_folder(path, revision=version) for role, (path, version) in named.items()
    }
    fields = {
        "engine": f"sglang {__version__}",
        **versions(LIBRARIES),
        "plugins": plugins(PLUGINS),
        "weights": weights,
        "adapters": str(dict(_adapters(engine.get_lora().lora_paths))),
        "draft": _weights(*named["draft"], what="draft model") if "draft" in named else "",
        **folder_fields(
            {role: one for role, one in folders.items() if one is not None},
            tokenizer=draft is not None,
        ),
        **prefixed("model", _settings(model)),
        **prefixed("exec", _settings(engine.get_exec())),
        **prefixed("lora", _settings(engine.get_lora())),
        **prefixed("spec", _settings(drafts)),
        **prefixed("environment", _switches()),
        "kv.dtype": str(pool.dtype),
        "kv.layout": f"{type(pool).__name__} {pool.layout} {pool.storage_format_tag}",
        "kv.layers": f"{pool.start_layer} {pool.end_layer} {getattr(pool, 'layer_num', 0)}",
        "kv.heads": " ".join(
            str(getattr(pool, name, 0)) for name in ("head_num", "head_dim", "v_head_dim")
        ),
        "device": _device(pool),
        "pp": f"{ranks.pp_rank} {ranks.pp_size}",
    }
    element = str(pool.dtype).removeprefix("torch.")
    return Layout(
        pool.page_size,
        max(one.page_bytes for one in pools),
        fields,
        element,
        getattr(pool, "head_dim", 0),
        tuple(one.kind for one in pools),
    )


def _weights(path: str, revision: str | None = None, *, what: str = "model") -> str:
    place = Path(path)
    return weights_digest(
        place if place.exists() else downloaded(path, revision=revision, what=what)
    )


def _adapters(given: Any) -> Iterator[tuple[str, str]]:
    """Name, path and weights of each adapter: SGLang tells them apart by name and path alone.

    They are given as names with paths, as paths, or in SGLang's own words.
    """
    several: Sequence[Any] = [*(given.items() if is_mapping(given) else given or ())]
    for one in several:
        name, path = one, one
        if isinstance(one, tuple):
            name, path = cast("tuple[str, str]", one)
        elif not isinstance(one, str):
            name, path = one.lora_name, one.lora_path
        yield f"{name} {path}", _weights(path, what="adapter")


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _settings(bag: Any) -> dict[str, str]:
    """Every setting in one of SGLang's namespaces and those below it, but for what names nothing.

    A setting that nobody has looked at names the pages.
    """
    found: dict[str, str] = {}
    values = cast("dict[str, Any]", vars(bag))
    for name, value in sorted(values.items()):
        if name.startswith("_") or any(fnmatch(name, known) for known in SETTINGS_LEFT_OUT):
            continue
        if type(value) is type(bag):
            found |= prefixed(name, _settings(value))
        else:
            found[name] = text_of(value, _fields)
    return found


def _switches() -> dict[str, str]:
    """Environment variables of SGLang, and of what it computes with, that are set."""
    known = {*vars(Envs), *LIBRARIES_SWITCHES}
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in known or name.startswith("SGLANG_")) and name not in _LEFT_OUT
    }


def _device(pool: Any) -> str:
    """What computes: devices of another kind compute otherwise."""
    held = getattr(pool, "device_pool", None)
    kind = str(getattr(held, "device", "cpu")).partition(":")[0]
    if kind != "cuda":
        return f"{kind} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    cuda: Any = torch.cuda
    found = cuda.get_device_properties(cuda.current_device())
    return f"cuda {found.major}.{found.minor}"
