"""Steps of vLLM's two model runners, with kvladder's real worker half, on the played machine.

vLLM's runner, planning, allocation and copies between blocks are real, as are the connector, its
copier and ``CudaDevice``. The forward pass, and the kernel that zeroes blocks, write bytes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils import torch_utils
from vllm.v1 import kv_cache_interface as specs

from kvladder.arena import Arena, Slot
from kvladder.connectors.vllm import KVLadderConnector
from kvladder.connectors.vllm.step import Attach, Load, StepMetadata
from kvladder.connectors.vllm.worker import WorkerHalf
from kvladder.gpu.copy.copier import CopyJob, Finished, JobId
from kvladder.gpu.copy.streams import StreamCopier
from tests.connectors.loaded import FakeLoaded
from tests.connectors.mixes import MODELS, vllm_configs
from tests.connectors.planned import FLASH_ATTN, FLASHMLA, Groups, full, start, window
from tests.connectors.runners import RUNNERS, Writes, output
from tests.kit.planting import Fault, plant
from tests.kit.played import GARBAGE, Operation, Played, Violation, plain

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BLOCKS, SLOTS = 16, 8
SMALL: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16}
Place = tuple[int, int]
"""A group, and a block of it."""


def dense() -> Groups:
    return [(3, full(16, **SMALL))]


def latent() -> Groups:
    spec = specs.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)
    return [(3, spec)]


def sliding() -> Groups:
    narrow = specs.SlidingWindowSpec(
        block_size=16, dtype=torch.bfloat16, sliding_window=64, **SMALL
    )
    assert type(narrow) is type(window(16))
    return [(2, full(16, **SMALL)), (2, narrow)]


def hybrid() -> Groups:
    attention = full(32, **SMALL)
    state = specs.MambaSpec(
        block_size=256,
        shapes=((3, 16), (4, 8, 8)),
        dtypes=(torch.bfloat16, torch.bfloat16),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    return [(2, attention), (2, state), (2, state)]


MODELS_OF: dict[str, tuple[Callable[[], Groups], Any]] = {
    "dense": (dense, FLASH_ATTN),
    "latent": (latent, FLASHMLA),
    "sliding": (sliding, FLASH_ATTN),
    "hybrid": (hybrid, FLASH_ATTN),
}


class Rank:
    """A worker of vLLM on the played machine, and the expected content of its blocks."""

    def __init__(
        self,
        folder: Path,
        model: str,
        runner: str,
        patch: pytest.MonkeyPatch,
        layout: str,
        *,
        slowly: bool,
    ) -> None:
        groups, attention = MODELS_OF[model]
        self.run, self.runner, self.patch = RUNNERS[runner], runner, patch
        self.played = Played(keeps_host=True, run_s=1e-4 if slowly else 0.0)
        patch.setattr(torch_utils, "is_pin_memory_available", lambda: True)
        if "PIN_MEMORY" in vars(torch_utils):  # 0.33 asks once
            patch.setattr(torch_utils, "PIN_MEMORY", True)
        self.machine = self.played.machine
        with self.played:
            device = torch.device("cuda", self.machine.device)
            self.cache, self.tensors = start(
                layout, groups(), attention, device=device, blocks=BLOCKS
            )
        self.config, _ = vllm_configs(folder, {"host": "1 MiB"}, MODELS["full"])
        for name in ("get_tp_group", "get_pp_group"):
            group = SimpleNamespace(world_size=1, rank_in_group=0)
            patch.setattr(parallel_state, name, lambda group=group: group)
        self.connector = KVLadderConnector(self.config, KVConnectorRole.WORKER, self.cache)
        assert self.connector.worker is not None
        self.half: WorkerHalf = self.connector.worker
        self.half._make_loaded = FakeLoaded()  # there is no model
        with self.played:
            self.connector.register_kv_caches(self.tensors)
        self.groups = sorted(self.half._pages)
        widest = max(pages.block_bytes for pages in self.half._pages.values())
        self.arena = Arena.create(SLOTS, -(-widest // 4096) * 4096)
        self.attach = Attach(self.arena.handle, (tuple(0 for _ in self.cache.kv_cache_groups),))
        self.wrong: list[str] = []
        self.ended: dict[int, Finished] = {}
        self.deferred = False
        """Whether a step has left slices for the next one."""
        self._number = 0
        self.step()
        copier = self.copier
        with self.played:
            copier._registration._join()
        if slowly:
            copier._slice_bytes, copier._step_s = 1, 4e-4  # one block of "dense" takes 3e-4

    # ---- steps

    def step(
        self,
        *,
        reads: dict[Place, int] | None = None,
        writes: dict[Place, int] | None = None,
        zeroed: Sequence[int] = (),
        copies: Sequence[tuple[int, int]] = (),
        sync: bool = False,
        **work: Any,
    ) -> None:
        """Run a step of vLLM with a step of kvladder, and take its report."""
        tokens = int(bool(reads or writes))
        metadata = StepMetadata(attach=self.attach, **work)
        scheduled = output(
            tokens=tokens, zeroed=zeroed, copies=copies, metadata=metadata, sync=sync
        )
        made = Writes(
            zero=self._zero,
            forward=lambda: self._forward(reads or {}, writes or {}),
            kv_caches=[kv for kv in self.tensors.values() if isinstance(kv, torch.Tensor)],
            blocks=BLOCKS,
            vllm_config=self.config,
        )
        with self.played:
            ended = self.run(self.connector, made, scheduled, self.patch)
        self.deferred |= self._waits()
        found = ended.kv_connector_output
        report = found and found.kv_connector_worker_meta
        for finished in report.ended if report else ():
            self.ended[finished.id] = finished

    def settle(self) -> None:
        """Let the device finish, and steps hand over what is left and report what has ended."""
        self.machine.settle()
        self.step()
        while self._waits() or self.copier._launched:
            self.machine.advance(0.01)
            self.machine.settle()
            self.step()

    @property
    def copier(self) -> StreamCopier:
        copier = self.half._copier
        assert isinstance(copier, StreamCopier)
        return copier

    def _waits(self) -> bool:
        """Return whether slices wait to be handed over."""
        return any(self.copier._waiting.values())

    def _zero(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks, as vLLM's kernel does."""
        places = [(group, block) for group in self.groups for block in blocks]
        zero = [(place, bytes(self._size(place[0]))) for place in places]
        self._queue(1e-5, [], zero)

    def _forward(self, reads: dict[Place, int], writes: dict[Place, int]) -> None:
        wanted = [(place, self.pattern(place, content)) for place, content in reads.items()]
        made = [(place, self.pattern(place, content)) for place, content in writes.items()]
        self._queue(0.02, wanted, made)

    def _queue(
        self,
        seconds: float,
        reads: Sequence[tuple[Place, bytes]],
        writes: Sequence[tuple[Place, bytes]],
    ) -> None:
        def begin() -> None:
            self.wrong += [f"read {place}" for place, data in reads if self.held(place) != data]
            for place, data in writes:
                self._fill(place, bytes([GARBAGE]) * len(data))

        def end() -> None:
            for place, data in writes:
                self._fill(place, data)

        stream = self.machine.current_stream(self.machine.device)
        self.machine.launch(stream, Operation(seconds, begin, end))

    # ---- jobs and bytes

    def save(self, places: Sequence[Place], first: int = 0) -> list[CopyJob]:
        """Return the jobs that save blocks, one for each group, to slots from ``first``."""
        jobs: list[CopyJob] = []
        for group in sorted({group for group, _ in places}):
            blocks = tuple(block for g, block in places if g == group)
            slots = tuple(Slot(first + at) for at, (g, _) in enumerate(places) if g == group)
            jobs.append(CopyJob(self._id(), "offload", blocks, slots, group))
        return jobs

    def load(self, save: CopyJob, blocks: Sequence[int], *, sync: bool) -> Load:
        """Return a load of what ``save`` saved, into other blocks."""
        job = CopyJob(self._id(), "onboard", tuple(blocks), save.slots, save.group)
        return Load(job, f"r{job.id}", sync)

    def _id(self) -> JobId:
        self._number += 1
        return JobId(self._number)

    def _size(self, group: int) -> int:
        return self.half._pages[group].block_bytes

    def pattern(self, place: Place, content: int) -> bytes:
        return Random(f"{place[0]} {content}").randbytes(self._size(place[0]))

    def held(self, place: Place) -> bytes:
        group, block = place
        pages = self.half._pages[group].pages
        return b"".join(plain(page.view)[block].numpy().tobytes() for page in pages)

    def _fill(self, place: Place, data: bytes) -> None:
        group, block = place
        for page in self.half._pages[group].pages:
            part = bytearray(data[page.offset : page.offset + page.size_bytes])
            plain(page.view)[block] = torch.frombuffer(part, dtype=torch.uint8)

    def stored(self, job: CopyJob) -> list[bytes]:
        """Return what a job's slots hold."""
        size = self._size(job.group)
        return [bytes(self.arena.view(slot)[:size]) for slot in job.slots]

    def close(self) -> None:
        with self.played:
            self.connector.shutdown()
        registered = self.played.memory.registered
        self.arena.close()
        assert not registered


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def begin(
        model: str = "dense", runner: str = "V2", layout: str = "LBNHC", *, slowly: bool = False
    ) -> Rank:
        ranks.append(Rank(tmp_path, model, runner, monkeypatch, layout, slowly=slowly))
        return ranks[-1]

    yield begin
    for one in ranks:
        if one.machine.failing:
            one.machine.reset()
            one.copier._launched.clear()
            for copies in one.copier._waiting.values():
                copies.clear()
        one.close()


