"""The report in a request's own answer: where its prompt came from, and why the rest did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvladder.metrics import MissCause, Missed


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """The tokens of a prompt that could be loaded, by what became of them.

    ``engine_tokens``, ``served_tokens`` and those of ``missed`` are together ``asked_tokens``.
    """

    asked_tokens: int
    """Tokens of the prompt that may be loaded: whole blocks, without its last token."""
    engine_tokens: int
    """Tokens that vLLM's own prefix cache had."""
    served_tokens: int
    """Tokens that the cache had."""
    missed: Sequence[tuple[MissCause, int]]
    """Tokens that the cache did not serve, by cause, in order."""

    def as_dict(self, sources: Counter[str], *, failed: bool) -> dict[str, Any]:
        """Return plain data; ``sources`` are tokens by level, ``failed`` if they did not arrive."""
        served, missed = self.served_tokens, [*self.missed]
        if failed:
            missed.insert(0, (MissCause("", "failed"), served))
            served, sources = 0, Counter[str]()
        return {
            "asked_tokens": self.asked_tokens,
            "engine_tokens": self.engine_tokens,
            "served_tokens": served,
            "served_from": dict(sources),
            "missed": [
                {"reason": cause.reason, "level": cause.level or None, "tokens": tokens}
                for cause, tokens in missed
                if tokens
            ],
        }


def report_of(
    asked: int, own: int, found: int, missed: Sequence[Missed], *, block_tokens: int
) -> PrefillReport:
    """Return the report of an answer: ``found`` tokens after the engine's ``own``.

    A group of layers may end the prefix within what others have. So the causes are cut to the
    tokens that are missing, and the last one has the rest.
    """
    left, causes = asked - own - found, list[tuple[MissCause, int]]()
    for number, (level, reason, blocks) in enumerate(missed, 1):
        is_last = number == len(missed)
        tokens = left if is_last else min(left, blocks * block_tokens)
        causes.append((MissCause(level, reason), tokens))
        left -= tokens
    if left:
        causes.append((MissCause("", "unsearched"), left))
    return PrefillReport(asked, own, found, causes)
