"""Every copier against plain indexing, over every layout that engines use."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from kvladder.arena import Arena, Slot
from kvladder.errors import LayoutError
from kvladder.gpu.copy.copier import (
    SHORT_BYTES,
    Copier,
    CopyJob,
    Direction,
    JobId,
    ThreadedCopier,
)
from kvladder.gpu.copy.cpu import CpuCopier
from kvladder.gpu.copy.pages import BlockPages, Parts, RankShare, copy_tokens
from kvladder.gpu.copy.streams import StreamCopier
from tests.kit.played import PlayedDevice
from tests.patience import PATIENCE_S

BLOCKS, LAYERS, HEADS, TOKENS, WIDTH = 12, 3, 2, 8, 16
PAGE = HEADS * TOKENS * WIDTH * 4
SLOT = 16 << 10
Tensors = dict[str, torch.Tensor]


def layers_outside() -> Tensors:
    kv = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    return {f"layer{i}": kv[i] for i in range(LAYERS)}


def blocks_outside() -> Tensors:
    kv = torch.randn(BLOCKS, LAYERS, HEADS, TOKENS, WIDTH)
    return {f"layer{i}": kv[:, i] for i in range(LAYERS)}


def tokens_before_heads() -> Tensors:
    kv = torch.randn(LAYERS, BLOCKS, TOKENS, HEADS, WIDTH).transpose(2, 3)
    return {f"layer{i}": kv[i] for i in range(LAYERS)}


def separate() -> Tensors:
    return {f"layer{i}": torch.randn(BLOCKS, HEADS, TOKENS, WIDTH) for i in range(LAYERS)}


def kernel_blocks() -> Tensors:
    half = torch.randn(LAYERS, 2 * BLOCKS, HEADS, TOKENS // 2, WIDTH)
    return {f"layer{i}": half[i] for i in range(LAYERS)}


def uneven() -> Tensors:
    return {
        "a": torch.randn(BLOCKS, 1, TOKENS, 9),
        "b": torch.randn(BLOCKS, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16),
        "c": torch.randint(0, 255, (BLOCKS, 1, 3, 7), dtype=torch.uint8),
    }


SHAPES = [
    layers_outside, blocks_outside, tokens_before_heads, separate, kernel_blocks, uneven,
]  # fmt: skip
Make = Callable[[BlockPages, Arena, int], Copier]


def on_cpu(pages: BlockPages, arena: Arena, offset: int) -> Copier:
    return CpuCopier({0: RankShare(pages, offset)}, arena)


def on_streams(pages: BlockPages, arena: Arena, offset: int) -> Copier:
    return streams({0: RankShare(pages, offset)}, arena, PlayedDevice())


def by_staging(pages: BlockPages, arena: Arena, offset: int) -> Copier:
    small = 3 * pages.block_bytes  # so that a job takes several batches
    device = PlayedDevice(batched=False)
    return streams({0: RankShare(pages, offset)}, arena, device, staging_bytes=small)


def streams(parts: Parts, arena: Arena, device: PlayedDevice, **options: int) -> StreamCopier:
    """Return a copier with a registered arena and tensors of the device."""
    copier = StreamCopier(device.parts(parts), arena, device, **options)
    device.work_in_background()
    return copier


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(10, SLOT)
    yield arena
    arena.close()


@pytest.fixture(params=[on_cpu, on_streams, by_staging])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def job(number: int, direction: Direction, pairs: dict[int, int]) -> CopyJob:
    slots = tuple(Slot(slot) for slot in pairs.values())
    return CopyJob(JobId(number), direction, tuple(pairs), slots)


def as_bytes(tensors: Tensors, block: int) -> bytes:
    """A block's bytes in the order of its pages, by torch alone."""
    parts: list[bytes] = []
    for tensor in tensors.values():
        whole = tensor.reshape(BLOCKS, -1, *tensor.shape[1:])[block]
        if not tensor.is_contiguous() and tensor.stride(1) < tensor.stride(2):
            whole = whole.transpose(-2, -3)  # the bytes are stored in memory order
        parts.append(whole.contiguous().view(torch.uint8).flatten().numpy().tobytes())
    return b"".join(parts)


