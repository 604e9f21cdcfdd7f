"""The engine-neutral interface: what any engine calls, all of it sync and none of it waiting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Protocol

from kvladder.arena import Slot
from kvladder.gpu.copy.copier import Finished, JobId
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.policy.worth import Saves


class Match(Protocol):
    """The longest prefix of some keys that the cache can give, pinned until it is let go."""

    @property
    def done(self) -> bool:
        """Whether the answer is final: at the fetch deadline, or when computing is faster."""
        ...

    @property
    def blocks(self) -> int:
        """How many leading blocks there are; 0 until ``done``."""
        ...

    @property
    def slots(self) -> list[Slot]:
        """The slots that hold them."""
        ...

    @property
    def sources(self) -> list[str]:
        """The level that each of them came from."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when ``done``, or after ``timeout_s``; the one call that waits for a tier."""
        ...

    def release(self) -> None:
        """Unpin; the blocks stay cached. May be called again."""
        ...

    def forget(self) -> None:
        """Release, and remove the blocks everywhere: their bytes could not be used."""
        ...


class Connector(ABC):
    """What an engine calls, from one thread.

    Keys name blocks by content and prefix (see :class:`kvladder.keys.KeyScheme`), numbers name
    blocks in the engine's KV cache. Between ``load`` or ``save`` and the report of its end by
    ``poll``, the engine neither reuses nor writes the blocks concerned. Blocks of different layers
    or shapes are told apart by ``group``; a key names a block of one group.
    """

    @abstractmethod
    def match(
        self,
        keys: Sequence[BlockKey],
        *,
        levels: Collection[str] | None = None,
        salt: str = "",
        saves: Saves | None = None,
    ) -> Match:
        """Pin the longest cached prefix of ``keys`` and begin to bring up what lies below host.

        Only ``levels`` are read, by name, None for all. ``salt`` is bound into the keys. ``saves``
        is what the engine need not compute if all of it comes, None for the tokens of the blocks.

        Ask ``Match.done`` as often as you like; then give the match to ``load`` or ``release``.
        """

    @abstractmethod
    def load(self, match: Match, blocks: Sequence[int], *, first: int = 0, group: int = 0) -> JobId:
        """Begin to copy the matched blocks from ``first`` on into ``blocks``.

        ``first + len(blocks) <= match.blocks``. Takes the match over: it is released when the copy
        has ended; if it failed, its blocks are forgotten and ``blocks`` hold garbage.
        """

    @abstractmethod
    def save(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[int],
        *,
        priorities: Sequence[tuple[int, float | None]] | None = None,
        parent_floor: int = PRIORITY_MAX,
        levels: Collection[str] | None = None,
        ttl_s: float | None = None,
        salt: str = "",
        group: int = 0,
    ) -> JobId | None:
        """Begin to save those of ``blocks`` that are not cached yet and that a level would take.

        ``keys`` name consecutive blocks of one prefix, as many as there are ``blocks``, complete
        or complete once what the engine's device was told so far is done. ``priorities`` has a
        priority and its duration in seconds, None for good, for each of them, as
        :meth:`kvladder.Retention.of_blocks` returns it; None gives them the default. The other
        options are those of :meth:`kvladder.manager.CacheManager.save`. Returns None
        if there is nothing to copy. They are hits when the end of the job has been polled.
        """

    @abstractmethod
    def release(self, match: Match) -> None:
        """The match is not going to be loaded."""

    @abstractmethod
    def poll(self) -> list[Finished]:
        """The loads and saves that ended since the last call, each reported once."""

    @abstractmethod
    def close(self) -> None:
        """Give up what has not ended; the manager stays open. May be called again."""
