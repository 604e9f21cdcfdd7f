"""``--cover`` keeps each value of each factor of a product, and few more cases."""

from __future__ import annotations

import itertools
from textwrap import dedent

import pytest

from tests.kit.cover import covering

CODE = """
    import pytest

    class Base:
        @pytest.fixture(params=["x", "y"])
        def chain(self, request):
            return request.param

        def test_one(self, chain): pass
        def test_two(self, chain): pass
        @pytest.mark.parametrize("size", [1, 2])
        def test_takes_each_size(self, chain, size): pass
        def test_alone(self): pass

    @pytest.mark.product("chain")
    class TestFirst(Base): pass

    class TestSecond(TestFirst): pass

    class TestWhole(Base): pass

    @pytest.mark.product("a", "b")
    @pytest.mark.parametrize("a", range(3))
    @pytest.mark.parametrize("b", "pq")
    @pytest.mark.parametrize("whole", [True, False])
    def test_cells(a, b, whole): pass
"""


def kept(pytester: pytest.Pytester, *options: str) -> list[str]:
    pytester.makepyfile(test_it=dedent(CODE))
    plugin = ("-p", "tests.kit.cover", "-p", "no:cacheprovider", "-p", "no:asyncio", "-v")
    pytester.makeini("[pytest]\naddopts = --strict-markers")
    result = pytester.runpytest_inprocess(*plugin, *options)
    assert result.ret == 0
    lines = [line.split()[0] for line in result.outlines if " PASSED" in line]
    return [line.removeprefix("test_it.py::") for line in lines]


@pytest.mark.slow
def test_with_cover_each_value_runs_and_without_it_every_case(
    pytester: pytest.Pytester,
) -> None:
    everything = kept(pytester)
    assert len(everything) == 3 * (2 + 2 + 4 + 1) + 3 * 2 * 2
    assert len(everything) == len(set(everything))
    some = kept(pytester, "--cover")
    assert set(some) < set(everything)
    whole = [name for name in everything if name.startswith("TestWhole")]
    assert [name for name in some if name.startswith("TestWhole")] == whole
    for test in ("TestFirst", "TestSecond"):
        ran = [name.removeprefix(f"{test}::") for name in some if name.startswith(test)]
        assert [name.partition("[")[0] for name in ran] == [
            "test_one", "test_two", "test_takes_each_size", "test_takes_each_size", "test_alone",
        ]  # fmt: skip
        assert {"1", "2"} == {part for name in ran for part in name if part in "12"}
        assert sum("x" in name.partition("[")[2] for name in ran) == 2, "values take turns"
    for value in ("True", "False"):
        cells = [name[11:-1].split("-") for name in some if f"test_cells[{value}" in name]
        assert len(cells) == 3
        assert {a for _, _, a in cells} == {"0", "1", "2"}
        assert {b for _, b, _ in cells} == {"p", "q"}


@pytest.mark.parametrize("sizes", [(1,), (7,), (4, 1), (2, 3, 5), (6, 5, 4, 3)])
def test_cover_keeps_as_many_cases_as_the_longest_factor_has_values(sizes: tuple[int, ...]) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    some = [cases[at] for at in sorted(covering(cases))]
    assert len(some) == max(sizes)
    for factor, size in enumerate(sizes):
        assert {case[factor] for case in some} == set(range(size))


def test_no_case_is_kept_of_an_empty_product() -> None:
    assert covering([]) == set()
    assert covering([()]) == set()
