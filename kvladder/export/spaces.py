"""The blocks of a server by client's namespace: each has a part of it in its salt."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from typing import Final

from kvladder.keys import SALT_BYTES, BlockKey
from kvladder.lock import STEP
from kvladder.tiers.ladder import Ladder

SPACE_BYTES: Final = 3
"""Bytes of a server's salt that stand for the client's namespace; the others for its salt."""


def _space_tag(namespace: bytes) -> bytes:
    return hashlib.blake2b(namespace, digest_size=SPACE_BYTES).digest()


def own_salt(namespace: bytes, salt: bytes) -> bytes:
    """Return the salt that a server stores for a client's namespace and the client's salt."""
    size = SALT_BYTES - SPACE_BYTES
    return _space_tag(namespace) + hashlib.blake2b(salt, digest_size=size, key=namespace).digest()


async def blocks_in(ladder: Ladder, namespace: bytes, salt: bytes | None) -> list[BlockKey]:
    """Return the blocks of a namespace that are here, or those of one salt in it."""
    tag, found = _space_tag(namespace), dict[BlockKey, None]()
    only = None if salt is None else own_salt(namespace, salt)
    for holdings in ladder.indexes.values():
        for start in range(0, holdings.places, STEP):
            with ladder.lock:
                for name in holdings.held(start, start + STEP):
                    meta = ladder.meta(name)
                    own = b"" if meta is None else meta.terms.salt
                    if own == only or (only is None and own.startswith(tag)):
                        found[name] = None
            await asyncio.sleep(0)
    return list(found)


async def salts_in(ladder: Ladder, namespace: bytes, put: Iterable[bytes]) -> set[bytes]:
    """Return all salts of a namespace's blocks that are here, or among those being ``put``."""
    tag, found = _space_tag(namespace), {*put}
    for holdings in ladder.indexes.values():
        for start in range(0, holdings.places, STEP):
            with ladder.lock:
                metas = map(ladder.meta, holdings.held(start, start + STEP))
                found |= {meta.terms.salt for meta in metas if meta is not None}
            await asyncio.sleep(0)
    return {salt for salt in found if salt.startswith(tag)}
