"""The blocks of an action, and actions that wait for blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvladder.hints.protocol import Order
from kvladder.keys import BlockKey
from kvladder.manager import Fetch

RETRY_MIN_S, RETRY_MAX_S = 0.01, 1.0
"""Time between two attempts about a finished request's blocks: doubled after each."""


class Scoped(NamedTuple):
    """Blocks that an action is about."""

    runs: Sequence[Sequence[BlockKey]]
    """Prefixes, one for each group of layers; or one list of keys."""
    salt: str
    is_prefix: bool

    @property
    def keys(self) -> Sequence[BlockKey]:
        if len(self.runs) == 1:
            return self.runs[0]
        return [key for run in self.runs for key in run]


@dataclass(slots=True)
class Later:
    """An action about blocks of a finished request, some of them not saved yet."""

    order: Order
    keys: Sequence[BlockKey]
    """Those for which it is not done yet."""
    salt: bytes
    until_s: float
    """Loop time at which it is given up."""
    again_s: float
    """Loop time of the next attempt."""
    since_s: float
    """Loop time at which the request finished."""
    wait_s: float = RETRY_MIN_S


@dataclass(slots=True, eq=False)
class Fetching:
    """A fetch for a hint, and what to do with the blocks once it is done."""

    message: tuple[str, str]
    begin: Callable[[], Fetch]
    then: Callable[[], object] | None
    is_begun: bool = False
    fetch: Fetch | None = None
