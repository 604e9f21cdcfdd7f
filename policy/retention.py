"""Retention: the priority of each block of a prompt, and its duration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex, cast

from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN
from kvladder.policy.numbers import settle, whole


def checked_priority(priority: object) -> int:
    """Return ``priority`` as an int in 0..100; raises ValueError if it is not one."""
    if type(priority) is int and PRIORITY_MIN <= priority <= PRIORITY_MAX:
        return priority  # without the context of the line below: every save comes here
    with suppress(ValueError):
        number = whole(cast("SupportsIndex", priority))
        if PRIORITY_MIN <= number <= PRIORITY_MAX:
            return number
    raise ValueError(f"priority {priority!r}: expected an int in {PRIORITY_MIN}..{PRIORITY_MAX}")


def checked_duration(duration_s: object) -> float | None:
    """Return ``duration_s`` as a float, 0 or more, or None; raises ValueError otherwise."""
    if duration_s is None:
        return None
    if isinstance(duration_s, SupportsFloat) and not isinstance(duration_s, bool):
        seconds = float(duration_s)
        if seconds >= 0:
            return seconds
    raise ValueError(f"duration {duration_s!r} s: expected 0 or more")


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Tokens ``[start, end)`` have ``priority`` for ``duration_s`` seconds.

    ``end`` None means to the end of the prompt, ``duration_s`` None means without end.
    """

    start: int
    end: int | None
    priority: int
    duration_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", whole(self.start, "start"))
        settle(self, "end")
        object.__setattr__(self, "priority", checked_priority(self.priority))
        object.__setattr__(self, "duration_s", checked_duration(self.duration_s))
        if self.start < 0:
            raise ValueError(f"range starts at {self.start}: expected 0 or more")
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"range [{self.start}, {self.end}) is empty or reversed")


@dataclass(frozen=True, slots=True)
class Retention:
    """Priorities of a request's blocks.

    Parameters
    ----------
    ranges:
        Prompt ranges in order of their start, without overlap. A block takes the range that holds
        its first token. A block in no range has no priority of its own and gets ``default``.
    decode_priority, decode_duration_s:
        Priority and duration of blocks that begin with a generated token; ranges do not apply
        to them. The default priority without end changes nothing for blocks that are cached.
    default:
        Priority of prompt blocks in no range.
    """

    ranges: tuple[RetentionRange, ...] = ()
    decode_priority: int = PRIORITY_DEFAULT
    decode_duration_s: float | None = None
    default: int = PRIORITY_DEFAULT

    def __post_init__(self) -> None:
        for name in ("decode_priority", "default"):
            object.__setattr__(self, name, checked_priority(getattr(self, name)))
        object.__setattr__(self, "decode_duration_s", checked_duration(self.decode_duration_s))
        for left, right in zip(self.ranges, self.ranges[1:], strict=False):
            if left.end is None or right.start < left.end:
                raise ValueError(
                    f"ranges [{left.start}, {left.end}) and [{right.start}, {right.end}) overlap"
                    " or are out of order"
                )

    def explicit(self, block_tokens: int, prompt_tokens: int) -> list[int | None]:
        """Return, for each prompt block (also a partial tail), its range's priority or None."""
        found = (self._range(i) for i in range(0, prompt_tokens, block_tokens))
        return [None if held is None else held.priority for held in found]

    def _range(self, token: int) -> RetentionRange | None:
        for held in self.ranges:
            if held.start <= token and (held.end is None or token < held.end):
                return held
        return None

    def of_blocks(
        self, blocks: Sequence[int], *, block_tokens: int, prompt_tokens: int
    ) -> list[tuple[int, float | None]]:
        """Return ``(priority, duration in seconds or None)`` of the blocks with these ordinals."""
        result: list[tuple[int, float | None]] = []
        for block in blocks:
            token = block * block_tokens
            held = self._range(token) if token < prompt_tokens else None
            if held is not None:
                result.append((held.priority, held.duration_s))
            elif token < prompt_tokens:
                result.append((self.default, None))
            else:
                result.append((self.decode_priority, self.decode_duration_s))
        return result
