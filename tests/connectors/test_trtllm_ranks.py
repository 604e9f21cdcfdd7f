"""Ranks of TensorRT-LLM that join late, and foreign clients at their socket."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvladder.arena import Arena, ArenaHandle
from kvladder.connectors.listener import connect
from kvladder.connectors.trtllm.options import STACK
from kvladder.connectors.trtllm.ranks import HELLO_MAX, Rank, Ranks
from kvladder.connectors.trtllm.step import Meeting, RankHello
from kvladder.gpu.copy.copier import Copier, Finished, JobId
from kvladder.gpu.copy.cpu import CpuCopier
from kvladder.gpu.copy.pages import Parts
from kvladder.notices import Notices
from tests.connectors.executor import BLOCK, Executor
from tests.patience import until

FIELDS = {"dtype": "bf16"}


class Said(Notices):
    """Notices that a test reads."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.texts: list[str] = []

    def say(self, kind: str, message: str) -> None:
        self.texts.append(message)


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


class DeviceCopier(CpuCopier):
    """A copier of a device that registers the arena."""

    is_over = False

    @property
    def settled(self) -> bool:
        return self.is_over


@pytest.mark.parametrize("whole", [True, False])
def test_a_rank_joins_once_its_device_has_registered_the_whole_arena(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("model: {fingerprint: w}\narena: {size: 8 MiB}\ntiers: [{type: host}]\n")
    monkeypatch.setenv(STACK, str(path))
    prompt = list(range(10 * BLOCK))
    device, arenas = object(), list[Arena]()

    def begin(parts: Parts, arena: Arena) -> Copier:
        arena.admit(device, 0)
        arenas.append(arena)
        return DeviceCopier(parts, arena)

    engine = Executor(ranks=2)
    monkeypatch.setattr("kvladder.connectors.trtllm.worker.copier_for", begin)
    for _ in range(3):
        assert not engine.run(prompt).saves
    [arena] = arenas
    arena.admit(device, arena.slots - (0 if whole else 1))
    monkeypatch.setattr(DeviceCopier, "is_over", True)
    if whole:
        engine.until(lambda: engine.scheduler._cache.complete)
        assert engine.run(prompt).saves
        manager = engine.scheduler._cache.manager
        assert manager.stats()["ranks"]["clients"] == {f"process {os.getpid()}": 1}
        for line in ("ranks' connections: 1 of 512", "a message has at most 16 MiB, before"):
            assert line in manager.describe()
    else:
        for _ in range(3):
            assert not engine.run(prompt).saves
        found = f"its device reaches {arena.slots - 1} of {arena.slots} slots"
        assert f"rank 1 caches nothing: {found}; make arena.size smaller" in caplog.text
        arena.admit(device, arena.slots)  # as a copier does at its end
    engine.close()


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def ranks(said: Said) -> Iterator[Ranks]:
    found = Ranks(1, FIELDS, said)
    yield found
    found.close()


def meeting(ranks: Ranks, secret: bytes | None = None) -> Meeting:
    handle = ArenaHandle(os.getpid(), 0, 1, 4096)
    return Meeting(ranks.address, handle, 4096, ranks.secret if secret is None else secret)


def test_messages_of_foreign_clients_are_refused_and_never_run(
    ranks: Ranks, said: Said, tmp_path: Path
) -> None:
    encoded = msgspec.msgpack.encode(RankHello(1, b"guessed", FIELDS))
    unreadable = encoded.replace(b"bf16", b"\xff" * 4)
    for sent in (
        pickle.dumps(Runs(tmp_path / "ran")),
        b"",
        b"\xc1",
        unreadable,
        encoded,
        encoded[:-1],
    ):
        count = len(said.texts)
        with connect(ranks.address) as connection:
            connection.send_bytes(sent)
            until(lambda count=count: len(said.texts) > count)  # type: ignore[misc]
        assert "was refused" in said.texts[-1]
    assert not (tmp_path / "ran").exists()
    with connect(ranks.address) as connection:
        os.write(connection.fileno(), (HELLO_MAX + 1).to_bytes(4))
        with pytest.raises((EOFError, OSError)):  # it is hung up on
            connection.recv_bytes()
    assert not ranks.complete
    rank = Rank(meeting(ranks), 1, FIELDS)
    until(lambda: ranks.complete)
    rank.close()
    until(lambda: not ranks.complete)


@pytest.mark.parametrize("number", [0, 2, 1])
def test_an_unknown_or_repeated_rank_is_turned_away(ranks: Ranks, said: Said, number: int) -> None:
    first = Rank(meeting(ranks), 1, FIELDS)
    until(lambda: ranks.complete)
    other = Rank(meeting(ranks), number, FIELDS)
    until(lambda: said.texts)
    assert f"was refused as rank {number}" in said.texts[-1]
    first.tell([Finished(JobId(7), True, 8, 0.5)])
    until(lambda: ranks.ended() == [Finished(JobId(7), True, 8, 0.5)])
    other.close()
    first.close()


def test_a_rank_that_sends_an_invalid_message_is_disconnected(ranks: Ranks, said: Said) -> None:
    rank = Rank(meeting(ranks), 1, FIELDS)
    until(lambda: ranks.complete)
    rank._connection.send_bytes(b"\xc1")
    until(lambda: not ranks.complete)
    until(lambda: said.texts)
    assert "sent an invalid message as rank 1" in said.texts[-1]
    rank.close()
