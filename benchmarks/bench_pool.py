"""Compares the block pool and the key chain with vLLM's BlockPool and SGLang's radix cache.

All run in this process on the same keys. A request has 256 blocks of 16 tokens, or one. A figure is
the median over all requests of a round, in the best round. Ours is the pool with its defaults: it
keeps token ids, and lists children for partial matches. vLLM's pool does neither. SGLang's tree
compares tokens instead of looking up keys.

One block at a time, all are children of one root, and a commit finds the place of each among up to
50,000 siblings sorted by their tokens. The note has our pool without token ids and children
(``partial="off"``). Then a commit still checks that its caller holds the slot, that no slot has
another block, and that none is known. An eviction passes the steps of a batch, each a call of C and
one or two of Python: the order by priority that never evicts a block before its children, the ages
of evicted blocks, the index, and the lists of children. vLLM's takes the head of one list.

Only the interpreter bounds these figures. Where a pool grows, the limit is a dictionary and lists
of the same number of blocks, which memory also slows down.
"""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from benchmarks.row import Row
from benchmarks.sglang_tree import VERSION, Absent, SglangTree
from kvladder.gpu.pool.commit import Content
from kvladder.gpu.pool.pool import ROOT, BlockPool, Partial, PoolSettings
from kvladder.gpu.tree import columns
from kvladder.keys import BlockKey, KeyScheme, namespace

BLOCK = 16
POOL = 50_000
ROUNDS = 3
LEAVES, LEAVES_EVICTED = 50_000, 1_000
CHAIN_TOKENS = 131_072
SAMPLES = 4_000
"""Number of requests that are looked up, and that replace others."""
SIZES = (10**4, 10**5, 10**6, 10**7)
BYTES_PER_BLOCK = 700
"""Approximate memory per block while measuring, including keys and token ids."""

LOOPS = "our loops in C" if columns.NATIVE else "no compiler: our loops in Python"

Times = dict[str, list[float]]


class Pool(Protocol):
    """A pool to measure; its methods use the pool's own type for a request's blocks."""

    def allocate(self, count: int, /) -> Any: ...
    def commit(self, blocks: Any, keys: Sequence[BlockKey], tokens: bytes, /) -> Any: ...
    def free(self, blocks: Any, /) -> None: ...
    def lookup(self, keys: Sequence[BlockKey], /) -> Any: ...
    def hold(self, keys: Sequence[BlockKey], /) -> Any: ...


class Ours:
    """Our pool with its defaults."""

    def __init__(self, blocks: int, partial: Partial = "take") -> None:
        self._pool = BlockPool(PoolSettings(blocks, BLOCK, partial), now=perf_counter)
        self.allocate: Callable[[int], Any] = self._pool.allocate
        self.free: Callable[[Any], None] = self._pool.release
        self.lookup: Callable[[Sequence[BlockKey]], Any] = self._pool.match
        self.hold: Callable[[Sequence[BlockKey]], Any] = self._pool.acquire  # it includes a lookup

    def commit(self, blocks: Any, keys: Sequence[BlockKey], tokens: bytes) -> Any:
        return self._pool.commit(blocks, Content(keys, ROOT, ROOT.key, tokens))


def without_children(blocks: int) -> Ours:
    """Return our pool without token ids and lists of children."""
    return Ours(blocks, "off")


class Vllm:
    """vLLM's pool, called in the same way as by its own managers."""

    def __init__(self, blocks: int) -> None:
        made = import_module("vllm.v1.core.block_pool").BlockPool
        self._pool: Any = made(blocks + 1, enable_caching=True, hash_block_size=BLOCK)
        self.allocate: Callable[[int], Any] = self._pool.get_new_blocks

    def commit(self, blocks: Any, keys: Sequence[BlockKey], tokens: bytes) -> Any:
        request = SimpleNamespace(block_hashes=keys)
        self._pool.cache_full_blocks(request, blocks, 0, len(keys), BLOCK, 0)
        return blocks

    def free(self, blocks: Any) -> None:
        self._pool.free_blocks(reversed(blocks))

    def lookup(self, keys: Sequence[BlockKey]) -> Any:
        found: list[Any] = []
        groups = [0]
        for key in keys:
            cached = self._pool.get_cached_block(key, groups)
            if cached is None:
                break
            found.append(cached[0])
        return found

    def hold(self, keys: Sequence[BlockKey]) -> Any:
        found = self.lookup(keys)
        self._pool.touch(found)
        return found


