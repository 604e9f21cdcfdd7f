"""A small engine with real KV tensors over a device cache; it checks the served bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import shake_128
from time import monotonic
from typing import Any

import torch

from kvladder.config.stack import load_config
from kvladder.device.cache import DeviceCache
from kvladder.device.opening import open_pools
from kvladder.gpu.requests.requests import Request
from kvladder.gpu.sizing.divide import divide
from kvladder.gpu.sizing.groups import Group
from kvladder.units import Size

WIDTH = 24
"""Bytes per token of each group."""
FULL = Group("all", 4)
REGISTERED_S = 60.0


class Model:
    """Stands in for a model: the KV of a token is a digest of all tokens before it."""

    def __init__(
        self,
        source: Mapping[str, Any],
        *groups: Group,
        blocks: int = 16,
        context: int = 16,
        step: int | None = None,
        reuse: bool = True,
        device: str = "cpu",
        **fields: str,
    ) -> None:
        self.groups = groups or (FULL,)
        self.device = device
        pairs = [(group, group.block_tokens * WIDTH) for group in self.groups]
        sizes = [size for _, size in pairs]
        memory = blocks * sum(sizes)
        config = load_config(source, overrides={"gpu": {"memory": Size(memory), "shares": sizes}})
        shares = config.gpu.shares
        division = divide(pairs, memory, context=context, step=step, shares=shares)
        self.cache: DeviceCache = open_pools(
            config,
            division,
            [self.allocate(at, share.blocks) for at, share in enumerate(division.shares)],
            fields={"model": "tiny", **fields},
            reuse=reuse,
        )
        self.requests = self.cache.requests
        arena, end_s = self.cache.manager.arena, monotonic() + REGISTERED_S
        while arena.admitted < arena.slots:  # a device registers the slots in the background
            assert monotonic() < end_s, f"{arena.admitted} of {arena.slots} slots are registered"
            self.cache.wait(0.01)

    def allocate(self, group: int, blocks: int) -> dict[str, torch.Tensor]:
        size = self.groups[group].block_tokens
        poison = torch.full((blocks, size, WIDTH), 0xAA, dtype=torch.uint8)
        return {"kv": poison.to(self.device)}

    def kv(self, request: Request, group: int, position: int) -> torch.Tensor:
        part = request.parts[group]
        words = part.tokens[: position + 1].tobytes()
        made = shake_128(f"{group} {part.root.salt} {part.root.lora}".encode() + words)
        return torch.frombuffer(bytearray(made.digest(WIDTH)), dtype=torch.uint8).to(self.device)

    def place(self, request: Request, group: int, position: int) -> torch.Tensor:
        block, within = divmod(position, self.groups[group].block_tokens)
        slot = request.tables[group][block]
        assert slot >= 0
        return self.cache.tensors[group]["kv"][slot, within]

    def settle(self) -> None:
        """Wait until no work is in flight."""
        self.cache.poll()
        for _ in range(5000):
            if not self.cache.port.busy:
                break
            self.cache.wait(1.0)
            self.cache.poll()
        for _ in range(5000):
            if self.cache.manager.idle():
                break
            self.cache.wait(0.001)
        self.cache.poll()
        self.cache.check()
        assert not self.cache.port.busy

    def begin(self, tokens: Sequence[int], **options: Any) -> Request:
        request = self.requests.begin(tokens, **options)
        while request.arriving:
            self.cache.wait(1.0)
            self.cache.poll()
        return request

    def compute(self, request: Request, end: int | None = None) -> None:
        """Check every byte that will be read, then compute up to ``end`` tokens and commit."""
        for number, copy in request.copies:
            kv = self.cache.tensors[number]["kv"]
            kv[copy.target, : copy.tokens] = kv[copy.source, : copy.tokens]
        self.requests.copied(request)
        last = len(request.tokens) if end is None else end
        for at, group in enumerate(self.groups):
            first = group.first(request.computed) * group.block_tokens
            for position in range(first, request.computed):
                if group.kind != "state" or position == request.computed - 1:
                    held = self.place(request, at, position)
                    assert torch.equal(held, self.kv(request, at, position)), (group, position)
            for position in range(request.computed, last):
                self.place(request, at, position).copy_(self.kv(request, at, position))
        self.requests.commit(request, last)

    def run(self, tokens: Sequence[int], **options: Any) -> int:
        """A whole request; how many tokens of its prompt were served."""
        request = self.begin(tokens, **options)
        self.compute(request)
        self.requests.release(request)
        self.cache.check()
        return request.cached

    def evict(self) -> None:
        """Have everything leave the device."""
        for pool in self.cache.pools:
            pool.evict(pool.blocks)
        self.settle()
        assert all(pool.cached == 0 for pool in self.cache.pools)

    def close(self) -> None:
        self.cache.close()
