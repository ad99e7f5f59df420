"""Open the database and create its tables; portable locks and inserts."""

from __future__ import annotations

import sqlite3
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from gate.errors import ServiceError, StateUnavailable, StorageError
from gate.storage.files import make_private_file
from gate.storage.safe_text import redacted, without_passwords

DEFAULT = "sqlite:///.gate/state.db"
_EXPECTED = "the state is sqlite:///FILE, postgresql://HOST/DATABASE, or the path of a FILE"


def state_url(text: str) -> str:
    """Return the URL of a database; for a path without a scheme, that of the SQLite file.

    Raises ValueError if the ledger can't be stored in such a database.
    """
    if "://" not in text:
        if not text.strip() or text == ":memory:" or Path(text).is_dir():
            raise ValueError(_EXPECTED)
        return sa.URL.create("sqlite", database=text).render_as_string()
    parts = urlsplit(text)
    scheme = parts.scheme.partition("+")[0]
    if scheme not in ("sqlite", "postgresql"):
        raise ValueError(_EXPECTED)
    if scheme == "sqlite" and parts.path.strip("/") in ("", ":memory:"):
        raise ValueError("a database in memory would be lost when the process ends: name a file")
    if scheme == "sqlite" and Path(unquote(parts.path[1:])).is_dir():
        raise ValueError(_EXPECTED)
    return text


_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_MALFORMED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_LOCKED_WORDS = ("database is locked", "database table is locked", "database schema is locked")
_MALFORMED_WORDS = ("disk image is malformed", "file is not a database")


WAIT = (
    "Another process has locked it; nothing is damaged. Leave the file and its -wal, -shm and "
    "-journal files in place. Retry when that process is done, or end it (fuser -v FILE shows it)."
)
"""Remedy for a locked database."""


def database_problem(error: BaseException) -> Literal["locked", "malformed"] | None:
    """Return whether the error or one of its causes is a locked or a malformed database.

    Uses SQLite's error code, or the message if a server passed the error on.
    """
    for cause in causes(error):
        code = getattr(cause, "sqlite_errorcode", None)
        if isinstance(code, int):
            code &= 0xFF  # The higher bits are SQLite's extended code.
            return "locked" if code in _LOCKED else "malformed" if code in _MALFORMED else None
    message = str(error).lower()
    if any(phrase in message for phrase in _LOCKED_WORDS):
        return "locked"
    return "malformed" if any(phrase in message for phrase in _MALFORMED_WORDS) else None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and then its causes or contexts."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


READ_ONLY = "gate_reads"
"""Execution option of a connection that only reads."""


_TIMEOUT_S = 10
"""Maximum wait for a lock or a response. MLflow waits 30 s for the response to a webhook."""

_IDLE_S = 8.0
"""Maximum time between two statements of a transaction, during which a remote key may have to sign.
Less than `_TIMEOUT_S`, the time that other processes wait for the locks."""

_RETRY_S = 0.02

_CHECK_SERVER = "Check the database server or the disk, and the permissions."


def _open(url: sa.URL) -> sa.Engine:
    """Return an engine for sqlite:///FILE or postgresql://…, without connecting to it.

    Creates FILE if it does not exist. If FILE is removed later, writing fails: data written to a
    deleted file would be lost. A file that replaced it is used. FILE is closed after each use, and
    then complete without its -wal file.

    Raises ServiceError for a folder that can't be used, or a driver that is not installed.
    """
    if url.get_backend_name() == "sqlite":
        return _open_file(url)
    try:
        return sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            pool_timeout=_TIMEOUT_S,
            connect_args={
                "connect_timeout": 5,
                # Detect a lost network in seconds. By default that takes 15 minutes.
                "keepalives_idle": _TIMEOUT_S,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                "tcp_user_timeout": _TIMEOUT_S * 1000,
                "options": f"-c statement_timeout={_TIMEOUT_S}s -c lock_timeout={_TIMEOUT_S}s "
                # A process suspended in a transaction must not block all others.
                f"-c idle_in_transaction_session_timeout={_IDLE_S * 1000:.0f} "
                "-c synchronous_commit=on",
            },
        )
    except ModuleNotFoundError as error:
        raise ServiceError(
            f"the database needs the driver {error.name}: pip install 'parity-gate[postgresql]'"
        ) from error


