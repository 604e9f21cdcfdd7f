"""The fp8 codec: KV numbers in 8 bits, with a scale for each head of each token. Lossy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from struct import Struct
from typing import Final

import torch

from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.tiers.codecs.base import Codec, Stage, Subject

ROW_MIN = 8
"""Fewest elements that share a scale, since each scale takes 4 bytes."""
LARGEST: Final = 448.0
"""Largest number of the format E4M3: sign, 4 bits of exponent, 3 of mantissa, no infinity."""
_SMALLEST_SCALE: Final = 2.0**-126
"""Smallest scale. Smaller numbers are subnormal, and divisions by them not exact."""

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PARAMS = Struct("<BI")
_SCALE_BYTES = 4
_TO_HALF: Final = 2.0 ** (15 - 7)
"""Factor from E4M3 bits read as float16: 15 and 7 are the biases of the two exponents."""
_PART_ELEMENTS = 16384
"""Elements per part: half of the most that torch handles in one thread."""


class Fp8Codec(Codec):
    """Stores each row of ``layout.row_elements`` as one float32 scale and E4M3 numbers.

    The scale of a row is its largest magnitude divided by 448, so no number overflows. A number
    ``x`` comes back as ``y`` with ``|y - x| <= |x| / 16 + largest / 2**18``, plus the rounding of
    the element type; ``largest`` is the row's largest magnitude. Blocks with infinities or NaN are
    not encoded. The scales of all rows come first, then all numbers.
    """

    name = "fp8"
    id = 3
    stage = Stage.REDUCE
    lossy = True

    def open(self, layout: Layout, namespace: bytes) -> Layout:
        if layout.element not in _DTYPES:
            found = layout.element or "elements of unknown type"
            raise ConfigError(
                f"fp8 cannot encode {found}", hint=f"expected one of: {', '.join(_DTYPES)}"
            )
        row = layout.row_elements
        if row < ROW_MIN:
            raise ConfigError(
                f"fp8 needs a row of {ROW_MIN} or more elements for each token and head",
                hint="leave fp8 out: "
                + (f"the rows have {row}" if row else "the engine does not report its rows"),
            )
        if layout.block_bytes % (row * layout.element_bytes):
            raise ConfigError(
                f"blocks of {layout.block_bytes} bytes cannot be divided into rows"
                f" of {row} {layout.element}",
                hint="leave fp8 out",
            )
        self._row = row
        self._dtype = _DTYPES[layout.element]
        self._params = _PARAMS.pack(list(_DTYPES).index(layout.element), row)
        return replace(layout, element="uint8", row_elements=0)

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes] | None:
        numbers = _tensor(data, self._dtype).view(-1, self._row)
        split = len(numbers) * _SCALE_BYTES
        length = split + numbers.numel()
        scales = _tensor(target[:split], torch.float32).view(-1, 1)
        eighths = _tensor(target[split:length], torch.float8_e4m3fn).view(-1, self._row)
        for part in self._parts(len(numbers)):
            rows = numbers[part].float()
            largest = rows.abs().amax(1, keepdim=True)
            if not bool(torch.isfinite(largest).all()):
                return None
            scale = scales[part].copy_(largest).div_(LARGEST).clamp_(min=_SMALLEST_SCALE)
            eighths[part].copy_((rows / scale).clamp_(-LARGEST, LARGEST))
        return target[:length], self._params

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        count, rest = divmod(len(data), _SCALE_BYTES + self._row)
        size = count * self._row * self._dtype.itemsize
        if params != self._params or rest or not 0 < size <= len(target):
            return None
        split = count * _SCALE_BYTES
        scales = _tensor(data[:split], torch.float32).view(-1, 1) * _TO_HALF
        eighths = _tensor(data[split:], torch.int8).view(-1, self._row)
        numbers = _tensor(target[:size], self._dtype).view(-1, self._row)
        for part in self._parts(count):
            # the bits of an E4M3 number, shifted, are a float16 that is smaller by 2**8
            halves = eighths[part].to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
            numbers[part].copy_(halves.view(torch.float16).float().mul_(scales[part]))
        return target[:size]

    def _parts(self, rows: int) -> Iterator[slice]:
        """Return slices of rows, small enough for the CPU's caches and for torch to use one thread.

        Several threads call this codec already, and torch's threads belong to the engine.
        """
        step = max(1, _PART_ELEMENTS // self._row)
        return (slice(start, start + step) for start in range(0, rows, step))


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return these bytes as numbers; copy only read-only bytes, since torch warns of those."""
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
