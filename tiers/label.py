"""A block's label: what lies beside its bytes in every tier, made and checked by the ladder.

A label is ``LABEL_BYTES`` long, little endian, and its own last 8 bytes are the xxh3-64 of all
before them::

    head    128  magic, version, whether there is a checksum, length of the codecs' steps, length
                 of the stored bytes, key, namespace, facts, xxh3-128 of the stored bytes (zeros
                 without a checksum)
    steps   402  what each codec did, as ``CodecStep`` says, in the order in which they were applied
    zeros    38
    check     8

The length is fixed so that one call reads a label together with bytes of unknown length. The head
needs neither keys nor codecs: ``told`` reads it for purges, quotas and all who look after a medium.
"""

# pyright: reportPrivateUsage=false
# An author of a tier is given reads and writes: what the level asks of them they do not show.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import repeat
from math import inf
from operator import attrgetter, is_
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from kvladder.arena import Slot
from kvladder.keys import SALT_BYTES, BlockKey, Namespace
from kvladder.policy.eviction import PRIORITY_DEFAULT

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"kvlabel\0"
VERSION = 1
"""Of the format. Tiers that others share have it in the names of what they store."""
LABEL_BYTES = 576
TAG_BYTES = 16
"""Of a checksum, xxh3-128."""
PARAMS_BYTES = 64
"""The most that a codec may have stored beside a block."""
STEPS_MAX = 6
"""Codecs that may have worked on one block."""

_ROOM_BYTES = 440
"""For steps, and zeros after them."""
_BODY = Struct(f"<8sHBxHxxQ32s32sBBB5xd{SALT_BYTES}s{TAG_BYTES}s{_ROOM_BYTES}s")
_ENDS = 10
"""Which of its fields says when the block expires."""
_STEP = Struct("<HB")
_CHECK = Struct("<Q")
_NO_SALT = bytes(SALT_BYTES)
assert STEPS_MAX * (_STEP.size + PARAMS_BYTES) <= _ROOM_BYTES
assert _BODY.size + _CHECK.size == LABEL_BYTES


class Facts(NamedTuple):
    """What a tier may act on; a durable one stores it and gives it back from ``recover``."""

    priority: int = PRIORITY_DEFAULT
    floor: int = PRIORITY_DEFAULT
    expires_wall_s: float | None = None
    """Seconds since the epoch at which the block is to be forgotten, or None."""
    salt: bytes = b""
    """Digest of the cache salt of the request that it was made for, 8 bytes; empty without one."""
    terms: int = 0
    """Three bits, 0 to 7, whatever they mean."""


NO_FACTS = Facts()


class Ref(NamedTuple):
    """A block that a level has in its tier.

    ``place`` is the level's number for it: ``0 <= place < capacity_blocks``, and no two blocks that
    the level holds, writes or reads have the same. A tier with fixed places uses it as an address,
    any other ignores it.
    """

    key: BlockKey
    place: int


class RecoveredBlock(NamedTuple):
    """A block that a durable tier found again."""

    key: BlockKey
    place: int
    facts: Facts = NO_FACTS


class Outcome(IntEnum):
    """What reading one block came to."""

    GOOD = 0
    STALE = 1
    """Something else is stored there: another block, or one without what is demanded."""
    CORRUPT = 2
    """What is stored there is damaged."""
    UNREADABLE = 3
    """It is encoded with a codec or a key that is not here, or not as is demanded."""
    EXPIRED = 4
    """Its time was over, and its tier had not let it expire."""


class LabelFields(NamedTuple):
    """What anybody can read in a label that is whole."""

    key: BlockKey
    namespace: Namespace
    length: int
    """Bytes that are stored beside the label."""
    facts: Facts
    checksum: bytes
    """xxh3-128 of these bytes; empty without one."""

    def is_of(self, pieces: Iterable[Buffer]) -> bool:
        """Whether these are the bytes, in pieces; not known without a checksum."""
        state = xxh3_128()
        for piece in pieces:
            state.update(piece)
        return state.digest() == self.checksum


class Coding(NamedTuple):
    """What codecs did to a block."""

    length: int
    """Bytes that are stored."""
    steps: bytes = b""
    """The steps, packed; ``steps_of`` reads them."""


class CodecStep(NamedTuple):
    """What one codec did to a block: packed, its id (2 bytes), the parameters' length (1), they."""

    codec: int
    params: bytes
    """What it had stored beside the block."""
    before: bytes
    """The steps before it, packed: an encryption binds them."""


