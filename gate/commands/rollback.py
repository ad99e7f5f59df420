"""`gate rollback`: the version that served before serves again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gate.commands.options import LEDGER, TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.promoted import promoted


@click.command("rollback", short_help="Put the previous version back into service.")
@click.argument("model")
@click.option("--reason", default="asked for on the command line", help="Kept in the ledger.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@LEDGER
@TRACKING_URI
@machine_options
def command(model: str, reason: str, yes: bool, ledger: Path, tracking_uri: str | None) -> Outcome:
    """Point the alias 'champion' of the registered MODEL at the version of 'previous'.

    The old bytes are downloaded and hashed first: they must be those that the ledger recorded.

    \b
    Examples:
      gate rollback digits
      gate rollback digits --yes --reason "wrong class order in production"
    """
    if not yes:
        _ask(model)
    return _roll_back(model, reason, ledger=ledger, address=tracking_uri)


def _ask(model: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("nobody is there to confirm the rollback: say --yes.")
    click.confirm(f"Put the previous version of '{model}' into service?", abort=True, err=True)


def _roll_back(model: str, reason: str, *, ledger: Path, address: str | None) -> Outcome:
    from gate.registry.ledger import Ledger
    from gate.registry.mlflow.registry import MlflowRegistry, preflight
    from gate.registry.promotion import rollback

    uri = tracking_uri(address)
    preflight(uri)
    with spinner("rolling back"):
        written = Ledger(ledger)
        done = rollback(MlflowRegistry(uri), model, ledger=written, reason=reason)
    about = (
        e for e in reversed(written.entries()) if (e.model, e.version) == (model, done.version)
    )
    digest = next((entry.sha256 for entry in about if entry.sha256), None)
    return promoted(done, name=model, digest=digest, uri=uri)
