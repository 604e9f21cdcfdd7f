"""Reads a model's ``config.json``: its values, and the data types of its caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvladder.errors import ConfigError, LayoutError
from kvladder.gpu.sizing.base import ITEM_BYTES
from kvladder.schema import is_mapping


class ModelFile:
    """A model's configuration. Missing or wrong values raise LayoutError, which names the file.

    ``dtype`` is the data type of its KV cache, ``state_dtype`` that of recurrent states. None for
    ``dtype`` takes the model's. None for ``state_dtype`` takes the file's ``mamba_ssm_dtype``, else
    the model's. ``hint`` is advice for errors: what to do if the file does not suffice.
    """

    def __init__(
        self, path: Path, *, dtype: str | None, hint: str, state_dtype: str | None = None
    ) -> None:
        self.file = path / "config.json" if path.is_dir() else path
        self.whole: Mapping[str, Any] = _read(self.file)
        """Content of the file."""
        text = self.whole.get("text_config")
        self.values = {**self.whole, **text} if is_mapping(text) else self.whole
        """Values of the language model; a multimodal model has them in ``text_config``."""
        self.hint = hint
        said = ("dtype", "torch_dtype")
        own: Any = self.get(*said) or next(filter(None, map(self.whole.get, said)), None)
        name = dtype or own
        if name not in ITEM_BYTES:
            hint = f"set --dtype to one of: {', '.join(ITEM_BYTES)}"
            raise self.wrong(f"unsupported dtype {name!r}", hint=hint)
        self.dtype: str = name
        """Data type of the KV cache."""
        self.conv_dtype: str = own if own in ITEM_BYTES else "float32"
        """Data type of the inputs that convolutions keep: the model's own."""
        state: Any = state_dtype or self.get("mamba_ssm_dtype")
        if state_dtype not in {None, *ITEM_BYTES}:
            hint = f"set --state-dtype to one of: {', '.join(ITEM_BYTES)}"
            raise self.wrong(f"unsupported state dtype {state_dtype!r}", hint=hint)
        self.state_dtype: str = state if state in ITEM_BYTES else self.conv_dtype

    def wrong(self, what: str, *, hint: str | None = None) -> LayoutError:
        """Return an error that names the file."""
        return LayoutError(what, path=str(self.file), hint=self.hint if hint is None else hint)

    def get(self, *names: str) -> Any:
        """Return the value of the first of these keys that has one, or None."""
        return next((self.values[n] for n in names if self.values.get(n) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the same as ``get``, as a number of 1 or more.

        Raises LayoutError if it is not one, or is missing and there is no default.
        """
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            what = "missing" if value is None else repr(value)
            raise self.wrong(f"{names[0]}: {what}")
        return value


def _read(file: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(why, path=str(file), hint="expected a model's config.json") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", path=str(file)) from error
    if not is_mapping(found):
        hint = "expected a model's config.json"
        raise ConfigError("not a JSON object", path=str(file), hint=hint)
    return found
