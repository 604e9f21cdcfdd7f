"""States of blocks under way: which may follow which, so that ``check`` can assert it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

S = TypeVar("S")


def reachable(state: S, following: Mapping[S, Collection[S]]) -> set[S]:
    """Return the states that an object of this state may have later, itself included.

    ``following`` has the states that may follow each state; none may come back.
    """
    return {state}.union(*(reachable(after, following) for after in following[state]))
