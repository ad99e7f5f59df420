"""Results, exit codes, JSON output; run a function with limits."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
from click.core import ParameterSource

from gate import installation
from gate.errors import GateError, PackageMissing
from gate.sandbox.limits import (
    CHECK_S,
    FILE_S,
    SandboxLimits,
    parse_duration,
    parse_size,
    time_text,
)
from gate.storage.safe_text import replace_controls

if TYPE_CHECKING:
    from rich.console import Console

    from gate.storage.record import Record


class Dispatch(click.Command):
    """A command whose first argument may be the name of a subcommand.

    `gate export PKG.MODULE:FACTORY …` exports; `gate export compare …` is a subcommand. click.Group
    does not support this: it treats every first argument as a subcommand. `subcommands` maps names
    to `module:function`, imported on use. A FACTORY has a colon, so it differs from every name.
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
        """Return the context of the subcommand, if the first argument names one."""
        if args and args[0] in self.subcommands:
            module, _, name = self.subcommands[args[0]].partition(":")
            command: click.Command = getattr(importlib.import_module(module), name)
            return command.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


# 0    passed, or done
# 1    rejected by the policy
# 2    not judged: bad input, a missing device, an unreachable server, a bug in the gate
# 130  interrupted


class ExitCode(IntEnum):
    """The value is the exit code."""

    DONE = 0
    REJECTED = 1
    NOT_JUDGED = 2
    INTERRUPTED = 130

    @classmethod
    def from_verdict(cls, verdict: str) -> ExitCode:
        """Return the exit code of a verdict."""
        return {"PASS": cls.DONE, "FAIL": cls.REJECTED, "ERROR": cls.NOT_JUDGED}[verdict]

    @classmethod
    def from_promotion(cls, outcome: str, verdict: str | None = None) -> ExitCode:
        """Return DONE unless refused; then the code of the verdict, but at least REJECTED.

        A file with a PASS may be refused for other reasons.
        """
        if outcome != "refused":
            return cls.DONE
        return max(cls.REJECTED, cls.from_verdict(verdict or "FAIL"))


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class CommandResult:
    """The result of a command."""

    status: ExitCode
    plain: Mapping[str, Any]
    """The output of `--json`: JSON values only."""
    show: Callable[[Console], None]
    """Prints the result on a console."""
    record: Record | None = None
    """The summary of a decision, or the lint report."""
    sentence: str = ""
    """A result in addition to the verdict, for CI files; may be empty."""
    finish: Callable[[], str] = str
    """Completes the command and returns a line to print, which may be empty. It is called after
    `show`, but before `--json` is printed, and also if printing fails."""


@dataclass(frozen=True)
class Printed:
    """The result of a command whose child process has already printed its output."""

    code: int
    json: str
    """The text of `--json`, which the parent prints."""


