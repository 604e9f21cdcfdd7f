"""Pages below SGLang's host pool, as its cache controller calls the storage."""

from __future__ import annotations

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvladder.config import registry
from kvladder.testing.shared import SharedFakeTier
from kvladder.units import Duration
from tests.connectors import sglang_stub
from tests.connectors.sglang_controller import (
    PAGE_BYTES,
    Controller,
    Pool,
    Sparse,
    chain,
    config,
    rows,
)
from tests.connectors.sglang_stub import PoolHitPolicy, PoolTransfer, PoolTransferResult
from tests.patience import PATIENCE_S, until
from tests.sglang.kit.hanging_files import HangingFiles

sglang_stub.install()
from kvladder.connectors.sglang.storage import KVLadderStorage  # noqa: E402

OURS = {"backend_name": "kvladder", "module_path": "m", "class_name": "c", "interface_v1": 1}
SLOTS = 40
PATIENT = f"{PATIENCE_S} s"


@pytest.fixture
def hangs(tmp_path, monkeypatch):
    """Return the file that, while it exists, makes a level of type ``hanging`` hang."""
    file = tmp_path / "hangs"
    monkeypatch.setenv("HANGS", str(file))
    return file


@pytest.fixture
def patient(monkeypatch):
    """Wait for batches as long as they take, on a busy machine too."""
    ours = "kvladder.connectors.sglang"
    for name in (f"{ours}.storage.CALL_S", f"{ours}.node.FLUSH_S"):
        monkeypatch.setattr(name, PATIENCE_S)
    for module in ("storage", "options"):
        monkeypatch.setattr(f"{ours}.{module}.DEADLINE_MAX", Duration(PATIENCE_S))
    monkeypatch.setattr("kvladder.tiers.ladder.batched.ROOM_S", PATIENCE_S)


@pytest.fixture
def opened(tmp_path, monkeypatch, hangs, patient):
    """Open storages, each with a pool and its controller; close them after the test."""
    monkeypatch.setitem(registry._registered, ("tiers", "hanging"), HangingFiles)
    monkeypatch.setitem(registry._registered, ("tiers", "shared-fake"), SharedFakeTier)
    monkeypatch.setenv("SGLANG_RUN_ID", str(tmp_path))  # a server of this test alone
    sglang_stub.give("m")
    left: list[Controller] = []

    def open_one(
        tier="files",
        *,
        slots=SLOTS,
        pool=None,
        more=None,
        fingerprint="w1",
        ranks=None,
        **changes,
    ):
        level = {"name": "nvme", "type": tier, "when": "commit", "timeout": PATIENT}
        if tier in {"files", "hanging"}:
            level |= {"path": str(tmp_path / "kv"), "capacity": "64 MiB"}
        else:
            level |= {"capacity": "64 MiB"}
        stack = {
            "model": {"fingerprint": fingerprint},
            "arena": {"size": slots * PAGE_BYTES},
            "fetch": {"deadline": PATIENT},
            "tiers": [
                {"type": "host", **changes.pop("host", {})},
                level | changes.pop("level", {}),
            ],
        }
        told = config({**OURS, **stack, **changes}, **(ranks or {}))
        storage = KVLadderStorage(told, {})
        pool = pool or Pool()
        storage.register_mem_pool_host(pool)
        for name, other in {"kv": pool, **(more or {})}.items():
            storage.register_mem_host_pool_v2(other, name)
        storage.on_host_pools_registered()
        left.append(Controller(storage, is_writer=not told.is_mla_model or not told.tp_rank))
        return left[-1], pool

    yield open_one
    hangs.unlink(missing_ok=True)
    for one in left:
        one.detach()


def settle(controller):
    manager = controller.storage_backend.manager
    until(manager.idle)
    manager.check()


