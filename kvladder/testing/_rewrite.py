"""Makes pytest explain failed assertions of the shipped suites; must be imported before them."""

import pytest

pytest.register_assert_rewrite(
    "kvladder.testing.engines.suite",
    "kvladder.testing.fixtures",
    "kvladder.testing.handlers",
    "kvladder.testing.policies",
    "kvladder.testing.tiers",
)
