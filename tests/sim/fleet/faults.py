"""The faults of a fleet, by kind: what befalls networks, processes, disks, clocks and stores."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from kvladder.tiers.files.meta import LOG_NAME
from kvladder.tiers.label import LABEL_BYTES, told
from tests.kit.disk import MODES
from tests.kit.removals import keys_of, removals
from tests.sim.fleet.model import TIMEOUTS_S
from tests.sim.fleet.mooncake import NODES

if TYPE_CHECKING:
    from tests.sim.fleet.engine import Engine
    from tests.sim.fleet.fleet import Fleet
    from tests.sim.fleet.loop import Process

Undo = Callable[[], object]
Injected = tuple[Undo | None, str] | None
"""How the fault ends, if it lasts, and its target; None if there is no target now."""
Fault = Callable[["Fleet", int, int], Injected]


def _pick(found: list[Any], number: int) -> Any:
    return found[number % len(found)] if found else None


# ---- the network


def late(fleet: Fleet, a: int, b: int) -> Injected:
    """Packets from and to a machine are late."""
    machine = _pick(fleet.machines(), a)
    fleet.net.late_s[machine] = (0.01, 0.1, 0.5)[b % 3]
    return partial(fleet.net.late_s.pop, machine, None), machine


def lose(fleet: Fleet, a: int, b: int) -> Injected:
    """Packets of a machine are lost, and sent again."""
    machine = _pick(fleet.machines(), a)
    fleet.net.loss[machine] = (0.05, 0.3, 0.6)[b % 3]
    return partial(fleet.net.loss.pop, machine, None), machine


def repeat(fleet: Fleet, a: int, b: int) -> Injected:
    """Writes of the data plane arrive twice."""
    if not fleet.servers:
        return None
    fleet.net.repeats = 0.3
    return partial(setattr, fleet.net, "repeats", 0.0), "all"


def cut(fleet: Fleet, a: int, b: int) -> Injected:
    """Every connection of a machine breaks."""
    machine = _pick(fleet.machines(), a)
    count = fleet.net.cut(machine)
    return (None, f"{machine}: {count}") if count else None


def _partition(fleet: Fleet, ways: list[tuple[str, str]], what: str) -> Injected:
    for way in ways:
        fleet.net.block(*way)

    def undo() -> None:
        for way in ways:
            if fleet.net.is_blocked(*way):
                fleet.net._blocked[way] -= 1

    return undo, what


def one_way(fleet: Fleet, a: int, b: int) -> Injected:
    """Nothing from one machine arrives at another one."""
    source, target = _pick(fleet.machines(), a), _pick(fleet.machines(), b)
    return None if source == target else _partition(fleet, [(source, target)], f"{source}-{target}")


def split(fleet: Fleet, a: int, b: int) -> Injected:
    """The machines are two groups that do not reach each other."""
    random = Random(a * 1000 + b)
    machines = fleet.machines()
    left = set(random.sample(machines, random.randrange(1, len(machines))))
    ways = [(x, y) for x in machines for y in machines if (x in left) != (y in left)]
    return _partition(fleet, ways, ",".join(sorted(left)))


def isolate(fleet: Fleet, a: int, b: int) -> Injected:
    """One machine reaches no other one."""
    machine = _pick(fleet.machines(), a)
    others = [other for other in fleet.machines() if other != machine]
    ways = [way for other in others for way in ((machine, other), (other, machine))]
    return _partition(fleet, ways, machine)


# ---- processes


def _processes(fleet: Fleet, kind: str) -> list[tuple[str, Process]]:
    every: dict[str, list[Any]] = {
        "engine": [*fleet.engines],
        "server": [*fleet.servers],
        "redis": [] if fleet.redis is None else [*fleet.redis.nodes],
        "bucket": [] if fleet.bucket is None else [fleet.bucket],
    }
    found = ((getattr(one, "machine", kind), one.process) for one in every[kind])
    return [(name, process) for name, process in found if process is not None]


def _stopped(kind: str, fleet: Fleet, a: int, b: int) -> Injected:
    name, process = _pick(_processes(fleet, kind), a) or ("", None)
    if process is None or process.is_stopped:
        return None
    process.stop()
    return process.hurry, name


def _slow(kind: str, fleet: Fleet, a: int, b: int) -> Injected:
    name, process = _pick(_processes(fleet, kind), a) or ("", None)
    if process is None or process.is_stopped:
        return None
    process.crawl(0.002, (0.02, 0.2)[b % 2])
    return process.hurry, name


def engine_dies(fleet: Fleet, a: int, b: int) -> Injected:
    """An engine dies; its disk keeps what was written."""
    engine = _pick([one for one in fleet.engines if one.process is not None], a)
    if engine is None:
        return None
    fleet.purging.again(engine)
    engine.kill("keep")
    return partial(fleet._reopen, engine), engine.machine


def power_cut(fleet: Fleet, a: int, b: int) -> Injected:
    """An engine's machine loses power during a call to its disk, or at once."""
    engine: Engine | None = _pick([one for one in fleet.engines if one.process is not None], a)
    if engine is None:
        return None
    if b % 2:
        engine.disk.crash_at = engine.disk.calls + 1 + b % 5
        return None, engine.machine
    mode = MODES[b // 2 % len(MODES)]
    fleet.purging.again(engine)
    engine.kill(mode)
    return partial(fleet._reopen, engine), f"{engine.machine} {mode}"


def server_dies(fleet: Fleet, a: int, b: int) -> Injected:
    """A cache server dies, with its blocks."""
    server = _pick([one for one in fleet.servers if one.process is not None], a)
    if server is None:
        return None
    server.kill()
    return server.start, server.machine


def redis_dies(fleet: Fleet, a: int, b: int) -> Injected:
    """A node of the cluster dies; a replica takes over."""
    nodes = [] if fleet.redis is None else [n for n in fleet.redis.nodes if n.process is not None]
    node = _pick(nodes, a)
    if node is None:
        return None
    node.kill()
    return node.start, node.machine


def bucket_dies(fleet: Fleet, a: int, b: int) -> Injected:
    """The object store is away; its objects stay."""
    if fleet.bucket is None or fleet.bucket.process is None:
        return None
    fleet.bucket.kill()
    return fleet.bucket.start, "bucket"


# ---- stores


def redis_refuses(fleet: Fleet, a: int, b: int) -> Injected:
    """A node of the cluster obeys no writes, or nothing at all, or only frees memory."""
    if fleet.redis is None:
        return None
    node = _pick(fleet.redis.nodes, a)
    node.trouble = ("full", "busy", "unsaved")[b % 3]
    return partial(setattr, node, "trouble", ""), f"{node.machine} {node.trouble}"


def slots_move(fleet: Fleet, a: int, b: int) -> Injected:
    """Slots move from one node to another."""
    if fleet.redis is None:
        return None
    fleet.redis.move_slots(a * 31 + b)
    return None, "cluster"


def _bucket(what: str, fleet: Fleet, a: int, b: int) -> Injected:
    if fleet.bucket is None:
        return None
    fleet.bucket.fault = what
    return partial(setattr, fleet.bucket, "fault", ""), what


def _mooncake(what: str, fleet: Fleet, a: int, b: int) -> Injected:
    store = fleet.mooncake
    if store is None:
        return None
    setattr(store, what, True)

    def undo() -> None:
        setattr(store, what, False)
        store._moved.set()

    return undo, what


def node_dies(fleet: Fleet, a: int, b: int) -> Injected:
    """A node of the Mooncake Store dies with its objects."""
    count = 0 if fleet.mooncake is None else fleet.mooncake.lose(a % NODES)
    return (None, f"{count} objects") if count else None


# ---- disks, clocks, bytes


def disk_fails(fleet: Fleet, a: int, b: int) -> Injected:
    """Some calls to an engine's disk fail."""
    engine: Engine = _pick(fleet.engines, a)
    code = (errno.EIO, errno.ENOSPC, errno.EMFILE)[b % 3]
    random = Random(b)
    engine.disk.refuse = lambda _call, _path: code if random.random() < 0.3 else 0
    return partial(setattr, engine.disk, "refuse", lambda _call, _path: 0), engine.machine


def disk_full(fleet: Fleet, a: int, b: int) -> Injected:
    """An engine's disk has no more room."""
    engine: Engine = _pick(fleet.engines, a)
    engine.disk.capacity_bytes = sum(engine.disk.files().values()) + 4096 * (b % 4)
    return partial(setattr, engine.disk, "capacity_bytes", None), engine.machine


def disk_slow(fleet: Fleet, a: int, b: int) -> Injected:
    """An engine's disk answers late, or exactly when the time of a call is over."""
    engine: Engine = _pick(fleet.engines, a)
    engine.disk_late_s = TIMEOUTS_S[0]
    if b % 4 == 0:
        engine.disk_late_s = 0.05
    elif engine.process is not None:
        engine.disk_late_s = engine.cache.levels[0].client.settings.timeout_s
    return partial(setattr, engine, "disk_late_s", 0.0), f"{engine.machine} {engine.disk_late_s} s"


def bit_flips(fleet: Fleet, a: int, b: int) -> Injected:
    """A byte on an engine's disk changes."""
    engine: Engine = _pick(fleet.engines, a)
    files = {path: size for path, size in sorted(engine.disk.files().items()) if size}
    if not files:
        return None
    path = _pick([*files], b)
    engine.is_disk_whole = False
    content = engine.disk._names[path].content
    before = removals(bytes(content)) if path.endswith(f"/{LOG_NAME}") else set()
    content[b * 7919 % files[path]] ^= 1 << b % 8
    engine.model.may_come_back(keys_of(before - removals(bytes(content))))
    return None, f"{engine.machine} {path}"


def clock_jumps(fleet: Fleet, a: int, b: int) -> Injected:
    """The wall clock of an engine's machine jumps."""
    engine = _pick([one for one in fleet.engines if one.process is not None], a)
    if engine is None:
        return None
    seconds = (-3600.0, -5.0, 5.0, 3600.0)[b % 4]
    engine.jump(seconds)
    return None, f"{engine.machine} {seconds:g} s"


def damage(fleet: Fleet, a: int, b: int) -> Injected:
    """The bytes of a stored block change."""
    stores: list[tuple[str, Any, Any]] = []
    if fleet.bucket is not None:
        stores += [("bucket", fleet.bucket.objects, n) for n in sorted(fleet.bucket.objects)]
    if fleet.mooncake is not None:
        stores += [("mooncake", fleet.mooncake.held, n) for n in sorted(fleet.mooncake.held)]
    if fleet.redis is not None:
        every = ((node.data, name) for node in fleet.redis.nodes for name in sorted(node.data))
        stores += [("redis", data, name) for data, name in every if b"{" in name]
    if not stores:
        return None
    where, table, name = _pick(stores, a)
    before = table[name] if where == "bucket" else table[name][where == "mooncake"]
    label = told(before[:LABEL_BYTES])
    if label is None:
        return None
    fleet.damaged.add(label.key)
    after = bytearray(before)
    after[b * 7919 % len(after)] ^= 1 << b % 8
    if where == "bucket":
        table[name] = bytes(after)
    elif where == "mooncake":
        table[name] = table[name][0], bytes(after)
    else:
        table[name] = bytes(after), table[name][1]
    return None, where


FAULTS: dict[str, Fault] = {
    "network: late": late,
    "network: packets lost": lose,
    "network: writes repeated": repeat,
    "network: connections cut": cut,
    "network: one way blocked": one_way,
    "network: split in two": split,
    "network: machine isolated": isolate,
    "engine: killed": engine_dies,
    "engine: stopped": partial(_stopped, "engine"),
    "engine: slow": partial(_slow, "engine"),
    "engine: power cut": power_cut,
    "server: killed": server_dies,
    "server: stopped": partial(_stopped, "server"),
    "server: slow": partial(_slow, "server"),
    "redis: node killed": redis_dies,
    "redis: node stopped": partial(_stopped, "redis"),
    "redis: node slow": partial(_slow, "redis"),
    "redis: node refuses writes": redis_refuses,
    "redis: slots moved": slots_move,
    "object: store away": bucket_dies,
    "object: store stopped": partial(_stopped, "bucket"),
    "object: requests refused": partial(_bucket, "refused"),
    "object: answers truncated": partial(_bucket, "truncated"),
    "object: full": partial(_bucket, "full"),
    "object: answers lost": partial(_bucket, "mute"),
    "mooncake: master away": partial(_mooncake, "is_away"),
    "mooncake: node lost": node_dies,
    "mooncake: calls hang": partial(_mooncake, "hanging"),
    "mooncake: puts end half-way": partial(_mooncake, "half"),
    "mooncake: full": partial(_mooncake, "is_full"),
    "disk: calls fail": disk_fails,
    "disk: full": disk_full,
    "disk: slow": disk_slow,
    "disk: a bit flips": bit_flips,
    "clock: jumps": clock_jumps,
    "store: a block is damaged": damage,
}
TROUBLE_S = 6.0


def trouble(fleet: Fleet, store: str, a: int) -> None:
    """Inject a fault by which a store cannot do all that a purge asks of it."""
    is_other = a // 4 % 4 == 0
    if store == "redis" and fleet.redis is not None:
        for number, node in enumerate(fleet.redis.nodes):
            if node.slots:
                fleet.fault("redis: node refuses writes", number, 1 + is_other, TROUBLE_S)
    elif store == "server":
        number = len(fleet.engines) + a % len(fleet.servers)
        fleet.fault("network: machine isolated", number, 0, TROUBLE_S)
    elif store == "object":
        fleet.fault(f"object: store {'stopped' if is_other else 'away'}", 0, 0, TROUBLE_S)
    else:
        fleet.fault(f"mooncake: {'calls hang' if is_other else 'master away'}", 0, 0, TROUBLE_S)
