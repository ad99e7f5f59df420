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
from sqlalchemy import Connection, Engine, Table, create_engine, event, func, select
from sqlalchemy.dialects import postgresql, sqlite
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
    Raises ValueError where the ledger and the inbox can't be in such a database."""
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
    """Whether the error, or what caused it, is of a locked or of a malformed database.

    By sqlite's own code; by its words where a server passes them on.
    """
    for cause in _causes(error):
        code = getattr(cause, "sqlite_errorcode", None)
        if isinstance(code, int):
            kind = code & 0xFF  # the rest tells more precisely how
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
        # Whoever may read the file may lock it, and keep everyone else from writing.
        make_private_file(path, with_suffixes=("-wal", "-shm", "-journal"))
    except StorageError as error:
        raise ServiceError(f"the database {path} can't be used: {error}") from error
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


# That rows of the ledger are neither changed nor removed is refused by the database too: no wall
# against who owns it, but one against a slip.


METADATA = sa.MetaData()

LINES = sa.Table(
    "gate_ledger",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("line", sa.Text, nullable=False),
    sa.Column("signature", sa.Text),
)
"""`signature`: securesystemslib's, as JSON; none where it was written without a key."""

NOTES = sa.Table(
    "gate_note",
    METADATA,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("at", sa.String(64), nullable=False),
    sa.Column("signature", sa.Text),
)

LOCKS = sa.Table(
    "gate_lock",
    METADATA,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
)

TURN = "gate_ledger"
"""Whose turn it is to write."""

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


def are_made(connection: sa.Connection) -> bool:
    """Whether anybody ever wrote into this database."""
    return bool(sa.inspect(connection).has_table(LINES.name))


def make(connection: sa.Connection) -> None:
    """Make them where they are not there, and have this transaction be the only one that writes
    lines, until it ends."""
    wait_for_turn(connection, TURN)
    if not are_made(connection):
        METADATA.create_all(connection)


# A file of SQLite, or PostgreSQL for several hosts. A file is made by whoever writes first, and
# never again by the same object: where it was removed since, nothing can be written.


class StateDatabase:
    """One database. Its connections are closed when nobody uses the object any more."""

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

    @property
    def is_there(self) -> bool:
        """False: a file that nobody has made, or that was removed."""
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
            self._engine = open_database(self._url, keeps_files_open=False)
            weakref.finalize(self, self._engine.dispose)
        return self._engine

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with translated(f"the database {self.place} can't be used now"):
            yield
