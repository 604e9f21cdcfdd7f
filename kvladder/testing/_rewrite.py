"""Has pytest explain the assertions of the shipped suites; imported before they are."""

import pytest

pytest.register_assert_rewrite(
    "kvladder.testing.fixtures",
    "kvladder.testing.handlers",
    "kvladder.testing.policies",
    "kvladder.testing.tiers",
)
