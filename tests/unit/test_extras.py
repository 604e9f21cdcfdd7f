"""Without the library of an extra, the error names the extra that installs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvladder.config.registry import BUILT_IN_TIERS
from kvladder.errors import needed

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HIDDEN = """
import sys
for name in {hidden!r}.split():
    sys.modules[name] = None
from kvladder.config.registry import load
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
try:
    {run}
except (ConfigError, ImportError) as error:
    print(error)
"""
NIXL = {"type": "nixl", "roster": "redis://cache", "keys": "k", "capacity": "1 GiB"}
STACK = {"arena": {"size": "1 GiB"}, "tiers": [{"type": "host"}, NIXL]}
CASES = [
    ("redis", "load('tiers', 'redis')", "redis"),
    ("obstore", "load('tiers', 'object')", "object"),
    ("zmq", "load('tiers', 'nixl')", "nixl"),
    ("torch", "load('codecs', 'fp8')", "torch"),
    ("cryptography", "load('codecs', 'aes-gcm')", "encryption"),
    ("torch", "from kvladder.connectors.inline import InlineConnector", "torch"),
    ("torch", "import kvladder.device", "torch"),
    ("transformers", "from kvladder.connectors.transformers import Prefixes", "transformers"),
    ("prometheus_client", "import kvladder.publishing.prometheus", "prometheus"),
    ("zmq", "import kvladder.routing.feed", "events"),
    ("redis", "import kvladder.testing.redisserver", "testing"),
    (
        "redis",
        f"load_config({STACK}, env={{}})",
        "redis",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "run", "extra"), CASES, ids=lambda one: str(one)[:30])
def test_a_missing_library_is_named_with_its_extra(hidden, run, extra):
    assert extra in EXTRAS
    command = [sys.executable, "-W", "ignore", "-c", HIDDEN.format(hidden=hidden, run=run)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"install kvladder[{extra}]" in found
    assert hidden in found


def test_the_cases_have_each_tier_that_has_an_extra():
    tiers = {name for one in CASES for name in re.findall(r"load\('tiers', '(\w+)'\)", one[1])}
    told_otherwise = {"mooncake"}  # its library is loaded when the tier opens
    assert tiers | told_otherwise == {one.name for one in BUILT_IN_TIERS.values() if one.extra}


def test_other_errors_are_left_as_they_are():
    for wrong in ("kvladder.nothing", "numpy.nothing"):
        with pytest.raises(ModuleNotFoundError) as got, needed("torch"):
            __import__(wrong)
        assert ("install" in str(got.value)) == wrong.startswith("numpy")
    with pytest.raises(ValueError, match="^mine$"), needed("torch"):
        raise ValueError("mine")