def same(pool, first, kept):
    return all(torch.equal(pool.page(first + at), page) for at, page in enumerate(kept))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_a_batch_may_have_more_pages_than_the_arena_has_slots(opened, layout):
    one, pool = opened(pool=Pool(layout))
    pool.fill(1)
    kept = [pool.page(row) for row in range(128)]
    keys = chain("a", 128)
    assert one.backup(keys) == 128
    settle(one)
    pool.kv.zero_()
    assert one.exists(keys) == 128
    assert one.prefetch(keys, rows(100, 128)) == 128
    assert same(pool, 100, kept)
    assert not one.refused


@pytest.mark.slow
def test_stored_pages_outlive_the_engine(opened):
    one, pool = opened()
    pool.fill(1)
    kept = [pool.page(row) for row in range(300)]
    keys = chain("a", 300)
    assert one.backup(keys) == 300
    settle(one)
    one.detach()

    one, pool = opened()  # another process: SGLang's own pools are empty
    asked = keys + chain("b", 50)
    assert one.exists(asked) == 300
    assert one.prefetch(asked, rows(0, 300)) == 300
    assert same(pool, 0, kept)


@pytest.mark.slow
def test_a_hole_ends_a_prefix(opened):
    one, _ = opened(slots=200)
    keys = chain("a", 100)
    one.backup(keys)
    holed = [*keys[:50], *chain("c", 1), *keys[51:]]
    assert one.exists(holed) == 50
    assert one.get(holed, rows(0, 100)) == 50
    assert one.exists(chain("d", 10)) == 0
    assert one.storage_backend.manager.stats()["nvme"]["queries"] >= 10


@pytest.mark.slow
def test_pages_are_stored_in_parts_while_a_request_continues(opened):
    one, _ = opened(slots=100)
    keys = chain("a", 60)
    one.backup(keys[:40])  # the prompt, then the decoded tokens
    one.backup(keys[40:], rows(40, 20))
    assert one.prefetch(keys, rows(100, 60)) == 60
    assert one.backup(keys[30:50]) == 20  # again: nothing is copied
    assert sorted(one.storage_backend.get_stats().backup_pgs) == [0, 20, 40]


@pytest.mark.slow
def test_a_flipped_bit_is_a_miss_until_the_next_store_replaces_it(opened, tmp_path):
    one, pool = opened()
    pool.fill(1)
    kept = [pool.page(row) for row in range(60)]
    keys = chain("a", 60)
    one.backup(keys)
    settle(one)
    one.detach()
    wanted = kept[7].contiguous().view(torch.uint8).numpy().tobytes()
    for path in (tmp_path / "kv").rglob("seg-*"):
        held = bytearray(path.read_bytes())
        if (at := held.find(wanted)) >= 0:
            held[at + 5] ^= 1
            path.write_bytes(held)
    os.sync()  # or a direct read waits for a write in progress

    one, pool = opened()
    assert one.prefetch(keys, rows(0, 60)) == 7
    assert same(pool, 0, kept[:7])
    for at, page in enumerate(kept):
        pool.kv[:, at] = page
    one.backup(keys)
    settle(one)
    one.detach()
    one, pool = opened()
    assert one.prefetch(keys, rows(0, 60)) == 60
    assert same(pool, 0, kept)


@pytest.mark.slow
def test_a_hanging_tier_blocks_no_thread_for_ever(opened, hangs):
    """SGLang ends the engine if a thread does not return when it flushes."""
    one, _ = opened("hanging")
    keys = chain("a", 128)
    one.backup(keys)
    settle(one)
    one.detach()
    breaker = {
        "breaker": {"failures": 1, "retry": "10 m", "retry_max": "10 m"},
        "timeout": "100 ms",
    }
    hangs.touch()
    one, _ = opened("hanging", level=breaker, fetch={"deadline": "100 ms"})
    assert one.exists(keys) == 128  # not yet known
    assert one.prefetch(keys, rows(0, 128)) == 0
    until(lambda: one.exists(keys) == 0)  # now it is known, and only the pages above it are left
    there = chain("d", 10)
    one.backup(there)
    assert one.prefetch(there, rows(0, 10)) == 10
    one.backup(chain("e", 256))  # more than there are slots: it ends, with or without them
    one.stop()


