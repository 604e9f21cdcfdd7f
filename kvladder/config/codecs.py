"""Codecs found by their ids: for blocks that others have stored with other settings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from kvladder.config import registry
from kvladder.keys import Namespace
from kvladder.layout import Layout
from kvladder.tiers.codecs.base import Codec

_OWN = {1: "checksum", 2: "zstd", 4: "aes-gcm"}
"""By id, so that the modules of others are imported for their own ids only."""


def finder(layout: Layout, namespace: Namespace) -> Callable[[int], Codec | None]:
    """Finds codecs by id, made with their defaults: for blocks that others have stored.

    Codecs that are lossy, or cannot be used here, are not found.
    """
    found: dict[int, Codec | None] = {}
    lock = threading.Lock()

    def find(wanted: int) -> Codec | None:
        with lock:  # whoever asks second waits for the import
            if wanted not in found:
                found[wanted] = _made(wanted, layout, namespace)
            return found[wanted]

    return find


def _made(wanted: int, layout: Layout, namespace: Namespace) -> Codec | None:
    for name in [_OWN[wanted]] if wanted in _OWN else registry.names("codecs"):
        with suppress(Exception):  # it cannot be loaded, lacks its key or its settings, or is ill
            make = registry.load("codecs", name)
            if make.id == wanted and not make.lossy:
                codec: Codec = make() if make.Options is None else make(make.Options())
                codec.open(layout, namespace)
                return codec
    return None
