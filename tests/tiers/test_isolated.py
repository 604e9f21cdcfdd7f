"""Isolated tiers: the suite, and faults of a tier that reach no other part."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvladder.errors import ConfigError, TierError, TierFull
from kvladder.testing import TierTests
from kvladder.testing.cancel import cancel_at
from kvladder.testing.fixtures import POISON, SETTLE_S, TierFixtures
from kvladder.tiers.base import Medium, Tier
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.memory import MemoryTier
from tests.kit.unruly import UnrulyOptions, UnrulyTier

PAUSE_S = 0.02


@pytest.mark.slow
class TestFiles(TierTests):
    real = True
    survives = True

    @pytest.fixture
    def make(self, tmp_path):
        return lambda: IsolatedTier(FilesTier, FilesOptions(path=str(tmp_path)))


def children():
    """Return the child processes, including dead ones that were not reaped."""
    return {
        int(pid)
        for told in Path("/proc/self/task").glob("*/children")
        for pid in told.read_text().split()
    }


def is_alive(pid):
    """Return whether a process exists, including a dead one that was not reaped."""
    return Path(f"/proc/{pid}").exists()


async def until(is_so):
    """Wait for a condition that sends no event."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(PAUSE_S)


async def again(call):
    """Return the answer of a call once it has one."""
    while True:
        try:
            return await call()
        except TierError:
            await asyncio.sleep(PAUSE_S)


