"""The engine that the conformance suite for hints drives, and one over a sample engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from threading import Event
from typing import Any, Final, NamedTuple

from kvladder.hints import ActionResult, HintExecutor
from kvladder.hints.executor import POSTED
from kvladder.hints.requests import RequestHints, begin
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.testing.engines.engine import SampleEngine

EVERY_S: Final = 0.001
TRIES_MAX: Final = 50
"""Largest number of searches for a prompt: host may have no room for blocks of low priority."""


def hint_envelope(
    *actions: Mapping[str, Any], message: str, version: str = "0.1"
) -> dict[str, Any]:
    """Return an envelope; each action says its verb as ``do``, and its payload."""
    made = [
        {
            "action_id": f"a{number}",
            "action_type": action["do"],
            "action_version": "1",
            "payload": {name: value for name, value in action.items() if name != "do"},
        }
        for number, action in enumerate(actions)
    ]
    return {"protocol_version": version, "message_id": message, "actions": made}


class Served(NamedTuple):
    """What became of a request."""

    loaded: int
    """Number of its blocks that came from the cache, with the right bytes."""
    results: Sequence[ActionResult] = ()
    """Outcomes of its hints."""


class HintedEngine(ABC):
    """An engine that obeys hints; all calls come from one thread.

    It keeps nothing of a request but what its cache keeps. Its connector names the blocks of
    tokens: see ``HintExecutor.name_blocks``.
    """

    @property
    @abstractmethod
    def manager(self) -> CacheManager:
        """The cache that the engine uses."""

    @abstractmethod
    def serve(
        self, tokens: Sequence[int], *, salt: str = "", hints: Mapping[str, Any] | None = None
    ) -> Served:
        """Serve a prompt of whole blocks to its end, until its saves are in the cache.

        Loads what is cached of it, and raises AssertionError if a byte of that is wrong. ``hints``
        is an envelope that comes with the request, if the engine carries any.
        """

    def hint(self, envelope: object) -> Sequence[ActionResult]:
        """Act on an envelope that comes without a request."""
        return HintExecutor.of(self.manager).apply(envelope, caller=POSTED)

    @abstractmethod
    def close(self) -> None:
        """Close the engine and its cache."""


class HintedSample(HintedEngine):
    """A sample engine whose requests are saved whole, and may bring hints.

    Parameters
    ----------
    blocks:
        The numbers of blocks of the engine that requests may use.
    """

    def __init__(
        self,
        engine: SampleEngine,
        *,
        block_tokens: int,
        blocks: Sequence[int],
        patience_s: float = 300.0,
    ) -> None:
        self.engine = engine
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._patience_s = patience_s

    @property
    def manager(self) -> CacheManager:
        return self.engine.manager

    def serve(
        self, tokens: Sequence[int], *, salt: str = "", hints: Mapping[str, Any] | None = None
    ) -> Served:
        executor = HintExecutor.of(self.manager)
        assert executor.name_blocks is not None, "the connector does not name blocks of tokens"
        runs = executor.name_blocks(tokens, salt)
        begun = RequestHints()
        if hints is not None:
            begun = begin(executor, hints, salt=salt, ranks_saves=False)
        blocks = self._blocks[: len(tokens) // self._block_tokens]
        loaded = self._loaded(tokens, blocks, runs[0], salt)
        for index, block in enumerate(blocks):
            self.engine.write(block, self._data(tokens, index, salt))
        self.engine.save(tokens, blocks, salt=salt)
        self._until(lambda: not self.engine.busy and self.manager.idle())
        begun.finish(executor, runs, salt)
        self._until(self.manager.idle)
        return Served(loaded, begun.results)

    def _loaded(
        self, tokens: Sequence[int], blocks: Sequence[int], keys: Sequence[BlockKey], salt: str
    ) -> int:
        """Load what is cached, check its bytes, and return the number of blocks."""
        match, found, tries = None, 0, 0

        def is_found() -> bool:
            """Ask a few times while less is found than is held: an engine may give up a tier."""
            nonlocal match, found, tries
            tries += 1
            one = self.engine.match(tokens, salt=salt)
            self._until(lambda: self.engine.found(one) is not None)
            found = self.engine.found(one) or 0
            if found < self.manager.lookup(keys).total and tries < TRIES_MAX:
                self.engine.drop(one)
                return False
            match = one
            return True

        self._until(is_found)
        if not found:
            self.engine.drop(match)
            return 0
        load = self.engine.load(match, blocks[:found])
        self._until(lambda: self.engine.loaded(load) is not None)
        for index in range(self.engine.loaded(load) or 0):
            right = self.engine.read(blocks[index]) == self._data(tokens, index, salt)
            assert right, f"wrong bytes in block {index} of the prompt"
        return self.engine.loaded(load) or 0

    def _data(self, tokens: Sequence[int], index: int, salt: str) -> bytes:
        seed = repr((list(tokens[: (index + 1) * self._block_tokens]), salt))
        return Random(seed).randbytes(self.engine.block_bytes)

    def _until(self, holds: Callable[[], object]) -> None:
        end = time.monotonic() + self._patience_s
        while not holds():
            assert time.monotonic() < end, "the engine does not come to an end"
            self.engine.step()
            Event().wait(EVERY_S)

    def close(self) -> None:
        self.engine.close()
