"""``python -m benchmarks.gpu``: parts that cannot run are skipped by name, whatever is missing."""

from __future__ import annotations

import json
import os
import runpy
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import gpu
from benchmarks.machine import medium
from benchmarks.row import Row
from tests.kit.source import ROOT

TORCH = (
    "torch", "torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath",
    "networkx", "sympy", "typing_extensions",
)  # fmt: skip
"""Modules that ``pip install torch`` brings."""
ONLY = """
import sys
from importlib.metadata import packages_distributions
allowed = {"kvladder", "benchmarks", *sys.argv.pop(1).split(",")}
for name in packages_distributions().keys() - allowed - sys.modules.keys():
    sys.modules[name] = None  # it cannot be imported, and is not found
from benchmarks.gpu import main
sys.exit(main(sys.argv[1:]))
"""
needs_no_device = pytest.mark.skipif(not gpu._no_device(), reason="there is a device")


def command(modules: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where only these modules can be imported, beside Python's own."""
    call = [sys.executable, "-c", ONLY, ",".join(modules), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)


@needs_no_device
@pytest.mark.parametrize(
    ("modules", "why"),
    [
        pytest.param((), "there is no torch", id="bare"),
        pytest.param(("numpy",), "there is no torch", id="numpy"),
        pytest.param(("numpy", *TORCH), "no CUDA device", id="torch", marks=pytest.mark.slow),
    ],
)
def test_each_part_is_skipped_by_name(modules: Sequence[str], why: str, tmp_path: Path) -> None:
    found = command(modules, "--out", str(tmp_path), "--part", "2")
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr
    assert f"no part ran with {sys.executable}: set GPU_PYTHON" in found.stderr
    wanted = [part for part in gpu.PARTS if part.call == 2]
    lines = found.stdout.splitlines()
    for part in wanted:
        assert [line for line in lines if line.startswith(f"{part.name}: skipped: there is no ")]
    assert why in found.stdout
    [written] = tmp_path.glob("*-gpu-none-part-2.md")
    assert why in written.read_text()
    told = json.loads(written.with_suffix(".json").read_text())
    assert [one["name"] for one in told["parts"]] == [part.name for part in wanted]


@pytest.mark.slow
def test_with_torch_and_numpy_alone_the_parts_run_that_name_no_more() -> None:
    found = command(("numpy", *TORCH), "--dry")
    assert found.returncode == 0, found.stderr
    for part in gpu.PARTS:
        state = "passed" if part.dry and not part.needs else "skipped: "
        assert f"{part.name}: {state}" in found.stdout
    for name in (
        "offload by two processes at once",
        "host time of submit of onboard, 64 blocks of 32 layers, LBHNC",
        "generating beside both, by a thread, BLHNC",
        "first token of 128 tokens from host, whole, BLHNC",
        "first token of 128 tokens from host, by layer, LBHNC",
    ):
        assert name in found.stdout
    assert "written" not in found.stdout


@pytest.mark.slow
def test_a_part_needs_no_module_that_it_does_not_name() -> None:
    [part] = [part for part in gpu.PARTS if part.name == "first token from files"]
    found = command(("numpy", *TORCH, *part.needs), "--dry", "--only", part.name)
    assert found.returncode == 0, found.stderr
    assert "first token of 128 tokens from files" in found.stdout
    assert f"; {medium(Path('/tmp'))}; set TMPDIR to use another" in found.stdout


def test_each_part_is_in_one_of_two_calls_and_its_function_exists() -> None:
    assert {part.call for part in gpu.PARTS} == {1, 2}
    assert len({part.name for part in gpu.PARTS}) == len(gpu.PARTS)
    assert 2 * gpu.MINUTES <= 9
    for part in gpu.PARTS:
        module, function = part.where
        tree = (ROOT / "benchmarks" / f"{module}.py").read_text()
        assert f"def {function}({'*, dry: bool = False' if part.dry else ''})" in tree


ROW = Row(name="copy", unit="GB/s", ours=1.0)


def good() -> Iterator[Row]:
    yield ROW


def bad() -> Iterator[Row]:
    raise RuntimeError("an illegal address")


def hangs() -> Iterator[Row]:
    yield ROW
    time.sleep(60)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parts ``good``, ``bad`` and ``hangs`` run, without a device."""
    monkeypatch.setattr(gpu, "missing", lambda part, *, dry: "")
    module = ModuleType("benchmarks.made")
    vars(module).update(good=good, bad=bad, hangs=hangs)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def made(name: str) -> gpu.Part:
    return gpu.Part(name, ("made", name), 1)


@pytest.mark.usefixtures("able")
def test_a_failing_part_is_named_and_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = [made("bad"), made("good")]
    seen: list[tuple[int, int]] = []
    rows, outcomes = gpu.run(
        wanted, 1.0, told=lambda rows, outcomes: seen.append((len(rows), len(outcomes)))
    )
    assert rows == [ROW]
    assert [one.state for one in outcomes] == [
        "failed: RuntimeError('an illegal address')",
        "passed",
    ]
    assert seen == [(0, 1), (1, 2)], "told after each part: a machine may go away"
    assert gpu.verdict(outcomes) == 1
    assert gpu.verdict(outcomes[1:]) == 0
    _, [late] = gpu.run(wanted[1:], 0.0)
    assert late.state == "skipped: 0 minutes are over"
    assert gpu.verdict([late]) == 2
    assert "good: skipped" in capsys.readouterr().out


@pytest.mark.usefixtures("able")
def test_a_part_that_takes_too_long_is_ended_and_its_rows_are_kept() -> None:
    rows, [outcome] = gpu.run([made("hangs")], 0.2 / 60)
    assert rows == [ROW]
    assert outcome.state.startswith('failed: OutOfTimeError("it was ended after 0 s')


def test_make_takes_the_python_whose_torch_sees_a_device(tmp_path: Path) -> None:
    def choose(**codes: int) -> str:
        """Return the choice between Pythons whose check of torch ends with these codes."""
        for name, code in codes.items():
            (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
            (tmp_path / name).chmod(0o755)
        call = ["/bin/bash", str(ROOT / ".ci" / "gpu_python"), "venv-python"]
        return subprocess.check_output(call, env={"PATH": str(tmp_path)}, text=True).strip()

    assert choose() == "python3"
    assert choose(python3=1) == "python3"
    assert choose(**{"python3": 0, "venv-python": 0}) == "python3"
    assert choose(**{"python3": 1, "venv-python": 0}) == "venv-python"
    assert choose(**{"python3": 1, "venv-python": 1}) == "venv-python"
    made = subprocess.check_output(
        ["make", "-n", "-s", "gpu", "GPU_PYTHON=/opt/python", "ARGS=--dry"], cwd=ROOT, text=True
    )
    assert made.strip().endswith("/opt/python -m benchmarks.gpu --dry")


def test_the_medium_of_a_folder_is_named(tmp_path: Path) -> None:
    assert medium(Path("/proc/self")).startswith("proc on ")
    assert medium(Path("/dev/shm")).startswith("tmpfs on ")
    assert " on " in medium(tmp_path)


def test_an_unknown_part_is_refused_with_the_known_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu.main(["--only", "sleeping"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("no part is named like ['sleeping']; there are: order of copies")


def test_a_packed_extension_keeps_the_device_code_of_one_architecture_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    pack = runpy.run_path(str(ROOT / ".ci" / "gpu_vllm.py"))
    kinds = {"code": 2, "text": 1}

    def entry(kind: str, architecture: int, code: bytes) -> bytes:
        head = struct.pack("<HHIQ12xI32x", kinds[kind], 257, 64, len(code), architecture)
        return head + code

    entries = [entry("code", 80, b"a" * 16), entry("code", 90, b"b" * 8), entry("text", 90, b"c")]
    made = b"".join(entries)
    fatbin = pack["FATBIN"] + struct.pack("<HHQ", 1, 16, len(made)) + made
    library = b"elf" + pack["FATBIN"] + b"no fatbin, though it begins alike" + fatbin + b"rest"
    kept = bytes(pack["keep_only"](bytearray(library), 90))
    assert kept == library.replace(b"a" * 16, bytes(16)).replace(
        entries[2], entries[2][:-1] + b"\0"
    )


def test_the_wheels_to_take_along_bring_each_module_that_a_part_names() -> None:
    """The machine has torch, NumPy, Triton and transformers; vLLM is too large."""
    wanted = runpy.run_path(str(ROOT / ".ci" / "gpu_wheels.py"))["wanted"]()
    names = {one.partition("[")[0].partition(">")[0].lower() for one in wanted}
    projects = packages_distributions()  # reads the files of every installed package
    for part in gpu.PARTS:
        if "vllm" not in part.needs:
            for module in {*part.needs} - {"triton", "transformers"}:
                assert names & {name.lower() for name in projects[module]}, module
