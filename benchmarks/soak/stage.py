"""The far ends of the soak, the proxies before them, and what may happen to each."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvladder.control.sockets import ask
from kvladder.testing.proxy import Networks, SlowNetwork
from kvladder.testing.redisserver import RedisServer
from tests.kit.failover import BREAKER, CacheLane, ObjectLane, SentinelLane, StoreLane
from tests.kit.lanes import Case, Figures
from tests.kit.mooncake import listens
from tests.kit.served import Server as CacheServer
from tests.patience import PATIENCE_S, until
from tests.vllm.harness import flip, stored_payloads

BLOCK_TOKENS = 64
BLOCK_BYTES = 256 << 10
"""Bytes of ``BLOCK_TOKENS`` of the tiny model."""
DELAY_S = 0.3
"""Delay of each piece in a slow network."""
FLIP_EVERY = {"redis": 100_000, "nixl": 500, "mooncake": 500}
"""A network that damages inverts a bit of each so many bytes: in each block, or few messages."""
SHORTEST_S, LONGEST_S = 1.0, 4.0
"""The duration of a fault of a network."""


class Fault(NamedTuple):
    """A fault of one level's far end, of its network, of its process, or of its files."""

    level: str
    victim: str
    what: str
    strike: Callable[[], float]
    """Callback that causes it, waits, and returns when it was over."""
    repair: Callable[[], object]
    """Callback afterwards: it restores the state before the fault."""
    ends: str = ""
    """Name of the engine that it kills."""
    empties: bool = False
    """Whether the level has no blocks afterwards: it serves again long after it stores again."""


class Proxied(CacheLane):
    """A lane whose clients reach its far ends through proxies."""

    def __init__(self, folder: Path, networks: Networks) -> None:
        self.networks = networks
        self._proxies: dict[int, SlowNetwork] = {}
        super().__init__(folder, Figures(), asyncio.Lock())

    def proxied(self, port: int) -> SlowNetwork:
        """Return the proxy before a port."""
        if port not in self._proxies:
            self._proxies[port] = self.networks.add(SlowNetwork(port))
        return self._proxies[port]

    @property
    def proxies(self) -> Sequence[SlowNetwork]:
        """All proxies of this lane."""
        return [*self._proxies.values()]


class ProxiedSentinel(Proxied, SentinelLane):
    """Redis under Sentinel; the replica, and the Sentinels, use the proxies, too."""

    def reached_at(self, server: RedisServer) -> int:
        return self.proxied(server.port).port


class ProxiedStore(Proxied, StoreLane):
    """A Mooncake Store; its master is behind a proxy."""

    def settings(self) -> Mapping[str, Any]:
        port = int(self.store.master.rpartition(":")[2])
        return {**super().settings(), "master": f"127.0.0.1:{self.proxied(port).port}"}

    def repair(self) -> None:
        """Start what a damaged message has ended."""
        if not listens(int(self.store.master.rpartition(":")[2])):
            self.store.kill()
            self.store.start_master()
        (node,) = self.store.nodes
        if node.process.poll() is not None:
            self.store.nodes.pop()
            self.store.add()


class ServeLane(Proxied):
    """``kvladder serve`` with a level of files; its control port is behind a proxy."""

    name, level = "serve", "nixl"
    faults = (("server", "SIGKILL, then started again"), ("server", "SIGSTOP for 1 s"))

    def start(self) -> None:
        self.server = CacheServer(self.folder / "server", block="256 KiB", arena="48 MiB")
        self.undo.callback(lambda: self.server.__exit__())

    def settings(self) -> Mapping[str, Any]:
        port = int(self.server.address.rpartition(":")[2])
        level = self.server.level(servers=[f"127.0.0.1:{self.proxied(port).port}"])
        return {name: level[name] for name in ("servers", "keys")}

    def strike(self, case: Case) -> float:
        if case.fault == "SIGSTOP for 1 s":
            os.kill(self.server.process.pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(self.server.process.pid, signal.SIGCONT)
        else:
            self.server.kill()
            self.server.again()
        return time.monotonic()


class BucketLane(ObjectLane):
    """An S3 server behind a proxy for requests; it loses its bucket when it is killed."""

    faults = (*ObjectLane.faults, ("server", "SIGKILL, then started again, empty"))

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Figures(), asyncio.Lock())

    def strike(self, case: Case) -> float:
        if case.victim == "requests":
            return super().strike(case)
        self.server.kill()
        self.server.start()
        return time.monotonic()


LEVELS: Mapping[str, tuple[str, str]] = {
    "files": ("24 MiB", "2 s"),
    "redis": ("36 MiB", "500 ms"),
    "nixl": ("48 MiB", "1 s"),
    "mooncake": ("60 MiB", "1 s"),
    "object": ("1 GiB", "2 s"),
}
"""Capacity and timeout of each level below the host: larger and larger, so that all are read."""


