"""Open the database and create its tables; portable locks and inserts."""

from __future__ import annotations

import sqlite3
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, create_engine, event, func, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from gate.errors import ServiceError, StateUnavailable, StorageError
from gate.storage.files import make_private_file
from gate.storage.safe_text import redacted, without_passwords

DEFAULT = "sqlite:///.gate/state.db"
_EXPECTED = "the state is sqlite:///FILE, postgresql://USER@HOST/DATABASE, or the path of a FILE"


def state_url(text: str) -> str:
    """The URL that is meant: itself; of a path without a scheme, that of the SQLite file there.
    Raises ValueError where the ledger can't be in such a database."""
    if "://" not in text:
        if not text.strip() or text == ":memory:" or Path(text).is_dir():
            raise ValueError(_EXPECTED)
        return sa.URL.create("sqlite", database=text).render_as_string()
    parts = urlsplit(text)
    scheme = parts.scheme.partition("+")[0]
    if scheme not in ("sqlite", "postgresql"):
        raise ValueError(_EXPECTED)
    if scheme == "sqlite" and parts.path.strip("/") in ("", ":memory:"):
        raise ValueError("a database in memory is forgotten in a crash: name a file")
    return text


_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_MALFORMED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_LOCKED_WORDS = ("database is locked", "database table is locked", "database schema is locked")
_MALFORMED_WORDS = ("disk image is malformed", "file is not a database")


WAIT = (
    "Another process holds it and nothing is damaged: leave the file and those beside it "
    "(-wal, -shm, -journal) where they are, and repeat when that process is done, or end it "
    "(fuser -v names it)."
)
"""What to do about a database that is locked."""


def trouble(error: BaseException) -> Literal["locked", "malformed"] | None:
    """Return whether the error, or its cause, is that of a locked or of a malformed database.

    Read from sqlite's own code, or from the message where a server passes it on.
    """
    for cause in _causes(error):
        code = getattr(cause, "sqlite_errorcode", None)
        if isinstance(code, int):
            kind = code & 0xFF  # the rest describes the cause more precisely
            return "locked" if kind in _LOCKED else "malformed" if kind in _MALFORMED else None
    words = str(error).lower()
    if any(phrase in words for phrase in _LOCKED_WORDS):
        return "locked"
    return "malformed" if any(phrase in words for phrase in _MALFORMED_WORDS) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


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


def open_database(url: str) -> Engine:
    """An engine for sqlite:///FILE or postgresql://…; connects to nothing yet. A FILE is closed
    after each use and is whole without those beside it.

    FILE is made here and never again: where it is removed later, nothing can be written, because
    what goes into a file without a name is lost. One that was put in its place is used.

    Raises ServiceError for a URL or folder that can't be used, or a driver that is not installed.
    """
    parsed = parsed_url(url)
    try:
        if parsed.get_backend_name() == "sqlite":
            return _sqlite(parsed)
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


def wait_for_turn(connection: Connection, name: str) -> None:
    """Wait for an advisory lock on `name`, which this transaction holds until it ends.

    SQLite has a single writer anyway. Concurrent `CREATE TABLE IF NOT EXISTS` can fail in
    PostgreSQL.
    """
    if connection.dialect.name != "sqlite":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(name))))


def _sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise ServiceError(
            "a database in memory is forgotten in a crash. Name a file: sqlite:///FILE"
        )
    path = Path(url.database).absolute()
    try:
        # Whoever may read the file may lock it, and keep everyone else from writing.
        make_private_file(path, with_suffixes=("-wal", "-shm", "-journal"))
    except StorageError as error:
        raise ServiceError(f"the database {path} can't be used: {error}") from error
    except OSError as error:
        raise ServiceError(
            f"cannot make the database {path} or its folder: {error.strerror}. Fix its permissions."
        ) from error
    present = url.set(database=path.as_uri()).update_query_dict({"uri": "true", "mode": "rw"})
    engine = create_engine(present, connect_args={"timeout": _PATIENCE_S}, poolclass=NullPool)

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


SCHEMA_VERSION = 2
"""Of the tables below. Version 1 had no `gate_schema`, and kept the pending move in `gate_note`."""

METADATA = sa.MetaData()
VERSIONS = sa.Table("gate_schema", METADATA, sa.Column("version", sa.Integer, primary_key=True))

LINES = sa.Table(
    "gate_ledger",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("line", sa.Text, nullable=False),
    sa.Column("signature", sa.Text),
)
"""`signature`: securesystemslib's, as JSON; none where it was written without a key."""

LOCKS = sa.Table(
    "gate_lock",
    METADATA,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
    sa.Column("pending", sa.Text, nullable=False),
)
"""`token`: a fencing token, new with each owner. `pending`: ids of the moves of `champion` that the
ledger has and the registry may not have yet, separated by spaces."""

TURN = "gate_ledger"
"""Whose turn it is to write."""

# The database refuses a change of its rows, too. That stops mistakes, not an administrator.
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
    for _text in _statements:
        _made = sa.DDL(_text)  # type: ignore[no-untyped-call]
        sa.event.listen(LINES, "after_create", _made.execute_if(dialect=_dialect))


