"""Databases and running services."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.in_process import read_in_process
from tests.service.deliveries import Service, run_service, settings
from tests.service.postgres import MISSING, Postgres, find_program, run_postgres


@pytest.fixture(autouse=True)
def _enable_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the loggers, which import-linter disables in the process."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] in ("gate", "uvicorn") and isinstance(logger, logging.Logger):
            monkeypatch.setattr(logger, "disabled", False)
            monkeypatch.setattr(logger, "propagate", True)
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _no_pause_before_second_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause between two downloads of one reconcile pass."""
    monkeypatch.setattr("gate.registry.registered_model.PAUSE_S", 0.0)


@pytest.fixture(scope="session")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("temporary"))


@pytest.fixture(autouse=True)
def _temporary_files_are_in_memory(temporary_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep temporary files in the in-memory folder of tests/conftest.py: 7 % less CPU time."""
    monkeypatch.setattr("tempfile.tempdir", temporary_folder)


@pytest.fixture(autouse=True)
def read_untrusted_files_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_process(monkeypatch)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    if find_program("initdb") is None:
        pytest.skip(MISSING)
    with run_postgres() as started:
        yield started


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/inbox.db"
        return
    import psycopg

    url = request.getfixturevalue("postgres_server").url
    name = f"test_{abs(hash(tmp_path))}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    yield f"{url.rpartition('/')[0]}/{name}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[call-overload]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with run_service(settings(tmp_path)) as started:
        yield started
