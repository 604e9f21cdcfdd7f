"""The pytest plugin: the loop of a test, and the tasks that a test leaves running."""

from __future__ import annotations

from textwrap import dedent

import pytest

PLUGIN = ("-p", "kvladder.testing.plugin", "-p", "no:cacheprovider", "--strict-markers")
ASYNCIO = """
    [pytest]
    asyncio_default_fixture_loop_scope = function
    asyncio_mode = {}
"""
SIMULATED = """
    import pytest
    pytestmark = pytest.mark.sim_loop
"""


def run(
    pytester: pytest.Pytester, code: str, *options: str, marks: str = SIMULATED, mode: str = "auto"
) -> pytest.RunResult:
    pytester.makeini(ASYNCIO.format(mode))
    pytester.makepyfile(dedent(marks) + dedent(code))
    return pytester.runpytest_inprocess(*PLUGIN, *options)


MODES = pytest.mark.parametrize("mode", ["auto", "strict"])


@MODES
def test_async_tests_run_in_simulated_time_and_marked_ones_in_real_time(
    pytester: pytest.Pytester, mode: str
) -> None:
    result = run(
        pytester,
        """
        import asyncio
        from kvladder.testing import SimLoop

        def simulated():
            return isinstance(asyncio.get_running_loop(), SimLoop)

        async def test_simulated():
            await asyncio.sleep(1e6)
            assert simulated()

        @pytest.mark.real
        async def test_real():
            assert not simulated()
            assert await asyncio.to_thread(int, "7") == 7

        class TestAll:
            real = True

            async def test_real(self):
                assert not simulated()

        def test_sync():
            with pytest.raises(RuntimeError):
                simulated()
        """,
        mode=mode,
    )
    result.assert_outcomes(passed=4)


@MODES
def test_unmarked_tests_keep_their_own_loop(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makeconftest(
        """
        import asyncio

        class Theirs(asyncio.SelectorEventLoop):
            pass

        def pytest_asyncio_loop_factories(config, item):
            return {"one": Theirs, "two": Theirs} if "two" in item.name else None
        """
    )
    code = """
        import asyncio
        import pytest
        from kvladder.testing import SimLoop

        @pytest.mark.asyncio
        async def test_plain():
            assert not isinstance(asyncio.get_running_loop(), SimLoop)
            asyncio.create_task(asyncio.sleep(5), name="nobody minds")

        @pytest.mark.asyncio
        async def test_two():
            assert type(asyncio.get_running_loop()).__name__ == "Theirs"

        @pytest.mark.sim_loop
        async def test_two_of_ours():
            assert isinstance(asyncio.get_running_loop(), SimLoop)
        """
    result = run(pytester, code, marks="", mode=mode)
    result.assert_outcomes(passed=4)


@MODES
def test_async_fixtures_run_on_the_loop_of_their_test(pytester: pytest.Pytester, mode: str) -> None:
    result = run(
        pytester,
        """
        import asyncio
        import pytest_asyncio
        ended = []

        @pytest_asyncio.fixture
        async def started():
            await asyncio.sleep(100)
            return asyncio.get_running_loop()

        @pytest_asyncio.fixture
        async def around(started):
            assert asyncio.get_running_loop() is started
            yield "value"
            await asyncio.sleep(100)
            ended.append(started.time())

        async def test_function(around, started):
            assert around == "value"
            assert asyncio.get_running_loop() is started
            assert started.time() == 100

        class TestMethods:
            @pytest_asyncio.fixture
            async def mine(self, around):
                self.seen = around
                yield self

            @pytest.mark.parametrize("number", [1, 2])
            async def test_method(self, mine, number):
                assert mine is self
                assert self.seen == "value"

        def test_each_fixture_has_ended_in_simulated_time():
            assert ended == [200] * 3
        """,
        mode=mode,
    )
    result.assert_outcomes(passed=4)


def test_errors_in_fixtures_are_reported(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        @pytest.fixture
        async def twice():
            yield 1
            yield 2

        @pytest.fixture
        async def broken():
            raise OSError("no such thing")

        async def test_twice(twice):
            pass

        async def test_broken(broken):
            pass
        """,
    )
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*Async generator fixture didn't stop*", "*no such thing*"])


def test_a_task_left_running_is_an_error(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import asyncio

        async def test_leaves_one():
            asyncio.create_task(asyncio.sleep(5), name="left over")

        async def test_fails_anyway():
            asyncio.create_task(asyncio.sleep(5), name="not told")
            assert 1 == 2
        """,
    )
    result.assert_outcomes(passed=1, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*the test left tasks behind:*", "*left over: *"])
    result.stdout.no_fnmatch_line("*not told: *")


def test_a_deadlock_is_a_failure_and_the_next_test_runs(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import asyncio

        async def test_waits():
            await asyncio.Event().wait()

        async def test_goes_on():
            await asyncio.sleep(1)
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*nothing will ever happen again at 0 s*"])


def test_the_seed_is_an_option(pytester: pytest.Pytester) -> None:
    code = """
        import asyncio

        async def test_order():
            turns = []
            async def turn(number):
                turns.append(number)
            await asyncio.gather(*map(turn, range(9)))
            print("order", turns, asyncio.get_running_loop().seed)
        """
    orders: list[str] = []
    for seed in ("1", "2", "1"):
        result = run(pytester, code, "-s", f"--sim-seed={seed}")
        orders += [line for line in result.outlines if "order" in line]
    assert len(orders) == 3
    assert orders[0] == orders[2] != orders[1]


def test_logging_under_a_lock_fails_the_test(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import logging
        from kvladder.lock import StackLock

        lock = StackLock()

        def test_bad():
            with lock, lock:
                logging.getLogger("kvladder").warning("too early")

        def test_good():
            with lock:
                pass
            logging.getLogger("kvladder").warning("in time")
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*logged under a lock:*", "*too early*"])


@MODES
@pytest.mark.slow
def test_the_suite_for_tiers_needs_no_marks(pytester: pytest.Pytester, mode: str) -> None:
    result = run(
        pytester,
        """
        import pytest
        from kvladder.testing import TierTests
        from kvladder.tiers.memory import MemoryTier

        class TestMemory(TierTests):
            @pytest.fixture
            def make(self):
                return MemoryTier

        class TestMemoryInThreads(TestMemory):
            real = True
        """,
        marks="",
        mode=mode,
    )
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] > 40
    assert outcomes.keys() <= {"passed", "skipped"}
