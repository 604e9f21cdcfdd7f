"""What a model keeps per token and per sequence, found out from its Hugging Face ``config.json``.

One token is run through it where torch and transformers are installed and know it; else rules read
the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from kvladder.errors import LayoutError
from kvladder.gpu.requests.groups import Layer
from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.planning import rules
from kvladder.planning.reading import ModelFile

_HINT: Final = "leave --model out; the engine names its layout when it starts"
SAID_MAX: Final = 200
"""Characters of an error that are handed on."""


class ModelResources(NamedTuple):
    """What a model keeps."""

    model: ModelFile
    layers: int
    resources: list[ResourceHandler]
    how: str
    """By which way it was found out, in words."""


def kept_by(
    path: Path, *, dtype: str | None = None, state_dtype: str | None = None, hint: str = _HINT
) -> ModelResources:
    """What the model of a ``config.json``, or of the folder that holds it, keeps.

    Parameters
    ----------
    path:
        The file or its folder.
    dtype:
        Of the KV cache; None takes the model's.
    state_dtype:
        Of recurrent states; None takes what the file says of them, or the model's.
    hint:
        What to do where it cannot be found out.

    Raises
    ------
    LayoutError
        It cannot be found out.
    ConfigError
        The file cannot be read.
    """
    model = ModelFile(path, dtype=dtype, hint=hint, state_dtype=state_dtype)
    try:
        from kvladder.planning import running

        return ModelResources(model, *running.run(model))
    except LayoutError:
        raise
    except Exception as error:  # noqa: BLE001 - no such library, or whatever a model's class raises
        why = " ".join(f"{type(error).__name__}: {error}".split())[:SAID_MAX]
        model.hint = f"no token was run, {why}; {hint}"
    layers = rules.layers(model)
    return ModelResources(model, len(layers), [*layers], f"by the keys of the file ({why})")


def bytes_per_token(path: Path, *, dtype: str | None = None) -> int:
    """Bytes of KV per token, all layers and ranks together; see ``kept_by``.

    Raises
    ------
    LayoutError
        It cannot be found out, or the model keeps something else than KV.
    ConfigError
        The file cannot be read.
    """
    found = kept_by(path, dtype=dtype)
    layers = [one for one in found.resources if isinstance(one, Layer)]
    if len(layers) < len(found.resources):
        raise found.model.wrong("not all layers keep KV: some keep a state")
    return sum(layer.token_bytes for layer in layers)
