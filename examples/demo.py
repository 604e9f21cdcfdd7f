"""A real vLLM, its KV cache kept by kvladder: times, bytes, hits, and the controls.

``python examples/demo.py`` (or ``make demo``) needs no GPU and no network. It makes a small random
model, serves one long prompt with vLLM on CPU, and shows where the prompt's KV cache comes from:
computed, from host memory, from files. Every engine is a process of its own. The exit code is 0
only if every claim in the table holds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
PROMPT_TOKENS = 3000
PROMPT = random.Random(7).choices(range(3, 1000), k=PROMPT_TOKENS)
CACHEABLE = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
"""One token is always computed, and a block is cached when it is full."""
ENGINE_S_MAX = 1800
Answer = dict[str, Any]


# ---- in processes of their own


def make_model(directory: Path, seed: int) -> None:
    """Save a Llama of 30 million random parameters; other seeds are other weights.

    They are larger than a trained model's, so that what it says depends on all that it read; and
    of 32 bits, since CPUs with AMX round 16 bits otherwise where fewer tokens are computed at once.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


class Engine:
    """vLLM in this process, with or without kvladder."""

    def __init__(self, model: str, extra: dict[str, Any] | None) -> None:
        from vllm import LLM

        connector: dict[str, Any] = {}
        if extra is not None:
            connector["kv_transfer_config"] = {
                "kv_connector": "KVLadderConnector",
                "kv_connector_module_path": "kvladder.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        self.llm: Any = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=3584,
            dtype="float32",
            kv_cache_memory_bytes=128 << 20,
            disable_log_stats=False,
            **connector,
        )
        self.generate([1, 2, 3])  # the first request of a process pays for much else

    @property
    def half(self) -> Any:
        """The connector's scheduler half."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.running

    def generate(self, prompt: list[int]) -> Any:
        """Return vLLM's answer to a prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        return self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]

    def external_hits(self) -> int:
        """Tokens that came from the connector, as vLLM counts them."""
        name = "vllm:external_prefix_cache_hits"
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def serve(self, *, connector: bool = True) -> Answer:
        """Serve the prompt: what was said, how fast, and what the tiers did for it."""
        before, hits = self.stats() if connector else {}, self.external_hits()
        output = self.generate(PROMPT)
        return {
            "tokens": list(output.outputs[0].token_ids),
            "ttft_s": output.metrics.first_token_latency,
            "external": self.external_hits() - hits,
            "before": before,
            "after": self.settled() if connector else {},
        }

    def stats(self) -> Answer:
        """The connector's counters."""
        self.half.settle()
        found: Answer = self.half.stats()
        return found

    def settled(self) -> Answer:
        """The counters once everything has been copied and written."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            self.half.settle()
            if not self.half.busy and self.half.connector.manager.idle():
                break
            time.sleep(0.02)
        return self.stats()

    def reset(self) -> bool:
        """Drop vLLM's own prefix cache; kvladder keeps its blocks."""
        return bool(self.llm.reset_prefix_cache())

    def damage(self) -> int:
        """Invert a bit in every other byte that is held in host memory, which is not checked."""
        arena = self.half.connector.manager.arena
        for slot in range(arena.slots):
            view = arena.view(slot)
            if any(view[:64]):
                view[::2] = bytes(byte ^ 0x40 for byte in view[::2])
        return int(arena.slots)


def work(spec: Path) -> None:
    """Run an engine through its steps; each answer is a line of JSON."""
    wanted = json.loads(spec.read_text())
    engine = Engine(wanted["model"], wanted["extra"])
    answers = [getattr(engine, name)(**options) for name, options in wanted["steps"]]
    spec.with_suffix(".answers").write_text(json.dumps(answers))
    engine.llm.llm_engine.engine_core.shutdown()


# ---- here