class Stage:
    """All far ends, and stacks of engines that use them; a context manager by ``undo``."""

    def __init__(self, folder: Path, undo: ExitStack, *, alone: bool = False) -> None:
        """Start the far ends; with ``alone`` there are none, and only the level of files."""
        self.folder = folder
        self.lanes: Sequence[CacheLane] = ()
        """The shared levels, the hottest first."""
        self.levels = ["files"] if alone else [*LEVELS]
        if alone:
            return
        self.networks = undo.enter_context(Networks())
        self.redis = ProxiedSentinel(folder / "redis", self.networks)
        undo.callback(self.redis.close)
        self.serve = ServeLane(folder / "serve", self.networks)
        undo.callback(self.serve.close)
        self.store = ProxiedStore(folder / "mooncake", self.networks)
        undo.callback(self.store.close)
        self.bucket = BucketLane(folder / "object")
        undo.callback(self.bucket.close)
        self.lanes = self.redis, self.serve, self.store, self.bucket

    def socket(self, engine: str) -> Path:
        """Return the control socket of an engine."""
        return self.folder / f"{engine}.sock"

    def stats(self, engine: str) -> dict[str, Any]:
        """Return the counters of an engine's cache."""
        told: dict[str, Any] = ask(self.socket(engine), {"command": "stats"}, timeout_s=PATIENCE_S)
        return told

    def stack(self, engine: str) -> dict[str, Any]:
        """Return the stack of an engine: all levels; it waits for each as long as it is told."""
        settings = {lane.level: dict(lane.settings()) for lane in self.lanes}
        settings["files"] = {"path": str(self.folder / f"{engine}-files")}
        below: list[dict[str, Any]] = [
            {
                "name": level, "type": level, "capacity": capacity, "timeout": timeout,
                "when": "commit", "breaker": BREAKER, **settings[level],
            }
            for level, (capacity, timeout) in LEVELS.items()
            if level in self.levels
        ]  # fmt: skip
        return {
            "arena": {"size": "20 MiB"},
            "fetch": {"when": "always", "deadline": "1 s", "budget": "100 %"},
            "control": str(self.socket(engine)),
            "tiers": [{"type": "host"}, *below],
        }

    # ---- faults

    def faults(self, engines: Sequence[str], random: Random) -> list[Fault]:
        """Return one fault of each kind, in random order."""
        found: list[Fault] = []
        if not self.lanes:
            return found
        for lane in self.lanes:
            for case in lane.cases():
                strike = partial(lane.strike, case)
                told = lane.level, case.victim, case.fault, strike, lane.repair
                found.append(Fault(*told, empties=case.fault.endswith("empty")))
        for lane in (self.redis, self.serve, self.store):
            for what, begin, end in self._troubles(lane.proxies, FLIP_EVERY[lane.level]):
                for_s = random.uniform(SHORTEST_S, LONGEST_S)
                strike = partial(self._trouble, lane.proxies, begin, end, for_s)
                found.append(Fault(lane.level, "network", what, strike, lane.repair))
        for engine in engines:
            strike = partial(self._damage, engine, random)
            found.append(Fault("files", "files", "damaged", strike, _nothing))
        for level in ("mooncake", "nixl"):
            strike = partial(self._kill_process, random.choice(engines), level)
            found.append(Fault(level, "its process in the engine", "SIGKILL", strike, _nothing))
        found.append(Fault("all", "network", "silent", self._silence, self._repair_all))
        random.shuffle(found)
        return found

    def _troubles(
        self, proxies: Sequence[SlowNetwork], flip_every: int = 0
    ) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
        """Return the faults of a network: name, begin and end."""

        def each(name: str, value: Any) -> Callable[[], None]:
            def run() -> None:
                for proxy in proxies:
                    setattr(proxy, name, value)

            return run

        def all_of(method: Callable[[SlowNetwork], None]) -> Callable[[], None]:
            def run() -> None:
                for proxy in proxies:
                    self.networks.call(partial(method, proxy))

            return run

        def refuse() -> None:
            each("refusing", True)()
            all_of(SlowNetwork.cut)()

        return [
            ("slow", each("latency_s", DELAY_S), each("latency_s", 0.0)),
            ("silent", all_of(SlowNetwork.swallow), all_of(SlowNetwork.deliver)),
            ("cut", refuse, each("refusing", False)),
            ("damages", each("flip_every", flip_every), each("flip_every", 0)),
        ]

    @staticmethod
    def _trouble(
        proxies: Sequence[SlowNetwork],
        begin: Callable[[], object],
        end: Callable[[], object],
        for_s: float,
    ) -> float:
        """Let a network fail for a time; one that damages, until it has damaged something."""
        before = sum(proxy.flipped for proxy in proxies)
        begin()
        time.sleep(for_s)
        if any(proxy.flip_every for proxy in proxies):
            until(lambda: sum(proxy.flipped for proxy in proxies) > before, every_s=0.1)
        end()
        return time.monotonic()

    def _silence(self) -> float:
        """Swallow the bytes of all networks; the object store's are late."""
        proxies = [proxy for lane in (self.redis, self.serve, self.store) for proxy in lane.proxies]
        troubles = {what: (begin, end) for what, begin, end in self._troubles(proxies)}
        begin, end = troubles["silent"]
        self.bucket.proxy.fault = "delay"
        begin()
        time.sleep(LONGEST_S)
        end()
        self.bucket.proxy.fault = ""
        return time.monotonic()

    def _repair_all(self) -> None:
        for lane in self.lanes:
            lane.repair()

    def _damage(self, engine: str, random: Random) -> float:
        """Invert bits in a third of the stored blocks of one engine's files."""
        found = stored_payloads(self.folder / f"{engine}-files")
        for path, offset in random.sample(found, k=len(found) // 3):
            flip(path, offset + random.randrange(BLOCK_BYTES))
        return time.monotonic()

    def _kill_process(self, engine: str, level: str) -> float:
        """Kill the process in which an engine runs a level."""
        pid = self.stats(engine)[level].get("process")
        if pid:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return time.monotonic()


def _nothing() -> None:
    """Repair nothing: the engine does it."""
