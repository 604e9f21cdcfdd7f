"""Hugging Face models on block pools: their answers are the same as without."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    BigBirdPegasusConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from examples.transformers_engine import Engine, Job
from kvladder.arena import Slot
from kvladder.connectors.transformers.model import PooledModel, layer_shapes
from kvladder.device.preempt import Preemption
from kvladder.errors import ConfigError, LayoutError, OutOfBlocks
from kvladder.layout import PAGE_BYTES
from kvladder.tiers.label import MAGIC

pytestmark = pytest.mark.slow

CONTEXT, BLOCK, NEW = 96, 4, 12
WINDOW = 10
TOKEN_BYTES = 2 * 2 * 16 * 4
"""Bytes of a token in one layer."""
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 1}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: tiny matrices do not need more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(name: str = "llama", *, seed: int = 1, **options: Any) -> Any:
    """Return a tiny model whose answers depend on the whole context."""
    kind, special = MODELS[name]
    torch.manual_seed(seed)
    config = kind(
        **{
            "vocab_size": 256,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            **special,
            **options,
        }
    )
    return AutoModelForCausalLM.from_config(config).eval()


def prompts_of(count: int, *, shared: int = 30, own: int = 17) -> list[list[int]]:
    """Return prompts with the same first tokens and different last ones."""
    rng = random.Random(count)
    first = [rng.randrange(256) for _ in range(shared)]
    return [[*first, *(rng.randrange(256) for _ in range(own + at))] for at in range(count)]


def plain(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the model's answers with its own cache, one prompt at a time."""
    said: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        said.append(out[0, len(prompt) :].tolist())
    return said


def stack(
    *, tokens: int, host: str = "1 MiB", files: Path | None = None, codecs: Any = None
) -> dict[str, Any]:
    """Return a stack and pools of three layers that hold this number of tokens."""
    tiers: list[Mapping[str, Any]] = [{"name": "host", "type": "host"}]
    if files is not None:
        more = {} if codecs is None else {"codecs": codecs}
        tiers.append(
            {"name": "disk", "type": "files", "path": str(files), "capacity": "16 MiB", **more}
        )
    memory = f"{tokens * 3 * TOKEN_BYTES} B"
    return {"gpu": {"memory": memory}, "arena": {"size": host}, "tiers": tiers}


def serve(pooled: PooledModel, prompts: Sequence[list[int]], **options: Any) -> list[Job]:
    """Serve all prompts at once; afterwards nothing is held."""
    engine = Engine(pooled)
    jobs = [engine.submit(prompt, NEW, **options) for prompt in prompts]
    while engine.busy:
        engine.step()
        pooled.cache.check()
    rest(pooled)
    assert all(pool.free == pool.blocks for pool in pooled.cache.pools)
    return jobs


def rest(pooled: PooledModel) -> None:
    """Wait until no copy is in flight."""
    while pooled.cache.port.busy:
        pooled.cache.wait(0.1)
        pooled.cache.poll()
    while not pooled.cache.manager.idle():
        pooled.cache.wait(0.01)
        pooled.cache.poll()


def evict_all(pooled: PooledModel) -> None:
    for pool in pooled.cache.pools:
        pool.evict(pool.cached)
    rest(pooled)
    assert not any(pool.cached for pool in pooled.cache.pools)


def opened(model: Any, source: Mapping[str, Any], **options: Any) -> PooledModel:
    return PooledModel(model, source, context=CONTEXT, block_tokens=BLOCK, **options)


def outputs(jobs: Sequence[Job]) -> list[list[int]]:
    return [job.output for job in jobs]


def test_pools_without_tiers_serve_the_blocks_they_still_hold():
    model, prompts = make_model(), prompts_of(2)
    memory = stack(tokens=400)["gpu"]
    said = plain(model, prompts)
    with opened(model, {"gpu": memory}) as pooled:
        first, again = (serve(pooled, prompts) for _ in range(2))
        assert outputs(first) == outputs(again) == said
        assert all(job.cached for job in again)
    with opened(model, {"gpu": {**memory, "reuse": False}}) as pooled:
        first, again = (serve(pooled, prompts) for _ in range(2))
        assert outputs(first) == outputs(again) == said
        assert not any(job.cached for job in (*first, *again))


