"""The command line: ``kvladder check``, ``size``, ``stats``, ``purge`` and ``--version``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from kvladder.cli.check import check
from kvladder.cli.purge import WAIT_S, purge
from kvladder.cli.size import STEP, size
from kvladder.cli.stats import describe, stats
from kvladder.errors import ConfigError
from kvladder.gpu.requests.groups import ITEM_BYTES

EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (None: the process's) names; returns the exit code."""
    given = vars(_parser().parse_args(argv))
    try:
        print(given.pop("run")(**given))
    except (ConfigError, ExceptionGroup) as error:
        errors = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        if not all(isinstance(one, ConfigError) for one in errors):
            raise
        print(*(f"kvladder: {one}" for one in errors), sep="\n", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def _argument(name: str, says: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return name, {"help": says, **more}


_CONFIG = _argument("config", "the YAML file", type=Path)
_TARGET = _argument("target", "a control socket, or the YAML file that names it", type=Path)
_MODEL = "a model's config.json (or its folder)"
_DTYPE = _argument(
    "--dtype", "dtype of the KV cache (default: the model's)", choices=sorted(ITEM_BYTES)
)
_SALT = (
    "only blocks of requests with this cache salt; others on this machine can read it in the list "
    "of processes"
)
_WAIT = f"how long a running cache may take (default {WAIT_S:g} seconds)"
_KEPT = "tokens between kept states of a hybrid model (default 0: none are kept)"
_STEP = f"tokens computed at a time, as with chunked prefill (default {STEP})"
_COMMANDS: Final = {
    check: (
        "check a configuration and print the resolved stack",
        (
            "Check a configuration and print the resolved stack: every setting, what it comes to, "
            "and who set it; and look whether the directories, servers, keys and libraries that it "
            "names are there. Exits with 2 and the reasons if a cache would not open."
        ),
        [
            _CONFIG,
            _argument("--model", f"{_MODEL}, to print blocks and tokens", type=Path),
            _DTYPE,
            _argument("--block-tokens", "tokens per block of the engine", type=int, metavar="N"),
            _argument(
                "--offline", "do not look at the paths and servers it names", action="store_true"
            ),
        ],
    ),
    size: (
        "how many blocks and sequences of a model fit into a memory",
        (
            "Print the bytes of a token, the pools that the layers make, and how many blocks and "
            "sequences fit into a device's memory and into each tier of a stack."
        ),
        [
            _argument("--model", _MODEL, type=Path, required=True),
            _argument("--memory", "for example 40GiB", required=True, metavar="SIZE"),
            _argument("--context", "tokens of a sequence", type=int, required=True, metavar="N"),
            _argument("--step", _STEP, type=int, default=STEP, metavar="N"),
            _DTYPE,
            _argument("--block-tokens", "default 16", type=int, default=16, metavar="N"),
            _argument("--checkpoint-tokens", _KEPT, type=int, default=0, metavar="N"),
            _argument("--stack", "a stack whose tiers to size", type=Path, metavar="YAML"),
        ],
    ),
    stats: (
        "what a running cache counts, asked at its control socket",
        None,
        [
            _TARGET,
            _argument("--json", "everything, as JSON", action="store_true", dest="as_json"),
            _argument("--watch", "again every S seconds", type=float, metavar="S", dest="every_s"),
        ],
    ),
    describe: ("the resolved configuration of a running cache", None, [_TARGET]),
    purge: (
        "remove blocks from every tier, and overwrite them",
        (
            "Remove the blocks of a cache salt, of a namespace, or all: from a running cache that "
            "answers at its control socket, else from directories and servers of the "
            "configuration. Their bytes in files are overwritten. Exits with 2 if it is not done."
        ),
        [
            _CONFIG,
            _argument("--salt", _SALT),
            _argument(
                "--salt-file",
                "the same, as the only line of a file; - for standard input",
                metavar="FILE",
            ),
            _argument("--namespace", "as an engine prints it at start", metavar="HEX"),
            _argument("--all", "every block, whosesoever", action="store_true", dest="everything"),
            _argument("--wait", _WAIT, type=float, default=WAIT_S, metavar="S", dest="wait_s"),
        ],
    ),
}
"""By the function that takes what the arguments say, and whose name is the command's."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvladder", description="A ladder of places for the KV cache of an LLM engine."
    )
    parser.add_argument("--version", action="version", version=f"kvladder {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run, (says, more, arguments) in _COMMANDS.items():
        command = commands.add_parser(run.__name__, help=says, description=more)
        for name, settings in arguments:
            command.add_argument(name, **settings)
        command.set_defaults(run=run)
    return parser


def _version() -> str:
    try:
        return version("kvladder")
    except PackageNotFoundError:
        return "(run from its source tree)"
