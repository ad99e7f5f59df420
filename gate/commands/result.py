"""What a command hands back, and how it is printed: for people, or as one JSON text."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from gate.commands.status import Status
from gate.errors import GateError, PackageMissing
from gate.package import extras
from gate.package.loaded import find_broken

if TYPE_CHECKING:
    from rich.console import Console

    from gate.storage.record import Record


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    status: Status
    plain: Mapping[str, Any]
    """What `--json` prints: JSON values only."""
    show: Callable[[Console], None]
    """Prints the same for people."""
    record: Record | None = None
    """What it is about: the story of a decision, or what the lint found."""
    sentence: str = ""
    """What came of it beside the verdict, for CI files; empty: nothing."""


@dataclass(frozen=True)
class Printed:
    """The result of a command that a child has printed already."""

    code: int
    json: str
    """What is left to print: the text of `--json`."""


def machine_options(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """Give a command the options `--json` and `--debug`, which `gate.cli` reads itself.

    Only an outcome ends the command well: click would take its own `Exit`, raised by foreign
    code, for the exit code of a command that is done.
    """
    command = _with_packages(_without_exit(command))
    for name, help_text in (
        ("--debug", "Show the traceback of an unexpected error."),
        ("--json", "Print one JSON text on stdout, nothing else."),
    ):
        command = click.option(name, is_flag=True, expose_value=False, help=help_text)(command)
    return command


def _without_exit(command: Callable[..., _Result]) -> Callable[..., _Result]:
    @functools.wraps(command)
    def guarded(*arguments: Any, **options: Any) -> _Result:
        try:
            return command(*arguments, **options)
        except click.exceptions.Exit as error:
            raise SystemExit(error.exit_code) from error

    return guarded


def _with_packages(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """Say in one line which extra is missing: before anything is done where the command can't do
    without it, else when it turns out."""

    @functools.wraps(command)
    def complete(*arguments: Any, **options: Any) -> _Result:
        path = click.get_current_context().command_path
        try:
            extras.require(path.partition(" ")[2])
            return command(*arguments, **options)
        except PackageMissing as error:
            raise type(error)(f"{path} {error}") from error
        except (GateError, click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            lacks: PackageMissing | None = find_broken(path.partition(" ")[2])
            if lacks is None and isinstance(error, ModuleNotFoundError):
                lacks = extras.missing(error)
            if lacks is None:
                raise
            raise type(lacks)(f"{path} {lacks}") from error

    return complete


def console(stream: TextIO) -> Console:
    """A console that colours only a terminal (and not with NO_COLOR), and never cuts a line
    elsewhere: in a pipe or file a table is as wide as it must be."""
    from rich.console import Console

    class Quiet(Console):
        """Of its reader that went away `gate.cli` speaks: rich would exit with 1, 'rejected'."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    terminal = stream.isatty()
    return Quiet(
        file=stream,
        force_terminal=terminal,
        width=None if terminal else 10_000,
        markup=False,
        highlight=False,
        emoji=False,
    )


def as_json(plain: Mapping[str, Any]) -> str:
    """`plain` as indented JSON in ASCII. NaN is refused: records write it as a word."""
    return json.dumps(plain, indent=2, allow_nan=False)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send all that is printed meanwhile to stderr, that of C libraries too."""
    import ctypes

    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        # What they printed may still be in their own buffer, which exit would empty into stdout.
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
