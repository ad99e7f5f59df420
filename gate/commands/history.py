"""`gate history`: the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.commands.dispatch import Dispatch
from gate.commands.given import Given
from gate.commands.history_verified import verified
from gate.commands.outcome import Outcome, machine_options
from gate.commands.signing import TRUST
from gate.commands.state import existing_ledger, with_state
from gate.commands.status import Status
from gate.errors import EvidenceError

if TYPE_CHECKING:
    from rich.console import Console

    from gate.ledger.entry import LedgerEntry

_NONE = "The ledger has no such entries."
_WIDE = 70
"""Columns from which the year and the digest fit."""


@dataclass(frozen=True)
class _Line:
    """An entry, where it stands, and by which key it was signed."""

    entry: LedgerEntry
    number: int = 0
    key_id: str | None = None


class _Proof(TypedDict):
    """What is to be proven, and by whose signatures."""

    verify: bool
    checkpoint: Path | None
    trust: Path | None


@click.command(
    "history",
    cls=Dispatch,
    subcommands={
        name: f"gate.commands.history_{name}" for name in ("export", "import", "checkpoint")
    },
    short_help="Print the ledger, and prove it.",
)
@click.option("--model", help="Only this registered model.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the newest so many.")
@click.option("-v", "--verbose", is_flag=True, help="All columns, signers, the reasons in full.")
@click.option(
    "--verify", is_flag=True,
    help="Print no lines: prove the chain, and that trusted writers signed it.",
)  # fmt: skip
@click.option(
    "--checkpoint", type=Given(EvidenceError, "what gate history checkpoint wrote"), metavar="FILE",
    help="With --verify: prove, too, that all lines are there that were there when it was made.",
)  # fmt: skip
@TRUST
@with_state
@machine_options
def command(
    model: str | None, limit: int | None, verbose: bool, state: str, **proof: Unpack[_Proof]
) -> Outcome:
    """Print the ledger: promotions, refusals, rollbacks, violations and their lifting. Newest last.

    One line an entry; the whole text with -v or --json. The chain of hashes is verified on
    reading: a changed or removed line is an error. With --verify, exit code 1: something was
    changed, removed, or not signed by a trusted writer, and by which line it shows.

    \b
    Subcommands, each with its own --help:
      gate history export                   its lines, as JSON
      gate history import FILE              the lines of a ledger of an earlier version
      gate history checkpoint               where it ends now, signed, for an auditor to keep

    \b
    Examples:
      gate history
      gate history -v --limit 3
      gate history --model digits --limit 5 --json
      gate history --verify --trust trust.yaml
      gate history --verify --trust trust.yaml --checkpoint 2026-11.json
    """
    if proof["verify"]:
        return verified(state, trust=proof["trust"], checkpoint=proof["checkpoint"])
    if proof["checkpoint"]:
        raise click.UsageError("--checkpoint goes with --verify.")
    ledger = existing_ledger(state)
    entries, rows = ledger.entries(), ledger.rows()
    lines = [
        _Line(entry, row.number, _key_id(row.signature))
        for entry, row in zip(entries, rows, strict=False)  # one may have come meanwhile
        if model is None or entry.model == model
    ]
    shown = lines[-limit:] if limit else lines
    return Outcome(
        Status.DONE,
        {
            "entries": [
                line.entry.to_plain() | {"line": line.number, "signed_by": line.key_id}
                for line in shown
            ],
            "total": len(lines),
        },
        lambda console: (_show_all if verbose else _show)(shown, console),
    )


def _key_id(signature: str | None) -> str | None:
    """Of the key that is said to have signed; only --verify proves it."""
    import json

    try:
        return None if signature is None else str(json.loads(signature)["keyid"])
    except (ValueError, KeyError, TypeError):
        return "unreadable"


def _show(lines: list[_Line], console: Console) -> None:
    """One line an entry: what does not fit is cut off the reason."""
    from rich.text import Text

    from gate.story.wording import printable

    entries = [line.entry for line in lines]
    several, wide = len({entry.model for entry in entries}) > 1, console.width >= _WIDE
    rows = [_cells(entry, several=several, wide=wide) for entry in entries]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
    for entry, row in zip(entries, rows, strict=True):
        start = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        text = Text(f"{start}  {printable(entry.reason)}")
        text.truncate(console.width, overflow="ellipsis")
        console.print(text, no_wrap=True)
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


def _show_all(lines: list[_Line], console: Console) -> None:
    """Everything that people ask of an entry, in full."""
    from rich.text import Text

    from gate.story.wording import printable

    for line in lines:
        entry = line.entry
        before = f", before: {entry.previous_version}" if entry.previous_version else ""
        version = f" version {entry.version}{before}" if entry.version else ""
        rows = (
            ("", f"{entry.at} {entry.action} {entry.model}{version}"),
            ("  file      ", str(entry.sha256 or "")),
            ("  policy    ", str(entry.policy_sha256 or "")),
            ("  actor     ", f"{entry.actor}, {entry.cause}" if entry.cause else entry.actor),
            ("  verdict   ", _signed("signed", entry.signers)),
            ("  review    ", _signed("approved", entry.approvers)),
            ("  line      ", f"{line.number}, {_signed('signed', [line.key_id or 'no key'])}"),
            ("  reason    ", entry.reason),
        )
        for label, text in rows:
            if text:
                console.print(Text(f"{label}{printable(text)}"))
    if not lines:
        console.print(_NONE)


def _signed(word: str, keys: Sequence[str]) -> str:
    """By the first digits of their ids, as `gate keys show` prints them."""
    return f"{word} by {', '.join(key[:12] for key in keys)}" if keys else ""