def machine_options(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """Add the options `--json` and `--debug` to a command; `gate.cli` reads them itself.

    A missing extra is reported in one line: before the command runs if it always needs the extra,
    otherwise when an import fails.
    """

    @functools.wraps(command)
    def guarded(*arguments: Any, **options: Any) -> _Result:
        path = click.get_current_context().command_path
        name = path.partition(" ")[2]
        try:
            installation.require(name)
            return command(*arguments, **options)
        except click.exceptions.Exit as error:
            # Raised by user code: click would treat it as the normal end of a command.
            raise SystemExit(error.exit_code) from error
        except PackageMissing as error:
            raise type(error)(f"{path} {error}") from error
        except (GateError, click.ClickException, click.Abort):
            raise
        except Exception as error:
            missing: PackageMissing | None = installation.find_broken(name)
            if missing is None and isinstance(error, ModuleNotFoundError):
                missing = installation.missing(error)
            if missing is None:
                raise
            raise type(missing)(f"{path} {missing}") from error

    decorated: Callable[..., _Result] = guarded
    for name, help_text in (
        ("--debug", "Show the traceback of an unexpected error."),
        ("--json", "Print one JSON text on stdout, nothing else."),
    ):
        decorated = click.option(name, is_flag=True, expose_value=False, help=help_text)(decorated)
    return decorated


def console(stream: TextIO) -> Console:
    """Return a console that uses colors only on a terminal (and not with NO_COLOR).

    In a pipe or file, lines are never wrapped or truncated.
    """
    from rich.console import Console

    class Quiet(Console):
        """Leaves a closed pipe to `gate.cli`: rich would exit with 1, which means rejected."""

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


def print_lines(console: Console, *lines: str, style: str = "") -> None:
    """Print each text on a separate line, without terminal control characters."""
    from rich.text import Text

    for line in lines:
        text = " ".join(line.expandtabs(1).splitlines())  # spaces align columns
        console.print(Text(replace_controls(text), style=style))


def text_result(
    plain: Mapping[str, Any],
    *lines: str,
    status: ExitCode = ExitCode.DONE,
    style: str = "",
) -> CommandResult:
    """Return a result that is shown as these lines."""
    return CommandResult(status, plain, lambda console: print_lines(console, *lines, style=style))


def table_result(
    plain: Mapping[str, Any],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *lines: str,
    status: ExitCode = ExitCode.DONE,
    right: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> CommandResult:
    """Return a result that is shown as a table, unless it has no rows, and these lines.

    `right`: the headings of right-aligned columns. `styles`: the style of a cell by its text.
    """

    def show(console: Console) -> None:
        from rich.text import Text

        from gate.report.terminal import build_table

        by_text = {text: Text(text, style=style) for text, style in (styles or {}).items()}
        cells = ([by_text.get(cell, cell) for cell in row] for row in rows)
        if rows:
            console.print(build_table(headings, cells, right=right))
        print_lines(console, *lines)

    return CommandResult(status, plain, show)


def as_json(plain: Mapping[str, Any]) -> str:
    """Return `plain` as indented ASCII JSON. Raises ValueError for NaN (a string in records)."""
    return json.dumps(plain, indent=2, allow_nan=False)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, including the output of C libraries."""
    import ctypes

    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        # C libraries have their own buffer, which would otherwise be written to stdout at exit.
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


@dataclass(frozen=True)
class Line:
    """The arguments of this command line."""

    arguments: tuple[str, ...]
    child: bool
    """True if commands run in a child process; False in the child itself."""


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A parameter type whose values are parsed by a function that raises ValueError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the result of the function. Raises BadParameter with its message."""
        try:
            return self._parse(str(value))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


TIME, SIZE = Parsed("time", parse_duration), Parsed("size", parse_size)

_Command = Callable[..., Any]

SERVICE_TIME_LIMIT = click.option(
    "--time-limit", "time_limit_s", type=TIME, metavar="TIME", envvar="GATE_TIME_LIMIT",
    show_envvar=True, help="A file that takes longer to read or run is not deployed. "
    f"Default: {time_text(FILE_S)}.",
)  # fmt: skip

SERVICE_MEMORY_LIMIT = click.option(
    "--memory-limit", type=SIZE, metavar="SIZE", envvar="GATE_MEMORY_LIMIT", show_envvar=True,
    help="A file that takes more memory is not deployed. Default: 4GiB, or 80 % of less memory.",
)  # fmt: skip


def limit_options(usual_s: float) -> Callable[[_Command], _Command]:
    """Add `--time-limit` and `--memory-limit` to a command, which receives them as `limits`."""
    time_limit = click.option(
        "--time-limit", type=TIME, metavar="TIME", envvar="GATE_TIME_LIMIT", show_envvar=True,
        help=f"Time limit: 90s, 30m, 2h. Beyond it, exit code 2. Default: {time_text(usual_s)}.",
    )  # fmt: skip
    memory_limit = click.option(
        "--memory-limit", type=SIZE, metavar="SIZE", envvar="GATE_MEMORY_LIMIT", show_envvar=True,
        help="Memory limit: 8GB, 512MiB. Beyond it, exit code 2. Default: 80 % of the machine's or "
        "container's memory.",
    )  # fmt: skip

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def limited(time_limit: float | None, memory_limit: int | None, **options: Any) -> Any:
            limits = SandboxLimits.for_command(time_limit, memory_limit, usual_s=usual_s)
            return command(limits=limits, **options)

        return time_limit(memory_limit(limited))

    return decorate


PARSED = "gate.commands.result.parsed"
"""Key in a context's `meta` for all options, including those that the command class removes."""


def run_with_limits(
    command: Callable[..., CommandResult],
) -> Callable[..., CommandResult | Printed]:
    """Run the command in a child process, unless this process is the child.

    PyTorch and ONNX Runtime alternate batch by batch, so the whole command runs there. It receives
    the parsed options as JSON (`gate.cli.in_child`).
    """

    @functools.wraps(command)
    def watched(limits: SandboxLimits, **options: Any) -> CommandResult | Printed:
        context = click.get_current_context()
        line = context.obj
        if not (isinstance(line, Line) and line.child):
            return command(**options)
        from gate.sandbox.process import run_in_child

        parsed = context.meta.get(PARSED, context.params)
        stated = [
            name
            for name in parsed
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        ]
        subject = options.get("model") or options.get("plan") or "of parts"
        response = run_in_child(
            "gate.cli:in_child",
            {
                "command": context.info_name,
                "options": {name: encode(value) for name, value in parsed.items()},
                "stated": stated,
                "arguments": line.arguments,
            },
            limits=limits,
            task=f"gate {context.info_name} {subject}",
        )
        return Printed(int(response["code"]), str(response["json"]))

    return watched


def within_limits(command: Callable[..., CommandResult]) -> Callable[..., Any]:
    """Add `--json`, `--debug` and limits to a command, and run it in a child process."""
    return machine_options(limit_options(CHECK_S)(run_with_limits(command)))


_PATH = "path"


def encode(value: Any) -> Any:
    """Return an option's value as JSON. Raises TypeError for a type that can't be decoded again."""
    if isinstance(value, Path):
        return {_PATH: str(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"cannot send {type(value).__name__} to a child process")


def decode(value: Any) -> Any:
    """Return the value that `encode` encoded."""
    if isinstance(value, dict):
        return Path(value[_PATH])
    return tuple(map(decode, value)) if isinstance(value, list) else value
