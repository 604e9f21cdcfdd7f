"""Log lines inside vLLM: who prints them, how many there are, and the warnings."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvladder.compose import open_manager
from kvladder.config.stack import SUMMARY_LINES_MAX, load_config
from kvladder.connectors.vllm.options import Policies
from kvladder.connectors.vllm.reports import log as vllm_log
from kvladder.layout import Layout
from kvladder.notices import Notices
from tests.vllm.harness import newer_vllm

ROOT = Path(__file__).parents[2]


class Printed(logging.Handler):
    """Keeps the records of a handler."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def vllm_prints() -> Iterator[Printed]:
    """Replace vLLM's handler, which only its own loggers have."""
    logger, printed = logging.getLogger("vllm"), Printed()
    handlers, level, propagates = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [printed], False
    logger.setLevel(logging.INFO)
    yield printed
    logger.handlers, logger.propagate = handlers, propagates
    logger.setLevel(level)


def many(levels: int) -> dict[str, Any]:
    below = [{"type": "memory", "name": f"m{i}", "capacity": "1 MiB"} for i in range(levels)]
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, *below]}


def test_only_vllms_logger_prints_the_log_lines_of_the_cache(
    vllm_prints: Printed,
) -> None:
    root = Printed()
    logging.getLogger().addHandler(root)
    Notices(lambda: 0.0).say("kind", "before")
    vllm_log.route()
    vllm_log.route()
    Notices(lambda: 0.0).say("kind", "after")
    logging.getLogger("kvladder").debug("too much")
    assert vllm_prints.texts == ["after"]
    logging.getLogger().removeHandler(root)
    assert root.texts == ["before"]


def test_log_handlers_set_by_the_user_stay_the_only_ones(vllm_prints: Printed) -> None:
    mine = Printed()
    logging.getLogger("kvladder").addHandler(mine)
    vllm_log.route()
    Notices(lambda: 0.0).say("kind", "a fault")
    assert (mine.texts, vllm_prints.texts) == (["a fault"], [])


def test_a_client_with_wrong_parameters_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time_s = [0.0]
    policies = Policies(
        load_config(many(1), env={}), map_priority=0, notices=Notices(lambda: time_s[0])
    )
    wrong = [
        SimpleNamespace(request_id=f"r-{i}", kv_transfer_params={"kvladder": {"priority": 101 + i}})
        for i in range(1001)
    ]
    for request in wrong[:-1]:
        policies.of(request)
    assert len(caplog.messages) == 1
    time_s[0] = 61.0
    policies.of(wrong[-1])
    assert caplog.messages[1].endswith("(999 more like this in the last 61 s)")


@pytest.mark.parametrize("levels", [0, 2, SUMMARY_LINES_MAX - 2, SUMMARY_LINES_MAX - 1, 30])
def test_the_start_takes_ten_lines_and_debug_has_every_setting(
    levels: int, vllm_prints: Printed
) -> None:
    config = load_config(many(levels), env={})
    with open_manager(config, Layout(16, 4096, {"model": "tiny"})) as manager:
        vllm_log.say_ready(manager, config)
        assert len(vllm_prints.texts) == 1
        lines = vllm_prints.texts[0].splitlines()
        assert len(lines) == min(levels + 2, SUMMARY_LINES_MAX)
        assert lines[:2] == [
            "kvladder is ready: a block is 16 tokens, 4 KiB",
            "host: host, 1 MiB, 256 blocks",
        ]
        if levels == 2:
            assert lines[2] == "m0: memory, 1 MiB, 256 blocks, when: evict"
        if levels == 30:
            assert lines[-1] == "and 23 more levels"
        logging.getLogger("vllm").setLevel(logging.DEBUG)
        vllm_log.say_ready(manager, config)
        assert manager.describe() in vllm_prints.texts[2]


def nvme(**settings: Any) -> dict[str, Any]:
    return {"type": "files", "path": "/nvme", "capacity": "1 GiB", **settings}


def shared(**settings: Any) -> dict[str, Any]:
    return {"type": "redis", "url": "redis://h", "capacity": "1 GiB", **settings}


@pytest.mark.parametrize(
    ("tiers", "at_risk"),
    [
        ([], ""),
        ([{"type": "memory", "capacity": "1 GiB"}], ""),
        ([nvme()], "files"),
        ([nvme(when="commit")], ""),
        ([shared()], "redis"),
        ([nvme(), shared(when="commit")], ""),
        ([nvme(), shared(when="commit", min_priority=50)], "files"),
        ([nvme(), shared(when="commit", min_hits=1)], "files"),
        ([nvme(min_priority=50), shared(when="commit", min_priority=50)], ""),
        ([nvme(), shared()], "files and redis"),
    ],
)
def test_blocks_at_risk_without_a_shutdown_timeout_are_warned_of(
    tiers: list[dict[str, Any]], at_risk: str, vllm_prints: Printed
) -> None:
    config = load_config({"arena": {"size": "1 GiB"}, "tiers": [{"type": "host"}, *tiers]}, env={})
    warn(config, shutdown_timeout=30)
    assert vllm_prints.texts == []
    warn(config, shutdown_timeout=0)
    assert [
        f"has not passed on to {at_risk} yet are lost" in text for text in vllm_prints.texts
    ] == ([True] if at_risk else [])
    assert all("--shutdown-timeout 30" in text for text in vllm_prints.texts)


def warn(config: Any, *, version: str = "0.33.0", policy: str = "recompute", **engine: Any) -> None:
    engine["kv_transfer_config"] = SimpleNamespace(kv_load_failure_policy=policy)
    vllm_log.warn(config, version=version, vllm_config=SimpleNamespace(**engine))


def test_the_short_form_loses_nothing_by_default(vllm_prints: Printed, tmp_path: Path) -> None:
    short = {"host": "1 GiB", "files": str(tmp_path), "capacity": "1 GiB"}
    warn(load_config(short, env={}), shutdown_timeout=0)
    assert vllm_prints.texts == []


def test_blocks_that_fail_their_request_are_warned_of(vllm_prints: Printed) -> None:
    warn(load_config(many(0), env={}), policy="fail")
    assert ["kv_load_failure_policy is 'fail'" in text for text in vllm_prints.texts] == [True]


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.33.1+cpu", True),
        ("0.33.1rc2.dev5+g1234abc", True),
        ("0.34.0", False),
        ("1.33.0", False),
        ("0.3.3", False),
        ("dev", False),
    ],
)
def test_a_version_of_vllm_that_was_not_tested_is_warned_of(
    version: str, tested: bool, vllm_prints: Printed
) -> None:
    warn(load_config(many(0), env={}), version=version)
    assert [f"but not with vLLM {version}:" in text for text in vllm_prints.texts] == (
        [] if tested else [True]
    )


def test_the_documented_versions_are_the_tested_ones() -> None:
    page = (ROOT / "docs" / "how-to" / "vllm.md").read_text()
    rows = re.findall(r"^\| (\d+)\.(\d+)\.\d+ \|", page, re.MULTILINE)
    assert tuple((int(major), int(minor)) for major, minor in rows) == vllm_log.TESTED
    (major, least), (_, most) = vllm_log.TESTED[0], vllm_log.TESTED[-1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = f">={major}.{least},<{major}.{most + 1}"
    assert project["optional-dependencies"]["vllm"] == [f"vllm{bounds}"]


def test_the_running_version_is_the_intended_one() -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    from kvladder.connectors.vllm.identity.fingerprint import vllm_version

    assert vllm_log.untested(vllm_version()) == ""
    for folder in newer_vllm():
        assert Path(folder).name == f"vllm-{vllm_version()}"
