"""The tables have a version, which must be that of the program; files are private."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import sqlalchemy as sa

from gate.errors import StateUnavailable
from gate.ledger.database import SCHEMA_VERSION, VERSIONS
from gate.ledger.ledger import Ledger, promotion_lock
from gate.signing.local_keys import LocalKeys
from tests.ledger.rows import entry


@pytest.mark.parametrize("version", [1, SCHEMA_VERSION + 1])
def test_other_schema_is_refused(database_ledger: Ledger, version: int) -> None:
    database_ledger.append(entry())
    with database_ledger.state.writing() as connection:
        if version == 1:
            VERSIONS.drop(connection)
        else:
            connection.execute(sa.update(VERSIONS).values(version=version))
    fresh = Ledger(database_ledger.state)
    for use in (fresh.entries, fresh.verify, lambda: fresh.append(entry()),
                lambda: promotion_lock(fresh).__enter__()):  # fmt: skip
        with pytest.raises(StateUnavailable, match=f"has schema version {version}, ") as caught:
            use()
        assert "\n" not in str(caught.value)
    with database_ledger.state.writing() as connection:
        VERSIONS.create(connection, checkfirst=True)
        connection.execute(sa.delete(VERSIONS))
        connection.execute(sa.insert(VERSIONS).values(version=SCHEMA_VERSION))
    assert len(fresh.entries()) == 1


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
