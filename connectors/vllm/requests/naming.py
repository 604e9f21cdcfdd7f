"""Names the blocks of a prompt that has not come yet, as vLLM will name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from kvladder.connectors.vllm.groups import VllmGroups
from kvladder.connectors.vllm.requests.state import RequestState
from kvladder.keys import BlockKey


class PromptNames:
    """Names blocks of text prompts without an adapter. Any thread may call it.

    Parameters
    ----------
    mark:
        Returns the mark of the current weights in all keys.
    """

    def __init__(self, vllm_config: Any, groups: VllmGroups, mark: Callable[[], int]) -> None:
        self._vllm_config = vllm_config
        self._groups = groups
        self._mark = mark

    def __call__(self, tokens: Sequence[int], salt: str) -> list[list[BlockKey]]:
        """Return the keys that a request with these tokens begins with, by group of layers."""
        prompt = SimpleNamespace(
            all_token_ids=tokens,
            block_hashes=[],
            cache_salt=salt or None,
            lora_request=None,
            mm_features=[],
            num_tokens=len(tokens),
            prompt_embeds=None,
        )
        prompt.block_hashes = self._hashes(prompt)
        state = RequestState(prompt, self._groups, mark=self._mark)
        return [*state.read(self._groups.aligned(len(tokens)))]

    @cached_property
    def _hashes(self) -> Callable[[Any], Sequence[bytes]]:
        """Function of vLLM that returns the hashes of a request."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        main = self._groups.main
        function = get_hash_fn_by_name(self._vllm_config.cache_config.prefix_caching_hash_algo)
        hasher: Callable[[Any], Sequence[bytes]] = get_request_block_hasher(
            main.tokens // main.hashes, function
        )
        return hasher
