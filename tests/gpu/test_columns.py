"""The loops in C give the same results as those in Python."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvladder.gpu.tree import columns
from tests.kit.native import built

SOURCE = Path(columns.__file__).with_name("_columns.c")
SIZE = 6

Rows = st.lists(st.integers(0, SIZE - 1), max_size=SIZE, unique=True)
Column = st.lists(st.integers(-1, 2), min_size=SIZE, max_size=SIZE)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The C functions, built with every warning on."""
    return built(SOURCE, tmp_path_factory.mktemp("native"))


def outcome(call, arguments):
    """Return the result or error of a call, and its changes to its arguments."""
    try:
        result = call(*arguments)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        result = type(error)
    return result, arguments


ARGUMENTS: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "gather": st.tuples(Column, Rows),
    "fill": st.tuples(Column, Rows, st.integers(0, 9)),
    "scatter": st.tuples(Column, Rows, st.just(list(range(10, 10 + SIZE)))).map(
        lambda given: (*given[:2], given[2][: len(given[1])])
    ),
    "number": st.tuples(Column, Rows, st.integers(1, 1 << 41), st.just(2)),
    "split": st.tuples(Column, Rows, st.just(-1)),
    "drop_ones": st.tuples(
        Column, st.lists(st.integers(-2, SIZE + 1), max_size=SIZE) | Rows.map(tuple)
    ),
    "leading": st.tuples(
        st.dictionaries(st.text("abc", max_size=1), st.integers(0, SIZE)),
        st.lists(st.text("abc", max_size=1), max_size=SIZE),
        Column,
        st.just(-1),
    ),
    "forget": st.tuples(st.just(dict.fromkeys(range(SIZE))), Rows),
    "forget_single": st.tuples(
        st.lists(st.integers(0, 3) | st.just("more"), min_size=SIZE, max_size=SIZE).map(
            lambda values: dict(enumerate(values))
        ),
        Rows.flatmap(lambda rows: st.just(rows)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_c_and_python_give_the_same_outcome(native, name, data):
    arguments = data.draw(ARGUMENTS[name])
    expected = outcome(columns.PYTHON[name], deepcopy(arguments))
    assert outcome(getattr(native, name), deepcopy(arguments)) == expected


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_c_and_python_select_the_same_rows(native, data):
    """``drain``: valid and invalid marks, parents and leaves, some of them waiting aside."""
    nodes = data.draw(Rows)
    first = data.draw(st.integers(10, 1 << 41))
    stamps = range(first, first + 2 * len(nodes), 2)
    stamp = [0] * SIZE
    for node, mark in zip(nodes, stamps, strict=True):
        stamp[node] = mark if data.draw(st.booleans()) else mark + 1
    kids = data.draw(st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE))
    parent = data.draw(st.lists(st.integers(0, SIZE - 1), min_size=SIZE, max_size=SIZE))
    parked = set(data.draw(Rows))
    at = data.draw(st.integers(0, len(nodes)))
    marks = data.draw(st.sampled_from([stamps, list(stamps)]))
    arguments: tuple[Any, ...] = (nodes, marks, at, len(nodes), stamp, kids, parent, parked, [])
    expected = outcome(columns.PYTHON["drain"], deepcopy(arguments))
    assert outcome(native.drain, deepcopy(arguments)) == expected


@pytest.mark.slow
def test_numpy_integers_are_rows(native):
    numpy = pytest.importorskip("numpy")
    rows = numpy.array([2, 0])
    for functions in (columns.PYTHON, vars(native)):
        column = [1, 2, 1]
        assert functions["gather"](column, rows) == [1, 1]
        assert functions["split"](column, rows, 1) == ([2, 0], [])
        assert functions["drop_ones"](column, rows)
        assert column == [0, 2, 0]
        functions["fill"](column, rows, 5)
        assert column == [5, 2, 5]


@pytest.mark.slow
def test_an_invalid_row_changes_nothing(native):
    for functions in (columns.PYTHON, vars(native)):
        for wrong in (1.0, "1", None):
            column = [1, 1, 1]
            given = [0, wrong]
            with pytest.raises(TypeError):
                functions["drop_ones"](column, given)
            assert column == [1, 1, 1]


@pytest.mark.slow
def test_integers_that_fit_no_register_are_no_rows(native):
    for functions in (columns.PYTHON, vars(native)):
        for wrong in (1 << 70, -(1 << 70)):
            column = [1, 1]
            with pytest.raises(IndexError):
                functions["gather"](column, [0, wrong])
            assert functions["drop_ones"](column, [0, wrong]) is False
            assert column == [1, 1]


@pytest.mark.slow
def test_wrong_arguments_are_errors_in_c_too(native):
    with pytest.raises(IndexError):
        native.gather([1], [1])
    with pytest.raises(IndexError):
        native.fill([1], [-1], 0)
    with pytest.raises(TypeError):
        native.gather((1,), [0])
    with pytest.raises(TypeError):
        native.gather([1])
    with pytest.raises(ValueError, match="values"):
        native.scatter([1], [0], [1, 2])
    with pytest.raises(KeyError):
        native.forget({}, [1])
    with pytest.raises(KeyError):
        native.forget_single({}, [1])
    with pytest.raises(IndexError):
        native.drain([0], range(0), 0, 2, [0], [0], [0], set(), [])
    with pytest.raises(TypeError):
        native.forget([], [1])
    with pytest.raises(TypeError):
        native.leading({"a": 0}, ["a"], ["no number"], -1)
