"""A pytest plugin: ``--cover`` runs only some cases of each product, but each value once.

``@pytest.mark.product("a", "b")`` declares the cases of a test by these parameters as a product. On
a class it covers all tests of the class, and the test is one more factor. ``--cover`` keeps cases
of each product until each value of each factor has occurred; without it all cases run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import pytest

Case = tuple[Hashable, ...]
"""One value for each factor of a product."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cover",
        action="store_true",
        help="run only as many cases of what is marked `product` as show each value once",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "product(*parameters): cases by these are a product, of which --cover runs a part",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("--cover"):
        return None
    return "of the cases that are marked `product`, only some run: each value occurs (--cover)"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of products that show no value for the first time."""
    if not config.getoption("--cover"):
        return
    products: defaultdict[Hashable, dict[pytest.Item, Case]] = defaultdict(dict)
    for item in items:
        if isinstance(item, pytest.Function) and (found := product_of(item)):
            product, case = found
            products[product][item] = case
    left_out: set[pytest.Item] = set()
    for cases in products.values():
        kept = covering([*cases.values()])
        left_out |= {item for number, item in enumerate(cases) if number not in kept}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def product_of(item: pytest.Function) -> tuple[Hashable, Case] | None:
    """Return the product that a case is part of, and its values there; None without the mark."""
    found = next(item.iter_markers_with_node("product"), None)
    if found is None:
        return None
    node, mark = found
    values = item.callspec.params if hasattr(item, "callspec") else {}
    numbers = {name: id(value) for name, value in values.items()}  # they need not be hashable
    others = [(name, numbers[name]) for name in sorted(numbers) if name not in mark.args]
    test = (item.originalname, *others)
    own = [numbers.get(name) for name in mark.args]
    if node is item:  # the cases of this test alone
        return (item.parent, *test), (*own,)
    return node, (test, *own)


def covering(cases: Sequence[Case]) -> set[int]:
    """Return positions of some cases in which each value of each factor occurs.

    Of cases that add equally many values, it takes the first whose values occur least so far.
    """
    pairs = [[*enumerate(case)] for case in cases]
    missing = {pair for case in pairs for pair in case}
    used = Counter[tuple[int, Hashable]]()
    kept: set[int] = set()

    def gain(at: int) -> int:
        return sum(pair in missing for pair in pairs[at])

    useful = [*range(len(cases))]
    while useful := [at for at in useful if gain(at)]:
        best = max(useful, key=lambda at: (gain(at), -sum(used[pair] for pair in pairs[at]), -at))
        kept.add(best)
        missing.difference_update(pairs[best])
        used.update(pairs[best])
    return kept
