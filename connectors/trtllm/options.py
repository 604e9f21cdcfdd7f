"""The connector's options, read from the environment: TensorRT-LLM has no place for them.

Its ranks receive only variables with names that begin with ``TRTLLM`` or ``TLLM``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError
from kvladder.schema import Settings
from kvladder.units import Duration

STACK: Final = "TRTLLM_KVLADDER"
PATIENCE: Final = "TRTLLM_KVLADDER_PATIENCE"


class TrtllmOptions(Settings, frozen=True, kw_only=True):
    """Options of the connector besides those of its stack."""

    config: str
    """Path of the stack's YAML file."""
    patience_s: float = 0.05
    """Seconds that the executor's loop may wait for a request's blocks from levels below host."""


def read(environment: Mapping[str, str]) -> tuple[TrtllmOptions, StackConfig]:
    """Return the options and the stack's settings.

    Raises
    ------
    ConfigError
        No stack is named, its settings are wrong, or the patience is not a duration.
    """
    path = environment.get(STACK, "")
    if not path:
        hint = f"set {STACK}=/path/to/stack.yaml in the environment of the engine"
        raise ConfigError("is not set", path=STACK, hint=hint)
    options = TrtllmOptions(config=path)
    if PATIENCE in environment:
        try:
            patience = Duration.parse(environment[PATIENCE])
        except ValueError as error:
            raise ConfigError(repr(environment[PATIENCE]), path=PATIENCE, hint=str(error)) from None
        options = TrtllmOptions(config=path, patience_s=float(patience))
    return options, load_config(path)


def check_engine(llm_args: Any) -> None:
    """Refuse an engine with blocks that the connector does not support.

    Raises
    ------
    ConfigError
        An argument is not supported; says which one, and what to use instead.
    """
    kv = getattr(llm_args, "kv_cache_config", None)
    refused = {
        "pipeline_parallel_size": getattr(llm_args, "pipeline_parallel_size", 1) not in (1, None),
        "context_parallel_size": getattr(llm_args, "context_parallel_size", 1) not in (1, None),
        "enable_attention_dp": bool(getattr(llm_args, "enable_attention_dp", False)),
        "speculative_config": getattr(llm_args, "speculative_config", None) is not None,
        "kv_cache_config.max_attention_window": bool(getattr(kv, "max_attention_window", None)),
        "kv_cache_config.enable_block_reuse": getattr(kv, "enable_block_reuse", True) is False,
    }
    hints = {
        "enable_attention_dp": "ranks with requests of their own are not supported: leave it out",
        "speculative_config": "blocks with drafts are not supported: leave it out",
        "kv_cache_config.max_attention_window": "windows are not supported: leave it out",
        "kv_cache_config.enable_block_reuse": "expected true: else no connector is called",
    }
    for name, is_refused in refused.items():
        if is_refused:
            value = llm_args
            for part in name.split("."):
                value = getattr(value, part)
            hint = hints.get(name, "expected 1: only tensor parallelism is supported")
            raise ConfigError(
                f"{value!r} is not supported with kvladder", path=f"llm_args.{name}", hint=hint
            )
