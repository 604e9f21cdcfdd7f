"""Receipts, scopes, the ledger, and the table of parents and times, each for itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.forgetting.check import Looker
from kvladder.forgetting.ledger import PurgeLedger, read_keys
from kvladder.forgetting.receipt import LevelResult, Receipt, Signer, read_receipt
from kvladder.forgetting.scope import PurgeScope
from kvladder.keys import START, BlockKey
from kvladder.tiers.ladder.records.lineage import KEEP, MATCH, ROWS_MIN, UNKNOWN, Lineage

SIGNER = Signer("a key of the tests")
Parents = dict[tuple[int, ...], tuple[int, ...] | None]
HEX = "ab" * 32


def key(*path: int) -> BlockKey:
    return BlockKey(hashlib.sha256(repr(path).encode()).digest())


def receipt(**options: Any) -> Receipt:
    return Receipt(
        id="20260102T030405-00c0ffee",
        deployment="tests",
        namespace="00" * 32,
        version="1",
        asked_at="2026-01-02T03:04:05.000000+00:00",
        scope={"kind": "all"},
        **options,
    )


def test_blocks_that_this_deployment_did_not_save_leave_a_check_unsure() -> None:
    looker = Looker(receipt(), [], None)
    assert looker.judged("host", "", owed=False).finding == "clean"
    looker.take([key(1), key(2)])
    found = looker.judged("far", "", owed=False)
    assert (found.finding, found.unknown, found.left) == ("unsure", 2, 0)
    assert looker.judged("far", "it cannot tell", owed=False).finding == "unsure"


# ---- scopes


@pytest.mark.parametrize(
    ("scope", "kind"),
    [
        ({"salt": "a"}, "salt"),
        ({"all": True}, "all"),
        ({"session": "a"}, "session"),
        ({"tokens": [1, 2]}, "prefix"),
        ({"tokens": [1, 2], "salt": "a"}, "prefix"),
        ({"keys": [HEX], "salt": "a"}, "prefix"),
        ({"older_than_s": 0}, "age"),
    ],
)
def test_a_scope_has_one_kind(scope: dict[str, Any], kind: str) -> None:
    found = msgspec.convert(scope, PurgeScope)
    assert found.kind == kind
    told = json.dumps(found.told())
    assert '"a"' not in told or kind == "session", "no salt is told"
    assert HEX not in told


@pytest.mark.parametrize(
    "scope",
    [
        {},
        {"salt": ""},
        {"salt": "a", "all": True},
        {"session": "a", "salt": "b"},
        {"tokens": [1], "keys": [HEX]},
        {"tokens": []},
        {"tokens": [-1]},
        {"tokens": [1 << 32]},
        {"keys": ["zz" * 32]},
        {"keys": [HEX[:-1]]},
        {"older_than_s": -1},
        {"older_than_s": 1e300},
        {"session": "a" * 257},
        {"what": 1},
    ],
)
def test_a_wrong_scope_is_refused(scope: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(scope, PurgeScope)


# ---- receipts


def test_any_change_of_a_receipt_breaks_its_signature() -> None:
    one = receipt(levels=[LevelResult(name="files", type="files")], salt_digest="0011")
    SIGNER.sign(one)
    assert SIGNER.wrong(read_receipt(one.as_json(), "r")) == ""
    data = json.loads(one.as_json())
    for path in (["id"], ["asked_at"], ["salt_digest"], ["scope", "kind"], ["namespace"]):
        changed = json.loads(one.as_json())
        at = changed
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] += "0"
        found = read_receipt(json.dumps(changed).encode(), "r")
        assert "it was changed" in SIGNER.wrong(found), path
    data["levels"][0]["state"] = "done"
    assert "it was changed" in SIGNER.wrong(read_receipt(json.dumps(data).encode(), "r"))
    data["signature"] = None
    assert "no signature" in SIGNER.wrong(read_receipt(json.dumps(data).encode(), "r"))
    data["signature"] = {"algorithm": "none", "key_id": "", "value": ""}
    assert "expected 'hmac-sha256'" in SIGNER.wrong(read_receipt(json.dumps(data).encode(), "r"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"[" * 100_000,
        b"7",
        b"[]",
        b"{}",
        b'{"format": "kvladder-purge-receipt/2"}',
        b'{"format": "kvladder-purge-receipt/1"}',
        b'{"format": 1}',
        b"\xff",
        b" " * (1 << 20) + b"{}",
    ],
)
def test_what_is_no_receipt_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="r: "):
        read_receipt(data, "r")


# ---- the ledger


def test_the_ledger_keeps_what_is_owed_with_its_blocks(tmp_path: Path) -> None:
    ledger = PurgeLedger(tmp_path / "purges", SIGNER)
    one = receipt(levels=[LevelResult(name="files", type="files")])
    ledger.begin(one, [key(1), key(2)])
    (owed,) = ledger.owed()
    assert (owed.keys, owed.complete) == (2, False)
    assert ledger.keys(owed) == [key(1), key(2)]
    one.levels[0].state = "done"
    ledger.write(one)
    assert [*ledger.owed()] == []
    stored = read_receipt((ledger.path / f"{one.id}.json").read_bytes(), "r")
    assert stored.complete
    path = ledger.path / f"{one.id}.keys"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match="not those of the receipt"):
        ledger.keys(owed)
    path.unlink()
    with pytest.raises(ConfigError, match="keep both files together"):
        ledger.keys(owed)
    owed.id = "../../etc/passwd"
    with pytest.raises(ConfigError, match="expected the id of a receipt"):
        read_keys(ledger.path, owed)
    ledger.close()


def test_a_torn_write_leaves_the_receipt_before(tmp_path: Path) -> None:
    ledger = PurgeLedger(tmp_path, SIGNER)
    one = receipt(levels=[LevelResult(name="files", type="files")])
    ledger.begin(one, [])
    (tmp_path / f"{one.id}.json.new").write_bytes(b'{"format"')  # a process was killed here
    assert [found.id for found in ledger.owed()] == [one.id]
    ledger.close()


def test_a_ledger_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"forget\.path"):
        PurgeLedger(tmp_path / "file" / "purges", SIGNER)


# ---- parents and times


def test_the_table_tells_descent_as_a_model_does(tmp_path: Path) -> None:
    random = Random(7)
    for _ in range(20):
        table = Lineage(0)
        parents: Parents = {}
        for _ in range(60):
            path = tuple(random.randint(1, 2) for _ in range(random.randint(1, 6)))
            first = random.randint(0, len(path) - 1)
            some = [path[: n + 1] for n in range(first, len(path))]
            is_known = random.random() < 0.9
            parent = (key(*path[:first]) if first else START) if is_known else None
            table.note([key(*one) for one in some], range(len(some)), parent, 1.0)
            for one in some:
                parents[one] = one[:-1]
            if not is_known:
                parents[some[0]] = None
        end = random.choice([*parents])
        paths = [*parents, (9, 9)]
        judge = table.descends([key(*end)])
        assert judge([key(*one) for one in paths]).tolist() == [
            told(one, end, parents) for one in paths
        ]


def told(one: tuple[int, ...], end: tuple[int, ...], parents: Parents) -> int:
    """Return what the table should tell of a block."""
    if one == end:
        return MATCH
    if one == ():
        return KEEP
    parent = parents.get(one)
    return UNKNOWN if parent is None else told(parent, end, parents)


def test_the_table_tells_what_descends_from_the_last_of_some_blocks_and_what_is_newer() -> None:
    table = Lineage(0)
    table.note([key(1), key(1, 1), key(1, 1, 1)], range(3), START, 1.0)
    table.note([key(1, 2)], [0], key(1), 1.0)
    judge = table.descends([key(1), key(1, 1)])
    asked = [key(1), key(1, 1), key(1, 1, 1), key(1, 2)]
    assert judge(asked).tolist() == [MATCH, MATCH, MATCH, KEEP]
    mark = table.mark
    table.note([key(3)], [0], START, 2.0)
    assert table.until(mark)([key(1), key(3)]).tolist() == [MATCH, KEEP]


def test_the_table_survives_its_process_and_a_change_of_size(tmp_path: Path) -> None:
    path = tmp_path / "lineage"
    table = Lineage(0, path)
    keys = [key(n) for n in range(ROWS_MIN + 10)]
    for n, one in enumerate(keys):
        table.note([one], [0], START, 1.0 + n)
    mark = table.mark
    table.note([key(-1)], [0], START, 1e6)
    del table  # as if the process was killed
    for rows in (0, 3 * ROWS_MIN, 0):
        again = Lineage(rows, path)
        assert again.mark == mark + 1
        judge = again.until(mark)
        assert judge([key(-1), keys[-1], keys[5]]).tolist() == [KEEP, MATCH, UNKNOWN]
        assert again.before(5000.0)([keys[-1], key(-1)]).tolist() == [MATCH, KEEP]
        again.close()
        again.close()
        again.note([key(0)], [0], START, 0.0)  # no effect
    copy = Lineage.kept(path)
    assert copy is not None
    assert copy.until(mark)([key(-1), keys[-1]]).tolist() == [KEEP, MATCH]
    assert Lineage.kept(tmp_path / "none") is None
    path.write_bytes(b"?" * 1000)
    assert Lineage(0, path).mark == 0, "a damaged file is made anew"


def test_blocks_between_saved_ones_are_linked() -> None:
    table = Lineage(0)
    keys = [key(*range(1, n + 2)) for n in range(4)]
    table.note(keys, [0, 3], START, 1.0, links=True)
    assert table.descends(keys[:1])(keys).tolist() == [MATCH] * 4
    assert table.before(2.0)(keys).tolist() == [MATCH, UNKNOWN, UNKNOWN, MATCH]


# ---- settings


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"key": "0123456789abcdef"}, "forget.path: missing"),
        ({"path": "/tmp/x"}, "forget.key: missing (set forget.key_file or forget.key)"),
        ({"path": "/tmp/x", "key": "short"}, "forget.key: expected one line of at least 16"),
        ({"path": "/tmp/x", "key": "0" * 16, "key_file": "k"}, "forget.key: both are set"),
        ({"path": "", "key": "0" * 16}, "forget.path: ''"),
        ({"path": "/tmp/x", "kye": "0" * 16}, "forget.kye"),
    ],
)
def test_wrong_settings_say_where(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"host": "1 MiB", "forget": section}, env={})
    assert says in str(caught.value)


def test_the_key_may_be_in_a_file_and_is_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    section = {"path": str(tmp_path), "key_file": str(path)}
    config = load_config({"host": "1 MiB", "forget": section}, env={})
    with pytest.raises(ConfigError, match="expected a readable file with one secret in each line"):
        _ = config.forget.secret
    path.write_text("0123456789abcdef\n")
    assert config.forget.secret == "0123456789abcdef"
    path.write_text("short\n")
    with pytest.raises(ConfigError, match=r"forget\.key_file"):
        _ = config.forget.secret
    shown = load_config(
        {"host": "1 MiB", "forget": {"path": str(tmp_path), "key": "never shown" * 2}}, env={}
    )
    assert "never shown" not in str(shown.rows())
    assert config.forget.of(0) == tmp_path
    assert config.forget.of(2) == tmp_path / "dp2"
