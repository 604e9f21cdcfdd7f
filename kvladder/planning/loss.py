"""What codecs do to a model's answers: its logits over keys and values that went through them."""

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
    """What answers lost, over all prompts so far, to those over keys and values as they were."""

    tokens: int = 0
    """Whose logits were compared; each has as many as the model knows words."""
    divergence: float = 0.0
    """Of the words' probabilities, Kullback-Leibler, in nats: the sum over tokens."""
    most: float = 0.0
    """The largest divergence of a token."""
    agreed: int = 0
    """Tokens after which the most likely word is the same."""
    said: int = 0
    """Tokens of prompts that were to be guessed."""
    surprise: float = 0.0
    """Of those: the sum of their negative log probabilities, in nats."""
    coded_surprise: float = 0.0
    """The same over what went through the codecs."""
    plain_bytes: int = 0
    stored_bytes: int = 0
    """What the keys and values came to before the codecs and behind them."""

    @property
    def mean(self) -> float:
        """The divergence of a token, in nats."""
        return self.divergence / self.tokens

    @property
    def agreement(self) -> float:
        """The share of tokens after which the most likely word is the same."""
        return self.agreed / self.tokens

    @property
    def perplexity(self) -> tuple[float, float]:
        """Without the codecs, and with them."""
        return exp(self.surprise / self.said), exp(self.coded_surprise / self.said)

    def add(self, right: torch.Tensor, found: torch.Tensor, then: torch.Tensor) -> None:
        """Take in logits ``[tokens, words]`` and the words that followed all but the last token."""
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
    """Runs each prompt's second half twice: over the first, and over what codecs left of that.

    Parameters
    ----------
    model:
        A causal language model of transformers whose layers cache keys and values.
    make_codecs:
        New codecs, not yet opened, in the order in which a level applies them.
    kinds:
        The layers whose keys and values go through them, as ``Layout.kinds`` calls them.
    block_tokens:
        Tokens of a block.
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
        """The kinds of layers that went through the codecs so far."""
        self.spared: set[str] = set()
        """The kinds of layers that did not."""
        self._model = model
        self._make_codecs = make_codecs
        self._kinds = kinds
        self._size = block_tokens
        self._chains: dict[tuple[int, int, torch.dtype], Chain] = {}

    @property
    def shortest(self) -> int:
        """How many tokens a prompt must have."""
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
        """Put what a layer holds of the first half through the codecs."""
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
        """``[heads, tokens, numbers]`` as they come back; blocks hold all heads, as in engines."""
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
        """Store a block and load it again, in place."""
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
