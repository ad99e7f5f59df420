"""The state database is created by the first write, private, and shown without its password."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from gate.deploy.store import make_folder
from gate.errors import ServiceError, StateUnavailable
from gate.ledger import database as database_module
from gate.ledger.database import StateDatabase
from gate.storage.files import write_bytes

TABLE = sa.Table("t", sa.MetaData(), sa.Column("n", sa.Integer))


def write(state: StateDatabase, number: int = 1) -> None:
    with state.writing() as connection:
        TABLE.create(connection, checkfirst=True)
        connection.execute(sa.insert(TABLE).values(n=number))


def read(state: StateDatabase) -> list[int]:
    with state.reading() as connection:
        return list(connection.execute(sa.select(TABLE.c.n)).scalars())


def test_committed_rows_are_visible_to_others(database: str) -> None:
    write(StateDatabase(database))
    assert read(StateDatabase(database)) == [1]


def test_failed_transaction_is_rolled_back(database: str) -> None:
    state = StateDatabase(database)
    write(state)
    with pytest.raises(ZeroDivisionError), state.writing() as connection:
        connection.execute(sa.insert(TABLE).values(n=1 // 0))
    assert read(state) == [1]


def test_file_is_created_by_the_first_write(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "new" / "state.db")
    assert not state.exists
    write(state)
    assert state.exists
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["state.db"]
    shutil.copy(tmp_path / "new" / "state.db", tmp_path / "copy.db")
    assert read(StateDatabase(f"sqlite:///{tmp_path}/copy.db")) == [1]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_created_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / ".gate"
    with StateDatabase(folder / "state.db").writing() as connection:  # keeps all files open
        connection.exec_driver_sql("CREATE TABLE t (n INTEGER)")
        created = {path.name: mode(path) for path in folder.iterdir() if path.name != ".gitignore"}
    assert created == dict.fromkeys(("state.db", "state.db-wal", "state.db-shm"), 0o600)
    assert mode(folder) == 0o700
    write(StateDatabase(tmp_path / "some" / "where" / "state.db"))
    assert mode(tmp_path / "some") == mode(tmp_path / "some" / "where") == 0o700


@pytest.mark.parametrize("make", [make_folder, lambda path: write_bytes(path, b"")])
@pytest.mark.usefixtures("umask")
def test_gate_folder_is_private(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / ".gate" / "store" / "digits")
    assert mode(tmp_path / ".gate") == 0o700
    assert (tmp_path / ".gate" / ".gitignore").read_text() == "*\n"


def test_folder_in_place_of_the_file_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    with pytest.raises(StateUnavailable):
        write(StateDatabase(folder))
    assert mode(folder) == 0o755


def test_gate_folder_is_ignored_by_git(tmp_path: Path) -> None:
    write(StateDatabase(tmp_path / ".gate" / "state.db"))
    ignored = tmp_path / ".gate" / ".gitignore"
    assert ignored.read_text() == "*\n"
    ignored.write_text("!trust.yaml\n")
    write(StateDatabase(tmp_path / ".gate" / "state.db"))
    make_folder(tmp_path / ".gate" / "store")
    assert ignored.read_text() == "!trust.yaml\n"


def test_open_permissions_of_earlier_versions_are_tightened(tmp_path: Path) -> None:
    folder = tmp_path / ".gate"
    write(StateDatabase(folder / "state.db"))
    (folder / "state.db-shm").touch()
    for path in (folder / "state.db", folder / "state.db-shm"):
        path.chmod(0o644)
    folder.chmod(0o755)
    assert read(StateDatabase(folder / "state.db")) == [1]
    assert mode(folder) == 0o700
    assert mode(folder / "state.db") == 0o600
    (tmp_path / "link.db").symlink_to(folder / "state.db")
    (folder / "state.db").chmod(0o640)
    assert read(StateDatabase(tmp_path / "link.db")) == [1]
    assert mode(folder / "state.db") == 0o600


def test_world_writable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ServiceError, match=f"chmod o-w {tmp_path}/open"):
        write(StateDatabase(tmp_path / "open" / "state.db"))
    assert not list((tmp_path / "open").iterdir())
    (tmp_path / "open").chmod(0o1777)  # like /tmp
    write(StateDatabase(tmp_path / "open" / "state.db"))
    assert mode(tmp_path / "open" / "state.db") == 0o600


def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(StateDatabase(tmp_path / "state.db"))
    monkeypatch.setattr("os.geteuid", lambda: (tmp_path / "state.db").stat().st_uid + 1)
    with pytest.raises(ServiceError, match="belongs to the user"):
        read(StateDatabase(tmp_path / "state.db"))


def test_removed_file_is_not_recreated(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state.db")
    write(state)
    (tmp_path / "state.db").unlink()
    for use in (read, write):
        with pytest.raises(StateUnavailable, match="unable to open"):
            use(state)
    assert not state.exists
    write(StateDatabase(tmp_path / "state.db"), 2)  # another process, or a restored copy
    assert read(state) == [2]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://gate:hunter2@127.0.0.1:1/gate",
        "postgresql://127.0.0.1:1/gate?user=gate&password=hunter2",
        "postgresql://127.0.0.1:1/gate?user=gate&pass%77ord=hunter2",
    ],
)
def test_unreachable_database_is_named_without_password(url: str) -> None:
    state = StateDatabase(url)
    assert state.location.startswith("postgresql://127.0.0.1:1/gate")
    with pytest.raises(StateUnavailable, match="the database postgresql://127.0.0.1:1/gate") as e:
        write(state)
    assert "hunter2" not in f"{e.value} {state.location}"


@pytest.mark.parametrize("url", ["postgresql://db:port/gate", "no url"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ServiceError, match="is not valid"):
        StateDatabase(url)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_in_memory_database_is_refused(url: str) -> None:
    with pytest.raises(ServiceError, match="in memory"):
        write(StateDatabase(url))


def test_database_locked_by_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_TIMEOUT_S", 0.1)
    state = StateDatabase(tmp_path / "state.db")
    write(state)
    with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as second:
        second.execute("BEGIN IMMEDIATE")
        assert read(state) == [1]
        with pytest.raises(StateUnavailable, match="locked.*nothing is damaged"):
            write(state)
    write(state, 2)
    assert read(state) == [1, 2]


def test_new_file_opened_concurrently(tmp_path: Path) -> None:
    """SQLite does not wait here: it raises at once if the journal mode can't be changed."""
    state = StateDatabase(tmp_path / "state.db")
    with closing(
        sqlite3.connect(tmp_path / "state.db", isolation_level=None, check_same_thread=False)
    ) as second:
        second.execute("BEGIN IMMEDIATE")
        leaving = threading.Timer(0.3, second.execute, ["ROLLBACK"])
        leaving.start()
        write(state)
        leaving.join()
    assert read(state) == [1]


def test_stopped_transaction_does_not_block_others(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database.startswith("sqlite"):
        return  # a file lock lasts as long as its process
    monkeypatch.setattr(database_module, "_IDLE_S", 0.3)
    stopped, second = StateDatabase(database), StateDatabase(database)
    write(stopped)
    with pytest.raises(StateUnavailable, match="idle-in-transaction"), stopped.writing() as held:
        held.execute(sa.update(TABLE).values(n=2))
        with second.writing() as connection:
            connection.execute(sa.update(TABLE).values(n=3))
        held.execute(sa.update(TABLE).values(n=4))
    assert read(second) == [3]


def test_no_file_stays_open(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state.db")
    write(state)
    read(state)
    opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert tmp_path / "state.db" not in opened


def test_unused_database_closes_its_connections(database: str) -> None:
    if database.startswith("sqlite"):
        return
    state, watching = StateDatabase(database), StateDatabase(database)
    write(state)
    count = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")

    def connected() -> int:
        with watching.reading() as connection:
            return int(connection.execute(count).scalar_one())

    assert connected() == 2
    del state
    assert _soon(lambda: connected() == 1)


def _soon(look) -> bool:
    return any(look() for _ in range(500))
