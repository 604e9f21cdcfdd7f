"""Caches in use while the far ends of their level fail, fail over and come back."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import redis

import kvladder
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.manager import CacheManager
from kvladder.testing.proxy import Networks
from kvladder.testing.redisserver import RedisServer, redis_cluster
from tests.kit.httpproxy import FAULTS, FaultyProxy
from tests.kit.lanes import BEFORE, CLOSED, FIRST, LAST, Case, Figures, Held, Lane, Service
from tests.kit.mooncake import Mooncake
from tests.kit.objectserver import BUCKET, ObjectServer
from tests.kit.traffic import Traffic, forgotten, keys, save
from tests.patience import until
from tests.tiers.redistests import watched

SLOTS = 128
DEADLINE_S = 1.0
"""The deadline of each fetch."""
SHORT_S, STOP_S = 0.15, 1.0
"""Times for which far ends are stopped: too short for their watchers to notice, and longer."""
BREAKER: dict[str, Any] = {"failures": 2, "retry": "200 ms", "retry_max": "200 ms"}
CALL = "both"
"""Cases have blocks loaded and saved at once."""
REDIS_SETTINGS = (
    ("maxmemory", "64mb"),
    ("maxmemory-policy", "allkeys-lru"),
    ("repl-diskless-sync-delay", "0"),
)


class Users(Traffic):
    """Threads that save prefix after prefix, and load each some turns later from the level."""

    LAGS = (2, 5, 11)
    """The number of turns between the save of a prefix and its loads."""

    def __init__(
        self, cache: CacheManager, level: str, blocks: int, space: int, *, pause_s: float
    ) -> None:
        super().__init__(cache)
        self._level, self._blocks, self._space = level, blocks, space
        self._pause_s = pause_s
        self._saved_s: dict[int, float] = {}
        self._came: list[tuple[float, float]] = []
        """The times at which prefixes loaded whole from the level were saved and loaded."""

    def prefix(self, number: int) -> list[BlockKey]:
        """Return the keys of the prefix that one turn saves."""
        return keys(self._space, number, *range(self._blocks))[2:]

    def turn(self, number: int) -> None:
        self.ending.wait(self._pause_s)
        began_s = time.monotonic()
        save(self.cache, self.prefix(number))
        self._saved_s[number] = began_s
        older = number - self.LAGS[number % len(self.LAGS)]
        if older in self._saved_s:
            wanted = self.prefix(older)
            forgotten(self.cache, wanted)
            came = self.load(wanted)
            if came.blocks == len(wanted) and {*came.sources} == {self._level}:
                self._came.append((self._saved_s[older], time.monotonic()))

    def served_s(self, since_s: float) -> float:
        """Wait until the level has served blocks saved since then; return the time of that."""

        def found() -> list[float]:
            self.check()
            return [came_s for saved_s, came_s in [*self._came] if saved_s >= since_s]

        until(found)
        return found()[0]

    def used(self) -> list[BlockKey]:
        """Return the keys of all blocks that were saved."""
        return [key for number in self._saved_s for key in self.prefix(number)]


class CacheLane(Lane):
    """A cache over host and a level with failing far ends, used by threads."""

    name = ""
    level = ""
    """The type of the level, which is its name."""
    faults: Sequence[tuple[str, str]] = ()
    """The target of each fault, and the fault."""
    block_bytes, blocks = 64 << 10, 12
    """The size of a block, and the number of blocks in a prefix."""
    timeout_s = 0.4
    """The timeout of each call of the level."""
    pause_s = 0.03
    """The pause of each user between two turns, so that far ends keep up on a busy machine."""

    def __init__(self, folder: Path, figures: Figures, turn: asyncio.Lock) -> None:
        super().__init__(folder, figures, turn)
        self.undo = ExitStack()
        self._rounds = count()
        self.start()

    @classmethod
    def cases(cls) -> list[Case]:
        return [Case(cls.name, victim, fault, CALL) for victim, fault in cls.faults]

    @abstractmethod
    def start(self) -> None:
        """Start the far ends; ``undo`` is to end them."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """Return how the level reaches them."""

    @abstractmethod
    def strike(self, case: Case) -> float:
        """Have it happen; return when it was over: from then on the level could serve."""

    def repair(self) -> None:
        """Have all be as before."""

    def _cache(self) -> CacheManager:
        layout = Layout(block_tokens=16, block_bytes=self.block_bytes, fields={"model": self.name})
        level = {
            "type": self.level, "capacity": "256 MiB", "when": "commit", "breaker": BREAKER,
            "timeout": f"{self.timeout_s} s", **self.settings(),
        }  # fmt: skip
        source = {
            "arena": {"size": SLOTS * layout.slot_bytes},
            "fetch": {"deadline": f"{DEADLINE_S} s", "budget": "100 %", "when": "always"},
            "tiers": [{"type": "host"}, level],
        }
        return kvladder.open_cache(source, layout=layout)

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        with self._cache() as cache:  # the memory that libraries allocate from now on stays
            self._use(cache)
        self._hold(BEFORE, None)
        self.cache = self._cache()

    def _users(self, cache: CacheManager) -> Users:
        number = next(self._rounds)
        return Users(cache, self.level, self.blocks, number, pause_s=self.pause_s)

    def _use(self, cache: CacheManager) -> None:
        """Let users begin, and end once they are served."""
        with self._users(cache) as users:
            users.served_s(0.0)

    def _hold(self, moment: str, cache: CacheManager | None) -> None:
        slots = 0 if cache is None else _unowned(cache)
        self.figures.held.setdefault(self.name, {})[moment] = Held.now(slots)

    async def trial(self, case: Case, delay_s: float) -> None:
        await asyncio.to_thread(self._trial, case, delay_s)

    def _trial(self, case: Case, delay_s: float) -> None:
        with self._users(self.cache) as users:
            users.served_s(0.0)
            time.sleep(delay_s)
            over_s = self.strike(case)
            served_s = users.served_s(over_s)
        self._used = users.used()
        shown = self.figures.services.setdefault(case, Service())
        shown.wrong_bytes += users.wrong_bytes
        shown.loads += users.loads
        shown.longest_s = max(shown.longest_s, users.slowest_s)
        shown.again_s.append(served_s - over_s)

    async def recover(self, case: Case) -> None:
        await asyncio.to_thread(self._recover, case)

    def _recover(self, case: Case) -> None:
        self.repair()
        cache = self.cache
        cache.remove(self._used)
        until(lambda: cache.idle() and not _unowned(cache), every_s=0.02)
        cache.check()
        if not self.figures.trials.total():
            self._hold(FIRST, cache)
        self._hold(LAST, cache)
        self.figures.trials[case] += 1

    async def aclose(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.cache.close()
        before = self.figures.held[self.name][BEFORE]

        def is_over() -> bool:
            now = Held.now()
            fewer = now.python_threads <= before.python_threads
            return fewer and now.descriptors <= before.descriptors

        until(is_over, every_s=0.02)
        self._hold(CLOSED, None)

    def close(self) -> None:
        self.undo.close()


def _unowned(cache: CacheManager) -> int:
    """Return how many slots of the arena are in use without a block of the host level."""
    stats = cache.stats()
    arena, blocks = stats["arena"], int(stats["host"]["blocks"])
    return int(arena["slots"]) - int(arena["free"]) - blocks


def stop(server: Any, for_s: float) -> None:
    """Stop a server for this time."""
    server.pause()
    time.sleep(for_s)
    server.resume()


def ask(server: RedisServer, *command: str | int) -> Any:
    """Return the reply of a server; None from one that is dead or closes the connection."""
    try:
        return server.run(*command)
    except (redis.ConnectionError, redis.TimeoutError):
        return None


def is_master(server: RedisServer) -> bool:
    """Return whether a server takes writes."""
    said = ask(server, "INFO", "replication")
    return said is not None and said["role"] == "master"


def is_linked(server: RedisServer) -> bool:
    """Return whether a replica has its master's data."""
    said = ask(server, "INFO", "replication")
    return said is not None and said.get("master_link_status") == "up"


