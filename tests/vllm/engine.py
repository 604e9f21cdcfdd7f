"""Runs one vLLM engine through a list of steps; each test process starts some of these.

``python engine.py SPEC RESULTS``: SPEC is JSON with ``model``, ``extra`` (the connector's settings
or null), ``transfer`` (another connector and its settings), ``engine`` (more arguments of vLLM's
LLM), ``pictures`` (whether the model looks at some) and ``steps``. A line of JSON is appended to
RESULTS for each step that is over.
"""

import json
import os
import shutil
import sys
import time
import uuid
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from kvladder.arena import Slot
from tests.kit.processes import family
from tests.patience import PATIENCE_S
from tests.vllm.harness import OURS, connector
from tests.vllm.life import register
from tests.vllm.pictures import without_torchvision

register()  # in the processes of ranks, too: they read this file again


class Engine:
    """The steps, by name."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        transfer: dict[str, Any] = {}
        if spec["extra"] is not None:
            transfer["kv_transfer_config"] = connector(spec["extra"])
        if spec.get("transfer"):
            transfer["kv_transfer_config"] = spec["transfer"]
        arguments = {
            "model": spec["model"],
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 4096,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        if spec.get("events"):
            arguments["kv_events_config"] = self._listen()
        self.llm: Any = LLM(**arguments | spec.get("engine", {}) | transfer)
        if spec.get("events"):
            self.subscriber.poll(200)  # so that it takes the connection, and sends its request

    @property
    def half(self) -> Any:
        """The connector's scheduler half, where it is in this process."""
        whole = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        parts = getattr(whole, "sub_connectors", [whole])
        return next(one.scheduler.running for one in parts if type(one).__name__ == OURS)

    def external_hits(self) -> int:
        """Return the tokens that came from the connector, as vLLM itself counts them."""
        return self.count("vllm:external_prefix_cache_hits")

    def count(self, name: str) -> int:
        """One of vLLM's counters."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)

    def generate(
        self,
        prompts: list[list[int]],
        *,
        tokens: int = 16,
        salt: str | None = None,
        recompute: bool = False,
        adapter: tuple[int, str] | None = None,
        report: bool = False,
        session: str | None = None,
    ) -> dict[str, Any]:
        """All prompts at once; ``adapter`` is the number and path of a LoRA adapter.

        With ``report``, the requests ask for reports in their answers.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        before = self.external_hits()
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        sampling.skip_reading_prefix_cache = recompute
        if report or session is not None:
            wishes = {"report": True} if session is None else {"session": session}
            sampling.extra_args = {"kv_transfer_params": {"kvladder": wishes}}
        given = [
            {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
            for prompt in prompts
        ]
        with_lora = adapter and LoRARequest(Path(adapter[1]).name, *adapter)
        outputs = self.llm.generate(given, sampling, use_tqdm=False, lora_request=with_lora)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "external": self.external_hits() - before,
            "reports": [output.kv_transfer_params for output in outputs],
        }

    def each(self, prompts: list[list[int]], **options: Any) -> dict[str, Any]:
        """One prompt after the other."""
        found = [self.generate([prompt], **options) for prompt in prompts]
        return {
            "tokens": [one["tokens"][0] for one in found],
            "cached": [one["cached"][0] for one in found],
            "external": sum(one["external"] for one in found),
            "reports": [one["reports"][0] for one in found],
        }

    def reset(self, *, connector: bool = False) -> bool:
        """Drop vLLM's own prefix cache."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def reload(self, weights: str) -> None:
        """Load the weights of another checkpoint into the running model without notice."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})

    def adapters(
        self,
        *,
        unload: int | None = None,
        replace: tuple[str, str] | None = None,
        load: tuple[int, str] | None = None,
    ) -> None:
        """Unload and load LoRA adapters as a server does.

        ``replace`` is a folder and the source of its new files, replaced in between.
        """
        from vllm.lora.request import LoRARequest

        if unload is not None:
            assert self.llm.llm_engine.remove_lora(unload)
        if replace is not None:
            shutil.rmtree(replace[0], ignore_errors=True)
            shutil.copytree(replace[1], replace[0])
        if load is not None:
            assert self.llm.llm_engine.add_lora(LoRARequest(Path(load[1]).name, *load))

    def point(self, *, link: str, target: str) -> None:
        """Have a path lead to other files, as a new download does."""
        Path(link).unlink()
        Path(link).symlink_to(target)

    def nap(self) -> None:
        """Begin or end vLLM's sleep, as far as a CPU has it."""
        core = self.llm.llm_engine.engine_core.engine_core
        core.pause_scheduler(mode="abort")
        core.resume_scheduler()

    def stats(self, *, wait_s: float = PATIENCE_S) -> Any:
        """The connector's statistics, its invariants checked, once the tiers are idle or hang."""
        end, manager = time.monotonic() + wait_s, self.half.connector.manager
        while time.monotonic() < end:
            self.half.settle()
            if not self.half.busy and manager.idle() and not manager._stack.loader.arrivals:
                break
            time.sleep(0.02)
        manager.check()
        assert not self.half.serving, "a request is over, and the connector does not know"
        return self.half.stats()

    def damage(self) -> int:
        """Change the signs of numbers in all host slots, where bytes are not checked.

        Their exponents stay, so that no number becomes infinite: vLLM's attention on a CPU
        multiplies masked numbers by 0, and infinity times 0 would spoil later requests.
        """
        manager = self.half.connector.manager
        count = 0
        index = manager._stack.host.index
        for key in list(index):
            slot = index.place(key)
            view = manager.arena.view(Slot(slot))
            view[1::2] = bytes(byte ^ 0x80 for byte in view[1::2])
            count += 1
        return count

    def _listen(self) -> Any:
        """Listen to KV events; how vLLM is to publish them."""
        import zmq

        context = zmq.Context()
        self.subscriber = context.socket(zmq.SUB)
        port = self.subscriber.bind_to_random_port("tcp://127.0.0.1")
        self.subscriber.subscribe("kv")
        self.asking = context.socket(zmq.DEALER)
        replay = f"ipc:///tmp/kvladder-{uuid.uuid4()}"
        self.asking.connect(replay)
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{port}",
            "replay_endpoint": replay,
            "topic": "kv",
        }

    def events(self) -> Any:
        """The batches that were heard, and those that are sent again, by their numbers."""
        heard: dict[int, Any] = {}
        again: dict[int, Any] = {}
        while self.subscriber.poll(500):
            _topic, number, payload = self.subscriber.recv_multipart()
            heard[int.from_bytes(number)] = msgspec.msgpack.decode(payload)
        self.asking.send_multipart([b"", (0).to_bytes(8)])
        while True:
            assert self.asking.poll(int(1000 * PATIENCE_S))
            _empty, _topic, number, payload = self.asking.recv_multipart()
            if number == (-1).to_bytes(8, signed=True):
                return {"heard": heard, "again": again}
            again[int.from_bytes(number)] = msgspec.msgpack.decode(payload)

    def levels(self) -> Any:
        """The numbers of vLLM's events for the blocks that each level holds."""
        ladder = self.half.connector.manager.ladder
        with ladder.lock:
            return {
                name: sorted(int.from_bytes(key[-8:]) for key in index)
                for name, index in ladder.indexes.items()
            }

    def scrape(self) -> str:
        """Return vLLM's metrics for Prometheus."""
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY).decode()

    def preemptions(self) -> int:
        """Return how many requests vLLM has preempted."""
        return self.count("vllm:num_preemptions")

    def drafts(self) -> list[int]:
        """Return how many tokens were drafted, and how many of them were right."""
        names = ("num_draft_tokens", "num_accepted_tokens")
        return [self.count(f"vllm:spec_decode_{name}") for name in names]

    def pids(self) -> list[int]:
        """This process and those below it."""
        return family(os.getpid())

    def call(self, *, function: str, **options: Any) -> Any:
        """A function ``module:name`` of the tests, with this engine."""
        module, _, name = function.partition(":")
        return getattr(import_module(module), name)(self, **options)

    def shutdown(self) -> None:
        """End the engine in an orderly way."""
        self.llm.llm_engine.engine_core.shutdown()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec.get("pictures"):
        without_torchvision()
    engine = Engine(spec)
    with Path(sys.argv[2]).open("a") as results:
        for name, *arguments in spec["steps"]:
            options = arguments[0] if arguments else {}
            print(json.dumps(getattr(engine, name)(**options)), file=results, flush=True)
    print("engine: all steps are over", flush=True)


if __name__ == "__main__":
    main()
