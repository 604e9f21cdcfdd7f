"""What the site shows of the product is what the product has."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import yaml

from kvladder.config.registry import BUILT_IN
from kvladder.config.settings import Sections
from kvladder.schema import keys_of
from tests.kit.scripts import script
from tests.test_docs import configurations

settings: Any = script("settings")
jsonschema: Any = importlib.import_module("jsonschema")
SCHEMA = settings.whole()
HOST = "tiers: [{type: host}, "


def wrong(text: str) -> list[str]:
    """What the schema finds wrong with a stack."""
    checker = jsonschema.Draft7Validator(SCHEMA)
    return [error.message for error in checker.iter_errors(yaml.safe_load(text))]


def test_the_pages_of_settings_are_current() -> None:
    for path, text in settings.render().items():
        assert path.read_text(encoding="utf-8") == text, "run python .ci/settings.py"


def test_every_setting_says_what_it_means() -> None:
    lines = [line for line in settings.page().splitlines() if line.startswith("| `")]
    assert len(lines) > 80
    assert not [line for line in lines if line.endswith("|  |")]


def test_the_schema_is_one_and_has_every_section_tier_and_codec() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert {*keys_of(Sections), "tiers"} < set(SCHEMA["properties"])
    assert {f"tier-{name}" for name in BUILT_IN["tiers"]} < set(SCHEMA["$defs"])
    assert {f"codec-{name}" for name in BUILT_IN["codecs"]} < set(SCHEMA["$defs"])
    assert json.loads(settings.SCHEMA.read_text()) == SCHEMA


@pytest.mark.parametrize("text", list(configurations()))
def test_the_schema_accepts_what_pages_show(text: str) -> None:
    assert not wrong(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arena: {sise: 1 GiB}", "'sise' was unexpected"),
        ("host: 1 GiB\nfile: /tmp/a", "'file' was unexpected"),
        ("fetch: {when: sometimes}", "is not valid"),
        ("limits: {priority: 101}", "is not valid"),
        (HOST + "{type: files, capacity: 1 GiB}]", "'path' is a required property"),
        (HOST + "{type: files, path: /a, capacity: 1 GiB, url: b}]", "'url' was unexpected"),
        (HOST + "{type: memory, capacity: 1 GiB, codecs: [{name: zstd, lever: 3}]}]", "'lever'"),
        ("tiers: [{name: a}]", "'type' is a required property"),
    ],
)
def test_the_schema_refuses_what_a_start_refuses(text: str, says: str) -> None:
    assert any(says in one for one in wrong(text)), wrong(text)


def test_the_schema_accepts_variables_and_plug_ins() -> None:
    assert not wrong("limits: {priority: '${TOP}'}\nmodel:\nblock: 1 MiB\ncontrol: /tmp/a")
    assert not wrong(HOST + "{type: mine, colour: red}]")