@pytest.mark.slow
def test_a_lookup_makes_no_call_to_a_tier(opened):
    one, _ = opened()
    keys = chain("a", 100)
    one.backup(keys)
    settle(one)
    before = one.storage_backend.manager.stats()["nvme"]
    for _ in range(9):  # as often as SGLang asks again for a request that waits
        assert one.exists(keys + chain("b", 28)) == 100
    assert one.storage_backend.manager.stats()["nvme"] == before


def test_pages_that_no_level_wants_are_not_refused(opened):
    one, _ = opened(host={"min_priority": 50}, level={"min_priority": 50}, slots=30)
    keys = chain("a", 30)
    valued = chain("v", 30)
    one.storage_backend.announce(valued, priority=60, salt="")
    assert one.backup(valued) == 30  # no slot is free from now on
    settle(one)
    assert one.backup(keys) == 30
    assert not one.refused
    assert one.exists(keys) == 0
    one.storage_backend.announce(keys, priority=70, salt="")
    assert one.backup(keys) == 30
    assert one.exists(keys) == 30


@pytest.mark.slow
def test_pages_without_a_slot_end_the_stored_part_of_a_prompt(opened, hangs, monkeypatch):
    """A hole in a prefix makes all later pages useless: SGLang is told not to offer them."""
    monkeypatch.setattr("kvladder.tiers.ladder.batched.ROOM_S", 0.05)  # there will be none
    one, _ = opened("hanging", slots=16)
    hangs.touch()
    keys = chain("a", 256)
    held = one.storage_backend.manager.save([b"%032d" % n for n in range(16)])
    assert one.backup(keys) == 0
    assert one.refused == keys[:128]
    held.abort()
    assert one.exists(keys) == 0


@pytest.mark.slow
def test_models_share_a_directory(opened):
    one, _ = opened()
    keys = chain("a", 100)
    one.backup(keys)
    settle(one)
    one.detach()
    other, _ = opened(fingerprint="w2")
    assert other.exists(keys) == 0
    other.backup(chain("b", 10))
    settle(other)
    other.storage_backend.clear()  # its own pages only
    other.detach()
    one, _ = opened()
    assert one.exists(keys) == 100


@pytest.mark.slow
def test_replicas_that_sglang_does_not_distinguish_share_one_stack(opened, tmp_path):
    control = {"control": {"path": str(tmp_path / "kv.sock")}}
    keys = chain("a", 20)
    several = []
    for rank in range(2):
        sglang_stub.give("m", parallel={"num_dp_ranks": 2, "dp_rank": rank})
        several.append(opened(**control))
    (first, filled), (second, pool) = several
    filled.fill(1)
    kept = [filled.page(row) for row in range(20)]
    assert first.backup(keys) == 20
    settle(first)
    assert second.prefetch(keys, rows(100, 20)) == 20
    assert same(pool, 100, kept)
    assert second.storage_backend.manager is None
    assert [path.name for path in tmp_path.glob("*.sock")] == ["kv.sock"]
    assert len([path for path in (tmp_path / "kv").iterdir() if path.is_dir()]) == 1
    second.storage_backend.clear()
    assert first.exists(keys) == 0


@pytest.mark.slow
def test_ranks_with_heads_of_their_own_have_pages_of_their_own(opened):
    """More pages than the arena has slots, of two ranks at once: each has its own back."""
    several = [opened(ranks={"tp_size": 2, "tp_rank": rank}) for rank in range(2)]
    keys, kept = chain("a", 60), []
    for seed, (one, pool) in enumerate(several):
        pool.fill(seed)
        kept.append([pool.page(row) for row in range(60)])
        assert one.exists(keys) == 0
        assert one.backup(keys) == 60
        assert one.exists(keys) == 60
    settle(several[0][0])
    begun = [
        one.begin("get", lambda one=one: one.storage_backend.batch_get_v1(keys, rows(100, 60)))
        for one, _ in several
    ]
    assert all(all(done.get(timeout=PATIENCE_S)) for done in begun)
    for (_, pool), pages in zip(several, kept, strict=True):
        assert same(pool, 100, pages)
    assert [one.storage_backend.get_stats().backup_pgs for one, _ in several] == [[60], [60]]


