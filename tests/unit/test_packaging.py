"""The page of a package index: the README with working links, and addresses."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
URL = "https://code.example/kvladder"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
LINK = re.compile(r"\[[^\]]+\]\(([^)]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def built(monkeypatch):
    """Run setup.py with this address of the public repository; return its arguments to setup."""

    def build(url):
        given = {}
        monkeypatch.setattr("setuptools.setup", lambda **kwargs: given.update(kwargs))
        monkeypatch.setenv("KVLADDER_URL", url)
        runpy.run_path(str(ROOT / "setup.py"))
        return given

    return build


def test_links_lead_to_the_files_of_the_release(built):
    given = built(f"{URL}/")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = given["long_description"]
    links = LINK.findall(CODE.sub("", shown))
    assert len(links) == len(LINK.findall(CODE.sub("", readme))) > 20
    addresses = [*links, *given["project_urls"].values()]
    ours = [one.removeprefix(f"{URL}/") for one in addresses if one.startswith(f"{URL}/")]
    assert not [one for one in links if not one.startswith(("https://", "#"))]
    for one in ours:
        kind, _, rest = one.partition("/")
        tag, _, path = rest.partition("#")[0].partition("/")
        if kind != "issues":
            assert tag == f"v{VERSION}"
            there = ROOT / path
            assert there.is_dir() if kind == "tree" else there.is_file(), one
    assert CODE.findall(shown) == CODE.findall(readme)
    assert given["long_description_content_type"] == "text/markdown"


def test_without_an_address_no_link_is_broken(built):
    given = built("")
    shown = given["long_description"]
    links = LINK.findall(CODE.sub("", shown))
    assert not [one for one in links if not one.startswith(("https://", "#"))]
    assert "write a tier" in shown
    assert given["project_urls"] == {}