def told(label: Buffer) -> LabelFields | None:
    """What a label says, without key or codec; None if it is damaged or of another version."""
    fields = _fields(label)
    if fields is None:
        return None
    *_, length, key, space, priority, floor, terms, ends_s, salt, checksum, _ = fields
    facts = Facts(
        priority,
        floor,
        None if ends_s == inf else ends_s,
        b"" if salt == _NO_SALT else salt,
        terms,
    )
    return LabelFields(
        BlockKey(key), Namespace(space), length, facts, checksum if fields[2] else b""
    )


def _fields(label: Buffer) -> tuple[Any, ...] | None:
    """The head's, and steps with zeros; None if the label is damaged or of another version."""
    if len(label) != LABEL_BYTES:
        return None
    (check,) = _CHECK.unpack_from(label, _BODY.size)
    if xxh3_64_intdigest(label[: _BODY.size]) != check:
        return None
    fields = _BODY.unpack_from(label)
    if fields[0] != MAGIC or fields[1] != VERSION or fields[3] > _ROOM_BYTES:
        return None
    return fields


def packed_step(codec: int, params: bytes) -> bytes:
    """One more step, to append to the packed ones before it."""
    return _STEP.pack(codec, len(params)) + params


def steps_of(coding: Coding) -> list[CodecStep] | None:
    """The steps in the order in which they were applied; None if there cannot be such."""
    packed, steps, at = coding.steps, list[CodecStep](), 0
    while at < len(packed):
        if at + _STEP.size > len(packed) or len(steps) == STEPS_MAX:
            return None
        codec, size = _STEP.unpack_from(packed, at)
        begin, at = at, at + _STEP.size + size
        steps.append(CodecStep(codec, packed[at - size : at], packed[:begin]))
    return steps if at == len(packed) else None


