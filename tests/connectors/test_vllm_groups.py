"""The connector's model of vLLM's groups agrees with vLLM's own managers."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.connectors.vllm.groups import VllmGroup, VllmGroups, groups_of
from kvladder.errors import LayoutError
from tests.connectors.scripted import kv_spec

HASHES = [hashlib.sha256(bytes([n])).digest() for n in range(64)]


def config(*specs: Any, **more: Any) -> Any:
    groups = [
        SimpleNamespace(layer_names=[f"model.{i}"], kv_cache_spec=one)
        for i, one in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, **more)


def test_groups_are_read_from_vllms_configuration() -> None:
    groups = groups_of(
        config(
            kv_spec("FullAttentionSpec", block_size=16),
            kv_spec("SlidingWindowSpec", block_size=8, sliding_window=10, extra_retained_tokens=2),
            kv_spec("ChunkedLocalAttentionSpec", block_size=8, attention_chunk_size=32),
            kv_spec("MambaSpec", block_size=48, mamba_cache_mode="align"),
            kv_spec("MambaSpec", block_size=16, mamba_cache_mode="all"),
        ),
        model="tiny",
    )
    assert [group.kind for group in groups] == ["full", "window", "local", "state", "state"]
    assert [group.hashes for group in groups] == [2, 1, 1, 6, 2]
    assert [group.reach for group in groups] == [0, 11, 32, 0, 0]
    assert [group.handed for group in groups] == [False, False, False, True, False]
    assert groups.step == 48
    assert groups.whole == [groups[0]] == [groups.main]
    assert groups.partial == list(groups[1:])


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (kv_spec("CrossAttentionSpec"), "tiny: model.0 ... has KV cache of kind CrossAttention"),
        (kv_spec("FullAttentionSpec", prefix_cacheable=False), "does not keep for later requests"),
        (kv_spec("SlidingWindowMLASpec", sliding_window=4, prefix_replay_tokens=8), "not keep"),
        (kv_spec("MambaSpec", mamba_cache_mode="none"), "states that vLLM does not keep at block"),
    ],
)
def test_unsupported_specs_are_refused_by_name(spec: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        groups_of(config(spec), model="tiny")


def test_layers_of_several_kinds_in_one_group_are_refused() -> None:
    kinds = {"a": kv_spec("FullAttentionSpec"), "b": kv_spec("MambaSpec")}
    both = config(kv_spec("UniformTypeKVCacheSpecs", kv_cache_specs=kinds))
    both.kv_cache_groups[0].layer_names = ["a", "b"]
    with pytest.raises(LayoutError, match="FullAttentionSpec, MambaSpec"):
        groups_of(both, model="tiny")


def test_hashes_that_do_not_divide_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match="vLLM hashes every 3 tokens, but blocks have 4"):
        groups_of(config(kv_spec("FullAttentionSpec"), hash_block_size=3), model="tiny")


def test_block_names_differ_by_group_and_depend_on_the_whole_prefix() -> None:
    specs = [kv_spec("FullAttentionSpec", block_size=size) for size in (4, 4, 8)]
    groups = groups_of(config(*specs), model="tiny")
    names = [group.keys(HASHES, 0, 64) for group in groups]
    assert names[0] == HASHES
    assert [len(of) for of in names] == [64, 64, 32]
    assert len({name for of in names for name in of}) == 64 + 64 + 32
    assert all(len(name) == 32 for of in names for name in of)
    assert groups[2].keys(HASHES, 3, 5) == names[2][3:5]
    assert groups[2].keys(HASHES[:9], 3, 9) == names[2][3:4]  # no more than vLLM has hashed
    changed = [*HASHES[:7], b"\0" * 32, *HASHES[8:]]  # the last hash of a block is the prefix's
    assert [i for i, one in enumerate(groups[2].keys(changed, 0, 32)) if one != names[2][i]] == [3]


HAS_VLLM = importlib.util.find_spec("vllm") is not None


def manager(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module("vllm.v1.core.single_type_kv_cache_manager"), name)


@pytest.mark.parametrize("kind", ["window", "local", "state"])
@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_first_block_read_is_the_first_that_vllm_keeps(kind: str) -> None:
    names = {"window": "SlidingWindow", "local": "ChunkedLocalAttention", "state": "Mamba"}
    cls = manager(f"{names[kind]}Manager")
    for tokens in (4, 16):
        for size in (4, 7, 16, 33):
            mine = object.__new__(cls)
            mine.sliding_window, mine.attention_chunk_size = size, size
            mine.extra_retained_tokens = 0
            reach = {"window": size - 1, "local": size, "state": 0}[kind]
            group = VllmGroup(0, kind, tokens, 1, reach)  # type: ignore[arg-type]
            for end in range(1, 120):
                assert group.first(end) == mine.get_num_skipped_tokens(end) // tokens


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@given(
    kind=st.sampled_from(["window", "state"]),
    window=st.integers(2, 40),
    tokens=st.sampled_from([4, 8]),
    more=st.integers(1, 4),
    interval=st.sampled_from([None, 0, 1, 2, 5]),
    boundary=st.integers(1, 200),
)
def test_useful_blocks_are_those_that_vllm_itself_would_keep(
    kind: str, window: int, tokens: int, more: int, interval: int | None, boundary: int
) -> None:
    from tests.connectors.mixes import spec

    own = spec(kind, tokens, 1 << 12)
    if kind == "window":
        from dataclasses import replace

        own = replace(own, sliding_window=window)
    group = VllmGroup(1, kind, tokens, 1, window - 1)  # type: ignore[arg-type]
    groups = VllmGroups([VllmGroup(0, "full", tokens * more, more), group])
    every = None if interval is None else interval * groups.step
    useful = groups.useful(group, every, [boundary])
    cls = manager("SlidingWindowManager" if kind == "window" else "MambaManager")
    count = 200 // groups.step * groups.step // tokens
    mask = cls.reachable_block_mask(
        0, count, groups.step, own, False,
        retention_interval=every, reachable_boundaries=[boundary],
    )  # fmt: skip
    if mask is None and kind == "state" and every is None:  # vLLM keeps them all, also those that
        mask = [(n + 1) * tokens % groups.step == 0 for n in range(count)]  # no prefix ends at
    assert [useful(n) for n in range(count)] == (mask or [True] * count)
