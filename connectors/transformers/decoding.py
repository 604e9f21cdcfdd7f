"""What requests go on with: several texts of one prompt at once, or drafts that a pass verifies.

Neither knows of blocks. An engine forks the request of a text that goes on in several ways, and
takes back what was drafted wrong: ``examples/transformers_engine.py`` does both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import torch

WORDS_MAX: Final = 3
"""With how many of its last tokens a text is looked for in itself, at most."""


class BeamSearch:
    """The texts that a prompt goes on with, as ``generate(num_beams=...)`` chooses them.

    Its length penalty is 1 and it does not stop early, as by default: it ends when no text that
    goes on can be better than those that ended.

    Parameters
    ----------
    beams:
        How many texts go on at once, 2 or more.
    tokens_max:
        How long a text gets.
    ends:
        Tokens that end a text.

    Raises
    ------
    ValueError
        There are fewer than 2 beams.
    """

    def __init__(self, beams: int, tokens_max: int, *, ends: Collection[int] = ()) -> None:
        if beams < 2:
            raise ValueError(f"{beams} beams: expected 2 or more, or none at all")
        self.texts: list[list[int]] = [[]]
        """Those that go on, the best first; the best of all when it is ``done``."""
        self.done = False
        self._beams, self._tokens_max, self._ends = beams, tokens_max, ends
        self._scores = torch.zeros(1)
        self._ended: list[tuple[float, list[int]]] = []
        """Texts that ended, with their score by token, the best first."""

    def step(self, logits: torch.Tensor) -> list[int]:
        """Go on by a token, with logits ``[texts, vocabulary]`` after each text.

        Returns which of the texts each of those that it has now continues; nothing if the best of
        all ended earlier.
        """
        chances = torch.log_softmax(logits.float(), -1)
        chances += self._scores.to(chances.device)[:, None]
        count = min(max(2, 1 + len(self._ends)) * self._beams, chances.numel())
        best: Any = chances.flatten().topk(count)  # so many that enough of them do not end
        scores: list[float] = best.values.tolist()
        places: list[int] = best.indices.tolist()
        length = len(self.texts[0]) + 1
        going: list[int] = []
        texts: list[list[int]] = []
        parents: list[int] = []
        winner: list[int] = []
        for rank, place in enumerate(places):
            parent, token = divmod(place, chances.shape[1])
            text = [*self.texts[parent], token]
            # A text that ends counts only if it is among the best.
            if token in self._ends or length == self._tokens_max:
                if rank < self._beams and self._end(scores[rank] / length, text):
                    winner = [parent]
            # One that goes on takes the next place, while there is one.
            elif len(going) < self._beams:
                going.append(rank)
                texts.append(text)
                parents.append(parent)
        full = len(self._ended) == self._beams
        if not going or (full and scores[going[0]] / length <= self._ended[-1][0]):
            self.done = True
            self.texts = [self._ended[0][1]]
            return winner
        self.texts, self._scores = texts, best.values[going]
        return parents

    def _end(self, score: float, text: list[int]) -> bool:
        """Keep a text among the best that ended; returns whether it is the best of all."""
        self._ended.append((score, text))
        self._ended.sort(key=lambda one: -one[0])
        del self._ended[self._beams :]
        return self._ended[0][1] is text


def drafted(tokens: Sequence[int], count: int) -> list[int]:
    """``count`` tokens that may come next: those that followed where the text was alike before.

    That is the most recent place where as many as possible of the last tokens stood already, up
    to ``WORDS_MAX``. What has come from there to the end is taken to repeat. Empty if the last
    token is a new one.
    """
    longest, after = 0, 0
    for at in range(len(tokens) - 2, -1, -1):
        size = 0
        while size < min(WORDS_MAX, at + 1) and tokens[at - size] == tokens[-1 - size]:
            size += 1
        if size > longest:
            longest, after = size, at + 1
        if longest == WORDS_MAX:
            break
    since = tokens[after:]
    return [since[number % len(since)] for number in range(count)] if longest else []


def agreed(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the first drafts are what the model chose."""
    pairs = enumerate(zip(drafts, chosen, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(drafts))
