"""From how many tokens on loading from a medium is sooner than computing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvladder.policy.fetch_cost import CostEstimate

LONGEST: int = 1 << 20
"""Longest prompt looked at, in tokens."""


class Worth(NamedTuple):
    """Whether a fetch is worth it, by the rule of the fetch cost model."""

    tokens: int | None
    """Fewest tokens from which every longer prefix is worth it; None if no prefix is."""
    load_token_s: float
    """Seconds to load a token of a long prefix."""
    compute_token_s: float
    """Seconds to compute a token."""


def load_s(blocks: int, measured: Mapping[int, float]) -> float:
    """Return the seconds to load this many blocks, from those by blocks in one call.

    Between two measured numbers it is straight. Fewer blocks take as long as the fewest measured;
    more take several calls.
    """
    counts = sorted(measured)
    whole, rest = divmod(blocks, counts[-1])
    took_s = whole * measured[counts[-1]]
    if rest:
        took_s += float(np.interp(rest, counts, [measured[count] for count in counts]))
    return took_s


def worth(block_tokens: int, token_s: float, measured: Mapping[int, float]) -> Worth:
    """Return from how many tokens on it is worth it to load blocks of ``block_tokens``.

    ``measured`` has the seconds of a read by its number of blocks.
    """
    cost = CostEstimate(block_tokens * token_s, 0.0, whole=False)
    most = max(measured)
    last = max(LONGEST // block_tokens, most)
    least = None
    for blocks in range(last, 0, -1):
        if not cost.worth(blocks, load_s(blocks, measured)):
            break
        least = blocks * block_tokens
    return Worth(least, measured[most] / most / block_tokens, token_s)
