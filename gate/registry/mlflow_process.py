"""How MLflow behaves within our process: quiet, and quick to give up on a dead server."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

_DEFAULTS = {
    # MLflow's own are 7 retries with 120 s each: minutes of silence before a dead server is told.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # A gate in CI has no business talking to anybody but the registry.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# What MLflow logs as information (migrations, requirements) or logs before it raises anyway.
_CHATTY = ("mlflow.models.model", "mlflow.store.db.utils", "alembic")


def quiet_process() -> None:
    """Set what the user has not set; before MLflow is first imported if possible."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def restored_environment(name: str) -> Iterator[None]:
    """Put an environment variable back as it was."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def redacted(uri: str) -> str:
    """The URI without user and password."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
