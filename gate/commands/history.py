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
    """One line an entry: what does not fit is cut off the reason."""
    from rich.text import Text

    from gate.story.wording import printable

    several, wide = len({entry.model for entry in entries}) > 1, console.width >= _WIDE
    rows = [_cells(entry, several=several, wide=wide) for entry in entries]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
    for entry, row in zip(entries, rows, strict=True):
        start = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        line = Text(f"{start}  {printable(entry.reason)}")
        line.truncate(console.width, overflow="ellipsis")
        console.print(line, no_wrap=True)
    if not entries:
        console.print(_NONE)


def _cells(entry: LedgerEntry, *, several: bool, wide: bool) -> list[str]:
    """What stands before the reason."""
    minute = entry.at[:16].replace("T", " ")
    from gate.story.wording import printable

    cells = [minute if wide else minute[5:], entry.action]
    cells += [_cut(entry.model, 20 if wide else 8)] if several else []
    cells.append(entry.version or "-")
    cells += [entry.sha256.short if entry.sha256 else ""] if wide else []
    return [printable(cell) for cell in cells]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _show_all(entries: list[LedgerEntry], console: Console) -> None:
    """Everything that people ask of an entry, in full."""
    from rich.text import Text

    from gate.story.wording import printable

    for entry in entries:
        before = f", before: {entry.previous_version}" if entry.previous_version else ""
        version = f" version {entry.version}{before}" if entry.version else ""
        rows = (
            ("", f"{entry.at} {entry.action} {entry.model}{version}"),
            ("  file    ", str(entry.sha256 or "")),
            ("  policy  ", str(entry.policy_sha256 or "")),
            ("  actor   ", f"{entry.actor}, {entry.cause}" if entry.cause else entry.actor),
            ("  reason  ", entry.reason),
        )
        for label, text in rows:
            if text:
                console.print(Text(f"{label}{printable(text)}"))
    if not entries:
        console.print(_NONE)
