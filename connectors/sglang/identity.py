"""The identity of SGLang's pages besides their tokens: all that SGLang's own hash leaves out."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from sglang.srt import runtime_context
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.environ import Envs
from sglang.version import __version__

from kvladder.config.stack import StackConfig
from kvladder.connectors.listener import abstract
from kvladder.connectors.naming import (
    LIBRARIES,
    LIBRARIES_SWITCHES,
    digest,
    folder_fields,
    model_folder,
    plugins,
    prefixed,
    text_of,
    versions,
)
from kvladder.connectors.sglang.models import AUTO, HINT, WHERE, model_fields
from kvladder.connectors.sglang.pools import RankPool
from kvladder.errors import ConfigError
from kvladder.layout import Layout

PLUGINS: Final = ("sglang.srt.plugins", "sglang.srt.platforms")
engine: Any = runtime_context  # its settings have no types
LEFT_OUT: Final[Mapping[str, Mapping[str, str]]] = yaml.safe_load(
    Path(__file__).with_name("left_out.yaml").read_text(encoding="utf-8")
)
"""Settings and environment variables that do not name pages: by kind and reason, their names."""


def left_out(kind: str) -> dict[str, str]:
    """Return the reason why each setting or switch of this kind does not name pages, by name."""
    return {name: reason for reason, names in LEFT_OUT[kind].items() for name in names.split()}


_SETTINGS: Final = left_out("settings")
_SWITCHES: Final = left_out("switches")
SAFETENSORS: Final = frozenset(("auto", "safetensors", "fastsafetensors", "instanttensor"))
"""Load formats that all read the same files."""
OUT_OF_SIGHT: Final = (
    "exec.moe.kt_weight_path", "exec.moe.enable_paged_experts",
    "exec.offload.ple_offload_embedding",
)  # fmt: skip
"""Settings that keep weights outside the model's modules, where kvladder cannot read them."""


def is_starting() -> bool:
    """Return whether SGLang starts with this storage and has computed nothing yet.

    A storage that is attached later appears in SGLang's settings only after it is attached.
    """
    return getattr(engine.get_memory(), "hicache_storage_backend", None) is not None


def is_spread(ranks: Any) -> bool:
    """Return whether ranks that keep the same pages run on several machines."""
    parallel = engine.get_parallel()
    machines = getattr(parallel, "nnodes", 1)
    whole: int = getattr(parallel, "tp_size", ranks.tp_size) * ranks.pp_size
    return bool(machines > 1 and ranks.tp_size > max(1, whole // machines))


def ranks_of(ranks: Any) -> int:
    """Return the number of ranks of this server that may share one stack, on all machines."""
    replicas: int = getattr(engine.get_parallel(), "num_dp_ranks", 1)
    return int(replicas * ranks.tp_size * ranks.attn_cp_size)


def address_of(ranks: Any, layout: Layout, settings: StackConfig) -> str | None:
    """Return the socket where ranks of this server meet to share one stack; None for one rank.

    Ranks may share a stack if they name pages alike and have the same settings. It does not
    matter which part of a page each rank has.
    """
    if ranks_of(ranks) == 1:
        return None
    server = os.environ.get("SGLANG_RUN_ID") or f"process {os.getppid()}"
    space = layout.namespace(salt=settings.block.salt)
    # not what it describes, as that is for people: sizes are rounded there
    said = json.dumps(settings.source.raw, sort_keys=True, default=str)
    told = f"{server} {space.hex()} {said}"
    return abstract(f"sglang-{hashlib.sha256(told.encode()).hexdigest()}")


def require_named(fingerprint: str) -> None:
    """Raise ConfigError if SGLang's page hash and our digest of the weights may be ambiguous."""
    if getattr(engine.get_mm(), "trust_mm_content_hashes", False):
        what = "clients choose the names of images, so two images may have one name"
        raise ConfigError(what, path="--trust-mm-content-hashes", hint="leave it out")
    if fingerprint != AUTO:
        return
    given = {path: _given(path) for path in OUT_OF_SIGHT}
    if engine.get_model().load_format == "expert_pack":
        given["model.load_format"] = "expert_pack"
    for path, value in given.items():
        if value:
            what = f"{value!r} keeps weights where kvladder cannot read them"
            flag = "--" + path.rpartition(".")[2].replace("_", "-")
            raise ConfigError(what, path=flag, hint=f"{WHERE}: {HINT}")


def layout_of(pools: Sequence[RankPool], ranks: Any, fingerprint: str) -> Layout:
    """Return the layout of a page of SGLang's host pools; the first pool has keys and values.

    A slot takes a page of any of these pools. The layout does not say which part of a page a rank
    has: the names of its pages say that, so ranks may share a stack.

    ``fingerprint`` stands for the weights: a user's text, or "auto" to digest the weights that the
    ranks have in memory. All ranks must call this at the same time.

    Raises
    ------
    ConfigError
        The weights cannot be read, on this rank or on another one.
    """
    pool, model, drafts = pools[0].held, engine.get_model(), engine.get_spec()
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
        **model_fields(fingerprint),
        "load format": _load_format(model.load_format),
        "hooks": json.dumps(_hooks(), sort_keys=True),
        **folder_fields(
            {role: one for role, one in folders.items() if one is not None},
            tokenizer=draft is not None,
        ),
        **settings(),
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


def _load_format(given: str) -> str:
    """Return the load format, with one name for all formats that read the same files."""
    return "safetensors" if given in SAFETENSORS else given


def settings() -> dict[str, str]:
    """Return all server arguments that name pages, by namespace and name, as text.

    Every argument does unless ``LEFT_OUT`` lists it. The text of a file's path includes the file's
    digest.
    """
    paths: Mapping[str, str] = namespace_of(type(engine.get_context().server_args))
    named = (f"{namespace}.{name}" for name, namespace in sorted(paths.items()))
    return {path: text_of(_given(path), _fields) for path in named if path not in _SETTINGS}


def _given(path: str) -> Any:
    """Return the effective value of a setting, after SGLang has processed what was given."""
    namespace, *below = path.split(".")
    found = engine.get_context().config_bag(namespace)
    for name in below:
        found = getattr(found, name)
    return found


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _hooks() -> dict[str, str]:
    """Return a digest of each forward hook's source file, by the hook's path in SGLang."""
    given: Any = _given("observability.forward_hooks") or ()
    if isinstance(given, str):
        given = json.loads(given)
    found: dict[str, str] = {}
    for spec in given:
        path = str(spec.get("hook_factory") or "")
        module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
        code = getattr(sys.modules.get(module), "__file__", None)  # SGLang has imported it
        found[path] = digest(code) if code else ""
    return found


def _switches() -> dict[str, str]:
    """Return the environment variables of SGLang and its libraries that are set and name pages."""
    known = {*vars(Envs), *LIBRARIES_SWITCHES}
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in known or name.startswith("SGLANG_")) and name not in _SWITCHES
    }


def _device(pool: Any) -> str:
    """Return the kind of device that computes: other kinds compute slightly different values."""
    held = getattr(pool, "device_pool", None)
    kind = str(getattr(held, "device", "cpu")).partition(":")[0]
    if kind != "cuda":
        return f"{kind} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    cuda: Any = torch.cuda
    found = cuda.get_device_properties(cuda.current_device())
    return f"cuda {found.major}.{found.minor}"
