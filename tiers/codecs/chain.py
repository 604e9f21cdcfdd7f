"""A chain of codecs applied to one block, and the note that tells how to undo it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvladder.keys import BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.tiers.base import NOTE_BYTES, Item, Outcome
from kvladder.tiers.codecs.base import PARAMS_BYTES, Codec, Stage, Subject

VERSION = 1
CHAIN_MAX = 6
"""Codecs of one chain: what they have to say fits a note."""

_HEAD = Struct("<BBQ")
_STEP = Struct("<HB")
_CHECK = Struct("<Q")
_ELSEWHERE, _THERE = -1, 2
"""Where bytes are that are not in a spare buffer, 0 or 1: where they came from, where they go."""
assert _HEAD.size + CHAIN_MAX * (_STEP.size + PARAMS_BYTES) + _CHECK.size <= NOTE_BYTES

Find = Callable[[int], Codec | None]
"""The codec of this id, opened; None if there is none here that can be used."""


class Step(NamedTuple):
    """What one codec did to a block."""

    codec: int
    """Its id."""
    params: bytes
    """What it had stored beside the block."""
    before: bytes
    """The steps before it, as stored."""


class Coding(NamedTuple):
    """What a note says."""

    length: int
    """Bytes that are stored."""
    steps: list[Step]
    """In the order in which they were applied."""


class Chain:
    """Encodes with given codecs; decodes whatever the note of a block names.

    All methods block and may run in several threads at once.

    Parameters
    ----------
    codecs:
        What is applied to blocks that are stored, in this order; already opened.
    find:
        Where codecs are found that only a note names.
    checked:
        Whether blocks without a codec that checks them are refused.
    """

    def __init__(
        self,
        codecs: Sequence[Codec],
        *,
        layout: Layout,
        namespace: Namespace,
        find: Find,
        checked: bool,
    ) -> None:
        self.codecs = codecs
        self.last = max((i for i, c in enumerate(codecs) if c.stage != Stage.CHECK), default=-1)
        """Index of the last codec that changes bytes; negative if none does."""
        self._own = {codec.id: codec for codec in codecs}
        self._find = find
        self._size = layout.block_bytes
        self._space = namespace
        self._checked = checked
        self._secret = any(codec.stage == Stage.ENCRYPT for codec in codecs)
        self.demands = checked or self._secret
        """Whether blocks are refused that nothing was done to."""
        self._local = threading.local()

    def encode(self, item: Item, data: memoryview, target: memoryview) -> tuple[memoryview, bytes]:
        """The bytes to store and the note.

        The bytes are ``data`` itself or the beginning of ``target``, into which only the last
        codec's output is written: nothing that it has encrypted is left there.
        """
        steps = b""
        count = 0
        source, held = data, _ELSEWHERE
        for index, codec in enumerate(self.codecs):
            goes = _THERE if index == self.last else 1 - max(held, 0)
            into = target if goes == _THERE else self._spare(goes)
            done = codec.encode(source, into[: len(source)], Subject(item.key, item.salt, steps))
            if done is None:
                continue
            if done[0] is not source:
                source, held = done[0], goes
            assert len(done[1]) <= PARAMS_BYTES, codec.name
            steps += _STEP.pack(codec.id, len(done[1])) + done[1]
            count += 1
        if held in {0, 1}:
            target[: len(source)] = source
            source = target[: len(source)]
        note = _HEAD.pack(VERSION, count, len(source)) + steps
        return source, note + self._check(item.key, note)

    def decode(self, item: Item, note: bytes, slot: memoryview) -> Outcome:
        """Undo in ``slot`` what was done to the bytes that lie there.

        STALE if that needs a codec or a key that is not here, or if it is not what this chain
        demands: a checksum where blocks are checked, encryption where they are encrypted.
        """
        if not note:  # stored as it is
            return Outcome.STALE if self.demands else Outcome.GOOD
        coding = self._read(item.key, note)
        if coding is None or coding.length > self._size:
            return Outcome.CORRUPT
        known: list[Codec] = []
        for step in coding.steps:
            codec = self._own.get(step.codec) or self._find(step.codec)
            if codec is None or not codec.reads(step.params):
                return Outcome.STALE
            known.append(codec)
        if any(after.stage < before.stage for before, after in pairwise(known)):
            return Outcome.CORRUPT  # no chain does: what is encrypted is not packed after that
        if (self._checked and not any(codec.checks for codec in known)) or (
            self._secret and not any(codec.stage == Stage.ENCRYPT for codec in known)
        ):
            return Outcome.STALE
        left = sum(codec.stage != Stage.CHECK for codec in known)
        found, held = slot[: coding.length], _THERE
        if left:  # the last one writes into the slot
            self._spare(0)[: coding.length] = found
            found, held = self._spare(0)[: coding.length], 0
        for codec, step in zip(reversed(known), reversed(coding.steps), strict=True):
            left -= codec.stage != Stage.CHECK
            goes = _THERE if left == 0 and held != _THERE else 1 - max(held, 0)
            into = slot if goes == _THERE else self._spare(goes)
            subject = Subject(item.key, steps=step.before)
            done = codec.decode(found, step.params, into[: self._size], subject)
            if done is None:
                return Outcome.CORRUPT
            if done is not found:
                found, held = done, goes
        if len(found) != self._size:
            return Outcome.CORRUPT
        if held != _THERE:
            slot[: self._size] = found
        return Outcome.GOOD

    def _read(self, key: BlockKey, note: bytes) -> Coding | None:
        """What ``note`` says if it is whole and was written for this block."""
        body = note[: -_CHECK.size]
        if len(note) < _HEAD.size + _CHECK.size or note[-_CHECK.size :] != self._check(key, body):
            return None
        version, count, length = _HEAD.unpack_from(body)
        if version != VERSION:
            return None
        steps: list[Step] = []
        at = _HEAD.size
        for _ in range(count):
            if at + _STEP.size > len(body):
                return None
            codec, size = _STEP.unpack_from(body, at)
            begin, at = at, at + _STEP.size + size
            steps.append(Step(codec, body[at - size : at], body[_HEAD.size : begin]))
        return Coding(length, steps) if at == len(body) else None

    def _check(self, key: BlockKey, body: bytes) -> bytes:
        return _CHECK.pack(xxh3_64_intdigest(self._space + key + body))

    def _spare(self, number: int) -> memoryview:
        """One of this thread's two buffers for what is between two codecs."""
        spares: list[memoryview] | None = getattr(self._local, "spares", None)
        if spares is None:
            spares = [memoryview(bytearray(self._size)) for _ in range(2)]
            self._local.spares = spares
        return spares[number]
