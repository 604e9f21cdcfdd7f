"""The package at a Python prompt: its names, its version, its command, and the reprs of objects."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import kvladder
from kvladder.tiers.memory import MemoryTier

LAYOUT = kvladder.Layout(block_tokens=16, block_bytes=4096)
STACK = {
    "arena": {"size": "32 KiB"},
    "tiers": [{"type": "host"}, {"name": "cold", "type": "memory", "capacity": "1 MiB"}],
}


def test_a_star_imports_the_public_names():
    found: dict[str, object] = {}
    exec("from kvladder import *", found)
    assert {*kvladder.__all__} == {*found} - {"__builtins__"}
    assert {*kvladder.__all__} <= {*dir(kvladder)}


def test_the_version_is_the_one_installed_or_unknown(monkeypatch):
    assert kvladder.__version__ == version("kvladder")

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert kvladder.__version__ == "0+unknown"


@pytest.mark.slow
def test_the_module_is_the_command():
    def run(*arguments):
        command = [sys.executable, "-m", "kvladder", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("--version").stdout == f"kvladder {version('kvladder')}\n"
    wrong = run("check")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Usage: kvladder check ")


def test_reprs_show_what_an_object_is_and_its_state():
    cache = kvladder.open_cache(STACK, layout=LAYOUT)
    namespace = cache.namespace.hex()[:16]
    what = f"<TierStack: host, cold>, 8 slots of 4 KiB, namespace {namespace}>"
    with cache:
        assert repr(cache) == f"<CacheManager open: {what}"
        keys = kvladder.KeyScheme(cache.namespace, block_tokens=16).chain(range(32))
        save = cache.save(keys)
        assert repr(save) == "<Save: 2 blocks, to be committed>"
        save.commit()
        assert repr(save) == "<Save: 2 blocks, ended>"
        fetch = cache.fetch(keys[:1])
        assert fetch.done
        assert repr(fetch) == "<Fetch: 1 of 1 block, answered>"
        fetch.release()
        assert repr(fetch) == "<Fetch: 1 of 1 block, released>"
    assert repr(cache) == f"<CacheManager closed: {what}"
    assert repr(LAYOUT).startswith("Layout(block_tokens=16, block_bytes=4096")
    assert repr(MemoryTier()) == "<MemoryTier: CPU, not durable, not open yet>"


def test_the_repr_of_a_connector_shows_its_jobs_and_its_cache():
    torch = pytest.importorskip("torch")
    from kvladder.connectors.inline import InlineConnector

    kv = torch.zeros(4, 1024)
    with kvladder.open_cache(STACK, layout=LAYOUT) as cache:
        connector = InlineConnector(cache, kv)
        assert repr(connector) == f"<InlineConnector: 0 jobs in flight, {cache!r}>"
        connector.close()
