"""Caches that grow in place: models give the same answers with and without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from kvladder.connectors.transformers import GrowingCache, Prefixes
from kvladder.connectors.transformers.growing import _take_over
from kvladder.errors import ConfigError, LayoutError
from tests.connectors.test_transformers import MODELS, make_model, prompts_of
from tests.connectors.test_transformers_states import make_model as recurrent_model

pytestmark = pytest.mark.slow

NEW = 40
STACK = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}]}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 4},
    "beams of samples": {"num_beams": 3, "do_sample": True},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "drafts": {"prompt_lookup_num_tokens": 4},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def say(model: Any, prompt: list[int], cache: Any = None, new: int = NEW, **way: Any) -> Any:
    """Return a model's tokens after a prompt; with ``cache``, or one that it makes."""
    torch.manual_seed(5)
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **way}
    said = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new,
        **options,
    )
    return said.tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_growing_cache_gives_the_same_answers(name: str, way: str) -> None:
    model = make_model(name)
    (prompt,) = prompts_of(1)
    if way == "drafts":
        prompt = prompt * 2  # so that there is something to look up
    expected = say(model, prompt, **WAYS[way])
    for step in (4, 16):
        cache = GrowingCache(model.config, step=step)
        assert say(model, prompt, cache, **WAYS[way]) == expected


def test_tokens_move_once_a_step_and_layers_one_after_the_other() -> None:
    model = make_model()
    cache = GrowingCache(model.config, step=16)
    (prompt,) = prompts_of(1)
    moved: list[list[bool]] = []
    with torch.inference_mode():
        model(torch.tensor([prompt]), past_key_values=cache)
        for token in range(100):
            model(torch.tensor([[token]]), past_key_values=cache)
            moved.append([not one for one in cache.in_place])
    for number in range(3):  # steps of 16, 17, 18 tokens
        keys, values = ([step[2 * number + part] for step in moved] for part in (0, 1))
        assert keys == values
        ends = [at for at, one in enumerate(keys) if one]
        assert {b - a for a, b in pairwise(ends)} == {16 + number}
    assert max(sum(step[::2]) for step in moved) < 3  # never all of them
    assert 0 < cache.copied_bytes < 100 * cache.bytes / 16


def test_a_cache_grows_by_128_tokens_and_a_few_by_default() -> None:
    model, (prompt,) = make_model(), prompts_of(1)
    cache = GrowingCache(model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt]), past_key_values=cache)
        rooms = 2 * 2 * 16 * 4  # keys and values, heads, size, bytes of a number
        assert cache.bytes == sum(128 + layer for layer in range(3)) * rooms
        model(torch.tensor([prompt]), past_key_values=cache)
        assert cache.bytes == sum(128 + layer for layer in range(3)) * rooms


@pytest.mark.parametrize("window", [2, 10, 64])
def test_windows_hold_no_more_than_they_see_and_a_step(window: int) -> None:
    model = make_model("mistral", sliding_window=window)
    (prompt,) = prompts_of(1)
    cache, plain = GrowingCache(model.config, step=8), DynamicCache(config=model.config)
    with torch.inference_mode():
        for number in range(60):
            ids = torch.tensor([prompt if not number else [number]])
            one = model(ids, past_key_values=cache).logits
            assert torch.equal(one, model(ids, past_key_values=plain).logits)
            held = 2 * (window + (len(prompt) if not number else 1) + 10) + 10
            each = cache.bytes / len(list(cache._rooms()))
            assert each <= held * 2 * 16 * 4  # heads, size, bytes of a number


def test_beams_copy_only_tokens_that_they_do_not_share(monkeypatch: Any) -> None:
    from kvladder.connectors.transformers import growing

    moved: list[int] = []
    take_over = growing._take_over

    def counted(states: torch.Tensor, copies: Any, length: int) -> None:
        moved.append(sum(length - first for _, _, first in copies))
        take_over(states, copies, length)

    monkeypatch.setattr(growing, "_take_over", counted)
    model = make_model()
    (prompt,) = prompts_of(1, shared=200)
    say(model, prompt, GrowingCache(model.config), num_beams=4)
    first, rest = moved[:6], moved[6:]
    assert first == [3 * len(prompt)] * 6  # all continue from the first
    assert 0 < max(rest) <= 3 * NEW + NEW


