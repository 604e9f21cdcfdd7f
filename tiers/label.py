"""The label that every tier stores beside a block's bytes; the ladder makes and checks it.

A label has ``LABEL_BYTES`` bytes, little endian. Its last 8 bytes are the xxh3-64 of all bytes
before them::

    head    128  magic, version, whether there is a checksum, length of the codecs' steps, length
                 of the stored bytes, key, namespace, facts, xxh3-128 of the stored bytes (zeros
                 without a checksum)
    steps   402  what each codec did, one ``CodecStep`` after the other, in the order of encoding
    zeros    38
    check     8

The length is fixed so that one call reads a label together with bytes of unknown length. Reading
the head needs neither encryption keys nor codecs: purges, quotas and tools read it with ``told``.
"""

# pyright: reportPrivateUsage=false
# Authors of tiers use reads and writes, so these hide the members that only the level needs.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import repeat
from math import inf
from operator import attrgetter, is_
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from kvladder.arena import Slot
from kvladder.keys import SALT_BYTES, BlockKey, Namespace
from kvladder.policy.eviction import PRIORITY_DEFAULT

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"kvlabel\0"
VERSION = 1
"""Version of the format. Shared tiers put it into the names of the objects that they store."""
LABEL_BYTES = 576
TAG_BYTES = 16
"""Size of a checksum, xxh3-128."""
PARAMS_BYTES = 64
"""Most bytes of parameters that one codec may store beside a block."""
STEPS_MAX = 6
"""Most codecs that may encode one block."""

_ROOM_BYTES = 440
"""Size of the steps and of the zeros after them."""
_BODY = Struct(f"<8sHBxHxxQ32s32sBBB5xd{SALT_BYTES}s{TAG_BYTES}s{_ROOM_BYTES}s")
_ENDS = 10
"""Index of the field of ``_BODY`` that says when the block expires."""
_STEP = Struct("<HB")
_CHECK = Struct("<Q")
_NO_SALT = bytes(SALT_BYTES)
assert STEPS_MAX * (_STEP.size + PARAMS_BYTES) <= _ROOM_BYTES
assert _BODY.size + _CHECK.size == LABEL_BYTES


class Facts(NamedTuple):
    """Facts that a tier may act on; a durable tier stores and ``recover`` returns them."""

    priority: int = PRIORITY_DEFAULT
    floor: int = PRIORITY_DEFAULT
    expires_wall_s: float | None = None
    """Seconds since the epoch at which the block expires, or None."""
    salt: bytes = b""
    """Digest of the request's cache salt, 8 bytes; empty if the request had no salt."""
    terms: int = 0
    """Three bits, 0 to 7; their meaning is the ladder's own."""


NO_FACTS = Facts()


class Ref(NamedTuple):
    """The key and the place of a block that a level has in its tier.

    ``place`` is the level's number for the block, ``0 <= place < capacity_blocks``. No two blocks
    that the level holds, writes or reads have the same place. A tier with fixed places uses it as
    an address. Other tiers ignore it.
    """

    key: BlockKey
    place: int


class RecoveredBlock(NamedTuple):
    """A block that a durable tier found again at the start."""

    key: BlockKey
    place: int
    facts: Facts = NO_FACTS


class Outcome(IntEnum):
    """The result of checking one block that was read."""

    GOOD = 0
    STALE = 1
    """Something else is stored there: another block, or one without the checksum required here."""
    CORRUPT = 2
    """The stored block is damaged."""
    UNREADABLE = 3
    """A codec or an encryption key is missing here, or the block lacks a required encryption."""
    EXPIRED = 4
    """The block has expired, but its tier still delivered it."""


