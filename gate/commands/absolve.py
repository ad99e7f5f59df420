"""`gate absolve`: a violation is lifted, once the version's bytes are proven anew."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Unpack

import click

from gate.commands.click_types import ModelName
from gate.commands.loaders import LedgerPlace, with_writing, written_ledger
from gate.commands.options import TRACKING_URI, tracking_uri
from gate.commands.progress import spinner
from gate.commands.result import CommandResult, ExitCode, machine_options

if TYPE_CHECKING:
    from rich.console import Console

    from gate.registry.absolution import Absolution


@click.command("absolve", short_help="Lift a violation whose bytes are proven anew.")
@click.argument("model", type=ModelName())
@click.argument("version")
@click.option("--reason", required=True, help="What went wrong then; kept in the ledger.")
@with_writing
@TRACKING_URI
@machine_options
def command(
    model: str,
    version: str,
    reason: str,
    tracking_uri: str | None,
    **place: Unpack[LedgerPlace],
) -> CommandResult:
    """Lift the violation of VERSION of the registered MODEL.

    Its file and all that is beside it are downloaded and must be what the ledger says that passed.
    The version may serve again by the ordinary rules; no alias moves here. A rollback and a
    reviewer's rejection stay. Exit code 0: lifted; 1: its bytes still are others; 2: they could not
    be had, or there is nothing to lift.

    \b
    Examples:
      gate absolve digits 7 --reason "the proxy gave the bytes of another bucket"
      gate absolve digits 7 --reason "bad disk, restored from the backup" --json
    """
    return _absolve(model, version, reason, place=place, address=tracking_uri)


def _absolve(
    model: str, version: str, reason: str, *, place: LedgerPlace, address: str | None
) -> CommandResult:
    from gate.mlflow_client.connection import check_server
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.registry.absolution import absolve

    if not reason.strip():
        raise click.BadParameter("say what went wrong then.", param_hint="--reason")
    uri, ledger = tracking_uri(address), written_ledger(place)
    with spinner("proving the version's bytes"):
        check_server(uri)
        done = absolve(MlflowRegistry(uri), model, version, ledger=ledger, reason=reason)
    refused = done.problem is not None
    plain = {"model": model, "outcome": "refused" if refused else "absolved", **asdict(done)}
    status = ExitCode.REJECTED if refused else ExitCode.DONE
    return CommandResult(status, plain, lambda console: _show(model, done, console))


def _show(model: str, done: Absolution, console: Console) -> None:
    from rich.text import Text

    from gate.storage.safe_text import make_printable

    if done.problem is not None:
        line = f"refused, the violation of version {done.version} stands: {done.problem}"
        console.print(Text(make_printable(line), style="bold red"))
        return
    console.print(
        Text(make_printable(f"absolved: version {done.version} of {model}"), style="green")
    )
    console.print(
        "No alias was moved. Where the guard had taken 'champion' away and nothing serves, the "
        "service brings it back. Else point 'champion' at the version, or repeat gate promote."
    )
