"""A quick look whether the registry can be used at all, before anything is measured or uploaded."""

from __future__ import annotations

from urllib.parse import urlsplit

from gate.errors import RegistryDenied, RegistryError, RegistryUnavailable
from gate.package import extras
from gate.registry.mlflow.database import usable
from gate.registry.mlflow.errors import START, denied, translated
from gate.registry.mlflow.process import lent, quiet_process
from gate.storage.redaction import redacted

_TIMEOUT_S = 4


def preflight(tracking_uri: str) -> None:
    """Raise within seconds if the registry can't be used.

    Of a server: GET /health, then one read as this user. Of a database server: a connection. Of a
    database file: it is one, nobody keeps it locked, and its folder can be written. Raises
    RegistryUnavailable, RegistryDenied, StorageError, RegistryError for a URI that can't hold a
    registry, or PackageMissing.
    """
    extras.require_module("mlflow")
    quiet_process()
    scheme = urlsplit(tracking_uri).scheme
    if scheme in ("http", "https"):
        _server(tracking_uri)
    elif scheme in ("", "file"):
        raise RegistryError(
            f"{tracking_uri} is a folder; MLflow keeps its registry in a database or behind a "
            "server. Set MLFLOW_TRACKING_URI to sqlite:///mlflow.db or http://…"
        )
    else:
        extras.require_module(extras.WHOLE_MLFLOW)
        usable(tracking_uri)


def _server(uri: str) -> None:
    from mlflow import MlflowClient
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    shown = redacted(uri)
    doing = "reach the registry"
    with translated(uri, doing):
        credentials = get_default_host_creds(uri.rstrip("/"))  # type: ignore[no-untyped-call]
        answer = http_request(  # type: ignore[no-untyped-call]
            credentials,
            "/health",
            "GET",
            timeout=_TIMEOUT_S,
            max_retries=0,
            raise_on_status=False,
        )
    if answer.status_code in (401, 403):
        raise RegistryDenied(denied(shown, doing))
    if answer.status_code != 200:
        raise RegistryUnavailable(
            f"GET {shown}/health answers {answer.status_code}, an MLflow server answers 200. "
            f"Check the address. {START}"
        )
    with translated(uri, "read the registry"), lent(uri):
        MlflowClient(tracking_uri=uri, registry_uri=uri).search_registered_models(max_results=1)