def _open_file(url: sa.URL) -> sa.Engine:
    path = Path(url.database or "").absolute()
    try:
        # Private, because a user who can read the file can lock it and so block all writers.
        make_private_file(path, with_suffixes=("-wal", "-shm", "-journal"))
    except StorageError as error:
        raise ServiceError(f"the database {path} can't be used: {error}") from error
    except OSError as error:
        raise ServiceError(
            f"cannot create the database {path} or its folder: {error.strerror}. Fix the "
            "permissions."
        ) from error
    present = url.set(database=path.as_uri()).update_query_dict({"uri": "true", "mode": "rw"})
    engine = sa.create_engine(present, connect_args={"timeout": _TIMEOUT_S}, poolclass=NullPool)

    @sa.event.listens_for(engine, "checkout")
    def _same_file(_connection: Any, record: Any, _proxy: Any) -> None:
        if record.info["file"] != _identity(path):
            raise DisconnectionError(f"{path} was removed or replaced")

    @sa.event.listens_for(engine, "connect")
    def _durable(connection: Any, record: Any) -> None:
        record.info["file"] = _identity(path)
        connection.isolation_level = None  # `_begin` starts the transactions.
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # A transaction that begins with a read can't write after another process wrote.
        reads = connection.get_execution_options().get(READ_ONLY)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch a new file to write-ahead logging. Retries, because SQLite fails immediately, to avoid
    a deadlock, if another process does the same."""
    deadline = time.monotonic() + _TIMEOUT_S
    while connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if database_problem(error) != "locked" or time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


SCHEMA_VERSION = 2
"""Version of the tables below. Version 1 had no `gate_schema`."""

METADATA = sa.MetaData()
VERSIONS = sa.Table("gate_schema", METADATA, sa.Column("version", sa.Integer, primary_key=True))

LINES = sa.Table(
    "gate_ledger",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("line", sa.Text, nullable=False),
    sa.Column("signature", sa.Text),
)
"""`signature`: securesystemslib's signature as JSON; null if written without a key."""

LOCKS = sa.Table(
    "gate_lock",
    METADATA,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
    sa.Column("pending", sa.Text, nullable=False),
)
"""`token`: a fencing token, new with each owner. `pending`: IDs, separated by spaces, of the moves
of `champion` that the ledger has and the registry may not have yet."""

WRITE_LOCK = "gate_ledger"
"""Name of the advisory lock for writing entries."""

# Triggers also prevent changes of the rows: a protection from mistakes, not from administrators.
_REFUSAL = "the ledger is append-only"

_SQLITE = [
    f"CREATE TRIGGER gate_ledger_{event.lower()} BEFORE {event} ON gate_ledger "
    f"BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
    for event in ("UPDATE", "DELETE")
]

_POSTGRESQL = [
    "CREATE OR REPLACE FUNCTION gate_ledger_refuses() RETURNS trigger AS "
    f"$$ BEGIN RAISE EXCEPTION '{_REFUSAL}'; END $$ LANGUAGE plpgsql",
    "CREATE TRIGGER gate_ledger_rows BEFORE UPDATE OR DELETE ON gate_ledger "
    "FOR EACH ROW EXECUTE FUNCTION gate_ledger_refuses()",
    "CREATE TRIGGER gate_ledger_all BEFORE TRUNCATE ON gate_ledger "
    "FOR EACH STATEMENT EXECUTE FUNCTION gate_ledger_refuses()",
]

