"""Floods of clients at each listener of a running server, beside one honest client.

    python -m benchmarks.floods --clients 1000 --out NAME.md

``kvladder serve`` runs with its port for engines, its HTTP port and its control socket. A process
beside it owns a stack as a rank of SGLang does. An honest client asks one of them every
``EVERY_S``. Meanwhile ``--clients`` others, in a process of their own, do to a listener what
``FLOODS`` says. At the ranks' socket they are ``PROCESSES`` processes, since a process has few
connections there. In turn with that they do the same to an idle server of this command, which
closes and answers as the listener does. So the ratio shows what the listener adds, and not what the
clients take from the processors.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from benchmarks.machine import RESULTS, machine
from benchmarks.stopping import exit_on_sigterm
from kvladder import Layout, open_cache
from kvladder.connectors.sglang.node import CacheClient, Joining, drained, join
from kvladder.connectors.sglang.options import CALL_S
from kvladder.connectors.sglang.pieces import PageBatch
from kvladder.control.sockets import ask
from kvladder.errors import ConfigError
from kvladder.manager import CacheManager
from kvladder.tiers.nixl.control import prepared
from kvladder.tiers.nixl.curve import read_keys
from tests.kit.served import Server
from tests.kit.traffic import forgotten, keys, loaded, stored

EVERY_S = 0.05
FOR_S = 8.0
WARM_S = 3.0
"""Time for a flood to connect, before it is measured."""
PACE_S = 1.0
"""Each client of a flood does one thing in this time."""
TIMES_MAX = 2.0
"""Multiple of the median beside an idle server that the median under a flood may reach."""
BLOCKS = 4
PAGES = [b"%032d" % number for number in range(BLOCKS)]
PROCESSES = 50
"""Processes of a flood of ranks."""
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
REQUEST = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"

ABOUT = """\
Times idle: the median, divided by the one while the clients do the same to an idle server.
"""


class Flood(NamedTuple):
    """What the clients do to the listener that an honest client asks, or to another one."""

    honest: str
    listener: str
    how: str


FLOODS: Sequence[Flood] = (
    *(Flood("engine", "engines", how) for how in ("silent", "garbage", "connects", "keyed")),
    *(Flood("http", "http", how) for how in ("silent", "requests", "connects")),
    *(Flood("control", "control", how) for how in ("silent", "requests")),
    Flood("engine", "http", "requests"),
    *(Flood("rank", "ranks", how) for how in ("silent", "garbage", "connects", "asks", "holds")),
)
MEANING: Mapping[str, str] = {
    "silent": "connect and send nothing",
    "garbage": "connect and send random bytes",
    "connects": "connect and disconnect",
    "requests": "ask for /status, over a connection that they keep",
    "asks": "ask for pages as a rank does, over a connection that they keep",
    "holds": "ask for pages as a rank does, and never take them",
    "keyed": "have the clients' key and send messages that are none",
}


# ---- the clients of a flood, in a process of their own


async def _clients(how: str, target: str, count: int, key_file: str) -> None:
    """Run the clients of a flood until the process is killed."""
    if how == "keyed":
        await _keyed(target, count, key_file)
        return
    acts = {"silent": _silent, "garbage": _garbage, "requests": _request, "connects": _leave}
    act = {**acts, "asks": _ask, "holds": _hold}[how]
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(_client(target, act, number / count * PACE_S))


async def _client(target: str, act: Callable[..., Awaitable[None]], delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            if target.startswith(("/", "@")):
                path = target.replace("@", "\0")
                reader, writer = await asyncio.open_unix_connection(path)
            else:
                host, _, port = target.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
            try:
                await act(reader, writer)
            finally:
                writer.close()
        await asyncio.sleep(PACE_S)


async def _silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(range(64)))
    await writer.drain()
    await _silent(reader, writer)


async def _leave(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Do nothing with a connection."""


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(REQUEST)
        await writer.drain()
        if not await reader.read(1 << 16):
            return
        await asyncio.sleep(PACE_S)


