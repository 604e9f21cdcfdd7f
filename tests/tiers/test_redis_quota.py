"""Quotas by namespace and by salt, of caches that have nothing in common but a real server."""

from __future__ import annotations

import asyncio
import re
from itertools import count

import pytest

from kvladder.errors import TierFull
from kvladder.keys import salt_digest
from kvladder.testing.redisserver import RedisServer, redis_cluster
from kvladder.tiers.label import LABEL_BYTES, Ref
from kvladder.tiers.redis import quota as redisquota
from kvladder.tiers.redis import tier as redis
from kvladder.tiers.redis.url import QuotaOptions, RedisOptions
from kvladder.units import Size
from tests.kit.traffic import forgotten, keys, stored
from tests.patience import until
from tests.tiers.redistests import PATIENT, key_of
from tests.tiers.test_redis_faults import LAYOUT, cache_over, load, payload
from tests.tiers.test_redis_refused import refused
from tests.tiers.test_redis_values import Values, one_by_one

pytestmark = pytest.mark.slow
VALUE = LAYOUT.block_bytes + LABEL_BYTES


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


def quota(*, tenant=None, namespace=None, recount="1 h"):
    """Limits in blocks."""
    limits = {"tenant": tenant, "namespace": namespace}
    sizes = {name: count * VALUE for name, count in limits.items() if count is not None}
    patient = {"timeout": "20 s", "connect_timeout": "20 s"}
    return {"quota": {**sizes, "recount": recount}, **patient}


def settled(*caches):
    """Wait for the end of the first recount: blocks written before may count twice."""
    for cache in caches:
        load(cache, flat(10**9))  # a call starts it
        tier = cache._stack.levels[0].tier
        until(lambda tier=tier: tier._gauges and tier._asking is None)  # type: ignore[misc]


def salted(cache, wanted, salt):
    """Save blocks of a salt one by one; how many the server keeps of them."""
    for key in wanted:
        saving = cache.save([key], salt=salt)
        for slot in saving.slots:
            cache.arena.view(slot)[: LAYOUT.block_bytes] = payload(key)
        saving.commit()
        until(cache.idle)
    with cache._stack.lock:
        return sum(key in cache._stack.levels[0].index for key in wanted)


def flat(*numbers):
    """Keys of blocks that begin prompts of their own."""
    return [keys(number)[0] for number in numbers]


