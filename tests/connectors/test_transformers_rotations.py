"""Rotations that depend on the length of a text: one for all that a pool holds, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvladder.connectors.transformers import Prefixes
from kvladder.connectors.transformers.model import PooledModel
from kvladder.errors import LayoutError
from tests.connectors.test_transformers import (
    CONTEXT,
    evict_all,
    one_thread,
    outputs,
    plain,
    prompts_of,
    serve,
    stack,
)

pytestmark = pytest.mark.slow
__all__ = ["one_thread"]

ORIGINAL = 32
"""Tokens up to which the models of these tests rotate as in their first training."""
SHORT, LONG = [1.0] * 8, [4.0] * 8
BASE, FACTOR, SIZE = 10000.0, 4.0, 16
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "phi3": (Phi3Config, {"original_max_position_embeddings": ORIGINAL}),
}


def longrope(short: list[float], original: int = ORIGINAL) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": BASE,
        "short_factor": short,
        "long_factor": LONG,
        "factor": FACTOR,
        "original_max_position_embeddings": original,
    }


def make(rope: dict[str, Any], kind: str = "llama", *, longest: int = 128, **more: Any) -> Any:
    made, special = KINDS[kind]
    torch.manual_seed(1)
    config = made(
        **{
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            "max_position_embeddings": longest,
            "pad_token_id": 0,
            **special,
            **more,
        },
        rope_parameters=rope,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def dynamic(base: float = BASE) -> dict[str, Any]:
    return {"rope_type": "dynamic", "rope_theta": base, "factor": FACTOR}


def scaled(tokens: int) -> dict[str, Any]:
    """Return the rotation of dynamic NTK for a text of this length, applied to all texts."""
    grown = FACTOR * tokens / ORIGINAL - (FACTOR - 1)
    return {"rope_type": "default", "rope_theta": BASE * grown ** (SIZE / (SIZE - 2))}


def opened(model: Any, source: Any, *, context: int = CONTEXT, **options: Any) -> PooledModel:
    return PooledModel(model, source, context=context, block_tokens=4, **options)


TWINS: dict[str, tuple[Any, Any]] = {
    "longrope": (lambda: make(longrope(SHORT)), lambda: make(longrope(LONG))),
    "longrope of Phi 3": (
        lambda: make(longrope(SHORT), "phi3"),
        lambda: make(longrope(LONG), "phi3"),
    ),
    "dynamic": (
        lambda: make(dynamic(), longest=ORIGINAL),
        lambda: make(scaled(CONTEXT), longest=ORIGINAL),
    ),
}
"""Models, and others that rotate in every text as these do in the longest one."""


@pytest.mark.parametrize("step", [None, 16])
@pytest.mark.parametrize("name", TWINS)
def test_all_texts_have_the_rotation_of_the_longest(name: str, step: int | None) -> None:
    model, twin = (one() for one in TWINS[name])
    [text] = prompts_of(1, shared=40, own=20)
    prompts = [text[:16], text, text[:40]]
    before = plain(model, prompts)
    said = plain(twin, prompts)
    with opened(model, stack(tokens=400), step=step) as pooled:
        for prompt, right in zip(prompts, said, strict=True):
            [job] = serve(pooled, [prompt])
            assert job.output == right
            assert bool(job.cached) == (prompt is not prompts[0])
        evict_all(pooled)
        again = serve(pooled, prompts)
        assert outputs(again) == said
        assert all(job.cached for job in again)
    if name != "dynamic":  # ``generate`` computes these differently in each pass
        assert said[1:] == before[1:], "texts beyond the original length are generate's own"
    assert plain(model, prompts) == before, "it is as it was"
    assert before[0] != said[0], "the factors change nothing: there is nothing to tell"


@pytest.mark.parametrize(
    ("rope", "longest"), [(longrope(SHORT, CONTEXT), 4 * CONTEXT), (dynamic(), CONTEXT)]
)
def test_up_to_the_original_length_answers_match_generate(
    rope: dict[str, Any], longest: int
) -> None:
    model, prompts = make(rope, longest=longest), prompts_of(3)
    said = plain(model, prompts)
    with opened(model, stack(tokens=400), step=16) as pooled:
        assert outputs(serve(pooled, prompts)) == said
        plain(model, prompts_of(1, shared=2 * CONTEXT))  # this changes the model's state
        again = serve(pooled, prompts)
        assert outputs(again) == said
        assert all(job.cached for job in again)


def test_the_rotation_names_the_blocks(tmp_path: Path) -> None:
    model, [prompt] = make(longrope(SHORT)), prompts_of(1, shared=10, own=6)
    source = stack(tokens=400, files=tmp_path)
    found = {}
    for context in (ORIGINAL, CONTEXT, CONTEXT + 16):
        with opened(model, source, context=context) as pooled:
            [job] = serve(pooled, [prompt])
            found[context] = pooled.cache.manager.namespace, job.cached
    (short, first), (long, second), (longer, third) = found.values()
    assert short != long
    assert (first, second) == (0, 0)
    assert (longer, third) == (long, 12), "of one rotation they are shared"


class Stepwise(LlamaRotaryEmbedding):  # type: ignore[misc]
    """A rotation of an unknown kind."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = super().forward(x, position_ids)
        return (cos, sin) if int(position_ids.max()) < ORIGINAL else (-cos, -sin)


class Remembering(LlamaRotaryEmbedding):  # type: ignore[misc]
    """A rotation of another kind, which keeps a result of the longest text so far."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if int(position_ids.max()) >= ORIGINAL:
            self.attention_scaling = 2.0
        return super().forward(x, position_ids)


def with_rotation(kind: type) -> Any:
    model = make({"rope_type": "default", "rope_theta": BASE})
    model.model.rotary_emb = kind(model.config)
    return model


def test_a_rotation_of_an_unknown_kind_is_refused_where_it_changes() -> None:
    model, [prompt] = with_rotation(Stepwise), prompts_of(1, shared=10, own=6)
    with pytest.raises(
        LayoutError, match=r"context: .* model.rotary_emb .*within 33 .*shorter con"
    ):
        opened(model, stack(tokens=400), context=ORIGINAL + 1)
    said = plain(model, [prompt])
    with opened(model, stack(tokens=400), context=ORIGINAL) as pooled:
        assert outputs(serve(pooled, [prompt])) == said


def test_a_rotation_that_remembers_is_that_of_the_longest_text() -> None:
    model, prompts = with_rotation(Remembering), prompts_of(2)
    with opened(model, stack(tokens=400)) as pooled:
        said = outputs(serve(pooled, prompts))
    plain(model, prompts)
    assert said == plain(model, prompts), "now it has seen a long one"


def test_scales_that_depend_on_the_length_are_refused() -> None:
    """Phi 3.5 MoE chooses such scales beside the factors."""
    rope = {**longrope(SHORT), "short_mscale": 1.0, "long_mscale": 2.0}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 2}
    config = PhimoeConfig(vocab_size=256, intermediate_size=64, **sizes, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(
        LayoutError, match=r"the rotation of model.rotary_emb \(longrope\) depends on"
    ):
        opened(model, stack(tokens=400))
    opened(model, stack(tokens=400), context=ORIGINAL).close()


@pytest.mark.parametrize("name", TWINS)
def test_caches_of_prefixes_refuse_such_models(name: str) -> None:
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}]}
    with pytest.raises(LayoutError, match=r"depends on the length .*use PooledModel"):
        Prefixes(TWINS[name][0](), source)
