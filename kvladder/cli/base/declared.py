"""Commands from functions: parameters become arguments, and docstrings become help."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click
from click.exceptions import NoSuchCommand

from kvladder.cli.output import Result, Results

Run = Callable[..., Result | Results]
_SAID = re.compile(r"^(\w+):\n((?:    .*\n?)+)", re.MULTILINE)
"""Matches the description of one parameter in a docstring."""
_JSON: Final = "json"
_CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_TYPES: Final[Mapping[Any, Any]] = {
    str: click.STRING,
    int: click.INT,
    float: click.FLOAT,
    Path: click.Path(path_type=Path, readable=False),  # commands say more about what is wrong
}


class Declared(click.Command):
    """One command, declared by a function.

    Parameters without ``*`` before them are positional; ``tuple[T, ...]`` takes any number.
    Parameters after ``*`` are options: ``wait_s`` is ``--wait``, ``all_`` is ``--all``, and
    ``Literal`` lists the accepted values. The docstring's first sentence is the short help, and
    its section *Parameters* explains each argument. Every command has ``--json``; a function with
    the parameter ``json`` is told of it.
    """

    def __init__(self, name: str, run: Run) -> None:
        says, _, more = (getdoc(run) or "").partition("\n\nParameters\n----------\n")
        said = {key: " ".join(text.split()) for key, text in _SAID.findall(more)}
        takes = dict(signature(run, eval_str=True).parameters)
        self._tells_json = takes.pop(_JSON, None) is not None
        super().__init__(
            name,
            context_settings=_CONTEXT,
            params=[
                *(_parameter(one, said.get(one.name, "")) for one in takes.values()),
                click.Option([f"--{_JSON}", _JSON], is_flag=True, help="print JSON, for programs"),
            ],
            help=says,
            short_help=says.partition(".\n")[0].rstrip("."),
        )
        self.run = run

    def invoke(self, ctx: click.Context) -> tuple[Run, dict[str, Any], bool]:
        """Return the function, its arguments, and whether JSON is wanted; nothing is run."""
        given = dict(ctx.params)
        as_json = given[_JSON]
        if not self._tells_json:
            del given[_JSON]
        return self.run, given, as_json

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage with the options behind the positional arguments."""
        pieces = [piece for piece in self.collect_usage_pieces(ctx) if piece != "[OPTIONS]"]
        formatter.write_usage(ctx.command_path, " ".join([*pieces, "[OPTIONS]"]))


class Commands(click.Group):
    """All commands, by name; each is imported when it is needed.

    Parameters
    ----------
    where:
        By name, ``module:function``.
    """

    def __init__(self, where: Mapping[str, str], version: Callable[[], str]) -> None:
        super().__init__(
            "kvladder",
            context_settings=_CONTEXT,
            help="Check, size and operate a tiered KV cache for LLM engines.",
        )
        self._where = where
        self._version = version
        self.params.append(
            click.Option(
                ["-V", "--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._say_version,
                help="Show the version and exit.",
            )
        )

    def _say_version(self, ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            click.echo(f"kvladder {self._version()}")
            ctx.exit()

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they are declared."""
        del ctx
        return list(self._where)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None if there is none of this name."""
        del ctx
        return self.declared[cmd_name] if cmd_name in self._where else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, or say which one may be meant."""
        known = not args or args[0] in self._where or args[0].startswith("-")
        if not known and not ctx.resilient_parsing:
            raise NoSuchCommand(args[0], possibilities=self._where, ctx=ctx)
        return super().resolve_command(ctx, args)

    @cached_property
    def declared(self) -> Mapping[str, Declared]:
        """Commands by name."""
        return _Lazy(self._where)

    def parse(self, words: list[str]) -> tuple[Run, dict[str, Any], bool]:
        """Return the function that a command line calls, its arguments, and ``--json``.

        Raises
        ------
        click.UsageError
            There is no such command or option, or a value is missing or of the wrong type.
        click.exceptions.Exit
            Only help or the version was wanted, and is printed.
        """
        with self.make_context("kvladder", words) as context:
            found: tuple[Run, dict[str, Any], bool] = self.invoke(context)
            return found


class _Lazy(dict[str, Declared]):
    """Commands by name, each made on first use."""

    def __init__(self, where: Mapping[str, str]) -> None:
        super().__init__()
        self._where = where

    def __missing__(self, name: str) -> Declared:
        module, _, function = self._where[name].partition(":")
        made = self[name] = Declared(name, getattr(import_module(module), function))
        return made


def _parameter(one: Parameter, says: str) -> click.Parameter:
    """Return the argument for one of a function's parameters."""
    kind, count = one.annotation, 1
    if get_origin(kind) is tuple:
        kind, count = get_args(kind)[0], -1
    elif get_origin(kind) is not Literal:
        kind = next(iter(get_args(kind)), kind)  # ``X | None`` is parsed as X
    is_choice = get_origin(kind) is Literal
    parsed = click.Choice(get_args(kind)) if is_choice else _TYPES.get(kind)
    if "%(" in says:
        says %= {"default": one.default}
    takes: dict[str, Any] = {"type": parsed, "help": says}
    is_needed = one.default is one.empty
    flag = "--" + one.name.removesuffix("_s").rstrip("_").replace("_", "-")
    if one.kind is not one.KEYWORD_ONLY:
        shown = None if is_needed or count < 0 else f"[{one.name.upper()}]"
        required = is_needed and count == 1
        return click.Argument([one.name], required, nargs=count, metavar=shown, **takes)
    if kind is bool:
        return click.Option([flag, one.name], is_flag=True, help=says)
    if not is_needed:
        takes["default"] = one.default
    if not is_choice:
        name = flag.strip("-").replace("-", "_").upper()
        takes["metavar"] = "N" if kind in {int, float} else name
    return click.Option([flag, one.name], required=is_needed, **takes)