def counters(server, cache):
    """Return the server's counters, by salt and in total, in blocks."""
    found = server.run("HGETALL", b"kvladder:1:%b:bytes" % cache.namespace.hex()[:32].encode())
    assert all(int(count) % VALUE == 0 for count in found.values())
    return {name: int(count) // VALUE for name, count in found.items() if int(count)}


def test_two_caches_together_keep_only_a_tenant_with_a_quota_within_it(server):
    settings = quota(tenant=10)
    with cache_over(server.url, **settings) as one, cache_over(server.url, **settings) as two:
        settled(one, two)
        assert salted(one, flat(*range(6)), "greedy") == 6
        assert salted(two, flat(*range(10, 20)), "greedy") == 4
        kept = salted(one, flat(*range(20, 30)), "greedy")
        assert kept == 1, "it hears with the first one what the other did"
        assert salted(one, flat(*range(30, 36)), "modest") == 6
        stored(two, keys(200, *range(11)))
        greedy, modest = (salt_digest(one.namespace, salt) for salt in ("greedy", "modest"))
        assert counters(server, one) == {greedy: 11, modest: 6, b"all": 29}
        assert server.run("DBSIZE") == 29 + 2, "the counters, and whose turn it is"

        dropped = [cache.stats()["redis"].get("dropped_quota", 0) for cache in (one, two)]
        assert dropped == [9, 6]
        assert one.stats()["redis"]["dropped"]["quota"] == {"30": 9}
        assert one.stats()["redis"]["errors"] == two.stats()["redis"]["errors"] == 0
        assert two.stats()["redis"]["namespace_bytes"] == 29 * VALUE
        assert re.search(r"quota\.tenant +[0-9]", one.describe())
        assert load(one, keys(200, *range(11)))[0] == 12, "what others have is served as before"


def test_a_removed_block_makes_room_whichever_cache_stored_it(server, monkeypatch):
    monkeypatch.setattr(redis, "GAUGES_S", 0.5)
    settings, more = quota(tenant=4), count(100)
    with cache_over(server.url, **settings) as one, cache_over(server.url, **settings) as two:
        settled(one, two)
        assert salted(one, flat(1, 2, 3, 4, 5), "tenant") == 4
        for key in flat(1, 2):
            two.remove([key])
        until(two.idle)
        assert counters(server, one)[salt_digest(one.namespace, "tenant")] == 2
        assert salted(two, flat(6, 7, 8), "tenant") == 2
        assert salted(one, flat(9), "tenant") == 0
        list(one.purge("tenant"))
        until(one.idle)
        assert counters(server, one) == {}
        assert salted(two, flat(11), "tenant") == 0, "it does not know yet"
        until(lambda: salted(two, flat(next(more)), "tenant"))
        two.clear()
        until(two.idle)
        assert server.run("DBSIZE") == 0


def test_a_damaged_block_that_is_replaced_counts_once(server):
    with cache_over(server.url, **quota(tenant=10)) as cache:
        settled(cache)
        wanted = flat(1, 2)
        assert salted(cache, wanted, "tenant") == 2
        name = key_of(cache._stack.levels[0].tier, Ref(wanted[0], 0))
        server.run("SETRANGE", name, VALUE - 1, b"?")
        forgotten(cache, wanted)
        assert [load(cache, [key])[0] for key in wanted] == [0, 1]
        assert server.run("EXISTS", name) == 1, "somebody may have mended it meanwhile"
        assert salted(cache, wanted[:1], "tenant") == 1
        forgotten(cache, wanted)
        assert [load(cache, [key])[0] for key in wanted] == [1, 1]
        assert counters(server, cache)[b"all"] == 2


def test_above_the_namespaces_quota_new_blocks_replace_old_ones(server):
    settings = quota(namespace=16)
    with cache_over(server.url, **settings) as one, cache_over(server.url, **settings) as two:
        settled(one, two)
        stored(one, keys(*range(12)))
        for number in range(100, 110):
            stored(two, flat(number))
        assert server.run("DBSIZE") - 2 <= 17
        stats = two.stats()["redis"]
        assert (stats["errors"], stats["dropped_full"] > 0) == (0, True)
        forgotten(two, flat(*range(100, 110)))
        assert sum(load(two, flat(number))[0] for number in range(100, 110)) in (3, 4, 5)
        assert two.stats()["redis"]["evicted"] > 0
        with cache_over(server.url, salt="another", **settings) as stranger:
            stored(stranger, keys(*range(12)))
            assert stranger.stats()["redis"]["stored"] == 12, "a namespace of its own"


@pytest.mark.parametrize("isolate", [False, True])
def test_blocks_above_a_quota_evict_no_others(server, isolate):
    settings = {**quota(tenant=2), "capacity": 64 * VALUE, "slots": 128, "isolate": isolate}
    with cache_over(server.url, **settings) as cache:
        stored(cache, keys(*range(64)))
        settled(cache)
        assert cache.stats()["redis"]["blocks"] == 64
        assert salted(cache, flat(*range(100, 110)), "greedy") == 2
        assert cache.stats()["redis"]["evicted"] == 2


def test_a_quota_charges_encoded_bytes(server):
    settings = {**quota(tenant=2), "codecs": ["zstd", "checksum"]}
    with cache_over(server.url, **settings) as cache:
        settled(cache)
        assert salted(cache, flat(*range(8)), "tenant") == 8
        assert cache.stats()["redis"]["namespace_bytes"] < 2 * VALUE


def test_a_recount_corrects_counters_after_lost_blocks(server):
    """As after evictions, expiry, and an engine that died before it could update the counters."""
    settings = quota(tenant=4)
    with cache_over(server.url, **settings) as cache:
        settled(cache)
        assert salted(cache, flat(1, 2, 3, 4, 5), "tenant") == 4
        lost = server.run("KEYS", "kvladder:*{*")[:3]
        server.run("DEL", *lost)
        assert salted(cache, flat(6), "tenant") == 0, "nobody knows yet"
    space = b"kvladder:1:%b:" % cache.namespace.hex()[:32].encode()
    server.run("HSET", space + b"bytes", b"deadsalt", 5 * VALUE, b"oldsalts", 0)
    server.run("DEL", space + b"recount")
    with cache_over(server.url, **settings) as cache:
        settled(cache)
        digest = salt_digest(cache.namespace, "tenant")
        assert counters(server, cache) == {digest: 1, b"all": 1}
        stored(cache, flat(7))
        assert counters(server, cache) == {digest: 1, b"all": 2}
        assert b"oldsalts" not in server.run("HKEYS", space + b"bytes")
        assert 3500 < server.run("TTL", space + b"recount") <= 3600
        assert salted(cache, flat(8, 9, 10, 11, 12), "tenant") in (3, 4)


def test_a_recount_that_fails_is_soon_repeated(server, monkeypatch):
    monkeypatch.setattr(redis, "GAUGES_S", 0.1)
    monkeypatch.setattr(redisquota, "RETRY_MS", 500)
    server.run("ACL", "SETUSER", "default", "-scan")
    more = count(100)
    with cache_over(server.url, **quota(tenant=4)) as cache:
        stored(cache, flat(next(more)))
        space = b"kvladder:1:%b:" % cache.namespace.hex()[:32].encode()
        server.run("HSET", space + b"bytes", b"deadsalt", 5 * VALUE)
        until(lambda: "b'scan'" in str(server.run("ACL", "LOG")))  # maps, or lists before
        server.run("ACL", "SETUSER", "default", "+scan")

        def is_put_right():
            stored(cache, flat(next(more)))  # pending updates are sent with the next calls
            return b"deadsalt" not in counters(server, cache)

        until(is_put_right)


def test_blocks_stored_before_a_quota_existed_are_counted(server):
    with cache_over(server.url) as cache:
        assert salted(cache, flat(*range(6)), "tenant") == 6
        assert "namespace_bytes" not in cache.stats()["redis"]
    with cache_over(server.url, **quota(tenant=7)) as cache:
        settled(cache)
        digest = salt_digest(cache.namespace, "tenant")
        assert counters(server, cache) == {digest: 6, b"all": 6}
        stored(cache, flat(50))
        assert counters(server, cache) == {digest: 6, b"all": 7}
        assert salted(cache, flat(*range(60, 70)), "tenant") <= 2


def test_a_block_stored_by_two_caches_is_charged_once(server):
    with (
        cache_over(server.url, **quota(tenant=8)) as one,
        cache_over(server.url, **quota(tenant=8)) as two,
    ):
        settled(one, two)
        wanted = flat(*range(4))
        assert salted(one, wanted, "tenant") == salted(two, wanted, "tenant") == 4
        assert [*counters(server, one).values()] == [4, 4], "in all, and of the tenant"


def test_a_quota_holds_in_a_cluster(tmp_path):
    with redis_cluster(tmp_path) as servers:
        settings = {**quota(tenant=10), "cluster": True}
        url = servers[0].url
        with cache_over(url, **settings) as one, cache_over(url, **settings) as two:
            settled(one, two)
            assert salted(one, flat(*range(6)), "greedy") == 6
            assert salted(two, flat(*range(10, 20)), "greedy") == 4
            assert salted(two, flat(*range(30, 36)), "modest") == 6
            total = sum(server.run("DBSIZE") for server in servers)
            assert total == 6 + 4 + 6 + 2
            assert two.stats()["redis"]["namespace_bytes"] == 16 * VALUE
            two.clear()
            until(two.idle)
            assert sum(server.run("DBSIZE") for server in servers) == 0


class TestTier(Values):
    """The tier alone."""

    @pytest.fixture
    def servers(self, server):
        return [server]

    @pytest.fixture
    def options(self, servers):
        limits = QuotaOptions(namespace=Size(9 * 4096), tenant=Size(8 * 4096))
        return RedisOptions(url=servers[0].url, connect_timeout=PATIENT, quota=limits)

    @pytest.fixture
    async def tier(self, opened, blocks):
        """Return a tier after its first recount, as ``settled`` waits for it."""
        tier = await opened()
        await blocks.contains(tier, blocks.some(0))
        if tier._asking is not None:
            await asyncio.wait({tier._asking})
        return tier

    async def test_charges_to_a_full_server_are_kept_until_it_accepts_them(
        self, tier, blocks, server
    ):
        """Counters cannot be raised either while a server takes no more."""
        first = [item.of(salt=b"8 bytes!") for item in blocks.some(0)]
        await blocks.store(tier, first)
        before = tier.gauges()["namespace_bytes"]
        server.configure(maxmemory_policy="noeviction", maxmemory=1)
        more = blocks.some(1)
        blocks.fill(more)
        with pytest.raises(TierFull):
            await tier.put(blocks.writes(more))
        assert tier.gauges()["namespace_bytes"] == before
        await tier.remove(blocks.refs(first))
        assert tier.gauges()["namespace_bytes"] == 0
        server.configure(maxmemory=0)
        await blocks.store(tier, more)
        assert tier.gauges()["namespace_bytes"] == before

    async def owing(self, tier, blocks, server):
        """Remove two blocks while the full server cannot count it; return their size in bytes."""
        items = await blocks.put(tier, 0, 1)
        held = tier.gauges()["namespace_bytes"]
        server.configure(maxmemory_policy="noeviction", maxmemory=1)
        await tier.remove(blocks.refs(items))
        assert tier.gauges()["namespace_bytes"] == 0
        assert tier._quotas._owed[redisquota.ALL] == -held
        return held
        return -tier._quotas._owed[redisquota.ALL]

    async def test_charges_owed_survive_an_abandoned_call(self, tier, blocks, server):
        held = await self.owing(tier, blocks, server)
        more = blocks.some(2)
        blocks.fill(more)
        server.pause()
        putting = asyncio.create_task(tier.put(blocks.writes(more)))
        while tier._quotas._owed:  # until it is being sent  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait({putting})
        assert putting.cancelled()
        assert tier._quotas._owed[redisquota.ALL] == -held
        assert tier.gauges()["namespace_bytes"] == 0
        server.resume()

    async def test_charges_owed_are_dropped_with_the_counters(self, tier, blocks, server):
        """Otherwise the namespace could exceed its quota from then on."""
        await self.owing(tier, blocks, server)
        assert await tier.purge(None, lambda *_: None) == 0
        server.configure(maxmemory=0)
        await blocks.put(tier, 1)
        size = LABEL_BYTES + tier.context.layout.block_bytes
        assert tier.gauges()["namespace_bytes"] == size
        counters = server.run("HGETALL", tier._quotas._counters)
        assert counters[b"all"] == b"%d" % size

    async def test_a_namespace_at_its_quota_is_full(self, tier, blocks):
        with pytest.raises(TierFull, match="quota of the namespace"):
            await one_by_one(tier, blocks)
        fitting = 9 * 4096 // (LABEL_BYTES + tier.context.layout.block_bytes)
        found = await blocks.contains(tier, blocks.some(*range(blocks.count)))
        assert sum(found) == fitting
        assert tier.spare(b"") > 100
        assert 0 <= tier.spare(b"unheard") <= 8


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"tenant": "1 GiB", "namespace": "1 MiB"}, "quota.tenant"),
        ({"recount": "5 m"}, "quota.recount"),
        ({"tenant": "many"}, "quota.tenant"),
        ({"salt": "1 GiB"}, "quota.salt"),
        ({"tenant": 100}, "quota.tenant"),
    ],
)
def test_wrong_quotas_are_refused(server, settings, path):
    assert refused(url=server.url, quota=settings).path == f"tiers[1].{path}"