class LabelFields(NamedTuple):
    """The fields of an undamaged label that can be read without encryption key and codec."""

    key: BlockKey
    namespace: Namespace
    length: int
    """Number of bytes stored beside the label."""
    facts: Facts
    checksum: bytes
    """xxh3-128 of these bytes; empty if the block has no checksum."""

    def is_of(self, pieces: Iterable[Buffer]) -> bool:
        """Return whether these pieces together are the stored bytes; False without a checksum."""
        state = xxh3_128()
        for piece in pieces:
            state.update(piece)
        return state.digest() == self.checksum


class Coding(NamedTuple):
    """The form in which a block is stored: its length, and the steps of its codecs."""

    length: int
    """Number of stored bytes."""
    steps: bytes = b""
    """The codecs' steps, packed; ``steps_of`` unpacks them."""


class CodecStep(NamedTuple):
    """The step of one codec. Packed: id (2 bytes), length of the parameters (1), parameters."""

    codec: int
    params: bytes
    """Parameters that the codec stored beside the block."""
    before: bytes
    """Earlier steps, packed. Encryption authenticates them."""


def told(label: Buffer) -> LabelFields | None:
    """Return the fields of a label, or None if it is damaged or of another version.

    Needs no encryption key and no codec.
    """
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
    """Return the fields of ``_BODY``; None if the label is damaged or of another version."""
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
    """Return one packed step, to append to the packed steps before it."""
    return _STEP.pack(codec, len(params)) + params


def steps_of(coding: Coding) -> list[CodecStep] | None:
    """Return the steps in the order of encoding; None if the packed bytes are not valid."""
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
        Digest of the model, its weights and the layout. Blocks of other namespaces are refused.
    block_bytes:
        Length of a whole block before encoding.
    verify:
        True if stored bytes get a checksum and reads compare it; else reads skip the comparison.
    wall:
        Returns the wall time, to refuse blocks that have expired by their labels. Only for shared
        tiers. None for other tiers: there the level itself knows when blocks expire.
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
        """Return the label of bytes to be stored. Reads all the bytes, without the GIL."""
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
        """Check that a label and the bytes beside it, still encoded, are the wanted block.

        ``stored`` may be longer than the length in the label. If it is shorter, the block is
        corrupt. Returns the outcome and, if it is GOOD, how the block is encoded.
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
            return Outcome.CORRUPT, None  # only codecs make a block shorter
        if self.verify and not checked:
            return Outcome.STALE, None
        if self.verify and xxh3_128_digest(stored[:length]) != fields[-2]:
            return Outcome.CORRUPT, None
        if not steps_bytes:
            return Outcome.GOOD, self.whole
        return Outcome.GOOD, Coding(length, fields[-1][:steps_bytes])


# Garbage collection takes long where each of many blocks has an object that it looks at. So these
# are structures that it does not see, and are made in C. A cycle through one of them must be cut.


class Write(msgspec.Struct, eq=False, gc=False):
    """A block to store: the first ``length`` bytes of ``view``, and ``label()`` beside them.

    The level owns the slot and holds a claim on it during the call.
    """

    _labels: Labels
    key: BlockKey
    place: int
    slot: Slot
    view: memoryview
    """The whole slot, aligned to pages. Do not write into it."""
    facts: Facts = NO_FACTS
    coding: Coding | None = None
    """How codecs encoded it; None if they did not."""
    replace: bool = False
    """True if a shared tier has a useless block under this key and must replace it."""
    kind: str = ""
    """Kind of the block's layers, of ``Layout.kinds``, for codecs; empty if unknown or unneeded."""
    _label: bytes = b""

    @property
    def length(self) -> int:
        """Number of bytes to store from the beginning of ``view``; fewer if a codec shrank it."""
        return self._labels.block_bytes if self.coding is None else self.coding.length

    def label(self) -> bytes:
        """Return the label to store beside the bytes; it has ``LABEL_BYTES`` bytes.

        The first call reads all bytes of the block, without the GIL. Any thread may call it. For
        large blocks, call it in a thread, not on the event loop.
        """
        if not self._label:
            stored = self.view[: self.length]
            self._label = self._labels.pack(self.key, stored, self.facts, self.coding)
        return self._label


