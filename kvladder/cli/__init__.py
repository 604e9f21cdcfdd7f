"""The command line: ``kvladder check stack.yaml`` and ``kvladder --version``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvladder.cli.check import check
from kvladder.cli.model import ITEM_BYTES
from kvladder.errors import ConfigError

EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (None: the process's) names; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        print(
            check(
                arguments.config,
                model=arguments.model,
                dtype=arguments.dtype,
                block_tokens=arguments.block_tokens,
            )
        )
    except ConfigError as error:
        print(f"kvladder: {error}", file=sys.stderr)
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
        "comes to, and who set it. Exits with 2 and the reason if it is wrong.",
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
    return parser


def _version() -> str:
    try:
        return version("kvladder")
    except PackageNotFoundError:
        return "(run from its source tree)"
