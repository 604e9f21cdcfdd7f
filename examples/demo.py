"""A real vLLM on CPU whose KV cache outlives the GPU, the process and a flipped bit.

``make demo`` runs this. It makes a tiny random model, lets vLLM answer a prompt without kvladder,
and then with it: computed, from host memory, and in a new process from files. The controls show
that nothing is served which should not be: another salt, other weights under the same path, a
flipped byte. Each engine is a process of its own (``demo.py --engine SPEC``). Ends with 1 if one
claim does not hold.
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
from pathlib import Path
from typing import Any

BLOCK = 32
PROMPT = random.Random(7).choices(range(3, 1000), k=3000)
ANSWER_TOKENS = 24
LEVELS = ("host", "files")
STACK = """\
arena: {{size: 128 MiB}}
tiers:
  - {{name: host,  type: host}}
  - {{name: files, type: files, path: {path}, capacity: 1 GiB, when: commit}}
"""

# ---- in an engine's process


def make_model(directory: Path, seed: int) -> None:
    """Save a Llama whose answers depend on all that it has read; other seeds are other weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.3,  # more than a trained model's: else it repeats a few tokens
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)


class Engine:
    """One vLLM."""

    def __init__(self, model: str, stack: str | None) -> None:
        from vllm import LLM

        transfer: dict[str, Any] = {}
        if stack is not None:
            transfer["kv_transfer_config"] = {
                "kv_connector": "KVLadderConnector",
                "kv_connector_module_path": "kvladder.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"config": stack},
            }
        self._llm: Any = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=4096,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            disable_log_stats=False,
            **transfer,
        )
        self._core: Any = self._llm.llm_engine.engine_core
        self._half: Any = None
        if stack is not None:  # the scheduler's half of the connector, which owns the cache
            self._half = self._core.engine_core.scheduler.connector.scheduler
        self._ask([5] * 40)  # the first request of a process pays for much that is not its own

    def _ask(self, prompt: list[int], salt: str | None = None) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
        )
        request = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        return self._llm.generate([request], sampling, use_tqdm=False)[0]

    def _external_hits(self) -> int:
        name = "vllm:external_prefix_cache_hits"
        return sum(m.value for m in self._llm.get_metrics() if m.name == name)

    def _stats(self) -> dict[str, dict[str, float]]:
        if self._half is None:
            return {}
        self._half.settle()
        while not self._half.connector.manager.idle():
            time.sleep(0.01)
        found: dict[str, dict[str, float]] = self._half.stats()
        return found

    def ask(self, salt: str | None = None) -> dict[str, Any]:
        """Answer the prompt: tokens, times, what vLLM counts, and what moved meanwhile."""
        hits, before = self._external_hits(), self._stats()
        output = self._ask(PROMPT, salt)
        after = self._stats()
        return {
            "tokens": list(output.outputs[0].token_ids),
            "first_token_s": output.metrics.first_token_latency,
            "cached": output.num_cached_tokens,
            "external": self._external_hits() - hits,
            "moved": {
                part: {
                    name: value - before.get(part, {}).get(name, 0)
                    for name, value in counts.items()
                }
                for part, counts in after.items()
            },
        }

    def reset(self) -> dict[str, Any]:
        """Drop vLLM's own prefix cache."""
        return {"reset": bool(self._llm.reset_prefix_cache())}

    def stop(self) -> dict[str, Any]:
        """End in an orderly way."""
        self._core.shutdown()
        return {}


def run_engine(spec: dict[str, Any]) -> None:
    """Do the steps of ``spec``; a line of JSON into its results for each."""
    with Path(spec["results"]).open("a") as results:
        if "make" in spec:
            make_model(Path(spec["make"]), spec["seed"])
            print("{}", file=results, flush=True)
            return
        engine = Engine(spec["model"], spec["stack"])
        for name, *arguments in spec["steps"]:
            print(json.dumps(getattr(engine, name)(*arguments)), file=results, flush=True)


# ---- in the demo's own process


