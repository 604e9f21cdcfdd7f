"""A recording has one line a request, tells nothing of tokens, and never hurts serving."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.keys import BlockKey
from kvladder.tiers.files.disk import Disk
from kvladder.traces import recorder as recording
from kvladder.traces.files import TraceFiles
from kvladder.traces.reader import read_trace
from kvladder.traces.recorder import Recorder
from tests.kit.disk import FakeDisk
from tests.patience import until

TOKENS = 16
ROOT = Path("/recordings")
PATH = ROOT / "trace.jsonl"


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(bytes([number]) * 32) for number in numbers]


class Held(Disk):
    """A disk whose writes wait until they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.waits = threading.Event()

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self.waits.set()
        self.released.wait()
        return super().pwritev(fd, buffers, offset)


class Recording:
    """A recorder with what it said, on any disk."""

    def __init__(self, path: Path, disk: Disk | None = None, **limits: int) -> None:
        self.said: list[str] = []
        self.now_s = 5.0
        limits = {"size_bytes": 1 << 20, "files": 3, **limits}
        self.recorder = Recorder(
            TraceFiles(path, disk=disk, **limits),
            now=lambda: self.now_s,
            say=lambda _kind, text: self.said.append(text),
            block_tokens=TOKENS,
        )

    def drained(self) -> None:
        """Wait until the thread has taken what was told."""
        until(lambda: not self.recorder._events)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def closing() -> Iterator[Callable[[Recording], Recording]]:
    made: list[Recording] = []

    def add(one: Recording) -> Recording:
        made.append(one)
        return one

    yield add
    for one in made:
        one.recorder.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_lookup_is_a_line(path: Path) -> None:
    one = Recording(path)
    one.now_s = 5.25
    one.recorder.asked(keys(1, 2))
    one.now_s = 6
    one.recorder.asked(keys(1, 3))
    one.recorder.close()
    first, second = lines(path)
    assert first["timestamp"] == 250
    assert second["timestamp"] == 1000
    assert first["input_length"] == 2 * TOKENS
    assert first["output_length"] == 0
    assert "order" not in first
    assert first["hash_ids"][0] == second["hash_ids"][0]
    assert len({*first["hash_ids"], *second["hash_ids"]}) == 3
    assert one.recorder.stats() == {
        "requests": 2,
        "bytes": path.stat().st_size,
        "dropped": 0,
        "unnamed": 0,
        "failures": 0,
    }


def test_a_request_that_is_looked_up_again_is_one_line(path: Path) -> None:
    one = Recording(path)
    for _ in range(3):
        one.recorder.asked(keys(1, 2))
    one.recorder.saves()
    one.recorder.asked(keys(1, 2))  # another request for the same
    one.recorder.close()
    assert len(lines(path)) == 2


def test_requests_with_names_are_lines_in_the_order_of_their_arrival(path: Path) -> None:
    one = Recording(path)
    one.recorder.arrived("a", keys(1), 20)
    one.now_s = 6
    one.recorder.arrived("b", (), 40)
    one.recorder.asked(keys(9))  # a part of one of them
    one.recorder.arrived("a", keys(1), 20)  # once more, as after a preemption
    one.recorder.finished("b", keys(1, 2), 7)
    one.recorder.arrived("c", (), 40)  # never has names
    one.recorder.arrived("d", (), 3)  # has no whole block
    one.recorder.finished("c", (), 1)
    one.recorder.finished("d", (), 1)
    one.recorder.finished("stranger", keys(1), 1)
    one.recorder.finished("a", keys(1), 3)
    one.recorder.close()
    found = [
        (line["input_length"], line["output_length"], len(line["hash_ids"])) for line in lines(path)
    ]
    assert found == [(20, 3, 1), (40, 7, 2), (3, 1, 0)]
    assert one.recorder.counts.unnamed == 1


def test_a_line_has_what_was_asked_for_and_saved_if_that_is_told(path: Path) -> None:
    one = Recording(path)
    for name, asked in (("a", (1, 2)), ("b", None), ("c", (1, 9))):
        one.recorder.arrived(name, keys(1, 2), 40)
        one.recorder.finished(name, keys(1, 2), 30, asked=asked, answer=keys(3)[: name == "a"])
    one.recorder.arrived("d", keys(1, 2, 3), 50)
    one.recorder.close()
    first, second, third, last = lines(path)
    assert first["output_hash_ids"] == last["hash_ids"][2:]
    assert (first["asked"], third["asked"]) == ([1, 2], [1, 2])
    assert not {"asked", "output_hash_ids"} & second.keys()
    assert all("order" in line for line in (first, second, third, last))
    assert one.recorder._open_blocks == len(last["hash_ids"])  # the last one never finished


