"""A command that judges a foreign file does so in a child process, which ends within limits.

The reference's PyTorch and the file's ONNX Runtime work hand in hand, batch by batch: so the whole
command runs there, and this process only watches it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from gate.bounded.limits import FILE_S, ChildLimits, bytes_of, seconds_of, time_text
from gate.commands.outcome import Outcome, Printed


@dataclass(frozen=True)
class Line:
    """One command line, for whoever repeats it."""

    arguments: tuple[str, ...]
    child: bool
    """Whether foreign files are judged in a child: not where this is one."""


class Measure(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A text with a unit."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number. Fails with the parser's message."""
        try:
            return self._parse(str(value))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


TIME, SIZE = Measure("time", seconds_of), Measure("size", bytes_of)
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
    """Give a command the options `--time-limit` and `--memory-limit`; it gets their `limits`."""
    time_limit = click.option(
        "--time-limit", type=TIME, metavar="TIME", envvar="GATE_TIME_LIMIT", show_envvar=True,
        help=f"What takes longer is not judged: 90s, 30m, 2h. Default: {time_text(usual_s)}.",
    )  # fmt: skip
    memory_limit = click.option(
        "--memory-limit", type=SIZE, metavar="SIZE", envvar="GATE_MEMORY_LIMIT", show_envvar=True,
        help="What takes more memory is not judged: 8GB, 512MiB. Default: 80 % of the machine's, "
        "or of what its container may have.",
    )  # fmt: skip

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def limited(time_limit: float | None, memory_limit: int | None, **options: Any) -> Any:
            limits = ChildLimits.of_command(time_limit, memory_limit, usual_s=usual_s)
            return command(limits=limits, **options)

        return time_limit(memory_limit(limited))

    return decorate


def in_child(command: Callable[..., Outcome]) -> Callable[..., Outcome | Printed]:
    """Let a child run the command whose arguments click has parsed, where the line asks for it."""

    @functools.wraps(command)
    def watched(limits: ChildLimits, **options: Any) -> Outcome | Printed:
        context = click.get_current_context()
        line = context.obj
        if not (isinstance(line, Line) and line.child):
            return command(**options)
        from gate.bounded.call import call_here

        place = options.get("model") or options.get("plan") or "of parts"
        done = call_here(
            "gate.cli:in_child",
            {"arguments": line.arguments},
            limits=limits,
            what=f"gate {context.info_name} {place}",
        )
        return Printed(int(done["code"]), str(done["json"]))

    return watched
