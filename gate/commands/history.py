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
    """Print the ledger: promotions, refusals, rollbacks, violations. Newest last.

    The chain of hashes is verified on reading: a changed or removed line is an error.

    \b
    Examples:
      gate history
      gate history --model digits --limit 5 --json
    """
    return _read(ledger, model=model, limit=limit)


def _read(path: Path, *, model: str | None, limit: int | None) -> Outcome:
    from gate.errors import StorageError
    from gate.registry.ledger import Ledger

    if not path.exists():
        raise StorageError(
            f"there is no ledger at {path}: nothing was promoted or refused from this folder. "
            "Run make repro, or name another file with --ledger."
        )
    entries = [e for e in Ledger(path).entries() if model is None or e.model == model]
    shown = entries[-limit:] if limit else entries
    return Outcome(
        Status.DONE,
        {"entries": [entry.to_plain() for entry in shown], "total": len(entries)},
        lambda console: _show(shown, console),
    )


def _show(entries: list[LedgerEntry], console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from gate.report.wording import printable

    if not entries:
        console.print("The ledger has no such entries.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("at", "action", "model", "version", "before", "sha256", "actor", "reason"):
        table.add_column(heading, overflow="fold")
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
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
