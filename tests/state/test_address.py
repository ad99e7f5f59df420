"""Addresses of the state database."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.ledger.database import StateDatabase, state_url


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:///.gate/state.db", "sqlite:////var/lib/gate/state.db",
        "postgresql://gate@db.internal/gate", "postgresql+psycopg://gate:p%40ss@[::1]:5432/gate",
    ],
)  # fmt: skip
def test_url_is_unchanged(text: str) -> None:
    assert state_url(text) == text


@pytest.mark.parametrize(
    "path", ["state.db", ".gate/state.db", "a place/st?te%20#.db", "sqlite", "@x", "ü.db"]
)
def test_path_becomes_a_sqlite_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    state = StateDatabase(state_url(path))
    assert state.location == path
    assert not state.exists
    with state.writing():
        pass
    assert Path(path).is_file()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the state is sqlite:///FILE"),
        (" ", "the state is sqlite:///FILE"),
        ("/", "the state is sqlite:///FILE"),
        (":memory:", "the state is sqlite:///FILE"),
        ("sqlite://", "in memory"),
        ("sqlite:///", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite+pysqlite:///:memory:", "in memory"),
        ("mysql://gate@db/gate", "the state is sqlite:///FILE"),
        ("http://db/gate", "the state is sqlite:///FILE"),
        ("postgresql://gate@[::1/x", "Invalid IPv6 URL"),
    ],
)
def test_unsupported_address_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        state_url(text)
