"""How commands are declared: help, suggestions, JSON, completion, pipes and Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

from kvladder.cli import COMMANDS, commands, main
from kvladder.cli.base.completion import VARIABLE
from kvladder.cli.base.declared import Declared
from kvladder.cli.output import Result
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
STACK = "arena: {size: 1 GiB}\ntiers: [{type: host}, {name: cold, type: memory, capacity: 4 GiB}]\n"
COMMAND = [sys.executable, "-m", "kvladder"]


@pytest.fixture
def stack(tmp_path):
    path = tmp_path / "stack.yaml"
    path.write_text(STACK)
    return str(path)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_argument(name, capsys):
    command = commands().declared[name]
    takes = {*signature(command.run).parameters}
    assert {*(one.name for one in command.params)} == takes | {"json"}
    unexplained = [one.name for one in command.params if not one.help]
    assert not unexplained
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: kvladder {name} ")
    assert all(one.opts[0].rpartition("_")[0] in out for one in command.params)
    assert main([name, "-h"]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chekc", "x"], "No such command 'chekc'. Did you mean 'check'?"),
        (["check", "x", "--modle", "y"], "No such option '--modle'. (Did you mean one of: '--mod"),
        (["check", "x", "--block-tokens", "y"], "'--block-tokens': 'y' is not a valid integer"),
        (["check"], "Missing argument 'CONFIG'"),
        (["completion", "sh"], "'sh' is not one of 'bash', 'zsh', 'fish'"),
        (["size", "--memory", "1GiB"], "Missing option '--model'"),
    ],
)
def test_usage_errors_say_what_was_meant(words, says, capsys):
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_parameters_become_arguments():
    def run(key: str, more: tuple[int, ...] = (), *, wait_s: float = 1.5, all_: bool = False):
        """Do it.

        Parameters
        ----------
        key:
            do it with this
        more:
            and these
        wait_s:
            wait N seconds
            (default %(default)g)
        all_:
            do it with all
        """
        return Result("", (key, more, wait_s, all_))

    command = Declared("run", run)

    def given(*words):
        with command.make_context("run", list(words)) as context:
            found, arguments, as_json = command.invoke(context)
        assert found is run
        return *run(**arguments).data, as_json

    assert given("a") == ("a", (), 1.5, False, False)
    assert given("a", "1", "2", "--wait", "-3", "--all", "--json") == (
        "a",
        (1, 2),
        -3.0,
        True,
        True,
    )
    assert [one.help for one in command.params] == [
        "do it with this",
        "and these",
        "wait N seconds (default 1.5)",
        "do it with all",
        "print JSON, for programs",
    ]


def test_check_prints_its_findings_as_json(stack, capsys):
    assert main(["check", stack, "--json", "--block-tokens", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["warnings"] == []
    assert found["settings"]["tiers[1].capacity"] == {"value": "4 GiB", "origin": "file"}
    assert found["settings"]["arena.reserve"]["origin"] == "default"
    assert main(["check", stack, "--json", "--offline"]) == 0
    assert "found" not in json.loads(capsys.readouterr().out)


def complete(shell, **env):
    """Return the completions that ``shell``'s script asks this program for."""
    done = subprocess.run(
        COMMAND,
        env=os.environ | {"PYTHONPATH": str(ROOT), VARIABLE: f"{shell}_complete", **env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_completes(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{VARIABLE}={shell}_complete" in script
    binary = shutil.which(shell)
    if binary is not None:
        subprocess.run([binary, "-n", "/dev/stdin"], input=script, text=True, check=True)
    words = "kvladder check --off"
    at = "--off" if shell == "fish" else "2"  # fish gives the word itself
    assert "--offline" in "\n".join(complete(shell, COMP_WORDS=words, COMP_CWORD=at))


@pytest.mark.slow
def test_bash_completes_commands_options_and_values(tmp_path):
    binary = tmp_path / "kvladder"
    binary.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m kvladder "$@"\n')
    binary.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        eval "$(kvladder completion bash)"
        look() {{
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _kvladder_completion kvladder
            echo "${{COMPREPLY[@]}}"
        }}
        look kvladder de
        look kvladder completion ''
        look kvladder check --block
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["describe", "bash zsh fish", "--block-tokens"]


@pytest.mark.slow
def test_a_pipe_whose_reader_has_ended_is_no_error(stack):
    for words in (["check", stack, "--json"], ["plan", "--help"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [*COMMAND, *words],
            stdout=write, stderr=subprocess.PIPE, text=True, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        os.close(write)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_an_interrupt_ends_a_command_without_a_traceback(tmp_path):
    fifo = tmp_path / "stack.yaml"
    os.mkfifo(fifo)  # reading it waits
    running = subprocess.Popen(
        [*COMMAND, "check", str(fifo)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with fifo.open("w"):  # opened once the command reads
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, out, err) == (128 + signal.SIGINT, "", "")
