"""KV events under vLLM's own scheduler: every kind of group, in the names that vLLM has for it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from tests.connectors import simulated
from tests.connectors.mixes import MODELS, vllm_configs
from tests.connectors.simulated import Simulation

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SOURCE: dict[str, Any] = {  # room for a few blocks on the host, and more below
    "arena": {"size": "160 KiB"},
    "tiers": [
        {"type": "host"},
        {"type": "memory", "name": "cold", "capacity": "2 MiB", "when": "commit"},
    ],
}


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.core.sched.scheduler")


class Heard:
    """Takes the place of vLLM's publisher, and replays."""

    def __init__(self, one: Simulation) -> None:
        self.groups = one.half._groups
        self.levels: dict[str, set[tuple[bytes, int]]] = {"host": set(), "cold": set()}
        self.on_gpu: dict[tuple[bytes, int], tuple[Any, ...]] = {}
        """The content of each block according to vLLM's own events."""
        self.compared = self.cleared = 0

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if type(event).__name__ == "AllBlocksCleared":
                self.cleared += 1
                for level in self.levels.values():
                    level.clear()
                continue
            names = [(one, event.group_idx) for one in event.block_hashes]
            stored = type(event).__name__ == "BlockStored"
            if event.medium == "GPU":
                whole = stored and len(event.token_ids) == event.block_size * len(names)
                if whole:  # otherwise it skips blocks that a group has not kept
                    self.on_gpu.update(zip(names, self.told(event), strict=True))
                continue
            level = self.levels["host" if event.ownership is None else event.ownership]
            if not stored:
                assert self.cleared or level >= set(names)
                level -= set(names)
                continue
            assert self.cleared or not level & set(names)
            level |= set(names)
            assert event.token_ids, "each has been some request's"
            for name, told in zip(names, self.told(event), strict=True):
                if name in self.on_gpu:
                    assert self.on_gpu[name] == told
                    self.compared += 1

    def shutdown(self) -> None: ...

    def told(self, event: Any) -> list[tuple[Any, ...]]:
        """Return the parent, tokens and kind of each block."""
        size = event.block_size
        parents = [event.parent_block_hash, *event.block_hashes]
        kind = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        assert len(event.token_ids) == size * len(event.block_hashes)
        return [
            (parents[i], tuple(event.token_ids[i * size :][:size]), kind)
            for i in range(len(event.block_hashes))
        ]

    def keys(self) -> dict[str, set[bytes]]:
        """Return kvladder's keys of the blocks that the levels announce."""
        marks = [group.mark for group in self.groups]
        return {
            level: {(int.from_bytes(one) ^ marks[group]).to_bytes(32) for one, group in names}
            for level, names in self.levels.items()
        }


@pytest.mark.parametrize("model", MODELS)
def test_replayed_events_give_each_level_of_each_kind_of_group(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.kv_events import KVEventsConfig

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    original = vllm_configs

    def configs(*arguments: Any, **options: Any) -> Any:
        vllm_config, kv_config = original(*arguments, **options)
        vllm_config.kv_events_config = KVEventsConfig(True, "null")
        return vllm_config, kv_config

    monkeypatch.setattr(simulated, "vllm_configs", configs)
    one = Simulation(tmp_path, SOURCE, model)
    heard = one.scheduler.kv_event_publisher = Heard(one)
    random = Random(1)
    trunks = [random.choices(range(50), k=48) for _ in range(3)]
    for turn in range(12):
        tail = random.choices(range(50), k=random.randrange(8, 40))
        one.add(random.choice(trunks) + tail, length=random.randrange(1, 30))
        if turn % 4 == 3:
            one.run()
            one.reset()
    one.run()
    for _ in range(4):
        one.step()
    ladder = one.half.connector.manager.ladder
    with ladder.lock:  # the last step writes nothing from here on
        heard.publish(type("Batch", (), {"events": one.connector.take_events()}))
        held = {name: set(index) for name, index in ladder.indexes.items()}
    assert heard.keys() == held
    assert min(len(names) for names in heard.levels.values()) > 5
    assert heard.compared > 20
    assert heard.cleared
    assert len({group for _, group in heard.levels["cold"]}) == len(one.groups)
    one.close()