class Plain:
    """Minimal bookkeeping: a dictionary of keys, and lists of references and keys.

    The number of blocks changes its cost only through their distance in memory.
    """

    def __init__(self, blocks: int) -> None:
        self._slot: dict[BlockKey, int] = {}
        self._key: list[BlockKey | None] = [None] * blocks
        self._held = [0] * blocks
        self._free = list(range(blocks))
        self._idle: OrderedDict[int, list[int]] = OrderedDict()
        """Idle requests by their first slot, least recently used first."""

    def allocate(self, count: int) -> list[int]:
        if self._free:
            taken = self._free[-count:]
            del self._free[-count:]
        else:
            _, taken = self._idle.popitem(last=False)
            for slot in taken:
                key = self._key[slot]
                assert key is not None
                del self._slot[key]
        for slot in taken:
            self._held[slot] = 1
        return taken

    def commit(self, blocks: list[int], keys: Sequence[BlockKey], tokens: bytes) -> list[int]:
        self._slot.update(zip(keys, blocks, strict=True))
        for slot, key in zip(blocks, keys, strict=True):
            self._key[slot] = key
        return blocks

    def free(self, blocks: list[int]) -> None:
        for slot in blocks:
            self._held[slot] = 0
        self._idle[blocks[0]] = blocks

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        return [self._slot[key] for key in keys]

    def hold(self, keys: Sequence[BlockKey]) -> list[int]:
        found = self.lookup(keys)
        for slot in found:
            self._held[slot] = 1
        del self._idle[found[0]]
        return found


def rows() -> Iterable[Row]:
    """Measure costs per block, eviction of leaves, the key chain, and growth with pool size."""
    yield from per_block(256, goals=True)
    yield from per_block(1, goals=False)
    yield from trees()
    yield chain()
    yield from growth()


def per_block(count: int, *, goals: bool) -> Iterable[Row]:
    """Measure both pools in turns, with requests of ``count`` blocks."""
    makes: tuple[Callable[[int], Pool], ...] = (Vllm, Ours, without_children)
    best: list[dict[str, float]] = [{} for _ in makes]
    for _ in range(ROUNDS):
        for result, make in zip(best, makes, strict=True):
            for name, seconds in measure(make, POOL, count).items():
                result[name] = min(seconds, result.get(name, seconds))
    theirs, ours, plain = best
    for name, seconds in ours.items():
        yield Row(
            name=f"pool {name}, {count} at a time",
            unit="ns/block",
            peer=theirs[name] * 1e9,
            ours=seconds * 1e9,
            goal="ratio <= 0.5" if goals else "",
            note=f"{POOL:,} blocks; the peer is vLLM's BlockPool; {LOOPS};"
            f" {plain[name] * 1e9:,.0f} without token ids and children",
        )


def measure(make: Callable[[int], Pool], blocks: int, count: int) -> dict[str, float]:
    """Return the median seconds per block of each operation, over requests that fill the pool."""
    rng = random.Random(1)
    requests = blocks // count
    keys = [
        [BlockKey(hashlib.sha256(b"%d %d" % (r, i)).digest()) for i in range(count)]
        for r in range(requests + min(requests, SAMPLES))
    ]
    tokens = [rng.randbytes(count * BLOCK * 4) for _ in range(1000)]
    pool = make(requests * count)
    times: Times = {}
    gc.collect()
    gc.disable()
    try:
        _run(pool, keys, requests, tokens, times)
    finally:
        gc.enable()
    return {name: median(taken) / count for name, taken in times.items()}


def _run(
    pool: Pool, keys: list[list[BlockKey]], requests: int, tokens: list[bytes], times: Times
) -> None:
    """Fill the pool, free all, look some up, and replace some, each in another order.

    All blocks are freed twice, and only the second time is measured. The first time needs new
    memory pages, and their cost depends on the machine's kernel.
    """
    rng, count = random.Random(2), len(keys[0])
    held: list[Any] = []
    for at, one in enumerate(keys[:requests]):
        blocks = _timed(times, "allocate", pool.allocate, count)
        some = tokens[at % len(tokens)]
        held.append(_timed(times, "commit", pool.commit, blocks, one, some))
    for at in rng.sample(range(requests), requests):
        pool.free(held[at])
    for at, one in enumerate(keys[:requests]):
        held[at] = pool.hold(one)
    for at in rng.sample(range(requests), requests):
        _timed(times, "free", pool.free, held[at])
    for at in rng.sample(range(requests), min(requests, SAMPLES)):
        found = _timed(times, "cached lookup", pool.lookup, _made_anew(keys[at]))
        found = _timed(times, "lookup and hold", pool.hold, _made_anew(keys[at]))
        assert len(found) == count
        pool.free(found)
    for one in keys[requests:]:
        blocks = _timed(times, "evict and allocate", pool.allocate, count)
        pool.free(pool.commit(blocks, one, tokens[0]))


