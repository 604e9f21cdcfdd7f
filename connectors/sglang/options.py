"""What users say in ``--hicache-storage-backend-extra-config``, and how long calls may last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvladder.config.stack import StackConfig
from kvladder.connectors.extra import ExtraOptions, parse_extra
from kvladder.errors import ConfigError
from kvladder.schema import is_list, is_mapping, is_secret, join, masked
from kvladder.units import Duration

WHERE: Final = "--hicache-storage-backend-extra-config"
SGLANGS: Final = ("backend_name", "module_path", "class_name", "interface_v1")
"""What stands there for SGLang itself, beside what it takes out before we see it."""
CALL_S: Final = 4.0
"""After so long a call begins nothing: where one takes 10 s while SGLang flushes, it ends."""
DEADLINE_MAX: Final = Duration(4)
"""How long a piece may take, twice: two are asked for at once."""
_VARIABLE: Final = re.compile(r"\$\{\w+\}")


def parse(extra: Mapping[str, Any]) -> StackConfig:
    """Read and check everything.

    Raises
    ------
    ConfigError
        A key is unknown (the nearest is named), a value is wrong, there is no stack, or a secret
        stands where SGLang logs it.
    """
    if not extra.get("interface_v1"):
        hint = 'write "interface_v1": 1, or SGLang copies each page twice'
        raise ConfigError("missing", path=f"{WHERE}.interface_v1", hint=hint)
    ours = {name: value for name, value in extra.items() if name not in SGLANGS}
    for path in _secrets(WHERE, ours):
        what = "SGLang logs its arguments when it starts: this would be readable there"
        raise ConfigError(what, path=path, hint='put it into a file: "config": "stack.yaml"')
    _, config = parse_extra(ours, ExtraOptions, WHERE)
    deadline = config.fetch.deadline_s
    if deadline > DEADLINE_MAX:
        hint = (
            f"at most {DEADLINE_MAX}: SGLang ends if a call takes 10 s while its cache is flushed"
        )
        with config.source.explained():
            raise ConfigError(str(deadline), path="fetch.deadline", hint=hint)
    return config


def _secrets(path: str, value: object) -> Iterator[str]:
    """Where in plain data a secret is spelled out; ``${NAME}`` spells none out."""
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
