"""Measures how settings of a model's pools change its answers, by comparing logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import torch
from transformers import DynamicCache

from kvladder.connectors.transformers.layers import kept_by_layers
from kvladder.connectors.transformers.model import PooledModel
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.planning.loss import Loss

ROOM: Final = 3
"""Pool memory as a multiple of one sequence in the model's own type; no setting needs more."""
SPARE: Final = 1 << 20


class PoolsEvaluation:
    """Runs each prompt's second half twice: over the plain first half, and over it in pools.

    In the second run, the KV of the second half goes through the pools, too. A context manager.

    Parameters
    ----------
    model:
        A causal language model of transformers.
    gpu:
        The settings: ``dtype`` and ``windows`` of a stack's section ``gpu``.
    context:
        Tokens of the longest prompt.
    block_tokens:
        Tokens of a block.

    Raises
    ------
    ConfigError, LayoutError
        As from ``PooledModel``.
    """

    def __init__(
        self, model: Any, gpu: Mapping[str, Any], *, context: int, block_tokens: int
    ) -> None:
        self.loss = Loss()
        self._model = model
        self._size = block_tokens
        handlers = [
            one for layer in kept_by_layers(model, context=context) for one in layer.handlers
        ]

        def kept(step: int | None, **settings: Any) -> int:
            plan = CachePlan(handlers, block_tokens=block_tokens, max_tokens=context, step=step)
            return plan.adapt(**settings).check().group().pooled_bytes

        memory = {"memory": f"{ROOM * kept(None) + SPARE} B", "reuse": False}
        stack = {"gpu": {**gpu, **memory}}
        self._pooled = PooledModel(model, stack, context=context, block_tokens=block_tokens)
        self.loss.plain_bytes = kept(block_tokens)  # without tokens that left their window
        self.loss.stored_bytes = kept(block_tokens, **gpu)

    @property
    def shortest(self) -> int:
        """Smallest number of tokens of a prompt."""
        return 2 * self._size

    @torch.inference_mode()
    def run(self, prompt: Sequence[int]) -> None:
        """Evaluate a prompt of at least ``shortest`` tokens and add it to ``loss``."""
        held = len(prompt) // self.shortest * self._size
        tokens = torch.tensor([prompt], device=self._model.device)
        cache: Any = DynamicCache(config=self._model.config)
        with self._pooled.rotations.held():
            self._model(tokens[:, :held], past_key_values=cache)
            right = self._model(tokens[:, held:], past_key_values=cache).logits[0].cpu()
        found = self._answers(prompt, held).cpu()
        self.loss.add(right, found, tokens[0, held + 1 :].cpu())

    def _answers(self, prompt: Sequence[int], held: int) -> torch.Tensor:
        """Return the logits ``[tokens, words]`` after each token behind the first ``held``."""
        pooled, more = self._pooled, prompt[held:]
        request = pooled.requests.begin(prompt[:held])
        pooled.run([request])
        rows: list[torch.Tensor | None] = []
        if pooled.plan.states:  # with states, one pass returns the logits of one token
            for token in more:
                pooled.requests.append(request, [token])
                rows += pooled.run([request])
        else:
            pooled.requests.append(request, more)
            rows += pooled.run([request], [len(more) - 1])
        pooled.requests.release(request, store=False)
        return torch.cat([row for row in rows if row is not None])

    def close(self) -> None:
        """Close the pools. May be called again."""
        self._pooled.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
