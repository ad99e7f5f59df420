"""State: the database in which the gate keeps what it must not forget.

A file of SQLite, or PostgreSQL for several hosts. A file is made by whoever writes first, and never
again by the same object: where it was removed since, nothing can be written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from gate.state.database import READS, open_database, parsed_url, translated
from gate.storage.redaction import redacted


class State:
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
