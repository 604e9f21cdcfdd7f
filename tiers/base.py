"""The interface that an author of a tier implements: six calls, four of them with batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from math import inf
from typing import ClassVar

from kvladder.errors import TierError
from kvladder.keys import BlockKey
from kvladder.tiers.context import Progress, TierContext
from kvladder.tiers.label import Read, RecoveredBlock, Ref, Write

NO_PLACE = -1
"""The place of a block of a shared tier for which this level holds no place."""


class Medium:
    """The attributes and calls that only few tiers need; most tiers keep all these defaults."""

    block_bytes_min: int = 0
    """Smallest block that is worth storing; a configuration with smaller blocks is refused."""
    overhead_bytes: int = 0
    """Bytes that a block takes beside its slot, e.g. for its label; they count as capacity."""
    medium: str = "STORAGE"
    """Name of the medium in KV events: CPU for memory of this machine, STORAGE if colder."""
    recovers_checked: bool = False
    """True if ``recover`` always keeps its promises: the level need not check each block."""
    erases: bool = False
    """True if forgotten blocks stay on the medium until ``erase`` overwrites them."""
    surveys: bool = False
    """True if ``survey`` tells what lies on the medium."""
    probe_max: int = 0
    """Largest batch of ``contains``; 0 means ``batch_max``."""
    probe_timeout_s: float | None = None
    """Timeout of ``contains`` in seconds; None means the timeout of any other call."""
    probe_cache_s: float = 1.0
    """Seconds for which the level believes an answer that a block is not there."""
    late_s: float = 0.0
    """For a shared tier: seconds for which a ``put`` that failed may still come to be carried out.

    A client cannot take back a request that it has sent. The level removes a block that a user
    removes within this time once more at its end, and only then calls it removed. Zero means that
    nothing is stored once the call has ended.
    """

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        """Check that the things named by the settings are there; return facts for people.

        Changes nothing. It is called outside of a running cache, before anything is opened, and
        never after ``open``. Call ``warn`` with one sentence for each problem that should be fixed
        but does not prevent a start.

        Raises
        ------
        ConfigError, Unavailable
            ``open`` would raise it, too.
        """
        return {}

    async def sync(self) -> None:
        """Make all earlier removals survive a power cut.

        Called only if ``durable`` is True and ``shared`` is not, after removals by a user: they are
        done when it has returned. Neither ``put`` nor ``remove`` is called meanwhile. The default
        suits tiers in which a removal survives once ``remove`` has returned.
        """

    async def erase(self, salt: bytes | None, start: int) -> tuple[int, int | None]:
        """Overwrite the bytes that forgotten blocks of this namespace, or of one salt, left behind.

        Called only if ``erases`` is True; neither ``put`` nor ``remove`` is called meanwhile. One
        call is one step: it begins at place ``start`` and takes no longer than a ``put``. The step
        at place 0 first makes all earlier removals survive a power cut.

        Returns
        -------
        The number of blocks overwritten, which also survives a power cut, and the place where the
        next step begins, or None at the end.
        """
        raise TierError("this tier does not implement erase", temporary=False)

    async def survey(self, salt: bytes | None) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the blocks of this namespace, or of one salt, that lie on the medium now.

        It is a fresh look, not at what the tier remembers, for the check of a purge. It changes
        nothing. Blocks that were forgotten and are not overwritten yet are among them, and so are
        blocks with an unreadable salt. Called only if ``surveys`` is True.

        Raises
        ------
        PermissionDenied
            The medium does not let this client list blocks.
        """
        raise TierError("this tier does not implement survey", temporary=False)
        yield []  # pragma: no cover - makes this an async generator

    async def remember(self, name: str, state: bytes) -> None:
        """Keep up to a megabyte under a name of letters, in place of what it had; all or nothing.

        It is what the level's eviction policy has learned. Without a disk, keep nothing.
        """

    async def recall(self, name: str) -> bytes | None:
        """Return what ``remember`` kept last under this name, maybe damaged; None for nothing."""
        return None

    def spare(self, salt: bytes) -> float:
        """Return how many more blocks of one salt the tier takes now; infinity without a quota.

        Called on the event loop, so it must not wait. The level drops blocks above this number.
        """
        del salt
        return inf

    def gauges(self) -> Mapping[str, int]:
        """Return the numbers that a server last reported of itself, by name, for statistics."""
        return {}

    def describe(self) -> dict[str, str]:
        """Return the settings in effect as text, without secrets."""
        return {}


