"""A Redis Cluster of simulated servers that speak RESP, replicate late and fail over.

The servers stand for real ones, which no simulated loop can drive. The whole of kvladder's client,
from the parser of RESP to quotas and purges, is the real one.
"""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial
from typing import Any
from zlib import crc32

from redis.crc import key_slot

from tests.sim.fleet.loop import FleetLoop, Process
from tests.sim.fleet.net import End, Net

RUN_SLOTS = 256
"""Slots move in runs of this many: a map of single slots would cost a fifth of all time."""
PORT = 6379
SLOTS = 16384
NODE_TIMEOUT_S = 2.0
"""Seconds for which a primary must be away before a replica takes over."""
TICK_S = 0.5
VALUE_MAX = 1 << 20
Value = tuple[Any, float | None]
"""A stored value, and the loop time at which it expires."""


class Node:
    """A server of the cluster: its data, and a process while it runs."""

    def __init__(self, cluster: RedisCluster, number: int) -> None:
        self.cluster = cluster
        self.machine = f"redis{number}"
        self.data: dict[bytes, Value] = {}
        self.follows: Node | None = None
        self.slots: set[int] = set()
        self.is_synced = True
        self.process: Process | None = None
        self.runs = 0
        self.told_s = 0.0
        """Loop time at which the last write of its primary arrives."""
        self.away_s = 0.0
        """Loop time since which the others do not reach it."""
        self.trouble = ""
        """Why it refuses some commands: a name in ``REFUSED``."""

    @property
    def is_up(self) -> bool:
        """True if the server runs and is not stopped."""
        return self.process is not None and not self.process.is_stopped

    def start(self) -> None:
        """Start the server, empty, as one without persistence."""
        if self.process is None:
            self.runs += 1
            self.data, self.is_synced = {}, False
            for replica in self.cluster.nodes:
                replica.is_synced &= replica.follows is not self  # it gets the empty state, too
            self.process = Process(self.machine, self.cluster.loop)
            self.cluster.net.listen(self.process, PORT, lambda end: Session(self, end))

    def kill(self) -> None:
        """End the server; its data is lost."""
        if self.process is not None:
            self.process.die()
            self.cluster.net.gone(self.process)
            self.process = None
            sessions = self.cluster.sessions
            for number in [n for n, session in sessions.items() if session.node is self]:
                del sessions[number]

    def at(self, key: bytes) -> Any:
        """Return the value of a key, None if there is none."""
        found = self.data.get(key)
        if found is not None and found[1] is not None and found[1] <= self.cluster.loop.time():
            del self.data[key]
            found = None
        return None if found is None else found[0]


