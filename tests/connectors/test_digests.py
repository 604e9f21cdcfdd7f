"""Digests of tensors: whatever differs is seen, on the host and on a device, at a known cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvladder.connectors import digests
from kvladder.connectors.digests import on_device, on_host

Digest = Callable[[torch.Tensor], bytes]
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex128,
    torch.float8_e4m3fn, torch.int8, torch.bool,
]  # fmt: skip
TRAFFIC_MAX = 20
"""Largest number of bytes that a device may read and write for each byte of a tensor."""


@pytest.fixture(params=[on_host, on_device])
def digest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Digest:
    """Return the digest made in two ways, once in pieces that end inside a tensor."""
    monkeypatch.setattr(digests, "PIECE", 16)
    found: Digest = request.param
    return found


def changes(flat: torch.Tensor) -> list[torch.Tensor]:
    """A tensor with each of its elements negated, with neighbours swapped, and turned around."""
    found = [flat.clone() for _ in range(2 * len(flat) - 1)]
    for at, one in enumerate(found[: len(flat)]):
        one[at] *= -1
    for at, one in enumerate(found[len(flat) :]):
        one[at], one[at + 1] = flat[at + 1], flat[at]
    return [*found, flat.flip(0), flat * -1, flat + 1]


def test_every_element_and_its_place_count(digest: Digest) -> None:
    flat = torch.arange(1.0, 41.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        variants = [flat.to(dtype), *changes(flat.to(dtype))]
        assert len({digest(one) for one in variants}) == len(variants)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_has_a_digest(digest: Digest, dtype: torch.dtype) -> None:
    zeros = torch.zeros(5, 7).to(dtype)
    ones = [zeros.clone() for _ in range(35)]
    for at, one in enumerate(ones):
        one.view(-1)[at] = torch.ones(()).to(dtype)
    assert len({digest(one) for one in [zeros, *ones]}) == 36
    assert digest(zeros) == digest(zeros.clone())
    assert digest(zeros[:0]) == digest(zeros[:0])
    assert digest(zeros[0, 0]) != digest(ones[0][0, 0])


@pytest.mark.slow
def test_two_changed_words_never_cancel(digest: Digest) -> None:
    """The highest bit of two words is the hardest pair: in a sum of products it would vanish."""
    words = torch.arange(40)
    top = torch.tensor(-(1 << 63))
    found = {digest(words)}
    for pair in combinations(range(len(words)), 2):
        one = words.clone()
        one[list(pair)] ^= top
        found.add(digest(one))
        one[list(pair)] = words[list(reversed(pair))]
        found.add(digest(one))
    assert len(found) == 1 + 2 * 40 * 39 // 2


@pytest.mark.parametrize("bit", [0, 7, 15, 31, 32, 47, 62, 63])
def test_the_effects_of_one_bit_differ_from_word_to_word(bit: int) -> None:
    """Two flipped bits cancel only if the effects on the sum are equal or opposite."""
    words = torch.randint(-(1 << 62), 1 << 62, (1 << 17,), generator=seeded(bit))
    for values in (words, torch.zeros_like(words)):
        effects = mixed(values ^ (1 << bit if bit < 63 else -(1 << 63))) - mixed(values)
        assert len(torch.cat([effects, -effects]).unique()) == 2 * len(values)


def mixed(words: torch.Tensor) -> torch.Tensor:
    """Return the words as they are added, each mixed with its position."""
    found = digests._Sum(words.device, words.nbytes)
    found.add(words.view(torch.uint8))
    return found._mixed


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# ---- what lies in memory in another order, or with gaps


def layouts() -> Iterator[torch.Tensor]:
    """Yield tensors of one shape and one memory: all that differs is the order of dimensions."""
    memory = torch.arange(8 * 8 * 8, dtype=torch.int16).view(8, 8, 8)
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        yield memory.permute(order)


def test_transposed_tensors_differ_though_their_memory_does_not(digest: Digest) -> None:
    assert len({digest(one) for one in layouts()}) == 6


@pytest.mark.slow
def test_each_element_counts_in_any_layout(digest: Digest) -> None:
    memory = torch.arange(240, dtype=torch.uint8)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda m: m.view(12, 20).t(),
        lambda m: m.view(12, 20)[:, :17],  # rows that end inside a word
        lambda m: m.view(12, 20)[:, 3:17].t(),
        lambda m: m[1:],  # not aligned
        lambda m: m.view(4, 60)[:, ::3],
        lambda m: m.view(2, 6, 20)[:, 1:, 5:].permute(2, 0, 1),
    ]
    for view in views:
        seen = {digest(view(memory))}
        inside = 0
        for at in range(len(memory)):
            changed = memory.clone()
            changed[at] ^= 0x80
            if not torch.equal(view(changed), view(memory)):
                inside += 1
                seen.add(digest(view(changed)))
        assert len(seen) == 1 + inside >= 80


def test_dimensions_of_one_element_have_no_place_in_memory() -> None:
    flat = torch.arange(12.0)
    strange = flat.as_strided((1, 12, 1), (7, 1, 99))
    assert on_device(strange) == on_device(flat) != on_device(flat.view(3, 4).t())


def test_pieces_do_not_show_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(50, 34, generator=seeded(1)), torch.arange(999, dtype=torch.uint8)]
    tensors += [tensors[0].t(), tensors[0][:, :30]]
    whole = [on_device(one) for one in tensors]
    monkeypatch.setattr(digests, "PIECE", 256)
    assert [on_device(one) for one in tensors] == whole


# ---- what it costs


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, and the largest that one makes.

    Strided elements count with the gaps between them, as a device moves whole sectors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = [one for one in (*args, *(kwargs or {}).values()) if torch.is_tensor(one)]
        result = func(*args, **(kwargs or {}))
        if func.is_view or func is torch.ops.aten.empty.memory_format:
            return result
        overwrites = func in (torch.ops.aten.copy_.default, torch.ops.aten.zero_.default)
        self.bytes += sum(map(span, known[overwrites:]))
        made = result if torch.is_tensor(result) else torch.empty(0)
        if (kwargs or {}).get("out") is not made:  # which was counted, since it is an argument
            self.bytes += span(made)
        if all(made is not one for one in known):
            self.made = max(self.made, made.nbytes)
        return result


def span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def of_bytes(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 256, (1024, 4096), dtype=torch.uint8, generator=seeded(3)).view(dtype)


@pytest.mark.slow  # the first one loads what torch needs to dispatch
@pytest.mark.parametrize("piece", [1 << 16, digests.PIECE])
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(of_bytes(torch.bfloat16), id="bf16"),
        pytest.param(of_bytes(torch.float8_e4m3fn), id="fp8"),
        pytest.param(of_bytes(torch.float8_e4m3fn).t(), id="fp8-transposed"),
        pytest.param(of_bytes(torch.float32), id="fp32"),
        pytest.param(of_bytes(torch.uint8).view(-1)[1:-3], id="not-aligned"),
    ],
)
def test_a_device_moves_few_bytes_for_each_byte(
    tensor: torch.Tensor, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PIECE", piece)
    with Traffic() as traffic:
        on_device(tensor)
    assert traffic.bytes <= TRAFFIC_MAX * (tensor.nbytes + 2 * digests.WORD)  # with its ends
    assert traffic.made <= piece * digests.WORD, "no copy of a whole tensor"


@pytest.mark.gpu
def test_a_device_gives_the_sum_that_the_host_gives() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    flat = torch.randn(1 << 20, generator=seeded(1))
    for tensor in (flat, flat.view(1 << 10, -1).t(), flat.bfloat16()[1:]):
        assert on_device(tensor.cuda()) == on_device(tensor)
        assert on_device(tensor, torch.device("cuda")) == on_device(tensor)