class _Delivery(msgspec.Struct, eq=False, gc=False, kw_only=True):
    """What a tier delivered for a read, and what came of its check."""

    _label: bytes = b""
    _length: int = 0
    _outcome: Outcome | None = None
    _coding: Coding | None = None


class Read(_Delivery):
    """A block to read: write its bytes to the beginning of ``view``, then call ``came``.

    The level owns the slot and holds a claim on it during the call.
    """

    _labels: Labels
    key: BlockKey
    place: int
    slot: Slot
    view: memoryview
    """The whole slot, aligned to pages: as long as a block, or a few bytes longer."""

    def came(self, label: Buffer, length: int) -> None:
        """Report that ``view`` holds ``length`` bytes and that ``label`` was stored beside them.

        Call it for each block that was found. It checks nothing. A tier that reads whole pages may
        report a greater length than was stored. After several calls the last one counts. A call
        with the label ``b""`` reports that nothing was read after all.
        """
        self._label, self._length = bytes(label), length
        self._outcome = self._coding = None

    def check(self) -> bool:
        """Return whether ``view`` holds the wanted block: label, namespace, key, length, checksum.

        A tier with threads calls it right after reading, while the CPU's caches still have the
        bytes. Any thread may call it, and most of it runs without the GIL. The level checks what
        is unchecked when ``get`` returns. It never decodes.
        """
        if self._outcome is None:
            if 0 <= self._length <= len(self.view):
                stored = self.view[: self._length]
                self._outcome, self._coding = self._labels.check(self.key, self._label, stored)
            else:  # ``view`` cannot hold so many bytes
                self._outcome = Outcome.CORRUPT
        return self._outcome is Outcome.GOOD


class SlotAccess(NamedTuple):
    """The objects that all reads and writes of a level share."""

    labels: Labels
    view: Callable[[Slot], memoryview]
    """Function that returns the memory of a slot."""

    def read(self, key: BlockKey, place: int, slot: Slot) -> LevelRead:
        """Return a read of the block at ``place`` into ``slot``."""
        return LevelRead(self.labels, key, place, slot, self.view(slot))


class LevelRead(Read):
    """A read with the verdict that only the level reads."""

    @property
    def verdict(self) -> tuple[Outcome | None, Coding | None]:
        """Outcome of ``check``, None before it; and how the block is encoded if that is GOOD."""
        return self._outcome, self._coding

    def refuse(self, outcome: Outcome) -> None:
        """Record why the level does not use what came, though ``check`` may have passed."""
        self._outcome = outcome


def all_plain(reads: Sequence[LevelRead], labels: Labels) -> bool:
    """Return whether all reads were checked and good, and stored without codecs. Runs in C."""
    return all(map(is_, map(_CODING, reads), repeat(labels.whole)))


_CODING = attrgetter("_coding")


class ReadResult(NamedTuple):
    """The arguments of ``Read.came`` and the result of ``Read.check``, to send to a process."""

    label: bytes
    length: int
    outcome: Outcome | None
    coding: Coding | None


def arrival(read: Read) -> ReadResult | None:
    """Return what was read for a block; None if ``came`` reported nothing."""
    if not read._label:
        return None
    return ReadResult(read._label, read._length, read._outcome, read._coding)


def arrived(read: Read, found: ReadResult) -> None:
    """Record what another process read into this slot, and its check if it made one."""
    read.came(found.label, found.length)
    whole = read._labels.whole
    read._outcome = found.outcome
    read._coding = whole if found.coding == whole else found.coding


def to_write(block: Write) -> tuple[bool, Coding | None]:
    """Return whether the block gets a checksum, and how codecs encoded it (None: not at all)."""
    return block._labels.verify, block.coding


def is_verified(block: Read) -> bool:
    """Return whether the block's checksum is compared."""
    return block._labels.verify
