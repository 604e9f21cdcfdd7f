"""A fault drill: each alert's fault, in a real vLLM that a real Prometheus watches.

    python -m benchmarks.drill --out NAME.md

One vLLM serves a tiny model on a CPU, with files on a small file system and three Redis servers
below. Prometheus scrapes kvladder's HTTP port every second. It has the shipped rules, with shorter
times: ``SHORT`` and ``FOR``. Each fault is injected until its alert fires, then healed until it is
resolved. Mounting the small file system needs root; without, the alerts of a full and of a damaged
disk are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count, cycle
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import msgspec
import redis

from benchmarks.machine import RESULTS
from benchmarks.stopping import exit_on_sigterm
from kvladder.publishing.alerts import ALERTS, rules
from kvladder.testing.redisserver import RedisServer, free_ports
from tests.publishing.monitoring import Prometheus
from tests.vllm.harness import BLOCK, connector, data_files, make
from tests.vllm.server import Server

SHORT = {"1d": "60s", "6h": "30s", "2h": "90s", "1h": "10s", "15m": "10s", "5m": "5s"}
"""Time ranges of the rules, and what the drill has instead."""
FOR = "2s"
"""Time for which a rule must hold in the drill."""
WITHIN_S = 240.0
"""Time within which an alert must fire, or be resolved."""
DISK_BLOCKS = 320
BLOCK_BYTES = 128 << 10
MIB = 1 << 20
PROMPT_BLOCKS = 8
PAUSE_S = 0.4
"""Time for which a slowed Redis holds each write."""
Prompts = Iterator[list[int]]


class DrillServer(Server):
    """A server whose own prefix cache holds a few prompts only, so that kvladder is asked."""

    options = (
        *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
        *("--block-size", f"{BLOCK}", "--kv-cache-memory-bytes", f"{8 * MIB}"),
        *("--max-model-len", "1024", "--prefix-caching-hash-algo", "sha256_cbor"),
    )


class Fault(NamedTuple):
    """A fault, the alert that it fires, and how it is healed."""

    alert: str
    tier: str
    """Label ``tier`` of the alert; empty if it has none."""
    what: str
    inject: Callable[[], object]
    healing: str
    heal: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    """Callback before the fault: without it, nothing would be lost by the fault."""


class Outcome(NamedTuple):
    """The result of one fault; None where the alert did not fire, or was not resolved, in time."""

    fault: Fault
    was_quiet: bool
    fired_s: float | None
    resolved_s: float | None
    others: Sequence[str]
    """Other alerts that fired meanwhile."""


def shortened() -> dict[str, Any]:
    """Return the shipped rules with short times."""
    made = rules()
    for rule in made["groups"][0]["rules"]:
        rule["for"] = FOR
        for long, short in SHORT.items():
            rule["expr"] = re.sub(rf"(\[|offset ){long}\b", rf"\g<1>{short}", rule["expr"])
        left = re.findall(r"(?:\[|offset )(\d+(?:[mhd]))", rule["expr"])
        assert not left, f"{rule['alert']}: no short time for {left}"
    return made


def prompt(seed: int) -> list[int]:
    """Return a prompt of ``PROMPT_BLOCKS`` whole blocks and a token."""
    return random.Random(seed).choices(range(3, 1000), k=PROMPT_BLOCKS * BLOCK + 1)


def repeated(prompts: int, first: int = 0) -> Prompts:
    """Yield the same prompts in turns."""
    return cycle([prompt(seed) for seed in range(first, first + prompts)])


def mixed(old: Prompts, new: Prompts, every: int) -> Prompts:
    """Yield prompts of ``old``, and after each ``every`` of them one of ``new``."""
    while True:
        for _ in range(every):
            yield next(old)
        yield next(new)


class Users:
    """Asks the engine, one request after the other, as long as there is one."""

    def __init__(self) -> None:
        self.server: DrillServer | None = None
        self.asks: Prompts = repeated(10)
        self.every_s = 0.0
        self.failed: OSError | None = None
        """The error that ended the asking."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ending.wait(self.every_s):
            server = self.server
            if server is None:
                sleep(0.1)
                continue
            try:
                server.complete(next(self.asks), "a user", tokens=1)
            except OSError as error:
                if self.server is server:  # it is not being replaced
                    self.failed = error
                    return

    def __enter__(self) -> Users:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()


