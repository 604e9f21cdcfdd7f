"""``kvladder size``: prints how much of a model's KV cache fits into a memory and each tier."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from kvladder.cli.output import Result
from kvladder.config.settings import GpuConfig
from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError, PlanError
from kvladder.gpu.sizing.divide import blocks_of
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.layout import Layout
from kvladder.planning.models import ModelResources, kept_by
from kvladder.units import Size, counted

STEP: Final = 8192
"""Tokens of a prompt that engines compute at a time by default."""
FLAGS: Final = {"block_tokens": "--block-tokens", "checkpoint_tokens": "--checkpoint-tokens"}
"""Flag that sets each number of the plan."""
_HINT: Final = "use kvladder.gpu.sizing.plan.CachePlan to size layers that you list"


def size(
    *,
    model: Path,
    memory: str,
    context: int,
    step: int = STEP,
    dtype: str | None = None,
    state_dtype: str | None = None,
    block_tokens: int = 16,
    checkpoint_tokens: int = 0,
    stack: Path | None = None,
) -> Result:
    """Print how many blocks and sequences of a model fit into a memory.

    Also prints the bytes of a token, the pools that the layers need, and what each tier holds.
    Exits with 2 if an argument or a file is wrong, or if not even one sequence fits.

    Parameters
    ----------
    model:
        read this model's config.json, or the one in this folder
    memory:
        use this much device memory for the cache, for example 40GiB
    context:
        assume N tokens per sequence
    step:
        compute N tokens at a time, as with chunked prefill (default %(default)s)
    dtype:
        use this data type for the KV cache, such as fp8 (default: the model's)
    state_dtype:
        use this data type for recurrent states (default: config.json's, else the model's)
    block_tokens:
        use N tokens per block (default %(default)s)
    checkpoint_tokens:
        keep a state of a hybrid model every N tokens (default %(default)s: keep none)
    stack:
        size the tiers of this YAML file too, and apply its gpu.dtype, windows, shares and reuse
    """
    room = _room(memory)
    step = min(_tokens("--step", step), _tokens("--context", context))
    found = kept_by(model, dtype=dtype, state_dtype=state_dtype, hint=_HINT)
    plan = CachePlan(
        found.resources,
        block_tokens=block_tokens,
        max_tokens=context,
        step=step,
        checkpoint_tokens=checkpoint_tokens,
    )
    config = None if stack is None else load_config(stack)
    gpu = GpuConfig() if config is None else config.gpu
    explained = nullcontext if config is None else config.source.explained
    with explained():
        one = _fit(plan, gpu, room, context)
    fit = plan.sequences if plan.division is None else plan.division.sequences
    sequences = min(plan.sequences, fit)
    sizes = {"memory_bytes": int(room), "sequence_tokens": context, "sequence_bytes": one}
    data = {**_data(found, plan), **sizes, "sequences": sequences}
    whole = Size(one).about()
    lines = [
        f"{found.model.file}: {counted(found.layers, 'layer')}, {found.model.dtype}, {found.how}",
        *_kept(plan),
        f"a sequence of {counted(context, 'token')}, computed {step} at a time, takes {whole}",
        "",
        f"{room.brief()}: {counted(sequences, 'sequence')}",
        *_divided(plan),
    ]
    if config is not None and config.arena_bytes:
        data["tiers"], told = _tiers(config, plan, context)
        lines += ["", *told]
    return Result("\n".join(lines), data)


def _fit(plan: CachePlan, gpu: GpuConfig, room: Size, context: int) -> int:
    """Size a plan for ``room``; return the bytes that a sequence of ``context`` tokens takes."""
    _checked(plan.adapt(dtype=gpu.dtype, windows=gpu.windows)).group()
    one = plan.pooled_bytes + plan.alone_bytes
    if room < one:
        hint = f"one sequence takes {Size(one).about()}"
        raise PlanError(
            f"{room.brief()} holds no sequence of {counted(context, 'token')}",
            path="--memory",
            hint=hint,
        )
    plan.size(room, shares=gpu.shares)
    return one


def _room(memory: str) -> Size:
    try:
        return Size.parse(memory)
    except ValueError as error:
        raise ConfigError(f"{memory!r}", path="--memory", hint=str(error)) from error


def _tokens(flag: str, count: int) -> int:
    if count < 1:
        raise ConfigError(str(count), path=flag, hint="expected 1 token or more")
    return count


def _checked(plan: CachePlan) -> CachePlan:
    try:
        return plan.check()
    except PlanError as error:
        flag = FLAGS.get(error.path, error.path)
        raise ConfigError(error.message, path=flag, hint=error.hint) from error


def _size(count: int) -> str:
    return Size(count).brief()


def _token_bytes(plan: CachePlan) -> int:
    return sum(one.token_bytes for one in plan.resources if isinstance(one, Layer))


def _data(found: ModelResources, plan: CachePlan) -> dict[str, Any]:
    """Return the model, the bytes of a token, and the pools, as plain data."""
    pools = [
        {
            "name": share.group.name,
            "kind": share.group.kind,
            "blocks": share.blocks,
            "block_tokens": share.group.block_tokens,
            "block_bytes": share.block_bytes,
            "sequence_blocks": share.needed,
        }
        for share in (() if plan.division is None else plan.division.shares)
    ]
    return {
        "model": str(found.model.file),
        "dtype": found.model.dtype,
        "layers": found.layers,
        "token_bytes": _token_bytes(plan),
        "pools": pools,
    }


def _kept(plan: CachePlan) -> list[str]:
    """Return lines about the bytes that a token and a sequence take in all layers together."""
    layers = sum(isinstance(one, Layer) for one in plan.resources)
    lines = [f"a token takes {_size(_token_bytes(plan))} of KV in {counted(layers, 'layer')}"]
    if plan.states:
        state = sum(one.bytes for one in plan.states)
        count = len({one.name.partition(".")[0] for one in plan.states})
        lines.append(f"a sequence takes {_size(state)} of state in {counted(count, 'layer')}")
    return lines


def _divided(plan: CachePlan) -> list[str]:
    """Return lines about the share of each pool, and about what a sequence keeps outside pools."""
    lines = [] if plan.division is None else [str(plan.division)]
    return lines + [
        f"  {each.name}: {_size(each.bytes)} per sequence, outside the pools: {each.why}"
        for each in plan.alone
    ]


def _tiers(
    config: StackConfig, plan: CachePlan, context: int
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return the numbers of blocks and whole prefixes that each level holds, and lines about them.

    Without reuse there are no numbers, and one line says why tiers hold nothing.
    """
    why = plan.no_reuse if config.gpu.reuse else "gpu.reuse is false"
    if why:
        return {}, [f"reuse off: {why}; the tiers hold nothing that later requests can use"]
    layout = Layout(plan.block_tokens, max(pool.block_bytes for pool in plan.pools))
    config.check(layout)
    prefix = 0
    for pool in plan.pools:
        group = pool.group
        prefix += blocks_of(context, group.block_tokens) - group.first(context)
    rooms = {config.host.name: config.arena_slots(layout)}
    rooms.update({level.name: level.capacity_blocks(layout) for level in config.levels})
    lines = [
        f"{name}: {counted(blocks, 'block')},"
        f" {counted(blocks // prefix, 'prefix', 'prefixes')} of {counted(context, 'token')}"
        for name, blocks in rooms.items()
    ]
    data = {
        name: {"blocks": blocks, "prefixes": blocks // prefix} for name, blocks in rooms.items()
    }
    return data, lines
