"""Opening a database, so that what was committed survives a crash of the machine."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from gate.errors import ServiceError, StateUnavailable
from gate.storage.redaction import without_passwords
from gate.storage.sqlite_errors import WAIT, trouble

READS = "gate_reads"
"""Execution option of a connection that will not write."""

_PATIENCE_S = 10
"""For a lock or an answer: the sender waits 30 s for ours."""
_IDLE_S = 8.0
"""In a transaction, between two statements, where a key far away may have to sign; others wait
`_PATIENCE_S` for its locks."""
_PAUSE_S = 0.02
_UNREADABLE = (
    "the database's URL can't be read. Expected sqlite:///FILE or postgresql://USER@HOST/NAME."
)
_LOOK = "Look at the database, its disk and its permissions."


def open_database(url: str, *, keeps_files_open: bool = True) -> Engine:
    """An engine for sqlite:///FILE or postgresql://…; connects to nothing yet. Unless it
    `keeps_files_open`, a FILE is closed after each use and is whole without those beside it.

    FILE is made here and never again: where it is removed later, nothing can be written, because
    what goes into a file without a name is lost. One that was put in its place is used.

    Raises ServiceError for a URL or folder that can't be used, or a driver that is not installed.
    """
    parsed = parsed_url(url)
    try:
        if parsed.get_backend_name() == "sqlite":
            return _sqlite(parsed, keeps_open=keeps_files_open)
        return create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            pool_timeout=_PATIENCE_S,
            connect_args={
                "connect_timeout": 5,
                # A network that is gone answers neither; by default that takes a quarter hour.
                "keepalives_idle": _PATIENCE_S,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                "tcp_user_timeout": _PATIENCE_S * 1000,
                "options": f"-c statement_timeout={_PATIENCE_S}s -c lock_timeout={_PATIENCE_S}s "
                # Who is stopped in the middle of a transaction must not stop all others.
                f"-c idle_in_transaction_session_timeout={_IDLE_S * 1000:.0f} "
                "-c synchronous_commit=on",
            },
        )
    except (ArgumentError, ValueError) as error:
        raise ServiceError(_UNREADABLE) from error
    except ModuleNotFoundError as error:
        raise ServiceError(
            f"the database needs the driver {error.name}: pip install 'parity-gate[postgresql]'"
        ) from error


def parsed_url(url: str) -> URL:
    """The URL in its parts. Raises ServiceError for one that can't be read."""
    try:
        return make_url(url)
    except (ArgumentError, ValueError) as error:
        raise ServiceError(_UNREADABLE) from error


@contextmanager
def translated(failure: str) -> Iterator[None]:
    """Raise StateUnavailable for the database's trouble: that `failure` happened, why, and what to
    do about it."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:  # the second: while it is opened
        cause = without_passwords(" ".join(str(getattr(error, "orig", None) or error).split()))
        remedy = WAIT if trouble(error) == "locked" else _LOOK
        raise StateUnavailable(f"{failure}: {cause[:400]}. {remedy}") from error


def insert_new(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that leaves out rows whose key is there."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    return postgresql.insert(table).on_conflict_do_nothing()


def alone(connection: Connection, name: str) -> bool:
    """Whether this transaction is the only one that asked so for `name`; never waits.

    Row locks can't do that: they know nothing of rows that others are about to insert. In sqlite
    whoever writes is alone anyway.
    """
    if connection.dialect.name == "sqlite":
        return True
    locked = select(func.pg_try_advisory_xact_lock(func.hashtext(name)))
    return bool(connection.execute(locked).scalar())


def wait_for_turn(connection: Connection, name: str) -> None:
    """As `alone`, but wait: `CREATE TABLE IF NOT EXISTS` of two at once can fail in PostgreSQL."""
    if connection.dialect.name != "sqlite":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(name))))


def _sqlite(url: URL, *, keeps_open: bool) -> Engine:
    if not url.database or url.database == ":memory:":
        raise ServiceError(
            "a database in memory is forgotten in a crash. Name a file: sqlite:///FILE"
        )
    path = Path(url.database).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
    except OSError as error:
        raise ServiceError(
            f"cannot make the database {path} or its folder: {error.strerror}. Fix its permissions."
        ) from error
    present = url.set(database=path.as_uri()).update_query_dict({"uri": "true", "mode": "rw"})
    pool: dict[str, Any] = {"pool_timeout": _PATIENCE_S} if keeps_open else {"poolclass": NullPool}
    engine = create_engine(present, connect_args={"timeout": _PATIENCE_S}, **pool)

    @event.listens_for(engine, "checkout")
    def _same_file(_connection: Any, record: Any, _proxy: Any) -> None:
        if record.info["file"] != _identity(path):
            raise DisconnectionError(f"{path} was removed or replaced")

    @event.listens_for(engine, "connect")
    def _durable(connection: Any, record: Any) -> None:
        record.info["file"] = _identity(path)
        connection.isolation_level = None  # we begin our transactions ourselves
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # A transaction that reads first and writes then could find itself overtaken.
        reads = connection.get_execution_options().get(READS)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch a new file's journal; sqlite refuses that at once where another opens it too, because
    two that waited with a look at the file in hand would wait for each other."""
    until = time.monotonic() + _PATIENCE_S
    while connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if trouble(error) != "locked" or time.monotonic() >= until:
                raise
            time.sleep(_PAUSE_S)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
