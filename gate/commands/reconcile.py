"""`gate reconcile`: bring registered models into the state that their evidence allows, now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.child import SERVICE_MEMORY_LIMIT, SERVICE_TIME_LIMIT
from gate.commands.given import POLICY_FILE
from gate.commands.options import (
    FILE,
    SERVICE_KEY,
    TRACKING_URI,
    TRUST,
    tracking_uri,
)
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.state import folder_trust, key_uri, named_state, with_state
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.service.port import Failed, Reconcile, Taken


@click.command("reconcile", short_help="Judge, guard and deploy registered models, now.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--policy", type=POLICY_FILE, help="The policy in force. Default: the built-in one.")
@TRUST
@SERVICE_KEY
@click.option(
    "--store", type=FILE, default=Path(".gate/store"), show_default=True,
    envvar="GATE_STORE", show_envvar=True, help="Where deployed files are.",
)  # fmt: skip
@click.option(
    "--same-registry", metavar="URI", multiple=True,
    help="Another address of the same registry, under which things were promoted; repeat it.",
)  # fmt: skip
@SERVICE_TIME_LIMIT
@SERVICE_MEMORY_LIMIT
@with_state
@TRACKING_URI
@machine_options
def command(tracking_uri: str | None, **places: Any) -> Outcome:
    """Do for each MODEL what the service does after an event, without one.

    What was handed in is judged, a reviewed candidate is promoted, the alias 'champion' goes back
    from a version that must not serve, and what it rightly points at is deployed. A second time
    there is nothing to do.

    \b
    Examples:
      gate reconcile digits
      gate reconcile digits --policy params.yaml --store /srv/models --json
      gate reconcile digits --store /srv/models --state @/etc/gate/state
    """
    return _reconcile(tracking_uri, places)


def _reconcile(registry: str | None, places: dict[str, Any]) -> Outcome:
    from gate.ledger.entry import actor
    from gate.registry.mlflow.registry import preflight
    from gate.service.reconciler import reconciler
    from gate.service.settings import Settings

    uri = tracking_uri(registry)
    named = {"state": named_state(places["state"]), "key": key_uri(places["key"])}
    settings = Settings.of(tracking_uri=uri, writers=folder_trust(), **places | named)
    preflight(uri)
    reconcile, cause = reconciler(settings), f"gate reconcile by {actor()}"
    with spinner("reconciling"):
        done = {model: _look(reconcile, model, cause=cause) for model in settings.models}
    models = {model: [_plain(one) for one in all_of_it] for model, all_of_it in done.items()}
    outcomes = {one["outcome"] for all_of_it in models.values() for one in all_of_it}
    status = Status.NOT_JUDGED if "failed" in outcomes else Status.DONE
    return Outcome(status, {"models": models}, lambda console: _show(models, console))


def _look(reconcile: Reconcile, model: str, *, cause: str) -> Sequence[Taken | Failed]:
    """One model that can't be looked at keeps no other waiting."""
    from gate.errors import GateError
    from gate.service.port import Failed

    try:
        return reconcile(model, cause=cause)
    except GateError as error:
        return [Failed("look", error)]


def _plain(one: Taken | Failed) -> dict[str, Any]:
    from gate.service.port import Taken

    if isinstance(one, Taken):
        return asdict(one)
    reason = f"{type(one.error).__name__}: {one.error}"
    return {"kind": one.kind, "outcome": "failed", "version": None, "reason": reason}


def _show(models: dict[str, list[dict[str, Any]]], console: Console) -> None:
    from rich.text import Text

    from gate.story.wording import printable

    for model, done in models.items():
        if not done:
            console.print(Text(f"{model}: all is as it should be", style="green"))
        for one in done:
            bad = one["outcome"] in ("refused", "reverted", "rejected", "failed")
            style = "bold red" if bad else "green"
            line = f"{model}: {one['kind']}: {one['outcome']}: {printable(one['reason'])}"
            console.print(Text(line, style=style))
