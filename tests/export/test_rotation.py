"""Keys of servers and clients change while caches continue, as docs/how-to/operations.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvladder import Layout, open_cache
from kvladder.errors import ConfigError
from tests.kit.served import Server

pytest.importorskip("zmq", reason="the extra nixl is not installed")

from kvladder.tiers.nixl.curve import make_keys

pytestmark = pytest.mark.slow

LAYOUT = Layout(block_tokens=1, block_bytes=4096, fields={"model": "rotated"})


def edit(file: Path, **changed: Any) -> dict[str, Any]:
    """Write a key file anew with changed entries, and return what it was."""
    before: dict[str, Any] = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(before | changed))
    return before


def connects(server: Server, keys: Path) -> bool:
    """Return whether a server takes a client's keys; raise other errors."""
    level = server.level(keys=str(keys), required=True)
    try:
        with open_cache(
            {"arena": {"size": "4 MiB"}, "tiers": [{"type": "host"}, level]}, layout=LAYOUT
        ):
            return True
    except ConfigError as error:
        if "key" not in str(error):
            raise
        return False


def test_clients_get_new_keys_while_those_with_old_keys_continue(tmp_path):
    with Server(tmp_path / "server") as server:
        own, old = server.keys / "server.keys", server.keys / "client.keys"
        made, new = make_keys(tmp_path / "new")
        assert (connects(server, old), connects(server, new)) == (True, False)

        added = yaml.safe_load(made.read_text())["peers"]
        before = edit(own, peers=yaml.safe_load(own.read_text())["peers"] + added)
        edit(new, peers=yaml.safe_load(old.read_text())["peers"])
        server.stop()
        server.again()
        assert (connects(server, old), connects(server, new)) == (True, True)

        edit(own, peers=added)
        assert before["peers"] != added
        server.stop()
        server.again()
        assert (connects(server, old), connects(server, new)) == (False, True)
