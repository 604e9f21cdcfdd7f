"""Parts of ``make gpu`` with vLLM: its engines, its allocator that sleeps, and its attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.bench_vllm_engine import Engine, Prompts, kvladder_with, make_model, prompts_of
from benchmarks.gpu_model import BLOCK
from benchmarks.gpu_parts import BLOCKS, CUDA, LONG_CYCLES, copying, seconds_of
from benchmarks.row import Row
from kvladder.arena import Slot
from kvladder.gpu.copy.copier import CopyJob, JobId

TOKENS = 3500
"""Length of a prompt; the model takes 4,096 tokens."""
DRY_TOKENS = 200
PROMPTS = 5
KINDS = ("gemma3", "qwen3_next", "gpt_oss")
"""Models with windows, with recurrent states and experts, and with windows and experts."""
KIND_TOKENS = 1500
LARGE = "llama_100m"
GENERATED = 8
SETTLE_S = 1.0
HOST_BYTES = 2 << 30
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
"""CUDA graphs for steps that generate, without the minutes that torch.compile takes."""
V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
ON_CPU = "vllm.v1.worker.cpu_model_runner"
SWITCH, SAMPLER = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_FLASHINFER_SAMPLER"


@dataclass(frozen=True, slots=True)
class Side:
    """An engine to measure."""

    name: str
    runner: str
    """Module of the class that vLLM must have chosen as model runner; "" if any will do."""
    transfer: dict[str, Any]
    kind: str
    """Its model, of those that ``tiny_model.py`` of the tests makes."""
    tokens: int
    """Length of a prompt."""
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def start(self, model: Path, log: Path) -> Engine:
        """Start it; its first answer comes once it is ready."""
        variables = {} if find_spec("flashinfer") else {SAMPLER: "0"}
        if self.runner != ON_CPU:
            variables[SWITCH] = "0" if self.runner == V1 else "1"
        return Engine(model, self.transfer, log, engine=self.engine, variables=variables)


def sides(*, dry: bool) -> list[Side]:
    """Return the engines in their order: vLLM's own offloading first, as the peer of the next."""
    own: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES >> (3 if dry else 0)},
    }
    stack = {"host": f"{HOST_BYTES >> (3 if dry else 0)} B", "fetch": {"when": "always"}}
    ours = kvladder_with(stack)
    if dry:
        worker = {"spec_name": "CPUSpec", "spec_module_path": "benchmarks.vllm_native"}
        own["kv_connector_extra_config"] |= worker
        return [
            Side("vLLM's own offloading", ON_CPU, own, "llama", DRY_TOKENS),
            Side("kvladder", ON_CPU, ours, "llama", DRY_TOKENS),
        ]
    engine: dict[str, Any] = {
        "dtype": "bfloat16",
        "block_size": 16,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.1,
    }
    with_graphs, eager = engine | GRAPHS, engine | {"enforce_eager": True}
    return [
        Side("vLLM's own offloading, runner V2", V2, own, LARGE, TOKENS, with_graphs),
        Side("kvladder, runner V2", V2, ours, LARGE, TOKENS, with_graphs),
        Side("kvladder, runner V1", V1, ours, LARGE, TOKENS, with_graphs),
        *(Side(f"kvladder, {kind}", "", ours, kind, KIND_TOKENS, eager) for kind in KINDS),
    ]


def engines(*, dry: bool = False) -> Iterable[Row]:
    """Measure first tokens of prompts computed and loaded; test runners and equal answers.

    All engines start together, as that takes most of the time, and are measured one by one.
    """
    failures: list[Exception] = []
    started: list[tuple[Side, Engine]] = []
    with TemporaryDirectory(prefix="kvladder-") as name:
        folder = Path(name)
        wanted = sides(dry=dry)
        models = {kind: make_model(folder / kind, kind) for kind in {one.kind for one in wanted}}
        try:
            for number, side in enumerate(wanted):
                log = folder / f"{number}.log"
                started.append((side, side.start(models[side.kind], log)))
            peer_s: float | None = None
            for side, engine in started:
                try:
                    computed_s, loaded_s = answers(side, engine)
                except Exception as error:  # noqa: BLE001 - the others still run
                    failures.append(error)
                    continue
                finally:
                    engine.kill()
                beside_s = peer_s if side.kind == wanted[0].kind else None
                yield Row(
                    name=f"first token from host, {side.name}",
                    unit="ms",
                    limit=1e3 * computed_s,
                    peer=None if beside_s is None else 1e3 * beside_s,
                    ours=1e3 * loaded_s,
                    ratio=None if beside_s is None else loaded_s / beside_s,
                    goal="" if beside_s is None else "ratio <= 1",
                    note="limit: computed; ratio and peer: vLLM's own offloading",
                )
                peer_s = loaded_s if side is wanted[0] else peer_s
        finally:
            for _, engine in started:
                engine.kill()
    if failures:
        raise ExceptionGroup("some engines failed", failures)