class SentinelLane(CacheLane):
    """A Redis server and its replica; Sentinels promote the replica."""

    name, level = "redis-sentinel", "redis"
    faults = (
        ("primary", "SIGKILL"),
        ("primary", "SIGSTOP until it is replaced"),
        ("primary", "SIGSTOP for 150 ms"),
        ("primary", "SENTINEL FAILOVER"),
    )

    def start(self) -> None:
        servers = watched(self.folder, REDIS_SETTINGS, reached_at=self.reached_at)
        started = self.undo.enter_context(servers)
        self.primary, self.replica, self.sentinels = started
        self.repair()

    def reached_at(self, server: RedisServer) -> int:
        """Return the port at which all others reach a server."""
        return server.port

    def settings(self) -> Mapping[str, Any]:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return {"url": f"redis://{hosts}", "sentinel": "kv"}

    def strike(self, case: Case) -> float:
        primary, replica = self.primary, self.replica
        if case.fault == "SIGKILL":
            primary.kill()
        elif case.fault == "SIGSTOP for 150 ms":
            stop(primary, SHORT_S)
            return time.monotonic()
        elif case.fault != "SENTINEL FAILOVER":
            primary.pause()

        def has_changed() -> bool:
            if case.fault == "SENTINEL FAILOVER" and not is_master(replica):
                with suppress(redis.ResponseError):  # one continues, or they find it too early
                    self.sentinels[0].run("SENTINEL", "FAILOVER", "kv")
            return is_master(replica)

        until(has_changed, every_s=0.02)
        over_s = time.monotonic()
        primary.resume()  # and treats itself as the primary until it learns of the other one
        return over_s

    def repair(self) -> None:
        for server in (self.primary, self.replica):
            if ask(server, "PING") is None:
                server.kill()
                server.start()
        try:
            until(self._is_in_order, every_s=0.05)
        except AssertionError as error:
            error.add_note("\n".join(self._views()))
            raise

    def _views(self) -> Iterator[str]:
        """Yield how each server and each Sentinel sees the others."""
        for server in (self.primary, self.replica):
            yield f"server {server.port}: {ask(server, 'INFO', 'replication')}"
        for sentinel in self.sentinels:
            for what in ("MASTER", "REPLICAS"):
                yield f"sentinel {sentinel.port}: {ask(sentinel, 'SENTINEL', what, 'kv')}"
            yield f"sentinel {sentinel.port}: {ask(sentinel, 'INFO', 'sentinel')}"

    def _is_in_order(self) -> bool:
        """Return whether all agree; tell the other server its primary."""
        ports = {
            int(ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv")[1])
            for sentinel in self.sentinels
        }
        if len(ports) > 1:
            return False
        servers = self.primary, self.replica
        is_first = self.reached_at(servers[0]) in ports
        self.primary, self.replica = servers if is_first else servers[::-1]
        leads = is_master(self.primary)
        if is_master(self.replica):
            port = self.reached_at(self.primary)
            ask(self.replica, "REPLICAOF", "127.0.0.1", port)
        elif not leads:  # each has become the other's replica, which Sentinels never end
            ask(self.primary, "REPLICAOF", "NO", "ONE")
        return (
            leads
            and is_linked(self.replica)
            and all(_has_both(sentinel) for sentinel in self.sentinels)
        )


def _has_both(sentinel: RedisServer) -> bool:
    """Return whether a Sentinel finds nothing wrong with the primary and with its replica."""
    master = ask(sentinel, "SENTINEL", "MASTER", "kv")
    replicas = ask(sentinel, "SENTINEL", "REPLICAS", "kv")
    return (
        master[b"flags"] == b"master"
        and [one[b"flags"] for one in replicas] == [b"slave"]
        and replicas[0][b"master-link-status"] == b"ok"
    )


class ClusterLane(CacheLane):
    """Three primaries of a Redis cluster, each with a replica."""

    name, level = "redis-cluster", "redis"
    faults = (
        ("primary", "SIGKILL"),
        ("primary", "SIGSTOP until it is replaced"),
        ("primary", "SIGSTOP for 150 ms"),
        ("slots", "moved"),
    )

    def start(self) -> None:
        settings = [*REDIS_SETTINGS, ("cluster-node-timeout", "600")]
        settings += [("cluster-require-full-coverage", "no")]
        nodes = self.undo.enter_context(redis_cluster(self.folder, replicas=1, settings=settings))
        self.nodes = nodes
        self.repair()

    @staticmethod
    def number(node: RedisServer) -> str:
        """Return the name that a node has in its cluster."""
        name: str = node.run("CLUSTER", "MYID").decode()
        return name

    @staticmethod
    def view(node: RedisServer) -> list[list[str]]:
        """Return a node's view of each node: name, address, flags, its primary's name, and more."""
        said = ask(node, "CLUSTER", "NODES") or b""
        return [row.split() for row in said.decode().splitlines()]

    def settings(self) -> Mapping[str, Any]:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:3])
        return {"url": f"redis://{hosts}", "cluster": True}

    def primaries(self) -> list[RedisServer]:
        """Return the three that have the slots."""
        return [node for node in self.nodes if is_master(node)]

    def strike(self, case: Case) -> float:
        if case.fault == "moved":
            until(self._has_moved, every_s=0.02)
            return time.monotonic()
        victim, heir = self._pair()
        if case.fault == "SIGSTOP for 150 ms":
            stop(victim, SHORT_S)
            return time.monotonic()
        if case.fault == "SIGKILL":
            victim.kill()
        else:
            victim.pause()
        until(lambda: is_master(heir))
        over_s = time.monotonic()
        victim.resume()
        return over_s

    def _pair(self) -> tuple[RedisServer, RedisServer]:
        """Return one of the primaries, and the replica that is to take over."""
        names = {self.number(node): node for node in self.nodes}
        pairs: list[tuple[RedisServer, RedisServer]] = []

        def has_some() -> bool:
            for primary in self.primaries():
                heirs = [row[0] for row in self.view(primary) if row[3] == self.number(primary)]
                if len(heirs) == 1 and is_linked(names[heirs[0]]):
                    pairs.append((primary, names[heirs[0]]))
            return bool(pairs)

        until(has_some, every_s=0.02)  # one that was busy for long may just be replaced
        return random.choice(pairs)

    def _has_moved(self) -> bool:
        """Move slots; return False if a primary was replaced since and refuses its part."""
        primaries = self.primaries()
        random.shuffle(primaries)
        try:
            self._move(primaries[0], primaries[1:])
        except redis.ResponseError:
            return False
        return True

    def _move(self, source: RedisServer, others: Sequence[RedisServer]) -> None:
        """Move the slots of some blocks from one to another, block by block."""
        target = others[0]
        ids = [self.number(node) for node in (source, target)]
        names: list[bytes] = []

        def has_some() -> bool:
            names[:] = source.run("KEYS", "kvladder:*")[:6]
            return bool(names)

        until(has_some)
        for slot in {source.run("CLUSTER", "KEYSLOT", name) for name in names}:
            target.run("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            source.run("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
            while found := source.run("CLUSTER", "GETKEYSINSLOT", slot, 100):
                for name in found:
                    source.run("MIGRATE", "127.0.0.1", target.port, name, 0, 60_000)
            for node in (target, source, *others[1:]):
                node.run("CLUSTER", "SETSLOT", slot, "NODE", ids[1])

    def repair(self) -> None:
        for node in self.nodes:
            if ask(node, "PING") is None:
                node.kill()
                node.start()
        until(self._is_in_order, every_s=0.05)

    def _is_in_order(self) -> bool:
        replicas = [node for node in self.nodes if not is_master(node)]
        return (
            len(replicas) == 3
            and all(is_linked(node) for node in replicas)
            and all(self._sees_all(node) for node in self.nodes)
        )

    def _sees_all(self, node: RedisServer) -> bool:
        """Return whether a node finds nothing wrong, and each primary has a replica."""
        rows = self.view(node)
        flags = {flag for row in rows for flag in row[2].split(",")}
        healthy = not flags & {"fail", "fail?", "handshake", "noaddr"}
        followed = {row[3] for row in rows} - {"-"}
        return healthy and (len(rows), len(followed)) == (len(self.nodes), 3)


class ObjectLane(CacheLane):
    """An S3 server behind a proxy that applies the faults of networks and servers to requests."""

    name, level = "object", "object"
    faults = tuple(("requests", fault) for fault in FAULTS)
    block_bytes, blocks = 256 << 10, 3
    timeout_s, pause_s = 2.0, 0.2  # its server is Python's, too

    def start(self) -> None:
        self.server = self.undo.enter_context(ObjectServer(self.folder))
        port = int(self.server.address.rpartition(":")[2])
        networks = self.undo.enter_context(Networks())
        self.proxy = networks.add(FaultyProxy(port, delay_s=1.25 * self.timeout_s))

    def settings(self) -> Mapping[str, Any]:
        options = self.server.options | {"endpoint": f"http://127.0.0.1:{self.proxy.port}"}
        return {"url": f"s3://{BUCKET}/kv", "options": options, "probe_cache": "1 ms"}

    def strike(self, case: Case) -> float:
        met = self.proxy.met[case.fault]
        self.proxy.fault = case.fault
        time.sleep(STOP_S / 2)
        until(lambda: self.proxy.met[case.fault] > met)
        self.proxy.fault = ""
        return time.monotonic()


class StoreLane(CacheLane):
    """A Mooncake Store with one node."""

    name, level = "mooncake-store", "mooncake"
    faults = (
        ("node", "SIGKILL, then a new one"),
        ("node", "SIGSTOP for 1 s"),
        ("master", "SIGKILL, then started again"),
        ("master", "SIGSTOP for 1 s"),
    )

    def start(self) -> None:
        self.store = self.undo.enter_context(Mooncake(self.folder))

    def settings(self) -> Mapping[str, Any]:
        return {"master": self.store.master, "abandon": "300 ms"}

    def strike(self, case: Case) -> float:
        store = self.store
        if case.victim == "node":
            (node,) = store.nodes
            if case.fault == "SIGSTOP for 1 s":
                node.kill(signal.SIGSTOP)
                time.sleep(STOP_S)
                node.kill(signal.SIGCONT)
            else:
                store.nodes.pop().kill()
                store.add()
        elif case.fault == "SIGSTOP for 1 s":
            stop(store, STOP_S)
        else:
            store.kill()
            store.start_master()
        return time.monotonic()


FAILOVER_LANES: Mapping[str, type[CacheLane]] = {
    lane.name: lane for lane in (SentinelLane, ClusterLane, ObjectLane, StoreLane)
}
