"""The plugin delays work in real time, and none in simulated time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import jitter
from tests.patience import until

CODE = """
    import asyncio
    import os
    import threading
    from concurrent.futures import ThreadPoolExecutor

    from kvladder.testing import SimLoop
    from tests.kit import jitter

    def test_it(monkeypatch):
        late = []
        monkeypatch.setattr(jitter, "delay", lambda: late.append(threading.current_thread()))
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        assert late == [thread]
        late.clear()
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            runner.run(asyncio.sleep(1000))
        assert not late
        asyncio.run(asyncio.sleep(0))
        assert {*late} == {threading.main_thread()}
        late.clear()
        with ThreadPoolExecutor(1) as threads:
            worker = threads.submit(threading.current_thread).result()
        assert late == [worker, worker]  # the thread, and its piece of work
        assert "stills" in {thread.name for thread in threading.enumerate()}
        assert isinstance(os.kill.__self__, jitter.Stills)
"""


def state(pid: int) -> str:
    """Return the state of a process from /proc: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.slow
def test_work_in_real_time_may_be_delayed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makepyfile(CODE)
    result = pytester.runpytest_subprocess("-p", "tests.kit.jitter", "-p", "no:asyncio")
    result.assert_outcomes(passed=1)


def test_a_process_is_stopped_for_a_while(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []

    def sleep(seconds: float) -> None:
        monkeypatch.undo()
        assert 0 <= seconds <= jitter.STILL_LONG_S
        until(lambda: state(process) == "T")
        states.append("T")

    monkeypatch.setattr(time, "sleep", sleep)
    jitter.Stills().still(process)
    until(lambda: state(process) != "T")
    assert states == ["T"]


@pytest.mark.slow
def test_a_process_stopped_by_a_test_stays_stopped(process: int) -> None:
    stills = jitter.Stills()
    stills.kill(process, signal.SIGSTOP)
    stills.still(process)
    until(lambda: state(process) == "T")
    stills.kill(process, signal.SIGCONT)
    until(lambda: state(process) != "T")
    stills.still(process)
    until(lambda: state(process) != "T")


def test_an_ended_process_is_left_alone() -> None:
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(ended, 0)
    jitter.Stills().still(ended)