class Demo:
    """The story, one engine after the other."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._begun = time.monotonic()
        self._runs = 0
        self._failed = 0
        self.model = work / "model"
        self.kv = work / "kv"
        self.stack = work / "stack.yaml"
        self.stack.write_text(STACK.format(path=self.kv))

    def say(self, text: str) -> None:
        """A line with the time."""
        print(f"[{time.monotonic() - self._begun:5.0f} s] {text}", flush=True)

    def claim(self, text: str, holds: bool) -> None:
        """A line that says whether something holds."""
        self._failed += not holds
        print(f"  {text + ':':<66} {'yes' if holds else 'NO'}", flush=True)

    def run(self, what: str, **spec: Any) -> list[dict[str, Any]]:
        """Run an engine's steps in a process of its own, showing that it goes on."""
        self._runs += 1
        self.say(what)
        folder = self._work / f"run{self._runs}"
        folder.mkdir()
        spec["results"] = str(folder / "results")
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, __file__, "--engine", json.dumps(spec)]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                for _ in self._waiting(process):
                    pass
            finally:
                process.kill()
        if process.returncode:
            print((folder / "log").read_text()[-5000:], file=sys.stderr)
            raise SystemExit(f"the engine ended with {process.returncode}: its log is above")
        return [json.loads(line) for line in Path(spec["results"]).read_text().splitlines()]

    def _waiting(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Until the process has ended, at most ten minutes; a dot now and then on a terminal."""
        dots = sys.stdout.isatty()
        for second in range(600):
            try:
                process.wait(1.0)
                break
            except subprocess.TimeoutExpired:
                if dots and second % 3 == 2:
                    print(".", end="", flush=True)
                yield
        if dots:
            print("\r", end="")

    def tell(self) -> int:
        """Everything; how many claims do not hold."""
        self.run("making a tiny random model", make=str(self.model), seed=1)
        other = self._work / "other"
        self.run("making another one, of the same shape", make=str(other), seed=2)
        model, stack = str(self.model), str(self.stack)
        (plain,) = self.run("vLLM without kvladder", model=model, stack=None, steps=[["ask"]])
        print("\nstack.yaml:\n" + self.stack.read_text())
        cold, reset, host, _ = self.run(
            "vLLM with kvladder: the prompt, vLLM's own cache reset, the prompt again",
            model=model,
            stack=stack,
            steps=[["ask"], ["reset"], ["ask"], ["stop"]],
        )
        files, salted, _ = self.run(
            "a new process: the prompt, then the same under another salt",
            model=model,
            stack=stack,
            steps=[["ask"], ["ask", "another"], ["stop"]],
        )
        rows = {
            "without kvladder": plain,
            "computed, and saved": cold,
            "again, from host": host,
            "new process, from files": files,
        }
        self._table(rows)
        expected = (len(PROMPT) - 1) // BLOCK * BLOCK
        self.claim("output identical to no connector", self._same(plain, cold, host, files))
        self.claim("vLLM's own prefix cache was reset", reset["reset"])
        self.claim(
            f"vLLM counts {expected} tokens from the connector, twice",
            [host["external"], files["external"]] == [expected] * 2,
        )
        print("\ncontrols")
        self.claim("another salt: 0 hits", salted["external"] == 0 and self._same(plain, salted))
        path, offset = self._stored_payload()
        self._other_weights(other)
        self._flipped(plain, path, offset)
        print()
        self.say(f"{self._failed} claims do not hold" if self._failed else "every claim holds")
        return self._failed

    @staticmethod
    def _same(one: dict[str, Any], *others: dict[str, Any]) -> bool:
        return all(other["tokens"] == one["tokens"] for other in others)

    def _other_weights(self, other: Path) -> None:
        aside = self._work / "aside"
        self.model.rename(aside)
        shutil.copytree(other, self.model)
        (changed,) = self.run(
            "other weights under the same path",
            model=str(self.model),
            stack=str(self.stack),
            steps=[["ask"]],
        )
        shutil.rmtree(self.model)
        aside.rename(self.model)
        self.claim("other weights under the same path: 0 hits", changed["external"] == 0)

    def _flipped(self, plain: dict[str, Any], path: Path, offset: int) -> None:
        with path.open("r+b") as stream:
            stream.seek(offset + 1000)
            byte = stream.read(1)[0]
            stream.seek(offset + 1000)
            stream.write(bytes([byte ^ 1]))
        (damaged,) = self.run(
            f"one byte flipped in {path.name}",
            model=str(self.model),
            stack=str(self.stack),
            steps=[["ask"]],
        )
        corrupt = damaged["moved"]["files"]["corrupt"]
        self.claim(f"one flipped byte: detected (corrupt blocks: {corrupt:.0f})", corrupt == 1)
        self.claim(
            f"what follows it is recomputed ({damaged['external']} tokens still came from files)",
            0 < damaged["external"] < (len(PROMPT) - 1) // BLOCK * BLOCK,
        )
        self.claim("output identical", self._same(plain, damaged))

    def _stored_payload(self) -> tuple[Path, int]:
        """File and offset of a block in the middle of what the prompt left behind."""
        page, magic = 4096, b"kvblock\0"
        found: list[tuple[Path, int]] = []
        for path in sorted(self.kv.rglob("seg-*")):
            data = path.read_bytes()
            found += [
                (path, offset + page)
                for offset in range(0, len(data), page)
                if data[offset : offset + len(magic)] == magic
            ]
        return found[len(found) // 3]

    @staticmethod
    def _table(rows: dict[str, dict[str, Any]]) -> None:
        print(f"\na prompt of {len(PROMPT)} tokens, {ANSWER_TOKENS} more generated")
        print(f"{'':<26}{'first token':>12}  {'tokens served from':<22}bytes moved")
        for name, row in rows.items():
            moved = row["moved"]
            served = [
                f"{level} {moved[level]['hits'] * BLOCK:.0f}"
                for level in LEVELS
                if moved and moved[level]["hits"]
            ]
            print(
                f"{name:<26}{row['first_token_s'] * 1e3:>9.0f} ms"
                f"  {', '.join(served) or '-':<22}{'; '.join(_flows(moved)) or '-'}"
            )
        print()


def _flows(moved: dict[str, dict[str, float]]) -> list[str]:
    """What moved between vLLM's KV cache, host slots and files, and how fast."""
    flows = (
        ("KV cache > host", "copies", "offload_bytes", "offload_s"),
        ("host > files", "files", "stored_bytes", "stored_s"),
        ("files > host", "files", "loaded_bytes", "loaded_s"),
        ("host > KV cache", "copies", "onboard_bytes", "onboard_s"),
    )
    found: list[str] = []
    for name, part, size, seconds in flows:
        counts = moved.get(part, {})
        if counts.get(size):
            rate = counts[size] / counts[seconds] / 1e9
            found.append(f"{name} {counts[size] / 2**20:.1f} MiB at {rate:.2f} GB/s")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", metavar="SPEC", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine is not None:
        run_engine(json.loads(given.engine))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvladder-demo-") as work:
        return 1 if Demo(Path(work)).tell() else 0


if __name__ == "__main__":
    sys.exit(main())
