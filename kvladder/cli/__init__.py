"""The command line: ``kvladder check``, ``size``, ``stats``, ``purge`` and ``--version``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event

from kvladder.cli.check import check
from kvladder.cli.purge import WAIT_S, purge, read_salt
from kvladder.cli.size import STEP, size
from kvladder.cli.stats import describe, stats
from kvladder.errors import ConfigError
from kvladder.gpu.requests.groups import ITEM_BYTES

EXIT_CONFIG = 2
WATCH_S_MAX = 86400


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (None: the process's) names; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        print(arguments.run(arguments))
    except (ConfigError, ExceptionGroup) as error:
        errors = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        if not all(isinstance(one, ConfigError) for one in errors):
            raise
        print(*(f"kvladder: {one}" for one in errors), sep="\n", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvladder", description="A ladder of places for the KV cache of an LLM engine."
    )
    parser.add_argument("--version", action="version", version=f"kvladder {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    checking = commands.add_parser(
        "check",
        help="check a configuration and print the resolved stack",
        description="Check a configuration and print the resolved stack: every setting, what it "
        "comes to, and who set it; and look whether the directories, servers, keys and libraries "
        "that it names are there. Exits with 2 and the reasons if a cache would not open.",
    )
    checking.add_argument("config", type=Path, help="the YAML file")
    checking.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG_JSON",
        help="a model's config.json (or its folder), to print blocks and tokens as well",
    )
    checking.add_argument(
        "--dtype", choices=sorted(ITEM_BYTES), help="dtype of the KV cache (default: the model's)"
    )
    checking.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens per block of the engine"
    )
    checking.add_argument(
        "--offline", action="store_true", help="do not look at the paths and servers it names"
    )
    checking.set_defaults(run=_check)
    _add_size(commands.add_parser)
    _add_running(commands.add_parser)
    purging = commands.add_parser(
        "purge",
        help="remove blocks from every tier, and overwrite them",
        description="Remove the blocks of a cache salt, of a namespace, or all: from a running "
        "cache that answers at its control socket, else from directories and servers of the "
        "configuration. Their bytes in files are overwritten. Exits with 2 if it is not done.",
    )
    purging.add_argument("config", type=Path, help="the YAML file")
    salts = purging.add_mutually_exclusive_group()
    salts.add_argument(
        "--salt",
        help="only blocks of requests with this cache salt; others on this machine can read it in "
        "the list of processes",
    )
    salts.add_argument(
        "--salt-file",
        metavar="FILE",
        help="the same, as the only line of a file; - for standard input",
    )
    purging.add_argument("--namespace", metavar="HEX", help="as an engine prints it at start")
    purging.add_argument("--all", action="store_true", help="every block, whosesoever")
    purging.add_argument(
        "--wait",
        type=float,
        default=WAIT_S,
        metavar="S",
        help=f"how long a running cache may take (default {WAIT_S:g} seconds)",
    )
    purging.set_defaults(run=_purge)
    return parser


def _purge(arguments: argparse.Namespace) -> str:
    salt = arguments.salt
    return purge(
        arguments.config,
        namespace=arguments.namespace,
        salt=salt if arguments.salt_file is None else read_salt(arguments.salt_file),
        everything=arguments.all,
        wait_s=arguments.wait,
    )


def _add_running(add: Callable[..., argparse.ArgumentParser]) -> None:
    target = "a control socket, or the YAML file that names it"
    counting = add("stats", help="what a running cache counts, asked at its control socket")
    counting.add_argument("target", type=Path, help=target)
    counting.add_argument("--json", action="store_true", help="everything, as JSON")
    counting.add_argument("--watch", type=float, metavar="S", help="again every S seconds")
    counting.set_defaults(run=_stats)
    describing = add("describe", help="the resolved configuration of a running cache")
    describing.add_argument("target", type=Path, help=target)
    describing.set_defaults(run=_describe)


def _describe(arguments: argparse.Namespace) -> str:
    return describe(arguments.target)


def _stats(arguments: argparse.Namespace) -> str:
    every_s: float | None = arguments.watch
    if every_s is not None and not 0 < every_s <= WATCH_S_MAX:
        hint = f"expected more than 0 and at most {WATCH_S_MAX} seconds"
        raise ConfigError(f"{every_s:g}", path="--watch", hint=hint)
    counts = stats(arguments.target, as_json=arguments.json)
    with suppress(KeyboardInterrupt):
        while every_s is not None:
            print(counts, end="\n\n", flush=True)
            Event().wait(every_s)
            counts = stats(arguments.target, as_json=arguments.json)
    return counts


def _check(arguments: argparse.Namespace) -> str:
    return check(
        arguments.config,
        model=arguments.model,
        dtype=arguments.dtype,
        block_tokens=arguments.block_tokens,
        offline=arguments.offline,
    )


def _add_size(add: Callable[..., argparse.ArgumentParser]) -> None:
    sizing = add(
        "size",
        help="how many blocks and sequences of a model fit into a memory",
        description="Print the bytes of a token, the pools that the layers make, and how many "
        "blocks and sequences fit into a device's memory and into each tier of a stack.",
    )
    sizing.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="CONFIG_JSON",
        help="a model's config.json (or its folder)",
    )
    sizing.add_argument("--memory", required=True, metavar="SIZE", help="for example 40GiB")
    sizing.add_argument(
        "--context", type=int, required=True, metavar="N", help="tokens of a sequence"
    )
    sizing.add_argument(
        "--step",
        type=int,
        default=STEP,
        metavar="N",
        help=f"tokens computed at a time, as with chunked prefill (default {STEP})",
    )
    sizing.add_argument(
        "--dtype", choices=sorted(ITEM_BYTES), help="dtype of the KV cache (default: the model's)"
    )
    sizing.add_argument("--block-tokens", type=int, default=16, metavar="N", help="default 16")
    sizing.add_argument(
        "--checkpoint-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens between kept states of a hybrid model (default 0: none are kept)",
    )
    sizing.add_argument("--stack", type=Path, metavar="YAML", help="a stack whose tiers to size")
    sizing.set_defaults(run=_size)


def _size(arguments: argparse.Namespace) -> str:
    return size(
        arguments.model,
        memory=arguments.memory,
        context=arguments.context,
        step=arguments.step,
        dtype=arguments.dtype,
        block_tokens=arguments.block_tokens,
        checkpoint_tokens=arguments.checkpoint_tokens,
        stack=arguments.stack,
    )


def _version() -> str:
    try:
        return version("kvladder")
    except PackageNotFoundError:
        return "(run from its source tree)"
