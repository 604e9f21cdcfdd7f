"""The workflows that test and release are valid, and run only what exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    return found


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def checked(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_workflows_fit_the_schema_of_their_host(tmp_path):
    assert [file.stem for file in WORKFLOWS] == ["release", "test"]
    done = checked(*WORKFLOWS)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert checked(wrong).returncode == 1


def test_workflows_run_scripts_that_exist():
    runs = [step["run"] for name in ("release", "test") for step in steps(name) if "run" in step]
    scripts = [name for run in runs for name in re.findall(r"bash (\S+)", run)]
    assert scripts == [".ci/sbom", ".ci/run"]
    assert not [name for name in scripts if not (ROOT / name).is_file()]


@pytest.mark.parametrize(("tag", "code"), [(f"v{VERSION}", 0), (VERSION, 1), ("v99.0.0", 1)])
def test_a_tag_that_is_not_the_version_ends_a_release(tag, code):
    (step,) = [step for step in steps("release") if step.get("name") == "The tag is the version"]
    folder = Path(sys.executable).parent
    environment = os.environ | {
        "GITHUB_REF_NAME": tag,
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env=environment, check=False)
    assert done.returncode == code


def test_only_the_job_that_publishes_gets_an_identity():
    jobs = workflow("release")["jobs"]
    asking = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert asking == ["publish"]
    assert jobs["publish"]["environment"] == "pypi"
    assert {*jobs["publish"]["needs"]} == {*jobs} - {"publish"}
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text
    for name in ("release", "test"):
        assert workflow(name)["permissions"] == {"contents": "read"}


def test_a_release_tells_the_index_where_the_project_is():
    assert set(workflow("release")["env"]) == {"KVLADDER_URL"}
    assert 'os.environ.get("KVLADDER_URL"' in (ROOT / "setup.py").read_text()
    (wheels,) = [step for step in steps("release") if "cibuildwheel --" in step.get("run", "")]
    assert wheels["env"]["CIBW_ENVIRONMENT_PASS_LINUX"] == "KVLADDER_URL"


def test_wheels_are_built_for_each_supported_python():
    named = [one.rpartition(" ")[2] for one in PROJECT["project"]["classifiers"]]
    supported = {f"cp{one.replace('.', '')}-*" for one in named if re.fullmatch(r"3\.\d+", one)}
    assert set(PROJECT["tool"]["cibuildwheel"]["build"].split()) == supported
