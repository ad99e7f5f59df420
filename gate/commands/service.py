"""`gate serve`: the service that acts on what happens in the registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from urllib.parse import unquote

import click

from gate.commands.child import SERVICE_MEMORY_LIMIT, SERVICE_TIME_LIMIT
from gate.commands.given import POLICY_FILE
from gate.commands.options import (
    FILE,
    SECRET_FILE,
    SERVICE_KEY,
    TRACKING_URI,
    TRUST,
    tracking_uri,
)
from gate.commands.outcome import Outcome, machine_options
from gate.commands.state import folder_trust, key_uri, named_state, with_state
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.service.settings import LogFormat


class _Request(TypedDict):
    """The options, as parsed."""

    models: tuple[str, ...]
    aliases: tuple[str, ...]
    host: str | None
    port: int | None
    secret_file: Path | None
    same_registry: tuple[str, ...]
    cors_origins: tuple[str, ...]
    store: Path | None
    policy: Path | None
    trust: Path | None
    key: str | None
    connections: int | None
    downloads: int | None
    body_cap: int | None
    body_timeout_s: float | None
    write_timeout_s: float | None
    inbox_rows: int | None
    window_s: float | None
    interval_s: float | None
    confirm_s: float | None
    time_limit_s: float | None
    memory_limit: int | None
    log_format: LogFormat | None
    state: str
    tracking_uri: str | None


def _environment(name: str) -> dict[str, Any]:
    return {"envvar": f"GATE_{name}", "show_envvar": True}


@click.command("serve", short_help="Act on what happens in the registry.")
@click.option(
    "--model", "models", multiple=True, **_environment("MODELS"),
    help="A registered model to look after; repeat it for more. Others are left alone.",
)  # fmt: skip
@click.option(
    "--alias", "aliases", multiple=True, **_environment("ALIASES"),
    help="An alias whose moving matters; repeat it. Default: candidate, champion and previous.",
)  # fmt: skip
@click.option("--host", **_environment("HOST"), help="Default: 127.0.0.1.")
@click.option("--port", type=int, **_environment("PORT"), help="Default: 8400. 0: any free one.")
@SECRET_FILE
@click.option(
    "--same-registry", metavar="URI", multiple=True, **_environment("SAME_REGISTRY"),
    help="Another address of the same registry, under which things were promoted; repeat it.",
)  # fmt: skip
@click.option("--store", type=FILE, **_environment("STORE"), help="Default: .gate/store.")
@click.option(
    "--cors-origin", "cors_origins", metavar="ORIGIN", multiple=True,
    **_environment("CORS_ORIGINS"),
    help="Pages of this origin may load deployed models; repeat it. Default: none but our own.",
)  # fmt: skip
@click.option(
    "--policy", type=POLICY_FILE, **_environment("POLICY"),
    help="By which it decides what is deployed. Default: the built-in one.",
)  # fmt: skip
@TRUST
@SERVICE_KEY
@click.option(
    "--body-cap", type=int, metavar="BYTES", **_environment("BODY_CAP"),
    help="The largest body of a delivery that is read. Default: 64 KiB.",
)  # fmt: skip
@click.option(
    "--body-timeout", "body_timeout_s", type=float, metavar="SECONDS",
    **_environment("BODY_TIMEOUT"), help="Within which a body must have arrived. Default: 20.",
)  # fmt: skip
@click.option(
    "--write-timeout", "write_timeout_s", type=float, metavar="SECONDS",
    **_environment("WRITE_TIMEOUT"),
    help="Within which a client must have taken the next 128 KiB of its answer. Default: 30.",
)  # fmt: skip
@click.option(
    "--connections", type=int, metavar="NUMBER", **_environment("CONNECTIONS"),
    help="At once; beyond them the client that is waited for the longest makes room. Default: 512.",
)  # fmt: skip
@click.option(
    "--downloads", type=int, metavar="NUMBER", **_environment("DOWNLOADS"),
    help="Requests to /models that are answered at once; more get 503. Default: 64.",
)  # fmt: skip
@click.option(
    "--inbox-rows", type=int, metavar="NUMBER", **_environment("INBOX_ROWS"),
    help="Deliveries that are remembered when they are done, and too old for a replay. "
    "Default: 100000.",
)  # fmt: skip
@click.option(
    "--window", "window_s", type=float, metavar="SECONDS", **_environment("WINDOW"),
    help="How far a delivery's timestamp may lie from this clock. Default: 300.",
)  # fmt: skip
@click.option(
    "--interval", "interval_s", type=float, metavar="SECONDS", **_environment("INTERVAL"),
    help="After which all models are looked at without any event. Default: 60.",
)  # fmt: skip
@click.option(
    "--confirm-after", "confirm_s", type=float, metavar="SECONDS", **_environment("CONFIRM_AFTER"),
    help="After which a second download may confirm that bytes are others. Default: 60.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), **_environment("LOG_FORMAT"),
    help="Default: text.",
)  # fmt: skip
@SERVICE_TIME_LIMIT
@SERVICE_MEMORY_LIMIT
@with_state
@TRACKING_URI
@machine_options
def command(**request: Unpack[_Request]) -> Outcome:
    """Take MLflow's webhooks and keep the registry and what is deployed right.

    POST /webhooks/mlflow takes deliveries; /models/<name>/manifest.json and model.onnx serve what
    is deployed; /healthz, /readyz and /metrics tell how it does. The log goes to stderr. SIGTERM
    and Ctrl-C end it well: what was begun is finished first.

    \b
    Examples:
      gate webhooks register --url http://127.0.0.1:8400/webhooks/mlflow --secret-file .gate/secrets
      gate serve --model digits --secret-file .gate/secrets
      gate serve --model digits --secret-file .gate/secrets --trust trust.yaml --key service.pem
      gate serve --model digits --secret-file .gate/secrets --state postgresql://gate@db/gate
      gate serve --model digits --secret-file .gate/secrets --state @/etc/gate/state
    """
    from gate.service.service import serve
    from gate.service.settings import Settings
    from gate.storage.redaction import redacted

    given = {name: value for name, value in request.items() if value not in (None, ())}
    given["tracking_uri"] = tracking_uri(request["tracking_uri"])
    given["state"], given["key"] = named_state(request["state"]), key_uri(request["key"])
    settings = Settings.of(**given, writers=folder_trust())
    settings.keyring()  # before anything slow is loaded

    _refuse_mistyped(settings.tracking_uri)

    from gate.deploy.serving import store_app
    from gate.deploy.store import Store
    from gate.service.reconciler import reconciler

    reconcile = reconciler(settings, comes_again=True)
    models = store_app(
        Store(settings.store),
        cors_origins=settings.cors_origins,
        damaged=reconcile.doubt,
    )
    serve(settings, reconcile, mounts={"/models": models})
    plain = {"models": list(settings.models), "registry": redacted(settings.tracking_uri)}
    return Outcome(Status.DONE, {"stopped": True, **plain}, _show)


def _refuse_mistyped(uri: str) -> None:
    """Raise RegistryError unless there is a registry: MLflow would make an empty one of any file's
    name, and the service would look after nothing."""
    from gate.errors import RegistryUnavailable
    from gate.registry.mlflow.preflight import preflight
    from gate.storage.redaction import redacted

    preflight(uri)
    scheme, _, path = uri.partition(":///")
    if scheme.startswith("sqlite") and not Path(unquote(path.partition("?")[0])).exists():
        raise RegistryUnavailable(
            f"there is no registry at {redacted(uri)}: the file is missing. Name the one that "
            "gate promote writes to with --tracking-uri or MLFLOW_TRACKING_URI."
        )


def _show(console: Console) -> None:
    console.print("stopped; what was begun is finished, what waits is in the inbox")
