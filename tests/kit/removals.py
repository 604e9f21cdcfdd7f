"""Removals in an index log: a disk's fault may destroy those that were synced, too."""

from __future__ import annotations

from collections.abc import Callable

from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.tiers.files.log import RECORD_BYTES
from kvladder.tiers.files.meta import LOG_NAME
from tests.kit.disk import FakeDisk

PLACE_AT, KEY_AT = 20, 32
"""Offsets in a record, spelled out; the place is negative in a removal."""


def removals(content: bytes) -> set[bytes]:
    """Return the records of removals in an index log."""
    ends = range(2 * RECORD_BYTES, len(content) + 1, RECORD_BYTES)
    records = (bytes(content[end - RECORD_BYTES : end]) for end in ends)
    return {one for one in records if one[PLACE_AT + 3] & 128}


def keys_of(records: set[bytes]) -> set[BlockKey]:
    """Return the keys that records name."""
    return {BlockKey(one[KEY_AT : KEY_AT + KEY_BYTES]) for one in records}


def destroyed(disk: FakeDisk, crash: Callable[[], object]) -> set[BlockKey]:
    """Let the power fail, with the names of all files kept; return the keys of removals that were
    synced and are gone: no process can prevent that.
    """
    logs = [path for path in disk.files() if path.endswith(f"/{LOG_NAME}")]
    before = {record for path in logs for record in removals(disk._names[path].durable)}
    crash()
    left = {record for path in logs for record in removals(disk._names[path].durable)}
    return keys_of(before - left)
