"""Caches for ``generate`` that grow in place, and a store of prompts' prefixes in a stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvladder.arena import Slot
from kvladder.compose import open_cache
from kvladder.connectors.transformers.layers import LayerShape
from kvladder.connectors.transformers.model import layer_shapes
from kvladder.connectors.transformers.proof import require_row
from kvladder.connectors.transformers.rotations import require_fixed
from kvladder.connectors.watched import Watched
from kvladder.errors import LayoutError
from kvladder.gpu.sizing.grow import STEP, Beams, Growing, growth_step
from kvladder.hints import HintExecutor
from kvladder.hints.requests import RequestHints
from kvladder.hints.requests import begin as begin_hints
from kvladder.keys import START, BlockKey, KeyScheme, namespace
from kvladder.layout import Layout
from kvladder.metrics import Missed


class GrowingBuffer:
    """Memory for the keys, or the values, of one layer, with spare room for more tokens.

    Parameters
    ----------
    step:
        The memory's length is a multiple of this many tokens.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._memory: torch.Tensor | None = None
        self.in_place = False
        """True if the last ``append`` wrote behind the held tokens without moving them."""
        self.copied_bytes = 0
        """Total bytes of held tokens that had to move to other memory."""

    @property
    def bytes(self) -> int:
        """Bytes of the memory, spare room included."""
        return 0 if self._memory is None else self._memory.nbytes

    def append(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return ``held`` followed by ``new`` in one tensor ``[rows, heads, tokens, size]``.

        This works in place if ``new`` fits into the spare room and ``held`` is an earlier result.
        ``held`` may also be a part of such a result.
        """
        length = held.shape[2] if held.numel() else 0
        whole = length + new.shape[2]
        if new.requires_grad and torch.is_grad_enabled():  # backward needs the earlier tensors
            self._memory, self.in_place = None, False
            return torch.cat((held, new), dim=2) if length else new
        memory, start = self._memory, self._start(held) if length else None
        self.in_place = start is not None
        if memory is None or start is None or not self._fits(memory, start + whole, whole):
            rows, heads, _, size = new.shape
            capacity = Growing(self._step, length=whole).capacity
            memory, start = new.new_empty(rows, heads, capacity, size), 0
            if length:
                memory[:, :, :length] = held
                self.copied_bytes += held.nbytes
            self._memory, self.in_place = memory, False
        memory[:, :, start + length : start + whole] = new
        return memory[:, :, start : start + whole]

    def _start(self, held: torch.Tensor) -> int | None:
        """Return the index in the memory of the first token of ``held``, or None if elsewhere."""
        memory = self._memory
        if memory is None or held.stride() != memory.stride() or held.shape[:2] != memory.shape[:2]:
            return None
        if held.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            return None
        return int(held.storage_offset()) // int(memory.stride(2))

    def _fits(self, memory: torch.Tensor, end: int, whole: int) -> bool:
        """Return whether tokens up to ``end`` may be written without leaving most room unused."""
        return end <= memory.shape[2] <= 2 * whole + self._step and not _frozen(memory)


def _frozen(states: torch.Tensor) -> bool:
    """Return whether a tensor is read-only now: made in inference mode, which has ended."""
    return states.is_inference() and not torch.is_inference_mode_enabled()


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of full attention. ``keys`` and ``values`` are views into ``rooms``."""

    keys: Any
    values: Any

    def __init__(self, step: int = STEP) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.rooms = GrowingBuffer(step), GrowingBuffer(step)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens; return the keys and values of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        of_keys, of_values = self.rooms
        self.keys = of_keys.append(self.keys, key_states)
        self.values = of_values.append(self.values, value_states)
        return self.keys, self.values


class GrowingWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer with a sliding window. Its tokens move once in ``step`` tokens, not every time."""

    keys: Any
    values: Any

    def __init__(self, sliding_window: int, step: int = STEP) -> None:
        super().__init__(sliding_window)  # pyright: ignore[reportUnknownMemberType]
        self.rooms = GrowingBuffer(step), GrowingBuffer(step)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens; return the keys and values that they see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        self.cumulative_length += new
        of_keys, of_values = self.rooms
        keys = of_keys.append(self.keys, key_states)
        values = of_values.append(self.values, value_states)
        before = self.sliding_window - 1
        kept = keys.shape[2] if self.record_past else min(keys.shape[2], before)
        self.keys, self.values = _last(keys, kept), _last(values, kept)
        seen = min(keys.shape[2], before + new)
        return _last(keys, seen), _last(values, seen)


def _last(states: torch.Tensor, tokens: int) -> torch.Tensor:
    return states[:, :, states.shape[2] - tokens :]


class GrowingCache(DynamicCache):  # type: ignore[misc]
    """A cache for ``generate(past_key_values=...)`` with layers that grow in place.

    New tokens are written into spare room behind the held ones. Once in ``step`` tokens the memory
    of a layer grows and its tokens move. Layers do so at different times, as in OpenVINO's GPU
    plug-in. If a layer may not write in place, because its tensors were replaced or autograd needs
    them, it moves its tokens first. When beams are reordered, a row copies only the tokens that
    differ from its new parent's. Layers that keep states instead of tokens are transformers' own.

    Parameters
    ----------
    config:
        The model's configuration.
    step:
        Growth step in tokens; layer ``n`` uses ``growth_step(n, step=step)``.
    """

    layers: list[Any]

    def __init__(self, config: Any, *, step: int = STEP) -> None:
        super().__init__(config=config)
        self.layers = [
            _growing(layer, growth_step(number, step=step))
            for number, layer in enumerate(self.layers)
        ]
        self._beams = Beams(1)
        self._parted: int | None = None
        self.began = 0
        """Version number of the model's weights when it began, see ``Prefixes``."""
        self.missed: tuple[Missed, ...] = ()
        """Blocks of the prompt that it did not begin with, by cause; see ``Fetch.missed``."""
        self.served_from: Mapping[str, int] = {}
        """Tokens that it began with, by level."""
        self.waited_s = 0.0
        """Seconds that ``Prefixes.begin`` waited for them."""
        self.hints: RequestHints | None = None
        """The hints that came with the prompt; ``results`` are their outcomes."""

    @property
    def certain(self) -> int:
        """Number of leading tokens of each row that no reordering of rows has changed."""
        held = int(self.get_seq_length())
        return held if self._parted is None else min(held, self._parted)

    @property
    def in_place(self) -> list[bool]:
        """True for each buffer (keys, then values, of each layer) last appended to in place."""
        return [room.in_place for room in self._rooms()]

    @property
    def copied_bytes(self) -> int:
        """Total bytes of tokens that moved because memory grew."""
        return sum(room.copied_bytes for room in self._rooms())

    @property
    def bytes(self) -> int:
        """Bytes of the layers' memory, spare room included."""
        return sum(room.bytes for room in self._rooms())

    def _rooms(self) -> Iterator[GrowingBuffer]:
        for layer in self.layers:
            yield from getattr(layer, "rooms", ())

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's new tokens; return the keys and values that the layer sees.

        Raises
        ------
        LayoutError
            The cache belongs to another model.
        """
        self._require(key_states, layer_idx)
        theirs: Any = super()
        given: tuple[torch.Tensor, torch.Tensor] = theirs.update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return given

    def _require(self, new: torch.Tensor, at: int) -> None:
        hint = "expected a cache of this model: GrowingCache(model.config)"
        if at >= len(self.layers):
            raise LayoutError(
                f"the cache has {len(self.layers)} layers, and no layer {at}", hint=hint
            )
        if not hasattr(self.layers[at], "update"):
            raise LayoutError(
                f"layer {at} of the cache keeps a state, not keys and values", hint=hint
            )
        held = self.layers[at].keys
        if held is not None and held.numel() and held.shape[1::2] != new.shape[1::2]:
            kept, come = (f"{one.shape[1]} heads of {one.shape[3]}" for one in (held, new))
            raise LayoutError(
                f"layer {at} of the cache has {kept}, but the model has {come}", hint=hint
            )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``n`` continue from the tokens of row ``beam_idx[n]``."""
        parents = [int(parent) for parent in beam_idx]
        if len(self._beams) != len(parents):
            self._beams = Beams(len(parents))
        length = self.get_seq_length()
        certain = self.certain
        copies = self._beams.reorder(parents, length)
        if parents != [*range(len(parents))]:
            self._parted = min(certain, self._beams.shared)
        for layer in self.layers:
            kept = getattr(layer, "keys", None)
            if not hasattr(layer, "rooms") or (kept is not None and _frozen(kept)):
                layer.reorder_cache(beam_idx)
            elif kept is not None:
                for states in (layer.keys, layer.values):
                    _take_over(states, copies, length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        super().crop(tokens_to_remove)  # pyright: ignore[reportUnknownMemberType]
        self._beams.crop(self.get_seq_length())
        if self._parted is not None and self.get_seq_length() <= self._parted:
            self._parted = None

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()  # pyright: ignore[reportUnknownMemberType]
        self._beams, self._parted = Beams(1), None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)  # pyright: ignore[reportUnknownMemberType]
        self._beams = Beams(1)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        super().batch_select_indices(indices)  # pyright: ignore[reportUnknownMemberType]
        self._beams = Beams(1)


def _growing(layer: Any, step: int) -> Any:
    if type(layer) is DynamicLayer:
        return GrowingLayer(step)
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingWindowLayer(layer.sliding_window, step)
    return layer


def _take_over(states: torch.Tensor, copies: Sequence[tuple[int, int, int]], length: int) -> None:
    """Copy tokens between rows: ``(source, target, first)``; all sources are read before writing.

    ``states`` may hold only the last of ``length`` tokens.
    """
    before = length - states.shape[2]
    written = {target for _, target, _ in copies}
    parts: list[tuple[int, int, torch.Tensor]] = []
    for source, target, first in copies:
        at = max(0, first - before)
        part = states[source, :, at:]
        parts.append((target, at, part.clone() if source in written else part))
    for target, at, part in parts:
        states[target, :, at:] = part


class Prefixes:
    """Stores the KV cache of prompts in a stack of tiers, for later caches that begin with them.

    For one thread; a context manager.

    Parameters
    ----------
    model:
        A model with full attention in all layers, in evaluation mode.
    source:
        The stack: a YAML file, or a mapping.
    block_tokens:
        Tokens per block.
    overrides:
        Settings that take precedence over those of the file.

    Raises
    ------
    ConfigError, LayoutError
        A setting is wrong, or a layer keeps something other than keys and values of all tokens.
    """

    def __init__(
        self,
        model: Any,
        source: str | Path | Mapping[str, Any],
        *,
        block_tokens: int = 16,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._shapes = layer_shapes(model, context=1 << 62)
        for number, shape in enumerate(self._shapes):
            if shape.window:
                what = f"layer {number} has a window of {shape.window} tokens"
                raise LayoutError(what, hint="expected full attention in all layers")
        require_fixed(model)
        self._weights = Watched(model)
        try:
            layout = Layout(
                block_tokens,
                sum(_bytes(shape, block_tokens) for shape in self._shapes),
                {"engine": "transformers.generate", "model": self._weights.first},
            )
            self.manager = open_cache(source, layout=layout, overrides=overrides)
            """Manager of the cache that holds the blocks."""
        except BaseException:
            self._weights.close()
            raise
        self._scheme = KeyScheme(self.manager.namespace, block_tokens=block_tokens)
        HintExecutor.of(self.manager).name_blocks = self._named

    def _named(self, tokens: Sequence[int], salt: str) -> list[list[BlockKey]]:
        """Return the names of a prompt's blocks under the weights last seen."""
        return [self._scheme.chain(tokens, parent=self._scheme.root(salt=salt))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(
        self,
        tokens: Sequence[int],
        *,
        salt: str = "",
        rows: int = 1,
        step: int = STEP,
        hints: object = None,
    ) -> GrowingCache:
        """Return a cache that holds the longest stored prefix of a prompt.

        The prompt's last token is never included, since a model must compute at least one.
        ``rows`` is the number of rows that ``generate`` makes of the prompt: its beams or returned
        sequences. Waits for tiers up to the stack's ``fetch.deadline``. ``hints`` is an envelope
        that comes with the prompt: actions about its own blocks are done when it is kept.
        """
        self._follow()
        cache = GrowingCache(self._model.config, step=step)
        cache.began = self._weights.changes
        keys = self._scheme.chain(tokens[:-1], parent=self._scheme.root(salt=salt))
        if hints is not None:
            executor = HintExecutor.of(self.manager)
            cache.hints = begin_hints(executor, hints, salt=salt, ranks_saves=False)
        now = self.manager.ladder.clock.now
        began_s, fetch = now(), self.manager.fetch(keys, salt=salt)
        fetch.wait()
        cache.waited_s, cache.missed = now() - began_s, fetch.missed
        size = self._scheme.block_tokens
        cache.served_from = {name: n * size for name, n in Counter(fetch.sources).items()}
        try:
            if fetch.slots:
                blocks = [self._views(slot) for slot in fetch.slots]
                for number in range(len(self._shapes)):
                    states = (
                        torch.cat([block[number][part] for block in blocks], dim=1)
                        .to(self._model.device)
                        .expand(rows, -1, -1, -1)
                        for part in (0, 1)
                    )
                    cache.layers[number].update(*states)
        finally:
            fetch.release()
        return cache

    def keep(self, cache: Any, tokens: Sequence[int], *, salt: str = "") -> int:
        """Save all whole blocks of row 0 of a cache; return how many blocks were new.

        ``tokens`` are those of the row, from the first to the last generated one. After beam
        search, which reorders rows, only the tokens that all rows share are saved. After a change
        of the weights, a cache is saved only if ``begin`` has returned it since.

        Raises
        ------
        LayoutError
            The cache's layers are not this model's, or its row 0 does not hold these tokens:
            there is padding before them, or they are another row's.
        """
        held, size = cache.get_seq_length(), self._scheme.block_tokens
        certain = getattr(cache, "certain", held)
        if len(cache.layers) != len(self._shapes):
            what = f"the cache has {len(cache.layers)} layers"
            raise LayoutError(what, hint=f"expected {len(self._shapes)}, as in the model")
        if certain == held and len(tokens) not in (held, held + 1):
            what = f"{len(tokens)} tokens for a cache that holds {held}"
            hint = f"expected {held}, or {held + 1} with the last generated token: all tokens"
            raise LayoutError(what, hint=f"{hint} of row 0, without padding before them")
        self._follow()
        if getattr(cache, "began", 0) != self._weights.changes:
            return 0
        keys = self._scheme.chain(tokens[:certain], parent=self._scheme.root(salt=salt))
        save = self.manager.save(keys, salt=salt, parent=START)
        done = False
        try:
            if save.indices:
                require_row(self._model, cache, tokens[: (save.indices[-1] + 1) * size])
            for at, slot in zip(save.indices, save.slots, strict=True):
                for layer, views in zip(cache.layers, self._views(slot), strict=True):
                    for states, view in zip((layer.keys, layer.values), views, strict=True):
                        view.copy_(states[0, :, at * size : (at + 1) * size])
            done = True
        finally:
            (save.commit if done else save.abort)()
        hints: RequestHints | None = getattr(cache, "hints", None)
        if hints is not None:
            hints.finish(HintExecutor.of(self.manager), [keys], salt)
        return len(save.slots)

    def updated(self) -> None:
        """Check the model's weights before anything else is found or saved.

        Only needed after writes that leave no trace, such as those to ``parameter.data`` when an
        adapter is merged. Other changes are detected: see ``Watched``.
        """
        self._weights.doubt()

    def _follow(self) -> None:
        """Name blocks by the weights that the model has now."""
        if self._weights.look():
            space, mark = self.manager.namespace, self._weights.mark
            if mark:
                space = namespace({"of": space.hex(), "mark": mark})
            self._scheme = KeyScheme(space, block_tokens=self._scheme.block_tokens)

    def _views(self, slot: Slot) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of each layer's keys and values in a slot, ``[heads, tokens, size]``."""
        memory = torch.frombuffer(self.manager.arena.view(slot), dtype=torch.uint8)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        at, size = 0, self._scheme.block_tokens
        for shape in self._shapes:
            pair: list[torch.Tensor] = []
            for width in (shape.key_size, shape.value_size):
                end = at + shape.heads * size * width * shape.dtype.itemsize
                pair.append(memory[at:end].view(shape.dtype).view(shape.heads, size, width))
                at = end
            found.append((pair[0], pair[1]))
        return found

    def close(self) -> None:
        """Flush to durable levels and close. May be called again."""
        self.manager.close()
        self._weights.close()


def _bytes(shape: LayerShape, tokens: int) -> int:
    """Return the bytes of one layer's keys and values of ``tokens`` tokens."""
    return shape.heads * tokens * (shape.key_size + shape.value_size) * shape.dtype.itemsize