class Labels:
    """Makes and checks the labels of one level.

    Parameters
    ----------
    namespace:
        Whatever stands for the model, its weights and the layout: no other blocks are read.
    block_bytes:
        Length of a whole block.
    verify:
        Whether stored bytes get a checksum and are compared with it; else all are read unchecked.
    wall:
        Tells the wall time, and so which blocks have expired. None where the level knows that
        better: a shared tier's blocks expire when their labels say so.
    """

    def __init__(
        self,
        namespace: Namespace,
        block_bytes: int,
        *,
        verify: bool,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self.namespace = namespace
        self.block_bytes = block_bytes
        self.verify = verify
        self._wall = wall
        self.whole = Coding(block_bytes)

    def pack(
        self,
        key: BlockKey,
        stored: Buffer,
        facts: Facts = NO_FACTS,
        coding: Coding | None = None,
    ) -> bytes:
        """The label of bytes that are to be stored. Reads all of them, without the GIL."""
        coding, (priority, floor, expires_wall_s, salt, terms) = coding or self.whole, facts
        body = _BODY.pack(
            MAGIC,
            VERSION,
            self.verify,
            len(coding.steps),
            len(stored),
            key,
            self.namespace,
            priority,
            floor,
            terms,
            inf if expires_wall_s is None else expires_wall_s,
            salt,
            xxh3_128_digest(stored) if self.verify else b"",
            coding.steps,
        )
        return body + _CHECK.pack(xxh3_64_intdigest(body))

    def check(
        self, wanted: BlockKey, label: Buffer, stored: memoryview
    ) -> tuple[Outcome, Coding | None]:
        """Whether a label and the bytes beside it are this block, still encoded, and how.

        ``stored`` may be longer than what the label describes, never shorter.
        """
        if (fields := _fields(label)) is None:
            return Outcome.CORRUPT, None
        checked, steps_bytes, length, key, space = fields[2:7]
        if key != wanted or space != self.namespace:
            return Outcome.STALE, None
        if self._wall is not None and fields[_ENDS] < inf and fields[_ENDS] <= self._wall():
            return Outcome.EXPIRED, None
        if not 0 < length <= self.block_bytes or length > len(stored):
            return Outcome.CORRUPT, None
        if length < self.block_bytes and not steps_bytes:
            return Outcome.CORRUPT, None  # only codecs make less of a block
        if self.verify and not checked:
            return Outcome.STALE, None
        if self.verify and xxh3_128_digest(stored[:length]) != fields[-2]:
            return Outcome.CORRUPT, None
        if not steps_bytes:
            return Outcome.GOOD, self.whole
        return Outcome.GOOD, Coding(length, fields[-1][:steps_bytes])


class Write:
    """A block that is to be stored: the first ``length`` bytes of ``view``, and ``label()``.

    The level owns the slot, and claims it while the call lasts.
    """

    view: memoryview
    """The whole slot, aligned to pages; not to be written."""
    kind = ""
    """For codecs: what its layers keep, of ``Layout.kinds``; empty if unknown, or all alike."""
    _label = b""
    _coding: Coding | None = None

    def __init__(
        self,
        labels: Labels,
        ref: Ref,
        slot: Slot,
        view: memoryview,
        facts: Facts = NO_FACTS,
        *,
        coding: Coding | None = None,
        replace: bool = False,
    ) -> None:
        self.key, self.place = ref
        self.slot = slot
        self.view = view
        self.length = labels.block_bytes if coding is None else coding.length
        """How many bytes at the beginning of ``view`` to store: codecs make fewer of a block."""
        self.facts = facts
        self.replace = replace
        """Whether what a shared tier has under the key is of no use, and to be replaced."""
        self._coding = coding
        self._labels = labels

    def label(self) -> bytes:
        """``LABEL_BYTES`` to store beside the bytes, all of which it reads, without the GIL.

        Any thread may call it; an event loop should not, for blocks that are large.
        """
        if not self._label:
            stored = self.view[: self.length]
            self._label = self._labels.pack(self.key, stored, self.facts, self._coding)
        return self._label


class Read:
    """A block that is wanted: its bytes go to the beginning of ``view``, then ``came`` is called.

    The level owns the slot, and claims it while the call lasts.
    """

    view: memoryview
    """The whole slot, aligned to pages: as many bytes as a block has, or a few more."""
    _label = b""
    _length = 0
    _outcome: Outcome | None = None
    _coding: Coding | None = None

    def __init__(self, labels: Labels, ref: Ref, slot: Slot, view: memoryview) -> None:
        self.key, self.place = ref
        self.slot = slot
        self.view = view
        self._labels = labels

    def came(self, label: Buffer, length: int) -> None:
        """So many bytes are in ``view``, and this lay beside them. For each block that was found.

        ``length`` may be more than was stored where a tier reads whole pages. Checks nothing. If
        it is called again, the last time counts: with ``b""`` nothing came after all.
        """
        self._label, self._length = bytes(label), length
        self._outcome = self._coding = None

    def check(self) -> bool:
        """Whether it is the block, whole: label, namespace, key, length and checksum.

        For tiers with threads of their own, while the bytes are in a cache; any thread may call
        it, and the GIL is free for most of it. Of what was not checked when ``get`` returns, the
        level sees to it. It never decodes.
        """
        if self._outcome is None:
            if 0 <= self._length <= len(self.view):
                stored = self.view[: self._length]
                self._outcome, self._coding = self._labels.check(self.key, self._label, stored)
            else:  # they cannot be there
                self._outcome = Outcome.CORRUPT
        return self._outcome is Outcome.GOOD


class SlotAccess(NamedTuple):
    """What all reads and writes of a level have in common."""

    labels: Labels
    view: Callable[[Slot], memoryview]
    """Of a slot."""


class LevelWrite(Write):
    """A write as its level makes it: many, in little time."""

    def __init__(
        self,
        key: BlockKey,
        place: int,
        slot: Slot,
        side: SlotAccess,
        facts: Facts,
        kind: str,
        replace: bool,
    ) -> None:
        self._labels, view = side
        self.key = key
        self.place = place
        self.slot = slot
        self.view = view(slot)
        self.length = self._labels.block_bytes
        self.facts = facts
        self.replace = replace
        self.kind = kind


class LevelRead(Read):
    """A read as its level makes and sees it."""

    def __init__(self, side: SlotAccess, key: BlockKey, place: int, slot: Slot) -> None:
        self._labels, view = side
        self.key = key
        self.place = place
        self.slot = slot
        self.view = view(slot)

    @property
    def verdict(self) -> tuple[Outcome | None, Coding | None]:
        """What ``check`` found, None before it; and how the block is encoded, if that was good."""
        return self._outcome, self._coding


def all_plain(reads: Sequence[LevelRead], labels: Labels) -> bool:
    """Whether all were checked, and are as they were before any codec; in C."""
    return all(map(is_, map(_CODING, reads), repeat(labels.whole)))


_CODING = attrgetter("_coding")


class ReadResult(NamedTuple):
    """What ``Read.came`` was told, and what came of ``Read.check``: for another process."""

    label: bytes
    length: int
    outcome: Outcome | None
    coding: Coding | None


def arrival(read: Read) -> ReadResult | None:
    """What came for a block; None if nothing did."""
    if not read._label:
        return None
    return ReadResult(read._label, read._length, read._outcome, read._coding)


def arrived(read: Read, found: ReadResult) -> None:
    """The same came for it in another process, and was checked there, if it was checked."""
    read.came(found.label, found.length)
    whole = read._labels.whole
    read._outcome = found.outcome
    read._coding = whole if found.coding == whole else found.coding


def to_write(block: Write) -> tuple[bool, Coding | None]:
    """Whether it gets a checksum, and what codecs did to it."""
    return block._labels.verify, block._coding


def is_verified(block: Read) -> bool:
    """Whether its checksum is compared."""
    return block._labels.verify
