"""The fields behind a namespace are kept as text: bounded, without secrets, comparable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.tiers.fields import BYTES_MAX, FIELDS_MAX, changes, is_told, listed, told

PLAIN = {"engine": "vllm", "config": json.dumps({"rope_scaling": None, "layers": 2, "list": [1]})}


def changed(**fields):
    """Return the reported changes of a namespace with these fields instead."""
    return changes(told(PLAIN), told({**PLAIN, **fields}))


def test_a_change_within_json_names_its_leaf():
    assert told(PLAIN) == {
        "engine": "vllm",
        "config.rope_scaling": "null",
        "config.layers": "2",
        "config.list": "[1]",
        "block.salt": "",
    }
    other = {"rope_scaling": {"factor": 2.0, "type": "yarn"}, "layers": 2, "list": [1]}
    (text,) = changed(config=json.dumps(other))
    assert text == "config.rope_scaling changed from null to {factor: 2.0, type: yarn}"
    back = changes(told({**PLAIN, "config": json.dumps(other)}), told(PLAIN))
    assert back == ["config.rope_scaling changed from {factor: 2.0, type: yarn} to null"]
    assert changes(told(PLAIN), told(PLAIN)) == []


def test_a_change_within_an_object_of_a_class_names_its_leaf_too():
    one, other = (json.dumps(["Own", {"inner": ["Own", {"x": x}]}]) for x in (1, 2))
    assert changes(told({"a": one}), told({"a": other})) == ["a.inner.x changed from 1 to 2"]
    assert told({"a": one}) == {"a": "Own", "a.inner": "Own", "a.inner.x": "1", "block.salt": ""}


def test_readable_changes_come_before_digests_and_repeated_ones_once():
    whole = {"weights": "ab" * 32, "torch": "2.9", "text": "x" * 500}
    for name in ("hf_config", "hf_text_config"):
        whole[f"vllm.{name}"] = json.dumps({"theta": 1})
    other = {"weights": "cd" * 32, "torch": "3.0", "text": "y" * 500}
    for name in ("hf_config", "hf_text_config"):
        other[f"vllm.{name}"] = json.dumps({"theta": 2})
    assert changes(told(whole), told(other)) == [
        "torch changed from 2.9 to 3.0",
        "vllm.hf_config.theta changed from 1 to 2",
        "text changed",
        "weights changed",
    ]
    assert listed(["a"] * 3) == "a, a, a"
    assert listed(["a"] * 9) == "a, a, a, a, and 5 more"


def test_added_and_removed_fields_are_named():
    assert changed(new="1", long="x" * 500) == ["new added (1)", "long added"]
    assert changes(told({**PLAIN, "old": ""}), told(PLAIN)) == ["old removed (empty)"]


SECRET = "hunter2-correct-horse"


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": SECRET},
        {"environment.AWS_SECRET_ACCESS_KEY": SECRET},
        {"load": json.dumps({"extra": {"password": SECRET}})},
        {"load": json.dumps(["Config", {"hf_token": SECRET}])},
        {"url": f"redis://user:{SECRET}@host/0"},
        {"load": json.dumps({"url": f"https://host/?token={SECRET}"})},
    ],
)
def test_secrets_are_kept_as_digests(fields):
    (name, value), *_ = fields.items()
    kept = told(fields, salt=SECRET)
    assert SECRET not in json.dumps(kept)
    assert kept["block.salt"].startswith("digest ")
    assert told(fields, salt="other") != kept
    if "//" not in value:
        other = told({name: value.replace(SECRET, "another")}, salt=SECRET)
        (text,) = changes(kept, other)
        assert text.endswith(" changed")


def test_numbers_under_names_like_token_are_shown():
    assert told({"config": json.dumps({"bos_token_id": 5})})["config.bos_token_id"] == "5"


fields_of_any_kind = st.dictionaries(
    st.text(max_size=300),
    st.text(max_size=300) | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=30,
    ).map(json.dumps),
    max_size=8,
)  # fmt: skip


@pytest.mark.slow
@given(fields_of_any_kind, fields_of_any_kind)
def test_a_value_of_any_kind_is_kept_and_compared(one, other):
    kept = told(one), told(other)
    assert all(map(is_told, kept))
    assert json.loads(json.dumps(kept)) == [*kept]
    assert all(isinstance(text, str) for text in changes(*kept))


@pytest.mark.parametrize(
    "fields",
    [
        {f"f{n}": "x" * 100 for n in range(2 * FIELDS_MAX)},
        {"deep": "[" * 100_000},
        {"deep": '{"a":' * 500 + "1" + "}" * 500},
        {"config": json.dumps({f"{n}" * 20: "y" * 100 for n in range(FIELDS_MAX)})},
        {"n" * 10_000: "x"},
    ],
)
def test_the_kept_record_is_bounded(fields):
    kept = told(fields, salt="s")
    assert is_told(kept)
    assert len(json.dumps(kept)) < 2 * BYTES_MAX
    assert told({**fields, "engine": "another"}, salt="s") != kept


@pytest.mark.parametrize("wrong", [None, [], 1, {"a": 1}, {1: "a"}, {"a": "x" * (BYTES_MAX + 1)}])
def test_foreign_records_are_recognized(wrong):
    assert not is_told(wrong)
