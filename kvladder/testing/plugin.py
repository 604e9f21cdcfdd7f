"""The pytest plugin of the test kit: runs pytest-asyncio's tests on the simulated loop.

An ``async def`` test marked ``sim_loop``, by itself, its class or its module, runs on a
:class:`~kvladder.testing.sim.SimLoop`. Its async fixtures do, too. If the test is also marked
``real``, or its class has ``real = True``, both run on a loop of the platform. Such a test fails
if it leaves a task behind. Any test fails if something is logged while a cache's lock is held.
``--sim-seed`` chooses the interleaving.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest

from kvladder.lock import holding
from kvladder.testing.sim import SimLoop, where

MARK = "sim_loop"
_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--sim-seed``, which repeats a failing interleaving or explores others."""
    group = parser.getgroup("kvladder")
    group.addoption("--sim-seed", type=int, default=0, help="set the seed of simulated event loops")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers that the shipped suites use."""
    for line in (
        "slow: takes more than a quarter of a second",
        f"{MARK}: an async test runs on the simulated loop, where time jumps",
        f"real: runs on a real loop although it is marked {MARK}",
    ):
        config.addinivalue_line("markers", line)


class _Watch(logging.Handler):
    """Records what is logged under a lock: there, a slow log handler would block the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if holding():
            self.seen.append(f"{record.pathname}:{record.lineno}: {record.getMessage()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Fail a test whose fixtures log under a cache's lock."""
    return (yield from _watched())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that logs under a cache's lock, and note that a test failed."""
    try:
        return (yield from _watched())
    except BaseException:
        item.stash[_FAILED] = True
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, Any, Any]:
    """Fail a test whose fixtures log under a cache's lock when they end."""
    return (yield from _watched())


def _watched() -> Generator[None, Any, Any]:
    root, watch = logging.getLogger(), _Watch()
    outer = [handler for handler in root.handlers if isinstance(handler, _Watch)]
    for handler in outer:  # there are some if a test runs pytest itself
        root.removeHandler(handler)
    root.addHandler(watch)
    try:
        result = yield
    finally:
        root.removeHandler(watch)
        for handler in outer:
            root.addHandler(handler)
    if watch.seen:
        pytest.fail("logged under a lock:\n  " + "\n  ".join(watch.seen), pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> None:
    """Mark ``sim_loop`` tests ``asyncio``: strict pytest-asyncio runs only tests so marked."""
    if inspect.iscoroutinefunction(obj) and collector.istestfunction(obj, name):
        own = {mark.name for mark in getattr(obj, "pytestmark", ())}
        if "asyncio" not in own and (MARK in own or collector.get_closest_marker(MARK)):
            pytest.mark.asyncio(obj)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Function
) -> Generator[None, Any, Mapping[str, Callable[[], asyncio.AbstractEventLoop]]]:
    """Return the simulated loop for ``sim_loop`` tests; leave the loops of others as they are."""
    found = yield
    real = item.get_closest_marker("real") or getattr(item.cls, "real", False)
    if item.get_closest_marker(MARK) and not real:
        seed: Any = config.getoption("--sim-seed")
        return {MARK: functools.partial(SimLoop, seed)}
    return found or {"asyncio": asyncio.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Check for leftover tasks after the async fixtures have ended, before the loop closes."""
    found = yield
    if isinstance(found, asyncio.Runner) and request.node.get_closest_marker(MARK):
        fixturedef.addfinalizer(functools.partial(_require_no_tasks, found, request.node))
    return found


def _require_no_tasks(runner: asyncio.Runner, node: pytest.Item) -> None:
    left = sorted(where(task) for task in asyncio.all_tasks(runner.get_loop()))
    if left and not node.stash.get(_FAILED, False):
        pytest.fail("the test left tasks behind:\n  " + "\n  ".join(left), pytrace=False)
