"""`gate accept-ledger`: say that a shorter, or another, past of the ledger is meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from gate.commands.options import FILE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.state import LedgerPlace, with_writing, written_ledger
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console


@click.command("accept-ledger", short_help="Say that a shorter or another ledger is meant.")
@click.option("--reason", required=True, help="Kept in the ledger, with your name.")
@click.option(
    "--store", type=FILE, default=Path(".gate/store"), show_default=True,
    envvar="GATE_STORE", show_envvar=True, help="The service's store.",
)  # fmt: skip
@with_writing
@machine_options
def command(reason: str, store: Path, **place: Unpack[LedgerPlace]) -> Outcome:
    """Let the service go on from the ledger as it is now.

    The service keeps in its store where the ledger ended, and refuses one that is shorter or other
    than it was: restore the newest copy. Where that is lost for good, or another ledger is to take
    its place, this says so, and writes a line that names what was lost. Where no trusted writer
    signed the last line, this line, signed by one, says that it is right.

    \b
    Examples:
      gate accept-ledger --reason "the disk died, this is Monday's copy"
      gate accept-ledger --reason "moved to a new ledger" --store /srv/models \\
          --state postgresql://gate@db.internal/gate --key /etc/gate/service.pem
    """
    from gate.ledger.acceptance import accept
    from gate.service.keeper import keepers

    if not reason.strip():
        raise click.BadParameter("say why it is meant.", param_hint="--reason")
    with spinner("asking where the ledger's end is kept"):
        places = keepers(store)
        lost = accept(written_ledger(place), places, reason=reason)
    names = [keeper.place for keeper in places]
    return Outcome(
        Status.DONE,
        {"accepted": bool(lost), "lost": list(lost), "asked": names},
        lambda console: _show(lost, names, console),
    )


def _show(lost: Sequence[str], names: Sequence[str], console: Console) -> None:
    if not lost:
        console.print(f"nothing to accept: the ledger holds all that is kept in {names}")
        return
    for line in lost:
        console.print(f"not in the ledger any more: {line}")
    console.print("the ledger is accepted as it is, and a line of it says so")
