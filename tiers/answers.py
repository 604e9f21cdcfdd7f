"""Answers of tiers: one for each kind of call, checked before any caller trusts it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from types import NoneType
from typing import Literal, NoReturn, cast, get_args

import numpy as np

from kvladder.errors import TierError

Results = Sequence[bool | None]
Kind = Literal["get", "put", "remove", "contains"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds of calls. Each has a breaker, as success of one kind says nothing about another."""
_BOOLEANS = (bool, np.bool_)
_MAYBES = (*_BOOLEANS, NoneType)


def checked(kind: Kind, answer: object, count: int) -> Results:
    """Return the answer to a call about ``count`` blocks; raise TierError if it is malformed."""
    said, right = _listed(answer), _MAYBES if kind == "get" else _BOOLEANS
    if said is None or len(said) != count:
        return wrong(f"{count} booleans", answer)
    if {*map(type, said)} == {bool}:  # as nearly always
        return cast("list[bool]", said)
    if not all(isinstance(one, right) for one in said):
        return wrong(f"{count} booleans", answer)
    return [None if one is None else bool(one) for one in said]


def _listed(answer: object) -> list[object] | None:
    return list(cast("Sequence[object]", answer)) if isinstance(answer, Sequence) else None


def wrong(expected: str, answer: object) -> NoReturn:
    """Raise a TierError: the tier did not answer with what was ``expected``."""
    size = f" of {len(answer)}" if isinstance(answer, Sized) else ""
    said = f"{type(answer).__name__}{size}"
    raise TierError(f"the tier answered with {said}, expected {expected}", temporary=False)
