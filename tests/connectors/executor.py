"""TensorRT-LLM's executor as its connectors see it, on a CPU, with any number of ranks.

It keeps the rules of the PyTorch back end. Both halves are made at once in two threads. The
scheduler's half is asked once for each request and called once for each step; its answer is pickled
and sent to every rank. Hooks are called in the order of a step. A request has ended once all ranks
report it, and unknown ids are an error. KV is a function of all earlier tokens, of the adapter and
of the rank, so wrong KV is detected.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from kvladder.connectors.trtllm.scheduler import KVLadderScheduler
from kvladder.connectors.trtllm.worker import KVLadderWorker
from tests.patience import until

BLOCK, LAYERS, ELEMENTS, BLOCKS = 16, 3, 512, 64
_NUMBERS = count()


@dataclass
class RequestData:
    """The part of a step's data that concerns one request; lists hold only new items."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    priorities: list[int] | None = None
    """Priorities of the new blocks, in every step, if the request sets a priority."""
    cache_salt: str | None = None
    block_hashes: list[int] = field(default_factory=lambda: [next(_NUMBERS)])
    """Hashes for events, of 64 bits; they differ each time here."""


@dataclass
class Answer:
    """The outcome of a request."""

    matched: int
    right: bool
    """Whether all KV of whole blocks is right, on all ranks."""
    saves: bool
    """Whether its blocks were kept for a save at its end."""


def args_of(model: str = "m", *, ranks: int = 1, **more: Any) -> SimpleNamespace:
    """``llm_args``."""
    kv = SimpleNamespace(tokens_per_block=BLOCK, enable_block_reuse=True, max_attention_window=None)
    return SimpleNamespace(model=model, tensor_parallel_size=ranks, kv_cache_config=kv, **more)


def kv_of(tokens: Sequence[int], index: int, rank: int, lora: object) -> torch.Tensor:
    """Return the KV of a block of a prompt; ``lora`` is the content of its adapter."""
    told = repr(([*tokens[: (index + 1) * BLOCK]], rank, lora))
    seed = int.from_bytes(hashlib.sha256(told.encode()).digest()[:4], "big")
    return torch.randn(LAYERS, 2, ELEMENTS, generator=torch.Generator().manual_seed(seed))


@dataclass
class Rank:
    """One process of the engine; all of them are in this one."""

    number: int
    worker: KVLadderWorker
    pool: torch.Tensor = field(default_factory=lambda: torch.zeros(BLOCKS, LAYERS, 2, ELEMENTS))


