"""Two engines of one directory with one difference: neither is served the other's blocks."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, PROMPTS, make, stack
from tests.vllm.pictures import IMAGE

TEXT = "".join(Random(2).choices("abcdefgh ", k=300))
BEFORE = 200
"""Tokens before the picture where it does not come first; a token is a byte."""


def test_the_length_that_chooses_longropes_factors_names_the_blocks(
    start: Start, tmp_path: Path
) -> None:
    model, prompts = make(tmp_path, kind="phi3"), [prompt[:800] for prompt in PROMPTS]
    asked = ["each", {"prompts": prompts}]
    answers = []
    for length in (1024, 2048):  # up to the original length, and above it
        spec = {"model": str(model), "engine": {"max_model_len": length}}
        run = start(stack(tmp_path / "kv"), asked, ["stats"], ["shutdown"], **spec)
        found, stats, _ = run.finish()
        assert found["external"] == 0
        assert stats["host"]["blocks"] > 0
        answers.append(found["tokens"])
    assert answers[0] != answers[1], "the factors change nothing: there is nothing to tell"


def test_blocks_of_pictures_are_named_by_what_the_model_sees(start: Start, tmp_path: Path) -> None:
    model = make(tmp_path, script="pictures.py")
    first: list[Any] = [[IMAGE + TEXT, [number]] for number in range(3)]
    late = TEXT[:BEFORE] + IMAGE + TEXT[BEFORE:]
    inside: list[Any] = [[late, [number]] for number in range(2)]
    two: list[Any] = [[IMAGE + TEXT[:99] + IMAGE + TEXT, pair] for pair in ([0, 1], [1, 0])]
    new: list[Any] = [[late, [7]]]

    def look(prompts: list[Any], uuid: str | None = None) -> list[Any]:
        given = {"prompts": prompts, "uuid": uuid}
        return ["call", {"function": "tests.vllm.pictures:look", **given}]

    forget = ["call", {"function": "tests.vllm.pictures:forget"}]
    extra = stack(tmp_path / "kv")
    engine = {"skip_tokenizer_init": False, "prefix_caching_hash_algo": "sha256_cbor"}
    spec = {"model": str(model), "pictures": True, "engine": engine}
    everything, named = look([*first, *inside, *two]), [look([first[0]], "photo.png"), forget]
    run = start(
        extra, everything, forget, everything, look([first[2]], "kept.png"),
        *named, look([first[1]], "photo.png"), forget, ["shutdown"], **spec,
    )  # fmt: skip
    cold, _, warm, *_ = run.finish()
    right, hits = cold["tokens"], warm["external"]
    assert len({str(answer) for answer in right}) == len(right), "pictures do not matter"
    assert warm["tokens"] == right
    assert hits > len(right) * len(TEXT) // 2

    run = start(
        extra, everything, forget, look(new), look([first[2]], "kept.png"),
        look([first[1]], "photo.png"), ["shutdown"], **spec,
    )  # fmt: skip
    again, _, other, kept, photo, _ = run.finish()
    assert (again["tokens"], again["external"]) == (right, hits)
    assert other["external"] == BEFORE // BLOCK * BLOCK, "what stands before a picture is shared"
    assert other["tokens"][0] not in right
    assert (kept["tokens"], kept["external"] > 0) == ([right[2]], True)
    assert (photo["tokens"], photo["external"]) == ([right[1]], 0)

    file = model / "processor_config.json"
    plain = json.loads(file.read_text())
    plain["image_processor"]["image_mean"] = [0.05, 0.45, 0.4]
    file.write_text(json.dumps(plain))
    (changed, _) = start(extra, everything, ["shutdown"], **spec).finish()
    assert changed["external"] == 0
    assert not set(map(str, changed["tokens"])) & set(map(str, right)), "the file does not matter"
