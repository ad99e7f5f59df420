"""Preflight checks, error translation, quiet client."""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gate import installation
from gate.errors import (
    GateError,
    RegistryDenied,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
    StorageError,
)
from gate.ledger.database import WAIT, causes, database_problem
from gate.storage.safe_text import redacted, without_passwords
from gate.storage.workspace import DEFAULT, VARIABLE, current_workspace

_STORAGE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is missing",
    errno.EPERM: "permission is missing",
    errno.EFBIG: "the file is too big for the file system",
}

_STORAGE_WORDS = ("disk is full", "no space left", "readonly database", "read-only file system")
_DENIED_CODES = ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED")

_NO_WORKSPACE = ("RESOURCE_DOES_NOT_EXIST", "FEATURE_DISABLED")
"""The server's error for a workspace that does not exist."""

_UNAVAILABLE_CODES = ("TEMPORARILY_UNAVAILABLE", "DEADLINE_EXCEEDED", "REQUEST_LIMIT_EXCEEDED")

_UNREACHED_WORDS = (
    "max retries exceeded", "connection refused", "timed out", "connection aborted",
    # from database drivers
    "timeout expired", "failed to resolve", "could not translate host",
    "server closed the connection", "is starting up", "is shutting down",
    "too many clients", "too many connections",
    "can't connect to", "terminating connection", "connection is lost",
)  # fmt: skip


START = (
    "Start it, or unset MLFLOW_TRACKING_URI to use the local database; "
    "`make ui` serves the local one."
)


@contextmanager
def translate_errors(uri: str, action: str) -> Iterator[None]:
    """Raise RegistryUnavailable, RegistryDenied, ResourceGone, StorageError or RegistryError.

    Deliberately broad: depending on the store, MLflow raises errors of requests, SQLAlchemy,
    sqlite3 or the artifact store's client.
    """
    try:
        yield
    except GateError:
        raise
    except Exception as error:
        missing = installation.missing(error)
        if missing is not None:
            raise missing from error
        if database_problem(error) == "locked":
            raise RegistryUnavailable(
                f"cannot {action} at {redacted(uri)}: the database is locked. {WAIT}"
            ) from error
        raise _translate(error, uri=redacted(uri), action=action) from error


def is_gone(error: Exception) -> bool:
    """Return whether the error means that a resource does not exist."""
    if isinstance(error, FileNotFoundError):
        return True
    statuses = set(re.findall(r"\b(\d{3}) (?:Client|Server) Error", str(error)))
    code = getattr(error, "error_code", None)
    return code == "RESOURCE_DOES_NOT_EXIST" or statuses == {"404"}


def _translate(error: Exception, *, uri: str, action: str) -> GateError:
    # MLflow's message contains the address with user and password.
    text = without_passwords(" ".join(str(error).split()))
    shown = text if len(text) <= 400 else f"{text[:400]} …"
    message = text.lower()
    for cause in causes(error):
        reason = _STORAGE.get(getattr(cause, "errno", None) or 0)
        if isinstance(cause, OSError) and reason:
            where = cause.filename or uri
            return StorageError(f"cannot {action}: {where}: {reason}. Fix this, then repeat.")
    if any(words in message for words in _STORAGE_WORDS):
        return StorageError(f"cannot {action} at {uri}: {shown}. Free space or fix permissions.")
    code, status = str(getattr(error, "error_code", "")), _status(error, text)
    if code in _DENIED_CODES or status in (401, 403):
        return RegistryDenied(denied(uri, action))
    is_unavailable = code in _UNAVAILABLE_CODES or status in (429, 502, 503, 504)
    if is_unavailable or _is_unreachable(error, message):
        return RegistryUnavailable(f"cannot {action}: no answer from {uri}: {shown} {START}")
    if code == "RESOURCE_DOES_NOT_EXIST":
        return ResourceGone(
            f"cannot {action} at {uri}: {shown}. The run or version was deleted, or belongs to "
            "another server: repeat the stage that creates it."
        )
    return RegistryError(f"cannot {action} at {uri}: {type(error).__name__}: {shown}")


def denied(uri: str, action: str) -> str:
    """Return the error message, with remedies, for a server that refuses this user."""
    return (
        f"cannot {action}: {uri} refuses this user. A promotion needs EDIT on the registered model "
        "(and the right to create it the first time): set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD of a user with this permission, or ask an administrator."
    )


def _status(error: Exception, text: str) -> int | None:
    """Return the HTTP status, from the response if there is one, else from MLflow's message."""
    for cause in causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    match = re.search(r"failed with error code (\d{3})\b", text)
    return int(match[1]) if match else None


def _is_unreachable(error: Exception, message: str) -> bool:
    refused = any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes(error))
    return refused or any(words in message for words in _UNREACHED_WORDS)


# MLflow itself tries a database server ten times with growing delays, 100 seconds without a
# message.
_SERVERS = ("postgresql", "mysql", "mssql")