class Executor:
    """An engine; ``close`` it. ``register`` hands a rank's memory over in another way."""

    def __init__(
        self,
        args: SimpleNamespace | None = None,
        *,
        ranks: int = 1,
        register: Callable[[KVLadderWorker, torch.Tensor], None] | None = None,
    ) -> None:
        args = args or args_of(ranks=ranks)
        with ThreadPoolExecutor(2) as threads:
            scheduler = threads.submit(KVLadderScheduler, args)
            first = threads.submit(_worker, args, 0)
            self.scheduler, workers = scheduler.result(), [first.result()]
        # other processes have arguments of their own
        workers += [_worker(SimpleNamespace(**vars(args)), n) for n in range(1, ranks)]
        self.ranks = [Rank(number, one) for number, one in enumerate(workers)]
        for rank in self.ranks:
            if register is None:
                rank.worker.register_kv_caches(rank.pool)
            else:
                register(rank.worker, rank.pool)
        self.scheduler.wait_for_initialization()
        self.free = list(range(BLOCKS))
        self.adapters: dict[int, str] = {}
        """The content of each adapter by number; a client may give a number to another one."""
        self._number = 0
        self._kept: dict[int, list[int]] = {}
        self._said: dict[int, set[int]] = {}

    @property
    def manager(self) -> Any:
        """The cache's."""
        return self.scheduler._cache.manager

    def request(self, tokens: Sequence[int], **more: Any) -> SimpleNamespace:
        """A new one, not run yet."""
        self._number += 1
        given = {"cache_salt": None, "lora_task_id": None, **more}
        told = list(tokens)
        return SimpleNamespace(request_id=self._number, get_tokens=lambda beam: told, **given)

    def run(
        self,
        tokens: Sequence[int],
        *,
        own: int = 0,
        answer: Sequence[int] = (),
        at_once: int = 48,
        priorities: list[int] | None = None,
        by_step: bool = False,
        **more: Any,
    ) -> Answer:
        """Run one request: its prompt in steps of ``at_once`` tokens, then ``answer`` one by one.

        ``own`` tokens are in TensorRT-LLM's cache already. The connector learns all blocks at once.
        With ``by_step`` it learns those of the first step at their allocation, and the others with
        their steps, as in the second version of the KV cache manager.
        """
        request = self.request(tokens, **more)
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, own)
        assert not is_async
        assert matched % BLOCK == 0
        assert own + matched < len(tokens)
        whole = [*tokens, *answer]
        ids = [self.free.pop() for _ in range(-(-len(whole) // BLOCK))]
        for rank in self.ranks:
            rank.pool[ids] = float("nan")
            for index in range(own // BLOCK):
                rank.pool[ids[index]] = kv_of(whole, index, rank.number, self._lora(request))
        position, told, blocks = own + matched, 0, 0
        at_first = min(position + at_once, len(tokens)) if by_step else len(tokens)
        self.scheduler.update_state_after_alloc(request, ids[: -(-at_first // BLOCK)])
        while position < len(whole):
            in_prompt = position < len(tokens)
            step = min(at_once, len(tokens) - position) if in_prompt else 1
            known = len(tokens) if in_prompt else position + 1
            needed = -(-max(at_first, position + step) // BLOCK)
            data = RequestData(
                request.request_id,
                whole[told:known],
                ids[blocks:needed],
                position if told else position - matched,
                step,
                priorities=priorities and priorities[blocks:needed],
                cache_salt=request.cache_salt,
            )
            told, new, blocks = known, not told, needed
            self.step(
                [data] if new else [],
                [] if new else [data],
                partial(self._compute, whole, ids, range(position, position + step), request),
            )
            position += step
        right = all(
            torch.equal(rank.pool[ids[n]], kv_of(whole, n, rank.number, self._lora(request)))
            for rank in self.ranks
            for n in range(len(whole) // BLOCK)
        )
        return Answer(matched, right, self._over(request, ids))

    def _lora(self, request: Any) -> object:
        number = request.lora_task_id
        return None if number is None else (number, self.adapters.get(number))

    def _compute(
        self, tokens: Sequence[int], ids: list[int], part: range, request: Any, rank: Rank
    ) -> None:
        for index in range(part.start // BLOCK, -(-part.stop // BLOCK)):
            rank.pool[ids[index]] = kv_of(tokens, index, rank.number, self._lora(request))

    def step(
        self,
        new: list[RequestData],
        cached: list[RequestData],
        compute: Callable[[Rank], None] = lambda rank: None,
    ) -> None:
        """Run one step: schedule, call the hooks, and ``compute`` in place of a forward pass."""
        output = SimpleNamespace(new_requests=new, cached_requests=cached)
        told = pickle.dumps(self.scheduler.build_connector_meta(output))
        for rank in self.ranks:
            rank.worker.bind_connector_meta(pickle.loads(told))
            rank.worker.start_load_kv(None)
        for rank in self.ranks:
            for layer in range(LAYERS):
                rank.worker.wait_for_layer_load(layer, None)
            compute(rank)
            for layer in range(LAYERS):
                rank.worker.save_kv_layer(layer, None)
            rank.worker.wait_for_save(None)
            rank.worker._clear_connector_meta()
        self.finish([])

    def _over(self, request: Any, ids: list[int]) -> bool:
        """Free the blocks of an ended request, at once or when all ranks report it."""
        if not self.scheduler.request_finished(request, ids):
            self.free += ids
            return False
        self._kept[request.request_id] = ids
        self.finish([request.request_id])
        self.until(lambda: request.request_id not in self._kept)
        return True

    def finish(self, handed: list[int]) -> None:
        """Ask all ranks for the requests whose blocks are free."""
        for rank in self.ranks:
            saved, loaded = rank.worker.get_finished(handed, [])
            assert not loaded
            for request_id in saved:
                assert request_id in self._kept, "an id that was not handed in"
                self._said.setdefault(request_id, set()).add(rank.number)
        for request_id, ranks in [*self._said.items()]:
            if len(ranks) == len(self.ranks):
                self.free += self._kept.pop(request_id)
                del self._said[request_id]

    def idle(self) -> None:
        """Return when all that was saved is where it belongs."""
        cache = self.scheduler._cache
        self.until(lambda: not cache.connector.busy and self.manager.idle())

    def until(self, holds: Callable[[], object]) -> None:
        """Make steps in which nothing is computed until something is true."""

        def after_a_step() -> object:
            self.step([], [])
            return holds()

        until(after_a_step)

    def close(self) -> None:
        """End all ranks."""
        self.idle()
        self.manager.check()
        for rank in reversed(self.ranks):
            rank.worker.close()


def _worker(args: SimpleNamespace, number: int) -> KVLadderWorker:
    made = KVLadderWorker(args)
    made._rank = number
    return made
