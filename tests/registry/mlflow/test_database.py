from __future__ import annotations

import logging
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from gate.errors import RegistryError, RegistryUnavailable, StorageError
from gate.mlflow_client import connection as database
from gate.mlflow_client.connection import check_database, translate_errors
from gate.mlflow_client.registry import MlflowRegistry
from tests.registry.servers import make_run
from tests.service.conftest import postgres_server  # noqa: F401
from tests.service.postgres import Postgres


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_sqlite_database_is_usable_and_not_created(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    check_database(uri)
    assert not (tmp_path / "mlflow.db").exists()
    make_run(uri, artifacts=tmp_path / "artifacts")
    check_database(uri)
    check_database("sqlite:///mlflow.db")


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is not a database, it is a text\n" * 100)
    with pytest.raises(RegistryUnavailable, match="not a database"):
        check_database(f"sqlite:///{tmp_path}/mlflow.db")


def test_read_only_folder_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(database.os, "access", lambda *_: False)
    with pytest.raises(StorageError, match="can't be written"):
        check_database(f"sqlite:///{tmp_path}/mlflow.db")


_LOCK_SCRIPT = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1], isolation_level=None)
held.execute("PRAGMA locking_mode=NORMAL")
held.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def lock_database(path: Path) -> Iterator[None]:
    """Lock the database in another process."""
    command = [sys.executable, "-c", _LOCK_SCRIPT, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield
        process.communicate()


def create_database(path: Path) -> Path:
    with sqlite3.connect(path) as created:
        created.execute("CREATE TABLE t (x)")
    created.close()
    return path


class TestLocked:
    DANGEROUS = ("Restore", "move it", "aside", "emove", "elete", "anew")

    def test_locked_database_is_not_reported_as_damaged(
        self, tmp_path: Path, monkeypatch, caplog
    ) -> None:
        monkeypatch.setattr(database, "_TIMEOUT_S", 0.2)
        monkeypatch.setattr(database, "_SILENCE_S", 0.1)
        path = create_database(tmp_path / "mlflow.db")
        before = path.read_bytes()
        with lock_database(path), pytest.raises(RegistryUnavailable) as caught:
            check_database(f"sqlite:///{path}")
        message = str(caught.value)
        assert "database is locked" in message
        assert "nothing is damaged. Leave the file" in message
        assert not [word for word in self.DANGEROUS if word in message]
        assert caplog.messages == [f"waiting for the lock of {path}"]
        assert path.read_bytes() == before
        check_database(f"sqlite:///{path}")

    def test_released_lock_does_not_block(self, tmp_path: Path) -> None:
        path = create_database(tmp_path / "mlflow.db")
        with lock_database(path):
            pass
        check_database(f"sqlite:///{path}")

    def test_lock_during_a_query_is_not_reported_as_damage(self, tmp_path: Path) -> None:
        """MLflow queries the database through SQLAlchemy."""
        uri = f"sqlite:///{create_database(tmp_path / 'mlflow.db')}"
        engine = create_engine(f"{uri}?timeout=0.1")
        with (
            lock_database(tmp_path / "mlflow.db"),
            pytest.raises(RegistryUnavailable, match="nothing is damaged") as caught,
            translate_errors(uri, "read the registry"),
            engine.connect() as connection,
        ):
            connection.exec_driver_sql("SELECT * FROM t")
        engine.dispose()
        assert not [word for word in self.DANGEROUS if word in str(caught.value)]


_KILLED_WRITER_SCRIPT = """
import os, sqlite3, sys
begun = sqlite3.connect(sys.argv[1], isolation_level=None)
begun.execute("PRAGMA cache_size=2")
begun.execute("BEGIN")
begun.executemany("INSERT INTO t VALUES (?)", [("x" * 4000,)] * 100)
os.kill(os.getpid(), 9)
"""


def test_transaction_of_a_killed_writer_is_rolled_back(tmp_path: Path) -> None:
    path = create_database(tmp_path / "mlflow.db")
    writer = subprocess.run([sys.executable, "-c", _KILLED_WRITER_SCRIPT, str(path)], check=False)
    assert writer.returncode == -signal.SIGKILL
    assert (tmp_path / "mlflow.db-journal").stat().st_size > 0
    check_database(f"sqlite:///{path}")
    with sqlite3.connect(path) as opened:
        assert opened.execute("SELECT count(*) FROM t").fetchone() == (0,)
    opened.close()


class TestServers:
    def test_postgresql_database_is_usable(self, postgres_server: Postgres) -> None:  # noqa: F811
        url = postgres_server.url.replace("postgresql:", "postgresql+psycopg:")
        check_database(url)
        with pytest.raises(RegistryError, match="does not exist"):
            check_database(f"{url}_of_nobody")

    def test_closed_port_is_unavailable(self) -> None:
        """MLflow itself would retry for 100 s."""
        with pytest.raises(RegistryUnavailable, match=r"no answer from .*127\.0\.0\.1:9/x"):
            check_database("postgresql+psycopg://gate:hunter2@127.0.0.1:9/x")
        with pytest.raises(RegistryUnavailable, match=r"no answer from .*127\.0\.0\.1:9/x"):
            MlflowRegistry("postgresql+psycopg://gate@127.0.0.1:9/x").has_model("digits")

    def test_silent_server_times_out_without_showing_the_password(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(database, "_TIMEOUT_S", 2)  # the minimum that libpq accepts
        monkeypatch.setattr(database, "_SILENCE_S", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            path = f"127.0.0.1:{silent.getsockname()[1]}/x"
            with (
                caplog.at_level(logging.WARNING),
                pytest.raises(RegistryUnavailable, match="timeout expired") as caught,
            ):
                check_database(f"postgresql+psycopg://gate:hunter2@{path}")
        (message,) = caplog.messages
        assert message == f"waiting for the database at postgresql+psycopg://{path}"
        assert "hunter2" not in str(caught.value)

    def test_missing_driver_is_named(self) -> None:
        with pytest.raises(RegistryError, match="needs the driver"):
            check_database("mssql+pymssql://h/x")

    @pytest.mark.parametrize("uri", ["databricks", "databricks-uc://x", "uc:http://x"])
    def test_uri_of_another_kind_is_not_checked(self, uri: str) -> None:
        check_database(uri)
