"""Hugging Face causal language models on block pools: their KV cache is our blocks.

Any model whose layers cache keys and values works, with full attention or sliding windows, on CPU
and on CUDA; what its layers cache is found out by running it once. A batch is computed as if its
requests were padded on the left, which every model and every attention implementation understands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvladder.connectors.weights import model_digest
from kvladder.device.cache import DeviceCache, DeviceGroup, open_device
from kvladder.errors import LayoutError
from kvladder.gpu.copy.pages import copy_tokens
from kvladder.gpu.requests.groups import Group
from kvladder.gpu.requests.requests import Request
from kvladder.manager import FLUSH_TIMEOUT_S


class LayerShape(NamedTuple):
    """What one layer caches per token: ``heads`` times keys and values."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int
    """How many tokens it sees; 0 for all."""

    def group(self, block_tokens: int) -> Group:
        """The group of such layers."""
        kind = f"window{self.window}" if self.window else "full"
        name = f"{kind}-{self.heads}x{self.key_size}+{self.value_size}-{self.dtype}"
        return Group(name, block_tokens, "window" if self.window else "full", self.window)

    def block_shape(self, block_tokens: int) -> tuple[int, int, int]:
        """``[heads, tokens, key and value]`` of a block."""
        return self.heads, block_tokens, self.key_size + self.value_size


def layer_shapes(model: Any, *, context: int) -> list[LayerShape]:
    """What the layers of ``model`` cache, found out by running it on one token.

    A window of ``context`` tokens or more is none.

    Raises
    ------
    LayoutError
        A layer caches something else than keys and values of past tokens.
    """
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
    shapes: list[LayerShape] = []
    for number, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
            raise LayoutError(f"layer {number}: {kind}", hint="expected keys and values per token")
        keys, values = layer.keys, layer.values
        window = int(layer.sliding_window) if layer.is_sliding else 0
        if window >= context:
            window = 0
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window))
    return shapes


class Places(NamedTuple):
    """Where tokens are: their blocks, and their places in them, each ``[rows, tokens]``."""

    blocks: torch.Tensor
    within: torch.Tensor

    def last(self, count: int) -> Places:
        """The last ``count`` tokens of each row."""
        return Places(self.blocks[:, -count:], self.within[:, -count:])


