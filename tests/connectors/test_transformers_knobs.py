"""Settings that change a model's pools: the type of the cache, and windows by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma4TextConfig

from kvladder.device import opening as device
from kvladder.errors import ConfigError
from tests.connectors.test_transformers import (
    TOKEN_BYTES,
    WINDOW,
    evict_all,
    make_model,
    opened,
    outputs,
    plain,
    prompts_of,
    serve,
    stack,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


def source(**gpu: Any) -> dict[str, Any]:
    made = stack(tokens=600)
    return {**made, "gpu": {**made["gpu"], **gpu}}


def twin(model: Any, kind: str, **options: Any) -> Any:
    """Return a model with the same weights and with windows of its own class."""
    other = make_model(kind, **options)
    other.load_state_dict(model.state_dict())
    return other


SEES = {"use_sliding_window": True, "sliding_window": WINDOW}


@pytest.mark.parametrize("step", [None, 7])
@pytest.mark.parametrize(
    ("windows", "kinds"),
    [
        ([WINDOW], ["sliding_attention"] * 3),
        ([WINDOW, 0], ["sliding_attention", "full_attention", "sliding_attention"]),
        ([0, 0, WINDOW], ["full_attention", "full_attention", "sliding_attention"]),
        ([1000], ["full_attention"] * 3),
    ],
)
def test_windows_repeat_over_the_layers_and_match_a_model_that_has_them(
    windows: list[int], kinds: list[str], step: int | None
) -> None:
    model = make_model("qwen2")
    prompts = prompts_of(3)
    said = plain(twin(model, "qwen2", **SEES, layer_types=kinds), prompts)
    with opened(model, source(windows=windows), step=step) as pooled:
        assert outputs(serve(pooled, prompts)) == said
        narrow = sum(kind == "sliding_attention" for kind in kinds)
        assert (f"window-{WINDOW}" in pooled.cache.describe()) == bool(narrow)
        evict_all(pooled)
        again = serve(pooled, prompts)
        assert outputs(again) == said
        assert all(job.cached for job in again)
    assert plain(model, prompts) == plain(make_model("qwen2"), prompts), "it is as it was"


def test_a_window_is_never_wider_than_the_models_own() -> None:
    model, prompts = make_model("gemma3"), prompts_of(2)
    said = plain(model, prompts)
    with opened(model, source(windows=[1000])) as pooled:
        assert outputs(serve(pooled, prompts)) == said


def test_layers_with_windows_of_their_own_have_narrower_ones() -> None:
    model, prompts = make_model("mistral"), prompts_of(2)
    said = plain(twin(model, "mistral", sliding_window=6), prompts)
    with opened(model, source(windows=[6])) as pooled:
        assert outputs(serve(pooled, prompts)) == said


SHARING = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
}
SHARERS: dict[str, tuple[type, dict[str, Any]]] = {
    "gemma3n": (
        Gemma3nTextConfig,
        {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 8}
        | {"intermediate_size": [64] * 8},
    ),
    "gemma4": (Gemma4TextConfig, {"global_head_dim": 64, "initializer_range": 0.1}),
}
"""Models with last layers that keep nothing and read the keys of others."""


def sharer(name: str, window: int) -> Any:
    kind, special = SHARERS[name]
    torch.manual_seed(1)
    base: dict[str, Any] = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 64}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    base |= {"initializer_range": 0.3}
    config = kind(**{**base, **SHARING, **special, "sliding_window": window})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("step", [None, 7])
@pytest.mark.parametrize("name", SHARERS)
def test_layers_that_share_keys_share_their_windows(name: str, step: int | None) -> None:
    model, prompts = sharer(name, WINDOW), prompts_of(1)
    said = plain(sharer(name, 6), prompts)
    assert said != plain(model, prompts)
    wide = {**source(memory="1 MiB", windows=[6, 0]), "arena": {"size": "16 MiB"}}
    with opened(model, wide, step=step) as pooled:
        assert outputs(serve(pooled, prompts)) == said
        evict_all(pooled)
        again = serve(pooled, prompts)
        assert outputs(again) == said
        assert all(job.cached for job in again)
    narrow = []
    for windows in ([0, 6], [6]):
        with opened(model, source(memory="1 MiB", windows=windows), step=step) as pooled:
            narrow.append(outputs(serve(pooled, prompts)))
            assert outputs(serve(pooled, prompts)) == narrow[-1]
            assert pooled._narrowed[7] == 6, "as layer 5, whose keys it reads"
    assert len({str(one) for one in (said, plain(model, prompts), *narrow)}) == 4


def test_layers_that_read_keys_of_no_layer_can_have_no_windows(monkeypatch: Any) -> None:
    model = sharer("gemma3n", WINDOW)
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward

    def copied(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = kwargs["shared_kv_states"]
        states |= {at: (keys.clone(), values) for at, (keys, values) in states.items()}
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", copied)
    with pytest.raises(
        ConfigError, match=r"gpu\.windows: layer 6 reads keys of another layer, and kvladder"
    ):
        opened(model, source(memory="1 MiB", windows=[6]))


def test_windows_are_counted_by_layers_that_keep_keys() -> None:
    """Layers with states, and layers that read the keys of others, are not counted."""
    model = sharer("gemma4", WINDOW)
    what = "7 windows .*at most 6, one for each layer that keeps keys and values"
    with pytest.raises(ConfigError, match=what):
        opened(model, source(memory="1 MiB", windows=[0] * 7))


def test_memory_moves_between_windows_during_serving() -> None:
    model, prompts = make_model("gemma3"), prompts_of(8, shared=0, own=2)
    long = prompts_of(4, shared=20, own=40)
    said = plain(model, prompts), plain(model, long)
    with opened(model, source(memory="142 KiB", rebalance=True), step=16) as pooled:
        rebalance = pooled.cache.rebalance
        assert rebalance is not None
        for _ in range(3):
            assert outputs(serve(pooled, prompts)) == said[0]
            assert outputs(serve(pooled, long)) == said[1]
            pooled.cache.reset()
        assert rebalance.counts()["moved"] > 0


def test_other_windows_share_nothing(tmp_path: Any) -> None:
    model, prompts = make_model("qwen2"), prompts_of(1)
    spaces = set()
    for windows in ([], [WINDOW], [0, WINDOW], [WINDOW - 1]):
        with opened(model, source(windows=windows)) as pooled:
            spaces.add(pooled.cache.manager.namespace)
            serve(pooled, prompts)
    assert len(spaces) == 4


@pytest.mark.parametrize(
    ("gpu", "path", "says"),
    [
        (
            {"windows": [1, 2, 3, 4]},
            "gpu.windows",
            "4 windows .*at most 3, one for each layer that keeps",
        ),
        ({"windows": [-1]}, "gpu.windows", "a whole number, 0 or more"),
        ({"windows": 5}, "gpu.windows", "a list"),
        ({"dtype": "fp7"}, "gpu.dtype", "'fp8'"),
        ({"dtype": "int8"}, "gpu.dtype", "'auto' or 'bfloat16'"),
    ],
)
def test_wrong_settings_are_refused(gpu: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as got:
        opened(make_model(), source(**gpu))
    assert got.value.path.startswith(path)


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = make_model()
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match=r"gpu\.windows: the model uses attention 'eager' .*sdpa"):
        opened(model, source(windows=[WINDOW]))
    with opened(model, source(windows=[1000])) as pooled:  # it narrows nothing
        serve(pooled, prompts_of(1))


def test_a_type_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError("not here")

    model = make_model()
    monkeypatch.setattr(device, "_one", lacks)
    with pytest.raises(ConfigError, match=r"gpu\.dtype: fp8 on cpu: not here \(expected auto, "):
        opened(model, source(dtype="fp8"))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", 1e-5), ("bfloat16", 0.03), ("fp8", 0.15), ("float8_e5m2", 0.3)]
)
def test_the_cache_has_the_type_that_is_named(name: str, dtype: str, error: float) -> None:
    """The error relative to the spread of the logits, through the cache, host memory and back."""
    model, prompts = make_model(name), prompts_of(1, shared=40)
    ids = torch.tensor([prompts[0]])
    with torch.inference_mode():
        exact = model(ids).logits[0, -1]
    with opened(model, source(dtype=dtype)) as pooled:
        short = "float8_e4m3fn" if dtype == "fp8" else dtype
        kinds = {str(one.dtype) for held in pooled.cache.tensors for one in held.values()}
        assert f"torch.{short}" in kinds
        assert ("torch.uint8" in kinds) == ("8" in dtype)
        sizes = [part.block_bytes for part in pooled.cache.division.shares]
        each = {"float32": 1, "bfloat16": 0.5}.get(dtype, 0.25 + 2 * 2 * 4 / TOKEN_BYTES)
        assert sum(sizes) == int(3 * pooled.block_tokens * TOKEN_BYTES * each)
        found = []
        for _ in range(2):
            request = pooled.requests.begin(prompts[0])
            while not pooled.prepare(request):
                pooled.cache.wait(0.01)
                pooled.cache.poll()
            logits = None
            while logits is None:
                [logits] = pooled.run([request])
            found.append((request.cached, logits))
            pooled.requests.release(request)
            evict_all(pooled)
    (first, fresh), (second, again) = found
    assert first == 0
    assert second >= 36
    for logits in (fresh, again):
        assert float((logits - exact).std() / exact.std()) < error


def test_requests_share_parts_of_blocks_that_have_scales() -> None:
    model, prompts = make_model(), prompts_of(3, shared=30)
    alone = []
    for prompt in prompts:
        with opened(model, source(dtype="fp8", partial="copy")) as pooled:
            alone += outputs(serve(pooled, [prompt]))
    with opened(model, source(dtype="fp8", partial="copy")) as pooled:
        for prompt, said in zip(prompts, alone, strict=True):
            [job] = serve(pooled, [prompt])
            assert job.output[0] == said[0]
        assert pooled.cache.pools[0].stats.partial > 0
        evict_all(pooled)
        assert all(job.cached for job in serve(pooled, prompts))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_gives_its_pools_memory_back_and_takes_it_again(name: str) -> None:
    model, prompts = make_model(name), prompts_of(3)
    said = plain(model, prompts)
    with opened(model, source(dtype="float32")) as pooled:
        assert outputs(serve(pooled, prompts)) == said
        kept = {one.untyped_storage() for held in pooled.cache.tensors for one in held.values()}
        whole = {storage.data_ptr(): storage.nbytes() for storage in kept}
        given = pooled.cache.shrink(0.25, timeout_s=PATIENCE_S)
        assert 0.7 < given / sum(whole.values()) < 0.8
        assert outputs(serve(pooled, prompts[:1])) == said[:1]
        assert pooled.cache.grow() == given
        again = serve(pooled, prompts)
        assert outputs(again) == said
        assert all(job.cached for job in again)
