"""Purges in random order with saves, faults, time, restarts and kills: nothing comes back.

The law: once ``Purger.purge`` has returned, no block of its scope is a hit until it is saved again,
whatever tiers do and however often the cache is closed or killed. When the tiers work again, each
receipt becomes complete, and then no store has such a block.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from kvladder.forgetting.ledger import PurgeLedger
from kvladder.forgetting.purger import Purger, WrongScope
from kvladder.forgetting.receipt import Signer
from kvladder.forgetting.scope import PurgeScope
from kvladder.keys import START, BlockKey
from kvladder.testing.fakes import Fail, FakeStore, FakeTier, Hang
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import SimLoop, inline_blocking
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.testing.steps import Operation
from kvladder.tiers.ladder.records.lineage import Lineage
from tests.stack.caches import COMMIT, QUICK

SIGNER = Signer("a key of the tests")
SALTS = ("red", "blue")
SESSIONS = ("one", "two", "three")
LONG_S = 2000.0
Block = tuple[int, ...]


class PurgedWorld:
    """A cache with a durable and a shared tier, and what its purges have promised."""

    def __init__(self, seed: int, path: Path) -> None:
        self.random = Random(seed)
        self.loop = SimLoop(seed)
        self.path = path
        self.stores = FakeStore(), FakeStore()
        self.lives = 0
        self.saved: dict[Block, float] = {}
        """Wall time of the last save of each block."""
        self.of: dict[str, set[Block]] = {name: set() for name in SESSIONS}
        """Blocks of each session that may still be purged by its name."""
        self.gone: set[Block] = set()
        self.removable: set[BlockKey] = set()
        self.open()

    def open(self) -> None:
        durable = FakeTier(store=self.stores[0], durable=True)
        shared = SharedFakeTier(store=self.stores[1])
        shared.removable = lambda _key: True
        self.tiers = durable, shared
        for tier in self.tiers:
            if self.random.random() < 0.2:
                tier.script.append(Fail(on="open", times=self.random.choice([1, 3])))
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        rooms = 12, 64  # the shared tier keeps blocks that this cache has nowhere else
        specs = [
            LevelSpec(tier, COMMIT, room, settings=QUICK)
            for tier, room in zip(self.tiers, rooms, strict=True)
        ]
        self.cache = await SimCache.open(*specs, slots=16)
        ledger = PurgeLedger(self.path, SIGNER)
        self.cache.stack.lineage = Lineage(1000, self.path / "lineage")
        self.purger = Purger(
            self.cache.manager, self.cache.stack, ledger, inline_blocking, types={}
        )
        await self.purger.resume()

    def salt(self, block: Block) -> str:
        return SALTS[block[0] % 2]

    def key(self, block: Block) -> BlockKey:
        return self.cache.keys(*block)[-1]

    # ---- steps

    def save(self) -> None:
        depth = self.random.randint(1, 4)
        path = tuple(self.random.randint(1, 2 if n else 4) for n in range(depth))
        first = self.random.randint(0, depth - 1)
        keys = self.cache.keys(*path)
        session = self.random.choice([None, *SESSIONS])
        parent = None if self.random.random() < 0.1 else keys[first - 1] if first else START
        some, now_s = keys[first:], self.cache.stack.shared.clock.wall()
        save = self.cache.manager.save(some, salt=self.salt(path), session=session, parent=parent)
        for index, slot in zip(save.indices, save.slots, strict=True):
            self.cache.arena.view(slot)[:64] = self.cache.payload(some[index])
            block = path[: first + index + 1]
            self.saved[block] = now_s
            self.gone.discard(block)
        save.commit()

    def scope(self) -> tuple[PurgeScope, set[Block]]:
        """Return a scope, and the blocks that it certainly covers."""
        every = set(self.saved)
        match self.random.choice(["salt", "session", "keys", "age", "all"]):
            case "salt":
                salt = self.random.choice(SALTS)
                return PurgeScope(salt=salt), {one for one in every if self.salt(one) == salt}
            case "session":
                return PurgeScope(session=self.random.choice(SESSIONS)), set()
            case "keys" if every:
                path = self.random.choice(sorted(every))
                keys = [key.hex() for key in self.cache.keys(*path)]
                covered = {one for one in every if one[: len(path)] == path}
                covered |= {one for one in every if path[: len(one)] == one}
                return PurgeScope(keys=keys, salt=self.salt(path)), covered
            case "age":
                age_s = self.random.choice([0.0, 5.0, 50.0])
                before_s = self.cache.stack.shared.clock.wall() - age_s
                return PurgeScope(older_than_s=age_s), {
                    one for one, saved_s in self.saved.items() if saved_s < before_s
                }
            case _:
                return PurgeScope(all=True), every

    def purge(self) -> None:
        scope, covered = self.scope()
        waits_s = self.random.choice([0.0, 0.1, 30.0])
        if scope.session is not None:
            known = self.cache.manager.sessions._sessions.get(scope.session)
            keys = set(known.keys) if known is not None else set[BlockKey]()
            covered = {one for one in self.saved if self.key(one) in keys}
        try:
            self.loop.run_until_complete(self.purger.purge(scope, wait_s=waits_s))
        except WrongScope:
            assert scope.session is not None
            return
        self.gone |= covered

    def load(self) -> None:
        """Ask for a prompt as a request does; shared tiers are asked, too."""
        path = tuple(self.random.randint(1, 2 if n else 4) for n in range(4))
        self.loop.run_until_complete(self._load(path))

    async def _load(self, path: Block) -> None:
        keys = self.cache.keys(*path)
        fetch = self.cache.manager.fetch(keys, deadline_s=1.0, salt=self.salt(path))
        while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
            await asyncio.sleep(0.01)
        for number, slot in enumerate(fetch.slots):
            assert path[: number + 1] not in self.gone, "a purged block was served"
            assert bytes(self.cache.arena.view(slot)[:64]) == self.cache.payload(keys[number])
        fetch.release()

    def trouble(self) -> None:
        tier = self.random.choice(self.tiers)
        operations: tuple[Operation, ...] = "put", "remove", "purge", "contains", "get"
        on, times = self.random.choice(operations), self.random.choice([1, 3, None])
        fails = self.random.random() < 0.5
        tier.script.append(Fail(on=on, times=times) if fails else Hang(on=on, times=times))

    def heal(self) -> None:
        for tier in self.tiers:
            tier.heal()

    def pause(self) -> None:
        self.loop.run_until_complete(self._sleep(self.random.choice([0.01, 1.0, 20.0])))

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def restart(self) -> None:
        self.loop.run_until_complete(self._close())
        self.open()

    async def _close(self) -> None:
        self.heal()
        await self.purger.aclose()
        await self.cache.aclose()

    def kill(self) -> None:
        """End the process where it stands: the next one has what stores and disk had then."""
        self.lives += 1
        path, stores = self.path.with_name(f"life{self.lives}"), [s.copy() for s in self.stores]
        shutil.copytree(self.path, path)
        self.loop.run_until_complete(self._close())  # only to free what this process has
        self.path, self.stores = path, (stores[0], stores[1])
        self.open()

    # ---- the law

    def check(self) -> None:
        blocks = sorted(self.gone)
        held = self.cache.manager.holding([self.key(block) for block in blocks])
        assert not any(held), [block for block, here in zip(blocks, held, strict=True) if here]
        self.cache.manager.check()

    def finish(self) -> None:
        """Let all tiers work: what is owed is paid."""
        self.heal()
        self.loop.run_until_complete(self._sleep(LONG_S))
        assert self.purger.owed == 0
        assert [*self.purger.ledger.owed()] == []
        self.check()
        gone = {self.key(block) for block in self.gone}
        for tier in self.tiers:
            assert not gone & {record.key for record in tier.records.values()}
            assert tier.violations == []
        self.loop.run_until_complete(self._close())
        self.loop.close()


def run(seed: int, path: Path, steps: int = 40) -> Sequence[str]:
    world, done = PurgedWorld(seed, path), list[str]()
    weights = {"save": 10, "load": 5, "purge": 4, "pause": 3, "trouble": 2}
    weights |= {"heal": 1, "restart": 1, "kill": 1}
    for _ in range(steps):
        (step,) = world.random.choices([*weights], [*weights.values()])
        done.append(step)
        getattr(world, step)()
        world.check()
    world.finish()
    return done


@pytest.mark.slow
def test_what_was_purged_never_comes_back(tmp_path: Path) -> None:
    steps = [step for seed in range(8) for step in run(seed, tmp_path / f"{seed}" / "life0")]
    assert {"purge", "kill", "restart", "trouble"} <= {*steps}
