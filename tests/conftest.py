"""Every test runs with the shipped plugin, and leaves no claim, thread or file behind.

The plugin watches the tasks. ``HYPOTHESIS_PROFILE`` sets the number of examples: ``dev`` (the
default), ``ci`` (more, the same each time) or ``night`` (many).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from hypothesis import HealthCheck, settings

# pytest rewrites the assertions of a package that brings a plugin: here of the whole product, in
# each worker. Only tests, and the suites that kvladder.testing registers, need that.
for finder in sys.meta_path:
    if isinstance(finder, AssertionRewritingHook):
        finder._must_rewrite.discard("kvladder")
        finder._marked_for_rewrite_cache.clear()

from kvladder.arena import Arena  # noqa: E402
from tests import stuck  # noqa: E402

pytest_plugins = ["kvladder.testing.plugin", "tests.kit.cover", "tests.kit.durations", "pytester"]

# how fast this machine computes just now decides nothing, but in the tests of that decision
os.environ.setdefault("KVLADDER__FETCH__WHEN", "always")
# torch's threads wait by spinning: among other tests, two of them take eight times as long as one
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell has its jobs in the background ignore it, and so would the processes of the tests
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("night", max_examples=10_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))

JOIN_S = 60.0
TRY_S = 0.02
IDLE_S = float(os.environ.get("KVLADDER_IDLE_S", "300"))
"""How long a test may do nothing; lower it to end stuck tests sooner."""
OTHERS = ("gpu", "vllm")
"""Marks of tests in which other libraries keep open descriptors."""


class Watch:
    """A pytest plugin: has this process watched while it runs tests."""

    def __init__(self) -> None:
        self._watcher: subprocess.Popen[str] | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if self._watcher is None:
            self._watcher = subprocess.Popen(
                [sys.executable, stuck.__file__, str(os.getpid()), str(IDLE_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
        self._say(f"+ {item.nodeid}")
        try:
            return (yield)
        finally:
            self._say("-")

    def _say(self, line: str) -> None:
        assert self._watcher is not None
        assert self._watcher.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self._watcher.stdin, flush=True)

    def pytest_unconfigure(self) -> None:
        if self._watcher is not None:
            self._watcher.communicate()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watch())


# at the very end, or libraries report as leaked what collecting tests has made; not before pytest's
# own collections, which would visit all of it once more
atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while tests are collected, and never visit what that has made again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Async tests run in simulated time, but those that are marked ``real``."""
    session.add_marker("sim_loop")


def open_files() -> set[str]:
    """Return open descriptors, except arenas: an exception may still refer to a slot."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - twice a test, and twice as fast
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - the same
        except OSError:  # it is the one that listed them
            continue
        if not target.startswith("/memfd:kvladder-arena"):
            found.add(f"{name} -> {target}")
    return found


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Undo log routing after each test: a connector routes the cache's log lines for good."""
    logger = logging.getLogger("kvladder")
    handlers, level, propagates = [*logger.handlers], logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagates
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that leaves a claim on a slot, a thread or an open file."""
    if any(request.node.get_closest_marker(name) for name in OTHERS):
        yield
        return
    threads, files = set(threading.enumerate()), open_files()
    claimed: dict[Arena, int | None] = {}
    begin, end = Arena.__init__, Arena.close

    def beginning(arena: Arena, *arguments: Any, **options: Any) -> None:
        begin(arena, *arguments, **options)
        claimed[arena] = None

    def ending(arena: Arena) -> bool:
        claimed[arena] = arena.slots - arena.free
        return end(arena)

    monkeypatch.setattr(Arena, "__init__", beginning)
    monkeypatch.setattr(Arena, "close", ending)
    yield
    assert None not in claimed.values(), "an arena was not closed"
    assert not any(claimed.values()), f"claims on slots of closed arenas: {claimed.values()}"
    for thread in set(threading.enumerate()) - threads:
        thread.join(JOIN_S)
    left = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    assert not left, f"threads: {left}"
    if not open_files() - files:
        return
    gc.collect()
    for _ in range(int(JOIN_S / TRY_S)):  # other threads may be about to close some
        if not open_files() - files:
            return
        time.sleep(TRY_S)
    raise AssertionError(f"files: {open_files() - files}")