LATENT = {"is_mla_model": True, "tp_size": 2}


@pytest.mark.slow
def test_latent_attention_hits_on_all_ranks(opened):
    writer, filled = opened(ranks=LATENT)
    reader, pool = opened(ranks={**LATENT, "tp_rank": 1})
    filled.fill(1)
    kept = [filled.page(row) for row in range(60)]
    keys = chain("a", 60)
    assert reader.backup(keys) == 0  # SGLang's: the first rank alone stores
    assert writer.backup(keys) == 60
    settle(writer)
    assert reader.prefetch(keys, rows(100, 60)) == writer.prefetch(keys, rows(200, 60)) == 60
    assert same(pool, 100, kept)


def test_latent_attention_on_several_machines_needs_a_tier_that_they_share(opened):
    sglang_stub.give("m", parallel={"nnodes": 2, "tp_size": 2})
    with pytest.raises(ValueError, match=r"^tiers: with latent attention, one rank .*redis"):
        opened(ranks=LATENT)
    with pytest.raises(ValueError, match="when: commit"):
        opened("shared-fake", level={"when": "evict"}, ranks=LATENT)
    opened(ranks={"is_mla_model": True})
    opened("shared-fake", ranks=LATENT)


@pytest.mark.slow
def test_a_rank_that_is_detached_leaves_the_others_without_hits(opened, caplog):
    first, _ = opened(ranks=LATENT)
    second, _ = opened(ranks={**LATENT, "tp_rank": 1})
    keys = chain("a", 20)
    first.backup(keys)
    assert second.exists(keys) == 20
    first.detach()
    assert second.prefetch(keys, rows(0, 20)) == second.exists(keys) == 0
    assert second.storage_backend.batch_set_v1(keys, rows(0, 20)) == [False] * 20
    assert caplog.text.count("the rank that owns kvladder's stack does not answer") == 1
    again, _ = opened(ranks=LATENT)
    assert again.exists(keys) == 20
    assert second.exists(keys) == 0  # it has the arena of the one before


# ---- pools beside keys and values


WANTED = {"swa": ("trailing_pages", 3), "mamba": ("trailing_pages", 1), "indexer": ("all_pages", 1)}


def hybrid():
    """Pools of windows of 3 pages, of states, and of an index of all pages."""
    return {"swa": Sparse(width=96), "mamba": Sparse(1, width=5000), "indexer": Sparse(width=8)}


def asked(names):
    """Return the pools that SGLang looks up with a prompt."""
    return [
        PoolTransfer(name, None, ["__placeholder__"] * count, PoolHitPolicy(policy))
        for name, (policy, count) in WANTED.items()
        if name in names
    ]


def pages_of(more, keys):
    """Pages of some pools, with these keys by pool, in the pools' first rows."""
    return [PoolTransfer(name, more[name].rows(0, len(some)), some) for name, some in keys.items()]


@pytest.mark.slow
def test_state_kept_beside_keys_and_values_comes_back(opened):
    more = hybrid()
    one, _ = opened(more=more)
    storage = one.storage_backend
    assert storage.manager.layout.slot_bytes >= PAGE_BYTES
    for seed, other in enumerate(more.values()):
        other.fill(seed)
    keys = chain("a", 40)
    last = {"swa": keys[-4:], "mamba": keys[-1:], "indexer": keys}
    kept = {name: [more[name].page(row) for row in range(len(last[name]))] for name in more}
    assert storage.batch_exists_v2(keys, asked(more)) == PoolTransferResult(0, {}, [])
    stored = storage.batch_set_v2(pages_of(more, last))
    assert stored == {name: [True] * len(last[name]) for name in more}
    one.backup(keys)
    settle(one)
    one.detach()

    more = hybrid()
    one, _ = opened(more=more)
    storage = one.storage_backend
    found = storage.batch_exists_v2([*keys, *chain("b", 1)], asked(more))
    assert found.kv_hit_pages == 40
    assert found.extra_pool_hit_pages == {"kv": 40, "swa": 40, "mamba": 40, "indexer": 40}
    assert found.restorable_prefix_pages == [40]
    found = storage.batch_exists_v2(keys, asked({"swa", "indexer"}))
    assert found.restorable_prefix_pages == [39, 40]
    came = storage.batch_get_v2(pages_of(more, last))
    assert came == stored
    for name, pages in kept.items():
        assert same(more[name], 0, pages)
    holed = storage.batch_get_v2(pages_of(more, {"swa": [*keys[-2:], *keys[:1]]}))
    assert holed == {"swa": [True, True, False]}
    [wrong] = pages_of(more, {"swa": keys[-2:]})
    wrong.host_indices = wrong.host_indices[:-1]
    assert storage.batch_get_v2([wrong]) == {"swa": [False, False]}
    storage.batch_set_v2(pages_of(more, {"swa": [*keys[:3], keys[35]]}))  # 36 to 39 are there
    found = storage.batch_exists_v2(keys, asked({"swa"}))
    assert found.restorable_prefix_pages == [1, 2, 3, 38, 39, 40], "windows without a hole"