Change = Callable[[Any], object]
CHANGES: dict[str, Change] = {
    "offloaded": lambda cache: [layer.offload() for layer in cache.layers],
    "copied": lambda cache: [vars(layer).update(keys=layer.keys.clone()) for layer in cache.layers],
    "cropped": lambda cache: cache.crop(-7),
    "repeated": lambda cache: cache.batch_repeat_interleave(3),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "reset": lambda cache: cache.reset(),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([0])),
}  # fmt: skip


STAYS = {
    **dict.fromkeys(("offloaded", "cropped", "reordered"), (True, True)),
    "copied": (False, True),
}
"""Whether keys and values keep their addresses on a CPU; else neither does."""


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_stays_right_after_every_kind_of_change(change: str, mode: Any) -> None:
    """Also test changes between a pass in inference mode and one outside."""
    model = make_model()
    (prompt,) = prompts_of(1)
    caches = GrowingCache(model.config, step=16), DynamicCache(config=model.config)
    said: list[list[torch.Tensor]] = [[], []]
    for cache, logits in zip(caches, said, strict=True):
        with torch.inference_mode():
            model(torch.tensor([prompt]), past_key_values=cache)
        with mode():
            CHANGES[change](cache)
            rows = 3 if change == "repeated" else 1
            stays = STAYS.get(change) if mode is torch.inference_mode else None
            for token in range(20):
                logits.append(model(torch.tensor([[token]] * rows), past_key_values=cache).logits)
                if not token and isinstance(cache, GrowingCache):
                    assert cache.in_place == [*(stays or (False, False))] * 3
    assert all(torch.equal(one, other) for one, other in zip(*said, strict=True))


def test_gradients_pass_through_a_growing_cache() -> None:
    model = make_model()
    (prompt,) = prompts_of(1)
    found: list[torch.Tensor] = []
    for cache in (GrowingCache(model.config), DynamicCache(config=model.config)):
        model.zero_grad()
        model(torch.tensor([prompt[:20]]), past_key_values=cache)
        model(torch.tensor([prompt[20:]]), past_key_values=cache).logits.sum().backward()
        found.append(model.model.embed_tokens.weight.grad.clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(("way", "rows"), [("greedy", 1), ("samples", 3), ("beams", 4)])
def test_prompts_begin_with_prefixes_that_others_computed(
    way: str, rows: int, tmp_path: Path
) -> None:
    model = make_model()
    first, second = prompts_of(2)
    files = {"type": "files", "path": str(tmp_path), "capacity": "16 MiB", "when": "commit"}
    stack = {**STACK, "fetch": {"deadline": "1 m"}, "tiers": [*STACK["tiers"], files]}
    with Prefixes(model, stack, block_tokens=4) as prefixes:
        cache = prefixes.begin(first)
        assert cache.get_seq_length() == 0
        assert cache.missed == (("", "never_seen", (len(first) - 1) // 4),)
        (said,) = say(model, first, cache)
        assert prefixes.keep(cache, said) == (len(said) - 1) // 4
        assert prefixes.keep(cache, said) == 0
        assert prefixes.begin(said, salt="another").get_seq_length() == 0
    expected = say(model, second, **WAYS[way])
    with Prefixes(model, stack, block_tokens=4) as prefixes:  # another process would do the same
        cache = prefixes.begin(second, rows=rows)
        assert cache.get_seq_length() == 28  # of 30 that they share
        assert [one.reason for one in cache.missed] == ["never_seen"]
        assert say(model, second, cache, **WAYS[way]) == expected
        assert prefixes.begin(said).get_seq_length() == (len(said) - 1) // 4 * 4
        assert prefixes.begin(first[:29]).get_seq_length() == 28
        assert prefixes.begin(first[:28]).get_seq_length() == 24  # at least one is computed


ENDS = (7, 11, 29)
"""End tokens, frequent enough for beams to end early."""


@pytest.mark.parametrize("every", [0, *ENDS])
def test_only_tokens_common_to_all_beams_are_kept(every: int) -> None:
    """Any of them may be the answer, and the row of one that ended belongs to another since."""
    model = make_model()
    ends = list(range(3, 256, every)) if every else None
    for seed in range(6):
        prompt = random.Random(seed).choices(range(3, 256), k=21)
        with Prefixes(model, STACK, block_tokens=4) as prefixes:
            cache = prefixes.begin(prompt, rows=4)
            (said,) = say(model, prompt, cache, 30, num_beams=4, eos_token_id=ends)
            assert prefixes.keep(cache, said) == len(prompt) // 4
            text = [*said, 7]
            again = prefixes.begin(text)
            assert again.get_seq_length() == 20
            assert say(model, text, again) == say(model, text)


def test_reordered_rows_know_their_common_tokens() -> None:
    model, (prompt,) = make_model(), prompts_of(1)
    cache = GrowingCache(model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt] * 3), past_key_values=cache)
        assert cache.certain == len(prompt)
        cache.reorder_cache(torch.tensor([0, 0, 0]))
        model(torch.tensor([[1], [2], [3]]), past_key_values=cache)
        cache.reorder_cache(torch.tensor([0, 1, 2]))
        assert cache.certain == len(prompt)
        for _ in range(2):  # they are all alike afterwards, and still not as before
            cache.reorder_cache(torch.tensor([1, 1, 1]))
            assert cache.certain == len(prompt)
            model(torch.tensor([[1], [2], [3]]), past_key_values=cache)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.certain == len(prompt)
    cache.crop(-10)
    assert cache.certain == cache.get_seq_length() == len(prompt) - 7
    with torch.inference_mode():
        model(torch.tensor([prompt[:5]]), past_key_values=cache)
    assert cache.certain == len(prompt) - 2, "a row goes on from what all had in common"
    cache.reset()
    assert cache.certain == 0


def test_rows_that_are_reordered_late_have_nothing_in_common() -> None:
    model, (prompt,) = make_model(), prompts_of(1)
    cache = GrowingCache(model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt] * 3), past_key_values=cache)
        model(torch.tensor([[1], [2], [3]]), past_key_values=cache)
    assert cache.certain == len(prompt) + 1
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    assert cache.certain == 0, "nothing says that they began alike"


