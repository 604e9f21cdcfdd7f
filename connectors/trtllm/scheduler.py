"""The scheduler half: decides what is loaded and saved, in rank 0's process."""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from kvladder.connectors.trtllm.bases import SchedulerBase
from kvladder.connectors.trtllm.cache import Cache
from kvladder.connectors.trtllm.options import check_engine, read
from kvladder.connectors.trtllm.step import TrtllmStep, halves_of
from kvladder.gpu.copy.copier import JobId
from kvladder.keys import START, BlockKey
from kvladder.manager import Fetch
from kvladder.notices import Notices
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX
from kvladder.runtime import SystemClock
from kvladder.traces.recording import recorder_of

NO_PAGE: Final = -1
"""Entry of a list of blocks that stands for no block."""
CONTENTS: Final = (
    "multimodal_hashes",
    "multimodal_embedding",
    "prompt_embedding_table",
    "mrope_rotary_cos_sin",
    "py_multimodal_data",
    "lora_task_id",
)
"""Attributes with which a request has more than tokens, so tokens do not identify its blocks.

For a LoRA adapter, TensorRT-LLM tells only the number that the client chose. The client may reuse
that number for other weights, and nothing here would notice.
"""
START_S: Final = 600.0
"""Seconds to wait for the KV cache's memory."""


@dataclass(slots=True)
class TrtllmRequest:
    """State of a request that has not ended."""

    salt: str
    root: BlockKey
    tokens: list[int]
    prompt: int
    """Number of tokens of its prompt."""
    keys: list[BlockKey] = field(default_factory=list[BlockKey])
    """Keys of its whole blocks, as far as computed."""
    blocks: list[int] = field(default_factory=list[int])
    """Blocks of TensorRT-LLM's pool, in the order of the tokens."""
    priorities: list[int] = field(default_factory=list[int])
    """Priorities of these blocks, if TensorRT-LLM gives them."""
    match: Fetch | None = None
    """Fetch of the promised blocks, until they are being copied."""
    first: int = 0
    """Index within ``match`` of the first block that is wanted."""
    asked: tuple[int, int] = (0, 0)
    """Positions of the first block that the cache was asked for, and of the one after the last."""
    promised: range = range(0)
    """Positions of the blocks that come from us."""
    taken: int | None = None
    """Promised tokens that TensorRT-LLM counts as computed, if it says so."""
    saved: int = 0
    """Number of leading blocks already offered for saving."""
    floor: int = PRIORITY_MAX
    told: bool = False
    """True once a step has included it."""
    apart: bool = False
    """True if its tokens are uncertain, so its blocks cannot be named and are not saved."""


