"""`gate reconcile`: bring registered models into the state that their evidence allows, now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.options import FILE, LEDGER, TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.service.port import Taken


@click.command("reconcile", short_help="Review, guard and deploy registered models, now.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--policy", type=FILE, help="The policy in force. Default: the built-in one.")
@click.option(
    "--store", type=FILE, default=Path(".gate/store"), show_default=True,
    help="Where deployed files are.",
)  # fmt: skip
@click.option(
    "--same-registry", metavar="URI", multiple=True,
    help="Another address of the same registry, under which things were promoted; repeat it.",
)  # fmt: skip
@LEDGER
@TRACKING_URI
@machine_options
def command(tracking_uri: str | None, **places: Any) -> Outcome:
    """Do for each MODEL what the service does after an event, without one.

    A reviewed candidate is promoted, the alias 'champion' goes back from a version that must not
    serve, and what it rightly points at is deployed. A second time there is nothing to do.

    \b
    Examples:
      gate reconcile digits
      gate reconcile digits --policy params.yaml --store /srv/models --json
    """
    return _reconcile(tracking_uri, places)


def _reconcile(address: str | None, places: dict[str, Any]) -> Outcome:
    from gate.registry.ledger import actor
    from gate.registry.mlflow.registry import preflight
    from gate.service.reconciler import reconciler
    from gate.service.settings import Settings

    uri = tracking_uri(address)
    settings = Settings.of(tracking_uri=uri, **places)
    preflight(uri)
    reconcile, cause = reconciler(settings), f"gate reconcile by {actor()}"
    done = {model: reconcile(model, cause=cause) for model in settings.models}
    models = {model: [asdict(one) for one in taken] for model, taken in done.items()}
    return Outcome(Status.DONE, {"models": models}, lambda console: _show(done, console))


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
