"""What the scheduler half knows of the engine before the workers describe their KV tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from kvladder.config.stack import StackConfig
from kvladder.connectors.vllm.groups import VllmGroups
from kvladder.connectors.vllm.identity.contents import Contents
from kvladder.connectors.vllm.options import Policies, VllmOptions
from kvladder.notices import Notices


@dataclass(frozen=True)
class EngineFacts:
    """The part of the engine that is known before its workers have described their tensors."""

    vllm_config: Any
    kv_cache_config: Any
    options: VllmOptions
    config: StackConfig
    notices: Notices
    groups: VllmGroups
    contents: Contents
    policies: Policies
    v2: bool
    """True if vLLM runs model runner V2, see ``runs_v2``; decided when vLLM makes its scheduler."""

    @property
    def role(self) -> str:
        """The ``kv_role`` of this connector in vLLM."""
        return str(self.vllm_config.kv_transfer_config.kv_role)

    @property
    def caches_prefixes(self) -> bool:
        """True if vLLM has a prefix cache itself."""
        cache = getattr(self.vllm_config, "cache_config", None)
        return bool(getattr(cache, "enable_prefix_caching", False))

    @property
    def step_tokens(self) -> float:
        """Maximum number of tokens that a step computes."""
        scheduling = getattr(self.vllm_config, "scheduler_config", None)
        return getattr(scheduling, "max_num_batched_tokens", inf)
