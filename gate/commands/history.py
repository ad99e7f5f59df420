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

_NONE = "The ledger has no such entries."
_WIDE = 70
"""Columns from which the year and the digest fit."""


@click.command("history", short_help="Print the ledger.")
@click.option("--model", help="Only this registered model.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the newest so many.")
@click.option("-v", "--verbose", is_flag=True, help="All columns, and the reasons in full.")
@LEDGER
@machine_options
def command(model: str | None, limit: int | None, verbose: bool, ledger: Path) -> Outcome:
    """Print the ledger: promotions, refusals, rollbacks, violations and their lifting. Newest last.

    One line an entry; the whole text with -v or --json. The chain of hashes is verified on
    reading: a changed or removed line is an error.

    \b
    Examples:
      gate history
      gate history -v --limit 3
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
        lambda console: (_show_all if verbose else _show)(shown, console),
    )


def _show(entries: list[LedgerEntry], console: Console) -> None:
    """One line an entry: what does not fit is cut, and the reason first."""
    from rich import box
    from rich.table import Table

    from gate.report.table import add_row

    if not entries:
        console.print(_NONE)
        return
    several = len({entry.model for entry in entries}) > 1
    wide = console.width >= _WIDE
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("at", no_wrap=True)
    shown.add_column("action", no_wrap=True)
    if several:
        shown.add_column("model", no_wrap=True, overflow="ellipsis", max_width=20)
    shown.add_column("ver", justify="right", no_wrap=True)
    if wide:
        shown.add_column("sha256", no_wrap=True)
    shown.add_column("reason", no_wrap=True, overflow="ellipsis", ratio=1)
    for entry in entries:
        cells = [_short(entry.at, wide=wide), entry.action]
        cells += [entry.model] if several else []
        cells.append(entry.version or "")
        cells += [entry.sha256.short if entry.sha256 else ""] if wide else []
        add_row(shown, (*cells, " ".join(entry.reason.split())))
    console.print(shown)


def _short(at: str, *, wide: bool) -> str:
    """`2026-11-22 17:10`, or without the year; of another form as it is."""
    minute = at[:16].replace("T", " ")
    return minute if wide else minute[5:]


def _show_all(entries: list[LedgerEntry], console: Console) -> None:
    from gate.report.table import add_row, table

    if not entries:
        console.print(_NONE)
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