def test_rows_get_what_others_had_before_all_copies() -> None:
    before = torch.arange(12.0).view(3, 1, 4, 1)
    states, copies = before.clone(), [(0, 1, 2), (1, 2, 1), (2, 0, 0)]
    _take_over(states, copies, 4)
    for source, target, first in copies:
        assert torch.equal(states[target, :, first:], before[source, :, first:])
        assert torch.equal(states[target, :, :first], before[target, :, :first])


@pytest.mark.parametrize("kind", [GrowingCache, DynamicCache])
@pytest.mark.parametrize("beams", [1, 4])
def test_rows_with_padding_are_not_kept(beams: int, kind: Any) -> None:
    """Rows are kept neither under their tokens alone, at other positions, nor with the padding."""
    model = make_model()
    rows = [[0] * 6 + [5, 6, 7] * 6, list(range(24))]
    ids, mask = torch.tensor(rows), torch.tensor([[0] * 6 + [1] * 18, [1] * 24])
    way = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with Prefixes(model, STACK, block_tokens=4) as prefixes:
        cache = kind(config=model.config)
        said = model.generate(
            ids, attention_mask=mask, past_key_values=cache, num_beams=beams, **way
        ).tolist()
        for text in (said[0][6:], said[0], said[0][6:] + [0] * 6):
            if beams > 1 and kind is GrowingCache:  # their rows have nothing in common
                assert prefixes.keep(cache, text) == 0
            else:
                with pytest.raises(LayoutError, match="without padding"):
                    prefixes.keep(cache, text)
            assert prefixes.begin(text).get_seq_length() == 0
        assert prefixes.manager.arena.free == prefixes.manager.arena.slots


def test_tokens_that_generate_takes_for_padding_are_not_kept() -> None:
    """Without a mask ``generate`` makes one, which shifts prompts that contain pad tokens."""
    model, (prompt,) = make_model(), prompts_of(1)
    prompt = [0, *(token or 1 for token in prompt)]
    with Prefixes(model, STACK, block_tokens=4) as prefixes:
        cache = prefixes.begin(prompt)
        way = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        [said] = model.generate(torch.tensor([prompt]), past_key_values=cache, **way).tolist()
        with pytest.raises(LayoutError, match="another token at position 1 .*without padding"):
            prefixes.keep(cache, said)


