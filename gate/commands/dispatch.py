"""A command that does something by itself, and has subcommands as well."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class Dispatch(click.Command):
    """A command whose first argument may be the name of a subcommand.

    `gate export PKG.MODULE:FACTORY …` exports, `gate export compare …` is another command. A
    click.Group can't do that: it takes every first argument for a subcommand. So this command looks
    at the first argument itself, and hands over where it is one of `subcommands`: names to modules
    whose `command` it is, imported when it is called. A FACTORY has a colon, so neither hides the
    other.
    """

    def __init__(self, *args: Any, subcommands: Mapping[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.subcommands = subcommands

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """That of the subcommand, if the first argument names one."""
        if args and args[0] in self.subcommands:
            found: click.Command = importlib.import_module(self.subcommands[args[0]]).command
            return found.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
