"""A cache's process and its export process: their messages, and the death of either."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvladder
from kvladder.config.settings import ExportConfig
from kvladder.errors import ConfigError
from kvladder.export.cache import CacheOffers
from kvladder.export.process import Export
from kvladder.export.server import ServerOffers
from kvladder.manager import CacheManager
from kvladder.runtime import Runtime
from tests.export.clients import SERVER
from tests.patience import until

CHILD = "tests.export.scripted"


class Served:
    """A cache without an engine; its exporter follows orders in files."""

    def __init__(self, folder: Path, **tiers: Any) -> None:
        self.folder = folder
        self.said: list[str] = []
        self._numbers = count()
        stack = {"arena": {"size": "256 KiB"}, "tiers": [{"type": "host"}, *tiers.values()]}
        self.cache: CacheManager = kvladder.open_cache(stack, layout=SERVER)
        portal = self.cache._portal
        assert isinstance(portal, Runtime)
        self.offers: CacheOffers = ServerOffers(self.cache, portal.threads("export"))
        config = ExportConfig(listen="127.0.0.1:77", keys=str(folder))
        try:
            self.export = Export(
                self.offers, portal, config, lambda _, text: self.said.append(text), module=CHILD
            )
        except BaseException:
            self.cache.close()
            raise
        self.cache.admit(self.export)
        self.cache.report("export", self.export.counts)

    @property
    def free(self) -> int:
        return self.cache.arena.slots - self.cache.arena.free

    def ask(self, verb: str, *numbers: int) -> Path:
        """Have the process do something, where its answer will be."""
        request = self.folder / f"{next(self._numbers):04}"
        made = request.with_suffix(".new")
        made.write_bytes(msgspec.json.encode((verb, numbers)))
        made.rename(request.with_suffix(".ask"))
        return request.with_suffix(".answer")

    def told(self, verb: str, *numbers: int) -> Any:
        """Return the answer of the process."""
        answer = self.ask(verb, *numbers)
        until(answer.exists)
        return msgspec.json.decode(answer.read_bytes())

    def kill(self) -> None:
        """Kill the process; return once another one serves."""
        before = self.export.counts()["process"]
        os.kill(before, signal.SIGKILL)
        until(lambda: self.export.counts()["process"] not in {0, before})


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    try:
        yield served
        served.cache.check()
    finally:
        served.cache.close()


@pytest.mark.slow
def test_the_export_process_serves_the_blocks_of_the_cache(served: Served) -> None:
    assert served.export.address == "127.0.0.1:771"
    assert served.told("hello") == ""
    assert served.told("put", 1, 2, 3) == [True] * 3
    assert served.told("has", 4, 3, 1) == [False, True, True]
    assert served.told("get", 4, 3, 1) == [False, True, True]
    assert served.told("remove", 3) is None
    assert served.told("has", 3, 1) == [False, True]
    assert "ValidationError" in served.told("wrong"), "and it goes on"
    assert served.told("purge") == 2
    assert served.told("has", 1) == [False]
    until(lambda: served.export.counts().get("requests") == 9)
    counts = served.export.counts()
    assert (counts["sessions"], counts["taken"], counts["sent"]) == (1, 3, 2)
    assert served.cache.stats()["export"]["taken"] == 3


@pytest.mark.slow
def test_a_dead_export_process_frees_its_slots_and_is_replaced(served: Served) -> None:
    served.told("hello")
    served.told("put", 1, 2, 3)
    assert served.told("pin", 1, 2) == [True, True]
    assert served.told("granted", 5, 6)[0] >= 0
    assert served.export.counts()["pinned"] == 2
    assert served.free == 5
    served.kill()
    assert served.free == 3
    assert served.export.counts()["sessions"] == served.export.counts()["granted"] == 0
    assert "the process for clients has ended: SIGKILL: restarting" in served.said
    assert served.told("hello") == ""
    assert served.told("has", 1, 2, 3, 5, 6) == [True] * 3 + [False] * 2
    assert served.export.counts()["process_ends"] == 1
    assert served.export.address == "127.0.0.1:7711", "what the first one said is asked for"


@pytest.mark.slow
def test_the_export_process_disconnects_clients_when_the_cache_closes(
    served: Served, tmp_path: Path
) -> None:
    pid = served.export.counts()["process"]
    served.told("hello")
    served.told("put", 1)
    served.told("pin", 1)
    served.cache.close()
    assert (tmp_path / "left").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    served.export.close()


@pytest.mark.slow
def test_an_export_process_that_cannot_serve_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    with pytest.raises(ConfigError) as refused:
        Served(tmp_path)
    assert str(refused.value) == "export.listen: in use (another port)"
    (tmp_path / "refuse").unlink()
    (tmp_path / "die").touch()
    with pytest.raises(ConfigError, match="export: the process for clients has ended: SIGKILL"):
        Served(tmp_path)


@pytest.mark.slow
def test_the_export_process_is_restarted_until_it_can_serve(served: Served, tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    os.kill(served.export.counts()["process"], signal.SIGKILL)
    until(
        lambda: any(
            "cannot restart the process for clients: export.listen" in said for said in served.said
        )
    )
    (tmp_path / "refuse").unlink()
    until(lambda: served.export.counts()["process"] > 0)
    assert served.told("hello") == ""
