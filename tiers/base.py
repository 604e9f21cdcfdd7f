"""The interface that a tier's author implements: six calls, four of them with batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from math import inf

from kvladder.errors import TierError
from kvladder.tiers.context import Progress, TierContext
from kvladder.tiers.label import Read, RecoveredBlock, Ref, Write

NO_PLACE = -1
"""The place of a block of a shared tier that this level holds no place for."""


class Medium:
    """What few tiers say or do; most leave all of it as it is."""

    block_bytes_min: int = 0
    """The smallest block that it is worth it for: a configuration with smaller ones is refused."""
    overhead_bytes: int = 0
    """Bytes that a block takes beside its slot, e.g. for its label; a capacity pays for them."""
    medium: str = "STORAGE"
    """What KV events call it: CPU for memory of this machine, STORAGE for anything colder."""
    recovers_checked: bool = False
    """Whether ``recover`` keeps its promises in any case: the level need not look at each block."""
    erases: bool = False
    """Whether blocks that it has forgotten lie there until ``erase`` overwrites them."""
    probe_max: int = 0
    """The largest batch of ``contains``; 0 stands for ``batch_max``."""
    probe_timeout_s: float | None = None
    """How long an answer of ``contains`` is waited for; None: as long as for any call."""
    probe_cache_s: float = 1.0
    """How long the answer that a block is not there is believed."""

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        """See whether what the settings name is there, and leave it as it is; facts for people.

        Called before anything is opened, outside of a running cache, and by nobody after ``open``.
        What is to be mended and is no reason not to start goes to ``warn``, a sentence each.

        Raises
        ------
        ConfigError, Unavailable
            ``open`` would raise it, too.
        """
        return {}

    async def erase(self, salt: bytes | None, start: int) -> tuple[int, int | None]:
        """Overwrite what forgotten blocks of this namespace left behind, or those of one salt.

        Only of tiers that say so by ``erases``; neither ``put`` nor ``remove`` is called meanwhile.
        A step that takes no longer than a ``put``: it begins at place ``start``, and at place 0
        with what makes all removals so far survive a power cut. Returns how many blocks it
        overwrote, which survives one too, and where to go on, None at the end.
        """
        raise TierError("there is nothing to erase", temporary=False)

    def spare(self, salt: bytes) -> float:
        """How many more blocks of one salt it takes now; any number unless there is a quota.

        Called on the loop: it does not wait. A level drops what is above it.
        """
        del salt
        return inf

    def gauges(self) -> Mapping[str, int]:
        """What a server says of itself, as last heard: for statistics, by their names."""
        return {}

    def describe(self) -> dict[str, str]:
        """Settings as they are in effect, without secrets."""
        return {}


class Tier(Medium, ABC):
    """A medium for blocks. A tier may forget; it must never lie.

    Rules for every call, which ``kvladder.testing.TierTests`` checks:

    - Batches hold at most ``batch_max`` blocks and no key twice; results have the length and the
      order of the batch.
    - The level holds a claim on every slot of a batch while the call lasts. When a call ends, by
      return, error or cancellation, the tier touches those slots no more.
    - A miss is a False, a failure is a :class:`TierError`. No other exception leaves a tier.
    - ``put`` stores ``Write.label()`` beside the bytes; ``get`` calls ``Read.came`` with both for
      each block that it answers True. The level checks what the tier has not checked itself.
    - Calls may overlap, except that ``put`` and ``remove`` of one key never do.
    """

    batch_max: int = 64
    """The largest batch the tier wants to be given."""
    durable: bool = False
    """Whether ``recover`` finds blocks again after the process has ended."""
    shared: bool = False
    """Whether others put into and remove from it, so that the level's index is only a guess.

    A shared tier ignores places, and is asked by ``contains`` how a prefix goes on. It lets blocks
    expire by itself. Nothing is removed from it but by a user, or to make room where it is full:
    what is of no use is put again, to ``replace`` it.
    """

    async def open(self, context: TierContext) -> None:
        """Get ready. Called before any other call, and again after a while if it failed.

        Raises
        ------
        ConfigError
            The settings are wrong, and would be tomorrow: says where, what and what instead. The
            cache does not start.
        Unavailable
            What they name cannot be used now, e.g. a full disk or a server that is down: says what
            to do about it. The cache starts without the level, unless it is ``required``, and
            opens it again later. Any other error counts as this one.
        """
        self.context = context

    @abstractmethod
    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        """Fill each view with its block and tell by ``came``; False where it is not there.

        What ``check`` refuses may be answered by either, and what is refused the level forgets,
        with what is not there. None where that cannot be told now, e.g. because one of
        several servers is silent: a miss of a block that may be there later.
        """

    @abstractmethod
    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        """Store each block and its label under its key and place; False where it was not stored.

        What is answered True can be got from then on. A place that is put again holds its old
        block no more.

        Raises
        ------
        TierFull
            The medium is full: nothing of this batch is claimed to be stored. Only of ``put``: a
            ``remove`` for which there is no room is tried again, and slower if it is a TierError.
        """

    @abstractmethod
    async def remove(self, blocks: Sequence[Ref]) -> None:
        """Forget these blocks; those that are not there are ignored."""

    @abstractmethod
    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        """Whether each block could be got now; a hint, since others may be removing it."""

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        """Remove the blocks of this namespace, or those of one salt in it, whoever put them.

        Only of shared tiers. Takes as long as it takes, in steps that let others have their turn.
        ``salt`` is a ``Facts.salt``; None means all of them. Returns how many were removed.
        """
        raise TierError("only a shared tier is purged", temporary=False)

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        """Yield batches of what an earlier process stored here under the same namespace.

        Each key and each place at most once, oldest first, each place below ``capacity_blocks``,
        also what has expired meanwhile: the level has it removed. Called once after ``open``, and
        again from the start if it failed. The default is right for tiers that are not ``durable``.
        """
        return
        yield []  # pragma: no cover - makes this an async generator

    async def aclose(self) -> None:
        """End every transfer, release every resource; may be called again."""
