"""Reads ``--hicache-storage-backend-extra-config``, and defines how long calls may last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvladder.compose import unrecorded
from kvladder.config.stack import StackConfig
from kvladder.connectors.extra import ExtraOptions, parse_extra
from kvladder.errors import ConfigError
from kvladder.schema import is_list, is_mapping, is_secret, join, masked
from kvladder.units import Duration

WHERE: Final = "--hicache-storage-backend-extra-config"
SGLANGS: Final = ("backend_name", "module_path", "class_name", "interface_v1")
"""Keys for SGLang itself. It removes its other keys before we see them."""
CALL_S: Final = 4.0
"""Seconds after which a call begins nothing new. SGLang ends if one takes 10 s during a flush."""
DEADLINE_MAX: Final = Duration(4)
"""Largest ``fetch.deadline``: together with ``CALL_S`` it must stay below these 10 s."""
_VARIABLE: Final = re.compile(r"\$\{\w+\}")


def parse(extra: Mapping[str, Any]) -> StackConfig:
    """Check the options and return the stack's settings.

    Raises
    ------
    ConfigError
        A key is unknown (the error names the nearest one), a value is wrong, no stack is given, or
        a secret stands where SGLang logs it.
    """
    if not extra.get("interface_v1"):
        hint = 'set "interface_v1": 1, or SGLang copies each page twice'
        raise ConfigError("missing", path=f"{WHERE}.interface_v1", hint=hint)
    ours = {name: value for name, value in extra.items() if name not in SGLANGS}
    for path in _secrets(WHERE, ours):
        what = "SGLang logs its arguments when it starts, so the log would show this value"
        raise ConfigError(what, path=path, hint='put it into a file: "config": "stack.yaml"')
    _, config = parse_extra(ours, ExtraOptions, WHERE)
    if config.record.path is not None:
        with config.source.explained():
            raise unrecorded("SGLang's storage calls")
    deadline = config.fetch.deadline_s
    if deadline > DEADLINE_MAX:
        hint = (
            f"expected at most {DEADLINE_MAX}: SGLang exits if a call takes 10 s while its cache is"
            " flushed"
        )
        with config.source.explained():
            raise ConfigError(str(deadline), path="fetch.deadline", hint=hint)
    return config


def _secrets(path: str, value: object) -> Iterator[str]:
    """Yield the paths of secrets that plain data spells out; ``${NAME}`` is not spelled out."""
    if is_mapping(value):
        for key, item in value.items():
            yield from _secrets(join(path, key), item)
    elif is_list(value):
        for i, item in enumerate(value):
            yield from _secrets(f"{path}[{i}]", item)
    elif isinstance(value, str) and value:
        is_shown = masked(value) != value or is_secret(path)
        if is_shown and not _VARIABLE.search(value):
            yield path