def answers(side: Side, engine: Engine) -> tuple[float, float]:
    """Require equal answers; return the median seconds until a first token, computed and loaded."""
    prompts, others = prompts_of(1, PROMPTS, side.tokens), prompts_of(2, 4, 64)
    assert engine.answer() == "ready"
    runner = engine.tell("runner")
    assert runner == (side.runner or runner), f"{side.name}: vLLM runs {runner}"
    print(f"  {side.name}: {runner}", flush=True)
    engine.run(others, 4)
    computed = _each(engine, prompts)
    again = _each(engine, prompts)  # from vLLM's own prefix cache: the same shapes as loaded
    engine.tell("settle", seconds=SETTLE_S)
    engine.run(others, 4)  # steps report the saves
    assert engine.tell("reset"), "vLLM keeps its prefix cache"
    before = engine.tell("hits")
    loaded = _each(engine, prompts)
    hits = engine.tell("hits") - before
    least = PROMPTS * (side.tokens // 2)
    assert hits >= least, f"{side.name}: {hits} tokens came from host, expected {least}"
    for one, other in zip(loaded, again, strict=True):
        assert one["tokens"] == other["tokens"], f"{side.name}: other tokens than without it"
    print(f"  {side.name}: equal answers, {hits} tokens came from host", flush=True)
    first = [[one["first"][0] for one in runs] for runs in (computed, loaded)]
    return median(first[0]), median(first[1])


def _each(engine: Engine, prompts: Prompts) -> list[dict[str, Any]]:
    return [engine.run([prompt], GENERATED) for prompt in prompts]


# ---- the allocator that sleeps


def sleep() -> Iterable[Row]:
    """Save, let vLLM's allocator unmap and map the KV cache, and load: the bytes are the same."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Any = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="kv_cache"):
        kv = torch.zeros(BLOCKS, 1 << 20, dtype=torch.uint8, device="cuda")
    wanted = torch.randint(0, 256, kv.shape, dtype=torch.uint8, device="cuda")
    with copying([{"kv": kv}]) as (copier, _, _parts):
        places = tuple(range(BLOCKS)), tuple(map(Slot, range(BLOCKS)))
        CUDA._sleep(LONG_CYCLES)
        kv.copy_(wanted)
        copier.submit(CopyJob(JobId(1), "offload", *places))
        copier.drain()
        allocator.sleep(offload_tags=())
        left = CUDA.mem_get_info()[0]
        allocator.wake_up()
        assert CUDA.mem_get_info()[0] < left, "the allocator gave no memory back"
        copier.moved()
        kv.fill_(0xEE)
        load = CopyJob(JobId(2), "onboard", *places)
        copier.submit(load)
        copier.fence([load.id])
        assert torch.equal(kv, wanted), "other bytes came back after a sleep"
        copier.drain()
        assert [one.error for one in copier.poll()] == ["", ""]
    return ()


# ---- attention


ATTENTION_LAYERS, ATTENTION_BATCH, HEADS, KV_HEADS, HEAD = 8, 32, 32, 8, 128
CONTEXTS = (2048, 8192)
OURS = "BLHNC"
LAYOUTS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), OURS: (1, 0, 2, 3, 4)}
"""Order in memory of layers, blocks, heads, tokens and content in vLLM's layouts."""


def attention() -> Iterable[Row]:
    """Measure vLLM's FlashAttention for one token of each sequence, in each layout."""
    for context in CONTEXTS:
        seconds: dict[str, float] = {}
        results: dict[str, torch.Tensor] = {}
        for layout, order in LAYOUTS.items():
            seconds[layout], results[layout] = _attend(context, order)
        for layout, found in results.items():
            assert torch.equal(found, results[OURS]), f"{layout} gives another result than {OURS}"
        for layout in ("LBHNC", "LBNHC"):
            yield Row(
                name=f"attention of {ATTENTION_BATCH} x {context} tokens, {OURS}",
                unit="us",
                peer=1e6 * seconds[layout],
                ours=1e6 * seconds[OURS],
                goal="ratio <= 1.02",
                note=f"{ATTENTION_LAYERS} layers; peer: {layout}, as vLLM's connectors ask for",
            )


def _attend(context: int, order: tuple[int, ...]) -> tuple[float, torch.Tensor]:
    """Return the device's seconds for all layers, and the result of the last one."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    attend: Any = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    count = context // BLOCK
    blocks = ATTENTION_BATCH * count
    made = torch.Generator("cuda").manual_seed(context)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    shape = (ATTENTION_LAYERS, blocks, KV_HEADS, BLOCK, 2 * HEAD)
    memory = torch.empty([shape[axis] for axis in order], **options)
    kv = memory.permute([order.index(axis) for axis in range(len(order))])
    for layer in kv:
        layer.copy_(torch.randn(shape[1:], generator=made, **options))
    query = torch.randn(ATTENTION_BATCH, HEADS, HEAD, generator=made, **options)
    table = torch.randperm(blocks, generator=made, device="cuda").view(ATTENTION_BATCH, count)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    out = torch.empty_like(query)
    arguments: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(ATTENTION_BATCH + 1, **int32),
        "seqused_k": torch.full((ATTENTION_BATCH,), context, **int32),
        "block_table": table.int(),
        "max_seqlen_q": 1,
        "max_seqlen_k": context,
        "causal": True,
        "out": out,
        "fa_version": get_flash_attn_version(head_size=HEAD),
    }

    def call() -> None:
        for layer in kv:
            wide = layer.transpose(1, 2)  # tokens before heads, as the kernel takes them
            attend(q=query, k=wide[..., :HEAD], v=wide[..., HEAD:], **arguments)

    return seconds_of(call), out
