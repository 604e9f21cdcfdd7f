"""The plugin that delays what runs in real time, and nothing in simulated time."""

from __future__ import annotations

from pathlib import Path

import pytest

CODE = """
    import asyncio
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
"""


def test_what_begins_in_real_time_may_be_late(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makepyfile(CODE)
    result = pytester.runpytest_subprocess("-p", "tests.kit.jitter", "-p", "no:asyncio")
    result.assert_outcomes(passed=1)
