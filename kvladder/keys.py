"""Block keys: salted, chained digests that name what a block holds.

A key is the SHA-256 digest of its parent's key and the tokens of its block, so it names the whole
prefix. The chain starts at a root into which salt, LoRA adapter and the namespace are bound, and a
namespace binds model, weights, layout, block size and algorithm: whoever differs in one of them
cannot even ask for the block.

What is known of a million blocks is kept by key in ``by_key`` and by place in columns that are
``unseen``: Python copies a dictionary whole when its table is full, with a million keys in some
50 ms, and its collector of garbage goes through every list whenever it collects all.
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
ALGORITHM = "sha256-chain-v1"
FORMAT_VERSION = 1


T = TypeVar("T")
V = TypeVar("V")

PART_KEYS = 4096
"""Keys in each part of a ``ShardedKeyMap``, about: copying one takes 0.1 ms."""
PARTS_MAX = 256
SMALL = 8 * PART_KEYS
"""So many keys one dictionary may have."""


def _encoded(text: str) -> bytes:
    """The bytes of any text; half of a surrogate pair, which JSON may hold, has some, too."""
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
    """Digest of every field that tells one engine's bytes from another's.

    Parameters
    ----------
    fields:
        Names and values, e.g. model, weights digest, dtype, layout, ranks. Order is irrelevant.
    salt:
        The deployment's secret; two deployments with other salts share nothing.
    """
    bound = dict(fields)
    bound["kvladder.format"] = str(FORMAT_VERSION)
    bound["kvladder.salt"] = salt
    return Namespace(_bind("kvladder namespace v1", bound))


SALT_BYTES = 8


def salt_digest(space: Namespace, salt: str) -> bytes:
    """What stands beside a block for the cache salt of its request; empty without one.

    Keyed by the namespace: the same salt in another deployment or model has another digest.
    """
    if not salt:
        return b""
    return hashlib.blake2b(_encoded(salt), digest_size=SALT_BYTES, key=space).digest()


_TAIL = _bind("kvladder tail v1", {})
"""Begins what is digested for a block cut short, where a key stands for a whole one."""


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
        """The parent of the first block of every prefix under this salt and LoRA adapter."""
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
        """Keys of the whole blocks of ``tokens``; a partial tail has no key.

        Parameters
        ----------
        tokens:
            Token ids, each in ``0 .. 2**32 - 1``.
        parent:
            Key of the block before the first token; None means ``root()``.
        extra:
            ``(token offset, content digest)`` of what tokens alone do not tell, e.g. an image's
            hash; bound into the block that holds the offset and so into all that follow.

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
        return cast("list[BlockKey]", keys)  # naming each of them would take a tenth of the time

    def tail(
        self,
        tokens: Sequence[int],
        *,
        parent: BlockKey,
        extra: Sequence[tuple[int, bytes]] = (),
    ) -> BlockKey:
        """The key of a block that is cut short after ``tokens``; no whole block has it.

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
        """Per block, what its extras add to the digest: offsets and lengths make it unambiguous."""
        parts: dict[int, bytes] = {}
        for offset, content in sorted(extra):
            if not 0 <= offset < tokens:
                raise ValueError(f"extra at token {offset}: expected 0 .. {tokens - 1}")
            block, within = divmod(offset, self.block_tokens)
            packed = struct.pack("<QQ", within, len(content)) + content
            parts[block] = parts.get(block, b"") + packed
        return parts


def unseen(column: T) -> T:
    """Have the collector of garbage pass by a list or a deque that leads back to no other object.

    That is so of one that holds numbers, bytes, None and tuples of these.
    """
    ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(column))
    return column


def by_key(keys_max: int) -> Book[Any]:
    """An empty book that will hold so many keys: one dictionary, if that is not long to copy."""
    return FlatKeyMap() if keys_max <= SMALL else ShardedKeyMap(keys_max)


class FlatKeyMap(dict[BlockKey, V]):
    """One dictionary. The calls with many keys are those of a ``ShardedKeyMap``."""

    __slots__ = ()

    def all_of(self, keys: Sequence[BlockKey]) -> Sequence[V]:
        """What is known of each of ``keys``, two or more; KeyError if one is not here."""
        return cast("tuple[V, ...]", itemgetter(*keys)(self))

    def get_all(self, keys: Iterable[BlockKey]) -> list[V | None]:
        """What is known of each of ``keys``, None of one that is not here."""
        return [*map(self.get, keys)]

    def pop_all(self, keys: Iterable[BlockKey]) -> list[V]:
        """Forget ``keys`` and return what was known of each; KeyError if one is not here."""
        return [*map(self.pop, keys)]

    def add(self, keys: Sequence[BlockKey], values: Sequence[V]) -> bool:
        """Know ``values`` of ``keys``; if no two of them are equal, whether each key was new."""
        before = len(self)
        self.update(zip(keys, values, strict=True))
        return len(self) == before + len(keys)

    def put_all(self, known: Mapping[BlockKey, V]) -> None:
        """Know all of this, whether or not its keys were here."""
        self.update(known)

    def isdisjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Whether none of ``keys`` is here."""
        return self.keys().isdisjoint(keys)


class ShardedKeyMap(MutableMapping[BlockKey, V]):
    """Many small dictionaries by the first byte of a key, each of which is copied by itself.

    Keys are digests, so the parts are alike, and outgrow their tables one after the other. Its
    order is not that of insertion. A call with many keys takes half as long for each of them.
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
"""What is known of blocks by their keys."""
