"""How MLflow behaves within our process: quiet, and quick to give up on a dead server."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_DEFAULTS = {
    # MLflow's own are 7 retries with 120 s each: minutes of silence before a dead server is told.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Of libpq, which would wait as long as the network does, for each address of the server.
    "PGCONNECT_TIMEOUT": "5",
    # A gate in CI has no business talking to anybody but the registry.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_URI = "MLFLOW_TRACKING_URI"
_LEVELS = {
    "mlflow.models.model": logging.ERROR,
    "mlflow.store.model_registry.abstract_store": logging.WARNING,
    "alembic": logging.WARNING,
    # Logs a traceback before it raises the same error, which we tell in our words.
    "mlflow.store.db.utils": logging.CRITICAL,
}

# Warnings of MLflow about its own code, on importing it: nothing that our user could mend.
_NOISE = ("The ``noload`` loader strategy", ".*Any type hint is inferred as AnyType")


def quiet_process() -> None:
    """Set what the user has not set; before MLflow is first imported if possible."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)


@contextmanager
def lent(tracking_uri: str) -> Iterator[None]:
    """Lend MLflow our tracking URI, and put all back as it was.

    Parts of MLflow know only the process-wide one: `log_model`, `create_model_version` and
    downloads, even through a client that was given another. The public `mlflow.set_tracking_uri`
    can't put back "never set", so MLflow's own context manager is used; it forgets the
    environment variable, which is put back here. Not for several threads with several URIs.
    """
    from mlflow.tracking._tracking_service.utils import _use_tracking_uri

    before = os.environ.get(_URI)
    try:
        with warnings.catch_warnings(), _use_tracking_uri(tracking_uri):
            for message in _NOISE:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        if before is None:
            os.environ.pop(_URI, None)
        else:
            os.environ[_URI] = before