@pytest.mark.slow
def test_models_with_different_pools_share_no_pages(opened):
    more = {"swa": Sparse(width=96)}
    one, _ = opened(more=more)
    keys = chain("a", 4)
    one.storage_backend.batch_set_v2(pages_of(more, {"swa": keys}))
    one.backup(keys)
    settle(one)
    one.detach()
    for other in ({"swa": Sparse(width=80)}, {"mamba": Sparse(width=96)}):
        one, _ = opened(more=other)
        found = one.storage_backend.batch_exists_v2(keys, asked(other))
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {"kv": 4})
        one.detach()


def test_an_unknown_way_to_count_pages_is_an_error(opened):
    more = {"swa": Sparse()}
    one, _ = opened(more=more)
    one.backup(chain("a", 2))
    wanted = [PoolTransfer("swa", None, chain("a", 1), PoolHitPolicy.BLOCK_GROUPS)]
    with pytest.raises(ValueError, match="block_groups"):
        one.storage_backend.batch_exists_v2(chain("a", 2), wanted)


def test_unusable_pools_are_refused_by_name(opened):
    with pytest.raises(ValueError, match=r"each rank has its own heads in the pool 'draft'"):
        opened(ranks=LATENT, more={"draft": Pool()})
    opened(ranks=LATENT, more={"indexer": Sparse()})
    one, _ = opened()
    one.storage_backend.register_mem_host_pool_v2(Sparse(), "draft")  # late, and small enough
    with pytest.raises(ValueError, match=r"the pool 'late' was added after .* pages have .* bytes"):
        one.storage_backend.register_mem_host_pool_v2(Sparse(width=9000), "late")


def test_a_pool_that_does_not_locate_its_pages_is_refused(opened):
    class Other(Pool):
        def get_page_buffer_meta(self, indices):
            raise ValueError("Unsupported layout: page_tail")

    with pytest.raises(ValueError, match=r"'kv', a Other, does not report .*page_tail .*layout p"):
        opened(pool=Other())


def test_a_pool_without_bytes_is_refused_by_name(opened):
    class LogicalHostPool(Pool):
        get_page_buffer_meta: Any = lambda self, indices: None

    with pytest.raises(ValueError, match=r"'kv', a LogicalHostPool, does not report"):
        opened(pool=LogicalHostPool())


def test_a_late_pool_is_refused_where_codecs_are_for_some_pools(opened):
    codec = {"codecs": [{"name": "fp8", "allow_lossy": True}]}
    one, _ = opened("memory", more={"swa": Sparse()}, level=codec)
    with pytest.raises(ValueError, match=r"the pool 'late' was added after .* codec is limited"):
        one.storage_backend.register_mem_host_pool_v2(Sparse(), "late")


def test_an_arena_below_a_page_is_refused(opened):
    with pytest.raises(ValueError, match=r"arena.size: .* room for at least one block"):
        opened(arena={"size": PAGE_BYTES - 1})


