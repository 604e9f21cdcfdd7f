"""Each fuzz target takes the inputs that are kept for it; longer runs are in ``make fuzz``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.__main__ import NAMES
from tests.fuzz.corpus import CORPUS, KEPT_BYTES_MAX, kept
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