class TestFaults(TierFixtures):
    real = True

    @pytest.fixture
    def order(self, tmp_path):
        return tmp_path / "order"

    @pytest.fixture
    def make(self, order):
        return lambda: IsolatedTier(UnrulyTier, UnrulyOptions(path=str(order)), abandon_s=0.3)

    async def begun(self, order, what, call):
        """A call that obeys, and is at it."""
        order.write_text(what)
        task = asyncio.create_task(call)
        await until(order.with_suffix(".begun").exists)
        return task

    async def test_a_cancelled_call_ends_in_the_process_too(self, tier, blocks, order):
        (block,) = await blocks.put(tier, 0)
        pid = tier.gauges()["process"]
        task = await self.begun(order, "hang", tier.get(blocks.reads([block])))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        order.unlink()
        assert await blocks.get(tier, [block]) == [True]
        assert tier.gauges()["process"] == pid

    @pytest.mark.slow
    @pytest.mark.parametrize("what", ["deaf", "block", "late", "stop"])
    async def test_a_call_that_does_not_end_is_killed_and_writes_nothing(
        self, tier, blocks, order, what
    ):
        (block,) = await blocks.put(tier, 0)
        pid = tier.gauges()["process"]
        task = await self.begun(order, what, tier.get(blocks.reads([block])))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(pid)
        blocks.poison([block])
        await asyncio.sleep(SETTLE_S)
        assert {*blocks.bytes_in(block.slot)} == {POISON}
        order.unlink()
        assert await again(lambda: tier.contains(blocks.refs([block]))) == [False]
        assert tier.gauges()["process_ends"] == 1
        assert tier.gauges()["process"] != pid

    @pytest.mark.slow
    @pytest.mark.parametrize(("what", "how"), [("crash", "SIGSEGV"), ("exit", "exit status 3")])
    async def test_a_death_fails_the_calls_in_flight(self, tier, blocks, order, what, how):
        order.write_text(what)
        with pytest.raises(TierError, match=f"the process of UnrulyTier has ended: {how}"):
            await tier.put(blocks.writes(blocks.some(0)))
        with pytest.raises(TierError, match="is being started"):  # no call waits for the next one
            await tier.put(blocks.writes(blocks.some(0)))
        order.unlink()
        await again(lambda: tier.contains([]))
        assert await blocks.put(tier, 0)

    @pytest.mark.slow
    @pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    async def test_only_sigkill_ends_the_process(self, tier, blocks, sent):
        await blocks.put(tier, 0)
        pid = tier.gauges()["process"]
        os.kill(pid, sent)
        if sent == signal.SIGKILL:
            await until(lambda: not is_alive(pid))
            assert await again(lambda: tier.contains([])) == []
        assert await blocks.contains(tier, blocks.some(0)) == [sent != signal.SIGKILL]

    async def test_errors_are_the_same_as_without_isolation(self, tier, blocks, order):
        writes = blocks.writes(blocks.some(0))
        order.write_text("full")
        with pytest.raises(TierFull, match="no room"):
            await tier.put(writes)
        order.write_text("wrong")
        with pytest.raises(TierError, match="the call raised ValueError"):
            await tier.put(writes)
        order.write_text("leave")
        with pytest.raises(TierError, match="the call raised SystemExit"):
            await tier.put(writes)
        order.write_text("numbers")
        assert await tier.put(writes) == 7  # the level sees that this is no answer

    async def test_messages_quotas_and_progress_reach_the_parent(self, make, context, blocks):
        said: list[str] = []
        tier = make()
        await tier.open(replace(context, say=said.append))
        assert said == ["it is open"]
        await blocks.store(tier, [block.of(salt=b"12345678") for block in blocks.some(0)])
        assert (tier.spare(b"12345678"), tier.spare(b"")) == (3.0, float("inf"))
        told = []
        assert await tier.purge(None, lambda *part: told.append(part)) == 1
        assert told == [(0, 3), (1, 3), (2, 3)]
        await tier.aclose()
        with pytest.raises(TierError, match="closed"):
            await tier.contains([])

    @pytest.mark.slow
    async def test_a_listener_that_raises_ends_nothing(self, make, context, order):
        def refuse(*_):
            raise RuntimeError("it does not want to know")

        faults = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: faults.append(repr(told["exception"])))
        tier = make()
        await tier.open(replace(context, say=refuse))
        pid = tier.gauges()["process"]
        assert await tier.purge(None, refuse) == 0
        assert tier.gauges()["process"] == pid
        assert faults == ["RuntimeError('it does not want to know')"] * 4
        order.write_text("absent")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(faults) == 6)  # that it ended, and that it cannot be opened
        order.unlink()
        assert await again(lambda: tier.contains([])) == []
        await tier.aclose()

    async def test_a_quota_holds_for_a_salt_not_heard_of(self, tier, blocks, order):
        order.write_text("room 1")
        items = [block.of(salt=b"12345678") for block in blocks.some(0, 1)]
        items[1:1] = blocks.some(2)
        blocks.fill(items)
        assert await tier.put(blocks.writes(items)) == [True, True, False]
        assert await blocks.contains(tier, items) == [True, True, False]

    async def test_a_recovery_begins_anew_if_the_one_before_was_left(self, tier, blocks):
        saved = await blocks.put(tier, *range(4))
        first = await anext(tier.recover())
        assert len(first) == 2, "it recovers two blocks at a time"
        found = [one.key async for batch in tier.recover() for one in batch]
        assert sorted(found) == sorted(block.key for block in saved)

    async def test_the_spare_room_of_a_full_salt_is_asked_for_again(self, tier, blocks, order):
        salts = b"12345678", b"abcdefgh"
        order.write_text("room 0")
        items = [b.of(salt=s) for b, s in zip(blocks.some(0, 1), salts, strict=True)]
        blocks.fill(items)
        assert await tier.put(blocks.writes(items)) == [False, False]
        assert [tier.spare(salt) for salt in salts] == [0, 0]
        order.write_text("room 5")
        await until(lambda: [tier.spare(salt) for salt in salts] == [5, 5])

    async def test_an_isolated_tier_has_the_traits_of_its_tier(self, tier, order):
        plain = UnrulyTier(UnrulyOptions(path=str(order)))
        traits = {**Medium.__annotations__, **Tier.__annotations__}
        del traits["resizes"]
        assert plain.resizes
        assert not tier.resizes, "its child keeps its capacity"
        assert {name: getattr(tier, name) for name in traits} == {
            name: getattr(plain, name) for name in traits
        }

    @pytest.mark.slow
    async def test_a_tier_that_refuses_to_open_leaves_no_process(self, make, context, order):
        tier = make()
        order.write_text("refuse")
        with pytest.raises(ConfigError) as refused:
            await tier.open(context)
        assert (refused.value.path, refused.value.hint) == ("path", "expected another day")
        order.write_text("absent")
        with pytest.raises(TierError, match="nobody is there"):
            await tier.open(context)
        assert tier.gauges()["process"] == 0
        order.unlink()
        await tier.open(context)
        assert await tier.contains([]) == []
        await tier.aclose()

    @pytest.mark.slow
    @pytest.mark.parametrize("late", [False, True])
    async def test_a_cancelled_opening_leaves_no_process(self, make, context, late):
        before, tier, cut = children(), make(), 0
        while await cancel_at(tier.open(context), cut + 1, late=late):
            assert children() <= before
            tier, cut = make(), cut + 1
        assert children() - before == {tier.gauges()["process"]}
        await tier.aclose()
        assert cut > 2

    @pytest.mark.parametrize("lacks", ["pidfd_open", "socketpair", "Popen"])
    async def test_without_a_descriptor_left_there_is_no_process(
        self, make, context, monkeypatch, lacks
    ):
        def refuse(*_, **__):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        before, tier = children(), make()
        with monkeypatch.context() as patched:
            owner = {"pidfd_open": os, "socketpair": socket, "Popen": subprocess}[lacks]
            patched.setattr(owner, lacks, refuse)
            with pytest.raises(TierError, match="cannot be started: .*Too many open files"):
                await tier.open(context)
            assert children() <= before
        await tier.open(context)
        assert await tier.contains([]) == []
        await tier.aclose()

    @pytest.mark.slow
    async def test_a_tier_is_restarted_until_it_opens(self, make, context, order):
        said: list[str] = []
        tier = make()
        await tier.open(replace(context, say=said.append))
        order.write_text("absent")
        os.kill(tier.gauges()["process"], signal.SIGKILL)
        failed = "UnrulyTier cannot be opened again, kvladder keeps trying: nobody is there"
        await until(lambda: failed in said)
        order.unlink()
        assert await again(lambda: tier.contains([])) == []
        assert "the process of UnrulyTier has ended: SIGKILL: kvladder starts it again" in said
        await tier.aclose()

    async def test_a_process_that_breaks_the_protocol_is_killed_before_its_calls_fail(
        self, make, context, blocks, order
    ):
        said: list[str] = []
        tier = make()
        await tier.open(replace(context, say=said.append))
        pid = tier.gauges()["process"]
        task = await self.begun(order, "hang", tier.put(blocks.writes(blocks.some(0))))
        tier._process._spawned.reader.feed_data(b"\xff" * 4)
        with pytest.raises(TierError, match="it broke the protocol: a frame of"):
            await task
        assert not is_alive(pid)
        order.unlink()
        assert await again(lambda: tier.contains([])) == []
        assert any("it broke the protocol: a frame of" in text for text in said)
        await tier.aclose()

    async def test_a_purge_receives_only_its_own_progress(self, tier, blocks):
        await blocks.put(tier, 0, 1)
        first, second = list[tuple[int, int]](), list[tuple[int, int]]()
        await asyncio.gather(
            tier.purge(None, lambda *part: first.append(part)),
            tier.purge(None, lambda *part: second.append(part)),
        )
        assert first == second == [(0, 3), (1, 3), (2, 3)]

    async def test_a_close_does_not_wait_for_a_hanging_call(self, tier, blocks, order):
        pid = tier.gauges()["process"]
        task = await self.begun(order, "block", tier.put(blocks.writes(blocks.some(0))))
        task.cancel()
        await asyncio.wait({task})
        await tier.aclose()
        assert not is_alive(pid)

    async def test_a_close_that_is_not_answered_ends_at_its_limit(self, tier, monkeypatch):
        monkeypatch.setattr("kvladder.tiers.isolated.tier.CLOSE_S", 0.05)
        tier._process._pipe._late_s = 3600.0  # which would be waited for, too
        pid = tier.gauges()["process"]
        os.kill(pid, signal.SIGSTOP)
        await tier.aclose()
        assert not is_alive(pid)

    async def test_an_isolated_tier_is_examined_in_a_process(self, order, tmp_path):
        options = FilesOptions(path=str(tmp_path / "new"))
        tier = IsolatedTier(FilesTier, options)
        found = dict(await tier.examine(1 << 30, print))
        wanted = dict(await FilesTier(options).examine(1 << 30, print))
        assert found.pop("free")
        del wanted["free"]  # other processes write there, too
        assert found == wanted
        assert tier.gauges()["process"] == 0


