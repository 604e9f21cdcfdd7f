"""Ways to decode: beam search over several texts of one prompt, and drafts that a pass verifies.

This code does not deal with blocks. An engine forks the request of a text that has several
continuations, and takes wrong drafts back: ``examples/transformers_engine.py`` does both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import torch

WORDS_MAX: Final = 3
"""Largest number of last tokens that ``drafted`` compares with earlier ones."""


class BeamSearch:
    """Chooses continuations of a prompt, as ``generate(num_beams=...)`` does.

    The length penalty is 1 and it does not stop early, which are the defaults. It ends when no
    open text can become better than the ended ones.

    Parameters
    ----------
    beams:
        Number of texts that are continued at once, 2 or more.
    tokens_max:
        Largest length of a text in tokens.
    ends:
        Tokens that end a text.

    Raises
    ------
    ValueError
        There are fewer than 2 beams.
    """

    def __init__(self, beams: int, tokens_max: int, *, ends: Collection[int] = ()) -> None:
        if beams < 2:
            raise ValueError(f"{beams} beams: expected 2 or more; use no BeamSearch for 1")
        self.texts: list[list[int]] = [[]]
        """Open texts, the best first; once ``done``, only the best ended text."""
        self.done = False
        self._beams, self._tokens_max, self._ends = beams, tokens_max, ends
        self._scores = torch.zeros(1)
        self._ended: list[tuple[float, list[int]]] = []
        """Ended texts with their score per token, the best first."""

    def step(self, logits: torch.Tensor) -> list[int]:
        """Continue by one token, given the logits ``[texts, vocabulary]`` after each text.

        Returns, for each of the new texts, the index of the old text that it continues. Empty if
        it is done and the best text ended in an earlier step.
        """
        chances = torch.log_softmax(logits.float(), -1)
        chances += self._scores.to(chances.device)[:, None]
        count = min(max(2, 1 + len(self._ends)) * self._beams, chances.numel())
        best: Any = chances.flatten().topk(count)  # enough that ``beams`` of them do not end
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
            # A text that ends counts only if it is among the best ``beams``.
            if token in self._ends or length == self._tokens_max:
                if rank < self._beams and self._end(scores[rank] / length, text):
                    winner = [parent]
            # An open text takes the next free beam, if there is one.
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
        """Add an ended text, keep the best ``beams`` of them; return whether it is the best."""
        self._ended.append((score, text))
        self._ended.sort(key=lambda one: -one[0])
        del self._ended[self._beams :]
        return self._ended[0][1] is text


def drafted(tokens: Sequence[int], count: int) -> list[int]:
    """Return ``count`` tokens that may come next, copied from an earlier similar place.

    It looks for the place where most of the last tokens, up to ``WORDS_MAX``, occurred before, and
    takes the most recent one. The tokens from there to the end are assumed to repeat. Empty if the
    last token has not occurred before.
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
    """Return how many leading drafts equal what the model chose."""
    pairs = enumerate(zip(drafts, chosen, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(drafts))