class Session(asyncio.Protocol):
    """A client's connection: parses commands and answers them in order."""

    def __init__(self, node: Node, end: End) -> None:
        self.node = node
        self.end = end
        self.number = node.cluster.next_id()
        self._left = b""
        node.cluster.sessions[self.number] = self

    def connection_lost(self, exc: Exception | None) -> None:
        self.node.cluster.sessions.pop(self.number, None)

    def data_received(self, data: bytes) -> None:
        self._left += data
        out: list[bytes] = []
        while (command := self._next()) is not None:
            out.append(packed(self._answer(command)))
        if out:
            self.end.write(b"".join(out))

    def _next(self) -> list[bytes] | None:
        """Take the next whole command from the received bytes."""
        at = self._left.find(b"\r\n")
        if at < 0:
            return None
        count, at = int(self._left[1:at]), at + 2
        words: list[bytes] = []
        for _ in range(count):
            end = self._left.find(b"\r\n", at)
            if end < 0:
                return None
            size = int(self._left[at + 1 : end])
            at = end + 2 + size + 2
            if len(self._left) < at:
                return None
            words.append(self._left[end + 2 : end + 2 + size])
        self._left = self._left[at:]
        return words

    def _answer(self, words: list[bytes]) -> Any:
        name, *rest = words
        call: Callable[..., Any] | None = getattr(self, "do_" + name.decode().lower(), None)
        if call is None:
            return Exception(f"ERR unknown command '{name.decode()}'")
        if name in KEYED and (refusal := self._refusal(name, rest[0])) is not None:
            return refusal
        return call(*rest)

    def _refusal(self, name: bytes, key: bytes) -> Exception | None:
        """Return why this node does not obey a command about a key."""
        node, cluster, slot = self.node, self.node.cluster, key_slot(key)
        if (owner := cluster.owner(slot)) is not node:
            return Exception(f"MOVED {slot} {owner.machine}:{PORT}")
        if cluster.is_cut_off(node):
            return Exception("CLUSTERDOWN The cluster is down")
        error, commands = REFUSED.get(node.trouble, ("", set[bytes]()))
        return Exception(error) if name in commands else None

    # ---- commands without a key

    def do_hello(self, *_: bytes) -> Any:
        return {b"server": b"redis", b"proto": 3, b"id": self.number, b"mode": b"cluster"}

    def do_info(self, *_: bytes) -> Any:
        run = f"{self.node.machine}-{self.node.runs}"
        used = sum(len(value) for value, _ in self.node.data.values() if isinstance(value, bytes))
        lines = {"redis_version": "7.2.0", "redis_mode": "cluster", "run_id": run}
        lines |= {"used_memory": str(used), "maxmemory": "0", "evicted_keys": "0"}
        return "".join(f"{name}:{value}\r\n" for name, value in lines.items()).encode()

    def do_echo(self, text: bytes) -> Any:
        return text

    def do_config(self, *_: bytes) -> Any:
        return {b"proto-max-bulk-len": b"%d" % VALUE_MAX}

    def do_cluster(self, *_: bytes) -> Any:
        return self.node.cluster.table()

    def do_client(self, what: bytes, *rest: bytes) -> Any:
        if what == b"KILL":
            other = self.node.cluster.sessions.get(int(rest[-1]))
            if other is None or other.node is not self.node:
                return Exception("ERR No such client ID")
            other.end.abort()
            other.end.is_open = False
            return 1
        return Simple(b"OK")

    def do_dbsize(self) -> Any:
        return len(self.node.data)

    def do_scan(self, cursor: bytes, *rest: bytes) -> Any:
        assert rest[0] == b"MATCH"
        pattern = re.compile(fnmatch.translate(rest[1].decode().replace("[", "[[]")))
        # by hash, so that keys that come and go meanwhile hide no other key
        names = sorted((crc32(name), name) for name in self.node.data)
        step = [one for one in names if one[0] >= int(cursor)]
        found = [n for _, n in step[:7] if pattern.match(n.decode()) and self.node.at(n)]
        return [b"%d" % (step[7][0] if len(step) > 7 else 0), found]

    # ---- commands of keys

    def do_getrange(self, key: bytes, first: bytes, last: bytes) -> Any:
        value = self.node.at(key)
        return b"" if value is None else value[int(first) : int(last) + 1]

    def do_strlen(self, key: bytes) -> Any:
        return len(self.node.at(key) or b"")

    def do_set(self, key: bytes, value: bytes, *more: bytes) -> Any:
        if b"NX" in more and self.node.at(key) is not None:
            return None
        end_s = None
        if b"PX" in more:
            end_s = self.node.cluster.loop.time() + int(more[more.index(b"PX") + 1]) / 1000
        self._write(key, (value, end_s))
        return Simple(b"OK")

    def do_unlink(self, *keys: bytes) -> Any:
        gone = [key for key in keys if self.node.at(key) is not None]
        for key in gone:
            self._write(key, None)
        return len(gone)

    def do_hincrby(self, key: bytes, name: bytes, count: bytes) -> Any:
        table: dict[bytes, int] = dict(self.node.at(key) or {})
        table[name] = table.get(name, 0) + int(count)
        self._write(key, (table, None))
        return table[name]

    def do_hgetall(self, key: bytes) -> Any:
        return {name: b"%d" % count for name, count in (self.node.at(key) or {}).items()}

    def do_hdel(self, key: bytes, *names: bytes) -> Any:
        table = {name: n for name, n in (self.node.at(key) or {}).items() if name not in names}
        self._write(key, (table, None))
        return len(names)

    def _write(self, key: bytes, value: Value | None) -> None:
        store(self.node.data, key, value)
        self.node.cluster.replicate(self.node, key, value)


