"""Checks of integers that callers give."""

from __future__ import annotations

from operator import index
from typing import Any, SupportsIndex


def whole(value: SupportsIndex, what: str = "a number") -> int:
    """Return ``value`` as an ``int``. NumPy's and a tensor's integers count, a bool does not.

    Raises
    ------
    ValueError
        It is not an integer.
    """
    if type(value) is int:
        return value
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    raise ValueError(f"{what}: expected an integer, found {value!r}")


def settle(record: Any, *names: str) -> None:
    """Convert these fields of a frozen dataclass to ``int`` in its ``__post_init__``; keep None.

    Raises
    ------
    ValueError
        A field is neither an integer nor None.
    """
    for name in names:
        value = getattr(record, name)
        if value is not None and type(value) is not int:
            object.__setattr__(record, name, whole(value, name))
