"""The example engine progresses with every load that fits: it computes, or a copy is in flight."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from examples.transformers_engine import Engine, Job, tiny_model  # noqa: E402
from kvladder.connectors.transformers import PooledModel  # noqa: E402

pytestmark = pytest.mark.slow

TOKEN_BYTES = 4 * 2 * 2 * 16 * 4
"""Bytes of a token: four layers, keys and values, two heads of 16 numbers."""
IDLE_MAX = 3
"""Steps in a row without computing or copies in flight: one of them sees the last copy end."""

MODEL = cache(lambda: tiny_model().eval())
JOBS = st.lists(st.tuples(st.integers(1, 84), st.integers(1, 10)), min_size=2, max_size=5)


class Watch:
    """An engine that checks its progress after each step."""

    def __init__(self, model: PooledModel, jobs: list[Job], engine: Engine) -> None:
        self.model, self.jobs, self.engine = model, jobs, engine
        self.passes = 0
        run = model.run

        def counted(*arguments: Any) -> Any:
            self.passes += 1
            return run(*arguments)

        model.run = counted  # type: ignore[method-assign, assignment]

    def run(self) -> None:
        steps = idle = 0
        most = 20 * sum(len(job.prompt) + job.tokens_max for job in self.jobs)
        while self.engine.busy:
            passes, busy = self.passes, self.model.cache.port.busy
            self.engine.step()
            steps += 1
            moves = busy or self.model.cache.port.busy
            idle = 0 if self.passes > passes or moves else idle + 1
            assert idle <= IDLE_MAX, "nobody computes, and there is nothing to wait for"
            assert steps <= most, f"{[job.preempted for job in self.jobs]} times made way"


@cache
def said(prompt: tuple[int, ...], new: int) -> Any:
    """Return the model's answer to a prompt without any cache of kvladder."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)  # or zeros among the tokens are taken for padding
    return MODEL().generate(ids, attention_mask=mask, **options)[0, len(prompt) :].tolist()


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.sampled_from([2, 4, 8]),
    step=st.sampled_from([1, 5, 16, 32, None]),
    jobs=JOBS,
    spare=st.integers(0, 20),
    shared=st.integers(0, 40),
    seed=st.integers(0, 3),
)
@example(size=2, step=16, jobs=[(83, 3), (33, 5)], spare=4, shared=0, seed=0)
@example(size=4, step=32, jobs=[(78, 8), (33, 9)], spare=5, shared=0, seed=0)
@example(size=2, step=16, jobs=[(84, 5), (79, 7), (83, 8)], spare=10, shared=0, seed=0)
@example(size=4, step=16, jobs=[(72, 7), (74, 9), (57, 10), (79, 5)], spare=6, shared=0, seed=0)
def test_every_load_that_fits_is_served(
    size: int,
    step: int | None,
    jobs: list[tuple[int, int]],
    spare: int,
    shared: int,
    seed: int,
) -> None:
    """The pool has ``spare`` blocks beyond the longest job; jobs begin with ``shared`` tokens."""
    random = Random(seed)
    begin = [random.randrange(256) for _ in range(shared)]
    least = max(-(-(length + new) // size) for length, new in jobs) + 1
    blocks = least + spare
    stack = {
        "gpu": {"memory": f"{blocks * size * TOKEN_BYTES} B"},
        "arena": {"size": "16 MiB"},
        "tiers": [{"type": "host"}],
    }
    with PooledModel(MODEL(), stack, context=least * size, block_tokens=size, step=step) as model:
        engine = Engine(model, batch_max=8)
        asked: list[Job] = []
        for length, new in jobs:
            own = [random.randrange(256) for _ in range(length)]
            asked.append(engine.submit([*begin, *own][:length], new))
        Watch(model, asked, engine).run()
        assert [job.output for job in asked] == [
            said(tuple(job.prompt), job.tokens_max) for job in asked
        ]
