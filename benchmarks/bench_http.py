"""Measures what a scrape each second costs an engine, and what counting calls by duration costs.

An engine's thread in Python does nothing but look up, save and fetch. It is slowed by the time for
which the serving thread holds the interpreter's lock. The limit for that is the processor time of
the serving thread, which is read from the kernel: a share of it can delay the engine, no more.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep

from benchmarks.row import Row
from kvladder import open_cache
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.manager import CacheManager
from kvladder.metrics import DURATIONS_S, Histogram

LAYOUT = Layout(block_tokens=16, block_bytes=4096, fields={"model": "scraped"})
SCRAPES = 60
EVERY_S = 0.1
"""Seconds between scrapes here; the row gives the cost at one a second."""
WHAT = {"metrics": "/metrics", "the page's events": "/status"}
ROUNDS = 200_000


def rows() -> Iterator[Row]:
    """Scrape a cache of four levels while an engine uses it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    below = [
        {"type": "memory", "name": f"level{n}", "capacity": "16 MiB", "when": "commit"}
        for n in range(3)
    ]
    stack = {
        "arena": {"size": "16 MiB"},
        "http": f"127.0.0.1:{port}",
        "tiers": [{"type": "host"}, *below],
    }
    with open_cache(stack, layout=LAYOUT) as cache:
        ending = threading.Event()
        engine = threading.Thread(target=_serve, args=(cache, ending))
        engine.start()
        try:
            for what, path in WHAT.items():
                scrape_s, busy_s = _scraped(port, path)
                yield Row(
                    name=f"http, {what} once a second: time of the serving thread",
                    unit="%",
                    ours=busy_s * 100,
                    goal="< 0.1",
                    note=f"four levels, an engine busy; an answer takes {scrape_s * 1e3:.1f} ms",
                )
        finally:
            ending.set()
            engine.join()
    calls = Histogram(DURATIONS_S)
    begun = perf_counter()
    for _ in range(ROUNDS):
        calls.observe(0.003)
    yield Row(
        name="metrics, counting a call to a tier by its duration",
        unit="us",
        ours=(perf_counter() - begun) / ROUNDS * 1e6,
        goal="< 2",
        note="once for each call, which moves a batch of blocks",
    )


def _serve(cache: CacheManager, ending: threading.Event) -> None:
    """Look up, fetch and save prompts of eight blocks until the end."""
    number = 0
    while not ending.is_set():
        number += 1
        keys = [BlockKey((number % 500 * 8 + n).to_bytes(32, "little")) for n in range(8)]
        cache.fetch(keys).release()
        cache.save(keys).commit()
        sleep(0.001)


def _scraped(port: int, path: str) -> tuple[float, float]:
    """Return the seconds for an answer, and the processor seconds of the serving thread for it."""
    thread = next(one for one in threading.enumerate() if one.name == "kvladder-http")
    client, taken = HTTPConnection("127.0.0.1", port), list[float]()
    busy_s = _processor_s(thread)
    for _ in range(SCRAPES):
        due, begun = monotonic() + EVERY_S, perf_counter()
        client.request("GET", path)
        answer = client.getresponse()
        assert answer.read()
        assert answer.status == 200
        taken.append(perf_counter() - begun)
        sleep(max(0.0, due - monotonic()))
    client.close()
    return median(taken), (_processor_s(thread) - busy_s) / SCRAPES


def _processor_s(thread: threading.Thread) -> float:
    """Return the processor seconds that a thread has taken."""
    told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    return int(told.split()[0]) / 1e9
