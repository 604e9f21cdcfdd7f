"""Make docs/reference/commands.md from the command line's declarations: ``python .ci/commands.py``.

A test compares the page with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not an installed kvladder
from kvladder.cli import COMMANDS, commands

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
COMMON = {"json", "help"}
"""Arguments that every command has."""

HEAD = """# All commands

`.ci/commands.py` makes this page from the functions that are the commands. A test checks that it is
current. `kvladder COMMAND --help` prints the same. [The command line](cli.md) has examples, exit
codes and completion.

Each command has `--json`, which prints the same as JSON for programs, and `--help`. A command that
prints as it runs prints one JSON object per line.
"""


def table(command: click.Command) -> Iterator[str]:
    """Yield the rows of a table of a command's arguments."""
    with click.Context(command, info_name=f"kvladder {command.name}") as context:
        found = [one for one in command.get_params(context) if one.name not in COMMON]
        rows = [one.get_help_record(context) for one in found if "--help" not in one.opts]
    if rows:
        yield "\n| argument | |\n|---|---|\n"
    for row in rows:
        assert row is not None, "each argument has a help text"
        name, said = (" ".join(text.replace("|", "\\|").split()) for text in row)
        # in Markdown, words in brackets are a reference
        yield f"| `{name}` | {said.replace('[', '&#91;')} |\n"


def section(command: click.Command) -> str:
    """Return the section of one command."""
    with click.Context(command, info_name=f"kvladder {command.name}") as context:
        usage = command.get_usage(context).removeprefix("Usage: ")
    needed = [one for one in command.params if isinstance(one, click.Option) and one.required]
    given = "".join(f"{one.opts[0]} {one.metavar} " for one in needed)
    usage = " ".join(usage.replace("[OPTIONS]", f"{given}[OPTIONS]").split())
    head = f"\n## kvladder {command.name}\n\n{command.help}\n\n```\n{usage}\n```\n"
    return head + "".join(table(command))


def page() -> str:
    """Return the page."""
    known = commands().declared
    return HEAD + "".join(section(known[name]) for name in COMMANDS)


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