def run(copier: Copier, work: CopyJob, size: int) -> None:
    copier.submit(work)
    copier.wait([work.id])
    (finished,) = copier.poll()
    assert (finished.id, finished.ok, finished.error) == (work.id, True, "")
    assert finished.bytes == len(work.blocks) * size


@pytest.mark.parametrize("shape", SHAPES)
def test_offloaded_bytes_come_back_into_other_blocks(
    shape: Callable[[], Tensors], make: Make, arena: Arena
) -> None:
    torch.manual_seed(1)
    tensors = shape()
    sizes = dict.fromkeys(tensors, PAGE) if shape is kernel_blocks else None
    pages = BlockPages.of(tensors, blocks=BLOCKS, page_bytes=sizes)
    copier = make(pages, arena, 128)
    before = {block: as_bytes(tensors, block) for block in range(BLOCKS)}
    pairs = {0: 4, 1: 5, 2: 6, 5: 1, 9: 0}  # a run of neighbours, and two single blocks
    run(copier, job(1, "offload", pairs), pages.block_bytes)
    for block, slot in pairs.items():
        assert bytes(arena.view(Slot(slot))[128 : 128 + pages.block_bytes]) == before[block]
    moved = {3: 4, 4: 5, 11: 0, 5: 6}
    run(copier, job(2, "onboard", moved), pages.block_bytes)
    copier.close()
    origin = {slot: block for block, slot in pairs.items()}
    for block in range(BLOCKS):
        source = origin[moved[block]] if block in moved else block
        assert as_bytes(tensors, block) == before[source], block


def test_parts_of_two_ranks_lie_side_by_side_in_a_slot(make: Make, arena: Arena) -> None:
    ranks = [layers_outside(), layers_outside()]
    described = [BlockPages.of(tensors, blocks=BLOCKS) for tensors in ranks]
    size = described[0].block_bytes
    for index, pages in enumerate(described):
        copier = make(pages, arena, index * size)
        run(copier, job(index, "offload", {7: 2}), size)
        copier.close()
    stored = bytes(arena.view(Slot(2)))
    assert stored[: 2 * size] == as_bytes(ranks[0], 7) + as_bytes(ranks[1], 7)
    assert not any(stored[2 * size :])


@pytest.mark.parametrize("pairs", [{BLOCKS: 0}, {0: 10}, {-1: 0}, {0: -1}])
def test_places_that_do_not_exist_fail_the_job_and_touch_nothing(
    pairs: dict[int, int], make: Make, arena: Arena
) -> None:
    tensors = layers_outside()
    before = [as_bytes(tensors, block) for block in range(BLOCKS)]
    copier = make(BlockPages.of(tensors, blocks=BLOCKS), arena, 0)
    copier.submit(job(1, "onboard", {1: 1, **pairs}))
    copier.wait([JobId(1)])
    (finished,) = copier.poll()
    copier.close()
    assert (finished.ok, finished.bytes) == (False, 0)
    assert "of" in finished.error
    assert [as_bytes(tensors, block) for block in range(BLOCKS)] == before


def test_closing_ends_submitted_jobs_and_still_reports_them(make: Make, arena: Arena) -> None:
    tensors = layers_outside()
    copier = make(BlockPages.of(tensors, blocks=BLOCKS), arena, 0)
    for index in range(5):
        copier.submit(job(index, "offload", {index: index}))
    copier.close()
    copier.close()
    assert {f.id for f in copier.poll() if f.ok} == {0, 1, 2, 3, 4}
    assert bytes(arena.view(Slot(4)))[: 3 * PAGE] == as_bytes(tensors, 4)
    copier.submit(job(9, "offload", {1: 1}))
    assert [(f.id, f.ok) for f in copier.poll()] == [(9, False)]