def places_of(rank: Rank) -> list[Place]:
    """Return two blocks of each group; groups may lie over the same memory."""
    return [(group, 1 + 2 * at + n) for at, group in enumerate(rank.groups) for n in range(2)]


def saves_that_stay(rank: Rank) -> list[CopyJob]:
    """Compute and save blocks that no step writes again: what is stored is what was computed."""
    places = places_of(rank)
    jobs = rank.save(places)
    rank.step(writes=dict.fromkeys(places, 7), saves=jobs)
    assert rank.machine.host_waits == []
    rank.settle()
    for job in jobs:
        assert rank.ended[job.id].ok
        wanted = [rank.pattern((job.group, block), 7) for block in job.blocks]
        assert rank.stored(job) == wanted, "a save stored other bytes"
    return jobs


def saves_of_blocks_given_again(rank: Rank) -> None:
    """The next step zeroes, copies into and computes the blocks of saves in flight."""
    places = places_of(rank)
    jobs = rank.save(places)
    rank.step(writes=dict.fromkeys(places, 7), saves=jobs)
    again = [block for _, block in places]
    rank.step(
        writes=dict.fromkeys(places, 8),
        zeroed=again[:1],
        copies=[(0, block) for block in again[1:2]],
        fence=[job.id for job in jobs],
        late=rank.runner == "V2",
    )
    assert rank.machine.host_waits == []
    rank.settle()
    for job in jobs:
        wanted = [rank.pattern((job.group, block), 7) for block in job.blocks]
        if rank.ended[job.id].ok:
            assert rank.stored(job) == wanted, "a save is reported, and stored other bytes"
        assert rank.ended[job.id].ok == (rank.runner == "V1")


