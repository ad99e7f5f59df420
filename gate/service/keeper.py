"""Where the service keeps the head of its ledger: beside what is deployed, and in its inbox.

One store and one inbox belong to one ledger. Replicas share the inbox: whoever read more lines than
is kept there has its word, and nobody takes it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from gate.errors import EvidenceError
from gate.registry.head import Head, HeadFile, Keeper
from gate.registry.ledger import Ledger
from gate.service.database import (
    READS,
    insert_new,
    open_database,
    parsed_url,
    translated,
    wait_for_turn,
)
from gate.service.settings import Settings
from gate.storage.redaction import redacted

HEAD_FILE = "ledger-head.json"
_THE_ONE = 1
_METADATA = sa.MetaData()
_HEADS = sa.Table(
    "gate_ledger_head",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("lines", sa.Integer, nullable=False),
    sa.Column("head", sa.Text, nullable=False),
)


def kept_ledger(settings: Settings) -> Ledger:
    """The ledger of a service, with its keepers."""
    return Ledger(settings.ledger, keepers=keepers(settings.store, settings.inbox_url))


def keepers(store: Path, inbox_url: str | None) -> tuple[Keeper, ...]:
    """The keepers of the ledger that belongs to this store and this inbox; None: to the store
    alone. Raises ServiceError for a URL that can't be read."""
    in_store = HeadFile(store / HEAD_FILE, place=f"the store {store}")
    return (in_store,) if inbox_url is None else (in_store, InboxKeeper(inbox_url))


class InboxKeeper:
    """A keeper in the database of the inbox. Where that is a file that is not there, nothing is
    kept: only the service makes it."""

    def __init__(self, url: str) -> None:
        parsed = parsed_url(url)
        self.place = f"the inbox {redacted(parsed.render_as_string())}"
        self._url = url
        self._file = Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None

    def head(self) -> Head | None:
        """As `Keeper`."""
        if not self._there:
            return None
        with self._opened() as engine, engine.connect() as connection:
            reading = connection.execution_options(**{READS: True})
            made = sa.inspect(reading).has_table(_HEADS.name)
            text = reading.execute(sa.select(_HEADS.c.head)).scalar() if made else None
        try:
            return None if text is None else Head.from_json(text)
        except EvidenceError as error:
            raise EvidenceError(
                f"the head of the ledger in {self.place} is damaged, nobody knows what it was: "
                "find out who writes there; then say that the ledger is right: gate accept-ledger "
                '--reason "why".'
            ) from error

    def keep(self, head: Head) -> None:
        """As `Keeper`."""
        if not self._there:
            return
        row = {"lines": head.lines, "head": head.to_json()}
        with self._writing() as connection:
            connection.execute(insert_new(connection, _HEADS).values(id=_THE_ONE, **row))
            longer = sa.update(_HEADS).where(_HEADS.c.lines < head.lines)
            connection.execute(longer.values(**row))

    def replace(self, head: Head | None) -> None:
        """As `Keeper`."""
        if not self._there:
            return
        with self._writing() as connection:
            connection.execute(sa.delete(_HEADS))
            if head is not None:
                row = {"id": _THE_ONE, "lines": head.lines, "head": head.to_json()}
                connection.execute(sa.insert(_HEADS).values(**row))

    @property
    def _there(self) -> bool:
        return self._file is None or self._file.exists()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sa.Engine]:
        """For one use: it is asked once a look."""
        engine = open_database(self._url)
        try:
            with translated("the head of the ledger can't be kept in the inbox"):
                yield engine
        finally:
            engine.dispose()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with self._opened() as engine, engine.begin() as connection:
            wait_for_turn(connection, _HEADS.name)
            _METADATA.create_all(connection)
            yield connection
