"""``kvladder check``: what a configuration comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError
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
    """The resolved stack as text; in blocks and tokens, too, if a model is named.

    Parameters
    ----------
    config:
        The YAML file.
    model:
        A model's ``config.json`` or its folder.
    dtype:
        Of the KV cache; None takes the model's.
    block_tokens:
        Tokens per block of the engine; None takes the file's, or assumes 16.
    offline:
        Whether to believe what the file names, paths and servers, instead of looking there.

    Raises
    ------
    ConfigError
        The configuration is wrong or does not fit the model's blocks.
    ExceptionGroup
        Of a ConfigError for each thing that the file names and that is not as it has to be.
    """
    if model is None and dtype is not None:
        raise ConfigError("says nothing without a model", path="--dtype", hint="add --model")
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(str(block_tokens), path="--block-tokens", hint="expected 1 or more")
    overrides = None if block_tokens is None else {"block": {"tokens": block_tokens}}
    found = load_config(config, overrides=overrides)
    if model is None:
        return "\n".join([found.describe(), *([] if offline else _looked(found))])
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
    """What stands where the configuration points."""
    findings = preflight(config)
    if findings.errors:
        raise ExceptionGroup("the cache would not open", findings.errors)
    lines = ["", "found there (--offline does not look)"]
    for name, facts in findings.facts.items():
        lines += [f"  {name}: {'; '.join(f'{key} {value}' for key, value in facts.items())}"]
    return [*lines, *(f"  warning: {warning}" for warning in findings.warnings)]
