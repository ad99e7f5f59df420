"""The tables have a version: an older program refuses a newer database, and a newer one migrates."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from gate.errors import StateUnavailable
from gate.ledger.database import LOCKS, SCHEMA_VERSION, VERSIONS
from gate.ledger.ledger import Ledger, promotion_lock
from gate.signing.local_keys import LocalKeys
from tests.ledger.rows import entry, pending_moves

OLD_LOCK = (
    "CREATE TABLE gate_lock (name VARCHAR(128) PRIMARY KEY, token VARCHAR(64) NOT NULL, "
    "holder TEXT NOT NULL, leased_until DOUBLE PRECISION NOT NULL)"
)
OLD_NOTE = (
    "CREATE TABLE gate_note (name VARCHAR(128) PRIMARY KEY, text TEXT NOT NULL, "
    "at VARCHAR(64) NOT NULL, signature TEXT)"
)


@pytest.fixture
def old_ledger(database_ledger: Ledger) -> Ledger:
    """A database as a program with schema version 1 left it."""
    database_ledger.append(entry())
    with database_ledger.state.writing() as connection:
        VERSIONS.drop(connection)
        LOCKS.drop(connection)
        connection.exec_driver_sql(OLD_LOCK)
        connection.exec_driver_sql(OLD_NOTE)
    return Ledger(database_ledger.state)


def execute(ledger: Ledger, text: str) -> None:
    with ledger.state.writing() as connection:
        connection.exec_driver_sql(text)


def test_newer_schema_is_refused(database_ledger: Ledger) -> None:
    database_ledger.append(entry())
    with database_ledger.state.writing() as connection:
        connection.execute(sa.update(VERSIONS).values(version=SCHEMA_VERSION + 1))
    fresh = Ledger(database_ledger.state)
    for use in (fresh.entries, fresh.verify, lambda: fresh.append(entry()),
                lambda: promotion_lock(fresh).__enter__()):  # fmt: skip
        with pytest.raises(StateUnavailable) as caught:
            use()
        assert f"schema version {SCHEMA_VERSION + 1}" in str(caught.value)
        assert "\n" not in str(caught.value)
    execute(database_ledger, f"UPDATE gate_schema SET version = {SCHEMA_VERSION}")
    assert len(fresh.entries()) == 1


def test_older_schema_is_migrated_by_the_first_write(old_ledger: Ledger) -> None:
    assert len(old_ledger.entries()) == 1
    with old_ledger.state.reading() as connection:
        assert not sa.inspect(connection).has_table(VERSIONS.name)
    old_ledger.append(entry())
    with promotion_lock(old_ledger):
        old_ledger.append(entry(action="promoted", version="1", operation="ab"))
    assert len(Ledger(old_ledger.state).entries()) == 3
    assert pending_moves(old_ledger.state) == "ab"


@pytest.mark.parametrize(
    ("left", "remedy"),
    [
        ("INSERT INTO gate_note VALUES ('move 12ab', '{}', '2026-01-01', NULL)", "gate reconcile"),
        ("INSERT INTO gate_note VALUES ('same registry', '[]', '2026', NULL)", "--same-registry"),
        ("INSERT INTO gate_lock VALUES ('promotion', 'a', '{}', SOON)", "wait until it ends"),
    ],
)
def test_unfinished_work_of_an_older_version_blocks_migration(
    old_ledger: Ledger, left: str, remedy: str
) -> None:
    execute(old_ledger, left.replace("SOON", str(time.time() + 50.0)))
    with pytest.raises(StateUnavailable, match=remedy):
        old_ledger.append(entry())
    assert len(Ledger(old_ledger.state).entries()) == 1
    execute(old_ledger, f"DELETE FROM {left.split()[2]}")
    old_ledger.append(entry())


@pytest.mark.parametrize(
    "left",
    [
        "INSERT INTO gate_note VALUES ('move 12.damaged-34', '{', '2026-01-01', NULL)",
        "INSERT INTO gate_lock VALUES ('promotion', 'a', '{}', 1.0)",
        "INSERT INTO gate_lock VALUES ('promotion', 'a', '{}', 1e12)",  # the clock was set back
    ],
)
def test_expired_leftovers_do_not_block_migration(old_ledger: Ledger, left: str) -> None:
    execute(old_ledger, left)
    old_ledger.append(entry())


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_state_and_keys_are_private_with_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        ledger = Ledger(tmp_path / ".gate" / "state.db")
        ledger.append(entry())
        LocalKeys(tmp_path / ".gate", lambda _: None).signing_key()
        with ledger.state.reading() as connection:
            connection.exec_driver_sql("SELECT 1")
            modes = {
                path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
                for path in (tmp_path / ".gate", *(tmp_path / ".gate").iterdir())
            }
    finally:
        os.umask(before)
    assert {".gate/state.db-wal", ".gate/state.db-shm"} <= modes.keys()
    assert modes[".gate"] == modes[".gate/keys"] == 0o700
    for suffix in ("", "-wal", "-shm"):
        assert modes[f".gate/state.db{suffix}"] == 0o600
    key = tmp_path / ".gate" / "keys" / "local.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