def _made_anew(keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Return equal keys as new objects without a cached hash, as a new request makes them."""
    return [BlockKey(bytes(bytearray(key))) for key in keys]


def _timed(times: Times, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    begun = perf_counter()
    result = call(*arguments)
    times.setdefault(name, []).append(perf_counter() - begun)
    return result


def trees() -> Iterable[Row]:
    """Compare with SGLang: evict some of many leaves, and find a long prefix."""
    evict: list[float] = []
    match: list[float] = []
    note = f"the peer is SGLang {VERSION}'s radix cache in Python; {LOOPS}"
    try:
        for _ in range(ROUNDS):
            tree = SglangTree(BLOCK)
            slots = torch.arange(BLOCK)
            for leaf in range(LEAVES):
                tree.insert(tree.key(range(leaf * BLOCK, (leaf + 1) * BLOCK)), slots)
            evict.append(_seconds(tree.evict, LEAVES_EVICTED * BLOCK))
            assert tree.freed.tokens == LEAVES_EVICTED * BLOCK
            tree = SglangTree(BLOCK)
            prompt = tree.key(range(CHAIN_TOKENS))
            tree.insert(prompt, torch.arange(CHAIN_TOKENS))
            match.append(_seconds(tree.match, prompt))
    except Absent as error:
        note = str(error)
    ours_evict, ours_match = zip(*(_our_tree() for _ in range(ROUNDS)), strict=True)
    yield Row(
        name=f"evict {LEAVES_EVICTED:,} of {LEAVES:,} leaves",
        unit="ms",
        peer=min(evict) * 1e3 if evict else None,
        ours=min(ours_evict) * 1e3,
        goal="ours < 1",
        note=note,
    )
    yield Row(
        name=f"find {CHAIN_TOKENS:,} cached tokens by their keys",
        unit="ms",
        peer=min(match) * 1e3 if match else None,
        ours=min(ours_match) * 1e3,
        note=note + ", which has no keys to make, and no identity that outlives it",
    )


def _our_tree() -> tuple[float, float]:
    pool = Ours(LEAVES)
    rng = random.Random(1)
    for leaf in range(LEAVES):
        key = BlockKey(hashlib.sha256(b"%d" % leaf).digest())
        pool.free(pool.commit(pool.allocate(1), [key], rng.randbytes(BLOCK * 4)))
    evicted = _seconds(pool.allocate, LEAVES_EVICTED)
    pool = Ours(LEAVES)
    count = CHAIN_TOKENS // BLOCK
    keys = [BlockKey(hashlib.sha256(b"%d" % i).digest()) for i in range(count)]
    pool.free(pool.commit(pool.allocate(count), keys, bytes(CHAIN_TOKENS * 4)))
    return evicted, _seconds(pool.lookup, keys)


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    gc.collect()
    begun = perf_counter()
    call(*arguments)
    return perf_counter() - begun


def chain() -> Row:
    """Measure making all keys of a long prompt; vLLM's are made as by its hasher with sha256."""
    rng = random.Random(1)
    tokens = [rng.randrange(128_000) for _ in range(CHAIN_TOKENS)]
    scheme = KeyScheme(namespace({"model": "bench"}), block_tokens=BLOCK)
    hash_block = import_module("vllm.v1.core.kv_cache_utils").hash_block_tokens
    extra_keys = import_module("vllm.v1.core.kv_cache_utils").generate_block_hash_extra_keys
    sha256 = import_module("vllm.utils.hashing").sha256
    request = SimpleNamespace(mm_features=None, lora_request=None, cache_salt=None)
    request.prompt_embeds = None
    first: bytes = hashlib.sha256(pickle.dumps("0")).digest()

    def theirs() -> None:
        before = first
        for start in range(0, CHAIN_TOKENS, BLOCK):
            extra, _ = extra_keys(request, start, start + BLOCK, 0)
            before = hash_block(sha256, before, tokens[start : start + BLOCK], extra)

    theirs_s = min(_seconds(theirs) for _ in range(2 * ROUNDS))
    return Row(
        name=f"key chain of {CHAIN_TOKENS:,} tokens",
        unit="ms",
        peer=theirs_s * 1e3,
        ours=min(_seconds(scheme.chain, tokens) for _ in range(2 * ROUNDS)) * 1e3,
        goal="ours <= 7",
        note="both sha256; the peer is vLLM's request hasher",
    )


def growth() -> Iterable[Row]:
    """Measure the same operations in pools of growing size, as far as memory allows."""
    first: dict[str, tuple[float, float]] = {}
    for size in SIZES:
        if size * BYTES_PER_BLOCK > _available_bytes() // 2:
            return
        rounds = ROUNDS if size <= 10**5 else 1
        found, least = _best(Ours, size, rounds), _best(Plain, size, rounds)
        peers = _best(Vllm, size, rounds) if size <= 10**6 else {}
        for name in ("allocate", "free", "cached lookup", "evict and allocate"):
            ours, limit = first.setdefault(name, (found[name], least[name]))
            yield Row(
                name=f"pool of {size:,}: {name}",
                unit="ns/block",
                limit=least[name] * 1e9,
                peer=peers[name] * 1e9 if peers else None,
                ours=found[name] * 1e9,
                ratio=found[name] / ours,
                note=f"the ratio is to our own pool of {SIZES[0]:,}; the limit is a dictionary and"
                f" lists alone, {least[name] / limit:.2f} times its own with {SIZES[0]:,}: that is"
                " what memory takes; the peer is vLLM's",
            )


def _best(make: Callable[[int], Pool], size: int, rounds: int) -> dict[str, float]:
    found = [measure(make, size, 256) for _ in range(rounds)]
    return {name: min(one[name] for one in found) for name in found[0]}


def _available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
