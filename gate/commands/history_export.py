"""`gate history export`: the ledger as lines of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.given import Written
from gate.commands.outcome import Outcome, machine_options
from gate.commands.state import existing_ledger, with_state
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console


@click.command("export")
@click.option(
    "-o", "--output", type=Written("file"), metavar="FILE", help="Default: the standard output."
)
@with_state
@machine_options
def command(output: Path | None, state: str) -> Outcome:
    """Write the ledger's lines as they are, one JSON text each, after its chain was verified.

    They are what gate history import takes, and what other programs read. Signatures stay in the
    database: keep a checkpoint with them (gate history checkpoint).

    \b
    Examples:
      gate history export -o ledger-2026-11.jsonl
      gate history export | jq 'select(.action == "promoted")'
    """
    from gate.ledger.jsonl import exported
    from gate.storage.atomic import write_bytes

    if output is None and "--json" in click.get_current_context().obj.arguments:
        raise click.UsageError("what is exported is lines of JSON: name their file with -o.")
    ledger = existing_ledger(state)
    lines = list(exported(ledger))
    if output is not None:
        write_bytes(output, b"".join(lines))
    plain = {
        "ledger": ledger.place,
        "output": None if output is None else str(output),
        "lines": len(lines),
    }
    return Outcome(Status.DONE, plain, lambda console: _show(lines, output, console))


def _show(lines: list[bytes], output: Path | None, console: Console) -> None:
    if output is not None:
        console.print(f"{len(lines)} lines in {output}")
        return
    for line in lines:
        click.echo(line, nl=False)
