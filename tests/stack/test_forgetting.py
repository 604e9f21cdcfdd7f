"""Purges with receipts: every scope, what is owed, restarts, and blocks in flight."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvladder.errors import ConfigError, PermissionDenied, Unavailable
from kvladder.forgetting.ledger import PurgeLedger
from kvladder.forgetting.purger import Purger, WrongScope
from kvladder.forgetting.receipt import Receipt, Signer, read_receipt
from kvladder.forgetting.scope import PurgeScope
from kvladder.keys import START, BlockKey, salt_digest
from kvladder.testing.fakes import Fail, FakeStore, FakeTier, Hold, Raise
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import inline_blocking
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.records.lineage import Lineage
from tests.stack.caches import COMMIT, QUICK, cache_of
from tests.stack.test_erasing import KeepingTier, left

SIGNER = Signer("a key of the tests")
TYPES = {"host": "host", "level1": "fake", "level2": "fake"}
MINUTE_S = 60.0


@asynccontextmanager
async def purging(
    path: Path, *levels: LevelSpec, **options: Any
) -> AsyncIterator[tuple[SimCache, Purger]]:
    """Open a cache with a ledger, as the composition root does."""
    async with cache_of(*levels, **{"slots": 32, **options}) as cache:
        cache.stack.lineage = Lineage(100, path / "lineage")
        purger = Purger(
            cache.manager, cache.stack, PurgeLedger(path, SIGNER), inline_blocking, types=TYPES
        )
        try:
            await purger.resume()
            yield cache, purger
        finally:
            await purger.aclose()


def there(cache: SimCache, keys: list[BlockKey]) -> list[bool]:
    return cache.manager.holding(keys)


def stored(path: Path, receipt: Receipt) -> Receipt:
    """Return the receipt as it is in the directory; it is signed."""
    found = read_receipt((path / f"{receipt.id}.json").read_bytes(), "receipt")
    assert SIGNER.wrong(found) == ""
    return found


async def test_a_purge_of_a_salt_leaves_a_signed_receipt(tmp_path: Path) -> None:
    tier = KeepingTier()
    async with purging(tmp_path, LevelSpec(tier, COMMIT)) as (cache, purger):
        cache.save(cache.keys(1, 2), salt="red")
        cache.save(cache.keys(3), salt="blue")
        await cache.settle()
        receipt = await purger.purge(PurgeScope(salt="red"))
        assert there(cache, cache.keys(1, 2)) == [False, False]
        assert there(cache, cache.keys(3)) == [True]
        assert not left(tier) & {*cache.keys(1, 2)}, "they are overwritten"
        assert receipt.complete
        host, below = receipt.levels
        assert (host.name, host.state, host.blocks, host.bytes) == ("host", "done", 2, 128)
        assert (below.state, below.blocks, below.erased) == ("done", 2, 2)
        assert receipt.salt_digest == salt_digest(cache.manager.namespace, "red").hex()
        assert "red" not in str(receipt.scope)
        assert stored(tmp_path, receipt) == receipt
        assert purger.owed == 0


async def test_a_session_is_forgotten_with_blocks_that_others_use(tmp_path: Path) -> None:
    async with purging(tmp_path, LevelSpec(FakeTier(), COMMIT)) as (cache, purger):
        cache.save(cache.keys(1, 2, 3), session="mine")
        cache.save(cache.keys(1, 2, 3, 4)[3:], session="other")
        cache.save(cache.keys(9))
        await cache.settle()
        receipt = await purger.purge(PurgeScope(session="mine"))
        assert there(cache, cache.keys(1, 2, 3, 4)) == [False, False, False, True]
        assert there(cache, cache.keys(9)) == [True]
        assert (receipt.keys, receipt.complete) == (3, True)
        with pytest.raises(WrongScope, match="session 'mine' is not known"):
            await purger.purge(PurgeScope(session="mine"))
        cache.save(cache.keys(1), session="mine")
        assert there(cache, cache.keys(1)) == [True], "it begins anew"


async def test_a_prefix_is_forgotten_with_all_that_descends_from_it(tmp_path: Path) -> None:
    tier = FakeTier()
    async with purging(tmp_path, LevelSpec(tier, COMMIT)) as (cache, purger):
        whole, branch = cache.keys(1, 2, 3, 4, 5), cache.keys(1, 2, 7)
        beside, other = cache.keys(1, 8, 9), cache.keys(6, 2)
        cache.save(whole[:2], parent=START)
        cache.save(whole[2:], parent=whole[1])
        cache.save(branch, parent=START)
        cache.save(beside, parent=START)
        cache.save(other, parent=START)
        await cache.settle()
        scope = PurgeScope(keys=[key.hex() for key in whole[:2]])
        receipt = await purger.purge(scope)
        assert there(cache, whole) == [False] * 5
        assert there(cache, branch[2:]) == [False]
        assert there(cache, beside[1:]) == [True, True], "it only shares the first block"
        assert there(cache, other) == [True, True]
        assert (receipt.keys, receipt.unknown) == (6, 0)
        assert not {*whole, *branch} & {record.key for record in tier.records.values()}


async def test_blocks_of_unknown_descent_go_with_a_prefix_of_their_salt(tmp_path: Path) -> None:
    async with purging(tmp_path, LevelSpec(FakeTier(), COMMIT)) as (cache, purger):
        cache.save(cache.keys(1, 2), parent=START, salt="red")
        cache.save(cache.keys(5, 6), salt="red")  # its parent is not known
        cache.save(cache.keys(7, 8), salt="blue")
        cache.save(cache.keys(3), parent=START, salt="red")
        await cache.settle()
        scope = PurgeScope(keys=[cache.keys(1)[0].hex()], salt="red")
        receipt = await purger.purge(scope)
        assert there(cache, [*cache.keys(1, 2), *cache.keys(5, 6)]) == [False] * 4
        assert there(cache, [*cache.keys(3), *cache.keys(7, 8)]) == [True] * 3
        assert receipt.unknown == 2


async def test_older_blocks_are_forgotten_also_after_a_restart(tmp_path: Path) -> None:
    store = FakeStore()
    async with purging(tmp_path, LevelSpec(FakeTier(store=store, durable=True), COMMIT)) as (
        cache,
        purger,
    ):
        cache.save(cache.keys(1))
        await cache.settle()
        await asyncio.sleep(10 * MINUTE_S)
        cache.save(cache.keys(2))
        await cache.settle()
    tier = FakeTier(store=store, durable=True)
    async with purging(tmp_path, LevelSpec(tier, COMMIT)) as (cache, purger):
        cache.save(cache.keys(3))
        assert there(cache, [*cache.keys(1), *cache.keys(2)]) == [True, True]
        await purger.purge(PurgeScope(older_than_s=5 * MINUTE_S))
        assert there(cache, [*cache.keys(1), *cache.keys(2), *cache.keys(3)]) == [False, True, True]


async def test_a_purge_owed_at_a_stop_is_paid_at_the_next_start(tmp_path: Path) -> None:
    store = FakeStore()
    tier = SharedFakeTier([Fail(on="purge", times=None)], store=store)
    async with purging(tmp_path, LevelSpec(tier, COMMIT, settings=QUICK)) as (cache, purger):
        tier.removable = {*cache.keys(1), *cache.keys(2)}.__contains__
        cache.save(cache.keys(1), salt="red")
        cache.save(cache.keys(2), salt="blue")
        await cache.settle()
        receipt = await purger.purge(PurgeScope(salt="red"), wait_s=3.0)
        (owed,) = receipt.owed
        assert (owed.name, receipt.complete, purger.owed) == ("level1", False, 1)
        assert owed.why == "calls to remove fail: breaker open"
        kept = stored(tmp_path, receipt)
        assert not kept.complete
    late = SharedFakeTier([Fail(on="open", times=1)], store=store)
    late.removable = lambda _: True
    async with purging(tmp_path, LevelSpec(late, COMMIT, settings=QUICK)) as (cache, purger):
        assert purger.owed == 1
        assert cache.levels[0].client.absent
        assert not stored(tmp_path, receipt).complete
        assert late.stored(cache.keys(1)[0]) is not None, "nothing can be done yet"
        cache.save(cache.keys(1), salt="red")  # saved again, so it is new
        await asyncio.sleep(30.0)
        paid = stored(tmp_path, receipt)
        assert (paid.complete, paid.levels[1].state, purger.owed) == (True, "done", 0)
        cache.save(cache.keys(4), salt="red")
        await cache.settle()
        assert late.stored(cache.keys(4)[0]) is not None
        assert late.stored(cache.keys(2)[0]) is not None
    async with purging(tmp_path, LevelSpec(SharedFakeTier(store=store), COMMIT)) as (_, purger):
        assert purger.owed == 0, "it is not paid twice"
        assert store.spaces[cache.manager.namespace].keys() >= {cache.keys(4)[0]}


@pytest.mark.parametrize("kind", ["salt", "session", "prefix"])
async def test_a_purge_without_rights_stays_owed_and_keeps_no_caller_waiting(
    tmp_path: Path, kind: str
) -> None:
    store = FakeStore()
    denials = [Raise(PermissionDenied, on=on, times=None) for on in ("remove", "purge")]
    tier = SharedFakeTier(denials, store=store)
    async with purging(tmp_path, LevelSpec(tier, COMMIT, settings=QUICK)) as (cache, purger):
        tier.removable = lambda _: True
        cache.save(cache.keys(1, 2), salt="red", session="mine", parent=START)
        await cache.settle()
        scope = {
            "salt": PurgeScope(salt="red"),
            "session": PurgeScope(session="mine"),
            "prefix": PurgeScope(keys=[cache.keys(1)[0].hex()], salt="red"),
        }[kind]
        receipt = await asyncio.wait_for(purger.purge(scope), 5.0)
        (owed,) = receipt.owed
        assert (owed.name, owed.why) == ("level1", "denied: scripted")
        assert cache.manager.removals == 0
        assert await cache.load(cache.keys(1)) == ["level1"], "the level is asked again"
        (_, below) = (await purger.check(receipt)).levels
        assert below.finding == "owed"
        assert not stored(tmp_path, receipt).complete
    tier = SharedFakeTier(store=store)
    tier.removable = lambda _: True
    async with purging(tmp_path, LevelSpec(tier, COMMIT)):  # it has the rights now
        await asyncio.sleep(2.0)
        assert stored(tmp_path, receipt).complete
        assert tier.stored(cache.keys(1)[0]) is None


async def keep(tmp_path: Path, store: FakeStore) -> None:
    """Leave a prefix of two blocks, and another block, on the medium of a private level."""
    tier = FakeTier(store=store, durable=True)
    async with purging(tmp_path, LevelSpec(tier, COMMIT)) as (cache, _):
        cache.save(cache.keys(1, 2), salt="red", parent=START)
        cache.save(cache.keys(3), salt="red", parent=START)
        await cache.settle()


async def test_a_private_tier_that_was_left_out_forgets_when_it_is_back(tmp_path: Path) -> None:
    store = FakeStore()
    await keep(tmp_path, store)
    away = FakeTier([Fail(on="open", times=None)], store=store, durable=True)
    async with purging(tmp_path, LevelSpec(away, COMMIT, settings=QUICK)) as (cache, purger):
        scope = PurgeScope(keys=[cache.keys(1)[0].hex()], salt="red")
        receipt = await purger.purge(scope, wait_s=1.0)
        assert [level.name for level in receipt.owed] == ["level1"]
        assert receipt.levels[1].why.startswith("left out: ")
    back = FakeTier(store=store, durable=True)
    async with purging(tmp_path, LevelSpec(back, COMMIT)) as (cache, purger):
        await cache.settle()
        assert there(cache, [*cache.keys(1, 2), *cache.keys(3)]) == [False, True, True]
        await asyncio.sleep(2.0)
        assert stored(tmp_path, receipt).complete
        assert back.stored(cache.keys(1)[0]) is None


async def test_blocks_in_flight_do_not_come_back_and_new_ones_stay(tmp_path: Path) -> None:
    hold = Hold(on="put")
    tier = FakeTier([hold])
    async with purging(tmp_path, LevelSpec(tier, COMMIT)) as (cache, purger):
        cache.save(cache.keys(1, 2), session="mine")
        open_save = cache.manager.save(cache.keys(5), session="mine")
        await hold.reached()
        purge = asyncio.ensure_future(purger.purge(PurgeScope(session="mine")))
        await asyncio.sleep(0.1)
        assert not purge.done(), "a write is in flight"
        open_save.commit()  # its copy ends only now
        cache.save(cache.keys(2), session="mine")
        hold.let_go()
        receipt = await purge
        await cache.settle()
        assert receipt.complete
        assert there(cache, [*cache.keys(1), *cache.keys(5)]) == [False, False]
        assert tier.stored(cache.keys(1)[0]) is None
        assert there(cache, cache.keys(2)) == [True], "saved again: it is new"


async def test_a_receipt_that_was_changed_stops_the_start(tmp_path: Path) -> None:
    tier = SharedFakeTier([Fail(on="purge", times=None)])
    async with purging(tmp_path, LevelSpec(tier, COMMIT, settings=QUICK)) as (_, purger):
        receipt = await purger.purge(PurgeScope(salt="red"), wait_s=0.0)
    path = tmp_path / f"{receipt.id}.json"
    path.write_bytes(path.read_bytes().replace(b'"kind": "salt"', b'"kind": "all"'))
    async with cache_of() as cache:
        ledger = PurgeLedger(tmp_path, SIGNER)
        purger = Purger(cache.manager, cache.stack, ledger, inline_blocking, types=TYPES)
        with pytest.raises(ConfigError, match="it was changed after it was signed"):
            await purger.resume()
        await purger.aclose()


async def test_a_second_process_cannot_use_the_ledger(tmp_path: Path) -> None:
    ledger = PurgeLedger(tmp_path, SIGNER)
    with pytest.raises(Unavailable, match="in use by another process"):
        PurgeLedger(tmp_path, SIGNER)
    ledger.close()
    PurgeLedger(tmp_path, SIGNER).close()


async def test_nothing_is_purged_without_a_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(receipt: Receipt, keys: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with purging(tmp_path, LevelSpec(FakeTier(), COMMIT)) as (cache, purger):
        cache.save(cache.keys(1, 2), session="mine")
        with monkeypatch.context() as patch:
            patch.setattr(purger.ledger, "begin", full)
            for scope in (PurgeScope(session="mine"), PurgeScope(all=True)):
                with pytest.raises(Unavailable, match="the receipt cannot be written"):
                    await purger.purge(scope)
        assert there(cache, cache.keys(1, 2)) == [True, True]
        assert (await purger.purge(PurgeScope(session="mine"))).keys == 2, "it is still known"
        assert there(cache, cache.keys(1, 2)) == [False, False]


async def test_a_receipt_that_could_not_be_updated_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(receipt: Receipt) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with purging(tmp_path, LevelSpec(FakeTier(), COMMIT)) as (cache, purger):
        cache.save(cache.keys(1), salt="red")
        with monkeypatch.context() as patch:
            patch.setattr(purger.ledger, "write", full)
            patch.setattr(purger.ledger, "begin", lambda one, keys: None)
            receipt = await purger.purge(PurgeScope(salt="red"), wait_s=3.0)
            assert purger.owed == 1
        await asyncio.sleep(2.0)
        assert purger.owed == 0
        assert stored(tmp_path, receipt).complete


async def test_a_check_tells_what_each_level_has(tmp_path: Path) -> None:
    tier = SharedFakeTier()
    async with purging(tmp_path, LevelSpec(tier, COMMIT, settings=QUICK)) as (cache, purger):
        tier.removable = lambda _: True
        cache.save(cache.keys(1, 2), parent=START)
        await cache.settle()
        scope = PurgeScope(keys=[key.hex() for key in cache.keys(1)])
        receipt = await purger.purge(scope)

        async def findings() -> list[tuple[str, int, int, int]]:
            levels = (await purger.check(receipt)).levels
            return [(one.finding, one.left, one.newer, one.unknown) for one in levels]

        assert await findings() == [("clean", 0, 0, 0)] * 2
        tier.others_put({cache.keys(1, 2)[1]: cache.payload(cache.keys(1, 2)[1])})
        assert await findings() == [("clean", 0, 0, 0), ("left", 1, 0, 0)]
        cache.save(cache.keys(1, 2), parent=START)
        await cache.settle()
        assert await findings() == [("clean", 0, 2, 0)] * 2
        tier.script.append(Fail(on="contains", times=None))
        assert (await findings())[1][0] == "unsure"
        assert (await purger.check(receipt)).is_good is False


async def test_a_shared_tier_is_not_asked_until_it_was_looked_through(tmp_path: Path) -> None:
    store = FakeStore()
    async with purging(tmp_path, LevelSpec(SharedFakeTier(store=store), COMMIT)) as (cache, _):
        cache.save(cache.keys(1, 2, 3), parent=START)
        cache.save(cache.keys(4, 5), parent=START)
        await cache.settle()
    tier = SharedFakeTier([Fail(on="purge", times=None)], store=store)
    tier.removable = lambda _: True
    async with purging(tmp_path, LevelSpec(tier, COMMIT, settings=QUICK)) as (cache, purger):
        scope = PurgeScope(keys=[cache.keys(1)[0].hex()])
        receipt = await purger.purge(scope, wait_s=0.5)
        assert receipt.owed
        assert await cache.load(cache.keys(1, 2, 3)[1:], deadline_s=1.0) == []
        tier.heal()
        await asyncio.sleep(60.0)
        assert stored(tmp_path, receipt).complete
        assert await cache.load(cache.keys(1, 2, 3), deadline_s=1.0) == []
        assert await cache.load(cache.keys(4, 5), deadline_s=1.0) == ["level1"] * 2
