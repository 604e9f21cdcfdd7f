"""A real SGLang on the CPU with kvladder below it: an engine, then a server as on its page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvladder.control.sockets import ask
from kvladder.layout import align
from kvladder.testing.engines.hinted import hint_envelope
from kvladder.tiers.files.header import HEADER_BYTES
from tests.patience import PATIENCE_S, RUN_S, until
from tests.sglang.driver import prompt
from tests.sglang.engine import OURS, PAGE, Answer, Engine, Server
from tests.sglang.soak import Soak

LONG, SHORT = 1500, 700
PAGE_BYTES = 4 * 2 * PAGE * 4 * 32 * 4
"""Four layers of keys and values, four heads of 32 float32 each."""
POOLS_BYTES = 3 * 8192 * PAGE_BYTES // PAGE
"""SGLang's, of device and host: memory that may be touched for the first time at any time."""


def whole(tokens: int) -> int:
    """Return how many tokens of a prompt may be cached: the last one is always computed."""
    return (tokens - 1) // PAGE * PAGE


def with_bucket(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add a level that other engines read, for pages of high priority."""
    folder.mkdir()
    bucket = {
        "name": "shared", "type": "object", "url": folder.as_uri(), "capacity": "64 MiB",
        "min_priority": 90,
    }  # fmt: skip
    return settings | {"tiers": [*settings["tiers"], bucket]}


HASTY = {"timeout": "2 s", "breaker": {"failures": 2, "retry": "1 s", "retry_max": "2 s"}}
"""The level's settings where it hangs."""


def stack(
    folder: Path, place: str = "kv", level: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return the engine's settings; the arena has fewer slots than SGLang reads at once."""
    return {
        "arena": {"size": "12 MiB"},
        "control": {"path": str(folder / "kv.sock")},
        "fetch": {"deadline": "4 s"},
        "tiers": [
            {"name": "host", "type": "host"},
            {
                "name": "nvme", "type": "hanging", "path": str(folder / place),
                "capacity": "256 MiB", "when": "commit", "timeout": "10 m", **(level or {}),
            },
            {
                "name": "kept", "type": "memory", "capacity": "64 MiB", "when": "commit",
                "min_priority": 50,
            },
        ],
        **more,
    }  # fmt: skip


def served(engine: Engine, first: int, tokens: int, like: Answer, **options: Any) -> None:
    """Check that a prompt's answer is as before, with all possible tokens from kvladder."""
    found = engine.again(first, tokens, **options)
    assert (found.ids, found.storage) == (like.ids, whole(tokens))


def in_the_end(engine: Engine, like: Answer) -> None:
    """Wait until all of the long prompt comes from kvladder again."""

    def comes() -> bool:
        found = engine.again(1, LONG)
        assert found.ids == like.ids
        return found.storage == whole(LONG)

    until(comes, every_s=0.5, within_s=RUN_S)


def store_and_ask_again(engine: Engine) -> dict[int, Answer]:
    """Check that whole prompts come back, by the rules of priorities and salts."""
    long = engine.generate(1, LONG)
    assert long.cached == 0
    engine.stored("nvme", 23)
    served(engine, 1, LONG, long)

    valued = engine.generate(2, SHORT, priority=80)
    engine.stored("kept", 11)
    engine.stored("nvme", 34)
    served(engine, 2, SHORT, valued)

    secret = engine.generate(3, SHORT, priority=60, cache_salt="tenant")
    engine.stored("kept", 22)
    served(engine, 3, SHORT, secret, cache_salt="tenant")
    for other in ({}, {"cache_salt": "another"}):
        assert engine.again(3, SHORT, **other) == secret._replace(cached=0, storage=0)
    engine.stored("nvme", 67)
    assert engine.stats()["kept"]["blocks"] == 22

    purging = {"command": "purge", "salt": "tenant"}
    gone = ask(engine.folder / "kv.sock", purging, timeout_s=PATIENCE_S)
    assert gone["removed"]["nvme"] == 11
    assert engine.again(3, SHORT, cache_salt="tenant").storage == 0
    served(engine, 1, LONG, long)
    return {1: long, 2: valued}


def obey_hints(engine: Engine) -> None:
    """Each verb moves or ranks pages, has its outcome in the answer, and changes no token.

    Answers tell where the pages of a prompt came from, and thereby what the verbs did.
    """
    before, named = engine.stats()["kept"]["blocks"], {"tokens": prompt(40, SHORT)}
    pages, own = whole(SHORT) // PAGE, {"do": "prefetch"}

    def hinted(message: str, *actions: dict[str, Any]) -> list[tuple[str, int]]:
        found = engine.generate(41, 65, kv_hints=hint_envelope(*actions, message=message))
        return [(one["outcome"], one["blocks"]) for one in found.hints]

    def comes_from(level: str, message: str) -> None:
        found = engine.again(40, SHORT, kv_hints=hint_envelope(own, message=message))
        assert (found.ids, found.storage) == (pinned.ids, whole(SHORT)), repr(found.told)
        assert found.told["served_from"] == {level: whole(SHORT)}, found.told
        assert (found.told["served_tokens"], found.told["missed"]) == (whole(SHORT), [])
        assert found.told["waited_s"] > 0

    pin = hint_envelope({"do": "pin", "ttl_s": 600}, message="pin")
    pinned = engine.generate(40, SHORT, kv_hints=pin)
    assert [one["outcome"] for one in pinned.hints] == ["accepted"]
    (missed,) = pinned.told["missed"]
    assert missed == {"reason": "never_seen", "level": None, "tokens": whole(SHORT)}
    engine.stored("kept", before + 11)  # which takes no page of lower priority
    held = engine.generate(40, SHORT, kv_hints=hint_envelope(own, message="held"))
    assert (held.told["engine_tokens"], held.told["served_from"]) == (whole(SHORT), {})
    comes_from("host", "pinned")

    assert hinted("share", {"do": "share", **named}) == [("accepted", pages)]
    engine.stored("shared", pages)
    assert hinted(
        "retain",
        {"do": "retain", "priority": 40, "ttl_s": 600, **named},
        {"do": "demote", "to": "nvme", **named},
        {"do": "share", "to": "kept", **named},
        {"do": "prefetch", **named, "salt": "another's"},
        {"do": "fly"},
    ) == [("accepted", pages), ("accepted", pages), *3 * [("rejected", 0)]]
    engine.stored("kept", before + 11 - pages)
    comes_from("nvme", "demoted")
    assert hinted("again", {"do": "demote", "to": "nvme", **named}) == [("accepted", pages)]
    assert hinted("up", {"do": "prefetch", **named}) == [("accepted", pages)]
    until(lambda: engine.stats()["hints"]["in_flight"] == 0)
    comes_from("host", "fetched")
    assert hinted("out", {"do": "demote", "to": "out", **named}) == [("accepted", pages)]
    comes_from("shared", "shared")
    engine.stored("shared", pages)


def many_at_once(engine: Engine, long: Answer) -> None:
    """Requests that share a prefix, one of them longer, and one that is given up."""
    engine.do("flush")
    asked = [{"first": 1, "tokens": LONG}, {"first": 1, "tokens": LONG, "more": 300}] * 2
    found = [Answer(**one) for one in engine.do("together", prompts=asked)]
    assert [one.ids for one in found[::2]] == [long.ids] * 2
    assert found[1].ids == found[3].ids
    assert all(one.cached >= whole(LONG) for one in found)
    for after_s in (0.0, 0.05, 0.3):  # in the queue, during its loads, and during its answer
        assert engine.do("abort", after_s=after_s, first=7, tokens=2000, new=1000) == "abort"
        engine.do("flush")
        assert engine.do("abort", after_s=after_s, first=1, tokens=LONG, new=1000) == "abort"
    served(engine, 1, LONG, long)


def attach(engine: Engine, told: dict[str, Any], **policy: str) -> None:
    """Have this storage instead."""
    assert engine.do("detach") == ""
    assert engine.do("attach", extra={**OURS, **told}, **policy) == ""


def hang(engine: Engine, long: Answer) -> None:
    """A tier that hangs costs hits, and neither answers nor the engine."""
    attach(engine, stack(engine.folder, level=HASTY))
    hangs = engine.folder / "hangs"
    hangs.touch()
    assert engine.again(1, LONG).ids == long.ids
    new = engine.generate(5, LONG)
    engine.do("flush")
    asked = [{"first": first, "tokens": LONG} for first in (1, 5, 6)]
    found = engine.do("together", prompts=asked)
    assert [one["ids"] for one in found[:2]] == [long.ids, new.ids]
    hangs.unlink()
    in_the_end(engine, long)  # when the breaker has closed
    attach(engine, stack(engine.folder))


def detach_and_attach(engine: Engine, long: Answer, model: Path, other: Path) -> None:
    """Without storage there are no hits; a new storage finds the pages of the first.

    It does so even if the engine's files were replaced since: its weights are the same.
    """
    assert engine.do("detach") == ""
    assert engine.again(1, LONG) == long._replace(cached=0, storage=0)
    wrong = {**OURS, **stack(engine.folder, fetch={"deadline": "20 s"})}
    assert "at most 4 s" in engine.do("attach", extra=wrong)
    weights = model / "model.safetensors"
    kept = weights.rename(model.with_suffix(".safetensors"))
    shutil.copy(other / weights.name, weights)
    assert engine.do("attach", extra={**OURS, **stack(engine.folder)}) == ""
    served(engine, 1, LONG, long)
    kept.replace(weights)


def adapt(engine: Engine) -> Answer:
    """Adapters have pages of their own."""
    before = engine.stats()["nvme"]["blocks"]
    asked: list[dict[str, Any]] = [{}, {"lora_path": "one"}, {"lora_path": "two"}]
    found = [engine.generate(30, SHORT, **more) for more in asked]
    assert [one.cached for one in found] == [0, 0, 0]
    assert len({tuple(one.ids) for one in found}) == 3
    until(lambda: engine.stats()["nvme"]["blocks"] == before + 33)
    for more, like in zip(asked, found, strict=True):
        served(engine, 30, SHORT, like, **more)
    return found[1]


def readapt(engine: Engine, stored: int) -> None:
    """An adapter reloaded with other weights at its path has pages of its own."""
    one, two = (engine.generate(31, SHORT, lora_path=name) for name in ("one", "two"))
    assert one.ids != two.ids
    engine.stored("nvme", stored + 22)
    served(engine, 31, SHORT, two, lora_path="two")
    path = engine.folder / "two"
    weights = path / "adapter_model.safetensors"
    kept = weights.rename(engine.folder / "kept.safetensors")
    shutil.copy(engine.folder / "one" / weights.name, weights)
    assert engine.do("readapt", adapter="two", path=str(path)) == ""
    assert engine.again(31, SHORT, lora_path="two") == one
    kept.replace(weights)


def write_policies(engine: Engine) -> None:
    """Pages are stored when SGLang asks for it: on their second use, or on eviction."""
    for_some, for_evicted = "write_through_selective", "write_back"
    attach(engine, stack(engine.folder, for_some), policy=for_some)
    asked = engine.generate(8, SHORT)
    engine.do("flush")  # with nothing of it stored
    assert engine.generate(8, SHORT) == asked
    assert engine.generate(8, SHORT).ids == asked.ids
    until(lambda: engine.stats()["nvme"]["blocks"] >= whole(SHORT) // PAGE)
    served(engine, 8, SHORT, asked)

    attach(engine, stack(engine.folder, for_evicted), policy=for_evicted)
    engine.do("flush")
    first = engine.generate(20, LONG)
    assert first.cached == 0
    for other in range(21, 27):  # more than the device pool has room for
        engine.generate(other, LONG)
    until(lambda: engine.stats()["nvme"]["blocks"] >= whole(LONG) // PAGE)
    served(engine, 20, LONG, first)


def soak(engine: Engine) -> None:
    """Send random requests for ``KVLADDER_SGLANG_SOAK`` seconds."""
    found = Soak(engine, {**OURS, **stack(engine.folder, "soak", HASTY)})
    found.run(float(os.environ.get("KVLADDER_SGLANG_SOAK", "20")))
    print(found)
    assert found.done["tokens from kvladder"]
    assert found.memory_grew < POOLS_BYTES


def flip_a_bit(folder: Path, place: int) -> None:
    """Change one byte of the block at a place."""
    [segment] = sorted((folder / "kv").glob("*/seg-00000"))
    stride = align(PAGE_BYTES) + HEADER_BYTES
    with segment.open("r+b") as held:
        held.seek(place * stride + stride // 2)
        byte = held.read(1)[0]
        held.seek(-1, 1)
        held.write(bytes([byte ^ 0x40]))


def find_and_mend(engine: Engine, known: dict[int, Answer]) -> None:
    """The next process has the same answers; a damaged page is computed, and stored again."""
    valued = engine.generate(2, SHORT)
    assert (valued.ids, valued.storage) == (known[2].ids, whole(SHORT))
    damaged = engine.generate(1, LONG)
    assert damaged.ids == known[1].ids
    assert damaged.storage < whole(LONG)
    assert engine.stats()["nvme"]["corrupt"] == 1
    in_the_end(engine, known[1])  # when it was written
    assert engine.stats()["nvme"]["corrupt"] == 1


def load_weights(engine: Engine, model: Path, before: Answer) -> Answer:
    """Weights changed in the engine have pages of their own after a flush.

    SGLang does not flush its cache here, as trainers ask it to.
    """
    assert engine.do("load", path=str(model)) == ""
    assert engine.do("detach") == ""
    ours = {**OURS, **stack(engine.folder, "other")}
    assert "POST /flush_cache" in engine.do("attach", extra=ours)
    engine.do("flush")
    assert engine.do("attach", extra=ours) == ""
    other = engine.generate(1, LONG)
    assert (other.cached, other.ids == before.ids) == (0, False)
    engine.stored("nvme", 23)
    served(engine, 1, LONG, other)
    return other


def other_weights(engine: Engine, model: Path, other: Answer) -> None:
    """Pages are named by the weights in memory, however these were loaded."""
    assert engine.do("update", path=str(model)) == ""
    found = engine.generate(1, LONG)
    assert (found.cached, found.ids) == (0, other.ids)
    assert engine.again(1, LONG) == found
    attach(engine, stack(engine.folder, "other"))
    served(engine, 1, LONG, other)


def small_pools(engine: Engine, known: dict[int, Answer]) -> None:
    """Pages that do not fit SGLang's own pools come from kvladder."""
    for other in (5, 6, 9, 10, 5):
        engine.generate(other, LONG)
    found = engine.generate(1, LONG)
    assert (found.ids, found.storage) == (known[1].ids, whole(LONG))


def test_an_engine_serves_through_its_whole_life(
    start: Callable[..., Engine],
    serve: Callable[..., Server],
    folder: Path,
    models: list[Path],
    adapters: dict[str, Any],
) -> None:
    engine = start(models[0], stack(folder), **adapters)
    known = store_and_ask_again(engine)
    many_at_once(engine, known[1])
    hang(engine, known[1])
    adapted = adapt(engine)
    detach_and_attach(engine, known[1], *models)
    write_policies(engine)
    soak(engine)
    other = load_weights(engine, models[1], known[1])
    readapt(engine, stored=23)
    engine.end()

    flip_a_bit(folder, 20)
    small = {"max_total_tokens": 4096, "hicache_ratio": 1.5}
    settings = with_bucket(stack(folder), folder / "bucket")
    engine = serve(models[0], settings, **small, **adapters)
    find_and_mend(engine, known)
    obey_hints(engine)
    small_pools(engine, known)
    served(engine, 30, SHORT, adapted, lora_path="one")
    other_weights(engine, models[1], other)
    engine.end()
    log = "".join(path.read_text() for path in folder.glob("*.log"))
    assert "kvladder is ready: a block is 64 tokens, 256 KiB" in log
    assert "the weights change: kvladder caches nothing until" in log
