"""Block keys: salted, chained digests that name what a block holds.

A key is the SHA-256 digest of its parent's key and the tokens of its block, so it names the whole
prefix. The chain starts at a root that binds salt, LoRA adapter and namespace. A namespace binds
model, weights, layout, block size and algorithm. Engines that differ in one of them have different
keys, so they cannot even ask for each other's blocks.

Records of a million blocks are kept by key in a map from ``by_key``, and by place in columns that
are ``unseen``. The first avoids long copies: Python copies a whole dictionary when its table is
full, which takes some 50 ms for a million keys. The second avoids long garbage collections: a full
collection visits every list.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NewType, TypeAlias, TypeVar, cast

from kvladder.errors import ConfigError

BlockKey = NewType("BlockKey", bytes)
"""A 32-byte digest naming one block and, through its parents, its whole prefix."""

Namespace = NewType("Namespace", bytes)
"""A 32-byte digest of everything that must agree before two engines may share a block."""

KEY_BYTES = 32
START = BlockKey(b"\1" + bytes(KEY_BYTES - 1))
"""Stands for the parent of a prefix's first block."""
ALGORITHM = "sha256-chain-v1"
FORMAT_VERSION = 1


T = TypeVar("T")
V = TypeVar("V")

PART_KEYS = 4096
"""Approximate number of keys in each part of a ``ShardedKeyMap``: copying one takes 0.1 ms."""
PARTS_MAX = 256
SMALL = 8 * PART_KEYS
"""Largest number of keys for which one dictionary is used."""


def _encoded(text: str) -> bytes:
    """Return the UTF-8 bytes of any text, lone surrogates (which JSON may hold) included."""
    return text.encode("utf-8", "surrogatepass")


def _bind(domain: str, fields: Mapping[str, str]) -> bytes:
    """Digest named fields unambiguously: each name and value is preceded by its length."""
    state = hashlib.sha256(domain.encode())
    for name in sorted(fields):
        for part in (_encoded(name), _encoded(fields[name])):
            state.update(struct.pack("<Q", len(part)))
            state.update(part)
    return state.digest()


def namespace(fields: Mapping[str, str], *, salt: str = "") -> Namespace:
    """Return the digest of every field that tells one engine's bytes from another's.

    Parameters
    ----------
    fields:
        Names and values, e.g. model, weights digest, dtype, layout, ranks. Order is irrelevant.
    salt:
        The deployment's secret; deployments with different salts share nothing.
    """
    bound = dict(fields)
    bound["kvladder.format"] = str(FORMAT_VERSION)
    bound["kvladder.salt"] = salt
    return Namespace(_bind("kvladder namespace v1", bound))


SALT_BYTES = 8


def salt_digest(space: Namespace, salt: str) -> bytes:
    """Return the digest stored with a block for its request's cache salt; empty without a salt.

    It is keyed by the namespace: the same salt has another digest in another deployment or model.
    """
    if not salt:
        return b""
    return hashlib.blake2b(_encoded(salt), digest_size=SALT_BYTES, key=space).digest()


_TAIL = _bind("kvladder tail v1", {})
"""First bytes digested for a partial block; for a whole block, its parent's key is first."""


