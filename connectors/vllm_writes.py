"""Which of vLLM's blocks are about to be written to: saves that read them must end before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from kvladder.connectors.vllm_groups import Groups


class Writes:
    """Collects them from one step to the next."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._given: list[int] = []

    def give(self, tables: Sequence[Sequence[int]], own: int) -> None:
        """A request has got its blocks, by group, and needs what follows its ``own`` tokens.

        Whether it computes that, or waits while we or another connector load it, is not known.
        """
        for group in self._groups:
            self._given += tables[group.index][own // group.tokens :]

    def take(self, output: Any) -> Iterable[int]:
        """The blocks that were given since the last step was made, and those that this one says."""
        given, self._given = self._given, []
        return chain(given, written(self._groups, output))


def written(groups: Groups, output: Any) -> Iterator[int]:
    """Blocks that a step may write to and no step before wrote to for the same request."""
    for new in output.scheduled_new_reqs:
        for group in groups:
            yield from new.block_ids[group.index][new.num_computed_tokens // group.tokens :]
    cached = output.scheduled_cached_reqs
    for request_id, tables, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if tables:
            resumed = request_id in cached.resumed_req_ids  # then they are the whole tables
            for group in groups:
                yield from tables[group.index][computed // group.tokens if resumed else 0 :]
    yield from output.new_block_ids_to_zero or ()
    for copy in getattr(output, "kv_cache_block_copies", None) or ():
        yield copy.dst_block_id