@pytest.mark.parametrize("step", [None, 7])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same_answers_with_the_pool_and_without(name, step):
    model, prompts = make_model(name), prompts_of(4)
    expected = plain(model, prompts)
    assert all(len(set(said)) > NEW // 2 for said in expected)
    with opened(model, stack(tokens=400), step=step) as pooled:
        jobs = serve(pooled, prompts)
        assert outputs(jobs) == expected
        assert [job.cached for job in jobs] == [0, 28, 28, 28]
        jobs = serve(pooled, prompts)
        assert outputs(jobs) == expected
        assert all(job.cached >= len(job.prompt) // BLOCK * BLOCK - BLOCK for job in jobs)


def test_a_model_without_positions_computes_no_padding() -> None:
    """The model counts the tokens of the cache, so padding would shift a row."""
    torch.manual_seed(1)
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = AutoModelForCausalLM.from_config(
        BigBirdPegasusConfig(vocab_size=256, d_model=64, init_std=0.3, is_decoder=True, **sizes)
    ).eval()
    prompts = prompts_of(3)
    with opened(model, {"gpu": {"memory": "4 MiB"}}, step=16) as pooled:
        for _ in range(2):
            assert outputs(serve(pooled, prompts)) == plain(model, prompts)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_blocks_come_back_from_host_memory(name):
    model, prompts = make_model(name), prompts_of(3)
    with opened(model, stack(tokens=400)) as pooled:
        first = serve(pooled, prompts)
        evict_all(pooled)
        again = serve(pooled, prompts)
        assert outputs(again) == outputs(first) == plain(model, prompts)
        assert all(job.cached >= 28 for job in again)
        assert sum(pool.stats.onboarded for pool in pooled.cache.pools) > 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_blocks_come_back_from_files_after_a_restart(name, tmp_path):
    model, prompts = make_model(name), prompts_of(3)
    source = stack(tokens=400, files=tmp_path / "kv")
    with opened(model, source) as pooled:
        first = serve(pooled, prompts)
    with opened(model, source) as pooled:
        again = serve(pooled, prompts)
        assert outputs(again) == outputs(first) == plain(model, prompts)
        assert all(job.cached >= 28 for job in again)
        assert pooled.cache.stats()["disk"]["hits"] > 0
    other = make_model(name, seed=2)
    with opened(other, source) as pooled:
        jobs = serve(pooled, prompts[:1])
        assert jobs[0].cached == 0
        assert outputs(jobs) == plain(other, prompts[:1])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_all_of_the_device_is_handed_down_through_an_arena_that_is_smaller(name, tmp_path):
    model = make_model(name)
    prompts = [[at + 20 * number for at in range(20)] for number in range(10)]
    source = stack(tokens=900, host="160 KiB", files=tmp_path)
    with opened(model, source) as pooled:
        for prompt in prompts:
            serve(pooled, [prompt])
        cached = sum(pool.cached for pool in pooled.cache.pools)
        assert cached > pooled.cache.manager.arena.slots
    with opened(model, source) as pooled:
        assert [serve(pooled, [prompt])[0].cached for prompt in prompts] == [16] * 10


@pytest.mark.parametrize("how", ["tiers", "recompute"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_requests_that_do_not_fit_are_preempted_and_continue(name, how, monkeypatch):
    monkeypatch.setattr(Preemption, "choice", lambda self, request: how)
    model, prompts = make_model(name), prompts_of(4, shared=9, own=40)
    with opened(model, stack(tokens=150), step=16) as pooled:
        jobs = serve(pooled, prompts)
        assert outputs(jobs) == plain(model, prompts)
        assert sum(job.preempted for job in jobs) > 0
        assert pooled.cache.manager.arena.free + pooled.cache.stats()["host"]["blocks"] == (
            pooled.cache.manager.arena.slots
        )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_long_preempted_prompt_is_recomputed_in_parts(name, monkeypatch):
    monkeypatch.setattr(Preemption, "choice", lambda self, request: "recompute")
    model, prompts = make_model(name), prompts_of(4, shared=0, own=70)
    with opened(model, stack(tokens=150), step=8) as pooled:
        jobs = serve(pooled, prompts)
        assert outputs(jobs) == plain(model, prompts)
        assert sum(job.preempted for job in jobs) > 0


def test_a_request_that_leaves_before_its_copy_was_made_holds_nothing():
    source = stack(tokens=400)
    source["gpu"]["partial"] = "copy"
    with opened(make_model(), source) as pooled:
        serve(pooled, [list(range(30))])
        engine = Engine(pooled)
        job = Job([*range(14), 200, 201, 202], NEW)
        job.requests = [pooled.requests.begin(job.prompt)]
        assert job.requests[0].copies
        engine.running.append(job)
        engine._preempt(job)
        assert list(engine.waiting) == [job]
        assert all(pool.used == 0 for pool in pooled.cache.pools)


def test_two_salts_share_nothing():
    model, prompts = make_model(), prompts_of(1)
    with opened(model, stack(tokens=400)) as pooled:
        first, other, again = (serve(pooled, prompts, salt=salt)[0] for salt in ("a", "b", "a"))
        assert first.output == other.output == again.output
        assert (first.cached, other.cached) == (0, 0)
        assert again.cached == len(prompts[0]) // BLOCK * BLOCK


def flip(memory: memoryview) -> None:
    """Other bytes, none of them far off."""
    for at in range(2, len(memory), 4):  # of each float's mantissa
        memory[at] ^= 0x40


def test_flipped_bytes_change_the_answer():
    """The control: a wrong KV cache is not without effect."""
    model, prompts = make_model(), prompts_of(1)
    with opened(model, stack(tokens=400)) as pooled:
        serve(pooled, prompts)
        evict_all(pooled)
        arena = pooled.cache.manager.arena
        for slot in range(arena.slots):
            flip(arena.view(Slot(slot)))
        assert outputs(serve(pooled, prompts)) != plain(model, prompts)


@pytest.mark.parametrize("codecs", [["checksum"], []])
def test_flipped_files_are_found_out_unless_checks_are_off(tmp_path, codecs):
    model, prompts = make_model(), prompts_of(1)
    source = stack(tokens=400, files=tmp_path, codecs=codecs)
    with opened(model, source) as pooled:
        serve(pooled, prompts)
    segments = list(tmp_path.rglob("seg-*"))
    assert segments
    for path in segments:
        data = bytearray(path.read_bytes())
        for start in range(0, len(data), PAGE_BYTES):
            if data[start : start + len(MAGIC)] != MAGIC:
                flip(memoryview(data)[start : start + PAGE_BYTES])
        path.write_bytes(data)
    with opened(model, source) as pooled:
        same = outputs(serve(pooled, prompts)) == plain(model, prompts)
    assert same == bool(codecs)


def test_a_window_releases_the_blocks_it_has_passed():
    model = make_model("gemma3")
    with opened(model, stack(tokens=400), step=8) as pooled:
        windows = [group.window for group in pooled.requests.groups]
        assert sorted(windows) == [0, WINDOW]
        at = windows.index(WINDOW)
        engine = Engine(pooled)
        engine.submit(prompts_of(1)[0], NEW)
        most = 0
        while engine.busy:
            engine.step()
            most = max(most, pooled.cache.pools[at].used)
        assert most <= -(-(WINDOW + 8) // BLOCK) + 2


def test_a_request_that_never_fits_is_an_error():
    with opened(make_model(), stack(tokens=CONTEXT)) as pooled:
        engine = Engine(pooled)
        engine.submit([1] * (CONTEXT + 4), NEW)
        with pytest.raises(OutOfBlocks):
            engine.run()


def test_a_model_with_other_state_is_refused():
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(LayoutError, match="layer 0"):
        layer_shapes(AutoModelForCausalLM.from_config(config).eval(), context=64)


def test_the_memory_must_be_set_on_cpu():
    with pytest.raises(ConfigError, match=r"gpu\.memory"):
        opened(make_model(), {"host": "1 MiB"})


def test_blocks_have_16_tokens_by_default():
    with PooledModel(make_model(), stack(tokens=600), context=64) as pooled:
        assert [group.block_tokens for group in pooled.requests.groups] == [16]
        assert "blocks of 16 tokens" in pooled.cache.describe()


def test_blocks_of_a_wrong_size_are_refused():
    with pytest.raises(ConfigError, match="power of two"):
        PooledModel(make_model(), stack(tokens=400), context=CONTEXT, block_tokens=12)


def test_a_window_as_long_as_the_context_is_full_attention():
    shapes = layer_shapes(make_model("gemma3"), context=WINDOW)
    assert {shape.window for shape in shapes} == {0}


def test_blocks_from_before_a_training_step_are_not_served(tmp_path):
    model = make_model()
    source, prompts = stack(tokens=400, files=tmp_path), [[250, 251, 252, 253] * 8]
    with opened(model, source) as pooled:
        serve(pooled, prompts)
    with torch.no_grad():
        model.model.embed_tokens.weight[240:] *= -1
    with opened(model, source) as pooled:
        [job] = serve(pooled, prompts)
    assert not job.cached
    assert [job.output] == plain(model, prompts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_gpu_gives_the_same_answers(name, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, prompts = make_model(name).cuda(), prompts_of(4)
    expected = plain(model, prompts)
    source = stack(tokens=400, files=tmp_path)
    for _ in range(2):
        with opened(model, source, step=16) as pooled:
            jobs = serve(pooled, prompts)
            assert outputs(jobs) == expected
            evict_all(pooled)
            jobs = serve(pooled, prompts)
            assert outputs(jobs) == expected
            assert all(job.cached >= 28 for job in jobs)