_TIMEOUT_S = 4
"""Timeout in seconds for one address of a server. A name may have several."""

_SILENCE_S = 3.0
"""Seconds after which a message names what the command is waiting for."""

_TIMEOUT_DRIVERS = ("psycopg", "psycopg2", "pymysql", "mysqldb", "mysqlconnector")
"""Drivers with the option `connect_timeout` in seconds."""

_log = logging.getLogger(__name__)


def check_database(uri: str) -> None:
    """Raise RegistryUnavailable, StorageError or RegistryError if a database can't be used.

    Ignores URIs that are not databases.
    """
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme == "sqlite":
        _check_file(uri)
    elif scheme in _SERVERS:
        _check_server(uri)


def _check_server(uri: str) -> None:
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.engine import make_url

    shown = redacted(uri)
    try:
        with (
            translate_errors(uri, "reach the registry's database"),
            _log_if_slow(f"the database at {shown}"),
        ):
            url = make_url(uri)
            driver = url.get_dialect().driver
            limited = driver in _TIMEOUT_DRIVERS and "connect_timeout" not in url.query
            options: dict[str, Any] = {"connect_timeout": _TIMEOUT_S} if limited else {}
            create_engine(url, poolclass=NullPool, connect_args=options).connect().close()
    except RegistryError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise RegistryError(
                f"{shown} needs the driver {error.__cause__.name}. Install it, or set another "
                "one in the URI, as in postgresql+psycopg://…"
            ) from error
        raise


@contextmanager
def _log_if_slow(label: str) -> Iterator[None]:
    """Print what the command waits for if it takes long."""
    timer = threading.Timer(_SILENCE_S, _log.warning, ("waiting for %s", label))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_file(uri: str) -> None:
    name = unquote(urlsplit(uri).path).removeprefix("/")
    if not name or name == ":memory:":
        raise RegistryError(f"{uri} is lost when the process ends. Use a file instead.")
    path = Path(name)
    folder = path.parent
    if not folder.is_dir():
        raise RegistryUnavailable(f"{uri}: the folder {folder} does not exist. Create it first.")
    if path.is_dir():
        raise RegistryUnavailable(f"{uri}: {path} is a folder, not a database. Use a file.")
    if not os.access(path if path.exists() else folder, os.W_OK) or not os.access(folder, os.W_OK):
        raise StorageError(f"{uri}: {path} or its folder can't be written. Fix permissions.")
    if path.exists():
        _open_file(path, uri)


def _open_file(path: Path, uri: str) -> None:
    """Open the database as MLflow does: SQLite recovers the journal of a killed writer."""
    uri_existing = f"{path.resolve().as_uri()}?mode=rw"
    try:
        with (
            _log_if_slow(f"the lock of {path}"),
            closing(sqlite3.connect(uri_existing, uri=True, timeout=2 * _TIMEOUT_S)) as connection,
        ):
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.DatabaseError as error:
        remedy = "Check the disk and the permissions, and do not move the file."
        if database_problem(error) == "locked":
            raise RegistryUnavailable(f"{uri}: {error}. {WAIT}") from error
        if database_problem(error) == "malformed":
            remedy = (
                "Restore it from a backup. Without one, move it away to start with an empty one."
            )
        raise RegistryUnavailable(
            f"{uri}: {path} can't be read as a database: {error}. {remedy}"
        ) from error