LONGEST_LEASE_S = 60.0
"""A lease that ends later than this was made before the clock was set back, and does not count."""


def _old_state(connection: sa.Connection) -> str | None:
    """Return what only the program of schema version 1 can finish, and how; None: nothing."""
    tables = sa.inspect(connection).get_table_names()

    def has_row(table: sa.TableClause, *conditions: sa.ColumnElement[bool]) -> bool:
        found = sa.select(sa.literal(1)).select_from(table).where(*conditions)
        return connection.execute(found).first() is not None

    if "gate_note" in tables:
        notes, name = sa.table("gate_note"), sa.column("name", sa.String)
        if has_row(notes, name.like("move %"), name.not_like("%.damaged-%")):
            return "a promotion is unfinished: run gate reconcile MODEL with that version"
        declared = LINES.c.line.like('%"action":"same_registry"%')
        if has_row(notes, name == "same registry") and not has_row(LINES, declared):
            return (
                "the addresses of the registry are in no ledger entry: run gate reconcile MODEL "
                "--same-registry URI with that version"
            )
    if "gate_lock" in tables:
        now, until = clock(connection), sa.column("leased_until", sa.Double)
        if has_row(sa.table("gate_lock"), until.between(now, now + LONGEST_LEASE_S)):
            return "a promotion is running: wait until it ends"
    return None


def clock(connection: sa.Connection) -> Any:
    """Return seconds since the epoch, by the database's clock."""
    if connection.dialect.name == "sqlite":
        return (sa.func.julianday("now") - 2440587.5) * 86400.0
    return sa.func.extract("epoch", sa.func.clock_timestamp())


# A SQLite file, or PostgreSQL for several hosts. The first writer creates the file, and the same
# object never creates it again: where it was removed since, nothing can be written.
class StateDatabase:
    """One database. Its connections are closed when the object is no longer used."""

    def __init__(self, place: Path | str) -> None:
        """`place`: a file of SQLite, or a URL. Raises ServiceError for a URL that can't be read."""
        url = sa.URL.create("sqlite", database=str(place)) if isinstance(place, Path) else None
        parsed = url or parsed_url(str(place))
        self._url = parsed.render_as_string(hide_password=False)
        self.file = Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None
        """None: a server has it."""
        self.place = redacted(self._url) if self.file is None else str(self.file)
        """What messages call it; without a password."""
        self._engine: sa.Engine | None = None

    def has_tables(self, connection: sa.Connection) -> bool:
        """Return whether a ledger was begun in this database.

        Raises StateUnavailable for a newer one.
        """
        return self._version(connection) > 0

    def make_tables(self, connection: sa.Connection) -> None:
        """Make what is missing, and have this transaction be the only one that writes entries,
        until it ends. Raises StateUnavailable where another version of gate has to act first."""
        wait_for_turn(connection, TURN)
        version = self._version(connection)
        if version == SCHEMA_VERSION:
            return
        if version:
            unfinished = _old_state(connection)
            if unfinished is not None:
                raise StateUnavailable(
                    f"the database {self.place} was written by an older version of gate, and "
                    f"{unfinished}; then repeat."
                )
            LOCKS.drop(connection, checkfirst=True)
        METADATA.create_all(connection)
        connection.execute(sa.insert(VERSIONS).values(version=SCHEMA_VERSION))

    def _version(self, connection: sa.Connection) -> int:
        """The schema's; 0 where there are no tables."""
        tables = sa.inspect(connection)
        if not tables.has_table(VERSIONS.name):
            return 1 if tables.has_table(LINES.name) else 0
        version = int(connection.execute(sa.select(sa.func.max(VERSIONS.c.version))).scalar() or 0)
        if version > SCHEMA_VERSION:
            raise StateUnavailable(
                f"the database {self.place} has schema version {version}, this gate reads up to "
                f"{SCHEMA_VERSION}. Upgrade it: pip install --upgrade parity-gate"
            )
        return version

    @property
    def is_there(self) -> bool:
        """False: a file that does not exist yet, or that was removed."""
        return self.file is None or self.file.exists()

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection that will not write, to a database that is there. Raises StateUnavailable,
        ServiceError."""
        with self._translated(), self._opened().connect() as connection:
            yield connection.execution_options(**{READS: True})

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction: on disk afterwards, or not at all where anything is raised. Raises
        StateUnavailable, ServiceError."""
        with self._translated(), self._opened().begin() as connection:
            yield connection

    def _opened(self) -> sa.Engine:
        if self._engine is None:
            self._engine = open_database(self._url)
            weakref.finalize(self, self._engine.dispose)
        return self._engine

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise StateUnavailable for the database's trouble, with what to do about it."""
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error) as error:  # the second: while it is opened
            cause = without_passwords(" ".join(str(getattr(error, "orig", None) or error).split()))
            remedy = WAIT if trouble(error) == "locked" else _LOOK
            raise StateUnavailable(
                f"the database {self.place} can't be used now: {cause[:400]}. {remedy}"
            ) from error