def loads(rank: Rank, *, sync: bool) -> None:
    """Load what was saved into other blocks; the forward pass reads them."""
    jobs = saves_that_stay(rank)
    free = iter(range(1 + 2 * len(rank.groups), BLOCKS))
    work = [rank.load(job, [next(free) for _ in job.blocks], sync=sync) for job in jobs]
    reads = {(one.job.group, block): 7 for one in work for block in one.job.blocks}
    other = {(rank.groups[0], 0): 9}
    if sync:
        rank.step(reads=reads, writes=other, loads=work, sync=True)
    else:
        rank.step(writes=other, loads=work)
        rank.settle()
        assert all(rank.ended[one.job.id].ok for one in work)
        rank.step(reads=reads)
    assert rank.machine.host_waits == []
    rank.settle()
    assert rank.wrong == []


def sleeping(rank: Rank) -> None:
    """The engine sleeps while a save is in flight: its memory is unmapped, and comes back."""
    places = places_of(rank)
    jobs = rank.save(places)
    rank.step(writes=dict.fromkeys(places, 7), saves=jobs)
    with rank.played:
        rank.connector.unregister_kv_caches()
    kv = next(kv for kv in rank.tensors.values() if isinstance(kv, torch.Tensor))
    rank.played.memory.unmap(plain(kv))
    rank.machine.run_on(1.0)
    rank.step(saves=rank.save(places, first=len(places)))
    rank.machine.run_on(1.0)
    rank.played.memory.unmapped.clear()
    with rank.played:
        rank.connector.restore_kv_caches()
    rank.settle()
    assert [rank.ended[job.id].ok for job in jobs] == [True] * len(jobs)


