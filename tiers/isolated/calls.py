"""The calls between an isolated tier and its child process. Both map the arena."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from kvladder.children.interface import Interface
from kvladder.keys import BlockKey
from kvladder.tiers.label import Coding, Facts, ReadResult, RecoveredBlock, Ref

UNHEARD: Final = b"\xff" * 8
"""Stands for every salt without a put so far, when the child says what a tier has to spare."""


class OpenedTier(msgspec.Struct, array_like=True, frozen=True):
    """What an open tier says about itself."""

    batch_max: int
    described: dict[str, str]
    spare: float
    """``Tier.spare`` of ``UNHEARD``."""


class GetResult(msgspec.Struct, array_like=True, frozen=True):
    """The result of ``Tier.get``, and of its reads."""

    results: object
    """The tier's results as plain data, unchecked."""
    found: list[ReadResult | None]
    """For each read, what ``Read.came`` reported and ``Read.check`` found; None without either."""
    gauges: dict[str, int]


class PutResult(msgspec.Struct, array_like=True, frozen=True):
    """The result of ``Tier.put``."""

    results: object
    """The tier's results as plain data, unchecked."""
    spare: dict[bytes, float]
    """``Tier.spare`` of the put's salts, after it."""
    gauges: dict[str, int]


class TierCalls(Protocol):
    """A tier in a child process. ``make`` comes first, then ``open`` or ``examine``."""

    async def make(self, pickled: bytes) -> None:
        """Construct the tier from its class and options, without opening it."""
        ...

    async def examine(self, capacity_bytes: int) -> dict[str, str]:
        """Call ``Tier.examine``; its warnings are told to ``TierListener.said``."""
        ...

    async def open(self, arena: tuple[int, int, int], pickled: bytes) -> OpenedTier:
        """Map the arena and open the tier.

        ``arena`` is its descriptor, its number of slots, and the bytes of a slot. ``pickled`` holds
        layout, namespace, capacity, timeout, ``required`` and fields of the context.
        """
        ...

    async def get(self, verify: bool, reads: list[tuple[Ref, int]]) -> GetResult:
        """Call ``Tier.get`` for these blocks and slots."""
        ...

    async def put(
        self, verify: bool, writes: list[tuple[Ref, int, Facts, Coding | None, bool]]
    ) -> PutResult:
        """Call ``Tier.put``.

        ``writes`` has each block with its slot, its facts, its coding, and whether it replaces
        another block.
        """
        ...

    async def contains(self, blocks: list[Ref]) -> object:
        """Call ``Tier.contains``; return its results as plain data, unchecked."""
        ...

    async def remove(self, blocks: list[Ref]) -> None:
        """Call ``Tier.remove``."""
        ...

    async def purge(self, salt: bytes | None, number: int) -> int:
        """Call ``Tier.purge``; its progress is told to ``TierListener.progressed``."""
        ...

    async def sync(self) -> None:
        """Call ``Tier.sync``."""
        ...

    async def erase(self, salt: bytes | None, start: int) -> tuple[int, int | None]:
        """Call ``Tier.erase``."""
        ...

    async def survey(self, salt: bytes | None, anew: bool) -> list[BlockKey] | None:
        """Return the next batch of ``Tier.survey``, the first if ``anew``, None after the last."""
        ...

    async def spare(self, salts: list[bytes]) -> dict[bytes, float]:
        """Call ``Tier.spare`` for each of these salts."""
        ...

    async def recover(self, anew: bool) -> list[RecoveredBlock] | None:
        """Return the next batch of ``Tier.recover``, the first if ``anew``, None after the last."""
        ...

    async def aclose(self) -> None:
        """Call ``Tier.aclose``."""
        ...


class TierListener(Protocol):
    """The parent of the child process; it is notified."""

    def said(self, text: str) -> None:
        """Take a message of ``TierContext.say``, or a warning of ``Tier.examine``."""
        ...

    def progressed(self, number: int, done: int, total: int) -> None:
        """Take the progress of the purge with this number."""
        ...


# mypy allows no protocol where a class is expected, since the class might be instantiated
TIER: Final = Interface(TierCalls)  # type: ignore[type-abstract]
LISTENER: Final = Interface(TierListener)  # type: ignore[type-abstract]
