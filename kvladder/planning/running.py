"""Finds out what a model keeps by running one token through it; needs torch and transformers.

The model runs on torch's device ``meta``, which has shapes and no numbers. Nothing is downloaded
or allocated, and code that comes with a model is not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from warnings import catch_warnings, simplefilter

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, cache_utils

from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.handlers import ConvState, State
from kvladder.planning.collecting import collected
from kvladder.planning.reading import ModelFile

_NUMBERS: Final = dict.fromkeys(("item", "__float__", "__index__", "__int__"), 0)
_TRUE: Final = ("__bool__", "__contains__")
_OURS: Final = (Layer.__module__, State.__module__)


class _Numbers(TorchFunctionMode):
    """Gives a model fixed numbers when it asks for some; they do not affect the shapes it keeps."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _TRUE:
            return True
        if name in _NUMBERS:
            return _NUMBERS[name]
        if name == "nonzero":
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def run(model: ModelFile) -> tuple[int, list[ResourceHandler], str]:
    """Return a model's number of layers, all that they keep, and how that was found out.

    Raises
    ------
    LayoutError
        The model keeps a cache of an unknown kind.
    LookupError
        There is no class for this type of model, or the class caches nothing.
    Exception
        The class raised it.
    """
    name, cache = _after_one_token(model)
    kinds: list[Any] = [*map(type, cache.layers)]
    unknown: list[Any] = [type(cache)]
    by_layer: list[list[ResourceHandler]] = []
    if type(cache).__module__ == cache_utils.__name__:
        by_layer = collected(cache.layers)
        unknown = [
            kind
            for kind, kept in zip(kinds, by_layer, strict=True)
            if kind.__module__ != cache_utils.__name__
            and all(type(one).__module__ in _OURS for one in kept)
        ]
    for kind in unknown:
        hint = f"write a handler for it (docs/how-to/write-a-handler.md); {model.hint}"
        raise model.wrong(f"{name} uses a cache class of its own, {kind.__name__}", hint=hint)
    found = [_typed(one, model) for kept in by_layer for one in kept]
    if not found:
        raise LookupError(f"{name} caches nothing")
    apart = ", without its encoder" if model.get("is_encoder_decoder") else ""
    return len(cache.layers), found, f"measured by running one token through {name}{apart}"


def _after_one_token(model: ModelFile) -> tuple[str, Any]:
    """Return the name of a model's class, and its cache after one token."""
    transformers.logging.set_verbosity_error()
    kinds: Any = CONFIG_MAPPING
    kind: Any = model.whole.get("model_type")
    if kind not in kinds:
        raise LookupError(f"transformers {transformers.__version__} does not know {kind!r}")
    config: Any = kinds[kind].from_json_file(model.file)
    text = config.get_text_config(decoder=True)
    text.is_decoder = True  # models such as BERT cache nothing as encoders
    auto: Any = transformers.AutoModelForCausalLM
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            text = config
        else:
            auto = transformers.AutoModel
    with catch_warnings(), torch.device("meta"), torch.inference_mode(), _Numbers():
        simplefilter("ignore")  # warnings of the class concern real computation
        made = auto.from_config(text, dtype=torch.bfloat16).eval()
        cache = cache_utils.DynamicCache(config=text)
        token = torch.zeros(1, 1, dtype=torch.long)
        answer = made(token, past_key_values=cache, use_cache=True)
    cache = answer.get("past_key_values") or answer.get("cache_params") or cache
    return type(made).__name__, getattr(cache, "self_attention_cache", cache)


def _typed(one: ResourceHandler, model: ModelFile) -> ResourceHandler:
    """Return a resource with the data type that the file gives; others keep the type found."""
    types: dict[type[ResourceHandler], str] = {
        Layer: model.dtype,
        State: model.state_dtype,
        ConvState: model.conv_dtype,
    }
    dtype = types.get(type(one))
    known: Any = one
    return one if dtype is None else replace(known, dtype=dtype)
