"""Weights that change while a model is open: no request is served blocks of the old weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch.nn.modules import module as hooks
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

from examples.transformers_engine import Engine
from kvladder.connectors.transformers import GrowingCache, PooledModel, Prefixes
from kvladder.device.preempt import Preemption
from tests.connectors.test_growing import STACK, say
from tests.connectors.test_transformers import (
    NEW,
    evict_all,
    make_model,
    one_thread,
    opened,
    outputs,
    plain,
    prompts_of,
    rest,
    serve,
    stack,
)
from tests.connectors.test_transformers_states import make_model as hybrid_model
from tests.connectors.test_transformers_states import opened as hybrid_opened
from tests.connectors.test_transformers_states import stack as hybrid_stack

pytestmark = pytest.mark.slow
__all__ = ["one_thread"]


def embeddings(model: Any) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = model.get_input_embeddings().weight
    return weight


def negate(model: Any) -> None:
    with torch.no_grad():
        embeddings(model).mul_(-1)


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        embeddings(model).mul_(-1)


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = torch.arange(20)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


def load(model: Any) -> None:
    model.load_state_dict(make_model(seed=2).state_dict())


def assign(model: Any) -> None:
    model.load_state_dict(make_model(seed=2).state_dict(), assign=True)


def replace(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.v_proj.weight = torch.nn.Parameter(-layer.v_proj.weight.detach())


def replace_data(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.v_proj.weight.data = -layer.v_proj.weight.detach()


def replace_module(model: Any) -> None:
    """Replace a module, as adapters wrap layers."""
    attention = model.model.layers[1].self_attn
    attention.v_proj = torch.nn.Sequential(attention.v_proj, torch.nn.Linear(32, 32))


def behind_its_back(model: Any) -> None:
    """Change weights without notice, as merging adapters does; the caller must report it."""
    embeddings(model).data.mul_(-1)


WRITES: list[Callable[[Any], None]] = [
    negate,
    in_inference_mode,
    train,
    load,
    assign,
    replace,
    replace_data,
    replace_module,
    behind_its_back,
]


def change(model: Any, owner: Any, write: Callable[[Any], None] = negate) -> None:
    write(model)
    if write is behind_its_back:
        owner.updated()


@pytest.mark.parametrize("write", WRITES)
def test_blocks_of_other_weights_are_not_served(write: Callable[[Any], None]) -> None:
    model, prompts = make_model(), prompts_of(2)
    with opened(model, stack(tokens=400)) as pooled:
        first = serve(pooled, prompts)
        change(model, pooled, write)
        second = serve(pooled, prompts)
        assert outputs(second) == plain(model, prompts) != outputs(first)
        assert second[0].cached == 0
        evict_all(pooled)
        third = serve(pooled, prompts)
        assert outputs(third) == outputs(second)
        assert all(job.cached >= 28 for job in third)


def go_on(pooled: PooledModel, engine: Engine) -> None:
    while engine.busy:
        engine.step()
        pooled.cache.check()
    rest(pooled)
    assert all(pool.free == pool.blocks for pool in pooled.cache.pools)


@pytest.mark.parametrize("write", [negate, behind_its_back])
@pytest.mark.parametrize("options", [{}, {"drafts_max": 3}])
@pytest.mark.parametrize("step", [None, 8])
def test_running_requests_continue_with_the_new_weights(
    step: int | None, options: dict[str, Any], write: Callable[[Any], None]
) -> None:
    """Blocks that the old weights computed are not served under the new names."""
    model, prompts = make_model(), prompts_of(3)
    with opened(model, stack(tokens=400), step=step) as pooled:
        engine = Engine(pooled)
        jobs = [engine.submit(prompt, NEW, **options) for prompt in prompts]
        while not all(len(job.output) > 2 for job in jobs[:2]):
            engine.step()
        said = [list(job.output) for job in jobs]
        change(model, pooled, write)
        go_on(pooled, engine)
        texts = [prompt + one for prompt, one in zip(prompts, said, strict=True)]
        more = plain(model, texts)
        for job, before, after in zip(jobs, said, more, strict=True):
            assert job.output == (before + after)[:NEW]
        again = serve(pooled, prompts)
        assert outputs(again) == plain(model, prompts)


def test_beams_restart_with_the_new_weights() -> None:
    model, prompts = make_model(), prompts_of(1)
    with opened(model, stack(tokens=800)) as pooled:
        engine = Engine(pooled)
        job = engine.submit(prompts[0], NEW, beams=3)
        for _ in range(4):
            engine.step()
        negate(model)
        go_on(pooled, engine)
        [right] = say(model, prompts[0], None, NEW, num_beams=3)
        assert prompts[0] + job.output == right


@pytest.mark.parametrize("how", ["tiers", "recompute"])
def test_suspended_requests_are_computed_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preemption, "choice", lambda self, request: how)
    model, [prompt] = make_model(), prompts_of(1)
    with opened(model, stack(tokens=400)) as pooled:
        request = pooled.requests.begin(prompt)
        pooled.run([request])
        suspended = pooled.cache.suspend(request)
        rest(pooled)
        negate(model)
        other = pooled.requests.begin([1, 2, 3])
        pooled.requests.release(other)
        back = pooled.cache.resume(suspended)
        assert (back.ready, back.lost, back.computed) == (True, False, 0)
        [logits] = pooled.run([back])
        assert logits is not None
        assert int(logits.argmax()) == plain(model, [prompt])[0][0]
        pooled.requests.release(back)
        assert pooled.cache.manager.arena.free == pooled.cache.manager.arena.slots
        pooled.cache.check()


def test_a_pass_after_a_change_computes_nothing_and_loses_its_requests() -> None:
    model, [prompt] = make_model(), prompts_of(1)
    with opened(model, stack(tokens=400)) as pooled:
        request = pooled.requests.begin(prompt)
        negate(model)
        assert pooled.run([request]) == [None]
        assert (request.lost, request.ready, request.computed) == (True, False, 0)
        pooled.requests.release(request)
        again = pooled.requests.begin(prompt)
        [logits] = pooled.run([again])
        assert logits is not None
        pooled.requests.release(again)


def test_states_follow_the_weights() -> None:
    model, prompts = hybrid_model("qwen3-next"), prompts_of(2)
    with hybrid_opened(model, hybrid_stack()) as pooled:
        serve(pooled, prompts)
        negate(model)
        jobs = serve(pooled, prompts)
        assert outputs(jobs) == plain(model, prompts)
        assert jobs[0].cached == 0


def test_with_the_old_weights_the_old_names_return(tmp_path: Path) -> None:
    model, prompts = make_model(), prompts_of(2)
    source = stack(tokens=400, files=tmp_path)
    with opened(model, source) as pooled:
        first = serve(pooled, prompts)
        evict_all(pooled)
        negate(model)
        second = serve(pooled, prompts)
        evict_all(pooled)
        negate(model)
        third = serve(pooled, prompts)
        assert outputs(third) == outputs(first) != outputs(second)
        assert all(job.cached >= 28 for job in third)
        negate(model)
        fourth = serve(pooled, prompts)
        assert outputs(fourth) == outputs(second)
        assert all(job.cached >= 28 for job in fourth)
    with opened(model, source) as pooled:  # it began with other weights: they never mix
        [job, _] = serve(pooled, prompts)
        assert job.cached == 0
        assert job.output == second[0].output
    negate(model)
    with opened(model, source) as pooled:
        jobs = serve(pooled, prompts)
        assert outputs(jobs) == outputs(first)
        assert all(job.cached >= 28 for job in jobs)


def test_blocks_of_unchanged_weights_stay_cached() -> None:
    model, prompts = make_model(), prompts_of(2)
    with opened(model, stack(tokens=400)) as pooled:
        engine = Engine(pooled)
        jobs = [engine.submit(prompt, NEW) for prompt in prompts]
        while not all(job.output for job in jobs):
            engine.step()
        pooled.updated()
        with torch.no_grad():
            embeddings(model).mul_(1)
        go_on(pooled, engine)
        assert outputs(jobs) == plain(model, prompts)
        assert all(job.preempted == 0 for job in jobs)
        assert all(job.cached >= 28 for job in serve(pooled, prompts))


def test_names_come_from_the_weights_in_memory_and_not_from_the_files(tmp_path: Path) -> None:
    """Files that were replaced between reading and digesting them name nothing."""
    transformers_logging.disable_progress_bar()  # a bar begins a thread
    for seed in (1, 2):
        make_model(seed=seed).save_pretrained(tmp_path / str(seed))
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in "12")
    late = AutoModelForCausalLM.from_pretrained(tmp_path / "1").eval()
    aside = tmp_path / "aside"
    shutil.copytree(tmp_path / "2", aside)
    for file in aside.iterdir():
        file.replace(tmp_path / "1" / file.name)
    names = []
    for model in (one, late, two):
        with opened(model, stack(tokens=400)) as pooled, Prefixes(model, STACK) as prefixes:
            names.append((pooled.cache.manager.namespace, prefixes.manager.namespace))
    assert names[0] == names[1]
    assert not {*names[1]} & {*names[2]}


@pytest.mark.parametrize("write", WRITES)
def test_prefixes_are_of_the_weights_that_computed_them(write: Callable[[Any], None]) -> None:
    model, [prompt] = make_model(), prompts_of(1)
    with Prefixes(model, STACK, block_tokens=4) as prefixes:
        cache = prefixes.begin(prompt)
        (said,) = say(model, prompt, cache)
        blocks = prefixes.keep(cache, said)
        assert blocks > 10
        between = prefixes.begin(prompt)
        say(model, prompt, between)
        change(model, prefixes, write)
        assert prefixes.keep(between, say(model, prompt)[0]) == 0
        assert prefixes.keep(cache, said) == 0
        cache = prefixes.begin(said)
        assert cache.get_seq_length() == 0
        (other,) = say(model, prompt, prefixes.begin(prompt))
        cache = prefixes.begin(prompt)
        assert say(model, prompt, cache) == [other]
        assert prefixes.keep(cache, other) == blocks
        again = prefixes.begin([*other, 7])
        assert again.get_seq_length() == 4 * blocks
        assert say(model, [*other, 7], again) == say(model, [*other, 7])


def test_a_cache_that_saw_a_change_and_back_is_not_kept() -> None:
    model, [prompt] = make_model(), prompts_of(1)
    with Prefixes(model, STACK, block_tokens=4) as prefixes:
        cache, own = prefixes.begin(prompt), GrowingCache(model.config)
        replace(model)
        (said,) = say(model, prompt, cache)
        say(model, prompt, own)
        replace(model)
        assert prefixes.keep(cache, said) == 0
        assert prefixes.keep(own, said) == 0, "nobody knows which weights it began with"
        cache = prefixes.begin(prompt)
        (said,) = say(model, prompt, cache)
        assert prefixes.keep(cache, said) > 10


def test_nothing_watches_a_model_that_was_closed() -> None:
    def watching() -> int:
        return len(hooks._global_parameter_registration_hooks) + len(
            hooks._global_module_registration_hooks
        )

    model, before = make_model(), watching()
    with opened(model, stack(tokens=400)), Prefixes(model, STACK):
        assert watching() > before
    assert watching() == before
    with pytest.raises(ValueError, match="power of two"):
        PooledModel(model, stack(tokens=400), context=96, block_tokens=12)
    with pytest.raises(ValueError, match="block"):
        Prefixes(model, STACK, block_tokens=0)
    assert watching() == before