def test_a_line_has_its_place_among_all_arrivals_saves_and_ends(path: Path) -> None:
    one = Recording(path)
    told = one.recorder
    told.arrived("a", keys(1), 20)
    told.arrived("b", keys(2), 20)
    told.saved("a")
    told.arrived("c", keys(3), 20)
    told.saved("a")  # once more, as after a preemption
    told.saved("stranger")
    told.finished("b", (), 1)  # its prompt was not saved
    told.arrived("d", keys(4), 20)
    told.finished("a", (), 1)
    told.finished("c", (), 1)
    one.recorder.close()  # before d has finished
    assert [line["order"] for line in lines(path)] == [[1, 3, 7], [2, 5, 5], [4, 8, 8], [6, 9, 9]]


def test_closing_writes_requests_that_have_not_finished(path: Path) -> None:
    one = Recording(path)
    one.recorder.arrived("a", keys(1), 20)
    one.recorder.close()
    one.recorder.close()
    one.recorder.arrived("late", keys(1), 20)
    assert [line["output_length"] for line in lines(path)] == [0]
    assert not [thread for thread in threading.enumerate() if thread.name == "kvladder-record"]


def test_a_request_that_never_ends_holds_up_only_so_many(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "OPEN_MAX", 3)
    one = Recording(path)
    one.recorder.arrived("stuck", keys(1), 20)
    for number in range(5):
        one.recorder.arrived(number, keys(2), 20)
        one.recorder.finished(number, keys(2), number)
    until(lambda: one.recorder.counts.requests >= 3)
    one.recorder.close()
    assert [line["output_length"] for line in lines(path)] == [0, 0, 1, 2, 3, 4]


def test_ids_cannot_be_linked_to_keys_or_to_another_recording(path: Path) -> None:
    found = []
    for _ in range(2):
        one = Recording(path)
        one.recorder.asked(keys(1, 2))
        one.recorder.close()
        found.append(lines(path)[0]["hash_ids"])
    assert not {*found[0]} & {*found[1]}
    assert all(0 <= number < 2**53 for number in (*found[0], *found[1]))  # exact as a double
    text = path.read_text()
    assert not any(str(int.from_bytes(key[:8])) in text or key.hex() in text for key in keys(1, 2))


def named(*prefix: int) -> BlockKey:
    return BlockKey(hashlib.sha256(bytes(prefix)).digest())


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 255), max_size=6, unique=True),
        st.integers(0, 40),
        st.integers(0, 2000),
    ),
    min_size=1,
    max_size=30,
)


@given(told=requests)
def test_what_is_recorded_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[list[int], int, int]]
) -> None:
    path = tmp_path_factory.mktemp("round") / "trace.jsonl"
    one = Recording(path, size_bytes=500, files=100)
    told = [([1], 0, 0), *told]
    for number, (blocks, output, pause_ms) in enumerate(told):
        one.now_s += pause_ms / 1000
        prefix = [named(*blocks[: n + 1]) for n in range(len(blocks))]
        one.recorder.arrived(number, prefix, len(blocks) * TOKENS + 3)
        one.recorder.finished(number, prefix, output)
    one.recorder.close()
    trace = read_trace(path, block_tokens=TOKENS)
    assert [(len(r.blocks), r.output_tokens) for r in trace.requests] == [
        (len(blocks), output) for blocks, output, _ in told
    ]
    prefixes = {tuple(blocks[: n + 1]) for blocks, _, _ in told for n in range(len(blocks))}
    assert trace.unique == len(prefixes)
    gaps = [b.at_s - a.at_s for a, b in zip(trace.requests, trace.requests[1:], strict=False)]
    assert gaps == pytest.approx([ms / 1000 for _, _, ms in told[1:]], abs=0.0011)
    assert not trace.warnings


# ---- files


@pytest.mark.slow
def test_files_are_rotated_and_bounded(path: Path) -> None:
    one = Recording(path, size_bytes=300, files=3)
    for number in range(200):
        one.recorder.asked(keys(number))
        one.drained()
    one.recorder.close()
    kept = sorted(path.parent.iterdir())
    assert [file.name for file in kept] == ["trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"]
    assert all(0 < file.stat().st_size <= 300 for file in kept)
    assert all(lines(file) for file in kept)
    assert path.stat().st_mode & 0o777 == 0o600
    times = [request.at_s for request in read_trace(path).requests]
    assert times == sorted(times)


def test_one_file_alone_is_bounded_too(path: Path) -> None:
    one = Recording(path, size_bytes=300, files=1)
    for number in range(50):
        one.recorder.asked(keys(number))
        one.drained()
    one.recorder.close()
    assert [file.name for file in path.parent.iterdir()] == ["trace.jsonl"]
    assert path.stat().st_size <= 300


