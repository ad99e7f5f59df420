"""`gate reconcile`: bring registered models into the state that their evidence allows, now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.options import FILE, LEDGER, TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, Status, machine_options

if TYPE_CHECKING:
    from rich.console import Console

    from gate.webhook.port import Taken


@click.command("reconcile", short_help="Review, guard and deploy registered models, now.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--policy", type=FILE, help="The policy in force. Default: the built-in one.")
@click.option(
    "--store",
    type=FILE,
    default=Path(".gate/store"),
    show_default=True,
    help="Where deployed files are.",
)
@LEDGER
@TRACKING_URI
@machine_options
def command(
    models: tuple[str, ...],
    policy: Path | None,
    store: Path,
    ledger: Path,
    tracking_uri: str | None,
) -> Outcome:
    """Do for each MODEL what the service does after an event, without one.

    A reviewed candidate is promoted, the alias 'champion' goes back from a version that must not
    serve, and what it rightly points at is deployed. A second time there is nothing to do.

    \b
    Examples:
      gate reconcile digits
      gate reconcile digits --policy params.yaml --store /srv/models --json
    """
    return _reconcile(models, (policy, store, ledger), tracking_uri)


def _reconcile(
    models: tuple[str, ...], places: tuple[Path | None, Path, Path], address: str | None
) -> Outcome:
    from gate.registry.ledger import actor
    from gate.registry.mlflow import preflight
    from gate.webhook.reconciler import reconciler
    from gate.webhook.settings import Settings

    policy, store, ledger = places
    uri = tracking_uri(address)
    preflight(uri)
    reconcile = reconciler(
        Settings.of(models=models, tracking_uri=uri, policy=policy, store=store, ledger=ledger)
    )
    done = {model: reconcile(model, cause=f"gate reconcile by {actor()}") for model in models}
    told = {model: [asdict(one) for one in taken] for model, taken in done.items()}
    return Outcome(Status.DONE, {"models": told}, lambda console: _show(done, console))


def _show(done: dict[str, Sequence[Taken]], console: Console) -> None:
    from rich.text import Text

    from gate.report.wording import printable

    for model, taken in done.items():
        if not taken:
            console.print(Text(f"{model}: all is as it should be", style="green"))
        for one in taken:
            bad = one.outcome in ("refused", "reverted", "rejected")
            style = "bold red" if bad else "green"
            line = f"{model}: {one.kind}: {one.outcome}: {printable(one.reason)}"
            console.print(Text(line, style=style))
