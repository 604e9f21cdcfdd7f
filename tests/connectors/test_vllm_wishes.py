"""Wishes of requests in a scripted engine, from their parameters to the levels."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest

from tests.connectors.scripted import Engine

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Import it once, with whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")


def served(params: object, **options: Any) -> Any:
    source = {
        "arena": {"size": "64 KiB"},
        "tiers": [
            {"type": "host"},
            {"name": "nvme", "type": "memory", "capacity": "1 MiB", "when": "commit"},
        ],
    }
    engine = Engine(source, **options)
    one = engine.add(range(32), length=40, kv_transfer_params={"kvladder": params})
    engine.run()
    again = engine.add(one.tokens[:32])
    engine.run()
    del again
    return engine


def test_a_request_that_is_not_to_be_saved_is_not() -> None:
    engine = served({"save": False})
    assert engine.loaded == 0
    engine.close()


def test_blocks_for_host_alone_are_in_no_other_tier() -> None:
    engine = served({"tiers": {"store": ["host"]}, "priority": 80})
    assert engine.loaded > 0
    index = engine.half.connector.manager._stack.host.index
    metas = [index.meta(index.place(key)) for key in index]
    assert {(meta.priority, meta.floor) for meta in metas if meta.terms.levels == 1} == {(80, 80)}
    assert len(engine.half.connector.manager._stack.levels[0].index) < len(metas)
    engine.close()


def test_later_blocks_have_the_floor_of_earlier_ones() -> None:
    engine = served({"retention": [[0, 4, 10, None]], "priority": 80})
    index = engine.half.connector.manager._stack.host.index
    metas = [index.meta(index.place(key)) for key in index]
    assert {meta.floor for meta in metas if meta.priority == 80} == {10}
    engine.close()


def test_wrong_parameters_do_not_fail_a_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = served({"priority": 1000})
    assert engine.loaded > 0
    assert len([r for r in caplog.records if "kvladder parameters are ignored" in r.message]) == 1
    engine.close()
