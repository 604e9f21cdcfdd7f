"""Sizes, durations and shares as people write them: ``8 GiB``, ``50 ms``, ``5 %``.

The three types can be used for the fields of a tier's ``Options`` as well.
"""

from __future__ import annotations

import re
from decimal import Decimal
from difflib import get_close_matches
from math import isfinite
from typing import Final

_NUMBER = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([^\s0-9].*?)?\s*", re.ASCII)

_SIZES: Final[dict[str, int]] = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DURATIONS: Final[dict[str, float]] = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_DURATION_NAMES: Final = {
    "sec": "s", "second": "s", "seconds": "s", "min": "m", "minute": "m", "minutes": "m",
    "hour": "h", "hours": "h", "day": "d", "days": "d",
}  # fmt: skip


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number with its noun, in the plural unless it is 1: ``1 block``, ``2 blocks``."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def _split(text: str) -> tuple[str, str]:
    """Return number and unit of ``text``; either is empty if it is missing."""
    found = _NUMBER.fullmatch(text)
    return (found[1], found[2] or "") if found else ("", text.strip())


def _unknown(unit: str, known: list[str]) -> str:
    near = get_close_matches(unit, known, n=1, cutoff=0.3)
    nearest = f", did you mean {near[0]}?" if near else ""
    return f"unknown unit {unit!r}: expected one of {', '.join(known)}{nearest}"


UNIT_BYTES: Final = 4096
"""Sizes below this need a unit, even if it is B: a bare small number probably lacks its GiB."""


