"""The open cache of one engine, which rank 0's process owns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvladder.compose import open_manager
from kvladder.config.stack import StackConfig
from kvladder.connectors.steps import StepConnector
from kvladder.connectors.trtllm.names import layout_of, rank_fields, ranks_of
from kvladder.connectors.trtllm.ranks import Ranks
from kvladder.connectors.trtllm.step import Halves, Meeting, taken
from kvladder.gpu.copy.pages import BlockPages
from kvladder.hints import HintExecutor
from kvladder.keys import BlockKey, KeyScheme
from kvladder.notices import Notices

logger = logging.getLogger("kvladder")


class Cache:
    """Rank 0's worker opens it and its scheduler uses it, both on the executor's thread.

    Raises
    ------
    ConfigError
        The cache cannot be opened; says where, what and what instead.
    """

    def __init__(
        self,
        halves: Halves,
        config: StackConfig,
        pages: BlockPages,
        *,
        tokens: int,
        notices: Notices,
    ) -> None:
        args: Any = halves.llm_args
        ranks = ranks_of(args)
        layout = layout_of(
            args, pages, tokens=tokens, ranks=ranks, fingerprint=config.model.fingerprint
        )
        self.manager = open_manager(config, layout)
        self.connector = StepConnector(self.manager, ranks=ranks)
        self.keys = KeyScheme(self.manager.namespace, block_tokens=tokens)
        HintExecutor.of(self.manager).name_blocks = self._named
        self.tokens = tokens
        """Tokens per block."""
        self._halves = halves
        self._rank_bytes = pages.block_bytes
        self._ranks = Ranks(ranks - 1, rank_fields(pages), notices)
        self._ranks.report_to(self.manager)
        logger.info("kvladder is ready: %s", "\n".join(config.summary(layout)))
        logger.debug("kvladder's settings\n%s", self.manager.describe())

    def _named(self, tokens: Sequence[int], salt: str) -> list[list[BlockKey]]:
        """Return the keys of a prompt's blocks, without an adapter."""
        return [self.keys.chain(tokens, parent=self.keys.root(salt=salt))]

    @property
    def complete(self) -> bool:
        """True if all ranks can copy."""
        return self._ranks.complete

    @property
    def meeting(self) -> Meeting:
        """Data that the other ranks need to join."""
        arena, ranks = self.manager.arena.handle, self._ranks
        return Meeting(ranks.address, arena, self._rank_bytes, ranks.secret)

    def settle(self) -> None:
        """Process the copies that have ended on all ranks."""
        self.connector.report([*taken(self._halves.ended), *self._ranks.ended()])

    def close(self) -> None:
        """Close the cache. This process's worker must be closed before. May be called again."""
        self._ranks.close()
        self.settle()
        self.connector.close()
        self.manager.close()
