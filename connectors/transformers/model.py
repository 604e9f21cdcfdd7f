"""Hugging Face causal language models on block pools: their KV cache is our blocks.

Supports any model with layers that keep keys and values (full attention or sliding windows),
recurrent states behind a convolution, or both, on CPU and on CUDA. One run of the model shows what
its layers keep. A batch is computed as if its requests were padded on the left, which every
attention implementation supports. A model that takes no positions gets only requests of equal
length in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from transformers.cache_utils import Cache

from kvladder.connectors.transformers.layers import (
    LayerResources,
    LayerShape,
    PagedLayer,
    Pass,
    PassPlan,
    TokenPlaces,
    cache_name,
    goes_on,
    in_blocks,
    kept_by_layers,
    takes_positions,
)
from kvladder.connectors.transformers.rotations import Rotations
from kvladder.connectors.transformers.windows import narrowed, sources
from kvladder.connectors.watched import Watched
from kvladder.device.cache import DeviceCache
from kvladder.device.memory import PlanMemory
from kvladder.device.opening import open_device
from kvladder.errors import ConfigError, LayoutError
from kvladder.gpu.copy.pages import copy_tokens
from kvladder.gpu.copy.ranges import ranged
from kvladder.gpu.requests.requests import Request
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.manager import FLUSH_TIMEOUT_S


def layer_shapes(model: Any, *, context: int) -> list[LayerShape]:
    """Return the layers' shapes of a model with attention only, see ``kept_by_layers``.

    Raises
    ------
    LayoutError
        As from ``kept_by_layers``, or a layer has a state.
    """
    shapes: list[LayerShape] = []
    for number, kept in enumerate(kept_by_layers(model, context=context)):
        if kept.shape is None or kept.states:
            raise LayoutError(f"layer {number} has a state", hint="expected only keys and values")
        shapes.append(kept.shape)
    return shapes


class PassRow(Protocol):
    """Part of a request that a pass reads."""

    @property
    def tokens(self) -> Sequence[int]:
        """All token ids."""
        ...

    @property
    def computed(self) -> int:
        """Number of leading tokens with KV in the blocks."""
        ...

    @property
    def tables(self) -> list[list[Any]]:
        """Slots of its blocks, by group."""
        ...


class _Measured(NamedTuple):
    """A row for a pass that is only measured."""

    tokens: Sequence[int]
    computed: int
    tables: list[list[Any]]


class PooledModel:
    """A causal language model that computes in the blocks of a device cache.

    An engine begins requests with ``requests.begin`` and calls ``prepare`` until they are ready.
    ``run`` computes what is not cached; the engine appends the tokens that it chose and in the end
    releases the requests. It calls ``cache.poll`` once a step. For one thread.

    Parameters
    ----------
    model:
        Any ``AutoModelForCausalLM``, in evaluation mode, on one device.
    source:
        The stack: a YAML file, or a mapping. On CPU ``gpu.memory`` is the memory for blocks.
    context:
        Tokens of the longest request, generated ones included. The model's rotation of tokens may
        depend on the length of the text (LongRoPE, dynamic NTK). Then all requests use the rotation
        for this length, as in vLLM, and it is part of the blocks' names.
    block_tokens:
        A power of two above 1.
    step:
        Tokens of a prompt computed at a time; None for all.
    checkpoint_tokens:
        Distance in tokens between states that a recurrent or hybrid model keeps for later requests,
        a multiple of ``block_tokens``; a pass ends there. With 0 no state is kept, so nothing is
        reused.
    overrides:
        Settings that take precedence over those of the file.

    Raises
    ------
    ConfigError, LayoutError
        A setting is wrong, or the memory does not suffice. Or a layer keeps something other than
        keys and values or a state behind a convolution. Or the rotation depends on the length of
        the text and cannot be fixed.
    """

    def __init__(
        self,
        model: Any,
        source: str | Path | Mapping[str, Any],
        *,
        context: int,
        block_tokens: int = 16,
        step: int | None = None,
        checkpoint_tokens: int = 0,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.step = step
        kept = kept_by_layers(model, context=context)
        self.rotations = Rotations(model, context=context)
        """Rotations that all requests use."""
        self.plan = CachePlan(
            [one for layer in kept for one in layer.handlers],
            block_tokens=block_tokens,
            max_tokens=context,
            step=step,
            checkpoint_tokens=checkpoint_tokens,
        )
        states = any(layer.states for layer in kept)
        self._checkpoint = checkpoint_tokens if states else 0
        self._one_by_one = states and not goes_on(model)
        self._by_states = states
        self._name = cache_name(model)
        self._attends = any(layer.shape is not None for layer in kept)
        self._padded = not self._attends or takes_positions(model)
        self._layers: list[PagedLayer] = []
        self._sources: Mapping[int, int] = {}
        self._closed = False
        self._mark = ""
        self._weights = Watched(model)
        try:
            self._open(source, kept, context, overrides)
        except BaseException:
            self._weights.close()
            raise
        self.requests = self.cache.requests
        self.requests.on_begin = self._follow

    def _open(
        self,
        source: str | Path | Mapping[str, Any],
        kept: Sequence[LayerResources],
        context: int,
        overrides: Mapping[str, Any] | None,
    ) -> None:
        """Open the device cache, and make the views of the model's layers in it."""
        model = self.model

        def forward(memory: PlanMemory) -> int:
            self._layers = in_blocks(kept, memory)
            try:
                return self._peak_bytes(min(self._ahead(0, context), context))
            finally:
                self._layers = []  # so that the memory can be given back

        on_cuda = model.device.type == "cuda"
        self.cache: DeviceCache = open_device(
            source,
            self.plan,
            fields={
                "engine": "transformers",
                "model": self._weights.first,
                **self.rotations.fields,
            },
            device=model.device,
            free_bytes=_free_bytes(model) if on_cuda else None,
            forward=forward if on_cuda else None,
            overrides=overrides,
        )
        try:
            self._layers = in_blocks(kept, self.cache.memory)
            if any(self._narrowed.values()):
                self._sources = sources(model)
        except (ConfigError, LayoutError):
            self.cache.close()
            raise

    def updated(self) -> None:
        """Check the model's weights before anything else is served or computed.

        Only needed after writes that leave no trace, such as those to ``parameter.data`` when an
        adapter is merged. Other changes are detected: see ``Watched``.
        """
        self._weights.doubt()

    def _follow(self) -> bool:
        """Name blocks by the model's current weights; return whether these have changed."""
        if not self._weights.look() or self._weights.mark == self._mark:
            return False
        self._mark = self._weights.mark
        self.cache.rename(self._mark)
        return True

    def prepare(self, request: Request) -> bool:
        """Make the copies that a request is waiting for; return whether it can run."""
        if request.copies and not request.arriving:
            for group, (source, target, tokens, _) in request.copies:
                state = self.requests.groups[group].kind == "state"
                for view in self.cache.tensors[group].values():
                    if state:
                        view[target] = view[source]
                    else:
                        axis = view.dim() - 3  # the last dimensions are tokens, heads, size
                        copy_tokens(view, source=source, target=target, tokens=tokens, axis=axis)
            self.requests.copied(request)
        return request.ready

    def ahead(self, request: Request) -> int:
        """Return how many of its tokens the next ``run`` computes."""
        return self._ahead(request.computed, len(request.tokens))

    def _ahead(self, computed: int, count: int) -> int:
        left = count - computed
        if self._one_by_one and computed:
            return min(left, 1)
        if self.step is not None:
            left = min(left, self.step)
        if self._checkpoint:
            left = min(left, self._checkpoint - computed % self._checkpoint)
        return left

    def room(self, request: Request) -> int:
        """Return how many tokens its slots can hold, in the group with the fewest."""
        sizes = (group.block_tokens for group in self.requests.groups)
        return min(len(one) * size for one, size in zip(request.tables, sizes, strict=True))

    def run(
        self, batch: Sequence[Request], drafts: Sequence[int] = ()
    ) -> list[torch.Tensor | None]:
        """Compute the next tokens of prepared requests, which must have slots for them.

        ``drafts`` is the number of draft tokens at the end of each request, by default 0. Call
        ``accept`` afterwards with the number of right ones.

        Returns the logits ``[1 + drafts, vocabulary]`` of each request's last tokens, or None if a
        part of its prompt is left. If the model's weights have changed since the requests were
        computed, nothing is computed: the requests are ``lost``, and the result is None for all.

        Raises
        ------
        ConfigError, ValueError
            There are drafts, but the model keeps states, or one pass cannot compute them together
            with the token before them. Nothing was computed.
        """
        if self._follow():
            return [None] * len(batch)
        counts = drafts or [0] * len(batch)
        alike: dict[tuple[int, int, bool, int], list[int]] = {}
        for at, (request, count) in enumerate(zip(batch, counts, strict=True)):
            new = self.ahead(request)
            if count:
                self._require_verifiable(request, new, count)
            begun = self._by_states and request.computed > 0
            length = 0 if self._padded else request.computed + new
            alike.setdefault((new, count, begun, length), []).append(at)
        logits: list[torch.Tensor | None] = [None] * len(batch)
        for (new, count, *_), rows in alike.items():
            with ranged("forward", new * len(rows)):
                found = self._timed([batch[at] for at in rows], new, 1 + count)
            for at, row in zip(rows, found, strict=True):
                request = batch[at]
                complete = request.computed + new == len(request.tokens)
                self.requests.commit(request, request.computed + new - count)
                if complete:
                    logits[at] = row
        return logits

    def accept(self, request: Request, right: int) -> None:
        """Keep the first ``right`` drafts that ``run`` computed, and remove the others."""
        end = request.computed + right
        self.requests.rewind(request, len(request.tokens) - end)
        self.requests.commit(request, end)

    def require_drafts(self) -> None:
        """Raise ConfigError if the model keeps states: its requests cannot have drafts."""
        if self._by_states:
            name = next(one.name for one in self.plan.states)
            hint = "expected only keys and values: leave the drafts out; beams are supported"
            what = f"{name} is a state, and wrong drafts cannot be removed from a state"
            raise ConfigError(what, path="drafts", hint=hint)

    def _require_verifiable(self, request: Request, new: int, count: int) -> None:
        """Raise the errors of ``run`` about drafts."""
        self.require_drafts()
        left = len(request.tokens) - request.computed
        if not 0 < count < left == new:
            hint = f"expected 0 .. {new - 1}, and {new} tokens left, found {left}"
            raise ValueError(f"{count} drafts: {hint}")

    def _timed(self, rows: Sequence[Request], new: int, wanted: int) -> torch.Tensor:
        """Run ``_forward``; report the time that prompts take to the choice of preemption."""
        if new == wanted:
            return self._forward(rows, new, wanted)
        clock = self.cache.manager.ladder.clock
        begun = clock.now()
        logits = self._forward(rows, new, wanted)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.cache.preemption.prefilled(new * len(rows), clock.now() - begun)
        return logits

    def _forward(self, rows: Sequence[PassRow], new: int, wanted: int = 1) -> torch.Tensor:
        """Compute ``new`` tokens per row; return the last logits ``[rows, wanted, vocabulary]``."""
        ends = torch.tensor([row.computed + new for row in rows])
        longest = int(ends.max())
        positions = torch.arange(longest) - (longest - ends)[:, None]
        step = self._step(rows, positions, new)
        ids = [list(row.tokens[row.computed : row.computed + new]) for row in rows]
        given: dict[str, Any] = {}
        if self._attends:  # without attention, positions do not matter
            padded = bool((positions < 0).any())
            mask = (positions >= 0).long().to(self.model.device) if padded else None
            given = {
                "attention_mask": mask,
                "position_ids": positions[:, -new:].to(self.model.device),
            }
        windows = self._narrowed
        narrow = narrowed(self.model, windows) if any(windows.values()) else nullcontext()
        with torch.inference_mode(), narrow, self.rotations.held():
            seen = Pass(self._layers, step)
            out = self.model(
                torch.tensor(ids, device=self.model.device),
                **{self._name: Cache(layers=seen.layers)},
                **given,
                use_cache=True,
                logits_to_keep=wanted,
            )
            seen.keep()
        logits: torch.Tensor = out.logits[:, -wanted:]
        return logits

    @property
    def _narrowed(self) -> dict[int, int]:
        """Narrower windows by layer; 0 if the layer has the model's own window."""
        kept = [0 if layer.kv is None else layer.kv.narrowed for layer in self._layers]
        return dict(enumerate(kept)) | {at: kept[one] for at, one in self._sources.items()}

    def _step(self, rows: Sequence[PassRow], positions: torch.Tensor, new: int) -> PassPlan:
        """Return the plan of a pass over these positions; the last ``new`` of each row are new."""
        held = positions.clamp(min=0)  # padding reads the row's first token: masked, never garbage
        places: list[TokenPlaces] = []
        tables = zip(*(row.tables for row in rows), strict=True)
        for pool, of_rows in zip(self.plan.pools, tables, strict=True):
            size, most = pool.group.block_tokens, max(map(len, of_rows))
            table = torch.tensor([[*one, *[0] * (most - len(one))] for one in of_rows])
            blocks = table.gather(1, held // size).to(self.model.device)
            places.append(TokenPlaces(blocks, (held % size).to(self.model.device)))
        return PassPlan(places, positions.shape[1], new, rows[0].computed > 0)

    def _peak_bytes(self, tokens: int) -> int:
        """Return the peak bytes that a pass of this many tokens needs besides the pools' memory."""
        tables = [list(range(-(-tokens // pool.group.block_tokens))) for pool in self.plan.pools]
        device = self.model.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._forward([_Measured([0] * tokens, 0, tables)], tokens)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak

    def close(self) -> None:
        """Hand cached blocks to the tiers, flush durable ones, and close. May be called again."""
        manager = self.cache.manager
        clock, left_s = manager.ladder.clock, FLUSH_TIMEOUT_S
        if not self._closed:
            self._closed = True
            begun = clock.now()
            self.cache.hand_down(timeout_s=left_s)
            left_s = max(0.0, left_s - (clock.now() - begun))
        self.cache.close(timeout_s=left_s)
        self._weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_bytes(model: Any) -> int:
    """Return the free bytes of a model's device."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    return free