class Demo:
    """The runs, one after the other, and what they must show."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun = time.monotonic()
        self.rows: list[list[str]] = []
        self.claims: list[tuple[str, bool]] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begun:5.0f} s  {text}", flush=True)

    def run(self, what: str, *arguments: str) -> None:
        """Run this script as a worker, with a sign of life every five seconds."""
        self.say(what)
        log = self.folder / "log"
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, __file__, *arguments]
        with log.open("w") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            for _ in range(ENGINE_S_MAX // 5):
                try:
                    code = process.wait(5)
                    break
                except subprocess.TimeoutExpired:
                    self.say("  ...")
            else:
                raise SystemExit(f"the run did not end in {ENGINE_S_MAX} s:\n{log.read_text()}")
        finally:
            process.kill()
            process.wait()
        if code != 0:
            raise SystemExit(f"the run failed:\n{log.read_text()}")

    def model(self, seed: int) -> Path:
        """A model with the weights of this seed, always at the same path."""
        path = self.folder / "model"
        shutil.rmtree(path, ignore_errors=True)
        self.run(f"making a small random model, seed {seed}", "--model", str(path), str(seed))
        return path

    def engine(
        self, what: str, extra: dict[str, Any] | None, *steps: str, **options: bool
    ) -> list[Answer]:
        """Start vLLM, have it do these steps, end it."""
        spec = self.folder / "spec.json"
        listed = [[step, options if step == "serve" else {}] for step in steps]
        model = str(self.folder / "model")
        spec.write_text(json.dumps({"model": model, "extra": extra, "steps": listed}))
        self.run(what, "--engine", str(spec))
        answers: list[Answer] = json.loads(spec.with_suffix(".answers").read_text())
        return answers

    def claim(self, text: str, holds: bool) -> bool:
        self.claims.append((text, holds))
        return holds

    def row(
        self, name: str, answer: Answer, said: list[int] | None, *, differ: bool = False
    ) -> None:
        """Add a line to the table; ``said`` is what the output must be, or must not."""
        ways = [
            ("copies", "offload"),
            ("copies", "onboard"),
            ("files", "stored"),
            ("files", "loaded"),
        ]
        cells = [
            name,
            f"{answer['ttft_s'] * 1000:.0f} ms",
            *(f"{hits(answer, tier) * BLOCK_TOKENS}" for tier in ("host", "files")),
            *(rate(answer, tier, way) for tier, way in ways),
        ]
        identical = answer["tokens"] == said
        if said is not None:
            wanted = "differs from the one without a connector" if differ else "identical"
            self.claim(f"{name}: output {wanted}", identical is not differ)
        cells.append("" if said is None else "yes" if identical else "no")
        self.rows.append(cells)

    def table(self) -> str:
        """Return the measurements as a table."""
        head = [
            "run", "TTFT", "host", "files", "GPU to host", "host to GPU", "to files", "from files",
            "same output as without connector",
        ]  # fmt: skip
        lines = [head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def delta(answer: Answer, tier: str, counter: str) -> float:
    """Return how much a counter grew during a request."""
    grown: float = answer["after"].get(tier, {}).get(counter, 0) - answer["before"].get(
        tier, {}
    ).get(counter, 0)
    return grown


def hits(answer: Answer, tier: str) -> int:
    """Blocks that a tier served."""
    return int(delta(answer, tier, "hits"))


def rate(answer: Answer, tier: str, way: str) -> str:
    """Bytes that went one way, and how fast."""
    size = delta(answer, tier, f"{way}_bytes")
    seconds = delta(answer, tier, f"{way}_s")
    if not size:
        return "-"
    return f"{size / 1e6:.0f} MB, {size / 1e9 / max(seconds, 1e-9):.1f} GB/s"


def flip_a_byte(directory: Path) -> None:
    """Invert a bit in the middle of one of the stored blocks."""
    headers = [
        (path, at)
        for path in sorted(directory.rglob("seg-*"))
        for content in [path.read_bytes()]
        for at in range(0, len(content), 4096)
        if content.startswith(b"kvlabel\0", at)
    ]
    path, at = headers[len(headers) // 2]
    with path.open("r+b") as stream:
        stream.seek(at + 4096 + 200_000)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def show(demo: Demo) -> None:
    """Every run of the table, then the controls."""
    kv = demo.folder / "kv"
    extra = {"host": "256 MiB", "files": str(kv), "capacity": "256 MiB"}
    demo.model(1)
    (plain,) = demo.engine("vLLM without a connector", None, "serve", connector=False)
    said = plain["tokens"]
    demo.row("without connector", plain, None)
    cold, _, warm, _, _, damaged = demo.engine(
        "vLLM with kvladder, host memory and files: a cold prompt, then the same again",
        extra, "serve", "reset", "serve", "reset", "damage", "serve",
    )  # fmt: skip
    demo.row("cold prompt", cold, said)
    demo.row("vLLM prefix cache reset", warm, said)
    demo.claim("cold prompt: nothing from kvladder", cold["external"] == 0)
    demo.claim("after the reset: served from host", hits(warm, "host") * BLOCK_TOKENS == CACHEABLE)
    (anew,) = demo.engine("a new vLLM process", extra, "serve")
    demo.row("new process", anew, said)
    demo.claim("new process: served from files", hits(anew, "files") * BLOCK_TOKENS == CACHEABLE)
    for name, answer in (("after the reset", warm), ("new process", anew)):
        demo.claim(
            f"{name}: vLLM counts {CACHEABLE} external hits", answer["external"] == CACHEABLE
        )
    demo.row("control: damaged in host", damaged, said, differ=True)
    controls(demo, kv, extra, said)


def controls(demo: Demo, kv: Path, extra: dict[str, Any], said: list[int]) -> None:
    """Show that blocks are not served which must not be."""
    flip_a_byte(kv)
    (answer,) = demo.engine("control: one byte on disk is flipped", extra, "serve")
    demo.row("control: flipped byte", answer, said)
    found = int(delta(answer, "files", "corrupt"))
    demo.claim(f"flipped byte: detected and recomputed (files.corrupt = {found})", found == 1)
    salted = extra | {"block": {"salt": "another deployment"}}
    (answer,) = demo.engine("control: another salt", salted, "serve")
    demo.row("control: another salt", answer, said)
    demo.claim("another salt: 0 hits", answer["external"] == 0)
    demo.model(2)
    (answer,) = demo.engine("control: other weights under the same path", extra, "serve")
    demo.row("control: other weights", answer, None)
    demo.claim("other weights: 0 hits", answer["external"] == 0)
    demo.claim("other weights: different output", answer["tokens"] != said)


@contextmanager
def folder() -> Iterator[Path]:
    """A directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvladder-demo-") as name:
        yield Path(name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", nargs=2, metavar=("DIRECTORY", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        make_model(Path(arguments.model[0]), int(arguments.model[1]))
        return 0
    if arguments.engine:
        work(arguments.engine)
        return 0
    with folder() as place:
        demo = Demo(place)
        show(demo)
        print(f"\n{PROMPT_TOKENS} prompt tokens; {CACHEABLE} of them can come from a cache\n")
        print(demo.table(), end="\n\n")
        for text, holds in demo.claims:
            print(f"{'ok  ' if holds else 'FAIL'}  {text}")
        return 0 if all(holds for _, holds in demo.claims) else 1


if __name__ == "__main__":
    sys.exit(main())
