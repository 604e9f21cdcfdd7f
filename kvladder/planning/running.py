"""What a model keeps, found out by running one token through it; needs torch and transformers.

It runs on torch's device ``meta``, which has shapes and no numbers: nothing is downloaded or
allocated, and code that comes with a model is not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from warnings import catch_warnings, simplefilter

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, cache_utils

from kvladder.gpu.requests.groups import Layer
from kvladder.gpu.sizing.plan import ConvState, Resource, State, fits
from kvladder.planning.reading import ModelFile

_NUMBERS: Final = dict.fromkeys(("item", "__float__", "__index__", "__int__"), 0)
_TRUE: Final = ("__bool__", "__contains__")


class _Numbers(TorchFunctionMode):
    """Answers where a model asks for numbers, which decide nothing about the shapes it keeps."""

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


def run(model: ModelFile) -> tuple[int, list[Resource], str]:
    """The model's number of layers, all that they keep, and how that was found out.

    Raises
    ------
    LayoutError
        It keeps a cache of a kind that is not known here.
    LookupError
        There is no class for this type of model, or the class caches nothing.
    Exception
        What the class raises.
    """
    name, cache = _after_one_token(model)
    kinds: list[Any] = [type(cache), *map(type, cache.layers)]
    for kind in kinds:
        if kind.__module__ != cache_utils.__name__:
            raise model.wrong(f"{name} keeps a cache of its own, {kind.__name__}")
    found = [one for at, layer in enumerate(cache.layers) for one in _kept(at, layer, model)]
    if not found:
        raise LookupError(f"{name} caches nothing")
    apart = ", without its encoder" if model.get("is_encoder_decoder") else ""
    return len(cache.layers), found, f"by one token through {name}{apart}"


def _after_one_token(model: ModelFile) -> tuple[str, Any]:
    """The name of a model's class, and its cache after one token."""
    transformers.logging.set_verbosity_error()
    kinds: Any = CONFIG_MAPPING
    kind: Any = model.whole.get("model_type")
    if kind not in kinds:
        raise LookupError(f"transformers {transformers.__version__} does not know {kind!r}")
    config: Any = kinds[kind].from_json_file(model.file)
    text = config.get_text_config(decoder=True)
    text.is_decoder = True  # what may be an encoder, such as BERT, caches nothing as one
    auto: Any = transformers.AutoModelForCausalLM
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            text = config
        else:
            auto = transformers.AutoModel
    with catch_warnings(), torch.device("meta"), torch.inference_mode(), _Numbers():
        simplefilter("ignore")  # what its class warns of is for those who compute with it
        made = auto.from_config(text, dtype=torch.bfloat16).eval()
        cache = cache_utils.DynamicCache(config=text)
        token = torch.zeros(1, 1, dtype=torch.long)
        answer = made(token, past_key_values=cache, use_cache=True)
    cache = answer.get("past_key_values") or answer.get("cache_params") or cache
    return type(made).__name__, getattr(cache, "self_attention_cache", cache)


def _kept(at: int, layer: Any, model: ModelFile) -> Iterator[Resource]:
    """What one layer of a cache holds: keys and values, an indexer's keys, recurrent states."""
    keys = getattr(layer, "keys", None)
    if keys is not None:
        window = getattr(layer, "sliding_window", None)
        heads, key_size, value_size = keys.shape[1], keys.shape[-1], layer.values.shape[-1]
        if key_size == value_size:
            yield Layer(f"{at}.kv", heads, key_size, model.dtype, window)
        else:  # a latent and what is rotated, or heads of two sizes
            size = heads * (key_size + value_size)
            yield Layer(f"{at}.latent", 1, size, model.dtype, window, factor=1)
    indexer = getattr(layer, "indexer_keys", None)
    if indexer is not None:
        yield Layer(f"{at}.indexer", 1, indexer.shape[-1], model.dtype, factor=1)
    convolutions = _tensors(layer, "conv_states")
    for number, state in _tensors(layer, "recurrent_states").items():
        *heads, head_dim, d_state = 1, 1, *state.shape[1:]
        conv = convolutions.get(number)
        count = torch.Size(heads).numel()
        if conv is not None and not fits(conv.shape[1], count, head_dim, d_state):
            head_dim, d_state = d_state, head_dim  # keys come first in a delta net's state
        yield State(f"{at}.state{number or ''}", count, head_dim, d_state, model.state_dtype)
    for number, conv in convolutions.items():
        width = max(1, conv.shape[-1] - 1)  # the newest input is not kept by engines
        yield ConvState(f"{at}.conv{number or ''}", conv.shape[1], width, model.conv_dtype)


def _tensors(layer: Any, name: str) -> dict[int, torch.Tensor]:
    found: Mapping[int, torch.Tensor | None] = getattr(layer, name, {})
    return {number: state for number, state in found.items() if state is not None}
