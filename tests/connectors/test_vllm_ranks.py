"""The layout of the ranks' parts in a slot, and which rank copies which."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvladder.arena import Arena, Slot
from kvladder.connectors.vllm.groups import groups_of
from kvladder.errors import ConfigError
from kvladder.gpu.copy.copier import CopyJob, JobId
from kvladder.layout import Layout
from kvladder.notices import Notices
from tests.connectors.loaded import FakeLoaded
from tests.connectors.scripted import TOKENS, configs, kv_spec

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():  # whatever vLLM warns of when it is imported
    warnings.simplefilter("ignore")
    from kvladder.connectors.vllm.start import instance_of, layout_of, this_node
    from kvladder.connectors.vllm.step import Attach, Load, RankDescription, StepMetadata
    from kvladder.connectors.vllm.worker import WorkerHalf

pytestmark = pytest.mark.slow

Offsets = tuple[tuple[int, ...], ...]


def two_groups(*, tensor: int = 1, stages: int = 1) -> tuple[Any, Any]:
    vllm_config, kv_config = configs(ranks=tensor)
    vllm_config.parallel_config.pipeline_parallel_size = stages
    window = kv_spec("SlidingWindowSpec", sliding_window=8, page_size_bytes=TOKENS * 8)
    kv_config.kv_cache_groups.append(SimpleNamespace(layer_names=["w"], kv_cache_spec=window))
    kv_config.num_blocks = 6
    return vllm_config, kv_config


def described(
    sizes: list[tuple[int, ...]], *, replicas: int = 1, tensor: int = 1, stages: int = 1
) -> tuple[Layout, Offsets]:
    vllm_config, kv_config = two_groups(tensor=tensor, stages=stages)
    ranks = {
        rank: RankDescription(rank, this_node(), of_rank, {"size": str(of_rank)}, b"", replicas)
        for rank, of_rank in enumerate(sizes)
    }
    groups = groups_of(kv_config, model="tiny")
    return layout_of(ranks, vllm_config, kv_config, groups, fingerprint="x")


def test_a_slot_holds_all_ranks_parts_of_the_largest_group() -> None:
    layout, offsets = described([(64, 32), (64, 32)], tensor=2)
    assert (layout.block_bytes, offsets) == (128, ((0, 0), (64, 32)))
    one, _ = described([(128, 64)])
    assert one.block_bytes == layout.block_bytes
    assert one.namespace() != layout.namespace()


def test_ranks_with_the_same_bytes_store_them_once_for_any_number_of_ranks() -> None:
    one, _ = described([(64, 32)])
    two, offsets = described([(64, 32), (64, 32)], replicas=2, tensor=2)
    assert offsets == ((0, 0), (0, 0))
    assert two.namespace() == one.namespace()


def test_stages_have_layers_of_their_own_and_another_split_is_another_namespace() -> None:
    layout, offsets = described([(64, 0), (32, 32)], stages=2)
    assert (layout.block_bytes, offsets) == (96, ((0, 0), (64, 0)))
    other, _ = described([(32, 32), (64, 0)], stages=2)
    assert other.namespace() != layout.namespace()


def test_missing_ranks_and_ranks_that_differ_within_a_stage_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 has size '\(64, 16\)'"):
        described([(64, 32), (64, 16)], tensor=2)
    with pytest.raises(ConfigError, match=r"ranks \[0\] .*expected 0 .. 1"):
        described([(64, 32)], tensor=2)


def test_a_rank_copies_its_own_layers_and_reports_the_rest_as_done() -> None:
    vllm_config, kv_config = two_groups(tensor=2)
    kv_config.kv_cache_groups[1].layer_names = []  # they are on another stage
    kv_config.kv_tp_replicas = 2
    arena = Arena.create(4, 4096)
    workers: list[WorkerHalf] = []
    for rank in range(2):
        worker = WorkerHalf(
            vllm_config,
            kv_config,
            rank=rank,
            notices=Notices(lambda: 0.0),
            make_loaded=FakeLoaded(),
        )
        kv = torch.full((2, 6, 1, TOKENS, 1), 7 + rank, dtype=torch.int64)
        worker.register({f"l{i}": kv[i] for i in range(2)})
        assert worker.describe().sizes == (2 * TOKENS * 8, 0)
        workers.append(worker)
    attach = Attach(arena.handle, ((0, 0), (0, 0)))
    saves = [
        CopyJob(JobId(1), "offload", (1,), (Slot(0),)),
        CopyJob(JobId(2), "offload", (1,), (Slot(1),), 1),
    ]
    loads = [
        Load(CopyJob(JobId(3), "onboard", (2,), (Slot(0),)), "r", sync=False),
        Load(CopyJob(JobId(4), "onboard", (2,), (Slot(1),), 1), "r", sync=False),
    ]
    for worker in workers:
        worker.save(StepMetadata(attach, saves=saves))
        worker.load(StepMetadata(attach, loads=loads))
        worker.close()
        report = worker.report()
        assert report is not None
        assert {one.id: one.ok for one in report.ended} == dict.fromkeys((1, 2, 3, 4), True)
        assert len(report.ended) == 4
        assert (worker.received(), worker.failed()) == ({"r"}, set())
    assert arena.view(Slot(0))[0] == 7  # the first one's
    arena.close()


def test_engines_of_one_data_parallel_group_have_different_numbers() -> None:
    from vllm.config import ParallelConfig

    config = ParallelConfig()
    assert instance_of(config) == 0
    config.data_parallel_index = 3
    config.reconfigure_for_independent_dp_rank()
    assert instance_of(config) == 3
    assert instance_of(SimpleNamespace()) == 0
