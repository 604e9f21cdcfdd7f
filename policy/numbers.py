"""What counts as an integer wherever a caller gives one."""

from __future__ import annotations

from operator import index
from typing import Any, SupportsIndex


def whole(value: SupportsIndex, what: str = "a number") -> int:
    """``value`` as an ``int``: any integer counts, NumPy's and a tensor's too, but no bool.

    Raises
    ------
    ValueError
        It is something else.
    """
    if type(value) is int:
        return value
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    raise ValueError(f"{what}: {value!r}, expected an integer")


def settle(record: Any, *names: str) -> None:
    """Make these fields of a frozen dataclass, which is being made, ``int``; None stays.

    Raises
    ------
    ValueError
        One is neither.
    """
    for name in names:
        value = getattr(record, name)
        if value is not None and type(value) is not int:
            object.__setattr__(record, name, whole(value, name))
