"""The blocks that a cache offers to others, without the network between them."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.errors import PermissionDenied, TierError
from kvladder.export.offers import HAVE, LATER, REFUSED
from kvladder.export.spaces import own_salt
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeStore, FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import EPOCH_S
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.testing.steps import Fail, Hold, Raise
from kvladder.tiers.label import Facts, told
from kvladder.tiers.ladder.batched import ROOM_S
from tests.export.clients import SIZE, SPACE, Client, engine, keys_of, payload, server

FOUR = keys_of(1, 2, 3, 4)
TENANT = b"8 bytes."


async def test_a_client_gets_back_its_blocks_around_holes() -> None:
    async with server() as (cache, offers):
        client = Client(offers)
        assert await client.hello() == ""
        assert await client.has(FOUR) == [False] * 4
        assert await client.put(FOUR[::2]) == [True, True]
        assert await client.has(FOUR) == [True, False, True, False]
        assert await client.get(FOUR) == [payload(FOUR[0]), None, payload(FOUR[2]), None]
        assert [slot == HAVE for slot in await client.granted(FOUR)] == [True, False, True, False]
        assert offers.counts()["granted"] == 2
        await offers.abort(client.session, client.op)
        await offers.gone(client.session)
        counts = offers.counts()
        assert {name for name, count in counts.items() if count} == {"sent", "taken"}
        assert counts["sent"] == counts["taken"] == 2
        assert cache.arena.free == cache.arena.slots - 2


async def test_blocks_shortened_by_a_codec_come_back_at_full_length() -> None:
    async with server() as (_, offers):
        client = Client(offers)
        await client.hello()
        assert await client.put(FOUR, length=100) == [True] * 4
        assert await client.get(FOUR) == [payload(key, 100) for key in FOUR]


async def test_a_short_block_is_stored_without_leftover_bytes_of_its_slot() -> None:
    store = FakeStore()
    tier = FakeTier(store=store, durable=True)
    async with server(LevelSpec(tier, OffloadRule(when="commit")), slots=1) as (cache, offers):
        client = Client(offers)
        await client.hello()
        assert await client.put(FOUR[:1]) == [True]
        await cache.settle()
        await offers.remove(client.session, FOUR[:1])
        await cache.settle()
        assert await client.put(FOUR[1:2], length=100) == [True]
        await cache.settle()
        (record,) = tier.records.values()
        assert record.data[:100] == payload(FOUR[1], 100)
        assert record.data[100:SIZE] == bytes(SIZE - 100)


async def test_models_share_a_server_without_seeing_each_others_blocks() -> None:
    async with server() as (_, offers):
        one, two = Client(offers, 1, b"a" * 32), Client(offers, 2, b"b" * 32)
        assert await one.hello() == await two.hello(4) == ""
        await one.put(FOUR)
        assert await two.has(FOUR) == [False] * 4
        assert await two.get(FOUR) == [None] * 4
        assert await two.granted(FOUR, length=5) == [REFUSED] * 4, "its blocks have 4 bytes"
        again = Client(offers, 3, b"a" * 32)
        await again.hello()
        assert await again.get(FOUR) == [payload(key) for key in FOUR]


async def test_oversized_blocks_and_clients_without_a_hello_are_refused() -> None:
    async with server() as (_, offers):
        assert "4001 bytes: the server takes 4000 at most" in await Client(offers).hello(SIZE + 1)
        assert offers.counts()["refused"] == 1
        nobody = Client(offers, 7)
        assert await nobody.has(FOUR) == [False] * 4
        assert await nobody.get(FOUR) == [None] * 4
        assert await nobody.put(FOUR) == [False] * 4
        await offers.remove(7, FOUR)
        await offers.release(7, 1)
        await offers.abort(7, 1)
        await offers.gone(7)
        assert await offers.purge(7, None) == 0


@pytest.mark.parametrize("lie", ["label", "key", "namespace", "length", "checksum", "none", "few"])
async def test_a_lying_client_loses_only_its_own_block(lie: str) -> None:
    async with server() as (cache, offers):
        client = Client(offers)
        await client.hello()
        slots = await client.granted(FOUR)
        labels: list[bytes] = []
        for key, slot in zip(FOUR, slots, strict=True):
            client.write(slot, payload(key))
            labels.append(client.label(key, payload(key)))
        other = Client(offers, space=b"x" * 32)
        bad = payload(FOUR[2])
        wrong = {
            "label": b"\x01" * len(labels[2]),
            "key": client.label(FOUR[1], bad),
            "namespace": other.label(FOUR[2], bad),
            "length": client.label(FOUR[2], bad[:-1]),
            "checksum": client.label(FOUR[2], bad[:-1] + b"?"),
            "none": b"",
        }
        if lie == "few":
            done = await offers.commit(client.session, client.op, labels[:2])
            assert done == [True, True]
        else:
            labels[2] = wrong[lie]
            done = await offers.commit(client.session, client.op, labels)
            assert done == [True, True, False, True]
        assert await client.has(FOUR) == [True, True, False, lie != "few"]
        assert offers.counts()["lies"] == (2 if lie == "few" else 1)
        assert cache.arena.free == cache.arena.slots - (2 if lie == "few" else 3)
        assert await offers.commit(client.session, client.op, labels) == [False] * len(labels)


async def test_a_block_without_a_checksum_is_passed_on_unchecked() -> None:
    async with server() as (_, offers):
        client = Client(offers)
        await client.hello()
        (slot,) = await client.granted(FOUR[:1])
        client.write(slot, payload(FOUR[0]))
        label = client.label(FOUR[0], payload(FOUR[0]), verify=False)
        assert await offers.commit(client.session, client.op, [label]) == [True]
        (pinned,) = await offers.pin(client.session, 99, FOUR[:1])
        assert pinned is not None
        assert pinned.label == label


async def test_a_lost_client_frees_its_pins_and_grants_and_publishes_nothing() -> None:
    async with server() as (cache, offers):
        client, other = Client(offers), Client(offers, 2)
        await client.hello()
        await other.hello()
        await client.put(FOUR)
        await offers.pin(client.session, 10, FOUR)
        slots = await client.granted(keys_of(5, 6))
        assert offers.counts()["pinned"] == 4
        assert cache.arena.free == cache.arena.slots - 6
        await offers.gone(client.session)
        assert cache.arena.free == cache.arena.slots - 4
        labels = [client.label(key, payload(key)) for key in keys_of(5, 6)]
        for slot, key in zip(slots, keys_of(5, 6), strict=True):
            client.write(slot, payload(key))
        assert await offers.commit(client.session, client.op, labels) == [False, False]
        assert await other.has(FOUR + keys_of(5, 6)) == [True] * 4 + [False] * 2


async def test_a_client_that_disconnects_during_the_check_publishes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvladder.export.server.INLINE_BYTES", 0)
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def slowly(function: object, *args: object) -> object:
        began.set()
        await goes_on.wait()
        return function(*args)  # type: ignore[operator]

    async with server() as (cache, offers):
        client = Client(offers)
        await client.hello()
        offers._run_blocking = slowly
        putting = asyncio.create_task(client.put(FOUR))
        await began.wait()
        await offers.gone(client.session)
        assert cache.arena.free == cache.arena.slots - 4, "they are being read"
        goes_on.set()
        assert await putting == [False] * 4
        assert cache.arena.free == cache.arena.slots
        again = Client(offers, 2)
        await again.hello()
        began.clear()
        goes_on.clear()
        putting = asyncio.create_task(again.put(FOUR))
        await began.wait()
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert cache.arena.free == cache.arena.slots


async def test_a_purge_removes_one_tenant_by_salt_and_a_whole_namespace_without() -> None:
    tier = FakeTier(store=FakeStore(), durable=True)
    async with server(LevelSpec(tier, OffloadRule(when="commit"))) as (cache, offers):
        one, two = Client(offers), Client(offers, 2, b"b" * 32)
        await one.hello()
        await two.hello()
        salted, plain = keys_of(1, 2, 3), keys_of(4, 5)
        await one.put(salted, Facts(salt=TENANT))
        await one.put(plain)
        await two.put(salted, Facts(salt=TENANT))
        await cache.settle()
        assert await offers.purge(1, b"another.") == 0
        assert await offers.purge(1, TENANT) == 3
        assert await one.has(salted + plain) == [False] * 3 + [True] * 2
        assert await two.has(salted) == [True] * 3
        assert len(tier.records) == 5
        await one.put(salted, Facts(salt=TENANT))
        slots = await one.granted(keys_of(6), Facts(salt=b"pending."))
        assert await offers.purge(1, None) == 5
        one.write(slots[0], payload(keys_of(6)[0]))
        label = one.label(keys_of(6)[0], payload(keys_of(6)[0]))
        await offers.commit(1, one.op, [label])
        assert await one.has(salted + plain + keys_of(6)) == [False] * 6
        assert await two.has(salted) == [True] * 3


@pytest.mark.parametrize("durable", [True, False])
async def test_a_removal_is_answered_when_the_tiers_have_forgotten_its_blocks(
    *, durable: bool
) -> None:
    removing = Hold(on="remove")
    tier = FakeTier([removing], store=FakeStore(), durable=durable)
    async with server(LevelSpec(tier, OffloadRule(when="commit"))) as (cache, offers):
        client = Client(offers)
        await client.hello()
        await client.put(FOUR)
        await cache.settle()
        answer = asyncio.create_task(offers.remove(client.session, FOUR[:2]))
        await removing.reached()
        await asyncio.sleep(1.0)
        assert not answer.done()
        removing.let_go()
        await answer
        assert len(tier.records) == 2


async def test_a_removal_without_rights_below_a_server_is_no_answer() -> None:
    denials = [Raise(PermissionDenied, on=on, times=None) for on in ("remove", "purge")]
    tier = SharedFakeTier(denials)
    async with server(LevelSpec(tier, OffloadRule(when="commit"))) as (cache, offers):
        tier.removable = lambda _: True
        client = Client(offers)
        await client.hello()
        await client.put(FOUR)
        await cache.settle()
        with pytest.raises(TierError, match="no rights to remove"):
            await offers.remove(client.session, FOUR[:2])
        with pytest.raises(TierError, match="no rights to remove"):
            await offers.purge(client.session, None)


class SlowlySynced(FakeTier):
    async def sync(self) -> None:
        await asyncio.sleep(0.1)


async def test_a_removal_does_not_wait_for_those_that_come_after_it() -> None:
    tier = SlowlySynced(store=FakeStore(), durable=True)
    async with server(LevelSpec(tier, OffloadRule(when="commit"))) as (cache, offers):
        one, two = Client(offers), Client(offers, 2)
        await one.hello()
        await two.hello()
        await one.put(FOUR)
        await cache.settle()

        async def always() -> None:
            async with asyncio.TaskGroup() as others:
                while True:
                    others.create_task(offers.remove(two.session, FOUR[1:]))
                    await asyncio.sleep(0.01)

        removing = asyncio.create_task(always())
        await asyncio.sleep(0.05)
        async with asyncio.timeout(1.0):
            await offers.remove(one.session, FOUR[:1])
        removing.cancel()
        await asyncio.wait({removing})


async def test_a_survey_lists_a_clients_blocks_under_its_own_keys_from_every_level() -> None:
    tier = FakeTier(store=FakeStore(), durable=True)
    level = LevelSpec(tier, OffloadRule(when="commit"), 200)
    async with server(level, slots=24) as (cache, offers):
        one, two = Client(offers), Client(offers, 2, b"b" * 32)
        await one.hello()
        await two.hello()

        async def listed(salt: bytes | None, of: int) -> list[bytes]:
            found, more = list[bytes](), True
            while more:
                keys, more = await offers.survey(1, of, salt)
                found += keys
            assert len({*found}) == len(found)
            return sorted(found)

        salted, plain = keys_of(*range(70)), keys_of(*range(100, 108))
        for start in range(0, 70, 5):  # more than host has room for
            await one.put(salted[start : start + 5], Facts(salt=TENANT))
            await cache.settle()
        await one.put(plain)
        await two.put(keys_of(5, 200), Facts(salt=TENANT))
        await cache.settle()
        assert len(cache.stack.host.index) < 70
        assert await listed(TENANT, 1) == sorted(salted)
        assert await listed(b"", 2) == sorted(plain)
        assert await listed(b"no such!", 3) == []
        assert await listed(None, 4) == sorted([*salted, *plain])
        begun = await offers.survey(1, 5, None)
        assert begun.more
        await offers.remove(1, salted)
        left = await offers.survey(1, 5, None)
        assert {*left.keys} <= {*plain}, "what has gone since is left out"
        for of in range(6, 12):
            assert (await offers.survey(1, of, None)).keys
        await one.put(salted[:5], Facts(salt=TENANT))
        await cache.settle()
        for start in range(300, 340, 5):
            await two.put(keys_of(*range(start, start + 5)))
            await cache.settle()
        tier.script.append(Fail(on="get", times=None))
        with pytest.raises(TierError, match="some blocks cannot be read now"):
            await offers.survey(1, 12, TENANT)
        tier.heal()


async def test_a_servers_levels_honour_priority_and_expiry() -> None:
    tier = FakeTier(store=FakeStore(), durable=True)
    rule = OffloadRule(min_priority=50, when="commit")
    async with server(LevelSpec(tier, rule), host=OffloadRule(0)) as (cache, offers):
        client = Client(offers)
        await client.hello()
        loop = asyncio.get_running_loop()
        ends_s = EPOCH_S + loop.time() + 10.0
        await client.put(FOUR[:2], Facts(priority=80, floor=80, expires_wall_s=ends_s))
        await client.put(FOUR[2:], Facts(priority=80, floor=20))
        await cache.settle()
        assert len(tier.records) == 2, "the floor of the others is too low for it"
        assert await client.has(FOUR) == [True] * 4
        await asyncio.sleep(11.0)
        assert await client.get(FOUR) == [None, None, payload(FOUR[2]), payload(FOUR[3])]
        assert await client.put(keys_of(8), Facts(expires_wall_s=ends_s)) == [False], "it is over"


async def test_a_server_finds_the_blocks_of_its_durable_level_again() -> None:
    store = FakeStore()
    async with server(LevelSpec(FakeTier(store=store, durable=True))) as (_, offers):
        client = Client(offers)
        await client.hello()
        await client.put(FOUR, Facts(salt=TENANT))
    async with server(LevelSpec(FakeTier(store=store, durable=True))) as (_, offers):
        client = Client(offers)
        await client.hello()
        assert await client.get(FOUR[::-1]) == [payload(key) for key in FOUR[::-1]]
        assert await offers.purge(client.session, TENANT) == 4


@pytest.mark.slow
async def test_clients_pin_at_most_half_of_the_slots_and_then_wait() -> None:
    async with server(slots=6) as (_, offers):
        clients = [Client(offers, number) for number in (1, 2, 3, 4)]
        for client in clients:
            await client.hello()
        await clients[0].put(FOUR)
        pinned = await offers.pin(1, 50, FOUR)
        assert [one is not None for one in pinned] == [True] * 3, "the others come after that"
        waiting = [asyncio.create_task(offers.pin(number, 50, FOUR)) for number in (2, 3, 4)]
        await asyncio.sleep(100.0)
        assert not any(task.done() for task in waiting)
        await offers.gone(2)
        waiting[1].cancel()
        await asyncio.wait({waiting[1]})
        await offers.release(3, 50)
        await offers.release(1, 50)
        assert len(await waiting[2]) == 3, "whoever left the queue is not waited for"
        assert await waiting[0] == []
        await offers.release(4, 50)
        assert offers.counts()["pinned"] == 0


async def test_a_batch_larger_than_the_arena_is_put_and_got_in_pieces() -> None:
    keys = keys_of(*range(20))
    tier = FakeTier(store=FakeStore(), durable=True, latency_s=0.01)
    async with server(LevelSpec(tier), slots=6) as (cache, offers):
        one, two = Client(offers, 1), Client(offers, 2)
        await one.hello()
        await two.hello()
        both = await asyncio.gather(one.put(keys[:10]), two.put(keys[10:]))
        assert both == [[True] * 10] * 2, "in turn with others, what was left out is offered again"
        assert "dropped_room" not in cache.manager.stats()["host"]
        wanted = [payload(key) for key in keys]
        assert await asyncio.gather(one.get(keys), two.get(keys[::-1])) == [wanted, wanted[::-1]]
        assert one.pieces > 6
        holes = [*keys[:5], *keys_of(99), *keys[5:]]
        assert await one.get(holes) == [*wanted[:5], None, *wanted[5:]]


async def test_the_wait_for_free_slots_is_bounded() -> None:
    tier = FakeTier(store=FakeStore(), durable=True)
    async with server(LevelSpec(tier), slots=8) as (cache, offers):
        client, other = Client(offers, 1), Client(offers, 2)
        holders = [Client(offers, number) for number in (4, 5, 6)]
        for number, one in enumerate((client, other, *holders)):
            await one.hello()
            if one is not other:
                assert REFUSED not in await one.granted(keys_of(90 + number, 80 + number))
        clock = cache.manager.ladder.clock
        begun_s = clock.now()
        third = Client(offers, 3)
        await third.hello()
        both = asyncio.gather(other.granted(keys_of(8, 9)), third.granted(keys_of(10)))
        assert await both == [[REFUSED] * 2, [REFUSED]], "each waits for as long, not in turn"
        assert clock.now() - begun_s == pytest.approx(ROOM_S, abs=0.1)
        waiting = asyncio.create_task(other.granted(keys_of(8, 9)))
        await asyncio.sleep(0.5)
        await offers.abort(client.session, client.op)
        assert REFUSED not in await waiting
        await offers.abort(4, holders[0].op)
        assert (await client.granted(FOUR))[2:] == [LATER] * 2
        waiting = asyncio.create_task(client.granted(keys_of(10, 11)))
        await asyncio.sleep(0.5)
        await offers.gone(client.session)
        assert await waiting == [REFUSED] * 2
        assert offers.counts()["granted"] == 6


async def test_a_session_is_granted_a_share_of_the_slots_until_it_commits() -> None:
    async with server(slots=16) as (_, offers):
        greedy, other = Client(offers, 1), Client(offers, 2)
        await greedy.hello()
        await other.hello()
        assert await other.put(FOUR[:2]) == [True] * 2
        keys = keys_of(*range(10, 18))
        first = await greedy.granted([*keys[:3], *FOUR[:2], *keys[3:]])
        assert [slot >= 0 for slot in first] == [True] * 3 + [False] * 2 + [True] + [False] * 4
        assert first[3:5] == [HAVE] * 2
        assert first[6:] == [LATER] * 4
        for _ in range(3):
            assert await greedy.granted(keys_of(20, 21, 22)) == [REFUSED] * 3
        assert offers.counts()["granted"] == 4
        assert await other.put(keys_of(*range(30, 38))) == [True] * 8, "in pieces"
        assert await other.get(FOUR[:2]) == [payload(key) for key in FOUR[:2]]
        await offers.abort(1, 1)
        assert await greedy.put(keys) == [True] * 8


async def test_a_full_server_accepts_only_blocks_of_higher_priority() -> None:
    async with server(slots=4) as (_, offers):
        client = Client(offers)
        await client.hello()
        await client.put(FOUR, Facts(priority=60, floor=60))
        assert await client.granted(keys_of(9), Facts(priority=30, floor=30)) == [REFUSED]
        assert await client.put(keys_of(9), Facts(priority=70, floor=70)) == [True]


def test_only_salts_of_one_namespace_share_a_prefix() -> None:
    salts = {own_salt(SPACE, salt) for salt in (b"", TENANT, b"another.")}
    assert len(salts) == 3
    assert len({salt[:3] for salt in salts}) == 1
    assert own_salt(b"b" * 32, TENANT)[:3] not in {salt[:3] for salt in salts}


# ---- an engine that exports


async def test_an_engine_exports_its_blocks_under_their_keys_with_current_labels() -> None:
    keys = SimCache.keys(0, 0, 0, 0)
    async with engine() as (cache, offers):
        cache.save(keys, priorities=[60, 50, 70, 80], ttl_s=100.0, salt="tenant")
        reader = Client(offers)
        assert await reader.hello(LAYOUT.block_bytes) == ""
        assert await reader.has([*keys[2:], *FOUR]) == [True, True, *[False] * 4]
        pinned = await offers.pin(1, 1, [keys[3], FOUR[0], keys[1]])
        for key, one in ((keys[3], pinned[0]), (keys[1], pinned[2])):
            assert one is not None
            assert bytes(offers.arena.view(one.slot)[: one.length]) == cache.payload(key)
            said = told(one.label)
            assert said is not None
            assert (said.key, said.namespace, said.length) == (key, SPACE, 64)
            assert said.is_of([cache.payload(key)])
            assert said.facts.floor == 50
            assert said.facts.expires_wall_s == pytest.approx(EPOCH_S + 100.0, abs=1.0)
        assert pinned[1] is None
        await offers.release(1, 1)


async def test_clients_cannot_write_to_an_engine_or_remove_from_it() -> None:
    keys = SimCache.keys(0, 0)
    async with engine() as (cache, offers):
        cache.save(keys)
        reader = Client(offers)
        await reader.hello(64)
        assert await reader.put(FOUR, length=64) == [False] * 4
        await offers.abort(1, 1)
        await offers.remove(1, keys)
        assert await offers.purge(1, None) == 0
        assert await reader.has(keys) == [True, True]


async def test_readers_of_another_model_or_block_are_refused() -> None:
    async with engine() as (_, offers):
        assert "another model" in await Client(offers, space=b"x" * 32).hello(64)
        assert "blocks of 63 bytes: expected 64" in await Client(offers).hello(63)
        assert offers.counts()["refused"] == 2


async def test_an_engine_serves_readers_only_from_the_named_levels() -> None:
    keys, store = SimCache.keys(0, 0, 0, 0), FakeStore()
    async with engine(LevelSpec(FakeTier(store=store, durable=True))) as (cache, _):
        cache.save(keys)
    async with engine(LevelSpec(FakeTier(store=store, durable=True)), names=[]) as (_, offers):
        reader = Client(offers)
        await reader.hello(64)
        assert await reader.has(keys) == [False] * 4
        assert await offers.pin(1, 1, keys) == [None] * 4
    tier = FakeTier(store=store, durable=True)
    async with engine(LevelSpec(tier), names=["level1"]) as (_, offers):
        reader = Client(offers)
        await reader.hello(64)
        assert await reader.has(keys) == [True] * 4
        slow = Hold(on="get")
        tier.script.append(slow)
        pinning = asyncio.create_task(offers.pin(1, 1, keys[2:]))
        await slow.reached()
        slow.let_go()
        assert [one is not None for one in await pinning] == [True, True]
