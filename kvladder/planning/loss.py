"""Measures how codecs change a model's answers: its logits over decoded keys and values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import exp
from typing import Any, cast

import torch
from transformers import DynamicCache
from typing_extensions import Buffer

from kvladder.errors import LayoutError
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.codecs.base import Codec, Subject
from kvladder.tiers.codecs.chain import Chain

_KEY = BlockKey(bytes(32))


@dataclass
class Loss:
    """Loss of answers against those over the original keys and values; sums over all prompts."""

    tokens: int = 0
    """Number of tokens with compared logits; each token has a logit per word of the vocabulary."""
    divergence: float = 0.0
    """Kullback-Leibler divergence of the words' probabilities, in nats, summed over tokens."""
    most: float = 0.0
    """Largest divergence of a token, in nats."""
    agreed: int = 0
    """Number of tokens after which the most likely word is the same."""
    said: int = 0
    """Number of tokens of prompts that were predicted."""
    surprise: float = 0.0
    """Sum of the negative log probabilities of predicted tokens, in nats, without codecs."""
    coded_surprise: float = 0.0
    """Sum of the same over keys and values that went through the codecs."""
    plain_bytes: int = 0
    stored_bytes: int = 0
    """Bytes of the encoded keys and values; ``plain_bytes`` are those before encoding."""

    @property
    def mean(self) -> float:
        """Mean divergence of a token, in nats."""
        return self.divergence / self.tokens

    @property
    def agreement(self) -> float:
        """Share of tokens after which the most likely word is the same."""
        return self.agreed / self.tokens

    @property
    def perplexity(self) -> tuple[float, float]:
        """Perplexity without the codecs, and with them."""
        return exp(self.surprise / self.said), exp(self.coded_surprise / self.said)

    def add(self, right: torch.Tensor, found: torch.Tensor, then: torch.Tensor) -> None:
        """Add the loss of one prompt's second half.

        Parameters
        ----------
        right, found:
            Logits ``[tokens, words]`` without the codecs, and with them.
        then:
            The words that followed all tokens but the last.
        """
        exact, coded = (one.double().log_softmax(-1) for one in (right, found))
        apart = (exact.exp() * (exact - coded)).sum(-1).clamp_(min=0)
        self.tokens += len(apart)
        self.divergence += float(apart.sum())
        self.most = max(self.most, float(apart.max()))
        self.agreed += int((exact.argmax(-1) == coded.argmax(-1)).sum())
        self.said += len(then)
        at = torch.arange(len(then)), then
        self.surprise -= float(exact[at].sum())
        self.coded_surprise -= float(coded[at].sum())


class Evaluation:
    """Runs each prompt's second half twice: over the first half, and over its decoded copy.

    Parameters
    ----------
    model:
        A causal language model of transformers; its layers must cache keys and values.
    make_codecs:
        Returns new codecs, not yet opened, in the order in which a level applies them.
    kinds:
        Kinds of layers to encode, named as in ``Layout.kinds``.
    block_tokens:
        Tokens per block.
    """

    def __init__(
        self,
        model: Any,
        make_codecs: Callable[[], Sequence[Codec]],
        *,
        kinds: Collection[str],
        block_tokens: int,
    ) -> None:
        self.loss = Loss()
        self.changed: set[str] = set()
        """Kinds of layers that were encoded so far."""
        self.spared: set[str] = set()
        """Kinds of layers that were not encoded."""
        self._model = model
        self._make_codecs = make_codecs
        self._kinds = kinds
        self._size = block_tokens
        self._chains: dict[tuple[int, int, torch.dtype], Chain] = {}

    @property
    def shortest(self) -> int:
        """Least number of tokens of a prompt."""
        return 2 * self._size

    @torch.inference_mode()
    def run(self, prompt: Sequence[int]) -> None:
        """Add a prompt of ``shortest`` tokens or more to ``loss``.

        Raises
        ------
        ConfigError
            A codec does not take the model's keys and values.
        LayoutError
            A layer caches something else.
        """
        held = len(prompt) // self.shortest * self._size
        tokens = torch.tensor([prompt], device=self._model.device)
        cache: Any = DynamicCache(config=self._model.config)
        self._model(tokens[:, :held], past_key_values=cache)
        coded = deepcopy(cache)
        for number, layer in enumerate(coded.layers):
            self._change(number, layer)
        right, found = (
            self._model(tokens[:, held:], past_key_values=one).logits[0].cpu()
            for one in (cache, coded)
        )
        self.loss.add(right, found, tokens[0, held + 1 :].cpu())

    def _change(self, number: int, layer: Any) -> None:
        """Encode and decode what a layer holds of the first half."""
        keys: Any = getattr(layer, "keys", None)
        if keys is None or keys.dim() != 4 or layer.values.shape[:3] != keys.shape[:3]:
            what = f"layer {number}: {type(layer).__name__}"
            raise LayoutError(what, hint="expected keys and values per token")
        kind = "window" if layer.is_sliding else "full"
        if kind not in self._kinds:
            self.spared.add(kind)
            return
        self.changed.add(kind)
        both = torch.cat((keys, layer.values), dim=-1)[0].cpu()
        back = self._through(both).to(keys.device)[None]
        size = keys.shape[-1]
        layer.keys, layer.values = back[..., :size], back[..., size:]

    def _through(self, both: torch.Tensor) -> torch.Tensor:
        """Return ``[heads, tokens, numbers]`` decoded; blocks hold all heads, as in engines."""
        heads, tokens, row = both.shape
        blocks = -(-tokens // self._size)
        padded = both.new_zeros(heads, blocks * self._size, row)
        padded[:, :tokens] = both
        pages = padded.view(heads, blocks, self._size, row).transpose(0, 1).contiguous()
        chain = self._chain(heads, row, both.dtype)
        for page in pages:
            self._block(chain, page)
        return pages.transpose(0, 1).reshape(heads, blocks * self._size, row)[:, :tokens]

    def _block(self, chain: Chain, page: torch.Tensor) -> None:
        """Encode and decode a block in place; count its bytes."""
        data = memoryview(cast("Buffer", page.view(torch.uint8).numpy())).cast("B")
        slot = memoryview(bytearray(len(data)))
        stored, coding = chain.encode(Subject(_KEY), data, slot)
        slot[: len(stored)] = stored
        chain.decode(_KEY, coding, slot)
        self.loss.plain_bytes += len(data)
        self.loss.stored_bytes += coding.length
        data[:] = slot

    def _chain(self, heads: int, row: int, dtype: torch.dtype) -> Chain:
        shape = heads, row, dtype
        if shape not in self._chains:
            size = heads * self._size * row * dtype.itemsize
            name = str(dtype).removeprefix("torch.")
            layout = opened = Layout(self._size, size, {}, name, row)
            codecs = self._make_codecs()
            for codec in codecs:
                codec.allowed = None
                opened = codec.open(opened, layout.namespace())
            self._chains[shape] = Chain(codecs, layout=layout, find=lambda _: None)
        return self._chains[shape]
