"""From what the workers described to an open cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvladder.compose import open_manager
from kvladder.config import StackConfig
from kvladder.connectors.vllm_checks import block_tokens, this_node
from kvladder.connectors.vllm_fingerprint import model_fields
from kvladder.connectors.vllm_step import Attach, RankDescription
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.manager import CacheManager


class Assembled(NamedTuple):
    """What the scheduler half works with."""

    manager: CacheManager
    attach: Attach
    worker: Any
    """The worker half where it is in this process, else None."""


def layout_of(
    ranks: Mapping[int, RankDescription],
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    fingerprint: str,
) -> Layout:
    """The layout of blocks whose parts are on these ranks.

    Raises
    ------
    ConfigError
        A rank is missing, runs elsewhere, or has blocks of another shape.
    """
    wanted = vllm_config.parallel_config.tensor_parallel_size
    if sorted(ranks) != list(range(wanted)):
        raise ConfigError(
            f"ranks {sorted(ranks)} described their KV tensors",
            hint=f"expected 0 .. {wanted - 1}",
        )
    first = ranks[0]
    for rank, described in ranks.items():
        if described.node != this_node():
            raise ConfigError(
                f"rank {rank} runs on {described.node.partition('/')[0]}",
                hint="kvladder supports ranks on one machine",
            )
        for name, value in described.fields.items():
            if first.fields.get(name) != value:
                raise ConfigError(
                    f"rank {rank} has {name} {value!r}", hint=f"rank 0 has {first.fields.get(name)}"
                )
    layout_name = str(getattr(kv_cache_config, "kv_cache_layout", None))
    fields = {
        **model_fields(vllm_config, fingerprint=fingerprint),
        **first.fields,
        "kv.layout": layout_name,
        "ranks": str(wanted),
    }
    size = sum(described.block_bytes for described in ranks.values())
    return Layout(block_tokens(kv_cache_config), size, fields)


def assemble(
    ranks: Mapping[int, RankDescription],
    vllm_config: Any,
    kv_cache_config: Any,
    config: StackConfig,
) -> Assembled:
    """Open the cache that ``config`` describes for these ranks.

    Raises
    ------
    ConfigError
        It cannot be had; says where, what and what instead.
    """
    layout = layout_of(ranks, vllm_config, kv_cache_config, fingerprint=config.model.fingerprint)
    manager = open_manager(config, layout)
    offsets = [0]
    for rank in range(len(ranks) - 1):
        offsets.append(offsets[-1] + ranks[rank].block_bytes)
    attach = Attach(manager.arena.handle, tuple(offsets))
    return Assembled(manager, attach, ranks[0].worker if len(ranks) == 1 else None)
