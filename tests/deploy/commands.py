"""Commands that deployments run, compared with those that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvladder.cli import commands

ROOT = Path(__file__).parents[2]
ANYWHERE = {"--port"}  # one that a page's command has for its own reasons


def require_command(words: list[str]) -> None:
    """Fail unless the command ``kvladder`` takes these arguments."""
    assert words[0] == "kvladder"
    commands().parse(words[1:])


def readme() -> tuple[set[str], dict[str, Any]]:
    """Return the flags of README's ``vllm serve``, and its connector's settings."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^vllm serve MODEL (.*?)'(\{.*?\})'", text, re.MULTILINE | re.DOTALL)
    assert found
    return set(re.findall(r"--[\w-]+", found[1])), json.loads(found[2])


def require_vllm(args: list[str]) -> dict[str, str]:
    """Fail unless ``vllm serve`` runs as README's does; return the flags with their values."""
    given = dict(one.split("=", 1) for one in args if one.startswith("--"))
    flags, config = readme()
    assert set(given) - ANYWHERE == flags
    found = json.loads(given["--kv-transfer-config"])
    assert found.pop("kv_connector_extra_config") == {"config": "/etc/kvladder/stack.yaml"}
    assert found == {key: config[key] for key in config if key != "kv_connector_extra_config"}
    return given
