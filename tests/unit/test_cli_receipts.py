"""``kvladder purge`` with receipts: running, at rest, and ``--verify``."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvladder import open_cache
from kvladder.cli import main
from kvladder.errors import ConfigError
from kvladder.forgetting.receipt import Signer, read_receipt
from kvladder.keys import START, KeyScheme
from kvladder.layout import Layout
from tests.patience import until

pytestmark = pytest.mark.slow

KEY = "a key of 16 and more characters"
LAYOUT = Layout(block_tokens=4, block_bytes=4096, fields={"model": "receipts"})
SPACE = LAYOUT.namespace()
SCHEME = KeyScheme(SPACE, block_tokens=4)


def prompt(*path, salt=""):
    """Return the keys of a prompt of one block for each number of ``path``."""
    tokens = [number for number in path for _ in range(4)]
    return SCHEME.chain(tokens, parent=SCHEME.root(salt=salt))


@pytest.fixture
def config(tmp_path):
    files = {"type": "files", "path": str(tmp_path / "kv"), "capacity": "4 MiB", "when": "commit"}
    whole = {
        "arena": {"size": "1 MiB"},
        "control": str(tmp_path / "kv.sock"),
        "forget": {"path": str(tmp_path / "purges"), "key": KEY, "name": "tests"},
        "tiers": [{"type": "host"}, files],
    }
    path = tmp_path / "stack.yaml"
    path.write_text(json.dumps(whole))
    return str(path)


@contextmanager
def running(config):
    with open_cache(config, layout=LAYOUT) as cache:
        cache.name_blocks = lambda tokens, salt: [
            SCHEME.chain(tokens, parent=SCHEME.root(salt=salt))
        ]
        yield cache


def save(cache, keys, **options):
    cache.save(keys, parent=START, **options).commit()
    until(lambda: cache.idle() and all(cache.holding(keys, levels=["files"])))


def read(path):
    receipt = read_receipt(path.read_bytes(), "receipt")
    assert Signer(KEY).wrong(receipt) == ""
    return receipt


def test_a_salt_is_purged_and_its_receipt_checked_while_the_cache_runs(config, tmp_path, capsys):
    out = tmp_path / "receipt.json"
    with running(config) as cache:
        save(cache, prompt(1, 2), salt="red")
        save(cache, prompt(3), salt="blue")
        assert main(["purge", config, "--salt", "red", "--receipt", str(out)]) == 0
        receipt = read(out)
        assert f"kv.sock: receipt {receipt.id}: complete" in capsys.readouterr().out
        assert (receipt.deployment, receipt.complete) == ("tests", True)
        assert [(one.name, one.blocks, one.erased) for one in receipt.levels] == [
            ("host", 2, 0),
            ("files", 2, 2),
        ]
        assert main(["purge", config, "--verify", str(out)]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"receipt {receipt.id} of {receipt.asked_at}: signature valid",
            "host: clean",
            "files: clean",
        ]
        save(cache, prompt(1, 2), salt="red")
        assert main(["purge", config, "--verify", str(out)]) == 0
        assert "files: clean, 2 blocks saved since" in capsys.readouterr().out
    assert main(["purge", config, "--verify", str(out)]) == 0, "at rest, too"
    assert "files: clean, 2 blocks saved since" in capsys.readouterr().out


def test_a_prefix_an_age_and_a_session_are_purged(config, tmp_path, capsys):
    tokens = tmp_path / "prefix.json"
    tokens.write_text(json.dumps([number for number in (1, 2) for _ in range(4)] + [7]))
    out = tmp_path / "receipt.json"
    purge = ["purge", config, "--receipt", str(out)]
    with running(config) as cache:
        whole, beside = prompt(1, 2, 3, 4), prompt(1, 9)
        save(cache, whole)
        save(cache, beside)
        assert main([*purge, "--prefix", str(tokens)]) == 0
        assert cache.holding([*whole, *beside]) == [False] * 5 + [True]
        assert (read(out).keys, read(out).scope["tokens"]) == (4, 9)
        assert main(["purge", config, "--verify", str(out)]) == 0
        save(cache, prompt(5), session="mine")
        assert main([*purge, "--session", "mine"]) == 0
        assert cache.holding(prompt(5)) == [False]
        capsys.readouterr()
        assert main([*purge, "--session", "mine"]) == 2
        assert "session 'mine' is not known" in capsys.readouterr().err
        assert main([*purge, "--older-than", "1 h"]) == 0
        assert cache.holding(beside[1:]) == [True]
        assert main([*purge, "--older-than", "1 ms"]) == 0
        assert cache.holding(beside[1:]) == [False]
        long = prompt(*range(100, 8000))
        save(cache, long[-1:])
        tokens.write_text(json.dumps([number for number in range(100, 8000) for _ in range(4)]))
        assert main([*purge, "--prefix", str(tokens)]) == 0, "of 31,600 tokens"
        assert cache.holding(long[-1:]) == [False]
        tokens.write_text("[1, 2]")
        assert main([*purge, "--prefix", str(tokens)]) == 2
        assert "shorter than a block" in capsys.readouterr().err


def test_a_purge_at_rest_has_a_receipt_that_the_next_cache_confirms(config, tmp_path, capsys):
    out = tmp_path / "receipt.json"
    with running(config) as cache:
        save(cache, prompt(1, 2), salt="red")
        save(cache, prompt(3), salt="blue")
    purge = ["purge", config, "--namespace", SPACE.hex(), "--salt", "red", "--receipt", str(out)]
    assert main(purge) == 0
    receipt = read(out)
    assert [(one.name, one.state, one.blocks) for one in receipt.levels] == [("files", "done", 2)]
    assert main(["purge", config, "--verify", str(out)]) == 0
    with running(config) as cache:
        assert cache.holding([*prompt(1, 2), *prompt(3)]) == [False, False, True]
        assert main(["purge", config, "--verify", str(out)]) == 0
    assert main(["purge", config, "--session", "x"]) == 2
    assert "only a running cache can tell which blocks these are" in capsys.readouterr().err


def test_what_is_left_and_what_was_changed_is_found(config, tmp_path, capsys):
    out = tmp_path / "receipt.json"
    with running(config) as cache:
        save(cache, prompt(1, 2), salt="red")
        assert main(["purge", config, "--salt", "blue", "--receipt", str(out)]) == 0
    receipt = read(out)
    receipt.salt_digest = "00" * 8
    out.write_bytes(receipt.as_json())
    capsys.readouterr()
    assert main(["purge", config, "--verify", str(out)]) == 2
    assert "not valid: it was changed after it was signed" in capsys.readouterr().err
    from kvladder.keys import salt_digest

    receipt.salt_digest = salt_digest(SPACE, "red").hex()  # as if red had been purged
    Signer(KEY).sign(receipt)
    out.write_bytes(receipt.as_json())
    assert main(["purge", config, "--verify", str(out)]) == 2
    assert "files: left, 2 blocks from before the purge" in capsys.readouterr().err
    with running(config):
        assert main(["purge", config, "--verify", str(out)]) == 2
        assert "files: left, 2 blocks from before the purge" in capsys.readouterr().err
    Signer("another key of the deployment").sign(receipt)
    out.write_bytes(receipt.as_json())
    assert main(["purge", config, "--verify", str(out)]) == 2
    assert "it is signed with key" in capsys.readouterr().err


def test_the_key_changes_while_the_cache_runs_and_old_receipts_stay_valid(config, tmp_path, capsys):
    file, old, new = tmp_path / "key", tmp_path / "old.json", tmp_path / "new.json"
    whole = json.loads(Path(config).read_text())
    del whole["forget"]["key"]
    Path(config).write_text(
        json.dumps(whole | {"forget": whole["forget"] | {"key_file": str(file)}})
    )
    other = "another key of the deployment"
    file.write_text(f"{KEY}\n")

    def valid(path):
        code = main(["purge", config, "--verify", str(path)])
        captured = capsys.readouterr()
        assert ("signed with key" in captured.err) == bool(code)
        return not code

    with running(config) as cache:
        save(cache, prompt(1, 2), salt="red")
        assert main(["purge", config, "--salt", "red", "--receipt", str(old)]) == 0
        file.write_text(f"{other}\n{KEY}\n")
        assert main(["purge", config, "--salt", "blue", "--receipt", str(new)]) == 0
        assert Signer(other).wrong(read_receipt(new.read_bytes(), "new")) == ""
        capsys.readouterr()
        assert (valid(old), valid(new)) == (True, True)
        file.write_text(f"{other}\n")
        assert (valid(old), valid(new)) == (False, True)
        file.write_text("short")
        assert main(["purge", config, "--salt", "green"]) == 0, "it keeps the key that it had"
        file.write_text(f"{other}\n{KEY}\n")
    capsys.readouterr()
    assert (valid(old), valid(new)) == (True, True), "at rest, too"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--session", "a", "--all"], "--session, --all: more than one is given"),
        (["--session", "a", "--salt", "b"], "more than one is given"),
        (["--older-than", "30"], "--older-than: 30 (expected a duration with a unit"),
        (["--prefix", "/nowhere"], "--prefix: /nowhere cannot be read"),
        (["--prefix", "BAD"], "expected a JSON list of token ids"),
        (["--prefix", "NEGATIVE"], "expected a JSON list of token ids"),
        (["--verify", "/nowhere"], "/nowhere: No such file"),
        (["--verify", "BAD"], "format None (expected 'kvladder-purge-receipt/1')"),
        (["--salt", "a", "--receipt", "/nowhere/r.json"], "no running"),
    ],
)
def test_wrong_arguments_are_refused(config, tmp_path, capsys, arguments, says):
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "negative.json").write_text("[-1]")
    names = {"BAD": tmp_path / "bad.json", "NEGATIVE": tmp_path / "negative.json"}
    arguments = [str(names.get(one, one)) for one in arguments]
    code = main(["purge", config, *arguments])
    if says == "no running":
        assert code == 0, "nothing was stored, and no namespace is named: there is no receipt"
        return
    assert code == 2
    assert says in capsys.readouterr().err


def test_two_processes_do_not_share_a_ledger(config, tmp_path, capsys):
    with running(config):
        (tmp_path / "kv.sock").rename(tmp_path / "elsewhere.sock")
        try:
            code = main(["purge", config, "--namespace", SPACE.hex()])
        finally:
            (tmp_path / "elsewhere.sock").rename(tmp_path / "kv.sock")
        assert code == 2
        assert "in use by" in capsys.readouterr().err
        other = json.loads(Path(config).read_text())
        other |= {"control": str(tmp_path / "other.sock"), "tiers": [{"type": "host"}]}
        with pytest.raises(ConfigError, match=r"forget\.path.*in use by another process"):
            open_cache(other, layout=LAYOUT)