@dataclass(frozen=True)
class _PagedLayer:
    """Keys and values of one layer in the blocks of its group."""

    group: int
    shape: LayerShape
    memory: torch.Tensor
    """``[blocks, heads, tokens, key and value]``."""

    def write(self, places: Places, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep ``[rows, heads, tokens, size]`` at these places."""
        both = torch.cat((keys, values), dim=-1).transpose(1, 2)
        self.memory[places.blocks, :, places.within] = both

    def read(self, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[rows, heads, tokens, size]`` of these places."""
        both = self.memory[places.blocks, :, places.within].transpose(1, 2)
        return both[..., : self.shape.key_size], both[..., self.shape.key_size :]


class _CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer as a model sees it in one forward pass."""

    def __init__(self, layer: _PagedLayer, places: Places, *, longest: int, new: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._layer = layer
        self._places = places
        self._longest = longest
        self._new = new
        self.is_sliding = layer.shape.window > 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the blocks are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new tokens and give all that the layer sees."""
        self._layer.write(self._places.last(self._new), key_states, value_states)
        seen = self.get_mask_sizes(self._new)[0]
        return self._layer.read(self._places.last(seen))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens it sees, and how many of the longest row come before them."""
        window = self._layer.shape.window
        seen = min(self._longest, window - 1 + query_length) if window else self._longest
        return seen, self._longest - seen

    def get_seq_length(self) -> int:
        """Tokens of the longest row that were there before."""
        return self._longest - self._new

    def get_max_length(self) -> int:
        """The window, or -1 for none."""
        return self._layer.shape.window or -1

    def get_max_cache_shape(self) -> int:
        """As it was called in earlier versions."""
        return self.get_max_length()


class PooledModel:
    """A causal language model that computes in the blocks of a device cache.

    An engine begins requests with ``requests.begin``, asks ``prepare`` until they are ready, has
    ``run`` compute what is not cached, appends what it made of the logits, and releases them;
    ``cache.poll`` is called once a step. One thread.

    Parameters
    ----------
    model:
        In evaluation mode, on one device; any ``AutoModelForCausalLM``.
    source:
        The stack: a YAML file, or a mapping. On CPU ``gpu.memory`` says what the blocks may take.
    context:
        Tokens of the longest request, what it generates included.
    block_tokens:
        A power of two above 1.
    step:
        How many tokens of a prompt are computed at a time; None for all.
    overrides:
        Settings above those of the file.

    Raises
    ------
    ConfigError, LayoutError
        A setting is wrong, or a layer caches something else than keys and values.
    """

    def __init__(
        self,
        model: Any,
        source: str | Path | Mapping[str, Any],
        *,
        context: int,
        block_tokens: int = 16,
        step: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.step = step
        shapes = layer_shapes(model, context=context)
        kinds = list(dict.fromkeys(shapes))
        device = model.device

        def allocate(group: int, blocks: int) -> Mapping[str, torch.Tensor]:
            kind = kinds[group]
            names = [f"layer{number}" for number, shape in enumerate(shapes) if shape == kind]
            size = (len(names), blocks, *kind.block_shape(block_tokens))
            whole = torch.zeros(size, dtype=kind.dtype, device=device)
            return dict(zip(names, whole, strict=True))

        groups = [
            DeviceGroup(
                kind.group(block_tokens),
                shapes.count(kind)
                * kind.dtype.itemsize
                * torch.Size(kind.block_shape(block_tokens)).numel(),
            )
            for kind in kinds
        ]
        free_bytes, peak_bytes = _device_memory(model, min(step or context, context))
        self.cache: DeviceCache = open_device(
            source,
            groups,
            allocate,
            fields={"engine": "transformers", "model": model_digest(model)},
            context=context,
            step=step,
            free_bytes=free_bytes,
            peak_bytes=peak_bytes,
            overrides=overrides,
        )
        self.requests = self.cache.requests
        self._closed = False
        self._layers = [
            _PagedLayer(group, shape, self.cache.tensors[group][f"layer{number}"])
            for number, shape in enumerate(shapes)
            for group in (kinds.index(shape),)
        ]

    def prepare(self, request: Request) -> bool:
        """Whether the request can run; makes the copies that it is waiting for."""
        if request.copies and not request.arriving:
            for group, copy in request.copies:
                for layer in self._layers:
                    if layer.group == group:
                        source, target, tokens, _ = copy
                        copy_tokens(
                            layer.memory, source=source, target=target, tokens=tokens, axis=2
                        )
            self.requests.copied(request)
        return request.ready

    def ahead(self, request: Request) -> int:
        """How many of its tokens the next ``run`` computes."""
        left = len(request.tokens) - request.computed
        return left if self.step is None else min(left, self.step)

    def run(self, batch: Sequence[Request]) -> list[torch.Tensor | None]:
        """Compute the next tokens of prepared requests, which have slots for them.

        Returns the logits ``[vocabulary]`` of each request's last token, None where a part of its
        prompt is left.
        """
        by_count: dict[int, list[int]] = {}
        for at, request in enumerate(batch):
            by_count.setdefault(self.ahead(request), []).append(at)
        logits: list[torch.Tensor | None] = [None] * len(batch)
        for new, rows in by_count.items():
            found = self._timed([batch[at] for at in rows], new)
            for at, row in zip(rows, found, strict=True):
                request = batch[at]
                self.requests.commit(request, request.computed + new)
                if request.computed == len(request.tokens):
                    logits[at] = row
        return logits

    def _timed(self, rows: Sequence[Request], new: int) -> torch.Tensor:
        """``_forward``; what prompts take is told to whoever chooses how to preempt."""
        if new == 1:
            return self._forward(rows, new)
        clock = self.cache.manager.ladder.clock
        begun = clock.now()
        logits = self._forward(rows, new)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.cache.preemption.prefilled(new * len(rows), clock.now() - begun)
        return logits

    def _forward(self, rows: Sequence[Request], new: int) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` after the next ``new`` tokens of each."""
        ends = torch.tensor([row.computed + new for row in rows])
        longest = int(ends.max())
        positions = torch.arange(longest) - (longest - ends)[:, None]
        held = positions.clamp(min=0)  # padding is a row's own first token: masked, never garbage
        within = (held % self.block_tokens).to(self.model.device)
        places: list[Places] = []
        for tables in zip(*(row.tables for row in rows), strict=True):
            most = max(map(len, tables))
            table = torch.tensor([[*one, *[0] * (most - len(one))] for one in tables])
            blocks = table.gather(1, held // self.block_tokens)
            places.append(Places(blocks.to(self.model.device), within))
        layers: list[Any] = [
            _CacheLayer(layer, places[layer.group], longest=longest, new=new)
            for layer in self._layers
        ]
        ids = [list(row.tokens[row.computed : row.computed + new]) for row in rows]
        padded = bool((positions < 0).any())
        with torch.inference_mode():
            out = self.model(
                torch.tensor(ids, device=self.model.device),
                attention_mask=(positions >= 0).long().to(self.model.device) if padded else None,
                position_ids=positions[:, -new:].to(self.model.device),
                past_key_values=Cache(layers=layers),
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def close(self) -> None:
        """Hand what is cached to the tiers, flush durable ones, close; may be called again."""
        manager = self.cache.manager
        clock, left_s = manager.ladder.clock, FLUSH_TIMEOUT_S
        if not self._closed:
            self._closed = True
            begun = clock.now()
            self.cache.hand_down(timeout_s=left_s)
            left_s = max(0.0, left_s - (clock.now() - begun))
        self.cache.close(timeout_s=left_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _device_memory(model: Any, tokens: int) -> tuple[int | None, int]:
    """Bytes that are free on the model's device, and that a pass of so many tokens takes."""
    if model.device.type != "cuda":
        return None, 0
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    with torch.inference_mode():
        model(torch.zeros(1, tokens, dtype=torch.long, device=model.device), logits_to_keep=1)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    return free, peak