class KVLadderScheduler(SchedulerBase):  # type: ignore[misc]
    """The class that TensorRT-LLM creates on rank 0; its executor's thread calls it.

    A promise cannot be taken back, and a promised block that did not arrive would cause wrong
    tokens. So every promised block already lies in the arena, checked and pinned.

    Parameters
    ----------
    llm_args:
        Arguments of the engine.

    Raises
    ------
    ConfigError
        No stack is named, its settings are wrong, or kvladder does not support the engine.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # pyright: ignore[reportUnknownMemberType]
        check_engine(llm_args)
        self._options, _ = read(os.environ)
        self._halves = halves_of(llm_args)
        self._notices = Notices(SystemClock().now)
        self._requests: dict[int, TrtllmRequest] = {}
        self._saving: dict[JobId, int] = {}
        """Request that each saving copy belongs to."""

    @property
    def _cache(self) -> Cache:
        assert self._halves.cache is not None, "the worker has not registered its KV cache yet"
        return self._halves.cache

    def wait_for_initialization(self) -> None:
        if not self._halves.ready.wait(START_S):
            raise TimeoutError(f"the worker did not register its KV cache within {START_S} s")

    # ---- the start of a request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens behind the computed ones can be loaded in the next step."""
        try:
            return self._promise(request, num_computed_tokens), False
        except Exception as error:  # noqa: BLE001 - an engine must outlive its cache
            self._forget(request.request_id)
            self._notices.say("ask", f"a request is not cached: {error!r}")
            return 0, False

    def _promise(self, request: Any, computed: int) -> int:
        cache = self._cache
        cache.settle()
        self._forget(request.request_id)
        beside = [name for name in CONTENTS if _is_there(getattr(request, name, None))]
        if beside:
            what = f"{', '.join(beside)}, so tokens alone do not name its blocks"
            self._notices.say("contents", f"a request is not cached: it has {what}")
            return 0
        tokens = [int(token) for token in request.get_tokens(0)]
        salt = str(getattr(request, "cache_salt", None) or "")
        state = TrtllmRequest(salt, cache.keys.root(salt=salt), tokens, len(tokens))
        self._requests[request.request_id] = state
        recorder = recorder_of(cache.manager)
        if recorder is not None:
            whole = self._named(state, len(tokens) // cache.tokens)
            recorder.arrived(request.request_id, whole, len(tokens))
        first, rest = divmod(computed, cache.tokens)
        usable = (len(tokens) - 1) // cache.tokens  # one token is always computed
        if rest or first >= usable or not cache.complete:
            return 0
        state.asked = first, usable
        wanted = self._named(state, usable)[first:]
        match = cache.manager.fetch(wanted, deadline_s=self._options.patience_s, salt=salt)
        match.wait()
        if match.blocks < len(wanted):  # bring the rest up for later requests with this prefix
            cache.connector.rising.add([cache.manager.fetch(wanted[match.blocks :], salt=salt)])
        if not match.blocks:
            match.release()
            return 0
        state.match, state.promised = match, range(first, first + match.blocks)
        cache.manager.touch(wanted[: match.blocks])
        return match.blocks * cache.tokens

    def _named(self, state: TrtllmRequest, blocks: int) -> list[BlockKey]:
        """Return the keys of a request's first blocks; compute those that are not known yet."""
        known, size = len(state.keys), self._cache.tokens
        if known < blocks:
            parent = state.keys[-1] if known else state.root
            state.keys += self._cache.keys.chain(
                state.tokens[known * size : blocks * size], parent=parent
            )
        return state.keys[:blocks]

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Note how many promised tokens are taken: there may be blocks for fewer.

        ``block_ids`` is ignored: it may lack some blocks, and each step names its own.
        """
        state = self._requests.get(request.request_id)
        if state is not None:
            state.taken = getattr(request, "py_num_connector_matched_tokens", None)

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids: Any) -> None:
        """Do as ``update_state_after_alloc``; there is one group."""
        self.update_state_after_alloc(request, [])

    # ---- a step

    def build_connector_meta(self, scheduler_output: Any) -> TrtllmStep:
        """Return the workers' part of the step that was just scheduled."""
        cache = self._cache
        cache.settle()
        step = TrtllmStep()
        if not cache.complete:
            step.meeting = cache.meeting
        for data in scheduler_output.new_requests:
            self._advance(data, new=True)
        for data in scheduler_output.cached_requests:
            self._advance(data, new=False)
        for job in cache.connector.take():
            if job.direction == "onboard":
                step.loads.append(job)
            else:
                step.saves.append((self._saving[job.id], job))
        return step

    def _advance(self, data: Any, *, new: bool) -> None:
        """Begin to load a request's promised blocks, and to save blocks that the step completes."""
        state = self._requests.get(data.request_id)
        if state is None:
            return
        tokens = [int(token) for token in data.new_tokens]
        state.blocks += data.new_block_ids
        state.priorities += [int(one) for one in getattr(data, "priorities", None) or ()]
        end = data.computed_position + data.num_scheduled_tokens
        if not state.told:
            state.told, state.apart = True, tokens != state.tokens
            end += self._load(state)  # ``computed_position`` does not count these tokens
        else:
            state.tokens += tokens
        # If the known tokens do not end where the step does, they are not those it computes.
        if len(state.tokens) != max(state.prompt, end):
            state.apart = True
            what = f"its known tokens end at {len(state.tokens)}, but the step ends at {end}"
            self._notices.say("tokens", f"a request is not saved: {what}")
        if not state.apart and self._cache.complete:
            try:
                self._save(data.request_id, state, end // self._cache.tokens)
            except Exception as error:  # noqa: BLE001 - an engine must outlive its cache
                self._notices.say("save", f"a request is not saved: {error!r}")

    def _load(self, state: TrtllmRequest) -> int:
        """Load the promised blocks; return how many of their tokens count as computed.

        All promised blocks that have a place are loaded. If fewer tokens are counted, the engine
        computes the others again over them. Raises ValueError if a counted block has no place: the
        engine would read a block that was never loaded.
        """
        size = self._cache.tokens
        whole = len(state.promised) * size
        taken = whole if state.taken is None else min(state.taken, whole)
        if state.match is None:
            return taken
        match, state.match = state.match, None
        places = state.blocks[state.promised.start : state.promised.stop]
        targets = list(takewhile(lambda block: block != NO_PAGE, places))
        if len(targets) * size < taken:
            match.release()
            raise ValueError(
                f"{whole // size} blocks were promised, but the engine gave places {places}"
            )
        state.promised = state.promised[: len(targets)]
        if targets:
            self._cache.connector.load(match, targets, first=state.first)
        else:
            match.release()
        return taken

    def _save(self, request_id: int, state: TrtllmRequest, full: int) -> None:
        """Begin to save the blocks that are full when the step ends."""
        full = min(full, len(state.blocks), len(state.tokens) // self._cache.tokens)
        begin = state.saved
        if full <= begin:
            return
        state.saved = full
        recorder = recorder_of(self._cache.manager)
        if recorder is not None and begin < state.prompt // self._cache.tokens <= full:
            recorder.saved(request_id)
        named = self._named(state, full)
        keys = named[begin:]
        blocks = state.blocks[begin:full]
        new = [begin + at not in state.promised for at in range(len(blocks))]
        only = [at for at, block in enumerate(blocks) if block != NO_PAGE and new[at]]
        started = self._cache.connector.save(
            keys,
            blocks,
            only=only,
            priorities=_said(state.priorities, begin, full),
            parent_floor=state.floor,
            salt=state.salt,
            parent=named[begin - 1] if begin else START,
        )
        state.floor = started.floor
        if started.job is not None:
            self._saving[started.job] = request_id

    # ---- the end of a request

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Return whether its blocks are being saved; the workers then say when to free them."""
        cache = self._cache
        cache.settle()
        recorder, state = recorder_of(cache.manager), self._requests.get(request.request_id)
        if recorder is not None and state is not None:
            recorder.finished(
                request.request_id,
                (),
                len(state.tokens) - state.prompt,
                asked=state.asked,
                answer=state.keys[state.prompt // cache.tokens : state.saved],
            )
        self._forget(request.request_id)
        under_way = {one.job.id for one in cache.connector.saving}
        self._saving = {job: owner for job, owner in self._saving.items() if job in under_way}
        return request.request_id in self._saving.values()

    def request_finished_by_layer_group(self, request: Any, cache_block_ids: Any) -> bool:
        """Do as ``request_finished``; there is one group."""
        return self.request_finished(request, [])

    def request_reset(self, request: Any) -> None:
        """Forget a request that starts again in other blocks; TensorRT-LLM will ask for it again.

        Other requests may overwrite its blocks while they are being saved, so these saves are void.
        """
        self._forget(request.request_id)
        self._cache.settle()
        for one in self._cache.connector.saving:
            if self._saving.get(one.job.id) == request.request_id:
                one.ok = False

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Cancel promised tokens ``start <= n < end``: a part at either end, or all of them.

        The other tokens count as computed, so each block that has any of them is still loaded.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.match is None:
            return
        left, size = state.promised, self._cache.tokens
        begin, stop = -(-start // size), end // size
        if begin <= left.start:
            left = left[max(stop - left.start, 0) :]
        elif stop >= left.stop:
            left = left[: begin - left.start]
        state.first += left.start - state.promised.start
        state.promised = left
        if not left:
            state.match.release()
            state.match = None

    def _forget(self, request_id: int) -> None:
        state = self._requests.pop(request_id, None)
        if state is not None and state.match is not None:  # promised, never scheduled
            state.match.release()


def _is_there(value: Any) -> bool:
    """Return whether an attribute has a value that is not empty; any tensor of a size counts."""
    return value is not None and (not isinstance(value, Sized) or len(value) > 0)


def _said(priorities: Sequence[int], begin: int, end: int) -> list[tuple[int, float | None]] | None:
    """Return the blocks' priorities without expiry; blocks without a given one get the default."""
    if not priorities:
        return None
    return [
        (priorities[at] if at < len(priorities) else PRIORITY_DEFAULT, None)
        for at in range(begin, end)
    ]
