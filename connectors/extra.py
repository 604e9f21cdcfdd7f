"""Reads an engine's extra configuration: the connector's own settings, and those of a stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kvladder.config.settings import Sections
from kvladder.config.sources import SHORT_KEYS
from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError
from kvladder.schema import Settings, convert, keys_of, nearest


class ExtraOptions(Settings, frozen=True, kw_only=True):
    """Settings that every connector has beside those of a stack."""

    config: str | None = None
    """Path of a stack's YAML file; without it, the stack's settings are given beside these."""


T = TypeVar("T", bound=ExtraOptions)


def parse_extra(extra: Mapping[str, Any], wanted: type[T], where: str) -> tuple[T, StackConfig]:
    """Read and check the connector's settings and the stack.

    ``where`` names the extra configuration in errors.

    Raises
    ------
    ConfigError
        A key is unknown (the error names the nearest one), a value is wrong, no stack is given,
        or stack settings stand beside ``config``.
    """
    own = keys_of(wanted)
    stack = [*SHORT_KEYS, *keys_of(Sections), "tiers"]
    for key in extra:
        if key not in own and key not in stack:
            hint = nearest(key, [*own, *stack])
            raise ConfigError("unknown key", path=f"{where}.{key}", hint=hint)
    given = {key: value for key, value in extra.items() if key in own}
    options = convert(given, wanted, where)
    rest = {key: value for key, value in extra.items() if key not in own}
    if options.config is None and not rest:
        hint = 'expected "config" with the path of a stack.yaml, or "host" with a size'
        raise ConfigError("no stack is given", path=where, hint=hint)
    if options.config is not None and rest:
        hint = f"move it into {options.config}"
        raise ConfigError(
            "cannot be combined with config", path=f"{where}.{next(iter(rest))}", hint=hint
        )
    return options, load_config(rest if options.config is None else options.config)
