"""A call to MLflow: with our tracking URI, without its noise, its errors in the gate's tree.

One module, because pages, runs and views call it alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gate.registry.mlflow.errors import translated
from gate.registry.mlflow.process import lent


@contextmanager
def calling(uri: str, doing: str) -> Iterator[None]:
    """Raises RegistryUnavailable, RegistryDenied, StorageError or RegistryError."""
    with translated(uri, doing), lent(uri):
        yield