@pytest.mark.parametrize(("kind", "same"), [(GrowingCache, False), (DynamicCache, True)])
def test_new_tokens_after_a_crop_overwrite_tensors_of_a_growing_cache(
    kind: Any, same: bool
) -> None:
    model, (prompt,) = make_model(), prompts_of(1)
    cache = kind(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt]), past_key_values=cache)
        keys = cache.layers[0].keys
        before = keys.clone()
        cache.crop(-7)
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    assert torch.equal(keys, before) == same


def test_models_with_only_states_are_refused() -> None:
    model = recurrent_model("mamba2")
    with pytest.raises(ValueError, match="past_key_values"):
        say(model, [1, 2, 3], GrowingCache(model.config))


def test_rows_without_padding_are_kept() -> None:
    model = make_model()
    rows = prompts_of(2)
    short, long = rows
    ids = torch.tensor([long, [0, *short]])
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    way = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with Prefixes(model, STACK, block_tokens=4) as prefixes:
        cache = GrowingCache(model.config)
        said = model.generate(ids, attention_mask=mask, past_key_values=cache, **way).tolist()
        blocks = (len(said[0]) - 1) // 4
        assert prefixes.keep(cache, said[0]) == blocks
        text = [*said[0], 7]
        again = prefixes.begin(text)
        assert again.get_seq_length() == 4 * blocks
        assert say(model, text, again) == say(model, text)


def test_tokens_that_a_cache_does_not_hold_are_refused() -> None:
    model, (prompt,) = make_model(), prompts_of(1)
    with Prefixes(model, STACK, block_tokens=4) as prefixes:
        cache = prefixes.begin(prompt)
        (said,) = say(model, prompt, cache)
        held = cache.get_seq_length()
        for text in (said[:-2], [*said, 1], said[5:]):
            what = f"{len(text)} tokens for a cache that holds {held}"
            with pytest.raises(LayoutError, match=rf"{what} \(expected {held}, or {held + 1}"):
                prefixes.keep(cache, text)
        for at in (0, 20, held // 4 * 4 - 1):
            other = [*said[:at], (said[at] + 1) % 256, *said[at + 1 :]]
            with pytest.raises(LayoutError, match=rf"row 0 .* another token at position {at} "):
                prefixes.keep(cache, other)
            assert prefixes.begin(other).get_seq_length() == 0
        assert prefixes.keep(cache, said[:-1]) == held // 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_16_bit_numbers_are_kept_too(name: str, dtype: torch.dtype) -> None:
    """Layers compute them a little otherwise, many tokens at once or one at a time."""
    model = make_model(name).to(dtype)
    (prompt,) = prompts_of(1)
    with Prefixes(model, STACK, block_tokens=4) as prefixes:
        cache = prefixes.begin(prompt)
        (said,) = say(model, prompt, cache)
        assert prefixes.keep(cache, said) == (len(said) - 1) // 4


def test_models_and_caches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="layer 0 has a window of 10 tokens"):
        Prefixes(make_model("mistral"), STACK)
    with pytest.raises(ConfigError, match="tiers"):
        Prefixes(make_model(), {"arena": {"size": "1 MiB"}})
    model = make_model()
    with Prefixes(model, STACK) as prefixes:
        small = make_model(num_hidden_layers=2)
        cache = GrowingCache(small.config)
        said = say(small, [1, 2, 3], cache)
        with pytest.raises(LayoutError, match="2 layers"):
            prefixes.keep(cache, said[0])
        assert prefixes.manager.arena.free == prefixes.manager.arena.slots


@pytest.mark.parametrize(
    ("of", "says"),
    [
        ({"num_hidden_layers": 2}, "the cache has 2 layers, and no layer 2"),
        (
            {"num_key_value_heads": 4},
            "layer 0 of the cache has 4 heads of 16, but the model has 2 heads of 16",
        ),
        ({"head_dim": 8}, "layer 0 of the cache has 2 heads of 8, but the model has 2 heads of 16"),
    ],
)
def test_a_cache_of_another_model_is_refused(of: dict[str, Any], says: str) -> None:
    model, prompt = make_model(), prompts_of(1)[0]
    cache = GrowingCache(make_model(**of).config)
    if "num_hidden_layers" not in of:  # the content differs
        say(make_model(**of), prompt, cache, 1)
    with pytest.raises(LayoutError, match=rf"{says} \(expected a cache of this model"):
        model(torch.tensor([prompt]), past_key_values=cache)
