"""Helpers shared by the tests of the object store tier: access to objects behind its back."""

from __future__ import annotations

import obstore
from obstore.store import MemoryStore

from kvladder.tiers.object.options import ObjectOptions
from tests.kit.objectserver import BUCKET

obstore.put(MemoryStore(), "x", b"")  # the library keeps threads and files: start it now


def name_of(tier, ref):
    """Spelled out, so that a change of names is noticed."""
    return f"kvladder/{tier.context.namespace.hex()[:32]}/1/{ref.key.hex()}"


class Server:
    """The objects of a bucket, by names below a prefix; empty at first."""

    def __init__(self, server, prefix):
        self._server = server
        self._prefix = f"{BUCKET}/{prefix}"
        self.options = ObjectOptions(url=f"s3://{self._prefix}", options=server.options, requests=4)

    def get(self, name):
        return self._server.ask("GET", f"{self._prefix}/{name}")

    def put(self, name, data):
        self._server.ask("PUT", f"{self._prefix}/{name}", data)


class Folder:
    """The same in a folder."""

    def __init__(self, path):
        self._path = path
        path.mkdir()
        self.options = ObjectOptions(url=f"file://{path}", requests=4)

    def get(self, name):
        path = self._path / name
        return path.read_bytes() if path.exists() else None

    def put(self, name, data):
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
