"""A chain of codecs for one block, and decoding by the steps that its label names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.codecs.base import Codec, Stage, Subject
from kvladder.tiers.label import PARAMS_BYTES, Coding, Outcome, packed_step, steps_of

_ELSEWHERE, _THERE = -1, 2
"""Where bytes lie if not in spare buffer 0 or 1: in the source, in the target."""

Find = Callable[[int], Codec | None]
"""A function that returns the opened codec of an id, or None if none can be used here."""


class Chain:
    """Encodes blocks with its codecs; decodes blocks with the codecs that their labels name.

    All methods block and may run in several threads at once.

    Parameters
    ----------
    codecs:
        Opened codecs that encode blocks, in this order.
    find:
        Finds the codecs that a label names and this chain lacks.
    """

    def __init__(self, codecs: Sequence[Codec], *, layout: Layout, find: Find) -> None:
        self.codecs = codecs
        self._own = {codec.id: codec for codec in codecs}
        self._find = find
        self._size = layout.block_bytes
        self.secret = any(codec.stage == Stage.ENCRYPT for codec in codecs)
        """True if this chain encrypts; then it refuses blocks that are not encrypted."""
        self._local = threading.local()

    def encode(
        self, subject: Subject, data: memoryview, target: memoryview
    ) -> tuple[memoryview, Coding]:
        """Encode ``data``; return the bytes to store, and how they are encoded.

        The bytes are ``data`` itself or the beginning of ``target``. No intermediate result is
        written into ``target``, so no bytes from before an encryption are left there.
        """
        steps, last = b"", len(self.codecs) - 1
        source, held = data, _ELSEWHERE
        for index, codec in enumerate(self.codecs):
            goes = _THERE if index == last else 1 - max(held, 0)
            into = target if goes == _THERE else self._spare(goes)
            if codec.allowed is not None and subject.kind not in codec.allowed:
                continue
            done = codec.encode(source, into[: len(source)], subject._replace(steps=steps))
            if done is None:
                continue
            if done[0] is not source:
                source, held = done[0], goes
            assert len(done[1]) <= PARAMS_BYTES, codec.name
            steps += packed_step(codec.id, done[1])
        if held in {0, 1}:
            target[: len(source)] = source
            source = target[: len(source)]
        return source, Coding(len(source), steps)

    def decode(self, key: BlockKey, coding: Coding, slot: memoryview) -> Outcome:
        """Decode the bytes in ``slot``, in place.

        Returns UNREADABLE if a codec or an encryption key is missing here, or if this chain
        encrypts and the block is not encrypted. Returns CORRUPT if the result is no whole block.
        """
        if not coding.steps:  # stored without codecs
            return Outcome.UNREADABLE if self.secret else Outcome.GOOD
        steps = steps_of(coding)
        if steps is None:
            return Outcome.CORRUPT
        known: list[Codec] = []
        for step in steps:
            codec = self._own.get(step.codec) or self._find(step.codec)
            if codec is None or not codec.reads(step.params):
                return Outcome.UNREADABLE
            known.append(codec)
        if any(after.stage < before.stage for before, after in pairwise(known)):
            return Outcome.CORRUPT  # no chain has this order, e.g. compression after encryption
        if self.secret and not any(codec.stage == Stage.ENCRYPT for codec in known):
            return Outcome.UNREADABLE
        self._spare(0)[: coding.length] = slot[: coding.length]
        found, held = self._spare(0)[: coding.length], 0  # the last one writes into the slot
        for left, codec, step in zip(
            reversed(range(len(known))), reversed(known), reversed(steps), strict=True
        ):
            goes = 1 - max(held, 0) if left else _THERE
            into = slot if goes == _THERE else self._spare(goes)
            subject = Subject(key, steps=step.before)
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

    def _spare(self, number: int) -> memoryview:
        """Return one of this thread's two buffers for the bytes between two codecs."""
        spares: list[memoryview] | None = getattr(self._local, "spares", None)
        if spares is None:
            spares = [memoryview(bytearray(self._size)) for _ in range(2)]
            self._local.spares = spares
        return spares[number]
