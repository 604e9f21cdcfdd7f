"""The small engine that drives a connector in the conformance suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvladder.connectors.base import Connector
from kvladder.gpu.copy.copier import JobId
from kvladder.hints import HintExecutor
from kvladder.keys import BlockKey, KeyScheme
from kvladder.manager import CacheManager, Fetch
from kvladder.policy.eviction import PRIORITY_MAX


class SampleEngine(ABC):
    """A small engine around the connector under test; all calls come from one thread.

    Its KV cache has numbered blocks of ``block_bytes``. It computes nothing: the suite writes each
    block. ``tokens`` always fill whole blocks. No call may wait for a tier or for a copy.
    """

    block_bytes: int
    """Bytes of one block, of all ranks together."""

    @property
    @abstractmethod
    def manager(self) -> CacheManager:
        """The cache that the connector uses."""

    @abstractmethod
    def write(self, block: int, data: bytes) -> None:
        """Write ``block_bytes`` bytes into a block, as computing it would."""

    @abstractmethod
    def read(self, block: int) -> bytes:
        """Return the bytes of a block."""

    @abstractmethod
    def save(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        pieces: Sequence[int] = (),
        priorities: Sequence[int] | None = None,
        salt: str = "",
    ) -> None:
        """Begin to save a prompt, whose KV is in ``blocks``.

        With ``pieces``, the engine computes and saves the prompt in pieces of these numbers of
        blocks, one after the other. ``priorities`` has one priority for each block.
        """

    @abstractmethod
    def match(self, tokens: Sequence[int], *, salt: str = "") -> Any:
        """Begin to search for a prompt; return an object that stands for the search."""

    @abstractmethod
    def found(self, match: Any) -> int | None:
        """Return the number of blocks found, or None while the search is in progress."""

    @abstractmethod
    def load(self, match: Any, blocks: Sequence[int]) -> Any:
        """Begin to load the found blocks into ``blocks``; return what ``loaded`` takes."""

    @abstractmethod
    def loaded(self, load: Any) -> int | None:
        """Return how many of its blocks the engine would read; None while they are copied.

        Blocks that the engine would compute again do not count.
        """

    @abstractmethod
    def drop(self, match: Any) -> None:
        """End a search without a load, as for a request that was aborted."""

    @abstractmethod
    def step(self) -> None:
        """Do what the engine does between two forward passes: poll, and hand over new copies."""

    @abstractmethod
    def reusable(self, block: int) -> bool:
        """Return whether the engine would give the block to another request now."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True while a save or load is in flight."""

    @abstractmethod
    def close(self) -> None:
        """End the copies, the connector and the manager, in this order."""


class ConnectorEngine(SampleEngine):
    """A sample engine for a subclass of ``Connector``; it lacks only ``write`` and ``read``.

    Parameters
    ----------
    connector:
        The connector under test. If it copies step by step, override ``step``.
    """

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self.block_bytes = connector.manager.layout.block_bytes
        self._names = KeyScheme(
            connector.manager.namespace, block_tokens=connector.manager.layout.block_tokens
        )
        executor = HintExecutor.of(connector.manager)
        if executor.name_blocks is None:
            executor.name_blocks = lambda tokens, salt: [self.keys(tokens, salt)]
        self._blocks: dict[JobId, Sequence[int]] = {}
        """Blocks of the jobs in flight."""
        self._loaded: dict[JobId, int] = {}

    @property
    def manager(self) -> CacheManager:
        return self.connector.manager

    def keys(self, tokens: Sequence[int], salt: str) -> list[BlockKey]:
        """Return the names of a prompt's blocks."""
        return self._names.chain(tokens, parent=self._names.root(salt=salt))

    def save(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        pieces: Sequence[int] = (),
        priorities: Sequence[int] | None = None,
        salt: str = "",
    ) -> None:
        keys, first, floor = self.keys(tokens, salt), 0, PRIORITY_MAX
        for length in pieces or [len(keys)]:
            part = slice(first, first + length)
            first += length
            started = self.connector.save(
                keys[part],
                blocks[part],
                priorities=None
                if priorities is None
                else [(one, None) for one in priorities[part]],
                parent_floor=floor,
                salt=salt,
            )
            floor = started.floor
            if started.job is not None:
                self._blocks[started.job] = blocks[part]

    def match(self, tokens: Sequence[int], *, salt: str = "") -> Fetch:
        return self.connector.match(self.keys(tokens, salt), salt=salt)

    def found(self, match: Fetch) -> int | None:
        return match.blocks if match.done else None

    def load(self, match: Fetch, blocks: Sequence[int]) -> JobId:
        job = self.connector.load(match, blocks)
        self._blocks[job] = blocks
        return job

    def loaded(self, load: JobId) -> int | None:
        return self._loaded.get(load)

    def drop(self, match: Fetch) -> None:
        match.release()

    def step(self) -> None:
        for one in self.connector.poll():
            blocks = self._blocks.pop(one.id)
            self._loaded[one.id] = len(blocks) if one.ok else 0

    def reusable(self, block: int) -> bool:
        return not any(block in blocks for blocks in self._blocks.values())

    @property
    def busy(self) -> bool:
        return bool(self._blocks)

    def close(self) -> None:
        self.connector.close()
        self.manager.close()
