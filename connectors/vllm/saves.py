"""Chooses the blocks that the scheduler half saves after a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from math import inf
from typing import Any

from kvladder.connectors.base import Connector
from kvladder.connectors.vllm.groups import VllmGroup, VllmGroups
from kvladder.connectors.vllm.requests.state import RequestState
from kvladder.gpu.copy.copier import JobId
from kvladder.keys import START, BlockKey
from kvladder.policy.eviction import PRIORITY_MAX


class Writes:
    """Collects, from one step to the next, the blocks that vLLM may write to."""

    def __init__(self, groups: VllmGroups) -> None:
        self._groups = groups
        self._given: list[int] = []

    def give(self, tables: Sequence[Sequence[int]], own: int) -> None:
        """Add the blocks, by group, that a request got for what follows its ``own`` tokens.

        They may be written by computing, or by a load of this or another connector.
        """
        for group in self._groups:
            self._given += tables[group.index][own // group.tokens :]

    def take(self, output: Any) -> Iterable[int]:
        """Return the blocks given since the last step, and those that this step may write to."""
        given, self._given = self._given, []
        return chain(given, written(self._groups, output))


def written(groups: VllmGroups, output: Any) -> Iterator[int]:
    """Yield the blocks that a step may write to, and no earlier step of the same request did."""
    for new in output.scheduled_new_reqs:
        for group in groups:
            yield from new.block_ids[group.index][new.num_computed_tokens // group.tokens :]
    cached = output.scheduled_cached_reqs
    for request_id, tables, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if tables:
            resumed = request_id in cached.resumed_req_ids  # then ``tables`` has all its blocks
            for group in groups:
                yield from tables[group.index][computed // group.tokens if resumed else 0 :]
    yield from output.new_block_ids_to_zero or ()
    for copy in copies_of(output):
        yield copy.dst_block_id


def copies_of(output: Any) -> Sequence[Any]:
    """Return the copies between blocks that a step makes before its forward pass."""
    return getattr(output, "kv_cache_block_copies", None) or ()


def part_tails(states: Mapping[str, RequestState], output: Any) -> None:
    """Exclude requests from the cache that begin with part of a block made by other weights.

    Such a part is in vLLM's own prefix cache. When vLLM asked the connector it counted only whole
    blocks, so the request now begins with more tokens than vLLM told.
    """
    cached = output.scheduled_cached_reqs
    begun = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    both = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    begun.update((i, computed) for i, computed in both if i in cached.resumed_req_ids)
    for request_id, computed in begun.items():
        state = states.get(request_id)
        if state is not None and computed > state.told:
            state.apart = True


class Saver:
    """Begins to save the blocks that a step completes.

    Parameters
    ----------
    default:
        True to save the blocks of requests that do not set ``save``.
    decode:
        True to also save blocks of generated tokens, if the request does not set it.
    interval:
        vLLM's ``prefix_cache_retention_interval``.
    owners:
        Receives, by copy, the number of its request's adapter, if it has one.
    """

    def __init__(
        self,
        groups: VllmGroups,
        connector: Connector,
        *,
        default: bool,
        decode: bool,
        interval: int | None,
        owners: MutableMapping[JobId, int],
    ) -> None:
        self._groups = groups
        self._connector = connector
        self._default = default
        self._decode = decode
        self._interval = interval
        self._owners = owners

    def full(self, state: RequestState, output: Any, computed: int) -> None:
        """Begin to save the blocks that are full once ``computed`` tokens are computed.

        ``state.due`` becomes the number of computed tokens at which to look again.
        """
        request = state.request
        state.due = inf
        if not self._saves(state):
            return
        end = computed if self._decodes(state) else min(computed, request.num_prompt_tokens)
        tables: Sequence[Sequence[int]] | None = None
        for group in self._groups:
            if group.handed:
                continue
            hashed, full = len(request.block_hashes) // group.hashes, end // group.tokens
            later = (computed // group.tokens + 1) * group.tokens
            state.due = min(state.due, computed if hashed < full else later)
            full, start = min(hashed, full), state.saved[group.index]
            if full <= start:
                continue
            state.saved[group.index] = full
            if tables is None:
                tables = output.kv_connector_block_state.get_block_ids(request.request_id)
                assert tables is not None
            blocks, keys = tables[group.index][start:full], state.keys(group, start, full)
            if group.kind == "full":
                # block 0 is vLLM's null block: save nothing from there on
                chosen: Sequence[int] = range(blocks.index(0) if 0 in blocks else len(blocks))
            else:
                ends = (
                    request.num_prompt_tokens - 1,
                    getattr(request, "shared_prefix_boundary", 0),
                )
                useful = self._groups.useful(group, self._interval, ends)
                chosen = [i for i, block in enumerate(blocks) if block and useful(start + i)]
            self._save(state, group, start, keys, blocks, chosen)

    def _saves(self, state: RequestState) -> bool:
        if state.policy.end_session:  # the session ends: no later request reads its blocks
            return False
        own = state.policy.save
        return self._default if own is None else own

    def _decodes(self, state: RequestState) -> bool:
        own = state.policy.save_decode
        return self._decode if own is None else own

    def _save(
        self,
        state: RequestState,
        group: VllmGroup,
        first: int,
        keys: Sequence[BlockKey],
        blocks: Sequence[int],
        chosen: Sequence[int],
    ) -> None:
        """Begin to save the ``chosen`` of some consecutive blocks, with the request's options.

        The floor of a block also counts the priorities of blocks before it that are not saved.
        """
        policy, request = state.policy, state.request
        begin = 0 if group.handed else first  # states may be offered with gaps between them
        wanted = policy.priorities(
            begin,
            first - begin + len(keys),
            block_tokens=group.tokens,
            prompt_tokens=request.num_prompt_tokens,
        )
        floor = state.floors[group.index] if begin else PRIORITY_MAX
        before = [] if wanted is None else [priority for priority, _ in wanted[: first - begin]]
        started = self._connector.save(
            keys,
            blocks,
            only=None if len(chosen) == len(keys) else chosen,
            priorities=None if wanted is None else wanted[first - begin :],
            parent_floor=min([floor, *before]),
            levels=policy.tiers.store,
            ttl_s=policy.ttl_s,
            salt=state.salt,
            group=group.index,
            session=policy.session,
            trace=state.trace,
            parent=next(iter(state.keys(group, first - 1, first)), None) if first else START,
        )
        if started.job is not None and state.number:
            self._owners[started.job] = state.number
        state.floors[group.index] = started.floor

    def handed(self, states: Mapping[str, RequestState], output: Any) -> None:
        """Begin to save the states that vLLM hands over, each exact after a number of tokens."""
        offers: Mapping[str, Sequence[tuple[int, int, int]]] = (
            getattr(output.kv_connector_block_state, "boundary_state_offloads", None) or {}
        )
        for request_id, entries in offers.items():
            state = states.get(request_id)
            if state is None or state.apart or state.adapter is None or not self._saves(state):
                continue
            for index, block, end in entries:
                group = self._groups[index]
                in_prompt = end <= state.request.num_prompt_tokens
                if not block or end % group.tokens or not (in_prompt or self._decodes(state)):
                    continue
                last = end // group.tokens - 1
                keys = state.keys(group, last, last + 1)
                if keys:
                    self._save(state, group, last, keys, [block], range(1))