for _dialect, _statements in (("sqlite", _SQLITE), ("postgresql", _POSTGRESQL)):
    for _statement in _statements:
        _trigger = sa.DDL(_statement)  # type: ignore[no-untyped-call]
        sa.event.listen(LINES, "after_create", _trigger.execute_if(dialect=_dialect))


class StateDatabase:
    """A SQLite file, or a PostgreSQL database for several hosts.

    The first writer creates the file. The connections are closed when the object
    is garbage-collected.
    """

    def __init__(self, location: Path | str) -> None:
        """`location`: a SQLite file or a URL. Raises ServiceError for a URL that is not valid."""
        try:
            self._url = (
                sa.URL.create("sqlite", database=str(location))
                if isinstance(location, Path)
                else sa.make_url(location)
            )
        except (ArgumentError, ValueError) as error:
            raise ServiceError(
                "the database URL is not valid. Expected sqlite:///FILE or "
                "postgresql://HOST/DATABASE."
            ) from error
        is_file, database = self._url.get_backend_name() == "sqlite", self._url.database
        if is_file and database in (None, "", ":memory:"):
            raise ServiceError(
                "a database in memory would be lost when the process ends. Name a file: "
                "sqlite:///FILE"
            )
        self.file = Path(database or "") if is_file else None
        """The SQLite file; None for PostgreSQL."""
        self.location = str(self.file or redacted(self._url.render_as_string(hide_password=False)))
        """The path or the URL without a password, for messages."""
        self._engine: sa.Engine | None = None

    def has_tables(self, connection: sa.Connection) -> bool:
        """Return whether the database contains a ledger.

        Raises StateUnavailable for another version of the schema.
        """
        inspector = sa.inspect(connection)
        if not inspector.has_table(LINES.name):
            return False
        version = 1
        if inspector.has_table(VERSIONS.name):
            version = connection.execute(sa.select(sa.func.max(VERSIONS.c.version))).scalar() or 0
        if version != SCHEMA_VERSION:
            remedy = (
                "Upgrade: pip install --upgrade parity-gate"
                if version > SCHEMA_VERSION
                else "Use a new database."
            )
            raise StateUnavailable(
                f"the database {self.location} has schema version {version}, this version of gate "
                f"supports {SCHEMA_VERSION}. {remedy}"
            )
        return True

    def make_tables(self, connection: sa.Connection) -> None:
        """Create missing tables, and lock the ledger for writing until the transaction ends.

        Raises StateUnavailable for another version of the schema.
        """
        if connection.dialect.name != "sqlite":  # SQLite has one writer.
            key = sa.func.hashtext(WRITE_LOCK)
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
        if not self.has_tables(connection):
            METADATA.create_all(connection)
            connection.execute(sa.insert(VERSIONS).values(version=SCHEMA_VERSION))

    @property
    def exists(self) -> bool:
        """Return False for a file that does not exist yet or was removed."""
        return self.file is None or self.file.exists()

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a connection for reading an existing database.

        Raises StateUnavailable, ServiceError.
        """
        with self._translated(), self._opened().connect() as connection:
            yield connection.execution_options(**{READ_ONLY: True})

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that is durable afterwards, or rolled back if an exception is raised.

        Raises StateUnavailable, ServiceError.
        """
        with self._translated(), self._opened().begin() as connection:
            yield connection

    def _opened(self) -> sa.Engine:
        if self._engine is None:
            self._engine = _open(self._url)
            weakref.finalize(self, self._engine.dispose)
        return self._engine

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the exceptions of the database into StateUnavailable with a remedy."""
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error) as error:  # The second is raised while opening.
            cause = without_passwords(" ".join(str(getattr(error, "orig", None) or error).split()))
            remedy = WAIT if database_problem(error) == "locked" else _CHECK_SERVER
            raise StateUnavailable(
                f"the database {self.location} can't be used now: {cause[:400]}. {remedy}"
            ) from error