def test_memory_that_moved_is_found_at_its_new_address(make: Make, arena: Arena) -> None:
    kv = torch.randn(BLOCKS, HEADS, TOKENS, WIDTH)
    pages = BlockPages.of({"kv": kv}, blocks=BLOCKS)
    copier = make(pages, arena, 0)
    run(copier, job(1, "offload", {0: 0}), pages.block_bytes)
    copier.drain()
    storage = kv.untyped_storage()
    before, size = kv.data_ptr(), storage.nbytes()
    storage.resize_(0)
    taken = [torch.empty(size, dtype=torch.uint8)]  # it has moved afterwards
    storage.resize_(size)
    while kv.data_ptr() == before and len(taken) < 100:
        storage.resize_(0)
        taken.append(torch.empty(size, dtype=torch.uint8))
        storage.resize_(size)
    copier.moved()
    if isinstance(copier, StreamCopier):
        assert isinstance(copier.device, PlayedDevice)
        copier.device.own(kv)
    kv.fill_(7.0)
    run(copier, job(2, "offload", {3: 1}), pages.block_bytes)
    copier.close()
    assert bytes(arena.view(Slot(1)))[: pages.block_bytes] == as_bytes({"kv": kv}, 3)


def test_waiting_for_unknown_or_ended_jobs_returns_at_once(make: Make, arena: Arena) -> None:
    pages = BlockPages.of(layers_outside(), blocks=BLOCKS)
    copier = make(pages, arena, 0)
    run(copier, job(1, "offload", {0: 0}), pages.block_bytes)
    copier.wait([JobId(1), JobId(77)])
    copier.fence([JobId(1), JobId(77)])
    copier.close()


class Stepwise(ThreadedCopier):
    """Copies nothing; each step of a job is allowed by the test."""

    def __init__(self) -> None:
        self.log: list[int] = []
        self.allowed = threading.Semaphore(0)
        self.begun = threading.Event()
        super().__init__(name="stepwise")

    def block_bytes(self, group: int) -> int:
        return SHORT_BYTES // 2

    def submit(self, job: CopyJob, *, by_layer: bool = False, urgent: bool = False) -> None:
        del by_layer
        self._submit(job, self._steps(job), urgent=urgent)

    def _steps(self, job: CopyJob) -> Iterator[Sequence[str]]:
        for _ in job.blocks:
            self.begun.set()
            self.allowed.acquire()
            self.log.append(job.id)
            yield [f"layer{len(self.log)}"]


def test_a_load_overtakes_a_save_in_progress() -> None:
    copier = Stepwise()
    copier.submit(job(1, "offload", {0: 0, 1: 1, 2: 2}))
    assert copier.begun.wait(PATIENCE_S)
    copier.submit(job(2, "onboard", {0: 0, 1: 1}))
    for _ in range(5):
        copier.allowed.release()
    copier.wait([JobId(1), JobId(2)])
    copier.close()
    assert copier.log == [1, 2, 2, 1, 1]


@pytest.mark.parametrize("urgent", [False, True])
def test_short_loads_and_urgent_ones_overtake_a_long_load_in_progress(urgent: bool) -> None:
    copier = Stepwise()
    copier.submit(job(1, "onboard", {0: 0, 1: 1, 2: 2}))
    assert copier.begun.wait(PATIENCE_S)
    count = 3 if urgent else 2
    copier.submit(job(2, "onboard", dict(enumerate(range(count)))), urgent=urgent)
    copier.submit(job(3, "onboard", {0: 0, 1: 1, 2: 2}))
    for _ in range(6 + count):
        copier.allowed.release()
    copier.wait([JobId(number) for number in (1, 2, 3)])
    copier.close()
    assert copier.log == [1, *[2] * count, 1, 1, 3, 3, 3]


def test_a_fence_for_a_layer_returns_once_that_layer_is_loaded() -> None:
    copier = Stepwise()
    copier.submit(job(1, "onboard", {0: 0, 1: 1, 2: 2}))
    for number in (1, 2):
        copier.allowed.release()
        copier.fence([JobId(1)], f"layer{number}")
        assert copier.log == [1] * number
        assert copier.poll() == []
    copier.allowed.release()
    copier.fence([JobId(1)], "a layer that it does not know")
    [finished] = copier.poll()
    assert finished.ok
    copier.fence([JobId(1), JobId(7)], "layer1")
    copier.close()


