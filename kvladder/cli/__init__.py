"""The command line: ``kvladder check``, ``size``, ``plan``, ``replay``, ``serve``, ``stats`` ...

Each command is a function in a module of its own. Its parameters are the command's arguments, its
docstring is the help, and it returns a ``Result``: text, and the same as data for ``--json``. A
command that prints as it runs yields results instead. To add a command, name its function in
``COMMANDS``; ``docs/reference/cli.md`` is made from the declarations by ``.ci/commands.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from signal import SIGINT, SIGPIPE
from typing import Any, Final

import click
from click.shell_completion import shell_complete

from kvladder.cli.base.completion import VARIABLE
from kvladder.cli.base.declared import Commands, Run
from kvladder.cli.output import EXIT_SIGNAL, Failed, Unwritable, say_result
from kvladder.errors import ConfigError

EXIT_UNWRITABLE: Final = 1
EXIT_CONFIG: Final = 2
COMMANDS: Final = {
    "check": "kvladder.cli.check:check",
    "size": "kvladder.cli.size:size",
    "bench": "kvladder.cli.bench:bench",
    "plan": "kvladder.cli.plan:plan",
    "replay": "kvladder.cli.replay:replay",
    "eval": "kvladder.cli.evaluate:eval_",
    "serve": "kvladder.cli.serve:serve",
    "stats": "kvladder.cli.stats:stats",
    "describe": "kvladder.cli.stats:describe",
    "top": "kvladder.cli.running.top:top",
    "inspect": "kvladder.cli.running.inspect:inspect",
    "verify": "kvladder.cli.running.verify:verify",
    "evict": "kvladder.cli.running.evict:evict",
    "change": "kvladder.cli.change:change",
    "drain": "kvladder.cli.change:drain",
    "warm": "kvladder.cli.change:warm",
    "purge": "kvladder.cli.purge:purge",
    "dashboards": "kvladder.cli.dashboards:dashboards",
    "completion": "kvladder.cli.base.completion:completion",
}
"""The function of each command; only those that are used are imported."""


def commands() -> Commands:
    """Return the commands, each imported when it is needed."""
    return Commands(COMMANDS, _version)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names (None: the process's own); return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words)
    except KeyboardInterrupt:
        return EXIT_SIGNAL + SIGINT
    except BrokenPipeError as error:  # the reader of help or of standard error has ended
        return _unwritable(Unwritable(error))
    except Unwritable as error:
        return _unwritable(error)


def _unwritable(error: Unwritable) -> int:
    if error.is_pipe:
        return EXIT_SIGNAL + SIGPIPE
    print(f"kvladder: {error}", file=sys.stderr)
    return EXIT_UNWRITABLE


def _main(words: list[str]) -> int:
    known = commands()
    shell = os.environ.get(VARIABLE)
    if shell:
        return shell_complete(known, {}, "kvladder", VARIABLE, shell)
    try:
        run, given, as_json = known.parse(words)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        error.show()
        return error.exit_code
    return _run(run, given, as_json=as_json)


def _run(run: Run, given: dict[str, Any], *, as_json: bool) -> int:
    """Run a command with these arguments and return the exit code."""
    try:
        say_result(run(**given), as_json=as_json)
    except (ConfigError, ExceptionGroup) as error:
        errors = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        if not all(isinstance(one, ConfigError) for one in errors):
            raise
        print(*(f"kvladder: {one}" for one in errors), sep="\n", file=sys.stderr)
        return EXIT_CONFIG
    except Failed as error:
        if error.result is not None:
            say_result(error.result, as_json=as_json)
        print(f"kvladder: {error}", file=sys.stderr)
        return error.code
    return 0


def _version() -> str:
    try:
        return version("kvladder")
    except PackageNotFoundError:
        return "(run from its source tree)"