def test_a_line_longer_than_a_file_is_dropped(path: Path) -> None:
    one = Recording(path, size_bytes=200, files=2)
    one.recorder.asked(keys(*range(100)))
    one.recorder.asked(keys(1))
    one.recorder.close()
    assert (one.recorder.counts.dropped, len(lines(path))) == (1, 1)


def test_an_earlier_recording_is_kept_beside(path: Path) -> None:
    path.write_text("earlier\n")
    one = Recording(path)
    one.recorder.asked(keys(1))
    one.recorder.close()
    assert path.with_name("trace.jsonl.1").read_text() == "earlier\n"
    assert len(lines(path)) == 1


# ---- faults


def fake(**options: Any) -> FakeDisk:
    return FakeDisk(ROOT, **options)


def content(disk: FakeDisk) -> bytes:
    return disk.content(PATH)


def test_a_full_disk_is_said_once_and_serving_goes_on() -> None:
    disk = fake(capacity_bytes=250)
    one = Recording(PATH, disk)
    for number in range(20):
        one.recorder.asked(keys(number))
    one.drained()
    until(lambda: one.recorder.counts.requests + one.recorder.counts.failures == 20)
    assert len(one.said) == 1
    assert "requests are not recorded: /recordings/trace.jsonl: " in one.said[0]
    assert one.recorder.counts.failures == one.recorder.counts.dropped > 10
    disk.capacity_bytes = None
    one.recorder.asked(keys(99))
    one.recorder.close()
    whole = content(disk).splitlines()
    assert len(whole) == one.recorder.counts.requests
    assert all(json.loads(text)["hash_ids"] for text in whole)
    assert not disk.open_fds


@pytest.mark.parametrize("number", range(1, 13))
def test_any_failing_call_costs_lines_and_leaves_whole_ones(number: int) -> None:
    disk = fake()
    disk.fail_at, disk.fail_errno = number, errno.EIO
    one = Recording(PATH, disk, size_bytes=200, files=2)
    for block in range(8):
        one.recorder.asked(keys(block))
    one.recorder.close()
    counts = one.recorder.counts
    assert counts.requests + counts.dropped == 8
    assert counts.requests >= 7
    for name in disk.files():
        for text in disk.content(Path(name)).splitlines():
            assert json.loads(text)
    assert len(one.said) == counts.failures <= 1


def test_a_disk_that_hangs_costs_lines_and_no_time(
    path: Path, monkeypatch: pytest.MonkeyPatch, closing: Callable[[Recording], Recording]
) -> None:
    monkeypatch.setattr(recording, "EVENTS_MAX", 10)
    disk = Held()
    one = closing(Recording(path, disk))
    one.recorder.asked(keys(0))
    assert disk.waits.wait(60)
    for number in range(1, 30):
        one.recorder.asked(keys(number))
    assert one.recorder.counts.dropped == 29 - 10
    disk.released.set()
    one.recorder.close()
    assert len(lines(path)) == 11


def test_the_blocks_that_wait_are_bounded(
    path: Path, monkeypatch: pytest.MonkeyPatch, closing: Callable[[Recording], Recording]
) -> None:
    monkeypatch.setattr(recording, "BLOCKS_MAX", 10)
    disk = Held()
    one = closing(Recording(path, disk))
    one.recorder.asked(keys(0))
    assert disk.waits.wait(60)
    for first in range(1, 5):
        one.recorder.asked(keys(first, 100, 101, 102))
    assert one.recorder.counts.dropped == 2
    disk.released.set()


def test_blocks_that_were_written_make_room_for_others(
    path: Path, monkeypatch: pytest.MonkeyPatch, closing: Callable[[Recording], Recording]
) -> None:
    monkeypatch.setattr(recording, "BLOCKS_MAX", 5)
    one = closing(Recording(path))
    counts = one.recorder.counts
    for number in range(1, 6):
        one.recorder.asked(keys(number, 100))
        until(lambda: counts.requests + counts.dropped >= number)  # noqa: B023 - it ends here
    assert counts.dropped == 0


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "CLOSE_S", 0.01)
    disk = Held()
    one = Recording(path, disk)
    one.recorder.asked(keys(0))
    assert disk.waits.wait(60)
    one.recorder.close()
    assert one.said == [f"{path} does not answer: the recording is cut"]
    disk.released.set()
    one.recorder._thread.join(60)


def test_told(path: Path) -> None:
    """Several threads may tell at once, and no request is lost or written twice."""
    one = Recording(path)

    def tell(first: int) -> None:
        for number in range(100):
            one.recorder.arrived((first, number), keys(first), 20)
            one.recorder.finished((first, number), keys(first), number)

    threads = [threading.Thread(target=tell, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.recorder.close()
    outputs: Sequence[int] = sorted(line["output_length"] for line in lines(path))
    assert outputs == sorted([*range(100)] * 4)
