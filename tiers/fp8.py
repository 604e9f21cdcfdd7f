"""The fp8 codec: numbers of KV in 8 bits, with a scale for each head of each token. Lossy."""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from typing import Final

import torch

from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.tiers.codecs import Codec, Stage, Subject

ROW_MIN = 8
"""Elements that share a scale, at least: scales take 4 bytes each."""
LARGEST: Final = 448.0
"""Of the format E4M3: sign, 4 bits of exponent, 3 of mantissa, no infinity."""
_SMALLEST_SCALE: Final = 2.0**-126
"""Below it numbers are not normal any more, and divisions by them not exact."""

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PARAMS = Struct("<BI")
_SCALE_BYTES = 4


class Fp8Codec(Codec):
    """Stores ``layout.row_elements`` neighbours as one float32 scale and as many E4M3 numbers.

    The scale of a row is its largest magnitude over 448, so nothing overflows. Whatever ``x`` was,
    ``y`` comes back with ``|y - x| <= |x| / 16 + largest / 2**18``, ``largest`` that of its row,
    and the rounding of the element type added to it. Blocks with infinities or NaN are left as
    they are. First come the scales of all rows, then all numbers.
    """

    name = "fp8"
    id = 3
    stage = Stage.REDUCE
    lossy = True

    def open(self, layout: Layout, namespace: bytes) -> Layout:
        if layout.element not in _DTYPES:
            found = layout.element or "elements of a type that is not known"
            raise ConfigError(
                f"fp8 does not shrink {found}", hint=f"expected one of: {', '.join(_DTYPES)}"
            )
        row = layout.row_elements
        if row < ROW_MIN:
            raise ConfigError(
                "fp8 has to know which elements are one head of one token",
                hint="the engine does not say how its blocks are laid out"
                if row == 0
                else f"its rows of {row} elements are too short: expected {ROW_MIN} or more",
            )
        if layout.block_bytes % (row * layout.element_bytes):
            raise ConfigError(
                f"blocks of {layout.block_bytes} bytes are not rows of {row} {layout.element}",
                hint="leave fp8 out",
            )
        self._row = row
        self._dtype = _DTYPES[layout.element]
        self._params = _PARAMS.pack(list(_DTYPES).index(layout.element), row)
        return replace(layout, element="uint8", row_elements=0)

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes] | None:
        rows = _tensor(data, self._dtype).view(-1, self._row).float()
        largest = rows.abs().amax(1, keepdim=True)
        if not bool(torch.isfinite(largest).all()):
            return None
        scales = (largest / LARGEST).clamp_(min=_SMALLEST_SCALE)
        eighths = (rows / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        split = len(scales) * _SCALE_BYTES
        length = split + eighths.numel()
        _tensor(target[:split], torch.float32).copy_(scales.view(-1))
        _tensor(target[split:length], torch.uint8).copy_(eighths.view(torch.uint8).view(-1))
        return target[:length], self._params

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        if params != self._params or len(data) % (_SCALE_BYTES + self._row):
            return None
        count = len(data) // (_SCALE_BYTES + self._row)
        size = count * self._row * self._dtype.itemsize
        if not 0 < size <= len(target):
            return None
        split = count * _SCALE_BYTES
        scales = _tensor(data[:split], torch.float32).view(-1, 1)
        rows = _tensor(data[split:], torch.float8_e4m3fn).view(-1, self._row).float()
        _tensor(target[:size], self._dtype).copy_(rows.mul_(scales).view(-1))
        return target[:size]


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """These bytes as numbers, not copied unless they cannot be written: torch warns of that."""
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