@pytest.mark.slow
def test_statistics_are_kept_for_sglang_only_on_request(opened):
    one, _ = opened(ranks={"enable_storage_metrics": False})
    one.backup(chain("a", 10))
    assert one.storage_backend.get_stats().backup_pgs == []
    one.detach()
    one, _ = opened()
    one.backup(chain("a", 10))
    one.prefetch(chain("a", 10), rows(0, 10))
    found = one.storage_backend.get_stats()
    assert (found.backup_pgs, found.prefetch_pgs) == ([10], [10])
    assert len(found.prefetch_bandwidth) == len(found.backup_bandwidth) == 1
    assert one.storage_backend.get_stats().prefetch_pgs == []


@pytest.mark.slow
def test_a_storage_can_be_detached_and_attached_while_the_engine_runs(opened):
    one, _ = opened()
    keys = chain("a", 20)
    one.backup(keys)
    one.detach()
    one.storage_backend.close()  # again
    assert one.storage_backend.batch_exists(keys) == 0
    assert one.storage_backend.batch_get_v1(keys, rows(0, 20)) == [False] * 20
    assert one.storage_backend.batch_set_v1(keys, rows(0, 20)) == [True] * 20
    one, _ = opened()
    assert one.exists(keys) == 20


def test_a_storage_that_got_no_pool_is_closed(tmp_path):
    sglang_stub.give("m")
    storage = KVLadderStorage(config({**OURS, "host": "1 MiB"}), {})
    storage.clear()
    storage.close()


@pytest.mark.slow
def test_changing_weights_disable_the_storage(opened, caplog, monkeypatch):
    monkeypatch.setattr(sglang_stub.target, "model", torch.nn.Linear(4, 4))
    one, _ = opened(fingerprint="auto")
    one.backup(keys := chain("a", 20))
    for _ in range(3):
        assert sglang_stub.WeightUpdater().update_weights_from_disk("other", "auto")[0]
    torch.nn.init.zeros_(sglang_stub.target.model.weight)
    assert caplog.text.count("kvladder caches nothing until it is attached again") == 1
    assert one.prefetch(keys, rows(0, 20)) == 0
    assert one.backup(chain("b", 20)) == 20
    one.detach()
    with pytest.raises(ValueError, match="weights may have changed .*POST /flush_cache"):
        opened()  # SGLang may have pages of the weights before, and store them
    sglang_stub.UnifiedRadixCache(None).reset()
    one, _ = opened(fingerprint="auto")
    assert one.exists(keys) == one.exists(chain("b", 20)) == 0


@pytest.mark.parametrize(
    ("stack", "warning"),
    [
        (
            {"level": {"when": "evict"}},
            r"without waiting: blocks that host .* nvme are lost\. Use when: com",
        ),
        ({"level": {"codecs": []}}, r"without checksum, blocks that nvme damaged are served"),
    ],
)
def test_probably_unintended_settings_are_warned_of(opened, caplog, stack, warning):
    with caplog.at_level(logging.INFO, "kvladder"):
        opened(**stack)
    assert re.search(warning, caplog.text)
    assert "kvladder is ready: a block is 16 tokens" in caplog.text


def test_small_pages_are_warned_of(opened, caplog):
    class Small(Pool):
        page_size = 1

        def get_page_buffer_meta(self, indices):
            return [0, 0], [4096, 4096]

    opened(pool=Small())
    assert "--page-size is 1" in caplog.text


@pytest.mark.slow
def test_concurrent_clients_get_the_same_pages(opened):
    one, pool = opened(slots=24)
    pool.fill(3)
    keys = [chain(f"p{number}", 40) for number in range(4)]
    kept = [[pool.page(number * 40 + at) for at in range(40)] for number in range(4)]
    storage, places = one.storage_backend, [rows(number * 40, 40) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        stored = [*threads.map(storage.batch_set_v1, keys, places)]
        assert all(all(found) for found in stored)
        settle(one)
        pool.kv.zero_()
        come = [*threads.map(storage.batch_get_v1, keys, places)]
        assert all(all(found) for found in come)
    for number in range(4):
        assert same(pool, number * 40, kept[number])