_DEFAULTS = {
    # MLflow's own are 7 retries with 120 s each: minutes without a message before a dead server is
    # reported.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # A setting of libpq, which otherwise waits for the network timeout for each address.
    "PGCONNECT_TIMEOUT": "5",
    # A gate in CI must connect to the registry only.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

_URI = "MLFLOW_TRACKING_URI"

_LEVELS = {
    "mlflow.models.model": logging.ERROR,
    "mlflow.store.model_registry.abstract_store": logging.WARNING,
    "alembic": logging.WARNING,
    # Logs a traceback before it raises an error that the gate reports itself.
    "mlflow.store.db.utils": logging.CRITICAL,
}


# Warnings of MLflow about its own code on import. Users can't fix them.
_IGNORED_WARNINGS = ("The ``noload`` loader strategy", ".*Any type hint is inferred as AnyType")


def quiet_process() -> None:
    """Set variables that the user has not set, if possible before MLflow is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)


@contextmanager
def using_tracking_uri(tracking_uri: str, *, workspace: str | None = None) -> Iterator[None]:
    """Set MLflow's process-wide tracking URI and workspace inside the block, then restore both.
    `workspace`: None for that of the environment.

    Parts of MLflow use only the process-wide URI: `log_model`, `create_model_version` and
    downloads, even through a client with another one. The public `mlflow.set_tracking_uri` can't
    restore "never set", so this uses MLflow's context manager, and restores the environment
    variable that it drops. The workspace is set in the environment, too, for the threads of MLflow.
    Not for several threads with different URIs or workspaces.
    """
    from mlflow.tracking._tracking_service.utils import _use_tracking_uri
    from mlflow.utils.workspace_context import WorkspaceContext

    previous = os.environ.get(_URI)
    bound = None if workspace in (None, DEFAULT) else workspace
    context = nullcontext() if workspace is None else WorkspaceContext(bound)
    try:
        with warnings.catch_warnings(), _use_tracking_uri(tracking_uri), context:
            for message in _IGNORED_WARNINGS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        if previous is None:
            os.environ.pop(_URI, None)
        else:
            os.environ[_URI] = previous


def check_server(tracking_uri: str) -> None:
    """Raise within seconds if the registry can't be used.

    For a server: GET /health, then one read as this user. For a database server: connect. For a
    database file: it must be valid, unlocked and in a writable folder. Raises RegistryUnavailable,
    RegistryDenied, StorageError, PackageMissing, and RegistryError for a URI that can't be a
    registry.
    """
    installation.require_module("mlflow")
    quiet_process()
    refuse_folder(tracking_uri)
    if urlsplit(tracking_uri).scheme in ("http", "https"):
        from mlflow import MlflowClient

        _check_health(tracking_uri)
        with calling(tracking_uri, "read the registry"):
            client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
            client.search_registered_models(max_results=1)
    else:
        installation.require_module(installation.FULL_MLFLOW)
        check_database(tracking_uri)
    workspace = current_workspace()
    if workspace is not None:
        require_workspaces(tracking_uri, workspace)


def refuse_folder(uri: str) -> None:
    """Raise RegistryError for a path, which can't be a registry."""
    if urlsplit(uri).scheme in ("", "file"):
        raise RegistryError(
            f"{uri} is a folder; MLflow keeps its registry in a database or behind a server. Set "
            "MLFLOW_TRACKING_URI to sqlite:///mlflow.db or http://…"
        )


def require_workspaces(uri: str, workspace: str) -> None:
    """Raise RegistryError unless the registry supports workspaces. A registry without them ignores
    the workspace and returns the models of all. Also raises the exceptions of `check_server`."""
    from mlflow.environment_variables import MLFLOW_ENABLE_WORKSPACES

    shown = redacted(uri)
    if urlsplit(uri).scheme not in ("http", "https"):
        enabled = bool(MLFLOW_ENABLE_WORKSPACES.get())
        remedy = "Set MLFLOW_ENABLE_WORKSPACES=true"
    else:
        enabled, remedy = _has_workspaces(uri), "Start the server with --enable-workspaces"
    if not enabled:
        raise RegistryError(
            f"{shown} does not support workspaces, and '{workspace}' was requested. {remedy}, or "
            f"unset the workspace ({VARIABLE})."
        )


def _has_workspaces(uri: str) -> bool:
    response = _get(uri, "/api/3.0/mlflow/server-info", action="read which features the server has")
    if response.status_code not in (200, 404):
        raise RegistryUnavailable(
            f"{redacted(uri)} returned {response.status_code}. Try again later."
        )
    return _field(response, "workspaces_enabled") is True  # older servers lack the field


def reach(uri: str) -> None:
    """Raise RegistryUnavailable, RegistryDenied or StorageError unless the registry responds now.
    For a server GET /health, else like `check_database`. Thread-safe."""
    if urlsplit(uri).scheme in ("http", "https"):
        _check_health(uri)
    else:
        check_database(uri)


def _get(uri: str, endpoint: str, *, action: str) -> Any:
    """Return the response of a server. Raises RegistryUnavailable, RegistryDenied."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    with translate_errors(uri, action):
        credentials = get_default_host_creds(uri.rstrip("/"))
        response = http_request(
            credentials,
            endpoint,
            "GET",
            timeout=_TIMEOUT_S,
            max_retries=0,
            raise_on_status=False,
        )
    if response.status_code in (401, 403):
        raise RegistryDenied(denied(redacted(uri), action))
    return response


def _check_health(uri: str) -> None:
    shown = redacted(uri)
    response = _get(uri, "/health", action="reach the registry")
    if (
        response.status_code != 200
        and current_workspace()
        and _field(response, "error_code") in _NO_WORKSPACE
    ):
        raise RegistryError(
            f"{shown} has no workspace '{current_workspace()}'. Set an existing one with "
            f"{VARIABLE}, or create it."
        )
    if response.status_code != 200:
        raise RegistryUnavailable(
            f"GET {shown}/health returned {response.status_code}, expected 200 from MLflow. "
            f"Check the address. {START}"
        )


def _field(response: Any, name: str) -> object:
    try:
        return response.json()[name]
    except (ValueError, KeyError, TypeError):
        return None


@contextmanager
def calling(uri: str, action: str, *, workspace: str | None = None) -> Iterator[None]:
    """Set MLflow's tracking URI (`using_tracking_uri`) and translate its errors."""
    with translate_errors(uri, action), using_tracking_uri(uri, workspace=workspace):
        yield
