"""The whole cache in any order of requests, time and trouble, against the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.machine import CacheMachine

TestCache: Any = pytest.mark.slow(CacheMachine.TestCase)
