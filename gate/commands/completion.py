"""`gate completion`: what a shell needs to complete commands, options and paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

VARIABLE = "_GATE_COMPLETE"
"""By which the script asks `gate` for completions."""


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@machine_options
def command(shell: str) -> Outcome:
    """Print what makes SHELL complete the commands, options and paths of gate.

    Exit code 0: printed; 2: it can't be.

    \b
    Examples:
      eval "$(gate completion bash)"        # in ~/.bashrc
      eval "$(gate completion zsh)"         # in ~/.zshrc, after compinit
      gate completion fish > ~/.config/fish/completions/gate.fish
    """
    from click.shell_completion import get_completion_class

    maker = get_completion_class(shell)
    assert maker is not None
    group = click.get_current_context().find_root().command
    script = maker(group, {}, "gate", VARIABLE).source()

    def show(console: Console) -> None:
        console.file.write(f"{script}\n")  # as it is: no folding, no tabs taken for columns

    return Outcome(Status.DONE, {"shell": shell, "script": script}, show)
