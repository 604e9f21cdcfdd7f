"""``kvladder check``: checks a configuration and prints the stack that results from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvladder.cli.output import Result
from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError
from kvladder.export.sealed import server_layout
from kvladder.layout import Layout
from kvladder.planning.models import bytes_per_token
from kvladder.preflight import Findings, preflight
from kvladder.units import counted

TOKENS_ASSUMED: Final = 16


def check(
    config: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    block_tokens: int | None = None,
    all_: bool = False,
    offline: bool = False,
) -> Result:
    """Check a configuration and print the resolved stack.

    Prints OK and the warnings, then each setting that is not a default, with its value and its
    source. Checks that the directories, servers, keys and libraries that it names exist. Exits with
    2 and the reasons if a cache would not open.

    Parameters
    ----------
    config:
        read this YAML file
    model:
        print sizes in blocks and tokens for this model: its config.json, or its folder
    dtype:
        assume this data type of the KV cache, such as fp8 (default: the model's)
    block_tokens:
        assume N tokens per block (default: the file's number, or 16)
    all_:
        print all settings, including defaults
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
        raise ConfigError("has no effect without a model", path="--dtype", hint="add --model")
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(str(block_tokens), path="--block-tokens", hint="expected 1 or more")
    overrides = None if block_tokens is None else {"block": {"tokens": block_tokens}}
    found = load_config(config, overrides=overrides)
    layout, notes = _layout(found, model, dtype)
    if layout is not None:
        found.check(layout)
    findings = None if offline else preflight(found)
    if findings is not None and findings.errors:
        raise ExceptionGroup("the cache would not open", findings.errors)
    warnings = [*found.warnings, *(findings.warnings if findings else ())]
    text = "\n".join(
        [
            "OK" + (f", {counted(len(warnings), 'warning')}" if warnings else ""),
            *(f"  warning: {warning}" for warning in warnings),
            "",
            *found.listing(layout, defaults=all_),
            *_facts(findings),
            *notes,
        ]
    )
    return Result(text, _data(found, layout, warnings, findings))


def _data(
    found: StackConfig, layout: Layout | None, warnings: list[str], findings: Findings | None
) -> dict[str, Any]:
    """Return the verdict, every setting and the facts as plain data."""
    rows = {row.path: {"value": row.value, "origin": row.origin} for row in found.rows(layout)}
    data: dict[str, Any] = {"ok": True, "warnings": warnings, "settings": rows}
    if layout is not None:
        data["block"] = {"tokens": layout.block_tokens, "bytes": layout.block_bytes}
    if findings is not None:
        data["found"] = {name: dict(facts) for name, facts in findings.facts.items()}
    return data


def _layout(
    config: StackConfig, model: Path | None, dtype: str | None
) -> tuple[Layout | None, list[str]]:
    """Return the layout of the blocks, None if it is not known, and lines about assumptions."""
    size = config.block.size_bytes
    if model is None:
        return None if size is None else server_layout(size), []
    tokens, notes = config.block.tokens, list[str]()
    if tokens == "auto":
        tokens = TOKENS_ASSUMED
        notes = [
            "",
            f"assumed {tokens} tokens per block: set --block-tokens to the engine's number",
        ]
    return Layout(tokens, tokens * bytes_per_token(model, dtype=dtype)), notes


def _facts(findings: Findings | None) -> list[str]:
    """Return lines about the paths, servers and libraries that the configuration names."""
    if findings is None:
        return []
    return ["", "found on this system (--offline skips this)"] + [
        f"  {name}: {'; '.join(f'{key} {value}' for key, value in facts.items())}"
        for name, facts in findings.facts.items()
    ]
