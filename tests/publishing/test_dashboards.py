"""``kvladder dashboards``: what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvladder.cli import main
from kvladder.cli.dashboards import BOARD, RULES
from kvladder.publishing.alerts import rules
from kvladder.publishing.board import board


def test_both_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "https://docs.example/alerts.html"
    assert main(["dashboards", "--out", str(tmp_path), "--runbooks", page]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / BOARD}: " in out
    assert f"{tmp_path / RULES}: " in out
    assert json.loads((tmp_path / BOARD).read_text()) == board()
    made = msgspec.yaml.decode((tmp_path / RULES).read_bytes())
    assert made == rules(page)
    for rule in made["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"


@pytest.mark.parametrize("name", [BOARD, RULES])
def test_existing_files_are_replaced_only_with_force(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["dashboards", "--out", str(tmp_path)]) == 2
    hint = "add --force to replace, or use another folder"
    expected = f"kvladder: --out: {tmp_path / name}: already there ({hint})\n"
    assert capsys.readouterr().err == expected
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert main(["dashboards", "--out", str(tmp_path), "--force"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {BOARD, RULES}
    assert (tmp_path / name).read_text() != "mine"


def test_a_folder_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["dashboards", "--out", str(file)]) == 2
    expected = f"kvladder: --out: {file} is not a folder (expected a folder)\n"
    assert capsys.readouterr().err == expected
    assert main(["dashboards", "--out", str(file / "below")]) == 2
    assert "Not a directory" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [file]


def test_a_folder_is_made(tmp_path: Path) -> None:
    assert main(["dashboards", "--out", str(tmp_path / "new" / "folder")]) == 0
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {BOARD, RULES}


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RULES).mkdir()
    assert main(["dashboards", "--out", str(tmp_path), "--force"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvladder: --out: {tmp_path / RULES}: Is a directory (expected")
