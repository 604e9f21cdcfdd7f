"""Beams that share blocks, and drafts that are taken back: tokens alike, blocks where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from examples.transformers_engine import Engine
from kvladder.connectors.transformers.decoding import BeamSearch, agreed, drafted
from kvladder.connectors.transformers.model import PooledModel
from kvladder.device.preempt import Preemption
from kvladder.errors import ConfigError
from tests.connectors.test_transformers import (
    BLOCK,
    NEW,
    evict_all,
    make_model,
    one_thread,
    opened,
    outputs,
    prompts_of,
    serve,
    stack,
)
from tests.connectors.test_transformers_states import (
    make_model as state_model,
)
from tests.connectors.test_transformers_states import (
    opened as opened_states,
)
from tests.connectors.test_transformers_states import (
    stack as state_stack,
)

pytestmark = pytest.mark.slow
__all__ = ["one_thread"]

BEAMS = 4


def generated(
    model: Any, prompts: list[list[int]], tokens: int = NEW, **options: Any
) -> list[list[int]]:
    """Return the answers of ``generate`` to each prompt."""
    said: list[list[int]] = []
    given = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **(given | options))
        said.append(out[0, len(prompt) :].tolist())
    return said


def by_beams(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return generated(model, prompts, num_beams=BEAMS, **options)


def slots(pooled: PooledModel) -> list[int]:
    return [pool.used for pool in pooled.cache.pools]


# ---- beams


@pytest.mark.parametrize("step", [None, 7])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_beams_match_generate_and_the_winners_blocks_are_kept(name, step):
    model, prompts = make_model(name), prompts_of(3)
    expected = by_beams(model, prompts)
    assert expected != generated(model, prompts), "beams make a difference"
    with opened(model, stack(tokens=900), step=step) as pooled:
        jobs = serve(pooled, prompts, beams=BEAMS)
        assert outputs(jobs) == expected
        assert [job.cached for job in jobs] == [0, 28, 28]
        evict_all(pooled)
        again = serve(pooled, prompts, beams=BEAMS)
        assert outputs(again) == expected
        assert all(job.cached >= len(job.prompt) // BLOCK * BLOCK - BLOCK for job in again)
        longer = [job.prompt + job.output for job in again]
        for job in serve(pooled, longer):
            assert job.cached >= (len(job.prompt) - 1) // BLOCK * BLOCK


def test_beams_and_others_run_at_once():
    model, prompts = make_model(), prompts_of(4)
    with opened(model, stack(tokens=900)) as pooled:
        engine = Engine(pooled, batch_max=6)
        kinds = [{"beams": BEAMS}, {}, {"drafts_max": 3}, {"beams": 2}]
        jobs = [engine.submit(one, NEW, **kind) for one, kind in zip(prompts, kinds, strict=True)]
        while engine.busy:
            engine.step()
            assert sum(len(job.requests) for job in engine.running) <= 6
        assert outputs(jobs[:1]) == by_beams(model, prompts[:1])
        assert outputs(jobs[1:3]) == generated(model, prompts[1:3])
        assert outputs(jobs[3:]) == generated(model, prompts[3:], num_beams=2)


def test_beams_end_where_generate_ends_them():
    model, prompts = make_model(), prompts_of(3)
    short = 0
    for every in (5, 16, 50):
        ends = list(range(3, 256, every))
        expected = by_beams(model, prompts, eos_token_id=ends)
        with opened(model, stack(tokens=900)) as pooled:
            said = outputs(serve(pooled, prompts, beams=BEAMS, ends=frozenset(ends)))
        assert said == expected
        short += sum(len(text) < NEW for text in said)
    assert 0 < short < 9


def test_beams_share_the_blocks_of_their_common_tokens():
    model, [prompt] = make_model(), prompts_of(1, shared=40, own=2)
    with opened(model, stack(tokens=900)) as pooled:
        engine = Engine(pooled)
        engine.submit(prompt, NEW, beams=BEAMS)
        engine.step()
        [alone] = slots(pooled)
        most = 0
        while engine.busy:
            engine.step()
            pooled.cache.check()
            most = max(most, *slots(pooled))
        own = -(-(len(prompt) % BLOCK + NEW) // BLOCK)
        assert alone < most <= alone + BEAMS * own
        assert pooled.cache.pools[0].used == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_preempted_beams_restart_with_cached_blocks(name):
    model, prompts = make_model(name), prompts_of(3, shared=9, own=40)
    with opened(model, stack(tokens=190), step=16) as pooled:
        engine = Engine(pooled)
        jobs = [engine.submit(prompt, NEW, beams=BEAMS) for prompt in prompts]
        while not (jobs[0].requests and len(jobs[0].requests) == BEAMS):
            engine.step()
        engine._preempt(jobs[0])
        assert (jobs[0].requests, jobs[0].output) == ([], [])
        while engine.busy:
            engine.step()
            pooled.cache.check()
        assert outputs(jobs) == by_beams(model, prompts)
        assert jobs[0].preempted > 0
        assert slots(pooled) == [0] * len(slots(pooled))


def test_the_youngest_beams_are_preempted_when_others_grow():
    model, prompts = make_model(), prompts_of(3, shared=9, own=40)
    with opened(model, stack(tokens=190), step=16) as pooled:
        jobs = serve(pooled, prompts, beams=BEAMS)
        assert outputs(jobs) == by_beams(model, prompts)
        assert sum(job.preempted for job in jobs) > 0


@pytest.mark.parametrize("name", ["mamba2", "qwen3-next"])
@pytest.mark.parametrize("every", [0, 8])
def test_beams_of_a_model_with_states_copy_them(name, every):
    model, prompts = state_model(name), prompts_of(2)
    with opened_states(model, state_stack(), checkpoint_tokens=every) as pooled:
        jobs = serve(pooled, prompts, beams=BEAMS)
        assert outputs(jobs) == by_beams(model, prompts)
        assert [job.cached for job in jobs] == [0, 24 if every else 0]


# ---- drafts


def repetitive(name: str = "llama") -> Any:
    """Return a model that soon repeats itself."""
    return make_model(name, initializer_range=0.05)


def passes(model: Any) -> list[int]:
    """A list that gets the tokens of each pass from now on."""
    counted: list[int] = []
    model.register_forward_hook(lambda *given: counted.append(given[-1].logits.shape[1]))
    return counted


@pytest.mark.parametrize(("name", "saved"), [("llama", 13), ("mistral", 10), ("gemma3", 1)])
def test_drafts_save_passes_and_change_no_token(name, saved):
    tokens, drafts = 40, 5
    model, prompts = repetitive(name), prompts_of(1, shared=20)
    expected = generated(model, prompts, tokens)
    if name == "llama":
        assert generated(model, prompts, tokens, prompt_lookup_num_tokens=drafts) == expected
    with opened(model, stack(tokens=900)) as pooled:
        engine, counted = Engine(pooled), passes(model)
        job = engine.submit(prompts[0], tokens, drafts_max=drafts)
        while engine.busy:
            engine.step()
            pooled.cache.check()
        assert [job.output] == expected
        assert job.passes_saved >= saved
        assert len(counted) == tokens - job.passes_saved
        assert slots(pooled) == [0] * len(slots(pooled))
        [again] = serve(pooled, [prompts[0] + job.output])
        assert again.cached >= (len(prompts[0]) + tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_wrong_drafts_leave_nothing_behind(name, monkeypatch):
    model, prompts = make_model(name), prompts_of(3)
    monkeypatch.setattr("examples.transformers_engine.drafted", lambda _, count: [7] * count)
    expected = generated(model, prompts)
    with opened(model, stack(tokens=900), step=6) as pooled:
        for _ in range(2):
            jobs = serve(pooled, prompts, drafts_max=9)
            assert outputs(jobs) == expected
            assert not any(job.passes_saved for job in jobs)


@pytest.mark.parametrize("how", ["tiers", "recompute"])
def test_drafts_are_dropped_before_requests_are_preempted(how, monkeypatch):
    monkeypatch.setattr(Preemption, "choice", lambda self, request: how)
    model, prompts = repetitive(), prompts_of(4, shared=9, own=40)
    with opened(model, stack(tokens=150), step=16) as pooled:
        jobs = serve(pooled, prompts, drafts_max=4)
        assert outputs(jobs) == generated(model, prompts)
        assert sum(job.preempted for job in jobs) > 0


def test_no_token_follows_a_drafted_end():
    model, prompts = repetitive(), prompts_of(2)
    end = generated(model, prompts)[0][NEW // 2]
    ends = frozenset([end])
    with opened(model, stack(tokens=900)) as pooled:
        said = outputs(serve(pooled, prompts, drafts_max=4, ends=ends))
        assert said == outputs(serve(pooled, prompts, ends=ends))
    assert said[0][-1] == end
    assert said[0].count(end) == 1


def test_drafts_for_states_and_other_unsupported_drafts_are_refused():
    with opened_states(state_model("qwen3-next"), state_stack()) as pooled:
        with pytest.raises(
            ConfigError, match=r"drafts: 0\.state is a state.*beams are supported"
        ) as got:
            Engine(pooled).submit([1, 2, 3], NEW, drafts_max=2)
        assert got.value.path == "drafts"
        request = pooled.requests.begin([1, 2, 3])
        with pytest.raises(ConfigError, match="drafts"):
            pooled.run([request], [1])
        assert request.computed == 0
        pooled.requests.release(request)
    with opened(make_model(), stack(tokens=400), step=4) as pooled:
        engine = Engine(pooled, batch_max=3)
        for options, says in (
            ({"beams": 4}, "4 beams: expected 1 .. 3"),
            ({"beams": 0}, "0 beams"),
            ({"beams": 2, "drafts_max": 1}, "expected either drafts or beams"),
        ):
            with pytest.raises(ValueError, match=says):
                engine.submit([1, 2, 3], NEW, **options)
        assert not engine.busy
        request = pooled.requests.begin([1] * 6)
        for count in (-1, 1, 4):
            with pytest.raises(ValueError, match=r"expected 0 .. 3, and 4 tokens left, found 6"):
                pooled.run([request], [count])
        assert request.computed == 0
        pooled.requests.release(request)


# ---- the choice of tokens


def test_a_draft_continues_as_after_the_most_similar_earlier_text():
    assert drafted([1, 2, 3, 9, 1, 2, 3], 3) == [9, 1, 2]
    assert drafted([5, 2, 8, 1, 2, 7, 5, 2], 2) == [8, 1], "two alike before one, if further back"
    assert drafted([1, 8, 1, 9, 1], 2) == [9, 1], "the most recent"
    assert drafted([4, 4], 3) == [4, 4, 4], "what repeats goes on"
    assert drafted([1, 2, 3], 3) == drafted([1], 3) == drafted([1, 1], 0) == []
    assert [agreed([1, 2, 3], chosen) for chosen in ([1, 2, 3, 4], [1, 5, 3, 4], [0])] == [3, 1, 0]


def test_a_search_with_one_beam_is_refused():
    with pytest.raises(ValueError, match="1 beams: expected 2 or more"):
        BeamSearch(1, 5)
