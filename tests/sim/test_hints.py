"""Random hints of two tenants, with saves, loads, purges, faults and restarts between them.

``KVLADDER_HINTS`` is the number of actions; a night's run takes a million.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from random import Random
from typing import Any

import pytest

from kvladder.hints import HintExecutor
from kvladder.hints.executor import OwnRequest
from kvladder.keys import BlockKey, salt_digest
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import Limits
from kvladder.testing.fakes import FakeStore, FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LevelSpec, SimCache

ACTIONS = int(os.environ.get("KVLADDER_HINTS", "4000"))
LIMITS = Limits(priority=80, pin_s=50.0)
SALTS = ("", "one", "two")
SLOTS = 24
LENGTH = 6


class HintWorld:
    """One engine that restarts, over a durable private level and a shared one."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.private, self.shared = FakeStore(), FakeStore()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.sent = 0
        self.ended = 0

    async def open(self) -> None:
        shared = SharedFakeTier(store=self.shared, latency_s=0.02)
        shared.removable = lambda _: True
        self.tiers = [FakeTier(store=self.private, durable=True, latency_s=0.01), shared]
        self.cache = await SimCache.open(
            LevelSpec(self.tiers[0], capacity_blocks=40),
            LevelSpec(self.tiers[1], OffloadRule(min_priority=60), capacity_blocks=30),
            slots=SLOTS,
            reserve_blocks=2,
            limits=LIMITS,
        )
        self.hints = HintExecutor(self.cache.manager)

    async def close(self) -> None:
        self.hints.close()
        self.cache.manager.check()
        for tier in self.tiers:
            tier.heal()
        await self.cache.aclose()
        assert [tier.violations for tier in self.tiers] == [[], []]

    def prompt(self, tenant: int) -> list[BlockKey]:
        """Return the keys of one of a tenant's few prompts, or of their first blocks."""
        first = self.random.randrange(5)
        path = [1000 * tenant + first, *range(LENGTH - 1)]
        return SimCache.keys(*path)[: self.random.randint(1, LENGTH)]

    def payload(self, tenant: int) -> dict[str, Any]:
        """Return the scope of an action: sometimes of another tenant, or of nothing."""
        other = self.random.randrange(len(SALTS))
        whose = self.random.choice((tenant, tenant, tenant, other))
        scope = self.random.choice(("keys", "keys", "session", "own"))
        if scope == "keys":
            return {"keys": [key.hex() for key in self.prompt(whose)], "salt": SALTS[tenant]}
        if scope == "session":
            return {"session": f"s{whose}-{self.random.randrange(3)}", "salt": SALTS[tenant]}
        return {}

    def action(self, tenant: int) -> dict[str, Any]:
        random = self.random
        verb = random.choice(("pin", "retain", "prefetch", "demote", "share", "fly"))
        payload = self.payload(tenant)
        if verb == "pin":
            payload["ttl_s"] = random.choice((0.5, 20, 400))
        elif verb == "retain":
            payload["priority"] = random.choice((0, 20, 35, 60, 100))
            if random.random() < 0.5:
                payload["ttl_s"] = random.choice((1, 400))
        elif verb == "prefetch":
            if random.random() < 0.3:
                payload["budget_blocks"] = random.randint(1, 4)
            if random.random() < 0.1:
                payload["cancels"] = str(random.randrange(max(1, self.sent)))
        elif verb in ("demote", "share"):
            to = random.choice((None, "level1", "level2", "out", "attic"))
            if to is not None:
                payload["to"] = to
        return {
            "action_id": "a",
            "action_type": verb,
            "action_version": "1",
            "payload": payload,
        }

    def ranks(self, salts: set[bytes]) -> dict[tuple[str, BlockKey], int]:
        """Return the priority of each held block of these salts, by level and key."""
        found: dict[tuple[str, BlockKey], int] = {}
        for name, index in self.cache.stack.indexes.items():
            for key in index:
                place = index.place(key)
                assert place is not None
                meta = index.meta(place)
                if meta.terms.salt in salts:
                    found[name, key] = meta.priority
        return found

    async def load(self, tenant: int) -> None:
        """Load a prompt as its tenant, and check every byte."""
        keys = self.prompt(tenant)
        fetch = self.cache.manager.fetch(keys, salt=SALTS[tenant], deadline_s=1.0)
        while not fetch.done:  # noqa: ASYNC110 - as an engine asks
            await asyncio.sleep(0.01)
        for key, slot in zip(keys, fetch.slots, strict=False):
            assert bytes(self.cache.arena.view(slot)[:64]) == self.cache.payload(key)
        fetch.release()

    def hint(self) -> None:
        """Send an envelope of one tenant: blocks of others keep their ranks.

        They keep their levels, too, unless something is brought up to host, which makes room there.
        """
        tenant = self.random.randrange(len(SALTS))
        salt = SALTS[tenant]
        manager = self.cache.manager
        others = {salt_digest(manager.namespace, one) for one in SALTS if one != salt}
        actions = [self.action(tenant) for _ in range(self.random.randint(1, 3))]
        number = self.sent if self.random.random() < 0.95 else self.random.randrange(self.sent + 1)
        envelope = {"protocol_version": "0.1", "message_id": str(number), "actions": actions}
        request = OwnRequest(self.prompt(tenant), salt)
        before = self.ranks(others)
        results = self.hints.apply(envelope, request=request, caller=salt)
        after = self.ranks(others)
        for place, priority in after.items():
            over = before[place] > PRIORITY_DEFAULT  # its retention may have ended by now
            assert priority == before[place] or (over and priority == PRIORITY_DEFAULT)
        if all(action["action_type"] in ("pin", "retain") for action in actions):
            assert after == before
        self.sent += 1
        assert len(results) == len(actions)
        for action, result in zip(actions, results, strict=True):
            self.outcomes[action["action_type"], result.outcome] += 1

    async def step(self) -> None:
        """Do one random thing, then check what must always hold."""
        random, cache = self.random, self.cache
        self.hints.poll()
        draw = random.random()
        tenant = random.randrange(len(SALTS))
        if draw < 0.6:
            self.hint()
        elif draw < 0.8:
            keys, session = self.prompt(tenant), f"s{tenant}-{random.randrange(3)}"
            name = f"{session}-{self.ended}"
            cache.save(keys, salt=SALTS[tenant], session=name)
            cache.manager.sessions.use(name, [keys], SALTS[tenant])
        elif draw < 0.9:
            await self.load(tenant)
        elif draw < 0.92 and SALTS[tenant]:
            for _ in cache.manager.purge(SALTS[tenant]):
                pass
        elif draw < 0.97:
            await asyncio.sleep(random.choice((0.005, 0.05, 1.0, 60.0)))
        elif draw < 0.975:
            await self.close()
            await self.open()
        for index in cache.stack.indexes.values():
            assert not any(index.priority(place) > LIMITS.priority for place in index.victims())
        assert self.hints.counts()["in_flight"] <= 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_random_hints_keep_to_their_tenant_and_the_limits(seed: int) -> None:
    world = HintWorld(seed)
    await world.open()
    while world.sent * 2 < ACTIONS:
        await world.step()
    while world.hints.counts()["in_flight"]:
        world.hints.poll()
        await asyncio.sleep(0.05)
    await world.cache.settle()
    fetch = world.cache.manager.fetch(world.prompt(0), deadline_s=5.0)
    while not fetch.done:  # noqa: ASYNC110 - as an engine asks
        await asyncio.sleep(0.05)
    fetch.release()
    await world.close()
    seen = {outcome for _, outcome in world.outcomes}
    assert seen >= {"accepted", "clipped", "rejected", "missing", "deferred"}
    assert {verb for verb, outcome in world.outcomes if outcome == "accepted"} >= {
        "retain",
        "prefetch",
        "demote",
        "share",
    }
    assert LIMITS.priority > PRIORITY_DEFAULT
