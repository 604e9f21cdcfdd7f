"""The example's router, with engines that appear and disappear."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.patience import PATIENCE_S

zmq = pytest.importorskip("zmq")
pytest.importorskip("aiohttp")

EXAMPLE = Path(__file__).parents[2] / "examples" / "router.py"
NAMES = ("http://a", "http://b")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvladder_example_router", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def chosen(router: Any, wanted: set[str]) -> None:
    """Wait until these are the engines that requests go to."""

    def found() -> set[str]:
        return {router.choose({"prompt": [1, 2, 3]})[0] for _ in range(8)}

    async with asyncio.timeout(PATIENCE_S):
        while found() != wanted:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


@pytest.mark.real
async def test_an_unreachable_engine_is_not_chosen(tmp_path: Path) -> None:
    example = load()
    addresses = {name: f"ipc://{tmp_path}/{name[-1]}" for name in NAMES}
    router = example.Router(
        [example.Engine(name, addresses[name], addresses[name] + "r") for name in NAMES]
    )
    for feed in router._feeds.values():
        feed._replay = None  # no server answers there
    with zmq.Context() as context:
        publishers = {name: context.socket(zmq.PUB) for name in NAMES}
        running = router.run(None)
        await anext(running)
        try:
            await chosen(router, {*NAMES})  # nothing is known: any is as good
            publishers["http://a"].bind(addresses["http://a"])
            await chosen(router, {"http://a"})
            publishers["http://b"].bind(addresses["http://b"])
            await chosen(router, {*NAMES})
            publishers.pop("http://a").close(0)
            await chosen(router, {"http://b"})
            publishers.pop("http://b").close(0)
            await chosen(router, {*NAMES})
        finally:
            with pytest.raises(StopAsyncIteration):
                await anext(running)
            for publisher in publishers.values():
                publisher.close(0)
