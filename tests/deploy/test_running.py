"""What the chart renders runs: its server, and its engine's stack as a client of it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvladder import Layout, open_cache
from kvladder.control.sockets import ask
from kvladder.testing.redisserver import free_ports
from kvladder.tiers.nixl.curve import make_keys
from tests.deploy.chart import pods, render, stacks
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

LAYOUT = Layout(block_tokens=1, block_bytes=4096, fields={"model": "deployed"})
COMMAND = "import sys; from kvladder.cli import main; sys.exit(main())"
SMALL = {"arena": {"size": "16 MiB"}, "tiers": [{"type": "host"}]}
FILES = {"type": "files", "path": "/cache/kv", "capacity": "64 MiB"}


def here(text: str, root: Path, port: int) -> str:
    """Return text with a pod's paths below a folder, and its server on this machine."""
    for folder in ("/cache", "/run", "/secret", "/etc/kvladder"):
        text = text.replace(folder, f"{root}{folder}")
    return text.replace("0.0.0.0", "127.0.0.1").replace(
        f"kv-server-0.kv-server.llm.svc:{port}", f"127.0.0.1:{port}"
    )


def test_a_server_of_the_chart_serves_an_engine_of_the_chart(tmp_path):
    (port,) = free_ports(1)
    manifests = render(
        {
            "engine": {"stack": SMALL},
            "server": {
                "enabled": True,
                "port": port,
                "capacity": "64 MiB",
                "stack": SMALL | {"block": "64 KiB", "tiers": [*SMALL["tiers"], FILES]},
            },
            "keys": {"secret": "pair"},
        }
    )
    for folder in ("cache", "run/keys", "run/kvladder", "etc/kvladder"):
        (tmp_path / folder).mkdir(parents=True)
    make_keys(tmp_path / "secret")
    for file in (tmp_path / "secret").iterdir():
        file.chmod(0o440)  # as fsGroup leaves it
    for pod in pods(manifests).values():
        (init,) = pod["initContainers"]
        command = [here(word, tmp_path, port) for word in init["command"]]
        subprocess.run([str(shutil.which(command[0])), *command[1:]], check=True)
    files = {name: here(text, tmp_path, port) for name, text in stacks(manifests).items()}
    (tmp_path / "etc/kvladder/server.yaml").write_text(files["kv-server"])

    (serve,) = pods(manifests)["kv-server"]["containers"]
    words = [here(word, tmp_path, port) for word in [*serve["command"], *serve["args"]]]
    server = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words[1:]], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith(f"ready: clients at 127.0.0.1:{port}")
        alive = [here(word, tmp_path, port) for word in serve["livenessProbe"]["exec"]["command"]]
        subprocess.run([sys.executable, "-c", COMMAND, *alive[1:]], check=True)
        stack = yaml.safe_load(files["kv-engine"])
        stack["control"] = f"{tmp_path}/run/kvladder/engine.sock"  # another pod's
        (level,) = [tier for tier in stack["tiers"] if tier["type"] == "nixl"]
        level["required"] = True
        socket = tmp_path / "run/kvladder/kv.sock"
        with open_cache(stack, layout=LAYOUT):
            told = ask(socket, {"command": "stats"}, timeout_s=PATIENCE_S)
            assert told["export"]["sessions"] == 1
        server.send_signal(signal.SIGTERM)
        assert server.communicate()[0].endswith("ended by SIGTERM\n")
        assert server.returncode == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
