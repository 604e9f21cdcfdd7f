"""The tree reports the priorities and the salts of pages to the storage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvladder.config import registry
from kvladder.testing.fakes import FakeStore
from kvladder.testing.shared import SharedFakeTier
from tests.connectors import sglang_stub
from tests.connectors.sglang_controller import PAGE, Controller, Pool, Sparse, chain, config, rows
from tests.connectors.sglang_stub import PoolTransfer
from tests.patience import until

sglang_stub.install()
from kvladder.connectors.sglang import plugin  # noqa: E402
from kvladder.connectors.sglang.storage import KVLadderStorage  # noqa: E402
from kvladder.connectors.sglang.tree import KVLadderRadixCache, priority_of  # noqa: E402

STACK = {
    "backend_name": "kvladder", "module_path": "m", "class_name": "c", "interface_v1": 1,
    "model": {"fingerprint": "w"}, "arena": {"size": "8 MiB"},
    "tiers": [
        {"type": "host"},
        {"name": "kept", "type": "memory", "capacity": "8 MiB", "when": "commit",
         "min_priority": 50},
    ],
}  # fmt: skip


@pytest.fixture
def controller():
    sglang_stub.give("m")
    storage = KVLadderStorage(config(STACK), {})
    storage.register_mem_pool_host(Pool())
    storage.on_host_pools_registered()
    one = Controller(storage)
    yield one
    one.detach()


@pytest.fixture
def shared(monkeypatch):
    """Return two engines over one server; each has its own host level."""
    store = FakeStore()

    class Server(SharedFakeTier):
        def __init__(self):
            super().__init__(store=store)
            self.removable = lambda key: True

    monkeypatch.setitem(registry._registered, ("tiers", "shared-fake"), Server)
    sglang_stub.give("m")
    level = {"capacity": "8 MiB", "when": "commit", "timeout": "10 m"}  # a machine may stand still
    tiers = [{"type": "host"}, {"type": "shared-fake", **level}]
    both = []
    for _ in range(2):
        storage = KVLadderStorage(config({**STACK, "tiers": tiers}), {})
        storage.register_mem_pool_host(Pool())
        storage.register_mem_host_pool_v2(Sparse(), "indexer")
        storage.on_host_pools_registered()
        both.append(Controller(storage))
    yield both
    for one in both:
        one.detach()


def settle(controller):
    manager = controller.storage_backend.manager
    until(lambda: manager.idle() and not manager.removals)
    return manager


def request(name, pages=20, *, priority=None, salt=None):
    keys = chain(name, pages)
    return SimpleNamespace(
        rid=name,
        keys=keys,
        priority=priority,
        cache_salt=salt,
        extra_key=None,
        finished=lambda: True,
        full_untruncated_fill_ids=[],
    )


def kept(controller):
    return settle(controller).stats()["kept"]["blocks"]


@pytest.mark.parametrize(
    ("said", "priority"),
    [(None, None), (0, None), (1, 1), (80, 80), (100, 100), (101, None), (-(2**63), None)],
)
def test_priorities_of_one_to_a_hundred_apply(said, priority):
    assert priority_of(SimpleNamespace(priority=said)) == priority
    assert priority_of(SimpleNamespace(priority=2**63 - 1)) is None


def test_pages_have_the_priority_of_their_request(controller):
    tree = KVLadderRadixCache(controller)
    for said in (request("a", priority=80), request("b"), request("c", priority=49)):
        tree.checkpoint_into_tree(said, up_to=20)
    for name in "bca":  # they are written later, and in any order
        tree.write_backup_storage(name)
    assert kept(controller) == 20
    assert controller.exists(chain("b", 20)) == 20  # in host


def test_a_request_without_a_priority_keeps_the_pages_priorities(controller):
    tree = KVLadderRadixCache(controller)
    for said in (80, None):  # its last page is computed and stored again
        tree.checkpoint_into_tree(request("a", priority=said), up_to=20)
        tree.write_backup_storage("a")
        assert kept(controller) == 20
    tree.checkpoint_into_tree(request("a", priority=40), up_to=20)
    tree.write_backup_storage("a")
    assert kept(controller) == 0


@pytest.mark.slow
def test_a_node_that_was_split_has_the_default(controller):
    tree = KVLadderRadixCache(controller)
    tree.checkpoint_into_tree(request("a", priority=80), up_to=20)
    tree.tree_core.nodes["half"] = (chain("a", 20)[:10], None)
    tree.write_backup_storage("half")
    assert kept(controller) == 0


@pytest.mark.slow
def test_pages_are_purged_by_the_salt_of_their_request(controller):
    tree = KVLadderRadixCache(controller)
    for said in (request("a", salt="tenant", priority=60), request("b", priority=60)):
        tree.checkpoint_into_tree(said, up_to=20)
        tree.write_backup_storage(said.rid)
    assert kept(controller) == 40
    for _ in controller.storage_backend.manager.purge("tenant"):
        pass
    assert controller.exists(chain("a", 20)) == 0
    assert controller.exists(chain("b", 20)) == 20


@pytest.mark.slow
def test_pages_that_the_host_pool_only_stages_are_purged_by_their_salt(controller):
    tree: Any = KVLadderRadixCache(controller)
    entries = {
        at: SimpleNamespace(
            intent=SimpleNamespace(snapshot=SimpleNamespace(key=SimpleNamespace(cache_salt=salt))),
            keys_by_pool={"kv": chain(name, 20), "swa": chain(name, 20)[-2:]},
        )
        for at, (name, salt) in enumerate([("a", "tenant"), ("b", None)])
    }
    tree.buffer_pipeline = SimpleNamespace(ongoing_write_through=entries)
    for at in range(2):
        tree._finish_write_through_ack(at)
    assert controller.exists(chain("a", 20)) == controller.exists(chain("b", 20)) == 20
    for _ in settle(controller).purge("tenant"):
        pass
    assert controller.exists(chain("a", 20)) == 0
    assert controller.exists(chain("b", 20)) == 20


@pytest.mark.slow
def test_pages_stored_by_other_engines_are_purged_by_their_salt_too(shared):
    here, there = shared
    tree = KVLadderRadixCache(there)
    for said in (request("a", 200, salt="tenant"), request("b")):
        tree.checkpoint_into_tree(said, up_to=200)
        tree.write_backup_storage(said.rid)
    settle(there)
    tree = KVLadderRadixCache(here)
    for name, pages, salt in (("a", 200, "tenant"), ("b", 20, None)):
        here.ask(chain(name, pages), salt)
    tree.drain_storage_control_queues()
    manager = here.storage_backend.manager
    assert manager.stats()["host"]["blocks"] == 220
    for _ in manager.purge("tenant"):
        pass
    settle(here)
    assert manager.stats()["host"]["blocks"] == 20
    assert here.exists(chain("b", 20)) == 20


@pytest.mark.slow
@pytest.mark.parametrize("begin", [0, 7])
def test_pages_of_each_pool_and_batch_are_read_with_their_salt(shared, begin):
    """SGLang may begin batches anywhere, such as after the pages on the device."""
    here, there = (one.storage_backend for one in shared)
    keys, pages = chain("a", 200), rows(0, 200)

    def transfers(first, last):
        return [PoolTransfer("indexer", Sparse().rows(first, last - first), keys[first:last])]

    there.announce(keys, priority=None, salt="tenant")
    assert there.batch_set_v2(transfers(0, 200)) == {"indexer": [True] * 200}
    for first in (0, 128):
        assert all(
            there.batch_set_v1(keys[first : first + 128], pages[first * PAGE :][: 128 * PAGE])
        )
    settle(shared[1])
    here.announce_salt(keys, "tenant")
    for first in range(begin, 200, 128):
        last = min(first + 128, 200)
        assert here.batch_get_v2(transfers(first, last)) == {"indexer": [True] * (last - first)}
        assert all(here.batch_get_v1(keys[first:last], pages[first * PAGE : last * PAGE]))
    assert here.manager.stats()["host"]["blocks"] > 200  # of both pools
    for _ in here.manager.purge("tenant"):
        pass
    settle(shared[0])
    assert here.manager.stats()["host"]["blocks"] == 0


@pytest.mark.slow
def test_each_batch_of_a_long_node_is_announced(controller):
    tree = KVLadderRadixCache(controller)
    tree.checkpoint_into_tree(request("a", 200, priority=80), up_to=200)
    tree.write_backup_storage("a")
    assert not controller.refused
    assert controller.storage_backend._announced == {}
    assert kept(controller) == controller.exists(chain("a", 200)) == 200


def test_pages_that_are_never_written_are_forgotten(controller, monkeypatch):
    monkeypatch.setattr("kvladder.connectors.sglang.tree.NODES_MAX", 3)
    monkeypatch.setattr("kvladder.connectors.sglang.storage.ANNOUNCED_MAX", 3)
    monkeypatch.setattr("kvladder.connectors.sglang.storage.SALTS_MAX", 3)
    tree = KVLadderRadixCache(controller)
    for number in range(9):
        tree.checkpoint_into_tree(request(f"{number}", 1, priority=80), up_to=1)
        controller.storage_backend.announce(chain(f"{number}", 1), priority=80, salt="t")
    storage = controller.storage_backend
    assert len(tree._priorities) == len(storage._announced) == len(storage._salts) == 3
    for name in "08":
        tree.write_backup_storage(name)
    assert kept(controller) == 1  # the other has the default


def test_without_kvladders_storage_the_tree_acts_as_sglangs():
    written: list[list[str]] = []
    tree = KVLadderRadixCache(SimpleNamespace(storage_backend=None, backup=written.append))
    tree.checkpoint_into_tree(request("a", priority=80), up_to=3)
    tree.write_backup_storage("a")
    assert written == [chain("a", 20)[:3]]


def test_a_version_without_a_needed_method_is_warned_of_once(controller, caplog, monkeypatch):
    monkeypatch.delattr(sglang_stub.Core, "prefetch_anchor_info")
    tree = KVLadderRadixCache(controller)
    tree.checkpoint_into_tree(request("a", priority=80), up_to=20)
    tree.write_backup_storage("a")
    assert kept(controller) == 0
    assert controller.exists(chain("a", 20)) == 20
    assert caplog.text.count("SGLang lacks prefetch_anchor_info") == 1


def test_the_tree_is_registered_by_name():
    plugin.register()
    plugin.register()  # in each process, and more than once in some
    made = sglang_stub.registry[plugin.NAME](SimpleNamespace())
    assert isinstance(made, KVLadderRadixCache)