def _framed(message: object) -> bytes:
    """Return a message as ranks send it."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4) + data


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_framed(Joining("reach")))
    while await reader.read(1 << 16):
        await asyncio.sleep(PACE_S)
        writer.write(_framed(PageBatch([*PAGES], within_s=CALL_S)))


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_framed(Joining("fetch")))
    writer.write(_framed(PageBatch([*PAGES], within_s=CALL_S, deadline_s=CALL_S)))
    await _silent(reader, writer)


async def _keyed(target: str, count: int, key_file: str) -> None:
    found = read_keys(key_file)
    with zmq.asyncio.Context() as context:
        context.set(zmq.MAX_SOCKETS, count + 10)
        sockets: list[Any] = []
        for _ in range(count):
            dealer: Any = prepared(context, zmq.DEALER, found)
            dealer.curve_serverkey = found.peers[0].encode()
            dealer.connect(f"tcp://{target}")
            sockets.append(dealer)
        while True:
            for dealer in sockets:
                with suppress(zmq.Again):
                    await dealer.send(b"\x01none", zmq.NOBLOCK)
            await asyncio.sleep(PACE_S)


@contextmanager
def flooding(how: str, target: str, count: int, key_file: str) -> Generator[None]:
    """Run a flood in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.floods", "--flood", how, "--target", target]
    command += ["--clients", str(count), "--key-file", key_file]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            time.sleep(WARM_S)
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


async def _idle(how: str) -> None:
    """Serve as the listeners do, without any work, until the process is killed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while await reader.read(1 << 16):
                if how == "garbage":  # the first wrong byte ends a connection
                    break
                if how in {"requests", "asks"}:
                    writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def idle(how: str) -> Generator[str]:
    """Yield the address of an idle server, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.floods", "--idle", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


# ---- the honest client


class Waits(NamedTuple):
    """The times of one honest client."""

    times_s: Sequence[float]
    failed: int

    def __add__(self, other: Any) -> Waits:
        """Return both."""
        return Waits([*self.times_s, *other.times_s], self.failed + other.failed)

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s) if self.times_s else float("inf")


def measured(act: Callable[[], bool]) -> Waits:
    """Ask again and again; return the times of the answers, and how often there was none."""
    end_s, times, failed = time.monotonic() + FOR_S, list[float](), 0
    while time.monotonic() < end_s:
        begun_s = time.perf_counter()
        if act():
            times.append(time.perf_counter() - begun_s)
        else:
            failed += 1
        time.sleep(EVERY_S)
    return Waits(times, failed)


