"""Fuzz targets of what users write: stacks in YAML, changes of one setting, traces."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from kvladder.changing.differences import compare
from kvladder.changing.text import edited
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.schema import parse_yaml, parsed
from kvladder.traces.reader import TraceError, read_trace
from tests.fuzz.target import Target, explained

LAYOUT = Layout(16, 1 << 16, {"model": "fuzz"})
STACKS = b"""arena: {size: 16 MiB}
tiers:
  - {name: host, type: host}
----
host: 16 MiB
----
arena: {size: 16 MiB, reserve: 5 %}
fetch: {deadline: 50 ms, when: always}
limits: {priority: 80, pin: 1 h}
tiers:
  - {name: host, type: host, ttl: 10 m}
  - {name: nvme, type: files, path: /nowhere, capacity: 1 GiB, when: commit,
     codecs: [zstd, checksum], min_priority: 40, quota: {tenant: 10 %}}
  - {name: far, type: redis, url: 'redis://localhost:6379', capacity: 1 GiB}
----
base: &b {type: memory, capacity: 1 MiB}
arena: {size: 1 MiB}
tiers: [{type: host}, {<<: *b, name: '${NAME:-a}'}]
----
model: {fingerprint: x}
events: {publish: 'tcp://127.0.0.1:5557'}
control: /nowhere/socket
http: {address: '127.0.0.1:8000', token: a-secret-of-some-length}
arena: {size: 1 MiB}
tiers: [{type: host}]
""".split(b"----\n")


def load(data: bytes) -> None:
    """Read a stack as a start does; a valid one has no difference from itself, read again."""
    try:
        given = parsed(data.decode("utf-8", "replace"), "stack")
        if not isinstance(given, Mapping):
            return
        config = load_config(cast("Mapping[str, Any]", given), env={})
        config.check(LAYOUT)
    except ConfigError as error:
        explained(error)
        return
    assert config.describe()
    again = load_config(yaml.safe_load(yaml.safe_dump(dict(given))), env={})
    assert not compare(config, again).changes


def edit(data: bytes) -> None:
    """Change one setting in a text: only that setting differs afterwards."""
    text, _, rest = data.decode("utf-8", "replace").partition("\0")
    path, _, value = rest.partition("\0")
    try:
        if not isinstance(parsed(text, "stack"), dict):
            return
    except ConfigError:
        return
    try:
        changed = edited(text, path, value)
    except ConfigError as error:
        explained(error)
        return
    assert isinstance(parse_yaml(changed), dict)


def _edits() -> Iterable[bytes]:
    for stack in STACKS:
        for change in (b"arena.size\0002 GiB", b"tiers.nvme.when\0evict", b"fetch.when\0[a]"):
            yield stack + b"\0" + change


def read(data: bytes) -> None:
    """Read a trace: its requests are in order, and their blocks are numbered without a gap."""
    with _Folder.file() as path:
        path.write_bytes(data)
        try:
            trace = read_trace(path)
        except TraceError as error:
            explained(error)
            return
    times = [one.at_s for one in trace.requests]
    assert times == sorted(times)
    assert {n for one in trace.requests for n in one.blocks} == {*range(trace.unique)}
    assert trace.block_tokens > 0
    assert trace.seconds >= 0
    assert len(trace.warnings) < 20


class _Folder:
    """A folder in memory, one for each process."""

    made: dict[int, tempfile.TemporaryDirectory[str]] = {}  # noqa: RUF012

    @classmethod
    def file(cls) -> Any:
        """Return a file that is deleted at the end of the context."""
        folder = cls.made.get(os.getpid())
        if folder is None:
            where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            folder = cls.made[os.getpid()] = tempfile.TemporaryDirectory(dir=where)
        return _File(Path(folder.name) / "trace")


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Path:
        return self._path

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)


TRACES = b"""{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 27.5, "input_length": 1500, "output_length": 0, "hash_ids": [1, 2, 3]}
----
{"timestamp": 9, "input_length": 12, "hash_ids": ["a"]}

{"timestamp": 1, "input_length": 12, "hash_ids": [99999999999999999999999, "a"]}
{"time""".split(b"----\n")

TARGETS = {
    "yaml": Target(
        "a stack in YAML",
        load,
        lambda: STACKS,
        (b"tiers", b"arena", b"size", b"type", b"host", b"files", b"capacity", b"codecs", b"${A}",
         b"${A:-1}", b"GiB", b"50 ms", b"&a", b"*a", b"<<: ", b"- ", b": ", b"!!", b"~"),
    ),
    "edit": Target(
        "a change of one setting: the text, the path and the value, with zeros between",
        edit,
        _edits,
        (b"\0", b"tiers.", b".when", b"&a", b"*a", b"<<: ", b"{}", b"[]", b"# x\n"),
    ),
    "traces": Target(
        "a trace of requests",
        read,
        lambda: TRACES,
        (b'"timestamp"', b'"input_length"', b'"hash_ids"', b"[1, 2]", b"1e308", b"null", b"\n",
         b"\x1f\x8b", b"-1", b"NaN"),
    ),
}  # fmt: skip
