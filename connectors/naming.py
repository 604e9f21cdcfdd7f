"""Turns an engine's inputs into text for names: values as JSON, files and folders as digests."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch

from kvladder.connectors.weights import downloaded
from kvladder.errors import ConfigError

FILES_LEFT_OUT: Final[Mapping[str, str]] = {
    "weights: another field identifies them": "*.safetensors *.bin *.pt *.pth *.gguf",
    "weights for other engines": "*.h5 *.msgpack *.onnx *.onnx_data *.ot *.tflite *.mlmodel *.nemo",
    "documentation and pictures": (
        "README* LICENSE* NOTICE* *.md *.pdf *.png *.jpg *.jpeg *.gif *.svg"
    ),
    "files of tools: versions, downloads, compiled code": ".* __pycache__",
    "how messages become text: the tokens of the text name the blocks": (
        "chat_template.json chat_template.jinja *.jinja additional_chat_templates"
    ),
    "how the next token is chosen: the chosen tokens name the blocks": ("generation_config.json"),
    "which file has which tensor: another field identifies the weights": (
        "*.safetensors.index.json *.safetensors.index.*.json *.bin.index.json *.bin.index.*.json"
    ),
}
"""Files of a model's folder that do not count for block names: file patterns by reason."""

TOKENIZERS: Final[Mapping[str, str]] = {
    "how text becomes tokens, if only prompts need it: the tokens name the blocks": (
        "tokenizer.json tokenizer_config.json tokenizer.model tokenizer.model.v* vocab.json"
        " vocab.txt merges.txt special_tokens_map.json added_tokens.json spiece.model"
        " sentencepiece.bpe.model *.tiktoken"
    ),
}
"""The same for a tokenizer's files, where ``reads_tokenizer`` finds nothing that reads them."""

_FILES: Final = frozenset(" ".join(FILES_LEFT_OUT.values()).split())
_TOKENIZERS: Final = frozenset(" ".join(TOKENIZERS.values()).split())

_READS_TOKENIZER: Final = ("*processor_config.json", "tekken.json", "*.py")
"""Files of processors, which place images among tokens, and code, which may read any file."""
_COMPOSITE: Final = re.compile(
    r'"(auto_map|text_config|\w*(?:vision|visual|image|audio|video|speech)\w*|mm_\w+)"\s*:'
)
"""Keys that a ``config.json`` has only if its model has a processor, or code of its own."""

_NOT_THE_MODELS: Final = ("_name_or_path", "_commit_hash", "transformers_version")
"""Keys of a model's configuration that tell only where it was read, and what wrote it."""

