"""The command line: ``kvladder check``, ``size``, ``plan``, ``replay``, ``serve``, ``stats`` ...

Each command is a function. Its parameters are the command's arguments, and ``--help`` prints its
docstring.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, getdoc, signature
from typing import Any, Final, get_args

from kvladder.cli.bench import Interrupted, bench
from kvladder.cli.check import check
from kvladder.cli.dashboards import dashboards
from kvladder.cli.evaluate import TooMuch, eval_
from kvladder.cli.output import Unwritable, say
from kvladder.cli.plan import plan
from kvladder.cli.purge import purge
from kvladder.cli.replay import replay
from kvladder.cli.serve import serve
from kvladder.cli.size import size
from kvladder.cli.stats import describe, stats
from kvladder.errors import ConfigError

EXIT_TOO_MUCH: Final = 1
EXIT_UNWRITABLE: Final = 1
EXIT_CONFIG: Final = 2
EXIT_SIGNAL: Final = 128
"""The exit code that a shell reports for a program ended by a signal, less its number."""
EXIT_PIPE: Final = EXIT_SIGNAL + 13
COMMANDS: Final = (
    *(check, size, bench, plan, replay, eval_, serve, stats, describe, purge),
    dashboards,
)
_SAID = re.compile(r"^(\w+):\n((?:    .*\n?)+)", re.MULTILINE)
"""Matches the description of one parameter in a docstring."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names (None: the process's own); return the exit code."""
    given = vars(_parser().parse_args(argv))
    try:
        return _run(**given)
    except Unwritable as error:
        if error.is_pipe:
            return EXIT_PIPE
        print(f"kvladder: {error}", file=sys.stderr)
        return EXIT_UNWRITABLE


def _run(run: Callable[..., str], **given: Any) -> int:
    """Run a command with these arguments and return the exit code."""
    try:
        say(run(**given))
    except (ConfigError, ExceptionGroup) as error:
        errors = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        if not all(isinstance(one, ConfigError) for one in errors):
            raise
        print(*(f"kvladder: {one}" for one in errors), sep="\n", file=sys.stderr)
        return EXIT_CONFIG
    except Interrupted as error:
        print(f"kvladder: {error}", file=sys.stderr)
        return EXIT_SIGNAL + error.signal
    except TooMuch as error:
        say(error.report)
        print(f"kvladder: {error}", file=sys.stderr)
        return EXIT_TOO_MUCH
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvladder", description="Check, size and operate a tiered KV cache for LLM engines."
    )
    parser.add_argument("--version", action="version", version=f"kvladder {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run in COMMANDS:
        says, _, more = (getdoc(run) or "").partition("\n\nParameters\n----------\n")
        command = commands.add_parser(
            run.__name__.rstrip("_"), help=says.partition(".\n")[0].rstrip("."), description=says
        )
        said = dict(_SAID.findall(more))
        for one in signature(run, eval_str=True).parameters.values():
            _add(command, one, " ".join(said.get(one.name, "").split()))
        command.set_defaults(run=run)
    return parser


def _add(command: argparse.ArgumentParser, one: Parameter, says: str) -> None:
    """Add the argument for one of a command's parameters; ``wait_s`` becomes ``--wait``."""
    kind = next(iter(get_args(one.annotation)), one.annotation)  # ``X | None`` is parsed as X
    flag = "--" + one.name.removesuffix("_s").rstrip("_").replace("_", "-")
    if one.kind is not one.KEYWORD_ONLY:
        command.add_argument(
            one.name, type=kind, help=says, nargs=None if one.default is one.empty else "?"
        )
    elif kind is bool:
        command.add_argument(flag, dest=one.name, action="store_true", help=says)
    else:
        required = one.default is one.empty
        command.add_argument(
            flag,
            dest=one.name,
            type=kind,
            required=required,
            default=None if required else one.default,
            metavar="N" if kind in {int, float} else None,
            help=says,
        )


def _version() -> str:
    try:
        return version("kvladder")
    except PackageNotFoundError:
        return "(run from its source tree)"
