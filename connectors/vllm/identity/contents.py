"""Digests of the images, sounds and videos in prompts, beside vLLM's identifiers of them.

vLLM's block hash covers an item's identifier: a hash of the sent data or, if a client gives one,
its ``uuid`` or the number in the image's own metadata. Two processes may get two different items
under one identifier. So the keys of blocks with items also depend on the items' data.
"""

from __future__ import annotations

import hashlib
import secrets
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import torch

from kvladder.keys import BlockKey

IDENTIFIERS_MAX: Final = 1 << 16
"""Maximum number of remembered identifiers; vLLM's cache of encoded items holds far fewer."""

_HANDLES: Final = ("address", "monotonic_id")
"""Fields of an item with its data in shared memory, where the workers read it."""


class Contents:
    """Digests of the multimodal items in prompts; one per engine.

    If an item's data cannot be seen here, its blocks get keys that only this process finds. The
    same holds for all items of an identifier that came with different data. vLLM encodes only one
    of them, and reuses the result for all.

    Parameters
    ----------
    algorithm:
        vLLM's ``mm_hasher_algorithm``.
    shared:
        True if encoded items come from other processes by identifier; then data proves nothing.
    """

    def __init__(self, *, algorithm: str = "blake3", shared: bool = False) -> None:
        self._algorithm = algorithm
        self._shared = shared
        self._nonce = secrets.token_bytes(32)
        self._items: dict[int, tuple[weakref.ref[Any], bytes]] = {}
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self.changes = 0
        """Number of identifiers that turned out to stand for more than one item."""

    def of(self, request: Any) -> Items | None:
        """Return the items in a request's prompt; None if it has only tokens."""
        features = getattr(request, "mm_features", None)
        if not features:
            return None
        named = sorted((int(f.mm_position.offset), str(f.identifier)) for f in features)
        for feature in features:
            self._see(str(feature.identifier), self._digest(feature.data))
        return Items(self, named)

    def name(self, identifier: str) -> bytes:
        """Return the digest of an item's data, or this process's nonce if there is no digest."""
        return self._known.get(identifier) or self._nonce

    def _see(self, identifier: str, digest: bytes) -> None:
        before = self._known.pop(identifier, digest)
        if before != digest:
            digest = b""
            self.changes += bool(before)
        self._known[identifier] = digest
        if len(self._known) > IDENTIFIERS_MAX:
            self._known.popitem(last=False)

    def _digest(self, item: Any) -> bytes:
        """Return the digest of an item's data; empty if the data cannot be seen."""
        if item is None or self._shared:
            return b""
        found = self._items.get(id(item))
        if found is not None and found[0]() is item:
            return found[1]
        digest, key = _digest(item, self._algorithm), id(item)
        with suppress(TypeError):  # no weak reference possible: it is digested again next time
            self._items[key] = (weakref.ref(item, lambda _: self._forget(key)), digest)
        return digest

    def _forget(self, key: int) -> None:
        self._items.pop(key, None)


def contents_of(vllm_config: Any) -> Contents:
    """Return the ``Contents`` for an engine with this configuration."""
    settings = getattr(getattr(vllm_config, "model_config", None), "multimodal_config", None)
    return Contents(
        algorithm=getattr(settings, "mm_hasher_algorithm", "blake3"),
        shared=getattr(vllm_config, "ec_transfer_config", None) is not None,
    )


class Items:
    """The items of one prompt, in order."""

    def __init__(self, contents: Contents, named: Sequence[tuple[int, str]]) -> None:
        self._contents = contents
        self._offsets = [offset for offset, _ in named]
        self._identifiers = [identifier for _, identifier in named]
        self._changes = -1
        self._names: list[bytes] = []

    def bind(self, keys: Sequence[BlockKey], start: int, tokens: int) -> list[BlockKey]:
        """Return keys that also depend on the items, for blocks from ``start`` on.

        Blocks have ``tokens`` tokens each. Keys of blocks before the first item stay unchanged.

        Parameters
        ----------
        keys:
            The blocks' keys without the contents of items.
        """
        if self._changes != self._contents.changes:
            self._changes = self._contents.changes
            self._names = [*self._chain()]
        ends = range((start + 1) * tokens, (start + 1 + len(keys)) * tokens, tokens)
        return [self._bound(key, end) for key, end in zip(keys, ends, strict=True)]

    def _chain(self) -> Iterator[bytes]:
        """Yield the digests of the first item, of the first two, and so on."""
        state = hashlib.sha256()
        for identifier in self._identifiers:
            state.update(self._contents.name(identifier))
            yield state.digest()

    def _bound(self, key: BlockKey, end: int) -> BlockKey:
        count = bisect_left(self._offsets, end)
        if not count:
            return key
        return BlockKey(hashlib.sha256(self._names[count - 1] + key).digest())


def _digest(item: Any, algorithm: Any) -> bytes:
    from vllm.multimodal.hasher import MultiModalHasher

    parts = cast("Mapping[str, Any]", item)
    data = {name: getattr(part, "data", None) for name, part in parts.items()}
    if all(name in data for name in _HANDLES) or not all(map(_is_here, data.values())):
        return b""
    return bytes.fromhex(MultiModalHasher.hash_kwargs(algorithm, **data))


def _is_here(data: Any) -> bool:
    """Return whether data is only numbers and text, readable without waiting for a device."""
    if isinstance(data, torch.Tensor):
        return data.device.type == "cpu"
    if isinstance(data, list | tuple):
        return all(map(_is_here, cast("Sequence[Any]", data)))
    return isinstance(data, bool | int | float | str | bytes)