RUNNER = pytest.mark.parametrize("runner", RUNNERS)
MODEL = pytest.mark.parametrize("model", MODELS_OF)


@RUNNER
@MODEL
@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_saves_and_loads_of_real_steps_keep_every_byte(
    model: str, runner: str, layout: str, rank: Callable[..., Rank]
) -> None:
    one = rank(model, runner, layout)
    loads(one, sync=False)
    one.played.check()


@RUNNER
def test_a_step_waits_for_the_loads_that_it_reads(runner: str, rank: Callable[..., Rank]) -> None:
    one = rank("dense", runner)
    loads(one, sync=True)
    one.played.check()


@RUNNER
@MODEL
def test_a_save_of_blocks_given_again_is_right_or_not_reported(
    model: str, runner: str, rank: Callable[..., Rank]
) -> None:
    one = rank(model, runner)
    saves_of_blocks_given_again(one)
    one.played.check()


@RUNNER
@pytest.mark.parametrize("sync", [False, True])
def test_steps_that_leave_slices_for_the_next_keep_every_byte(
    sync: bool, runner: str, rank: Callable[..., Rank]
) -> None:
    one = rank("dense", runner, slowly=True)
    loads(one, sync=sync)
    assert one.deferred
    saves_of_blocks_given_again(one)
    sleeping(one)
    one.played.check()


@RUNNER
def test_an_engine_sleeps_only_after_its_copies(runner: str, rank: Callable[..., Rank]) -> None:
    one = rank("dense", runner)
    sleeping(one)
    one.played.check()


FAULTS: dict[str, tuple[Callable[[Rank], Any], str, Fault]] = {
    "a step writes to blocks without a fence": (
        saves_of_blocks_given_again,
        "V1",
        Fault(WorkerHalf, "_fence", "self._copier.fence(saves)", "pass"),
    ),
    "saves of blocks that were written too early are reported": (
        saves_of_blocks_given_again,
        "V2",
        Fault(WorkerHalf, "_fence", "self._distrusted.update(saves)\n        return", "pass"),
    ),
    "a step does not wait for its loads": (
        partial(loads, sync=True),
        "V2",
        Fault(WorkerHalf, "load", "self._order(self._copier, sync)", "pass"),
    ),
    "saves begin before the forward pass": (
        saves_that_stay,
        "V1",
        Fault(
            WorkerHalf,
            "begin",
            "self._fence(step)",
            "self._fence(step); self._submit_all(step, step.saves, go=True); step.saves = []",
        ),
    ),
    "an engine sleeps during copies": (
        sleeping,
        "V2",
        Fault(WorkerHalf, "detach", "self._copier.drain()", "pass"),
    ),
    "copies begin while the engine sleeps": (
        sleeping,
        "V1",
        Fault(WorkerHalf, "detach", "self._asleep = True", "self._asleep = False"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, rank: Callable[..., Rank]) -> None:
    scenario, runner, fault = FAULTS[name]
    one = rank("dense", runner)
    with pytest.MonkeyPatch.context() as patch:
        plant(fault, patch)
        with pytest.raises((AssertionError, Violation)):
            scenario(one)