KEYED = {b"GETRANGE", b"STRLEN", b"SET", b"UNLINK", b"HINCRBY", b"HGETALL", b"HDEL"}
REFUSED = {
    "full": ("OOM command not allowed when used memory > 'maxmemory'", {b"SET", b"HINCRBY"}),
    "unsaved": ("MISCONF Errors writing to the AOF", KEYED - {b"GETRANGE", b"STRLEN", b"HGETALL"}),
    "busy": ("BUSY busy", KEYED),
}
"""The error of a node in trouble, and for which commands: without memory it still removes."""


def store(data: dict[bytes, Value], key: bytes, value: Value | None) -> None:
    """Write or remove a value."""
    if value is None:
        data.pop(key, None)
    else:
        data[key] = value


class RedisCluster:
    """Three primaries with a replica each. Replicas get each write a little later.

    ``undone`` is called with each key and value that the replica has which takes over: a removal
    that it had not got yet is lost with its primary. That is a limit of Redis: no client can lift
    it.
    """

    def __init__(self, loop: FleetLoop, net: Net, undone: Callable[[bytes, bytes], object]) -> None:
        self.loop = loop
        self.net = net
        self.undone = undone
        self.sessions: dict[int, Session] = {}
        self.failovers = 0
        self._ids = 0
        self.nodes: list[Node] = []
        self.nodes += [Node(self, number) for number in range(6)]
        for number, node in enumerate(self.nodes):
            node.start()
            node.is_synced = True
            if number < 3:
                node.slots = {*range(number * SLOTS // 3, (number + 1) * SLOTS // 3)}
            else:
                node.follows = self.nodes[number - 3]
        self._owners = {slot: node for node in self.nodes for slot in node.slots}
        self._table: list[Any] = []
        self._ticking = loop.create_task(self._tick(), name="redis-bus")

    def next_id(self) -> int:
        """Return a number for a connection."""
        self._ids += 1
        return self._ids

    @property
    def addresses(self) -> str:
        """The nodes, as a URL of the Redis tier lists them."""
        return ",".join(f"{node.machine}:{PORT}" for node in self.nodes)

    def owner(self, slot: int) -> Node:
        """Return the primary of a slot."""
        return self._owners[slot]

    def table(self) -> list[Any]:
        """Return the reply to CLUSTER SLOTS."""
        if not self._table:
            for node in self.nodes:
                name = node.machine.encode()
                rows = ([*row, [name, PORT, name]] for row in ranges(node.slots))
                self._table += rows
        return self._table

    def reaches(self, one: Node, other: Node) -> bool:
        """Return whether two nodes hear each other."""
        both = (one.machine, other.machine), (other.machine, one.machine)
        return one.is_up and other.is_up and not any(self.net.is_blocked(*way) for way in both)

    def is_cut_off(self, node: Node) -> bool:
        """Return whether a node no longer reaches the majority of the cluster for long."""
        return node.away_s > 0 and self.loop.time() - node.away_s > NODE_TIMEOUT_S

    # ---- replication and fail-over

    def replicate(self, node: Node, key: bytes, value: Value | None) -> None:
        """Send a write to the replicas of a node."""
        for replica in self.nodes:
            if replica.follows is node:
                now_s = self.loop.time()
                at_s = now_s + self.net.latency_s(node.machine, replica.machine)
                replica.told_s = at_s = max(at_s, replica.told_s + 1e-6)
                call = partial(self._replicated, node, replica, key, value)
                self.loop.call_later(at_s - now_s, call, context=Context())

    def _replicated(self, node: Node, replica: Node, key: bytes, value: Value | None) -> None:
        if replica.follows is not node or not replica.is_synced:
            return
        if self.reaches(node, replica):
            store(replica.data, key, value)
        else:
            replica.is_synced = False  # it gets everything when the two meet again

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self.loop.time()
            for node in self.nodes:
                heard = sum(self.reaches(node, other) for other in self.nodes if other is not node)
                node.away_s = 0.0 if node.is_up and heard >= 3 else node.away_s or now_s
            for node in self.nodes:
                if node.slots and self.is_cut_off(node):
                    self._fail_over(node)
            for node in self.nodes:
                self._sync(node)

    def _fail_over(self, node: Node) -> None:
        """Let a replica take over the slots of a primary that is away."""
        heirs = [r for r in self.nodes if r.follows is node and r.is_up and not r.away_s]
        heirs.sort(key=lambda replica: not replica.is_synced)
        if not heirs:
            return
        heir = heirs[0]
        for key, (value, _) in sorted(heir.data.items()):
            if b"{" in key:
                self.undone(key, value)
        self.failovers += 1
        heir.slots, node.slots = node.slots, set()
        heir.follows, heir.is_synced = None, True
        for other in self.nodes:
            if other.follows is node or other is node:
                other.follows, other.is_synced = heir, False
        self._owners |= dict.fromkeys(heir.slots, heir)
        self._table = []

    def _sync(self, node: Node) -> None:
        """Give a replica all data of its primary, if it missed some."""
        if node.is_up and node.follows is not None and not node.is_synced:
            if self.reaches(node, node.follows):
                node.data, node.is_synced = dict(node.follows.data), True
        elif node.is_up and node.follows is None:
            node.is_synced = True

    def move_slots(self, number: int) -> None:
        """Move some slots, with their keys, from one primary to another."""
        primaries = [node for node in self.nodes if node.slots and node.is_up]
        if len(primaries) < 2:
            return
        source, target = primaries[number % len(primaries)], primaries[number // 7 % len(primaries)]
        if source is target or not self.reaches(source, target):
            return
        runs = (slot for slot in source.slots if (slot // RUN_SLOTS + number) % 16 == 0)
        self.move(source, target, {*runs})

    def rotate(self) -> None:
        """Give all slots of each primary to the next one."""
        primaries = [node for node in self.nodes if node.slots and node.is_up]
        owned = [set(node.slots) for node in primaries]
        for number, slots in enumerate(owned):
            self.move(primaries[number], primaries[(number + 1) % len(primaries)], slots)

    def move(self, source: Node, target: Node, moved: set[int]) -> None:
        """Move slots of one primary to another, with their keys."""
        for node in self.nodes:  # leftovers of an earlier time as their owner
            if node is target or node.follows is target:
                for key in [key for key in node.data if key_slot(key) in moved]:
                    del node.data[key]
        for key in [key for key in source.data if key_slot(key) in moved]:
            value = source.data[key]
            store(target.data, key, value)
            self.replicate(target, key, value)
            del source.data[key]
            for replica in self.nodes:
                if replica.follows is source:
                    replica.data.pop(key, None)
        source.slots -= moved
        target.slots |= moved
        self._owners |= dict.fromkeys(moved, target)
        self._table = []

    def heal(self) -> None:
        """Let every node run, without troubles."""
        for node in self.nodes:
            node.trouble = ""
            if node.process is None:
                node.start()
            else:
                node.process.hurry()

    def blocks(self) -> Iterable[tuple[str, bytes, bytes]]:
        """Yield node, key and value of each stored block that the cluster serves."""
        for node in self.nodes:
            for key, (value, _) in [*node.data.items()]:
                is_served = b"{" in key and self.owner(key_slot(key)) is node
                if is_served and node.at(key) is not None:
                    yield node.machine, key, value

    def close(self) -> None:
        """End the cluster."""
        self._ticking.cancel()
        for node in self.nodes:
            node.kill()


class Simple(bytes):
    """A simple string of RESP."""


def packed(reply: Any) -> bytes:
    """Return a reply in RESP 3."""
    match reply:
        case None:
            return b"_\r\n"
        case Exception():
            return b"-%b\r\n" % str(reply).encode()
        case Simple():
            return b"+%b\r\n" % bytes(reply)
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case int():
            return b":%d\r\n" % reply
        case dict():
            both = (packed(one) for pair in reply.items() for one in pair)
            return b"%%%d\r\n" % len(reply) + b"".join(both)
        case _:
            return b"*%d\r\n" % len(reply) + b"".join(map(packed, reply))


def ranges(slots: set[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of slots."""
    found: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if found and found[-1][1] == slot - 1:
            found[-1] = found[-1][0], slot
        else:
            found.append((slot, slot))
    return found