class Tier(Medium, ABC):
    """A medium for blocks. A tier may forget; it must never lie.

    Rules for every call, which ``kvladder.testing.TierTests`` checks:

    - Batches hold at most ``batch_max`` blocks and no key twice; results have the length and the
      order of the batch.
    - The level holds a claim on every slot of a batch while the call lasts. When a call ends, by
      return, error or cancellation, the tier touches those slots no more.
    - A miss is a False, a failure is a :class:`TierError`. A tier raises no other exception.
    - ``put`` stores ``Write.label()`` beside the bytes. ``get`` calls ``Read.came`` for each block
      that it answers True. The level checks every block that the tier did not check itself.
    - Calls may overlap, except that ``put`` and ``remove`` of one key never do.
    """

    batch_max: int = 64
    """Largest batch that the level gives to the tier."""
    durable: bool = False
    """True if ``recover`` finds blocks again after the process has ended."""
    shared: bool = False
    """True if others also put and remove blocks, so that the level's index is only a guess.

    A shared tier ignores places. The level calls ``contains`` to ask for the rest of a prefix. The
    tier lets blocks expire by itself. The level removes blocks only for a user, or to make room
    when the tier is full. It puts a useless block again, with ``Write.replace`` set.
    """

    resizes: ClassVar[bool] = False
    """True if ``resize`` changes the capacity of the open tier. Without it, a level of a private
    tier keeps its capacity until it is opened again. Shared tiers need no ``resize``."""

    def __repr__(self) -> str:
        kept = "shared" if self.shared else "durable" if self.durable else "not durable"
        state = "" if hasattr(self, "context") else ", not open yet"
        return f"<{type(self).__name__}: {self.medium}, {kept}{state}>"

    async def open(self, context: TierContext) -> None:
        """Get ready. Called before any other call but ``examine``; a failed call is tried again.

        Raises
        ------
        ConfigError
            The settings are wrong, and waiting does not help. The message says where, what was
            found and what to write instead. At the start of a cache, the cache does not start.
        Unavailable
            Something that the settings name cannot be used now, e.g. a full disk or a server that
            is down. The message says what to do about it. The cache starts without the level,
            unless it is ``required``, and opens it later. Any other error counts as this one.
        """
        self.context = context

    @abstractmethod
    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        """Fill each view with its block and call ``came``; return whether each block was found.

        The level forgets blocks that are not there, and blocks that ``check`` refuses: for these
        the answer may be True or False. Answer None if the tier cannot tell now, e.g. because one
        of several servers is silent: then it is a miss, and the level still knows the block.
        """

    @abstractmethod
    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        """Store each block and its label under its key and place; return whether each was stored.

        From then on ``get`` finds the blocks that were answered True. A block that is put at a
        place replaces the old block of that place.

        Raises
        ------
        TierFull
            The medium is full, and no block of this batch counts as stored, even if some of them
            lie there: the level uses their places for other blocks. Only ``put`` raises it. A
            ``remove`` that finds no room raises a TierError, and the level tries it again.
        """

    @abstractmethod
    async def remove(self, blocks: Sequence[Ref]) -> None:
        """Forget these blocks; ignore those that are not there.

        Raises
        ------
        PermissionDenied
            The medium does not let this client remove blocks. The level does not try again.
        """

    @abstractmethod
    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        """Return whether ``get`` would find each block now; a hint, since others may remove it."""

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        """Remove all blocks of this namespace, or of one salt in it, regardless of who put them.

        Called only if ``shared`` is True. It may take long, but works in short steps, so that
        other calls run in between. ``salt`` is a ``Facts.salt``; None means all salts. Blocks whose
        salt cannot be read may be of this one, and have to go, too. Returns the number of removed
        blocks.

        Raises
        ------
        PermissionDenied
            The medium does not let this client remove blocks. The level does not try again.
        """
        raise TierError("this tier does not implement purge", temporary=False)

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        """Yield batches of the blocks that an earlier process stored under the same namespace.

        Yields the oldest block first, each key and each place at most once, and only places below
        ``capacity_blocks``. Expired blocks are among them: the level removes these. Called once
        after ``open``, and again from the start if it failed. The default suits tiers that are not
        ``durable``.
        """
        return
        yield []  # pragma: no cover - makes this an async generator

    async def resize(self, capacity_blocks: int) -> None:
        """Get ready for places below another capacity, and give up the space of all others.

        Called only if ``resizes`` is True. No block is stored at a place that is given up, and no
        call concerns one. Other calls may be running.

        Raises
        ------
        TierError
            It is not possible, now or at all: nothing has changed.
        """
        raise TierError("this tier does not implement resize", temporary=False)

    async def aclose(self) -> None:
        """End every transfer and release every resource; may be called again."""