@pytest.mark.parametrize("module", [__name__, "__main__"])
def test_a_class_that_no_other_process_can_import_is_refused(module, monkeypatch):
    class Mine(MemoryTier):
        pass

    if module == "__main__":  # where this process finds it
        Mine.__module__, Mine.__qualname__ = module, "Mine"
        monkeypatch.setattr(sys.modules[module], "Mine", Mine, raising=False)
    with pytest.raises(ConfigError, match="Mine cannot be constructed in another process"):
        IsolatedTier(Mine, None)


ENGINE = """
import asyncio
from kvladder.arena import Arena
from kvladder.layout import Layout
from kvladder.runtime import BlockingPool, SystemClock
from kvladder.tiers import Tier, TierContext
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.memory import MemoryTier

async def main():
    tier, layout = IsolatedTier(MemoryTier, None), Layout(16, 4096)
    run = BlockingPool(1, "x").run
    space = layout.namespace(salt="x")
    arena = Arena.create(4, 4096)
    await tier.open(TierContext(arena, layout, space, 4, SystemClock(), run))
    print(tier.gauges()["process"], flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_the_process_ends_with_the_engine_even_if_that_is_killed():
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    watch = os.pidfd_open(pid)
    engine.kill()
    engine.communicate()
    assert select.select([watch], [], [])[0]
    os.close(watch)


LOOKS = """
import asyncio, sys
sys.path.append(sys.argv[1])
from mine import MyTier
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.schema import Settings

async def main():
    print(dict(await IsolatedTier(MyTier, Settings()).examine(1, print)))

asyncio.run(main())
"""
MINE = """
from kvladder.tiers.memory import MemoryTier

class MyTier(MemoryTier):
    def __init__(self, options):
        super().__init__()

    async def examine(self, capacity_bytes, warn):
        return {"it is": "mine"}
"""


def test_a_process_imports_the_parents_modules_and_none_of_the_current_folder(tmp_path):
    plugins, current = tmp_path / "plugins", tmp_path / "current"
    plugins.mkdir()
    current.mkdir()
    (plugins / "mine.py").write_text(MINE)
    (tmp_path / "engine.py").write_text(LOOKS)
    for name in ("ctypes", "msgspec", "zmq", "sitecustomize"):
        (current / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')")
    done = subprocess.run(
        [sys.executable, "-P", str(tmp_path / "engine.py"), str(plugins)],
        cwd=current,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "{'it is': 'mine'}\n", done.stderr
    assert not (current / "ran").exists()