class KeyScheme:
    """Makes the keys of one namespace and one block size.

    Parameters
    ----------
    space:
        The namespace, see :func:`namespace`.
    block_tokens:
        Tokens per block, at least 1.
    """

    def __init__(self, space: Namespace, *, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ConfigError(f"{block_tokens} tokens per block", hint="expected 1 or more")
        self.namespace = space
        self.block_tokens = block_tokens

    def root(self, *, salt: str = "", lora: str = "") -> BlockKey:
        """Return the parent of the first block of every prefix under this salt and LoRA adapter."""
        fields = {
            "namespace": self.namespace.hex(),
            "block": str(self.block_tokens),
            "algorithm": ALGORITHM,
            "salt": salt,
            "lora": lora,
        }
        return BlockKey(_bind("kvladder root v1", fields))

    def chain(
        self,
        tokens: Sequence[int],
        *,
        parent: BlockKey | None = None,
        extra: Sequence[tuple[int, bytes]] = (),
    ) -> list[BlockKey]:
        """Return the keys of the whole blocks of ``tokens``; a partial tail has no key.

        Parameters
        ----------
        tokens:
            Token ids, each in ``0 .. 2**32 - 1``.
        parent:
            Key of the block before the first token; None means ``root()``.
        extra:
            ``(token offset, content digest)`` of content that tokens do not identify, e.g. an
            image's hash. It is bound into the block that holds the offset, and so into later ones.

        Raises
        ------
        ValueError
            A token id or an offset is out of its range.
        """
        step = self.block_tokens * 4
        count = len(tokens) // self.block_tokens
        try:
            words = array("I", tokens[: count * self.block_tokens])
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids are integers in 0 .. 2**32 - 1: {error}") from None
        if sys.byteorder == "big":  # pragma: no cover - no such machine in CI
            words.byteswap()
        data = words.tobytes()
        extras = self._extras(extra, len(tokens))
        key: bytes = self.root() if parent is None else parent
        sha256 = hashlib.sha256
        keys: list[bytes] = []
        if not extras:
            for start in range(0, count * step, step):
                key = sha256(key + data[start : start + step]).digest()
                keys.append(key)
        for index in range(count) if extras else ():
            tail = extras.get(index, b"")
            key = sha256(key + data[index * step : (index + 1) * step] + tail).digest()
            keys.append(key)
        return cast("list[BlockKey]", keys)  # wrapping each key would take a tenth of the time

    def tail(
        self,
        tokens: Sequence[int],
        *,
        parent: BlockKey,
        extra: Sequence[tuple[int, bytes]] = (),
    ) -> BlockKey:
        """Return the key of a partial block of just ``tokens``; no whole block has this key.

        Parameters
        ----------
        tokens:
            1 to ``block_tokens - 1`` token ids.
        parent:
            Key of the block before it, or the root.
        extra:
            As for ``chain``.

        Raises
        ------
        ValueError
            A token id, an offset or the number of tokens is out of its range.
        """
        if not 0 < len(tokens) < self.block_tokens:
            raise ValueError(f"{len(tokens)} tokens: expected 1 .. {self.block_tokens - 1}")
        state = hashlib.sha256(_TAIL + parent + struct.pack("<Q", len(tokens)))
        try:
            state.update(struct.pack(f"<{len(tokens)}I", *tokens))
        except struct.error as error:
            raise ValueError(f"token ids are integers in 0 .. 2**32 - 1: {error}") from None
        state.update(self._extras(extra, len(tokens)).get(0, b""))
        return BlockKey(state.digest())

    def _extras(self, extra: Sequence[tuple[int, bytes]], tokens: int) -> dict[int, bytes]:
        """Return, by block, what its extras add to the digest: offset, length, content of each."""
        parts: dict[int, bytes] = {}
        for offset, content in sorted(extra):
            if not 0 <= offset < tokens:
                raise ValueError(f"extra at token {offset}: expected 0 .. {tokens - 1}")
            block, within = divmod(offset, self.block_tokens)
            packed = struct.pack("<QQ", within, len(content)) + content
            parts[block] = parts.get(block, b"") + packed
        return parts


def unseen(column: T) -> T:
    """Exclude a list or a deque from garbage collection, and return it.

    It must not lead back to another object. A column of numbers, bytes, None and tuples of these
    never does.
    """
    ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(column))
    return column


def by_key(keys_max: int) -> Book[Any]:
    """Return an empty map for up to ``keys_max`` keys: one dictionary if it is quick to copy."""
    return FlatKeyMap() if keys_max <= SMALL else ShardedKeyMap(keys_max)


