"""`gate webhooks`: the service's webhook on an MLflow server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.options import SECRET_FILE, TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status
from gate.errors import ServiceError
from gate.service.keyring import SECRETS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from gate.service.subscription import DeliveryTrial, Subscription, Subscriptions

_NAME = click.option(
    "--name", default="parity-gate", show_default=True, help="The webhook's name on the server."
)


@click.group("webhooks", short_help="Set up the webhook on an MLflow server.")
def command() -> None:
    """Set up, look at and test the service's webhook on an MLflow server.

    \b
    Examples:
      gate webhooks register --url http://127.0.0.1:8400/webhooks/mlflow --secret-file .gate/secrets
      gate webhooks test
      gate webhooks rotate --secret-file .gate/secrets
      gate webhooks list --json
    """


@command.command("register", short_help="Make the webhook, or mend it.")
@click.option(
    "--url", default="http://127.0.0.1:8400/webhooks/mlflow", show_default=True,
    help="Where the server finds gate serve.",
)  # fmt: skip
@_NAME
@SECRET_FILE
@TRACKING_URI
@machine_options
def _register(url: str, name: str, secret_file: Path | None, tracking_uri: str | None) -> Outcome:
    """Have the server send its events to gate serve, signed with the newest secret.

    A secret file that does not exist is made. Repeat it as often as you like: the webhook of this
    name is made as it should be, never a second one.

    \b
    Examples:
      gate webhooks register --secret-file .gate/secrets
      gate webhooks register --url https://gate.example.org/webhooks/mlflow --name production
    """
    from gate.service.subscription import secret_for

    server = _server(tracking_uri)
    secret, made = secret_for(secret_file, variable=SECRETS_VARIABLE)
    what, webhook = server.register(name, url, secret=secret)
    lines = [f"{what}: webhook '{name}' ({webhook.webhook_id}) sends to {url}"]
    if made:
        lines.append(f"made: {secret_file} with a new secret; keep it where gate serve reads it")
    plain = {"outcome": what, "webhook": asdict(webhook), "secret_made": made}
    return Outcome(Status.DONE, plain, lambda console: console.print("\n".join(lines)))


@command.command("list")
@TRACKING_URI
@machine_options
def _list(tracking_uri: str | None) -> Outcome:
    """List all webhooks of the server.

    \b
    Examples:
      gate webhooks list
      gate webhooks list --tracking-uri http://127.0.0.1:5000 --json
    """
    webhooks = _server(tracking_uri).all()
    rows = [
        (w.name, w.webhook_id, w.url, "yes" if w.active else "no", ", ".join(w.events))
        for w in webhooks
    ]
    return Outcome(
        Status.DONE,
        {"webhooks": [asdict(webhook) for webhook in webhooks]},
        lambda console: _table(console, ("name", "id", "url", "active", "events"), rows),
    )


@command.command("test")
@_NAME
@TRACKING_URI
@machine_options
def _test(name: str, tracking_uri: str | None) -> Outcome:
    """Have the server send a test of every event. Exit code 2 if one is not taken.

    \b
    Examples:
      gate webhooks test
      gate webhooks test --name production --json
    """
    server = _server(tracking_uri)
    trials = server.test(_found(server, name))
    good = all(trial.success for trial in trials)
    return _tried(Status.DONE if good else Status.NOT_JUDGED, trials)


@command.command("rotate", short_help="Exchange the secret while the service runs.")
@_NAME
@SECRET_FILE
@click.option(
    "--overlap", type=click.FloatRange(min=0), default=120.0, show_default=True,
    metavar="SECONDS",
    help="How long both secrets are in force: longer than MLFLOW_WEBHOOK_CACHE_TTL (60 s).",
)  # fmt: skip
@TRACKING_URI
@machine_options
def _rotate(
    name: str, secret_file: Path | None, overlap: float, tracking_uri: str | None
) -> Outcome:
    """Exchange the secret while the service runs: no delivery is refused meanwhile.

    A new secret comes first into the file, which gate serve reads again by itself; the server gets
    it, tests it, and after the overlap the old one leaves the file.

    \b
    Examples:
      gate webhooks rotate --secret-file .gate/secrets
      gate webhooks rotate --secret-file .gate/secrets --overlap 300
    """
    from gate.service.subscription import rotate

    if secret_file is None:
        raise ServiceError(
            "secrets of the environment can't be exchanged while the service runs. "
            "Keep them in a file: --secret-file FILE, here and with gate serve."
        )
    server = _server(tracking_uri)
    trials = rotate(server, _found(server, name), secret_file, overlap_s=overlap)
    return _tried(Status.DONE, trials)


def _server(given: str | None) -> Subscriptions:
    from gate.registry.mlflow.registry import preflight
    from gate.service.subscription import Subscriptions

    address = tracking_uri(given)
    with spinner("asking the server"):
        server = Subscriptions(address)
        preflight(address)
    return server


def _found(server: Subscriptions, name: str) -> Subscription:
    webhook = server.find(name)
    if webhook is None:
        raise ServiceError(
            f"the server has no webhook named '{name}'. Make it: gate webhooks register"
        )
    return webhook


def _tried(status: Status, trials: Sequence[DeliveryTrial]) -> Outcome:
    rows = [
        (trial.event, "ok" if trial.success else "refused", str(trial.status or ""), trial.answer)
        for trial in trials
    ]
    return Outcome(
        status,
        {"trials": [asdict(trial) for trial in trials]},
        lambda console: _table(console, ("event", "result", "status", "answer"), rows),
    )


def _table(console: Console, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from gate.report.table import table

    console.print(table(headings, rows))
