"""vLLM starts with the requested layout: its own planning of the cache accepts it."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.v1.attention.backend import MultipleOf

from kvladder.connectors.vllm import KVLadderConnector
from kvladder.connectors.vllm.layouts import wanted_layout
from tests.connectors.planned import (
    FLASH_ATTN,
    FLASHINFER,
    FLASHINFER_MLA,
    FLASHMLA,
    Groups,
    backend,
    full,
    hybrid,
    latent,
    start,
    window,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DEFAULT = "LBNHC"


def configured(
    size: int, attention: Any, *, known: str, given: bool = True, hybrid: bool = False
) -> Any:
    """Return the configuration of an engine; ``known`` selects how its back end is given."""
    layers = {"l0": SimpleNamespace(attn_backend=attention)} if known == "layers" else {}
    chosen = SimpleNamespace(get_class=lambda: attention) if known == "setting" else None
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        cache_config=SimpleNamespace(block_size=size, user_specified_block_size=given),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        attention_config=SimpleNamespace(backend=chosen),
        model_config=SimpleNamespace(is_hybrid=hybrid),
    )


CASES: dict[str, tuple[Groups, int, Any, bool]] = {
    "dense 16, FLASH_ATTN": ([(4, full(16))], 16, FLASH_ATTN, True),
    "dense fp8 16, FLASHINFER": ([(4, full(16, dtype=torch.uint8))], 16, FLASHINFER, True),
    "dense 128, FLASH_ATTN": ([(4, full(128))], 128, FLASH_ATTN, True),
    "dense 128, FLASHINFER": ([(4, full(128))], 128, FLASHINFER, False),
    "latent 64, FLASHMLA": ([(4, latent(64))], 64, FLASHMLA, True),
    "latent 128, FLASHMLA": ([(4, latent(128))], 128, FLASHMLA, False),
    "latent 128, FLASHINFER_MLA": ([(4, latent(128))], 128, FLASHINFER_MLA, False),
    "hybrid 528, FLASH_ATTN": (hybrid(), 528, FLASH_ATTN, True),
    "hybrid 528, FLASHINFER": (hybrid(), 528, FLASHINFER, False),
    "windows 16, FLASH_ATTN": ([(2, full(16)), (2, window(16))], 16, FLASH_ATTN, True),
}
"""Groups, tokens per block, back end, and whether a packed cache can be had."""


@pytest.mark.parametrize("known", ["layers", "setting", "not"])
@pytest.mark.parametrize("case", CASES)
def test_vllm_starts_with_the_requested_layout(case: str, known: str) -> None:
    groups, size, attention, packed = CASES[case]
    config = configured(size, attention, known=known, hybrid="hybrid" in case)
    wish = KVLadderConnector.get_required_kvcache_layout(config)
    assert wish == ("BLHNC" if packed and known != "not" else None)
    start(wish or DEFAULT, groups, attention)


@pytest.mark.parametrize("case", CASES)
def test_a_packed_cache_is_requested_except_where_vllm_refuses_it(case: str) -> None:
    groups, _, attention, packed = CASES[case]
    if packed:
        start("BLHNC", groups, attention)
    else:
        with pytest.raises(ValueError, match="kernel blocks, which packed"):
            start("BLHNC", groups, attention)


def test_a_block_size_chosen_by_vllm_suits_its_back_ends() -> None:
    assert wanted_layout(configured(16, None, known="not", given=False)) == "BLHNC"
    assert wanted_layout(configured(528, None, known="not", given=False, hybrid=True)) is None


def test_a_latent_back_end_of_multiples_is_trusted_with_the_smallest_alone() -> None:
    sparse = backend("SPARSE", [MultipleOf(64)], latent=True)
    assert wanted_layout(configured(64, sparse, known="layers")) == "BLHNC"
    assert wanted_layout(configured(128, sparse, known="layers")) is None


def test_an_unknown_configuration_does_not_prevent_a_start() -> None:
    config = configured(16, None, known="not", given=False)
    config.device_config.device_type = "cpu"
    assert KVLadderConnector.get_required_kvcache_layout(config) is None
    del config.device_config
    assert KVLadderConnector.get_required_kvcache_layout(config) is None


def test_vllm_has_the_back_ends_and_settings_that_kvladder_reads() -> None:
    from vllm.config import AttentionConfig, CacheConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert "backend" in AttentionConfig.__dataclass_fields__
    assert "user_specified_block_size" in CacheConfig.__dataclass_fields__
    assert "kv_cache_dtype_skip_layers" in CacheConfig.__dataclass_fields__
    assert callable(AttentionBackendEnum.TRITON_ATTN.get_class)
    assert not AttentionBackend.is_mla()
    assert AttentionBackend.get_supported_kernel_block_sizes()
