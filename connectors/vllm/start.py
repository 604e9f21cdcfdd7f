"""From what the workers described to the layout of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvladder.connectors.vllm.checks import this_node
from kvladder.connectors.vllm.groups import Groups
from kvladder.connectors.vllm.identity.fingerprint import model_fields
from kvladder.connectors.vllm.identity.weights import combined
from kvladder.connectors.vllm.step import RankDescription
from kvladder.errors import ConfigError
from kvladder.layout import Layout


def layout_of(
    ranks: Mapping[int, RankDescription],
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Groups,
    *,
    fingerprint: str,
) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
    """The layout of a slot, and by rank and group where in it a rank's bytes begin.

    A slot holds one block of any group: the parts of all ranks one after the other, of ranks that
    hold the same bytes only one. It is as large as the largest group needs. ``fingerprint`` is
    what stands for the weights: a user's text, or "auto" for those that the ranks have in memory.

    Raises
    ------
    ConfigError
        A rank is missing, runs elsewhere, or has blocks of another shape.
    """
    parallel = vllm_config.parallel_config
    width: int = parallel.tensor_parallel_size
    count = width * getattr(parallel, "pipeline_parallel_size", 1)
    if sorted(ranks) != list(range(count)):
        raise ConfigError(
            f"ranks {sorted(ranks)} described their KV tensors", hint=f"expected 0 .. {count - 1}"
        )
    fields: dict[str, str] = {}
    for rank, described in sorted(ranks.items()):
        if described.node != this_node():
            raise ConfigError(
                f"rank {rank} runs on {described.node.partition('/')[0]}",
                hint="kvladder supports ranks on one machine",
            )
        stage = f"stage.{rank // width}." if rank >= width else ""
        for name, value in described.fields.items():
            if fields.setdefault(f"{stage}{name}", value) != value:
                raise ConfigError(
                    f"rank {rank} has {name} {value!r}",
                    hint=f"rank {rank // width * width} has {fields[f'{stage}{name}']}",
                )
    ends = [0] * len(groups)
    offsets: list[tuple[int, ...]] = []
    for rank in range(count):
        if rank % ranks[rank].replicas == 0:
            offsets.append(tuple(ends))
            ends = [end + size for end, size in zip(ends, ranks[rank].sizes, strict=True)]
        else:
            offsets.append(offsets[-1])
    weights = f"given {fingerprint}"
    if fingerprint == "auto":
        weights = combined([described.weights for _, described in sorted(ranks.items())]).hex()
    fields = {
        **model_fields(vllm_config),
        **fields,
        "weights": weights,
        "kv.groups": ";".join(
            f"{g.kind} {g.tokens} {g.reach} {size}" for g, size in zip(groups, ends, strict=True)
        ),
        "kv.layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "ranks": str(len(set(offsets))),
    }
    elements = {text for name, text in fields.items() if name.endswith("kv.element")}
    element, _, run = elements.pop().partition(" ") if len(elements) == 1 else ("", "", "0")
    layout = Layout(groups.main.tokens, max(ends), fields, element, int(run))
    return layout, tuple(offsets)


def instance_of(parallel_config: Any) -> str:
    """Which of several data-parallel engines this is; each has a cache of its own."""
    # not data_parallel_rank and _size: vLLM resets them for engines that exchange nothing
    index = getattr(parallel_config, "data_parallel_index", 0)
    return f"dp{index}" if index else ""