class Slowed:
    """Has a Redis server hold its writes for ``PAUSE_S`` each, again and again, until ``stop``."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._ending.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        make_client: Any = redis.Redis
        with make_client.from_url(self._server.url) as client:
            while not self._ending.wait(PAUSE_S * 0.9):
                client.execute_command("CLIENT", "PAUSE", int(PAUSE_S * 1000), "WRITE")
            client.execute_command("CLIENT", "UNPAUSE")

    def stop(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Drill:
    """The engine, what is below it, and the Prometheus that watches it."""

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self.folder = folder
        (folder / "engine").mkdir()
        (folder / "engine" / "MODEL").symlink_to(make(folder))
        self.disk = undo.enter_context(small_disk(folder / "disk"))
        self.narrow, self.wide, self.late = (
            undo.enter_context(RedisServer(self._folder(name)))
            for name in ("narrow", "wide", "late")
        )
        self.late.kill()
        self.port, prometheus_rules = free_ports(1)[0], folder / "rules.yaml"
        prometheus_rules.write_bytes(msgspec.yaml.encode(shortened()))
        self.slow = {server: Slowed(server) for server in (self.narrow, self.wide)}
        for slow in self.slow.values():
            undo.callback(slow.stop)
        self.users = Users()
        self.server = self._serve("")
        undo.callback(lambda: self.server.kill())
        self.server.ready()
        self.prometheus = undo.enter_context(
            Prometheus(folder, [f"127.0.0.1:{self.port}"], [prometheus_rules])
        )
        undo.enter_context(self.users)
        self.users.server = self.server
        self.seeds = count(1 << 20)

    def _folder(self, name: str) -> Path:
        place = self.folder / name
        place.mkdir()
        return place

    def _serve(self, salt: str) -> DrillServer:
        """Start the engine; another ``salt`` gives all blocks other names."""
        written: dict[str, Any] = {"when": "commit"}
        breaker = {"failures": 2, "retry": "1 s", "retry_max": "1 s"}
        shared = {**written, "type": "redis", "ttl": "1 m", "timeout": "1 m", "breaker": breaker}
        shared["capacity"] = "64 MiB"
        stack = {
            "arena": {"size": 128 * BLOCK_BYTES},
            "fetch": {"when": "always"},
            "http": f"127.0.0.1:{self.port}",
            "shadow": True,
            "tiers": [
                {"type": "host"},
                {
                    **written,
                    "type": "files",
                    "name": "disk",
                    "path": str((self.disk or self.folder) / "kv"),
                    "capacity": DISK_BLOCKS * BLOCK_BYTES,
                },
                {**shared, "name": "narrow", "url": self.narrow.url, "queue": 4},
                {**shared, "name": "wide", "url": self.wide.url, "queue": "100 %"},
                {**shared, "name": "late", "url": self.late.url},
            ],
        }
        if salt:
            stack["block"] = {"salt": salt}
        transfer = shlex.quote(json.dumps(connector(stack)))
        return DrillServer(
            self.folder / "engine", f"vllm serve MODEL --kv-transfer-config {transfer}"
        )

    # ---- faults

    def new_prompts(self) -> Prompts:
        """Yield prompts that were never asked before."""
        return (prompt(seed) for seed in self.seeds)

    def ask(self, prompts: Prompts, every_s: float = 0.0) -> None:
        """Have users ask these prompts from now on."""
        self.users.asks, self.users.every_s = prompts, every_s

    def rest(self) -> None:
        """Have users ask a few prompts, which all levels hold."""
        self.ask(repeated(10), 0.1)

    def fill(self) -> None:
        """Fill the disk's file system, but for 2 %."""
        assert self.disk is not None
        found = os.statvfs(self.disk)
        size = found.f_bavail * found.f_frsize - found.f_blocks * found.f_frsize // 50
        with (self.disk / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, size)
        self.ask(self.new_prompts())

    def empty(self) -> None:
        """Free the disk's file system again; the next write sees it."""
        assert self.disk is not None
        (self.disk / "ballast").unlink()

    def repeat(self, seconds: float) -> None:
        """Have users repeat prompts that only the disk holds, for some time."""
        self.ask(repeated(30), 0.1)
        sleep(seconds)

    def damage(self) -> None:
        """Overwrite bytes all over the files of blocks, whose prompts are asked again."""
        for path in data_files((self.disk or self.folder) / "kv"):
            size = path.stat().st_size
            if size >= BLOCK_BYTES:
                with path.open("r+b") as file:
                    for at in range(1000, size, BLOCK_BYTES // 4):
                        os.pwrite(file.fileno(), b"damaged", at)

    def slow_down(self, server: RedisServer) -> None:
        """Slow a server down, while new prompts are saved."""
        self.slow[server].start()
        self.ask(self.new_prompts())

    def speed_up(self, server: RedisServer) -> None:
        """End ``slow_down``."""
        self.slow[server].stop()
        self.rest()

    def kill(self, server: RedisServer) -> None:
        """Kill a server, while new prompts are saved."""
        server.kill()
        self.ask(mixed(repeated(10), self.new_prompts(), 2))

    def restart_under_another_name(self) -> None:
        """Restart the engine with another salt, so that it finds nothing of the day before."""
        self.users.server = None
        self.server.kill()
        self.ask(self.new_prompts(), 0.1)  # what is asked is in no cache yet
        self.server = self._serve("another")
        self.server.ready()
        self.users.server = self.server

    # ---- what Prometheus sees

    def firing(self) -> set[tuple[str, str]]:
        """Return the firing alerts, with their tiers."""
        return {
            (one["labels"]["alertname"], one["labels"].get("tier", ""))
            for one in self.prometheus.ask("alerts")["alerts"]
            if one["state"] == "firing"
        }

    def run(self, fault: Fault) -> Outcome:
        """Inject a fault until its alert fires, then heal it until that is resolved."""
        wanted = fault.alert, fault.tier
        others: set[tuple[str, str]] = set()
        if fault.alert != "KvladderLevelLeftOut":  # that level is absent from the start
            self._until(lambda now: wanted not in now, monotonic(), set())
        fault.prepare()
        was_quiet = wanted not in self.firing()
        print(f"{fault.alert}: {fault.what}", file=sys.stderr, flush=True)
        begun = monotonic()
        fault.inject()
        fired_s = self._until(lambda now: wanted in now, begun, others)
        begun = monotonic()
        fault.heal()
        resolved_s = self._until(lambda now: wanted not in now, begun, others)
        told = sorted(f"{name} {tier}".strip() for name, tier in others - {wanted})
        print(f"    fired {fired_s}, resolved {resolved_s}", file=sys.stderr, flush=True)
        return Outcome(fault, was_quiet, fired_s, resolved_s, told)

    def _until(
        self,
        holds: Callable[[set[tuple[str, str]]], bool],
        begun: float,
        others: set[tuple[str, str]],
    ) -> float | None:
        while monotonic() < begun + WITHIN_S:
            if self.users.failed is not None:
                raise self.users.failed
            now = self.firing()
            others |= now
            if holds(now):
                return monotonic() - begun
            sleep(0.5)
        return None

    def faults(self) -> list[Fault]:
        """Return a fault for each alert that can be fired here, in the order of the drill."""
        narrow, wide = self.narrow, self.wide
        half = DISK_BLOCKS * 5 // 8 // PROMPT_BLOCKS
        found = [
            Fault(
                "KvladderLevelLeftOut",
                "late",
                "a Redis server is not there when the engine starts",
                lambda: None,
                "it is started",
                self.late.start,
            ),
            Fault(
                "KvladderBreakerOpen",
                "narrow",
                "a Redis server is killed",
                partial(self.kill, narrow),
                "it is started",
                narrow.start,
            ),
            Fault(
                "KvladderDropsByQueue",
                "narrow",
                f"a Redis server takes {PAUSE_S:g} s a write, and the level's queue has 4 blocks",
                partial(self.slow_down, narrow),
                "it is fast again",
                partial(self.speed_up, narrow),
            ),
            Fault(
                "KvladderSlotStarvation",
                "host",
                f"a Redis server takes {PAUSE_S:g} s a write, and its queue may hold all slots",
                partial(self.slow_down, wide),
                "it is fast again",
                partial(self.speed_up, wide),
            ),
            Fault(
                "KvladderEvictsBeforeReuse",
                "disk",
                "prompts return after 5/8 of the disk's blocks, and others push them out",
                lambda: self.ask(mixed(repeated(half), self.new_prompts(), 3)),
                "no new prompts",
                lambda: self.ask(repeated(half)),
            ),
            Fault(
                "KvladderTierTooSmall",
                "disk",
                "prompts of 1.5 times the disk's blocks in turns",
                lambda: self.ask(repeated(DISK_BLOCKS * 3 // 2 // PROMPT_BLOCKS)),
                "prompts of 5/8 of its blocks",
                lambda: self.ask(repeated(half)),
            ),
        ]
        last = Fault(
            "KvladderHitsCollapsed",
            "",
            "the engine is killed, and started with another salt",
            self.restart_under_another_name,
            "users repeat prompts, so the cache fills",
            lambda: self.ask(repeated(10), 0.1),
            partial(self.repeat, 100.0),
        )
        return [*found, *self.faults_of_disks(), last]

    def faults_of_disks(self) -> list[Fault]:
        """Return the faults of the small file system; none if it could not be mounted."""
        if self.disk is None:
            return []
        return [
            Fault(
                "KvladderDiskNearlyFull",
                "disk",
                "a file takes all but 2 % of the file system",
                self.fill,
                "the file is deleted",
                self.empty,
            ),
            Fault(
                "KvladderDamageSeen",
                "disk",
                "bytes of its files are overwritten",
                self.damage,
                "none: it is resolved when no damaged block was read for a while",
                self.rest,
                partial(self.repeat, 20.0),
            ),
        ]


@contextmanager
def small_disk(place: Path) -> Generator[Path | None]:
    """Mount a file system of twice the disk level's capacity; None where that is not allowed."""
    place.mkdir()
    size = 2 * DISK_BLOCKS * BLOCK_BYTES
    told = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = subprocess.run(told, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"no small file system: {done.stderr.strip()}", file=sys.stderr)
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as Markdown, and the alerts that had no fault."""

    def time_of(seconds: float | None) -> str:
        return f"**not in {WITHIN_S:g} s**" if seconds is None else f"{seconds:.0f} s"

    lines = ["| alert, level | fault | fired after | healed by | resolved after | also fired |"]
    lines.append("|---|---|---|---|---|---|")
    for fault, was_quiet, fired_s, resolved_s, others in outcomes:
        fired = time_of(fired_s) if was_quiet or not fault.tier else f"{time_of(fired_s)}, not new"
        cells = (
            f"{fault.alert} {fault.tier}".strip(),
            fault.what,
            fired,
            fault.healing,
            time_of(resolved_s),
            ", ".join(others),
        )
        lines.append(f"| {' | '.join(cells)} |")
    missing = {alert.name for alert in ALERTS} - {one.fault.alert for one in outcomes}
    if missing:
        lines += ["", f"Not fired, for want of a file system to fill: {', '.join(sorted(missing))}"]
    return "\n".join(lines)


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the page of a result."""
    from vllm import __version__ as vllm

    told = ", ".join(f"`{long}` is {short}" for long, short in SHORT.items())
    head = (
        f"# Fault drill of {datetime.now(UTC):%Y-%m-%d}\n\n"
        f"`python -m benchmarks.drill`, {platform.machine()}, {os.cpu_count()} cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}, vLLM {vllm}, a tiny random "
        "model on the CPU.\n\n"
        "A real vLLM has files on a small file system and three Redis servers below. Prometheus "
        "scrapes kvladder's HTTP port every second, with the shipped rules. Only their times are "
        f"shorter: {told}; each must hold for {FOR}. Seconds are from the fault, or from its end, "
        "until Prometheus' API says so.\n\n"
    )
    return f"{head}{table(outcomes)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill, print its table, and return 1 if an alert did not fire or resolve."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drill", description=__doc__)
    parser.add_argument("--out", metavar="FILE", help="write the page to benchmarks/results/FILE")
    parser.add_argument("--only", action="append", metavar="ALERT", help="only this; repeatable")
    arguments = parser.parse_args(argv)
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        drill = Drill(folder, undo)
        chosen = [one for one in drill.faults() if one.alert in (arguments.only or [one.alert])]
        outcomes = list[Outcome]()
        for fault in chosen:
            outcomes.append(drill.run(fault))
            drill.rest()
        drill.users.server = None
        with suppress(AssertionError):  # it is killed after this in any case
            drill.server.stop()
    text = page(outcomes)
    print(text)
    if arguments.out:
        (RESULTS / arguments.out).write_text(text)
    return int(any(None in (one.fired_s, one.resolved_s) for one in outcomes))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
