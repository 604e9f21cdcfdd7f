"""``kvladder completion``: prints a script by which a shell completes commands and options."""

from __future__ import annotations

from typing import Final, Literal

import click
from click.shell_completion import get_completion_class

from kvladder.cli.output import Result

VARIABLE: Final = "_KVLADDER_COMPLETE"
"""The environment variable by which the script asks this program for completions."""


def completion(shell: Literal["bash", "zsh", "fish"]) -> Result:
    """Print a script by which a shell completes commands, options and paths.

    For bash add `eval "$(kvladder completion bash)"` to ~/.bashrc, for zsh the same with zsh to
    ~/.zshrc. For fish write the script to ~/.config/fish/completions/kvladder.fish.

    Parameters
    ----------
    shell:
        print the script for this shell
    """
    made = get_completion_class(shell)
    assert made is not None, "the accepted shells are click's"
    script = made(click.Command("kvladder"), {}, "kvladder", VARIABLE).source()
    return Result(script, {"shell": shell, "script": script})
