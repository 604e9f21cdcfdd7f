"""The reference connector, and the bookkeeping that every connector shares."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvladder import CacheManager, Layout, Retention, RetentionRange, open_cache
from kvladder.connectors.base import Connector
from kvladder.connectors.inline import InlineConnector
from kvladder.errors import LayoutError
from kvladder.gpu.copy.copier import CopyJob, Finished, JobId
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX

BLOCK_TOKENS = 16
KEYS = [BlockKey(bytes([index]) * 32) for index in range(20)]


def make_kv() -> torch.Tensor:
    return torch.randn(32, 2, BLOCK_TOKENS, 64)


def layout_of(kv: torch.Tensor) -> Layout:
    return Layout(BLOCK_TOKENS, kv[0].nbytes, {"model": "test"})


@pytest.fixture
def manager() -> Iterator[CacheManager]:
    with open_cache({"host": "1 MiB"}, layout=layout_of(make_kv())) as manager:
        yield manager
        manager.check()


def test_a_prompt_that_was_saved_is_loaded_into_other_blocks(manager: CacheManager) -> None:
    kv = make_kv()
    connector = InlineConnector(manager, kv)
    keys = connector.keys(range(70))
    assert len(keys) == 4
    done = connector.wait(connector.save(keys, [3, 1, 4, 2]))
    assert [(one.ok, one.bytes) for one in done] == [(True, 4 * kv[0].nbytes)]
    match = connector.match(connector.keys([*range(64), 7, 7]))
    assert match.wait()
    assert (match.blocks, match.sources) == (4, ["host"] * 4)
    connector.wait(connector.load(match, [20, 21, 22], first=1))
    connector.close()
    assert torch.equal(kv[20:23], kv[[1, 4, 2]])


@pytest.mark.parametrize("limit", [PRIORITY_MAX, 50])
@pytest.mark.parametrize("known", [range(0), range(1, 5)])
def test_a_prefix_saved_in_pieces_has_the_same_floors_as_one_saved_at_once(
    limit: int, known: range
) -> None:
    """Also with cached blocks, and with ``limits.priority`` below a priority."""
    host = {"type": "host", "min_priority": 0}
    source = {"arena": {"size": "1 MiB"}, "tiers": [host], "limits": {"priority": limit}}
    priorities = [(90, None), (40, None), (70, None), (20, None), (60, None), (80, None)]
    floors: list[list[int]] = []
    for pieces in ([range(6)], [range(2), range(2, 3), range(3, 6)]):
        kv = make_kv()
        with open_cache(source, layout=layout_of(kv)) as manager:
            connector = InlineConnector(manager, kv)
            keys, floor = connector.keys(range(96)), PRIORITY_MAX
            for at in known:
                manager.save(keys[at : at + 1]).commit()
            for piece in pieces:
                started = connector.save(
                    [keys[at] for at in piece],
                    piece,
                    priorities=[priorities[at] for at in piece],
                    parent_floor=floor,
                )
                connector.wait(started)
                floor = started.floor
            assert floor == 20
            metas = list(map(manager.ladder.meta, keys))
            floors.append([meta.floor for meta in metas if meta is not None])
            connector.close()
    assert floors[0] == floors[1]
    assert len(floors[0]) == 6


def test_cached_blocks_are_not_copied_again(manager: CacheManager) -> None:
    connector = InlineConnector(manager, make_kv())
    keys = connector.keys(range(64))
    connector.wait(connector.save(keys[:3], [0, 1, 2]))
    (finished,) = connector.wait(connector.save(keys, [0, 1, 2, 3]))
    assert finished.bytes == manager.layout.block_bytes
    nothing = connector.save(keys, [0, 1, 2, 3])
    assert nothing.job is None
    assert not nothing
    assert connector.wait(nothing) == []
    connector.close()


def test_other_salts_adapters_and_prompts_match_nothing(manager: CacheManager) -> None:
    connector = InlineConnector(manager, make_kv())
    connector.wait(connector.save(connector.keys(range(64)), [0, 1, 2, 3]))
    for other in (
        connector.keys(range(64), salt="tenant"),
        connector.keys(range(64), lora="adapter"),
        connector.keys(range(1, 65)),
    ):
        match = connector.match(other)
        assert match.done
        assert match.blocks == 0
        match.release()
    connector.close()


def test_tensors_of_another_size_are_refused(manager: CacheManager) -> None:
    with pytest.raises(LayoutError, match=r"4096 bytes in the tensors .*expected 8192"):
        InlineConnector(manager, torch.zeros(8, 1, BLOCK_TOKENS, 64))


def test_blocks_survive_in_files(tmp_path: Path) -> None:
    kv = make_kv()
    source = {"host": "1 MiB", "files": str(tmp_path / "kv"), "capacity": "64 MiB"}
    with open_cache(source, layout=layout_of(kv)) as manager:
        connector = InlineConnector(manager, kv)
        connector.wait(connector.save(connector.keys(range(64)), [0, 1, 2, 3]))
        connector.close()
    with open_cache(source, layout=layout_of(kv)) as manager:
        connector = InlineConnector(manager, kv)
        match = connector.match(connector.keys(range(64)))
        match.wait()
        assert match.sources == ["files"] * 4
        connector.wait(connector.load(match, [9, 8, 7, 6]))
        connector.close()
    assert torch.equal(kv[[9, 8, 7, 6]], kv[:4])


class Ranks(Connector):
    """Collects jobs; the test reports for each rank."""

    def __init__(self, manager: CacheManager, ranks: int) -> None:
        super().__init__(manager, reports=ranks)
        self.jobs: list[CopyJob] = []

    def _start(self, job: CopyJob) -> None:
        self.jobs.append(job)

    def report(self, job: JobId | None, *, ok: bool = True) -> CopyJob | None:
        assert job is not None
        ended = self._report(Finished(job, ok, 0, 0.0))
        return None if ended is None else ended.job

    def poll(self) -> list[Finished]:
        return []

    def hits(self, keys: Sequence[BlockKey]) -> int:
        return self.manager.lookup(keys).host


def test_a_save_is_a_hit_when_every_rank_has_copied_its_part(manager: CacheManager) -> None:
    ranks = Ranks(manager, 2)
    job = ranks.save(KEYS[:3], [5, 6, 7]).job
    assert ranks.jobs[0].blocks == (5, 6, 7)
    assert ranks.report(job) is None
    assert (ranks.hits(KEYS), ranks.busy) == (0, True)
    assert ranks.report(job) == ranks.jobs[0]
    assert (ranks.hits(KEYS), ranks.busy) == (3, False)


def test_a_save_that_one_rank_failed_is_no_hit(manager: CacheManager) -> None:
    ranks = Ranks(manager, 2)
    job = ranks.save(KEYS[:3], [5, 6, 7]).job
    ranks.report(job, ok=False)
    ranks.report(job)
    assert ranks.hits(KEYS) == 0
    assert manager.arena.free == manager.arena.slots


def saved(ranks: Ranks, count: int) -> None:
    job = ranks.save(KEYS[:count], range(count)).job
    for _ in range(2):
        ranks.report(job)


def test_a_load_is_pinned_until_every_rank_has_copied_its_part(manager: CacheManager) -> None:
    ranks = Ranks(manager, 2)
    saved(ranks, 4)
    job = ranks.load(ranks.match(KEYS), [9, 10, 11], first=1)
    assert ranks.jobs[-1].slots == ranks.jobs[0].slots[1:]
    claims = [manager.arena.claims(slot) for slot in ranks.jobs[-1].slots]
    ranks.report(job)
    assert [manager.arena.claims(slot) for slot in ranks.jobs[-1].slots] == claims
    ranks.report(job)
    assert [manager.arena.claims(slot) + 1 for slot in ranks.jobs[-1].slots] == claims
    assert ranks.hits(KEYS) == 4


def test_a_failed_load_forgets_its_blocks(manager: CacheManager) -> None:
    ranks = Ranks(manager, 2)
    saved(ranks, 4)
    job = ranks.load(ranks.match(KEYS[:2]), [9, 10])
    ranks.report(job)
    ranks.report(job, ok=False)
    assert ranks.hits(KEYS) == 0
    assert ranks.hits(KEYS[2:]) == 2


def test_closing_drops_unfinished_jobs(manager: CacheManager) -> None:
    ranks = Ranks(manager, 2)
    saved(ranks, 2)
    job = ranks.save(KEYS[2:4], [2, 3]).job
    ranks.load(ranks.match(KEYS), [9, 10])
    ranks.close()
    assert ranks.report(job) is None
    assert (ranks.hits(KEYS), ranks.busy) == (2, False)
    assert manager.arena.free == manager.arena.slots - 2


def test_more_blocks_than_matched_are_refused_and_nothing_stays_pinned(
    manager: CacheManager,
) -> None:
    ranks = Ranks(manager, 1)
    ranks.report(ranks.save(KEYS[:2], [0, 1]).job)
    with pytest.raises(ValueError, match="3 blocks to load from number 0 on, but 2 matched"):
        ranks.load(ranks.match(KEYS), [4, 5, 6])
    with pytest.raises(ValueError, match="2 keys for 1 blocks"):
        ranks.save(KEYS[:2], [1])
    assert {manager.arena.claims(slot) for slot in ranks.jobs[0].slots} == {1}


def test_a_retention_decides_which_blocks_stay() -> None:
    kv = torch.arange(16 * 64, dtype=torch.float32).reshape(16, 64)
    layout = Layout(block_tokens=4, block_bytes=kv[0].nbytes)
    stack = {"arena": {"size": "16 KiB"}, "tiers": [{"type": "host", "min_priority": 20}]}
    retention = Retention(
        (RetentionRange(0, 4, 80), RetentionRange(4, None, 20, duration_s=60.0)), decode_priority=5
    )
    with open_cache(stack, layout=layout) as cache:
        connector = InlineConnector(cache, kv)
        keys = connector.keys(range(16))
        pairs = retention.of_blocks(range(4), block_tokens=4, prompt_tokens=12)
        assert pairs == [(80, None), (20, 60.0), (20, 60.0), (5, None)]
        connector.wait(connector.save(keys, range(4), priorities=pairs))
        assert cache.lookup(keys).host == 3, "what was generated is below the threshold"
        others = connector.keys(range(100, 112))
        connector.wait(connector.save(others, range(4, 7)))
        assert cache.lookup(others).host == 3
        assert cache.lookup(keys).host == 1, "the head was to stay"
        connector.close()