class FlatKeyMap(dict[BlockKey, V]):
    """One dictionary, with the calls for many keys that a ``ShardedKeyMap`` has."""

    __slots__ = ()

    def all_of(self, keys: Sequence[BlockKey]) -> Sequence[V]:
        """Return the values of ``keys``, two or more; KeyError if one is not here."""
        return cast("tuple[V, ...]", itemgetter(*keys)(self))

    def get_all(self, keys: Iterable[BlockKey]) -> list[V | None]:
        """Return the value of each of ``keys``, None for a key that is not here."""
        return [*map(self.get, keys)]

    def pop_all(self, keys: Iterable[BlockKey]) -> list[V]:
        """Remove ``keys`` and return their values; KeyError if one is not here."""
        return [*map(self.pop, keys)]

    def add(self, keys: Sequence[BlockKey], values: Sequence[V]) -> bool:
        """Set ``values`` for ``keys``; return whether each key was new, if no two are equal."""
        before = len(self)
        self.update(zip(keys, values, strict=True))
        return len(self) == before + len(keys)

    def put_all(self, known: Mapping[BlockKey, V]) -> None:
        """Set all of ``known``, whether or not its keys were here."""
        self.update(known)

    def isdisjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Return whether none of ``keys`` is here."""
        return self.keys().isdisjoint(keys)


class ShardedKeyMap(MutableMapping[BlockKey, V]):
    """Many small dictionaries, chosen by the first byte of a key, so that each copy is short.

    Keys are digests, so the parts have similar sizes, and outgrow their tables at different times.
    Iteration is not in insertion order. A call with many keys takes half as long for each key.
    """

    __slots__ = ("_of", "_parts")

    def __init__(self, keys_max: int) -> None:
        count = min(PARTS_MAX, 1 << (keys_max // PART_KEYS).bit_length())
        self._parts = [dict[BlockKey, V]() for _ in range(count)]
        self._of = [self._parts[byte % count] for byte in range(256)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return any(self._parts)

    def __iter__(self) -> Iterator[BlockKey]:
        return chain.from_iterable(self._parts)

    def __contains__(self, key: Any) -> bool:
        return key in self._of[key[0]]

    def __getitem__(self, key: BlockKey) -> V:
        return self._of[key[0]][key]

    def __setitem__(self, key: BlockKey, value: V) -> None:
        self._of[key[0]][key] = value

    def __delitem__(self, key: BlockKey) -> None:
        del self._of[key[0]][key]

    def get(self, key: BlockKey, default: Any = None) -> Any:
        return self._of[key[0]].get(key, default)

    def pop(self, key: BlockKey, *default: Any) -> Any:
        return self._of[key[0]].pop(key, *default)

    def clear(self) -> None:
        for part in self._parts:
            part.clear()

    def all_of(self, keys: Sequence[BlockKey]) -> Sequence[V]:
        of = self._of
        return [of[key[0]][key] for key in keys]

    def get_all(self, keys: Iterable[BlockKey]) -> list[V | None]:
        of = self._of
        return [of[key[0]].get(key) for key in keys]

    def pop_all(self, keys: Iterable[BlockKey]) -> list[V]:
        of = self._of
        return [of[key[0]].pop(key) for key in keys]

    def add(self, keys: Sequence[BlockKey], values: Sequence[V]) -> bool:
        of, pairs = self._of, zip(keys, values, strict=True)
        return [of[key[0]].setdefault(key, value) for key, value in pairs] == [*values]

    def put_all(self, known: Mapping[BlockKey, V]) -> None:
        of = self._of
        for key, value in known.items():
            of[key[0]][key] = value

    def isdisjoint(self, keys: Iterable[BlockKey]) -> bool:
        of = self._of
        for key in keys:  # noqa: SIM110 - a generator costs as much as all else
            if key in of[key[0]]:
                return False
        return True


Book: TypeAlias = FlatKeyMap[V] | ShardedKeyMap[V]
"""Values by block key."""
