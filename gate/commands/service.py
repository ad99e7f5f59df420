"""`gate serve`, `gate reconcile`, `gate webhooks`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import click

from gate.commands import options
from gate.commands.click_types import ModelName
from gate.commands.loaders import local_keys, parse_state
from gate.commands.options import tracking_uri
from gate.commands.progress import spinner
from gate.commands.result import (
    SERVICE_MEMORY_LIMIT,
    SERVICE_TIME_LIMIT,
    CommandResult,
    ExitCode,
    machine_options,
    print_lines,
    table_result,
    text_result,
)
from gate.errors import GateError, RegistryUnavailable, ServiceError
from gate.storage.safe_text import redacted

if TYPE_CHECKING:
    from rich.console import Console

    from gate.mlflow_client.webhooks import DeliveryTrial, Subscription, WebhookSubscription
    from gate.service.monitoring import Failed, Reconcile, StepResult
    from gate.service.settings import ServiceSettings


def _environment(name: str) -> dict[str, Any]:
    return {"envvar": f"GATE_{name}", "show_envvar": True}


_POLICY = options.policy_option(
    "The policy that decides. Default: the built-in policy.", **_environment("POLICY")
)

_STORE = click.option(
    "--store", type=options.FILE, **_environment("STORE"),
    help="The folder of deployed files. Default: .gate/store.",
)  # fmt: skip

_SAME_REGISTRY = click.option(
    "--same-registry", metavar="URI", multiple=True, **_environment("SAME_REGISTRY"),
    help="Another address under which versions were promoted in this registry. Repeatable.",
)  # fmt: skip


@click.command("reconcile", short_help="Do once what gate serve does after an event.")
@click.argument("models", type=ModelName(several=True), nargs=-1, required=True, metavar="MODEL...")
@_POLICY
@options.TRUST
@options.SERVICE_KEY
@_STORE
@_SAME_REGISTRY
@SERVICE_TIME_LIMIT
@SERVICE_MEMORY_LIMIT
@options.STATE_URL
@options.TRACKING_URI
@machine_options
def reconcile_command(**options: Any) -> CommandResult:
    """Do for each MODEL what the service does after an event.

    Judges submissions, promotes an approved candidate, moves the alias 'champion' away from a
    version that must not serve, and deploys the version of 'champion'. A second run changes
    nothing.

    \b
    Examples:
      gate reconcile digits
      gate reconcile digits --policy params.yaml --store /srv/models --json
      gate reconcile digits --store /srv/models --state @/etc/gate/state
    """
    from gate.ledger.entry import actor
    from gate.mlflow_client.connection import check_server
    from gate.service.reconciler import reconciler

    settings = _settings(options)
    check_server(settings.tracking_uri)
    reconcile, cause = reconciler(settings), f"gate reconcile by {actor()}"
    with spinner("reconciling"):
        results = {name: _reconcile_model(reconcile, name, cause=cause) for name in settings.models}
    models = {model: [_plain(step) for step in steps] for model, steps in results.items()}
    outcomes = {step["outcome"] for steps in models.values() for step in steps}
    status = ExitCode.NOT_JUDGED if "failed" in outcomes else ExitCode.DONE
    return CommandResult(status, {"models": models}, lambda console: _show_steps(models, console))


def _settings(options: dict[str, Any]) -> ServiceSettings:
    """Return the settings that options name. Raises ServiceError, BadParameter, UsageError,
    StorageError."""
    from gate.service.settings import ServiceSettings

    values = {name: value for name, value in options.items() if value not in (None, ())}
    values["tracking_uri"] = tracking_uri(options["tracking_uri"])
    values["state"], local = parse_state(options["state"]), local_keys()
    local_key = str(local.key_path) if local.key_path.exists() else None
    values["key"] = options["key"] or local_key
    writers = local.trust_path if local.trust_path.exists() else None
    return ServiceSettings.from_options(**values, writers=writers)


def _reconcile_model(
    reconcile: Reconcile, model: str, *, cause: str
) -> Sequence[StepResult | Failed]:
    """Reconcile one model; return a failure as a result, so that it does not block the others."""
    from gate.service.monitoring import Failed

    try:
        return reconcile(model, cause=cause)
    except GateError as error:
        return [Failed("look", error)]


def _plain(result: StepResult | Failed) -> dict[str, Any]:
    from gate.service.monitoring import StepResult

    if isinstance(result, StepResult):
        return asdict(result)
    reason = f"{type(result.error).__name__}: {result.error}"
    return {"kind": result.kind, "outcome": "failed", "version": None, "reason": reason}


def _show_steps(models: dict[str, list[dict[str, Any]]], console: Console) -> None:
    for model, results in models.items():
        if not results:
            print_lines(console, f"{model}: nothing to do", style="green")
        for result in results:
            bad = result["outcome"] in ("refused", "reverted", "rejected", "failed")
            line = f"{model}: {result['kind']}: {result['outcome']}: {result['reason']}"
            print_lines(console, line, style="bold red" if bad else "green")


@click.command("serve", short_help="Run the service that guards and deploys models.")
@click.option(
    "--model", "models", type=ModelName(several=True), multiple=True, **_environment("MODELS"),
    help="A registered model to guard and deploy; others are left alone. WORKSPACE:NAME for "
    "another workspace than that of MLFLOW_WORKSPACE. Repeatable.",
)  # fmt: skip
@click.option("--host", **_environment("HOST"), help="Default: 127.0.0.1.")
@click.option("--port", type=int, **_environment("PORT"), help="Default: 8400. 0: any free port.")
@options.SECRET_FILE
@_SAME_REGISTRY
@_STORE
@click.option(
    "--cors-origin", "cors_origins", metavar="ORIGIN", multiple=True,
    **_environment("CORS_ORIGINS"),
    help="Let pages of this origin load deployed models. Repeatable. Default: none.",
)  # fmt: skip
@_POLICY
@options.TRUST
@options.SERVICE_KEY
@click.option(
    "--body-cap", type=int, metavar="BYTES", **_environment("BODY_CAP"),
    help="The largest webhook body that is read. Default: 64 KiB.",
)  # fmt: skip
@click.option(
    "--body-timeout", "body_timeout_s", type=float, metavar="SECONDS",
    **_environment("BODY_TIMEOUT"), help="Time limit for receiving a webhook body. Default: 20.",
)  # fmt: skip
@click.option(
    "--window", "window_s", type=float, metavar="SECONDS", **_environment("WINDOW"),
    help="Largest difference of a webhook's timestamp from this clock. Default: 300.",
)  # fmt: skip
@click.option(
    "--interval", "interval_s", type=float, metavar="SECONDS", **_environment("INTERVAL"),
    help="Interval at which all models are checked without an event. Default: 60.",
)  # fmt: skip
@click.option(
    "--confirm-after", "confirm_s", type=float, metavar="SECONDS", **_environment("CONFIRM_AFTER"),
    help="Delay before a second check may confirm wrong bytes or outputs. Default: 60.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), **_environment("LOG_FORMAT"),
    help="Default: text.",
)  # fmt: skip
@click.option(
    "--notify-url", metavar="URL", **_environment("NOTIFY_URL"),
    help="Send signed ledger entries to this URL (docs/notifications.md).",
)  # fmt: skip
@click.option(
    "--notify-secret-file", type=options.FILE, **_environment("NOTIFY_SECRET_FILE"),
    help="Secrets that sign notifications, one per line.",
)  # fmt: skip
@SERVICE_TIME_LIMIT
@SERVICE_MEMORY_LIMIT
@options.STATE_URL
@options.TRACKING_URI
@machine_options
def serve_command(**options: Any) -> CommandResult:
    """Run the service: judge submissions, guard the alias 'champion', and deploy its version.

    POST /webhooks/mlflow accepts events of MLflow; /models/<name>/manifest.json and model.onnx
    return the deployed files; /healthz, /readyz and /metrics are for monitoring. The log goes to
    stderr. After SIGTERM or Ctrl-C it finishes what it has begun.

    \b
    Examples:
      gate webhooks register --url http://127.0.0.1:8400/webhooks/mlflow --secret-file .gate/secrets
      gate serve --model digits --secret-file .gate/secrets
      gate serve --model digits --secret-file .gate/secrets --trust trust.yaml --key service.pem
      gate serve --model digits --secret-file .gate/secrets --state postgresql://gate@db/gate
      gate serve --model digits --secret-file .gate/secrets --state @/etc/gate/state
    """
    from gate.service.app import serve

    settings = _settings(options)
    settings.keyring()  # fail before slow imports
    _refuse_mistyped(settings.tracking_uri)

    from gate.deploy.serving import store_app
    from gate.deploy.store import ModelStore
    from gate.mlflow_client.connection import reach
    from gate.service.notifications import notifying
    from gate.service.reconciler import open_ledger, reconciler

    reconcile = reconciler(settings, is_service=True)
    models = store_app(
        ModelStore(settings.store),
        cors_origins=settings.cors_origins,
        damaged=reconcile.report_damage,
    )
    with notifying(settings, open_ledger(settings)) if settings.notify_url else nullcontext():
        serve(
            settings,
            reconcile,
            mounts={"/models": models},
            reach=lambda: reach(settings.tracking_uri),
        )
    plain = {"models": list(settings.models), "registry": redacted(settings.tracking_uri)}
    return text_result({"stopped": True, **plain}, "stopped; all running work was finished")


def _refuse_mistyped(uri: str) -> None:
    """Raise RegistryError unless the registry exists.

    MLflow would create an empty registry for a mistyped file name.
    """
    from gate.mlflow_client.connection import check_server

    check_server(uri)
    scheme, _, path = uri.partition(":///")
    if scheme.startswith("sqlite") and not Path(unquote(path.partition("?")[0])).exists():
        raise RegistryUnavailable(
            f"there is no registry at {redacted(uri)}: the file is missing. Use the same "
            "--tracking-uri or MLFLOW_TRACKING_URI as gate promote."
        )


_NAME = click.option(
    "--name", default="parity-gate", show_default=True, help="Name of the webhook on the server."
)


@click.group("webhooks", short_help="Register the webhook on an MLflow server.")
def webhooks_command() -> None:
    """Register, list and test the service's webhook on an MLflow server.

    \b
    Examples:
      gate webhooks register --url http://127.0.0.1:8400/webhooks/mlflow --secret-file .gate/secrets
      gate webhooks test
      gate webhooks rotate --secret-file .gate/secrets
      gate webhooks list --json
    """


@webhooks_command.command("register", short_help="Create or repair the webhook.")
@click.option(
    "--url", default="http://127.0.0.1:8400/webhooks/mlflow", show_default=True,
    help="The URL of gate serve, as the server reaches it.",
)  # fmt: skip
@_NAME
@options.SECRET_FILE
@options.TRACKING_URI
@machine_options
def _register(
    url: str, name: str, secret_file: Path | None, tracking_uri: str | None
) -> CommandResult:
    """Create or repair the webhook that sends MLflow's events to gate serve, signed with a secret.

    A missing secret file is created. Repeating the command never creates a second webhook of this
    name.

    \b
    Examples:
      gate webhooks register --secret-file .gate/secrets
      gate webhooks register --url https://gate.example.org/webhooks/mlflow --name production
    """
    server = _server(tracking_uri)
    secret, is_new = secret_for(secret_file)
    outcome, webhook = server.register(name, url, secret=secret)
    lines = [f"{outcome}: webhook '{name}' ({webhook.webhook_id}) sends to {url}"]
    if is_new:
        lines.append(
            f"created {secret_file} with a new secret: gate serve --secret-file {secret_file}"
        )
    plain = {"outcome": outcome, "webhook": asdict(webhook), "secret_made": is_new}
    return text_result(plain, *lines)


@webhooks_command.command("list")
@options.TRACKING_URI
@machine_options
def _list(tracking_uri: str | None) -> CommandResult:
    """List all webhooks of the server.

    \b
    Examples:
      gate webhooks list
      gate webhooks list --tracking-uri http://127.0.0.1:5000 --json
    """
    from gate.report.terminal import build_table

    webhooks, headings = _server(tracking_uri).all(), ("name", "id", "url", "active", "events")
    rows = [
        (w.name, w.webhook_id, w.url, "yes" if w.active else "no", ", ".join(w.events))
        for w in webhooks
    ]
    return CommandResult(
        ExitCode.DONE,
        {"webhooks": [asdict(webhook) for webhook in webhooks]},
        lambda console: console.print(build_table(headings, rows)),
    )


@webhooks_command.command("test")
@_NAME
@options.TRACKING_URI
@machine_options
def _test(name: str, tracking_uri: str | None) -> CommandResult:
    """Let the server send a test of every event. Exit code 2 if one is not accepted.

    \b
    Examples:
      gate webhooks test
      gate webhooks test --name production --json
    """
    server = _server(tracking_uri)
    trials = server.test(_require_webhook(server, name))
    good = all(trial.success for trial in trials)
    return _trial_result(ExitCode.DONE if good else ExitCode.NOT_JUDGED, trials)


@webhooks_command.command("rotate", short_help="Replace the secret while the service runs.")
@_NAME
@options.SECRET_FILE
@click.option(
    "--overlap", type=click.FloatRange(min=0), default=120.0, show_default=True,
    metavar="SECONDS",
    help="How long both secrets are valid: longer than MLFLOW_WEBHOOK_CACHE_TTL (60 s).",
)  # fmt: skip
@options.TRACKING_URI
@machine_options
def _rotate(
    name: str, secret_file: Path | None, overlap: float, tracking_uri: str | None
) -> CommandResult:
    """Replace the secret while the service runs. No delivery is refused.

    Adds a new secret to the file, which gate serve reads again; gives it to the server and tests
    it; and removes the old one after the overlap.

    \b
    Examples:
      gate webhooks rotate --secret-file .gate/secrets
      gate webhooks rotate --secret-file .gate/secrets --overlap 300
    """
    if secret_file is None:
        raise ServiceError(
            "secrets in the environment can't be replaced while the service runs. Use a file: "
            "--secret-file FILE, here and with gate serve."
        )
    server = _server(tracking_uri)
    trials = rotate(server, _require_webhook(server, name), secret_file, overlap_s=overlap)
    return _trial_result(ExitCode.DONE, trials)


def _server(uri: str | None) -> WebhookSubscription:
    from gate.mlflow_client.connection import check_server
    from gate.mlflow_client.webhooks import WebhookSubscription

    address = tracking_uri(uri)
    with spinner("asking the server"):
        server = WebhookSubscription(address)
        check_server(address)
    return server


def _require_webhook(server: WebhookSubscription, name: str) -> Subscription:
    webhook = server.find(name)
    if webhook is None:
        raise ServiceError(
            f"the server has no webhook named '{name}'. Create it: gate webhooks register"
        )
    return webhook


def _trial_result(status: ExitCode, trials: Sequence[DeliveryTrial]) -> CommandResult:
    rows = [
        (trial.event, "ok" if trial.success else "refused", str(trial.status or ""), trial.answer)
        for trial in trials
    ]
    plain = {"trials": [asdict(trial) for trial in trials]}
    return table_result(plain, ("event", "result", "status", "answer"), rows, status=status)


_SECRET_BYTES = 32


def secret_for(path: Path | None) -> tuple[str, bool]:
    """Return the secret to sign with, and whether a missing file was created."""
    from gate.service.settings import WebhookSecrets, write_secrets

    if path is None:
        return WebhookSecrets.from_environment().secrets[0], False
    if path.exists():
        return WebhookSecrets.from_file(path).secrets[0], False
    secret = secrets.token_hex(_SECRET_BYTES)
    write_secrets(path, [secret])
    return secret, True


def rotate(
    subscriptions: WebhookSubscription,
    webhook: Subscription,
    path: Path,
    *,
    overlap_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[DeliveryTrial, ...]:
    """Replace the secret in `path` and on the server, while the service runs.

    The service accepts both for `overlap_s` seconds, because the server signs with the old one
    until its cache expires. After an interruption the file still has the secret that the server
    uses, so the rotation can be repeated. Raises ServiceError if a test delivery is refused; then
    both secrets stay valid.
    """
    from gate.service.settings import WebhookSecrets, write_secrets

    old = WebhookSecrets.from_file(path).secrets
    new = secrets.token_hex(_SECRET_BYTES)
    write_secrets(path, [new, *old])
    subscriptions.set_secret(webhook, new)
    trials = subscriptions.test(webhook)
    refused = [trial for trial in trials if not trial.success]
    if refused:
        raise ServiceError(
            f"the service refuses the new secret: {refused[0].event}: {refused[0].answer}. "
            f"Old and new secrets are in {path}. Make sure that the service reads this file, then "
            "repeat the rotation."
        )
    sleep(overlap_s)
    write_secrets(path, [new])
    return trials
