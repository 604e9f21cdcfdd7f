"""Finds out what a model keeps per token and sequence, from its Hugging Face ``config.json``.

If torch and transformers are installed and know the model, one token is run through it. Otherwise
rules read the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from kvladder.errors import LayoutError
from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.gpu.sizing.groups import Layer
from kvladder.planning import rules
from kvladder.planning.reading import ModelFile

_HINT: Final = "leave out --model; the engine reports its layout when it starts"
SAID_MAX: Final = 200
"""Highest number of characters quoted from an error."""


class ModelResources(NamedTuple):
    """The resources that a model keeps."""

    model: ModelFile
    layers: int
    resources: list[ResourceHandler]
    how: str
    """Way in which they were found out, in words."""


def kept_by(
    path: Path, *, dtype: str | None = None, state_dtype: str | None = None, hint: str = _HINT
) -> ModelResources:
    """Return what the model of a ``config.json`` keeps.

    Parameters
    ----------
    path:
        The file or its folder.
    dtype:
        Data type of the KV cache; None takes the model's.
    state_dtype:
        Data type of recurrent states; None takes the one in the file, else the model's.
    hint:
        Advice for errors: what to do if it cannot be found out.

    Raises
    ------
    LayoutError
        The resources cannot be found out.
    ConfigError
        The file cannot be read.
    """
    model = ModelFile(path, dtype=dtype, hint=hint, state_dtype=state_dtype)
    try:
        from kvladder.planning import running

        return ModelResources(model, *running.run(model))
    except LayoutError:
        raise
    except ModuleNotFoundError as error:
        what = f"no {error.name}: install kvladder[transformers] for exact sizes"
    except Exception as error:  # noqa: BLE001 - whatever a model's class raises
        what = " ".join(f"{type(error).__name__}: {error}".split())[:SAID_MAX]
    model.hint = f"the model could not be run: {what}; {hint}"
    layers = rules.layers(model)
    return ModelResources(model, len(layers), [*layers], f"estimated from config.json ({what})")


def bytes_per_token(path: Path, *, dtype: str | None = None) -> int:
    """Return the bytes of KV per token, all layers and ranks together; see ``kept_by``.

    Raises
    ------
    LayoutError
        The resources cannot be found out, or the model keeps something other than KV.
    ConfigError
        The file cannot be read.
    """
    found = kept_by(path, dtype=dtype)
    layers = [one for one in found.resources if isinstance(one, Layer)]
    if len(layers) < len(found.resources):
        raise found.model.wrong("some layers cache something other than keys and values")
    return sum(layer.token_bytes for layer in layers)
