"""`gate history checkpoint`: where the ledger ends now, signed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.given import Written
from gate.commands.outcome import Outcome, machine_options
from gate.commands.signing import local_keys
from gate.commands.state import WRITER_KEY, believed_ledger, with_state
from gate.commands.status import Status
from gate.errors import KeyUnusable

if TYPE_CHECKING:
    from rich.console import Console


@click.command("checkpoint")
@click.option(
    "-o", "--output", type=Written("file"), metavar="FILE", help="Default: the standard output."
)
@WRITER_KEY
@with_state
@machine_options
def command(output: Path | None, key: str | None, state: str) -> Outcome:
    """Sign how many lines the ledger has, and the digest of the last one.

    A chain can't see that its end was removed. Who keeps this elsewhere can prove later that all
    these lines are still there: gate history --verify --checkpoint FILE. The last line has to be
    believed now: by GATE_TRUST, else .gate/trust.yaml, where that is.

    \b
    Examples:
      gate history checkpoint -o ledger-2026-11.json
      gate history checkpoint -o ledger-2026-11.json --key awskms:alias/auditor
    """
    from gate.ledger.checkpoint import Checkpoint
    from gate.storage.atomic import write_bytes

    signing_key = local_keys().signing_key_if_any(key)
    if signing_key is None:
        raise KeyUnusable(
            "there is no key to sign the checkpoint with, and nobody would believe it. Name one "
            "with --key or GATE_SIGNING_KEY, or make one: gate keys new."
        )
    checkpoint = Checkpoint.of(believed_ledger(state))
    data = checkpoint.signed(signing_key).data
    if output is not None:
        write_bytes(output, data)
    plain = {
        **checkpoint.to_plain(),
        "key_id": signing_key.public.key_id,
        "output": None if output is None else str(output),
        "statement": json.loads(data),
    }

    def show(console: Console) -> None:
        if output is None:
            click.echo(data, nl=False)
        else:
            console.print(
                f"{output}: {checkpoint.lines} lines, the last with digest {checkpoint.head}, "
                f"signed by {signing_key.public.label}"
            )

    return Outcome(Status.DONE, plain, show)
