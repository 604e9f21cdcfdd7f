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


def may_become(before: S, after: S, following: Mapping[S, Collection[S]]) -> bool:
    """Return whether an object may have one state now and the other later, or keep its state."""
    return before is after or after in reachable(before, following)