class Size(int):
    """Bytes, at least 1. Written as an integer or with a unit: ``8 GiB`` (1024), ``4GB`` (1000)."""

    EXPECTED = "a size such as '8 GiB', '512 MB' or a number of bytes, more than 0"

    @classmethod
    def parse(cls, value: object) -> Size:
        """Return the size that ``value`` stands for.

        Raises
        ------
        ValueError
            It is not a size; the message says what is expected instead.
        """
        if isinstance(value, str):
            number, unit = _split(value)
            if not number:
                raise ValueError(cls.EXPECTED)
            whole = int(Decimal(number) * (cls._scale(unit) if unit else 1))
            needs_unit = not unit
        else:
            whole = value if isinstance(value, int) and not isinstance(value, bool) else 0
            needs_unit = not isinstance(value, cls)
        if not 0 < whole < 1 << 63:
            raise ValueError(cls.EXPECTED)
        if needs_unit and whole < UNIT_BYTES:
            meant = f"did you mean '{whole} GiB' or '{whole} MiB'?"
            raise ValueError(f"{whole} bytes without a unit are too few, {meant}")
        return cls(whole)

    @staticmethod
    def _scale(unit: str) -> int:
        """Return the bytes of a unit, in its own spelling or all in one case; not Gb (gigabit)."""
        for name, scale in _SIZES.items():
            if unit in {name, name.lower(), name.upper()}:
                return scale
        raise ValueError(_unknown(unit, [name for name in _SIZES if "i" in name or name == "GB"]))

    def __str__(self) -> str:
        """Return text that ``parse`` reads exactly, in the largest unit with a short number."""
        for name, scale in sorted(_SIZES.items(), key=lambda item: -item[1]):
            tenths, rest = divmod(int(self) * 10, scale)
            if not rest and 10 <= tenths < 100_000:
                return f"{tenths / 10:g} {name}"
        return f"{int(self)} B"

    def brief(self) -> str:
        """Return text for people: as it is written if that is short, else rounded."""
        exact = str(self)
        return self.about() if exact == f"{int(self)} B" else exact

    def about(self) -> str:
        """Return text rounded in a binary unit, for tables: ``1.82 TiB``."""
        power = self._power()
        return f"{int(self) / 1024**power:.4g} {_BINARY[power]}"

    def above(self) -> str:
        """Return text for people that ``parse`` reads as at least this size.

        It is the size as it is written if that is short, else rounded up to a hundredth of a
        binary unit: ``19.18 GiB``.
        """
        exact = str(self)
        if exact != f"{int(self)} B":
            return exact
        power = self._power()
        hundredths = -(-int(self) * 100 // 1024**power)
        return f"{hundredths / 100:g} {_BINARY[power]}" if power else exact

    def _power(self) -> int:
        """Return the power of 1024 of the largest binary unit that is not above this size."""
        return max(0, min((int(self).bit_length() - 1) // 10, len(_BINARY) - 1))


class Duration(float):
    """Seconds, more than 0. Written with a unit: ``50 ms``, ``2s``, ``10 m``, ``1 h``, ``1 d``."""

    EXPECTED = "a duration with a unit such as '50 ms', '2 s', '10 m', '1 h' or '1 d', more than 0"

    @classmethod
    def parse(cls, value: object) -> Duration:
        """Return the duration that ``value`` stands for.

        Raises
        ------
        ValueError
            It is not a duration; the message says what is expected instead.
        """
        if not isinstance(value, str):
            raise ValueError(cls.EXPECTED)  # noqa: TRY004 - every wrong value is one error
        number, unit = _split(value)
        if not number or not unit:
            raise ValueError(cls.EXPECTED)
        scale = _DURATIONS.get(_DURATION_NAMES.get(unit, unit))
        if scale is None:
            raise ValueError(_unknown(unit, list(_DURATIONS)))
        seconds = float(number) * scale
        if not (isfinite(seconds) and seconds > 0):
            raise ValueError(cls.EXPECTED)
        return cls(seconds)

    def __str__(self) -> str:
        """Return text in the largest unit with a whole number, else in seconds."""
        for name in ("d", "h", "m", "s", "ms"):
            count = float(self) / _DURATIONS[name]
            if count >= 1 and count == int(count):
                return f"{int(count)} {name}"
        return f"{float(self):g} s"


class Portion:
    """A part of a level's capacity: a size, or a percentage."""

    __slots__ = ("percent", "size")

    def __init__(self, *, size: Size | None = None, percent: float = 0.0) -> None:
        self.size = size
        self.percent = percent

    EXPECTED = "a size such as '8 GiB', or a percentage of the capacity such as '25 %'"

    @classmethod
    def parse(cls, value: object) -> Portion:
        """Return the portion that ``value`` stands for, more than nothing.

        Raises
        ------
        ValueError
            It is not a portion; the message says what is expected instead.
        """
        number, unit = _split(value) if isinstance(value, str) else ("", "")
        if number and unit == "%":
            if 0 < float(number) <= 100:
                return cls(percent=float(number))
            raise ValueError(cls.EXPECTED)
        try:
            return cls(size=Size.parse(value))
        except ValueError as error:
            raise ValueError(cls.EXPECTED) from error

    def of(self, blocks: int, block_bytes: int) -> int:
        """Return this portion of ``blocks`` blocks, as a number of blocks, at least 1."""
        if self.size is None:
            return max(1, int(blocks * self.percent / 100))
        return max(1, min(blocks, self.size // block_bytes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Portion):
            return NotImplemented
        return (self.size, self.percent) == (other.size, other.percent)

    def __hash__(self) -> int:
        return hash((self.size, self.percent))

    def __str__(self) -> str:
        return f"{self.percent:g} %" if self.size is None else str(self.size)


class Share:
    """A number of blocks, or a percentage of all blocks."""

    __slots__ = ("blocks", "percent")

    def __init__(self, *, blocks: int = 0, percent: float | None = None) -> None:
        self.blocks = blocks
        self.percent = percent

    EXPECTED = "a number of blocks, or a percentage such as '5 %'"

    @classmethod
    def parse(cls, value: object) -> Share:
        """Return the share that ``value`` stands for; 0 is allowed.

        Raises
        ------
        ValueError
            It is not a share; the message says what is expected instead.
        """
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(blocks=value)
        if isinstance(value, str):
            number, unit = _split(value)
            if number and unit == "%" and 0 <= float(number) <= 100:
                return cls(percent=float(number))
            if number.isdigit() and not unit:
                return cls(blocks=int(number))
        raise ValueError(cls.EXPECTED)

    def of(self, total: int) -> int:
        """Return blocks out of ``total``: rounded down, at least 1 for a percentage above 0."""
        if self.percent is None:
            return min(self.blocks, total)
        return max(int(total * self.percent / 100), int(self.percent > 0 and total > 0))

    def __bool__(self) -> bool:
        return bool(self.blocks or self.percent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Share):
            return NotImplemented
        return (self.blocks, self.percent) == (other.blocks, other.percent)

    def __hash__(self) -> int:
        return hash((self.blocks, self.percent))

    def __str__(self) -> str:
        return f"{self.blocks} blocks" if self.percent is None else f"{self.percent:g} %"
