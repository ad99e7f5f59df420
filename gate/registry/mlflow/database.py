"""Whether a database that MLflow would open can be used, found within seconds.

MLflow itself says nothing for 100 seconds before it gives up on a database server: ten tries, with
longer and longer rests between them.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gate.errors import RegistryError, RegistryUnavailable, StorageError
from gate.registry.mlflow.errors import translated
from gate.storage.redaction import redacted
from gate.storage.sqlite_errors import WAIT, trouble

_SERVERS = ("postgresql", "mysql", "mssql")
_TIMEOUT_S = 4
"""For one address of a server; a name may have several."""
_SILENCE_S = 3.0
"""After which it is said what is waited for."""
_TAKE_TIMEOUT = ("psycopg", "psycopg2", "pymysql", "mysqldb", "mysqlconnector")
"""Drivers that know `connect_timeout` in seconds."""
_log = logging.getLogger(__name__)


def usable(uri: str) -> None:
    """Raise RegistryUnavailable, StorageError or RegistryError where a database can't be used.

    URIs of anything else are left alone.
    """
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme == "sqlite":
        _file(uri)
    elif scheme in _SERVERS:
        _server(uri)


def _server(uri: str) -> None:
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.engine import make_url

    shown = redacted(uri)
    try:
        with (
            translated(uri, "reach the registry's database"),
            _announced(f"the database at {shown}"),
        ):
            url = make_url(uri)
            driver = url.get_dialect().driver
            limited = driver in _TAKE_TIMEOUT and "connect_timeout" not in url.query
            options: dict[str, Any] = {"connect_timeout": _TIMEOUT_S} if limited else {}
            create_engine(url, poolclass=NullPool, connect_args=options).connect().close()
    except RegistryError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise RegistryError(
                f"{shown} needs the driver {error.__cause__.name}: install it, or name another "
                "one in the URI, as in postgresql+psycopg://…"
            ) from error
        raise


@contextmanager
def _announced(what: str) -> Iterator[None]:
    """Say what is waited for, where it takes long."""
    patience = threading.Timer(_SILENCE_S, _log.warning, ("waiting for %s", what))
    patience.daemon = True
    patience.start()
    try:
        yield
    finally:
        patience.cancel()


def _file(uri: str) -> None:
    name = unquote(urlsplit(uri).path).removeprefix("/")
    if not name or name == ":memory:":
        raise RegistryError(f"{uri} is forgotten when the process ends. Name a file instead.")
    path = Path(name)
    folder = path.parent
    if not folder.is_dir():
        raise RegistryUnavailable(f"{uri}: the folder {folder} does not exist. Make it first.")
    if path.is_dir():
        raise RegistryUnavailable(f"{uri}: {path} is a folder, not a database. Name a file.")
    if not os.access(path if path.exists() else folder, os.W_OK) or not os.access(folder, os.W_OK):
        raise StorageError(f"{uri}: {path} or its folder can't be written. Fix permissions.")
    if path.exists():
        _read(path, uri)


def _read(path: Path, uri: str) -> None:
    """Open it as MLflow does: what a killed writer left beside it is taken back in, or undone."""
    present = f"{path.resolve().as_uri()}?mode=rw"
    try:
        with (
            _announced(f"the lock of {path}"),
            closing(sqlite3.connect(present, uri=True, timeout=2 * _TIMEOUT_S)) as opened,
        ):
            opened.execute("PRAGMA schema_version").fetchone()
    except sqlite3.DatabaseError as error:
        remedy = "Look at the disk and at permissions; leave the file where it is."
        if trouble(error) == "locked":
            raise RegistryUnavailable(f"{uri}: {error}. {WAIT}") from error
        if trouble(error) == "malformed":
            remedy = "Restore it from a copy; without one, move it aside to start anew."
        raise RegistryUnavailable(
            f"{uri}: {path} can't be read as a database: {error}. {remedy}"
        ) from error
