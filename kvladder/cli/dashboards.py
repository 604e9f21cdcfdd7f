"""``kvladder dashboards``: writes a board for Grafana and alert rules for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from kvladder.cli.output import Result
from kvladder.errors import ConfigError
from kvladder.publishing.alerts import PAGE, alerts_of, rules
from kvladder.publishing.board import board
from kvladder.units import counted

BOARD: Final = "kvladder-board.json"
RULES: Final = "kvladder-rules.yaml"


def dashboards(*, out: Path, runbooks: str = PAGE, force: bool = False) -> Result:
    """Write a board for Grafana and alert rules for Prometheus.

    Both name the metrics of this version, with and without the prefix of vLLM.

    Parameters
    ----------
    out:
        write kvladder-board.json and kvladder-rules.yaml into this folder, which is made if needed
    runbooks:
        link alerts to this address of the page about alerts (default: %(default)s)
    force:
        replace existing files

    Raises
    ------
    ConfigError
        The folder cannot be made or written, or already has these files.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder", path="--out", hint="expected a folder")
    there = [str(out / name) for name in (BOARD, RULES) if (out / name).exists()]
    if there and not force:
        found = f"{', '.join(there)}: already there"
        raise ConfigError(found, path="--out", hint="add --force to replace, or use another folder")
    made = board()
    _write(out / BOARD, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    _write(out / RULES, _yaml(rules(runbooks)))
    panels = counted(sum(len(one.get("panels", (one,))) for one in made["panels"]), "panel")
    alerts = counted(len(alerts_of()), "alert")
    lines = (
        f"{out / BOARD}: {panels}; import it in Grafana",
        f"{out / RULES}: {alerts}; name it in Prometheus' rule_files",
    )
    return Result("\n".join(lines), {"board": str(out / BOARD), "rules": str(out / RULES)})


def _yaml(found: dict[str, Any]) -> bytes:
    return b"# Made by `kvladder dashboards`\n" + msgspec.yaml.encode(found)


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        hint = "expected a folder that this user may write to"
        raise ConfigError(f"{path}: {error.strerror}", path="--out", hint=hint) from error