def _get(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with closing(HTTPConnection(host, int(port), timeout=10)) as client:
            client.request("GET", "/status")
            answer = client.getresponse()
            answer.read()
            return answer.status == 200
    except (OSError, HTTPException):
        return False


def _stats(path: Path) -> bool:
    try:
        ask(path, {"command": "stats"})
    except ConfigError:
        return False
    return True


def _load(cache: CacheManager) -> bool:
    wanted = keys("an honest engine", *range(BLOCKS))
    forgotten(cache, wanted)
    return loaded(cache, wanted).blocks == len(wanted)


def _own(address: str) -> None:
    """Own a stack as a rank of SGLang does, until the process that started this one has ended."""
    stack = {"arena": {"size": "8 MiB"}, "tiers": [{"type": "host"}]}
    layout = Layout(block_tokens=16, block_bytes=64 << 10, fields={"model": "floods"})
    owner = join(address, lambda: open_cache(stack, layout=layout))
    drained(owner.save(PageBatch([*PAGES], within_s=CALL_S)), lambda _: None)
    print("ready", flush=True)
    sys.stdin.read()


@contextmanager
def ranks(address: str) -> Generator[CacheClient]:
    """Yield a rank that uses the stack of an owner in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.floods", "--own", address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            with closing(CacheClient(address.replace("@", "\0"))) as rank:
                yield rank
        finally:
            process.kill()


def _pages(rank: CacheClient) -> bool:
    pages = PageBatch([*PAGES], within_s=CALL_S, deadline_s=CALL_S)
    return drained(rank.fetch(pages), lambda _: None) == len(PAGES)


class Row(NamedTuple):
    """One flood and the waits of the honest client, beside an idle server and under the flood."""

    flood: Flood
    beside: Waits
    under: Waits

    @property
    def times(self) -> float:
        return self.under.median_s / self.beside.median_s

    @property
    def is_kept(self) -> bool:
        """Return whether the honest client was served, within the allowed time."""
        return self.times <= TIMES_MAX and not self.under.failed


def rows(folder: Path, clients: int, chosen: str, turns: int) -> Iterator[Row]:
    """Yield the result of each flood."""
    with ExitStack() as undo:
        server = undo.enter_context(Server(folder / "server"))
        layout = Layout(block_tokens=16, block_bytes=64 << 10, fields={"model": "floods"})
        level = server.level(when="commit")
        stack = {"arena": {"size": "8 MiB"}, "tiers": [{"type": "host"}, level]}
        stack["fetch"] = {"when": "always", "deadline": "10 s"}
        cache = undo.enter_context(open_cache(stack, layout=layout))
        stored(cache, keys("an honest engine", *range(BLOCKS)))
        address = f"@kvladder-floods-{os.getpid()}"
        rank = undo.enter_context(ranks(address))
        listeners = {
            "ranks": address,
            "engines": server.address,
            "http": server.stack["http"],
            "control": server.stack["control"],
        }
        honest: dict[str, Callable[[], bool]] = {
            "engine": partial(_load, cache),
            "http": partial(_get, server.stack["http"]),
            "control": partial(_stats, Path(server.stack["control"])),
            "rank": partial(_pages, rank),
        }
        key_file = str(server.keys / "client.keys")
        for flood in FLOODS:
            if chosen and chosen not in (flood.honest, flood.listener, flood.how):
                continue
            print(f"{flood.honest} while {clients} clients {flood.how} at {flood.listener}",
                  file=sys.stderr, flush=True)  # fmt: skip
            act, how = honest[flood.honest], flood.how
            beside = under = Waits([], 0)
            same = "silent" if how == "keyed" else how
            for _ in range(turns):
                with idle(same) as address, flooding(same, address, clients, ""):
                    beside += measured(act)
                with flooding(how, listeners[flood.listener], clients, key_file):
                    under += measured(act)
            yield Row(flood, beside, under)


def table(found: Sequence[Row]) -> str:
    """Return the results as Markdown."""
    names = "honest", "flood of", "its clients", "answers", "unanswered", "median", "times idle"
    lines = [f"| {' | '.join(names)} | 99 % |", "| --- | --- | --- |" + " ---: |" * 5]
    for flood, beside, under in found:
        times = sorted(under.times_s) or [float("inf")]
        high = times[min(len(times) - 1, int(len(times) * 0.99))]
        ratio = under.median_s / beside.median_s
        cells = (
            flood.honest, flood.listener, MEANING[flood.how], len(under.times_s), under.failed,
            f"{1e3 * under.median_s:.1f} ms", f"{ratio:.1f}", f"{1e3 * high:.0f} ms",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the floods and print the table; return 1 if an honest client was not served in time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floods", description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--only", default="", metavar="WORD", help="floods with this word")
    parser.add_argument("--out", metavar="FILE", help="write the table to benchmarks/results/FILE")
    parser.add_argument("--turns", type=int, default=1, help="of each flood and the idle server")
    parser.add_argument("--idle", help=argparse.SUPPRESS)
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--key-file", help=argparse.SUPPRESS)
    parser.add_argument("--own", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.own:
        _own(given.own.replace("@", "\0"))
        return 0
    if given.flood:
        if given.target.startswith("@") or given.flood in {"asks", "holds"}:
            given.clients //= PROCESSES
            for _ in range(PROCESSES - 1):
                if not os.fork():
                    break
        asyncio.run(_clients(given.flood, given.target, given.clients, given.key_file))
        return 0
    if given.idle:
        asyncio.run(_idle(given.idle))
    with tempfile.TemporaryDirectory(prefix="floods-") as folder:
        found = [*rows(Path(folder), given.clients, given.only, given.turns)]
    about = machine() | {"command": f"python -m benchmarks.floods {' '.join(sys.argv[1:])}"}
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    title = f"# Floods of {about['date'][:10]}: {given.clients:,} clients at each listener"
    text = f"{title}\n\n{facts}\n\n{ABOUT}\n{table(found)}\n"
    print(text)
    if given.out:
        (RESULTS / Path(given.out).name).write_text(text)
    return int(not all(row.is_kept for row in found))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
