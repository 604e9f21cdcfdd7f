"""What a model keeps per token and per sequence, read from its Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvladder.errors import ConfigError, LayoutError
from kvladder.gpu.requests.groups import ITEM_BYTES, Layer
from kvladder.gpu.sizing.plan import ConvState, Resource, State
from kvladder.planning.defaults import REFUSED_KEYS, REFUSED_TYPES, defaults
from kvladder.schema import is_list, is_mapping

_HINT: Final = "leave --model out; the engine names its layout when it starts"
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM: Final = ("head_dim", "attention_head_dim", "kv_channels")
_WINDOW: Final = ("sliding_window", "sliding_window_size")
_D_STATE: Final = ("mamba_d_state", "ssm_state_size", "state_size")
_KINDS: Final[Mapping[str, str]] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "section",
    "mamba": "mamba",
    "linear_attention": "linear",
    "conv": "conv",
    "hybrid": "both",
    "mlp": "none",
    "moe": "none",
}
_PATTERN: Final[Mapping[str, str]] = {"M": "mamba", "*": "full", "-": "none", "E": "none"}
"""Nemotron-H's letters."""


class ModelConfig:
    """A model's configuration; what is missing or wrong raises LayoutError naming the file.

    ``dtype`` is that of its KV cache, None the model's; ``hint`` what to do where the file does
    not do.
    """

    def __init__(self, path: Path, *, dtype: str | None = None, hint: str = _HINT) -> None:
        self.file = path / "config.json" if path.is_dir() else path
        found = _read(self.file)
        text = found.get("text_config")
        if is_mapping(text):  # a multimodal model: the language model within
            found = {**found, **text}
        self.values: Mapping[str, Any] = {**defaults(found.get("model_type")), **found}
        self._hint = hint
        name: Any = dtype or found.get("dtype") or found.get("torch_dtype")
        if name not in ITEM_BYTES:
            hint = f"--dtype with one of: {', '.join(ITEM_BYTES)}"
            raise self.wrong(f"dtype {name!r}", hint=hint)
        self.dtype: str = name
        """Of the KV cache."""
        own: Any = found.get("dtype") or found.get("torch_dtype")
        self.conv_dtype: str = own if own in ITEM_BYTES else "float32"
        """Of the inputs that convolutions keep: the model's own."""
        state: Any = found.get("mamba_ssm_dtype")
        self.state_dtype: str = state if state in ITEM_BYTES else self.conv_dtype

    def wrong(self, what: str, *, hint: str | None = None) -> LayoutError:
        """An error that names the file."""
        return LayoutError(what, path=str(self.file), hint=self._hint if hint is None else hint)

    def get(self, *names: str) -> Any:
        """The first of these keys that has a value, or None."""
        return next((self.values[n] for n in names if self.values.get(n) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """The same, as a number of 1 or more; without a default it must be there."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            what = "missing" if value is None else repr(value)
            raise self.wrong(f"{names[0]}: {what}")
        return value

    def kinds(self) -> list[str]:
        """By layer: full, window, section, latent, mamba, linear, conv, both (attention and mamba).

        ``none`` where a layer keeps nothing, or has its keys and values from another one.
        """
        self._require_understood()
        found = self._own_kinds()
        shared = self.get("num_kv_shared_layers") or 0
        if not isinstance(shared, int) or not 0 <= shared < len(found):
            raise self.wrong(f"num_kv_shared_layers: {shared!r} of {len(found)} layers")
        return [*found[: len(found) - shared], *["none"] * shared]

    def _require_understood(self) -> None:
        """Raise LayoutError where a key changes what layers keep, in a way that is not read."""
        for key in REFUSED_KEYS:
            if self.get(key):
                raise self.wrong(f"{key}: what layers keep of it is not known")
        model = self.get("model_type")
        if model in REFUSED_TYPES:
            raise self.wrong(f"model_type: what layers of {model} keep is not known")
        kinds = self.get("attn_type_list")  # MiniMax
        if kinds is not None and not (is_list(kinds) and all(kind == 1 for kind in kinds)):
            raise self.wrong("attn_type_list: not all layers have attention")

    def _own_kinds(self) -> list[str]:
        """The kinds as if no layer shared another one's keys and values."""
        pattern = self.get("hybrid_override_pattern")
        if isinstance(pattern, str):
            if unknown := set(pattern) - _PATTERN.keys():
                raise self.wrong(f"not all layers keep KV: {', '.join(sorted(unknown))}")
            return [_PATTERN[letter] for letter in pattern]
        named = self.get("layer_types", "layers_block_type")
        count = self.number(*_LAYERS, default=len(named) if is_list(named) else None)
        if is_list(named):
            unknown = {str(kind) for kind in named} - _KINDS.keys()
            if unknown or len(named) != count:
                what = ", ".join(sorted(unknown)) or f"{len(named)} kinds for {count} layers"
                raise self.wrong(f"not all layers keep KV: {what}")
            return [self._special(_KINDS[str(kind)]) for kind in named]
        return [self._special(kind) for kind in self._by_period(count)]

    def _special(self, kind: str) -> str:
        """What a kind of layer stands for in this model."""
        if kind == "full" and self.get("kv_lora_rank") is not None:
            return "latent"
        if kind == "linear" and self.get(*_D_STATE) is not None:
            return "mamba"
        return kind

    def _every(self, name: str, at: object = None) -> tuple[int, int]:
        """A period, and which layer of it is meant: ``at``, or its last."""
        every = self.number(name)
        at = every - 1 if at is None else at
        if not isinstance(at, int) or not 0 <= at < every:
            raise self.wrong(f"{name}: {every}, and {at!r} is not one of them")
        return every, at

    def _by_period(self, count: int) -> list[str]:
        """Kinds of layers where the file gives a rule instead of a list."""
        model = self.get("model_type")
        if model == "falcon_h1":
            return ["both"] * count
        if model in ("mamba", "mamba2", "falcon_mamba"):
            return ["mamba"] * count
        if self.get("full_attention_interval") is not None:
            every, last = self._every("full_attention_interval")
            return ["full" if at % every == last else "linear" for at in range(count)]
        if self.get("attn_layer_period") is not None and model != "zamba":
            every, own = self._every("attn_layer_period", self.values.get("attn_layer_offset", 0))
            return ["full" if at % every == own else "mamba" for at in range(count)]
        if is_list(named := self.get("attn_layer_indices")):
            return ["full" if at in named else "mamba" for at in range(count)]
        if is_list(named := self.get("full_attn_idxs")):
            return ["full" if at in named else "conv" for at in range(count)]
        if self.get(*_D_STATE, "ssm_cfg") is not None:
            raise self.wrong("not all layers keep KV, and the file does not say which")
        if self.get("attention_chunk_size") is not None:
            return self._sections(count)
        if self.get(*_WINDOW) is None or self.get("use_sliding_window") is False:
            return ["full"] * count
        if self.get("use_sliding_window") is True:  # Qwen: only the layers from here on
            first = self.get("max_window_layers")
            if not isinstance(first, int):
                raise self.wrong(f"max_window_layers: {first!r}")
            return ["full" if at < first else "window" for at in range(count)]
        for name in ("_sliding_window_pattern", "sliding_window_pattern"):
            if self.get(name) is not None:
                every, last = self._every(name)
                return ["full" if at % every == last else "window" for at in range(count)]
        return ["window"] * count

    def _sections(self, count: int) -> list[str]:
        """Llama 4: local attention in the layers that have rotary embeddings."""
        rotary = self.get("no_rope_layers")
        if not rotary:
            every, last = self._every("no_rope_layer_interval")
            rotary = [at % every != last for at in range(count)]
        if not is_list(rotary) or len(rotary) != count:
            raise self.wrong(f"no_rope_layers: {rotary!r} for {count} layers")
        return ["section" if one else "full" for one in rotary]

    def resources(self) -> list[Resource]:
        """Everything the model keeps, layer by layer."""
        found: list[Resource] = []
        for at, kind in enumerate(self.kinds()):
            if kind in ("full", "window", "section", "both"):
                found.append(self._layer(at, kind))
            if kind == "latent":
                size = self.number("kv_lora_rank") + self.number("qk_rope_head_dim")
                found.append(Layer(f"{at}.latent", 1, size, self.dtype, factor=1))
            if kind in ("mamba", "both"):
                found += self._mamba(at)
            if kind == "linear":
                found += self._linear(at)
            if kind == "conv":
                width = max(1, self.number("conv_L_cache") - 1)
                size = self.number("conv_dim", *_HIDDEN)
                found.append(ConvState(f"{at}.conv", size, width, self.conv_dtype))
        return found

    def _layer(self, at: int, kind: str) -> Layer:
        heads = self.number(*_HEADS)
        kv_heads = self.number(*_KV_HEADS, default=heads)
        inner = self.get("attn_config")
        if is_mapping(inner) and isinstance(inner.get("kv_n_heads"), int):
            kv_heads = inner["kv_n_heads"]
        if self.get("multi_query") is True and not self.get("new_decoder_architecture"):
            kv_heads = 1
        if self.get("multi_query_attention") is True:  # ChatGLM
            kv_heads = self.number("multi_query_group_num")
        if self.get("model_type") in ("zamba", "zamba2"):  # of what a layer gets and the embedding
            head_dim = 2 * self.number(*_HIDDEN) // heads
        elif self.get(*_HEAD_DIM) is not None:
            head_dim = self.number(*_HEAD_DIM)
        else:
            head_dim = self.number(*_HIDDEN) // heads
        if self.get("v_head_dim") not in (None, head_dim):
            raise self.wrong(f"v_head_dim: {self.get('v_head_dim')!r}, keys have {head_dim}")
        window = None
        if kind == "window":
            window = self.number(*_WINDOW)
        elif kind == "section":
            window = self.number("attention_chunk_size")
        return Layer(f"{at}.kv", kv_heads, head_dim, self.dtype, window)

    def _mamba(self, at: int) -> list[Resource]:
        """A Mamba layer's state and the inputs that its convolution still needs."""
        d_state = self.number(*_D_STATE)
        kernel = self.number("mamba_d_conv", "conv_kernel", "d_conv", default=4)
        model = self.get("model_type")
        own = {"mamba2": ["num_heads"], "zamba2": ["n_mamba_heads"]}.get(str(model), [])
        names = ("mamba_n_heads", "mamba_num_heads", *own)
        if self.get(*names) is None:  # Mamba 1: a state per channel
            expand = self.number("mamba_expand", "expand", default=2)
            inner = self.get("mamba_d_ssm", "intermediate_size") if self._pure() else None
            channels = inner or expand * self.number(*_HIDDEN)
            state = State(f"{at}.state", 1, channels, d_state, self.state_dtype)
            return [state, ConvState(f"{at}.conv", channels, max(1, kernel - 1), self.conv_dtype)]
        heads = self.number(*names)
        sizes = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
        head_dim = self.get(*sizes, *(["head_dim"] if model == "mamba2" else []))
        if not isinstance(head_dim, int):  # "auto"
            head_dim = self.number("mamba_expand", default=2) * self.number(*_HIDDEN) // heads
        groups = self.number("mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
        conv_dim = heads * head_dim + 2 * groups * d_state
        state = State(f"{at}.state", heads, head_dim, d_state, self.state_dtype)
        return [state, ConvState(f"{at}.conv", conv_dim, max(1, kernel - 1), self.conv_dtype)]

    def _pure(self) -> bool:
        return self.get("model_type") in ("mamba", "falcon_mamba")

    def _linear(self, at: int) -> list[Resource]:
        """A gated delta net's state: keys by values, per head of values."""
        heads, keys = self.number("linear_num_value_heads"), self.number("linear_key_head_dim")
        values = self.number("linear_value_head_dim")
        conv_dim = 2 * self.number("linear_num_key_heads") * keys + heads * values
        width = max(1, self.number("linear_conv_kernel_dim") - 1)
        state = State(f"{at}.state", heads, values, keys, self.state_dtype)
        return [state, ConvState(f"{at}.conv", conv_dim, width, self.conv_dtype)]


def bytes_per_token(path: Path, *, dtype: str | None = None) -> int:
    """Bytes of KV per token, all layers and ranks together.

    Parameters
    ----------
    path:
        A model's ``config.json``, or the folder that holds it.
    dtype:
        Of the KV cache; None takes the model's.

    Raises
    ------
    LayoutError
        The file does not say it, or the model keeps something else than KV.
    ConfigError
        The file cannot be read.
    """
    model = ModelConfig(path, dtype=dtype)
    found = model.resources()
    layers: Sequence[Layer] = [one for one in found if isinstance(one, Layer)]
    if len(layers) < len(found):
        raise model.wrong("not all layers keep KV: some keep a state")
    return sum(layer.token_bytes for layer in layers)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(why, path=str(file), hint="expected a model's config.json") from error
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", path=str(file)) from error
    if not is_mapping(found):
        raise ConfigError("not a JSON object", path=str(file), hint="a model's config.json")
    return found