def test_a_fence_returns_only_after_its_job_has_ended() -> None:
    copier = Stepwise()
    copier.submit(job(1, "offload", {0: 0}))
    passed = threading.Event()

    def fence() -> None:
        copier.fence([JobId(1)])
        passed.set()

    thread = threading.Thread(target=fence)
    thread.start()
    assert copier.begun.wait(PATIENCE_S)
    assert not passed.is_set()
    copier.allowed.release()
    assert passed.wait(PATIENCE_S)
    thread.join()
    copier.close()
    assert copier.log == [1]


class OneAtATime(Stepwise):
    """Allows a job only when a fence of the test's thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = OnWait(self.allowed.release)

    def _serve(self) -> None:
        self.begun.wait()  # until the condition is the one above
        super()._serve()

    def _steps(self, job: CopyJob) -> Iterator[Sequence[str]]:
        for steps in super()._steps(job):
            del steps
            yield ()  # no waiter is woken before the job has ended


class OnWait(threading.Condition):
    """Calls back before the thread that made it waits."""

    def __init__(self, called: Callable[[], None]) -> None:
        super().__init__()
        self._called = called
        self._thread = threading.get_ident()

    def wait(self, timeout: float | None = None) -> bool:
        if threading.get_ident() == self._thread:
            self._called()
        return super().wait(timeout)


@pytest.mark.parametrize("ids", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_a_fence_returns_after_the_last_of_several_jobs_has_ended(ids: Sequence[int]) -> None:
    copier = OneAtATime()
    for number in (1, 2, 3):
        copier.submit(job(number, "offload", {number: number}))
    copier.begun.set()
    copier.fence([JobId(number) for number in ids])
    over = [*copier.log]
    copier.allowed.release(len(ids))
    copier.close()
    assert over == [1, 2, 3]


def test_layouts_that_would_have_to_be_guessed_are_refused() -> None:
    spread = torch.zeros(HEADS, BLOCKS, TOKENS, WIDTH).transpose(0, 1)
    with pytest.raises(LayoutError, match="expected the bytes of a block to be contiguous"):
        BlockPages.of({"x": spread}, blocks=BLOCKS)
    with pytest.raises(LayoutError, match="12 blocks"):
        BlockPages.of({"x": torch.zeros(BLOCKS + 1, 2, 4, 4)}, blocks=BLOCKS)
    layers_first = torch.zeros(2 * BLOCKS, BLOCKS, 64)
    with pytest.raises(LayoutError, match=r"24, 12, 64.*one tensor for each layer"):
        BlockPages.of({"x": layers_first}, blocks=BLOCKS)
    with pytest.raises(LayoutError, match=r"6144 bytes.*expected 256"):
        BlockPages.of({"x": layers_first}, blocks=BLOCKS, page_bytes={"x": 256})
    with pytest.raises(LayoutError, match=r"512 bytes.*expected 500"):
        BlockPages.of({"x": torch.zeros(BLOCKS, 2, 4, 16)}, blocks=BLOCKS, page_bytes={"x": 500})
    with pytest.raises(LayoutError, match="do not overlap"):
        BlockPages.of({"x": torch.zeros(1, 4, 4).expand(BLOCKS, 4, 4)}, blocks=BLOCKS)
    strided = torch.zeros(BLOCKS * 100, dtype=torch.uint8)
    woven = {
        name: strided[at:].as_strided((BLOCKS - 1, 40), (100, 1))
        for name, at in [("a", 0), ("b", 40), ("c", 80)]
    }  # c's bytes are a's in the next block
    with pytest.raises(LayoutError, match="a and c overlap"):
        BlockPages.of(woven, blocks=BLOCKS - 1)
    whole = torch.zeros(BLOCKS, 64)
    with pytest.raises(LayoutError, match="a and b overlap"):
        BlockPages.of({"a": whole[:, :40], "b": whole[:, 32:]}, blocks=BLOCKS)
    with pytest.raises(LayoutError, match="at least one"):
        BlockPages.of({}, blocks=BLOCKS)


def test_layers_that_share_their_kv_are_stored_once() -> None:
    own = layers_outside()
    shared = {**own, "again": own["layer1"]}
    pages = BlockPages.of(shared, blocks=BLOCKS)
    assert pages.block_bytes == LAYERS * PAGE
    assert pages.describe() == f"layer0={PAGE};layer1,again={PAGE};layer2={PAGE}"


def test_layers_that_lie_together_are_one_copy() -> None:
    together = BlockPages.of(blocks_outside(), blocks=BLOCKS)
    assert [page.size_bytes for page in together.pages] == [LAYERS * PAGE]
    apart = BlockPages.of(layers_outside(), blocks=BLOCKS)
    assert [page.size_bytes for page in apart.pages] == [PAGE] * LAYERS
    assert together.describe() == apart.describe()  # a slot holds the same


def test_each_group_of_layers_has_its_own_place_and_size(make: Make, arena: Arena) -> None:
    first, second = layers_outside(), uneven()
    groups = {0: first, 2: second}
    parts = {g: RankShare(BlockPages.of(t, blocks=BLOCKS), 64 * g) for g, t in groups.items()}
    copier: Copier = CpuCopier(parts, arena)
    if make is not on_cpu:
        copier.close()
        device = PlayedDevice(batched=make is on_streams)
        copier = streams(parts, arena, device, staging_bytes=1)
    before = {g: [as_bytes(t, block) for block in range(BLOCKS)] for g, t in groups.items()}
    for number, (g, pairs) in enumerate([(0, {1: 3, 2: 4}), (2, {1: 5, 3: 6})]):
        copier.submit(replace(job(number, "offload", pairs), group=g))
        copier.wait([JobId(number)])
        for block, slot in pairs.items():
            stored = bytes(arena.view(Slot(slot))[64 * g :][: len(before[g][block])])
            assert stored == before[g][block]
    for tensor in second.values():
        tensor.zero_()
    copier.submit(replace(job(9, "onboard", {1: 5, 3: 6}), group=2))
    copier.wait([JobId(9)])
    assert [as_bytes(second, block) for block in (1, 3)] == [before[2][1], before[2][3]]
    assert copier.poll()[-1].bytes == 2 * len(before[2][1])
    copier.close()


def test_the_element_of_a_block_is_known_if_all_parts_share_it() -> None:
    heads = {"k": torch.zeros(4, 16, 2, 64), "v": torch.zeros(4, 16, 2, 64)}
    assert BlockPages.of(heads, blocks=4).element == ("float32", 64)
    permuted = {"k": torch.zeros(4, 2, 16, 64).transpose(1, 2)}
    assert BlockPages.of(permuted, blocks=4).element == ("float32", 64)
    across = {"k": torch.zeros(4, 16, 64, 2).transpose(2, 3)}
    assert BlockPages.of(across, blocks=4).element == ("float32", 0)
    mixed = {**heads, "state": torch.zeros(4, 8, dtype=torch.bfloat16)}
    assert BlockPages.of(mixed, blocks=4).element == ("", 0)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4])
def test_u19_a_partial_copy_writes_the_first_tokens_alone(bits: int, tokens: int) -> None:
    kind = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    memory = torch.full((3, 2, 4, 5), 0x5A, dtype=kind)
    source = torch.arange(40, dtype=kind).reshape(2, 4, 5)
    memory[1] = source
    copy_tokens(memory, source=1, target=2, tokens=tokens, axis=2)
    assert (memory[2, :, :tokens] == source[:, :tokens]).all()
    assert (memory[2, :, tokens:] == 0x5A).all()
    assert (memory[1] == source).all()
    assert (memory[0] == 0x5A).all()


@pytest.mark.parametrize(("tokens", "axis"), [(-1, 2), (5, 2), (1, 0), (1, 4)])
def test_u19_a_wrong_partial_copy_is_refused(tokens: int, axis: int) -> None:
    memory = torch.zeros((3, 2, 4, 5))
    with pytest.raises(ValueError, match="expected"):
        copy_tokens(memory, source=1, target=2, tokens=tokens, axis=axis)
