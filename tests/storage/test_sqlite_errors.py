from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gate.ledger.database import database_problem


def provoke_error(path: Path) -> sqlite3.Error:
    with (
        closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as opened,
        pytest.raises(sqlite3.Error) as caught,
    ):
        opened.execute("BEGIN IMMEDIATE")
        opened.execute("SELECT * FROM t").fetchall()
    return caught.value


def create_database(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as created, created:
        created.execute("CREATE TABLE t (x)")
        created.executemany("INSERT INTO t VALUES (?)", [("x" * 1000,)] * 100)
    return path


def test_locked_database(tmp_path: Path) -> None:
    path = create_database(tmp_path / "a.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        assert database_problem(provoke_error(path)) == "locked"


def test_malformed_database(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_bytes(b"no database" * 1000)
    assert database_problem(provoke_error(text)) == "malformed"
    cut = create_database(tmp_path / "cut.db")
    data = cut.read_bytes()
    cut.write_bytes(data[:5000] + b"\xff" * 10_000 + data[15_000:])
    assert database_problem(provoke_error(cut)) == "malformed"


def test_other_errors_are_not_translated(tmp_path: Path) -> None:
    with closing(sqlite3.connect(create_database(tmp_path / "a.db"))) as opened:
        for statement in ("nonsense", "SELECT * FROM database_is_locked", "INSERT INTO t VALUES"):
            with pytest.raises(sqlite3.Error) as caught:
                opened.execute(statement)
            assert database_problem(caught.value) is None
    assert database_problem(OSError("no space left")) is None


def test_server_errors_and_causes() -> None:
    stated = "500 Server Error: (sqlite3.OperationalError) database is locked [SQL: ...]"
    assert database_problem(RuntimeError(stated)) == "locked"
    assert database_problem(RuntimeError("database disk image is malformed")) == "malformed"


def test_cause_is_translated(tmp_path: Path) -> None:
    path = create_database(tmp_path / "a.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        outer = RuntimeError("it failed")
        outer.__cause__ = provoke_error(path)
    assert database_problem(outer) == "locked"
