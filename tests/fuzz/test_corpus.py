"""Each fuzz target takes the inputs that are kept for it; longer runs are in ``make fuzz``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.fuzz.__main__ import NAMES
from tests.fuzz.corpus import CORPUS, KEPT_BYTES_MAX, kept
from tests.fuzz.target import TooLong, at_most
from tests.fuzz.targets import TARGETS, close


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    close()


def test_each_target_has_kept_inputs_of_a_bounded_size() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {*TARGETS} == {*NAMES}
    for name in TARGETS:
        sizes = [path.stat().st_size for path in (CORPUS / name).iterdir()]
        assert 0 < sum(sizes) <= KEPT_BYTES_MAX, name


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_break_no_promise(name: str) -> None:
    for data in kept(name):
        TARGETS[name].run(data)


def work(seconds: float) -> None:
    """Take processor time, as a part would that goes on after errors of its own."""
    begun_s = time.process_time()
    while time.process_time() - begun_s < seconds:
        with suppress(Exception):
            sum(range(1000))


def test_an_input_may_take_so_much_processor_time_and_any_time_to_wait() -> None:
    with pytest.raises(TooLong, match=r"more than 0\.05 s of processor time"), at_most(0.05):
        work(30)
    with at_most(0.05):
        time.sleep(0.1)
    work(0.06)  # the limit ended with the block
