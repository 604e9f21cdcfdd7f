"""Recurrent and hybrid models on block pools: states return at boundaries, with the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MiniMaxConfig,
    NemotronHConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from kvladder.cli import main
from kvladder.connectors.transformers.layers import goes_on
from kvladder.connectors.transformers.model import PooledModel
from kvladder.device.preempt import Preemption
from kvladder.errors import ConfigError, LayoutError, PlanError
from tests.connectors.test_transformers import (
    BLOCK,
    CONTEXT,
    evict_all,
    one_thread,
    outputs,
    plain,
    prompts_of,
    serve,
)
from tests.connectors.test_transformers import (
    make_model as attention_model,
)

pytestmark = pytest.mark.slow
__all__ = ["one_thread"]

EVERY = 8
"""Tokens from one kept state to the next."""
COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
HEADS = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "mamba2": (
        Mamba2Config,
        {"num_hidden_layers": 3, "state_size": 16, "num_heads": 6, "head_dim": 16, "n_groups": 2}
        | {"expand": 2, "chunk_size": 8},
    ),
    "jamba": (
        JambaConfig,
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "qwen3-next": (
        Qwen3NextConfig,
        {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16, **EXPERTS}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
        | {"linear_value_head_dim": 8, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32},
    ),
    "falcon-h1": (
        FalconH1Config,
        {**HEADS, "head_dim": 16, "mamba_d_ssm": 96, "mamba_chunk_size": 8},
    ),
    "granite-4": (
        GraniteMoeHybridConfig,
        {**HEADS, "layer_types": ["mamba", "attention"] * 2, "mamba_chunk_size": 8}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32},
    ),
}
ANEW = ("jamba",)
"""Models that restart their states in a pass of several tokens."""


def make_model(name: str, *, seed: int = 1, **options: Any) -> Any:
    kind, special = MODELS[name]
    torch.manual_seed(seed)
    config = kind(**{**COMMON, **special, **options})
    return AutoModelForCausalLM.from_config(config).eval()


def stack(memory: str = "8 MiB", *, files: Path | None = None) -> dict[str, Any]:
    tiers: list[Mapping[str, Any]] = [{"name": "host", "type": "host"}]
    if files is not None:
        tiers.append({"name": "disk", "type": "files", "path": str(files), "capacity": "64 MiB"})
    arena, fetch = {"size": "16 MiB"}, {"deadline": "10 m"}
    return {"gpu": {"memory": memory}, "arena": arena, "fetch": fetch, "tiers": tiers}


def opened(model: Any, source: Mapping[str, Any], **options: Any) -> PooledModel:
    given = {"block_tokens": BLOCK, "checkpoint_tokens": EVERY, **options}
    return PooledModel(model, source, context=CONTEXT, **given)


@pytest.mark.parametrize("step", [None, 7])
@pytest.mark.parametrize("name", MODELS)
def test_answers_match_generate_and_continue_from_kept_states(name: str, step: int | None) -> None:
    model, prompts = make_model(name), prompts_of(3)
    expected = plain(model, prompts)
    assert goes_on(model) == (name not in ANEW)
    with opened(model, stack(), step=step) as pooled:
        jobs = serve(pooled, prompts)
        assert outputs(jobs) == expected
        assert [job.cached for job in jobs] == [0, 24, 24]
        again = serve(pooled, prompts)
        assert outputs(again) == expected
        assert [job.cached for job in again] == [(len(one) - 1) // EVERY * EVERY for one in prompts]


def test_layers_without_a_cache_may_lie_between_states() -> None:
    """Layers of Nemotron-H are either a state, attention, or experts."""
    torch.manual_seed(1)
    sizes = {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1}
    kinds = {"layers_block_type": ["mamba", "moe", "attention"], "chunk_size": 8, "head_dim": 16}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    shared = {"moe_shared_expert_intermediate_size": 32}
    shape = {one: value for one, value in COMMON.items() if one != "num_hidden_layers"}
    config = NemotronHConfig(**shape, **sizes, **kinds, **experts, **shared)
    model, prompts = AutoModelForCausalLM.from_config(config).eval(), prompts_of(2)
    with opened(model, stack()) as pooled:
        for cached in (24, 40):
            jobs = serve(pooled, prompts)
            assert outputs(jobs) == plain(model, prompts)
            assert jobs[1].cached == cached


@pytest.mark.parametrize("name", MODELS)
def test_states_come_back_from_tiers_and_after_a_restart(name: str, tmp_path: Path) -> None:
    model, prompts = make_model(name), prompts_of(2)
    expected = plain(model, prompts)
    source = stack(files=tmp_path)
    with opened(model, source) as pooled:
        serve(pooled, prompts)
        evict_all(pooled)
        again = serve(pooled, prompts)
        assert outputs(again) == expected
        assert all(job.cached >= 40 for job in again)
        assert all(pool.stats.onboarded for pool in pooled.cache.pools)
    with opened(model, source) as pooled:
        again = serve(pooled, prompts)
        assert outputs(again) == expected
        assert all(job.cached >= 40 for job in again)
        assert pooled.cache.stats()["disk"]["hits"] > 0
    other = make_model(name, seed=2)
    with opened(other, source) as pooled:
        [job] = serve(pooled, prompts[:1])
        assert job.cached == 0
        assert [job.output] == plain(other, prompts[:1])


@pytest.mark.parametrize("name", ["mamba2", "qwen3-next"])
def test_a_wrong_state_changes_the_answer(name: str) -> None:
    """The control: a wrong state is not without effect."""
    model, prompts = make_model(name), prompts_of(1)
    with opened(model, stack()) as pooled:
        serve(pooled, prompts)
        for one in pooled.plan.states:
            if one.name.endswith("state"):
                pooled.cache.memory.states(one.name).mul_(-1)
        assert outputs(serve(pooled, prompts)) != plain(model, prompts)


@pytest.mark.parametrize("how", ["tiers", "recompute"])
@pytest.mark.parametrize("name", ["mamba2", "qwen3-next"])
def test_requests_that_do_not_fit_are_preempted_and_continue(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preemption, "choice", lambda self, request: how)
    model, prompts = make_model(name), prompts_of(4, shared=9, own=40)
    with opened(model, stack(), step=16) as pooled:
        one = pooled.plan.pooled_bytes
    with opened(model, stack(f"{one * 3 // 2} B"), step=16) as pooled:
        jobs = serve(pooled, prompts)
        assert outputs(jobs) == plain(model, prompts)
        assert sum(job.preempted for job in jobs) > 0


def test_without_checkpoints_nothing_is_reused_and_describe_says_so() -> None:
    model, prompts = make_model("qwen3-next"), prompts_of(2)
    with opened(model, stack(), checkpoint_tokens=0) as pooled:
        assert "reuse: off: 0.state is not paged and no checkpoints" in pooled.cache.describe()
        for _ in range(2):
            jobs = serve(pooled, prompts)
            assert outputs(jobs) == plain(model, prompts)
            assert [job.cached for job in jobs] == [0, 0]


def test_models_and_checkpoints_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_tokens: 6 tokens.*power of two"):
        opened(make_model("mamba2"), stack(), checkpoint_tokens=6)
    with pytest.raises(PlanError, match=r"do not hold one sequence of 96 tokens"):
        opened(make_model("mamba2"), stack("16 KiB"))
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Lfm2Config(**small, **heads, layer_types=["conv", "full_attention"])
    with pytest.raises(LayoutError, match="layer 0: a convolution without a state"):
        opened(AutoModelForCausalLM.from_config(config).eval(), stack())
    kinds = {"block_types": ["recurrent", "attention"], "attention_window_size": 16}
    config = RecurrentGemmaConfig(**small, **heads, **kinds)
    with pytest.raises(LayoutError, match="keeps its state in the model, not in the cache"):
        opened(AutoModelForCausalLM.from_config(config).eval(), stack())


@pytest.mark.parametrize(
    ("kind", "special", "says"),
    [
        (
            MiniMaxConfig,
            {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}
            | {"num_experts_per_tok": 1, "block_size": 8},
            (
                "MiniMaxForCausalLM does not accept transformers' cache: ValueError: MiniMax uses"
                " cache"
            ),
        ),
        (RwkvConfig, {}, "RwkvForCausalLM does not use the cache object passed to it"),
    ],
)
def test_models_with_their_own_caches_are_refused(
    kind: type, special: dict[str, Any], says: str
) -> None:
    shape = {**COMMON, "num_hidden_layers": 2, "head_dim": 12}
    model = AutoModelForCausalLM.from_config(kind(**shape, **special)).eval()
    with pytest.raises(LayoutError, match=f"{says}.*expected a model that keeps everything"):
        opened(model, stack())


SIZED = ("float32", "bfloat16")


@pytest.mark.parametrize("dtype", SIZED)
@pytest.mark.parametrize("name", [*MODELS, "gemma3"])
def test_the_command_size_prints_the_size_that_is_built(
    name: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = attention_model(name) if name == "gemma3" else make_model(name)
    model = made.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.config.save_pretrained(tmp_path)
    given = {"--memory": "4MiB", "--context": str(CONTEXT), "--step": "16"}
    given |= {"--block-tokens": str(BLOCK), "--checkpoint-tokens": str(EVERY)}
    given |= {"--model": str(tmp_path), "--state-dtype": "float32"}
    assert main(["size", *[part for pair in given.items() for part in pair]]) == 0
    printed = capsys.readouterr().out.splitlines()
    with opened(model, stack("4 MiB"), step=16) as pooled:
        built = [line.strip() for line in pooled.cache.describe().splitlines()]
        shares = pooled.cache.division.shares
        assert [pool.blocks for pool in pooled.cache.pools] == [share.blocks for share in shares]
    division = [line for line in printed if ", pools:" in line or " blocks of " in line]
    assert len(division) == 1 + len(shares)
    assert [line for line in division if line.strip() not in built] == []
