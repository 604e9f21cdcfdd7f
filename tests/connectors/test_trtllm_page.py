"""The commands of docs/how-to/trtllm.md match the connector."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import yaml

from kvladder.connectors.trtllm.bases import SchedulerBase, WorkerBase
from kvladder.connectors.trtllm.options import PATIENCE, STACK, TrtllmOptions, read
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "trtllm.md"


def block(language: str) -> str:
    """The only block of a language on the page."""
    [(_, text)] = blocks(PAGE, language)
    return str(text)


def test_the_classes_are_where_the_configuration_says() -> None:
    told = yaml.safe_load(block("yaml"))["kv_connector_config"]
    module = import_module(told.pop("connector_module"))
    found = {name: getattr(module, value) for name, value in told.items()}
    assert found.keys() == {"connector_scheduler_class", "connector_worker_class"}
    assert issubclass(found["connector_scheduler_class"], SchedulerBase)
    assert issubclass(found["connector_worker_class"], WorkerBase)


def test_the_command_names_a_stack_and_that_configuration(tmp_path: Path) -> None:
    stack, program, model, option, configuration = shlex.split(block(""))
    assert (program, model, option) == ("trtllm-serve", "MODEL", "--extra_llm_api_options")
    assert block("yaml").startswith(f"# {configuration},")
    name, _, path = stack.partition("=")
    assert path.endswith(".yaml")
    (tmp_path / "stack.yaml").write_text("{host: 1 MiB}")
    options, found = read({name: str(tmp_path / "stack.yaml")})
    assert found.host.name == "host"
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE))
    assert rows.keys() == {STACK, PATIENCE}
    said = read({name: options.config, PATIENCE: rows[PATIENCE].strip("` ")})[0]
    assert said == options == TrtllmOptions(config=options.config)