LIBRARIES: Final = ("torch", "transformers", "triton", "flashinfer-python")
"""Libraries with which vLLM and SGLang compute or read a model's files. Their versions are not
fixed by the engine."""
LIBRARIES_SWITCHES: Final = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Environment variables that change computed numbers, although no engine reads them."""

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


Parts = Callable[[Any], Iterable[tuple[str, Any]]]
"""Returns the fields of a dataclass that count for names, with their values."""


def text_of(value: Any, parts: Parts) -> str:
    """Return the value as text that is the same in every process.

    The digest of the file follows each path of a file.
    """
    return json.dumps(_plain(value, parts, ()), sort_keys=True)


def _plain(value: Any, parts: Parts, above: tuple[int, ...]) -> Any:
    """Return the value as plain JSON types, without addresses or process-dependent order.

    ``above`` has the ids of the values around this one, to stop at cycles.
    """
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
        return {
            str(k): _plain(v, parts, above) for k, v in value.items() if k not in _NOT_THE_MODELS
        }
    if _is_collection(value):
        items = [_plain(one, parts, above) for one in value]
        if isinstance(value, Set):
            items.sort(key=lambda one: json.dumps(one, sort_keys=True))
        return items
    return _object(value, parts, above)


def _is_file(text: str) -> bool:
    """Return whether a text is the path of an existing file."""
    try:
        return os.sep in text and Path(text).is_file()
    except OSError:  # the text is too long for a name, or the folder may not be read
        return False


def _is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _is_collection(value: object) -> TypeGuard[Collection[Any]]:
    return isinstance(value, Set | Sequence)


def _object(value: Any, parts: Parts, above: tuple[int, ...]) -> Any:
    """Return what stands for an object that JSON has no type for.

    A class or function is its qualified name, a configuration its ``to_dict()``, a dataclass its
    fields. Another object is its ``repr``, with its attributes if that has an address.
    """
    name = getattr(value, "__qualname__", None)
    if name is not None:  # a class or a function
        return f"{value.__module__}.{name}"
    if hasattr(value, "to_dict"):  # a model's configuration
        return _plain(value.to_dict(), parts, above)
    kind = str(value.__class__.__name__)
    if is_dataclass(value):
        return [kind, {name: _plain(part, parts, above) for name, part in parts(value)}]
    if hasattr(value, "compute_hash"):  # vLLM's way to tell platforms' own settings apart
        return [kind, str(value.compute_hash())]
    named = _ADDRESS.sub("", repr(value))
    if named != repr(value) and hasattr(value, "__dict__"):
        return [named, _plain(vars(value), parts, above)]
    return named


def digest(file: str | Path) -> str:
    """Return the digest of a file's content, or the reason why it cannot be read."""
    try:
        with Path(file).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def prefixed(prefix: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields with ``prefix`` and a dot before each name."""
    return {f"{prefix}.{name}": text for name, text in fields.items()}


def folder_fields(folders: Mapping[str, Path], *, tokenizer: bool = False) -> dict[str, str]:
    """Return digests of the files in folders, by role and relative path.

    Files in ``FILES_LEFT_OUT`` are skipped. So are those in ``TOKENIZERS``, unless ``tokenizer``
    says that the engine reads them for more than prompts, or ``reads_tokenizer`` finds that a
    folder may.
    """
    but = _FILES
    if not tokenizer and not any(map(reads_tokenizer, folders.values())):
        but = _FILES | _TOKENIZERS
    return {
        f"{role}/{file.relative_to(folder)}": digest(file)
        for role, folder in folders.items()
        for file in _files(folder, but)
    }


def reads_tokenizer(folder: Path) -> bool:
    """Return whether a model's processor or code may read the tokenizer; True if unsure."""
    if any(fnmatch(file.name, one) for file in _files(folder, _FILES) for one in _READS_TOKENIZER):
        return True
    try:
        text = (folder / "config.json").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:  # a folder with a tokenizer alone, or a model in another format
        return (folder / "params.json").exists()
    except OSError:
        return True
    return _COMPOSITE.search(text) is not None


def _files(folder: Path, but: Collection[str]) -> Iterator[Path]:
    """Yield all files in and below a folder, except names that match a pattern in ``but``."""
    seen: set[Path] = set()
    for where, below, names in os.walk(folder, followlinks=True):
        real = Path(where).resolve()
        below[:] = sorted(name for name in below if real not in seen and _counts(name, but))
        yield from (Path(where) / name for name in sorted(names) if _counts(name, but))
        seen.add(real)  # a link may lead back to this folder


def _counts(name: str, but: Collection[str]) -> bool:
    return not any(fnmatch(name, pattern) for pattern in but)


def model_folder(
    name: Any, *, revision: str | None = None, cache_dir: str | None = None
) -> Path | None:
    """Return the folder of a path or Hugging Face name; None if this machine has none."""
    if not name:
        return None
    path = Path(str(name))
    if path.exists():
        return path if path.is_dir() else None
    with suppress(ConfigError):
        return downloaded(str(name), revision=revision, cache_dir=cache_dir)
    return None


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def plugins(groups: Iterable[str], *, but: Collection[str] = ()) -> str:
    """Return the distributions with entry points in these groups, and their versions, as text.

    kvladder and the distributions in ``but`` are left out.
    """
    found = {
        f"{point.dist.name} {point.dist.version}"
        for group in groups
        for point in metadata.entry_points(group=group)
        if point.dist is not None and point.dist.name not in ("kvladder", *but)
    }
    return ", ".join(sorted(found))


def device_kind(device: torch.device) -> str:
    """Return the kind of a device that decides its numbers: type and, for a GPU, architecture."""
    if device.type != "cuda":
        return device.type
    cuda: Any = torch.cuda
    found = cuda.get_device_properties(device)
    return f"cuda {found.major}.{found.minor} {getattr(found, 'gcnArchName', '')}".strip()
