"""Make docs/reference/support.md from support.yaml: ``python .ci/support.py``; 1 if it is wrong.

A row is a version of an engine. A cell is "run in CI" if the row names a test that starts the real
engine over this tier, else "contract only". ``python .ci/support.py --ran FILE`` also requires that
each test of a cell "run in CI" is in FILE, as ``--durations-file`` writes it: there are the tests
that ran and were not skipped. Tests of a newer version ran twice, once with each.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DATA, PAGE = (ROOT / "docs" / "reference" / f"support.{kind}" for kind in ("yaml", "md"))
RUN, CONTRACT = "run in CI (CPU)", "contract only"
NEVER, ON_GPU = "never run on a GPU yet", "run on an H100, by hand"
REAL = ("tests/vllm/", "tests/sglang/", "tests/connectors/test_transformers")
"""Where tests use a real engine."""
PRIVATE = ("host", "files")

HEAD = """# What runs where

`.ci/support.py` makes this page from `support.yaml`. A test checks that each named test exists and
starts the real engine. CI checks that each of them ran.

*Run in CI*: the real engine runs on a CPU, with tiny random models. *Contract only*: tests call the
connector and the tier as the engine would, without the engine. vLLM 0.33 runs over the compiled
modules of 0.32, because no CPU build of 0.33 is published. *Run on an H100, by hand*: a test with
the mark `gpu` passed there on 2026-11-26 (vLLM: model runner V2); CI has no GPU. ROCm is not
supported. RDMA was never tried.
"""


def load() -> dict[str, Any]:
    """Return the tiers' suites and the rows."""
    found: dict[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return found


def cell(row: dict[str, Any], tier: str) -> str:
    """Return what is known about a version of an engine over a tier."""
    return RUN if tier in row["run"] else CONTRACT


def device(row: dict[str, Any]) -> str:
    """Return whether a version of an engine ran on a GPU."""
    return ON_GPU if row["gpu"] else NEVER


def together(row: dict[str, Any], tiers: list[str]) -> str:
    """Return what is known about all of these tiers: no more than about each."""
    return RUN if all(cell(row, tier) == RUN for tier in tiers) else CONTRACT


def readme(data: dict[str, Any]) -> str:
    """Return README's table."""
    others = [tier for tier in data["tiers"] if tier not in PRIVATE]
    names = [", ".join(f"`{tier}`" for tier in tiers) for tiers in (PRIVATE, others)]
    head = f"| engine | version | tiers {names[0]} | tiers {names[1]} | on a GPU |"
    lines = [head, "|---|---|---|---|---|"]
    for row in data["rows"]:
        below = ", kvladder beneath it" if "own" in row["engine"] else ""
        known = [together(row, [*PRIVATE]), together(row, others), device(row)]
        cells = [f"[{row['engine']}]({row['page']}){below}", row["version"], *known]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render(data: dict[str, Any]) -> str:
    """Return the page."""
    tiers = [*data["tiers"]]
    head = " | ".join(["engine", "version", *(f"`{tier}`" for tier in tiers), "GPU"])
    lines = [HEAD, f"| {head} |", "|" + "---|" * (len(tiers) + 3)]
    for row in data["rows"]:
        page = row["page"].removeprefix("docs/")
        known = [cell(row, tier) for tier in tiers]
        cells = [f"[{row['engine']}](../{page})", row["version"], *known, device(row)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Tests", ""]
    for row in data["rows"]:
        lines += [f"**{row['engine']} {row['version']}**", ""]
        lines += [f"- `{tier}`: `{test}`" for tier, test in row["run"].items()]
        suites = [data["tiers"][tier] for tier in tiers if tier not in row["run"]]
        lines += ["- contract: " + ", ".join(f"`{one}`" for one in (row["contract"], *suites)), ""]
    return "\n".join(lines)


@cache
def names(path: Path) -> dict[str, list[str]]:
    """Return the tests and classes of a file, each with the text of its decorators."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {
        node.name: [ast.unparse(one) for one in node.decorator_list]
        for node in body
        if isinstance(node, kinds)
    }


def exists(test: str) -> bool:
    """Return whether a file, or a test or class in it, exists."""
    path, _, name = test.partition("::")
    file = ROOT / path
    return path.startswith("tests/") and file.is_file() and (not name or name in names(file))


def problems(row: dict[str, Any], tiers: dict[str, str]) -> Iterator[str]:
    """Yield what is wrong with a row."""
    for test in (row["contract"], *row["run"].values(), *row["gpu"]):
        if not exists(test):
            yield f"{test} does not exist"
            return
    yield from (f"there is no tier {tier}" for tier in row["run"] if tier not in tiers)
    if not row["contract"].startswith("tests/connectors/"):
        yield f"contract: {row['contract']} is no test of a connector"
    for tier, test in row["run"].items():
        path, _, name = test.partition("::")
        marks = names(ROOT / path).get(name, [])
        if not test.startswith(REAL) or not name:
            yield f"{tier}: {test} starts no real engine"
        elif row.get("newer") and not any("mark.versions" in mark for mark in marks):
            yield f"{tier}: {test} does not run with {row['version']}: it lacks the mark versions"
    for test in row["gpu"]:
        path, _, name = test.partition("::")
        if not any("mark.gpu" in mark for mark in names(ROOT / path).get(name, [])):
            yield f"gpu: {test} lacks the mark gpu"


def unrun(data: dict[str, Any], ran: str) -> Iterator[str]:
    """Yield the tests of cells "run in CI" that are not among those that ran."""
    lines = [line.rpartition("\t")[2] for line in ran.splitlines()]
    times = Counter(line.partition("[")[0] for line in dict.fromkeys(lines))
    twice = Counter(line.partition("[")[0] for line, n in Counter(lines).items() if n > 1)
    for row in data["rows"]:
        found = twice if row.get("newer") else times
        for tier, test in row["run"].items():
            if not found[test]:
                yield f"{row['engine']} {row['version']}, {tier}: {test} did not run"


def main(*arguments: str) -> int:
    """Write the page, or check the tests that ran; return the exit status."""
    data = load()
    wrong = [one for row in data["rows"] for one in problems(row, data["tiers"])]
    if arguments:
        option, file = arguments
        assert option == "--ran", f"{option}: expected --ran FILE"
        wrong += unrun(data, Path(file).read_text(encoding="utf-8"))
    else:
        PAGE.write_text(render(data), encoding="utf-8")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
