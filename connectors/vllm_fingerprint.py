"""What tells one vLLM's blocks from another's: model, weights, number formats, layout, ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def model_fields(vllm_config: Any) -> dict[str, str]:
    """The fields that the configuration gives."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return {
        "engine": "vllm",
        "model": str(model.model),
        "config": _digest(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv.dtype": str(cache.cache_dtype),
        "hash": str(cache.prefix_caching_hash_algo),
        "speculative": str(speculative.model) if _keeps_drafts(speculative) else "",
    }


def _keeps_drafts(speculative: Any) -> bool:
    """Whether the model that makes the drafts has KV of its own: n-grams and suffixes have none."""
    return speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix")


def _digest(hf_config: Any) -> str:
    """Digest of the model's configuration as vLLM resolved it, overrides included."""
    plain: Mapping[str, Any] = hf_config.to_dict()
    kept = {key: value for key, value in plain.items() if key not in _VOLATILE}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


_VOLATILE = {"_name_or_path", "transformers_version"}
