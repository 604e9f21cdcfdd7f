"""What may stand in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kvladder.config.settings import Count, Sections
from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError
from kvladder.schema import Settings, convert, keys_of, nearest

WHERE = "kv_connector_extra_config"
SHORT_FORM = ("host", "files", "capacity")


class Options(Settings, frozen=True, kw_only=True):
    """The connector's own settings; all others are those of a stack."""

    config: str | None = None
    """Path of a YAML file; without one the stack's settings stand beside these."""
    load: Literal["async", "sync"] = "async"
    """Whether blocks come in between the engine's steps, or before the step that reads them."""
    save_decode: bool = True
    """Whether blocks of generated tokens are saved, too."""
    on_reset: Literal["forget", "keep"] = "forget"
    """What becomes of blocks that no other engine has when vLLM resets the connector's cache."""
    map_priority: Count = 0
    """Points of our priority that one step of vLLM's is worth; 0 leaves vLLM's out."""


def parse(extra: Mapping[str, Any]) -> tuple[Options, StackConfig]:
    """Read and check everything.

    Raises
    ------
    ConfigError
        A key is unknown (the nearest is named), a value is wrong, or there is no stack.
    """
    own = keys_of(Options)
    stack = [*SHORT_FORM, *keys_of(Sections), "tiers"]
    for key in extra:
        if key not in own and key not in stack:
            hint = nearest(key, [*own, *stack])
            raise ConfigError("unknown key", path=f"{WHERE}.{key}", hint=hint)
    given = {key: value for key, value in extra.items() if key in own}
    options = convert(given, Options, WHERE)
    rest = {key: value for key, value in extra.items() if key not in own}
    if options.config is None and not rest:
        hint = 'expected "config" with the path of a stack.yaml, or "host" with a size'
        raise ConfigError("no stack", path=WHERE, hint=hint)
    if options.config is not None and rest:
        hint = f"put it into {options.config}"
        raise ConfigError("stands beside config", path=f"{WHERE}.{next(iter(rest))}", hint=hint)
    config = load_config(rest if options.config is None else options.config)
    if config.events.publish is not None:
        hint = "vLLM publishes KV events itself: use --kv-events-config"
        raise ConfigError(config.events.publish, path="events.publish", hint=hint)
    return options, config
