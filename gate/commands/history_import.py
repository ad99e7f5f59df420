"""`gate history import`: a ledger of before the database, or an exported one, begins this one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from gate.commands.given import Given
from gate.commands.options import FILE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.state import LedgerPlace, new_ledger, with_writing
from gate.commands.status import Status
from gate.errors import EvidenceError

if TYPE_CHECKING:
    from rich.console import Console

    from gate.ledger.jsonl import Imported


@click.command("import")
@click.argument("file", type=Given(EvidenceError, "a ledger: lines of JSON"))
@click.option(
    "--store", type=FILE, default=Path(".gate/store"), show_default=True,
    envvar="GATE_STORE", show_envvar=True,
    help="The service's store, which keeps where its ledger ended: an older copy is refused.",
)  # fmt: skip
@with_writing
@machine_options
def command(file: Path, store: Path, **place: Unpack[LedgerPlace]) -> Outcome:
    """Begin the ledger in --state with the lines of FILE, once.

    FILE is the ledger of an earlier version (.gate/ledger.jsonl), or what gate history export
    wrote. Its chain is verified, and each line taken as it is, with what lies beside it: which
    addresses are one registry, and moves of 'champion' that were under way. One more line says so,
    signed by your key. FILE stays as it is; a second time nothing changes.

    \b
    Examples:
      gate history import .gate/ledger.jsonl
      gate history import /var/lib/gate/ledger.jsonl --state postgresql://gate@db.internal/gate \\
          --store /srv/models --key /etc/gate/service.pem
    """
    from gate.ledger.jsonl import import_jsonl
    from gate.service.keeper import HEAD_FILE, keepers

    seen_by = keepers(store) if (store / HEAD_FILE).exists() else ()
    ledger = new_ledger(place, keepers=seen_by)
    with spinner("importing"):
        done = import_jsonl(ledger, file)
    plain = {"ledger": ledger.place, "file": str(file), **asdict(done)}
    return Outcome(
        Status.DONE, plain, lambda console: _show(done, file, console, place=ledger.place)
    )


def _show(done: Imported, file: Path, console: Console, *, place: str) -> None:
    if done.was_there:
        console.print(f"nothing to do: {place} begins with the {done.lines} lines of {file}")
        return
    console.print(f"imported {done.lines} lines of {file} into {place}")
    if done.moves:
        console.print(
            f"{done.moves} moves of 'champion' were under way: the next command or look ends them"
        )
    if done.is_torn:
        console.print("its last line was cut off by a crash, and is left out")
    console.print(f"nothing reads {file} any more: keep it where it is, or as a copy")
