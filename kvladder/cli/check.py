"""``kvladder check``: checks a configuration and prints the stack that it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError
from kvladder.export.cache import server_layout
from kvladder.layout import Layout
from kvladder.planning.models import bytes_per_token
from kvladder.preflight import preflight

TOKENS_ASSUMED: Final = 16


def check(
    config: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    block_tokens: int | None = None,
    offline: bool = False,
) -> str:
    """Check a configuration and print the resolved stack.

    Prints every setting with its resulting value and its source. Then checks that the directories,
    servers, keys and libraries that it names exist. Exits with 2 and the reasons if a cache would
    not open.

    Parameters
    ----------
    config:
        the YAML file
    model:
        a model's config.json (or its folder), to print sizes in blocks and tokens
    dtype:
        data type of the KV cache, such as fp8 (default: the model's)
    block_tokens:
        tokens per block of the engine (default: the file's, or 16)
    offline:
        do not check the paths and servers that the configuration names

    Raises
    ------
    ConfigError
        The configuration is wrong or does not fit the model's blocks.
    ExceptionGroup
        Holds one ConfigError for each thing that the file names and that is missing or wrong.
    """
    if model is None and dtype is not None:
        raise ConfigError("says nothing without a model", path="--dtype", hint="add --model")
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(str(block_tokens), path="--block-tokens", hint="expected 1 or more")
    overrides = None if block_tokens is None else {"block": {"tokens": block_tokens}}
    found = load_config(config, overrides=overrides)
    if model is None:
        layout = None if found.block.size_bytes is None else server_layout(found.block.size_bytes)
        if layout is not None:
            found.check(layout)
        return "\n".join([found.describe(layout), *([] if offline else _looked(found))])
    tokens = found.block.tokens
    notes: list[str] = []
    if tokens == "auto":
        tokens = TOKENS_ASSUMED
        notes = ["", f"{tokens} tokens per block are assumed: the engine decides (--block-tokens)"]
    layout = Layout(tokens, tokens * bytes_per_token(model, dtype=dtype))
    found.check(layout)
    looked = [] if offline else _looked(found)
    return "\n".join([found.describe(layout), *looked, *notes])


def _looked(config: StackConfig) -> list[str]:
    """Return lines about the paths and servers that the configuration names.

    Raises an ExceptionGroup if the cache would not open.
    """
    findings = preflight(config)
    if findings.errors:
        raise ExceptionGroup("the cache would not open", findings.errors)
    lines = ["", "found there (--offline does not look)"]
    for name, facts in findings.facts.items():
        lines += [f"  {name}: {'; '.join(f'{key} {value}' for key, value in facts.items())}"]
    return [*lines, *(f"  warning: {warning}" for warning in findings.warnings)]
