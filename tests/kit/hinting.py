"""Random hints of two tenants, with saves, loads, purges, faults and restarts between them.

``python -m tests.kit.hinting 1000000 --out FILE`` sends a million actions in simulated time. It
writes what it counted to ``benchmarks/results/FILE``. Every load is checked byte by byte, and after
every step the caps and the ranks of other tenants' blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.machine import RESULTS, machine
from kvladder.hints import HintExecutor
from kvladder.hints.fetches import PREFETCHES_MAX
from kvladder.hints.scopes import OwnRequest
from kvladder.keys import BlockKey, salt_digest
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import Limits
from kvladder.testing.fakes import Fail, FakeStore, FakeTier, Hang
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import SimLoop
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.testing.steps import Operation

LIMITS = Limits(priority=80, pin_s=50.0)
SALTS = ("", "one", "two")
SLOTS = 24
DEADLINE_S = 1.0
LENGTH = 6


class HintWorld:
    """One engine that restarts, over a durable private level and a shared one."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.private, self.shared = FakeStore(), FakeStore()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.sent = 0
        self.ended = 0
        self.did: Counter[str] = Counter()
        """Steps of each kind, and the blocks that loads brought and that were checked."""
        self.load_s = 0.0
        """Longest time that a load took; its deadline is ``DEADLINE_S``."""
        self.waited_s = 0.0
        """Longest time from an action until its fetch had ended."""
        self._since_s: dict[int, float] = {}

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
        keys, loop = self.prompt(tenant), asyncio.get_running_loop()
        begun_s = loop.time()
        fetch = self.cache.manager.fetch(keys, salt=SALTS[tenant], deadline_s=DEADLINE_S)
        while not fetch.done:  # noqa: ASYNC110 - as an engine asks
            await asyncio.sleep(0.01)
        self.load_s = max(self.load_s, loop.time() - begun_s)
        self.did["blocks loaded, each byte checked"] += len(fetch.slots)
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

    def _watch(self) -> None:
        """Note how long fetches of hints have been waiting or in flight."""
        now_s = asyncio.get_running_loop().time()
        pending = self.hints._fetches._fetching  # pyright: ignore[reportPrivateUsage]
        self._since_s = {id(one): self._since_s.get(id(one), now_s) for one in pending}
        for since_s in self._since_s.values():
            self.waited_s = max(self.waited_s, now_s - since_s)

    async def run(self, actions: int) -> None:
        """Send so many actions, then end everything that is in flight."""
        await self.open()
        while self.outcomes.total() < actions:
            await self.step()
        for tier in self.tiers:
            tier.heal()
        while self.hints.counts()["in_flight"]:
            self._watch()
            self.hints.poll()
            await asyncio.sleep(0.05)
        await self.cache.settle()
        await self.load(0)
        await self.close()

    async def step(self) -> None:
        """Do one random thing, then check what must always hold."""
        random, cache = self.random, self.cache
        self._watch()
        self.hints.poll()
        draw = random.random()
        tenant = random.randrange(len(SALTS))
        if draw < 0.6:
            self.hint()
        elif draw < 0.8:
            self.did["saves"] += 1
            keys, session = self.prompt(tenant), f"s{tenant}-{random.randrange(3)}"
            name = f"{session}-{self.ended}"
            cache.save(keys, salt=SALTS[tenant], session=name)
            cache.manager.sessions.use(name, [keys], SALTS[tenant])
        elif draw < 0.9:
            self.did["loads"] += 1
            await self.load(tenant)
        elif draw < 0.92 and SALTS[tenant]:
            self.did["purges"] += 1
            for _ in cache.manager.purge(SALTS[tenant]):
                pass
        elif draw < 0.97:
            await asyncio.sleep(random.choice((0.005, 0.05, 1.0, 60.0)))
        elif draw < 0.975:
            self.did["restarts"] += 1
            await self.close()
            await self.open()
        elif draw < 0.99:
            self.did["faults"] += 1
            on: tuple[Operation, ...] = "put", "get", "contains", "remove", "purge"
            fault = random.choice((Fail, Hang))(on=random.choice(on), times=random.choice((1, 3)))
            random.choice(self.tiers).script.append(fault)
        for index in cache.stack.indexes.values():
            assert not any(index.priority(place) > LIMITS.priority for place in index.victims())
        assert self.hints.counts()["in_flight"] <= PREFETCHES_MAX


PER_WORLD = 20_000
"""Actions for which a world lives, with its restarts."""


def run_worlds(actions: int, minutes: float) -> list[HintWorld]:
    """Send so many actions to worlds of different seeds, one after the other, in this time."""
    worlds: list[HintWorld] = []
    left, end_s = actions, time.monotonic() + 60 * minutes
    while left > 0 and time.monotonic() < end_s:
        world, loop = HintWorld(len(worlds)), SimLoop(len(worlds))
        try:
            loop.run_until_complete(world.run(min(left, PER_WORLD)))
        finally:
            loop.close()
        worlds.append(world)
        left -= world.outcomes.total()
        print(f"{actions - left:,} of {actions:,} actions", file=sys.stderr, flush=True)
    return worlds


def page(worlds: list[HintWorld], took_s: float) -> str:
    """Return what was counted."""
    outcomes = sum((world.outcomes for world in worlds), Counter[tuple[str, str]]())
    did = sum((world.did for world in worlds), Counter[str]())
    about = machine() | {"command": f"python -m tests.kit.hinting {' '.join(sys.argv[1:])}"}
    about |= {"took": f"{took_s:.0f} s"}
    kinds = sorted({outcome for _, outcome in outcomes})
    lines = [f"# {outcomes.total():,} random hints in simulation", ""]
    lines += [*(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [f"| verb | {' | '.join(kinds)} |", f"| --- |{' ---: |' * len(kinds)}"]
    for verb in sorted({verb for verb, _ in outcomes}):
        counts = [f"{outcomes[verb, kind]:,}" for kind in kinds]
        lines.append(f"| {'an unknown one' if verb == 'fly' else verb} | {' | '.join(counts)} |")
    lines += ["", "| what | figure | limit |", "| --- | ---: | --- |"]
    lines += [f"| {name} | {count:,} | |" for name, count in sorted(did.items())]
    load_s = max(world.load_s for world in worlds)
    waited_s = max(world.waited_s for world in worlds)
    lines += [
        f"| worlds, each with its own seed | {len(worlds)} | |",
        "| wrong bytes, changed ranks of other tenants, priorities above the cap | 0 | asserted |",
        f"| longest load | {load_s:.2f} s | its deadline, {DEADLINE_S:g} s |",
        f"| longest time from an action to the end of its fetch | {waited_s:.2f} s | it ends |",
        f"| fetches of hints in flight at once | {PREFETCHES_MAX} at most | asserted |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run worlds, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.hinting", description=__doc__)
    parser.add_argument("actions", type=int)
    parser.add_argument("--minutes", type=float, default=600, help="begin no world after this time")
    parser.add_argument("--out", metavar="FILE", help="write the page to benchmarks/results/FILE")
    options = parser.parse_args()
    begun_s = time.monotonic()
    text = page(run_worlds(options.actions, options.minutes), time.monotonic() - begun_s)
    print(text)
    if options.out:
        (RESULTS / Path(options.out).name).write_text(text)


if __name__ == "__main__":
    main()
