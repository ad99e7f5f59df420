"""`gate history`: the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.options import LEDGER
from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.registry.ledger import LedgerEntry


@click.command("history", short_help="Print the ledger.")
@click.option("--model", help="Only this registered model.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the newest so many.")
@LEDGER
@machine_options
def command(model: str | None, limit: int | None, ledger: Path) -> Outcome:
    """Print the ledger: promotions, refusals, rollbacks, violations and their lifting. Newest last.

    The chain of hashes is verified on reading: a changed or removed line is an error.

    \b
    Examples:
      gate history
      gate history --model digits --limit 5 --json
    """
    from gate.errors import StorageError
    from gate.registry.ledger import Ledger

    if not ledger.exists():
        raise StorageError(
            f"there is no ledger at {ledger}: nothing was promoted or refused from this folder. "
            "Run make repro, or name another file with --ledger."
        )
    entries = [e for e in Ledger(ledger).entries() if model is None or e.model == model]
    shown = entries[-limit:] if limit else entries
    return Outcome(
        Status.DONE,
        {"entries": [entry.to_plain() for entry in shown], "total": len(entries)},
        lambda console: _show(shown, console),
    )


def _show(entries: list[LedgerEntry], console: Console) -> None:
    from gate.report.table import add_row, table

    if not entries:
        console.print("The ledger has no such entries.")
        return
    shown = table(("at", "action", "model", "version", "before", "sha256", "actor", "reason"))
    for entry in entries:
        cells = (
            entry.at,
            entry.action,
            entry.model,
            entry.version or "",
            entry.previous_version or "",
            entry.sha256.short if entry.sha256 else "",
            f"{entry.actor}, {entry.cause}" if entry.cause else entry.actor,
            entry.reason,
        )
        add_row(shown, cells)
    console.print(shown)
