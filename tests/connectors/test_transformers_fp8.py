"""The error of a model's answers when its KV comes back from a level that stores it in 8 bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvladder.arena import Slot
from kvladder.connectors.transformers.model import PooledModel
from kvladder.errors import ConfigError
from tests.connectors.test_transformers import (
    BLOCK,
    evict_all,
    make_model,
    one_thread,
    opened,
    plain,
    rest,
    stack,
)

pytestmark = pytest.mark.slow
__all__ = ["one_thread"]

FP8 = [{"name": "fp8", "allow_lossy": ["full", "window"]}, "checksum"]
TOKENS = 800
RMS, MOST = 0.05, 0.25
"""The promise of docs/reference/configuration.md: shares of the logits' spread, mean and most."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=66)


def logits(pooled: PooledModel, prompt: Sequence[int], said: Sequence[int]) -> tuple[int, Any]:
    """Return the number of cached tokens, and the logits after the prompt and after each token."""
    request = pooled.requests.begin(prompt)
    while not pooled.prepare(request):
        pooled.cache.wait(0.05)
        pooled.cache.poll()
    cached = request.cached
    pooled.requests.extend(request, len(prompt))
    rows = pooled.run([request])
    for token in said:
        pooled.requests.append(request, [token])
        rows += pooled.run([request])
    pooled.requests.release(request)
    rest(pooled)
    found = [row.float() for row in rows if row is not None]
    assert len(found) == len(said) + 1
    return cached, torch.stack(found)


def errors(found: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Root mean square and largest difference, as shares of how far the right ones spread."""
    off = (found - right) / right.std()
    return off.square().mean().sqrt().item(), off.abs().max().item()


def again(model: Any, source: Any, prompt: list[int], said: list[int]) -> tuple[Any, Any]:
    """Return the logits without a cache, and of a new cache over the blocks of the first one."""
    with opened(model, source) as pooled:
        cached, right = logits(pooled, prompt, said)
        assert cached == 0
    with opened(model, source) as pooled:
        cached, found = logits(pooled, prompt, said)
        assert cached == len(prompt) // BLOCK * BLOCK
        assert pooled.cache.stats()["disk"]["hits"] > 0
        assert pooled.cache.stats()["disk"]["corrupt"] == 0
    return right, found


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_logits_over_fp8_blocks_are_within_the_tolerance(
    tmp_path: Path, name: str, dtype: str
) -> None:
    model = make_model(name, initializer_range=0.1).to(DTYPES[dtype])
    for seed in range(3):
        prompt = prompt_of(seed)
        said = plain(model, [prompt])[0]
        source = stack(tokens=TOKENS, files=tmp_path / str(seed), codecs=FP8)
        right, found = again(model, source, prompt, said)
        rms, most = errors(found, right)
        assert 0.001 < rms < RMS, "it is neither exact nor far off"
        assert most < MOST
        exact = stack(tokens=TOKENS, files=tmp_path / f"{seed}-exact")
        assert errors(again(model, exact, prompt, said)[1], right)[0] < 0.01


@pytest.mark.parametrize("kinds", [["full"], ["window"], True])
def test_layers_that_fp8_is_not_allowed_for_come_back_exactly(tmp_path: Path, kinds: Any) -> None:
    """Gemma 3 has windows and full layers in separate levels; each adds its own error."""
    model = make_model("gemma3", initializer_range=0.1)
    prompt = prompt_of(0)
    said = plain(model, [prompt])[0]
    rms = {}
    for name, allowed in (("some", kinds), ("all", ["full", "window"])):
        codecs = [{"name": "fp8", "allow_lossy": allowed}, "checksum"]
        right, found = again(
            model, stack(tokens=TOKENS, files=tmp_path / name, codecs=codecs), prompt, said
        )
        rms[name] = errors(found, right)[0]
    assert 0.0001 < rms["some"] < rms["all"]


def test_blocks_of_another_prompt_are_far_beyond_the_tolerance() -> None:
    """A control: the effect of a wrong KV cache on the logits."""
    model, prompt = make_model(initializer_range=0.1), prompt_of(0)
    said = plain(model, [prompt])[0]
    with opened(model, stack(tokens=TOKENS)) as pooled:
        _, right = logits(pooled, prompt, said)
        evict_all(pooled)
        arena, index = pooled.cache.manager.arena, pooled.cache.manager._stack.host.index
        own = [Slot(index.place(key) or 0) for key in index]
        logits(pooled, prompt_of(1), [])
        evict_all(pooled)
        others = [slot for key in index if (slot := Slot(index.place(key) or 0)) not in own]
        for slot, other in zip(own, others, strict=False):
            arena.view(slot)[:] = arena.view(other)
        cached, found = logits(pooled, prompt, said)
        assert cached >= len(prompt) // BLOCK * BLOCK
    rms, most = errors(found, right)
    assert rms > 5 * RMS
    assert most > 3 * MOST


def test_fp8_must_be_allowed_and_shares_nothing_with_exact_stacks(tmp_path: Path) -> None:
    model, prompt = make_model(), prompt_of(0)
    with pytest.raises(ConfigError, match="allow_lossy: true"):
        opened(model, stack(tokens=TOKENS, files=tmp_path, codecs=["fp8"]))
    with opened(model, stack(tokens=TOKENS, files=tmp_path, codecs=FP8)) as pooled:
        logits(pooled, prompt, [])
    with opened(model, stack(tokens=TOKENS, files=tmp_path)) as pooled:
        assert logits(pooled, prompt, [])[0] == 0
