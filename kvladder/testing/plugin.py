"""The pytest plugin of the test kit: async tests and fixtures on the simulated loop.

An ``async def`` test runs on a :class:`~kvladder.testing.sim.SimLoop`, or on a real loop if it is
marked ``real`` or its class has ``real = True``. Its async fixtures run on the same loop. Tests
that bear the mark of another async plugin are left to that. A task that a test leaves behind fails
the test, and so does what is logged while a cache's lock is held. ``--sim-seed`` chooses the
interleaving.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest

from kvladder.lock import holding
from kvladder.testing.sim import SimLoop, where

OTHERS = ("anyio", "asyncio", "trio", "twisted")


@dataclass
class _Loop:
    runner: asyncio.Runner
    failed: bool = False


_LOOP = pytest.StashKey[_Loop]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a failing interleaving be run again, and others be explored."""
    group = parser.getgroup("kvladder")
    group.addoption("--sim-seed", type=int, default=0, help="seed of simulated event loops")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers that the shipped suites use."""
    config.addinivalue_line("markers", "slow: takes more than a quarter of a second")
    config.addinivalue_line("markers", "real: runs on a real loop instead of the simulated one")


class _Watch(logging.Handler):
    """Sees what is logged under a lock: a handler that blocks would block the engine, too."""

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
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Fail a test that has something logged under a cache's lock."""
    return (yield from _watched())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, Any, Any]:
    """Fail a test whose fixtures log under a cache's lock when they end."""
    return (yield from _watched())


def _watched() -> Generator[None, Any, Any]:
    root, watch = logging.getLogger(), _Watch()
    outer = [handler for handler in root.handlers if isinstance(handler, _Watch)]
    for handler in outer:  # of a test that runs tests
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


def _is_ours(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in OTHERS)


def _loop_of(item: pytest.Function) -> _Loop:
    """The loop of a test, made when it is first needed and closed after the async fixtures."""
    if _LOOP not in item.stash:
        real = item.get_closest_marker("real") or getattr(item.cls, "real", False)
        seed: Any = item.config.getoption("--sim-seed")
        factory = asyncio.new_event_loop if real else functools.partial(SimLoop, seed)
        item.stash[_LOOP] = _Loop(asyncio.Runner(loop_factory=factory))
        item.addfinalizer(functools.partial(_close, item))
    return item.stash[_LOOP]


def _close(item: pytest.Function) -> None:
    loop = item.stash[_LOOP]
    del item.stash[_LOOP]
    left = sorted(where(task) for task in asyncio.all_tasks(loop.runner.get_loop()))
    loop.runner.close()
    if left and not loop.failed:
        pytest.fail("the test left tasks behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on its loop."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test) or not _is_ours(pyfuncitem):
        return None
    loop = _loop_of(pyfuncitem)
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    try:
        loop.runner.run(test(**arguments))
    except BaseException:
        loop.failed = True
        raise
    return True


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Run an async fixture on the loop of the test that asked for it."""
    function: Any = fixturedef.func
    item: Any = request.node
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if not is_async or not isinstance(item, pytest.Function) or not _is_ours(item):
        return (yield)
    runner = _loop_of(item).runner
    plain: Any = getattr(function, "__func__", function)
    wrapped: Any = (_generator if inspect.isasyncgenfunction(plain) else _coroutine)(plain, runner)
    if inspect.ismethod(function):
        wrapped = MethodType(wrapped, function.__self__)
    fixturedef.func = wrapped  # type: ignore[misc]
    try:
        return (yield)
    finally:
        fixturedef.func = function  # type: ignore[misc]


def _coroutine(function: Callable[..., Any], runner: asyncio.Runner) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return runner.run(function(*args, **kwargs))

    return run


def _generator(
    function: Callable[..., AsyncGenerator[Any, None]], runner: asyncio.Runner
) -> Callable[..., Generator[Any, None, None]]:
    def run(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        values = function(*args, **kwargs)
        yield runner.run(_next(values))
        if runner.run(_next(values, last=True)) is not _ENDED:
            pytest.fail(f"async fixture {function.__name__} yielded twice", pytrace=False)

    return run


_ENDED = object()


async def _next(values: AsyncGenerator[Any, None], *, last: bool = False) -> Any:
    return await anext(values, _ENDED) if last else await anext(values)
