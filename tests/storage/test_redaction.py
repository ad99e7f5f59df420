from __future__ import annotations

import time

import pytest

from gate.storage.safe_text import Redaction, passwords, redacted


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://host:5000", "http://host:5000"),
        ("http://user:pw@host:5000/x", "http://host:5000/x"),
        ("http://token@host/p@th", "http://host/p@th"),
        ("http://host:5000/p@th", "http://host:5000/p@th"),
        ("http://host/p@th", "http://host/p@th"),
        ("sqlite:////home/a:b@c/mlflow.db", "sqlite:////home/a:b@c/mlflow.db"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("databricks", "databricks"),
        ("postgresql://gate:p@ss@db/gate", "postgresql://db/gate"),
        ("postgresql://gate:pa/ss@db/gate", "postgresql://db/gate"),
        ("postgresql://gate:p@s/s@db:5432/gate", "postgresql://db:5432/gate"),
        ("postgresql://gate:12/s@db/gate", "postgresql://db/gate"),
        ("postgresql://db/gate?password=hunter2", "postgresql://db/gate?password=[hidden]"),
        ("postgresql://db/gate?a=1&Password=h&b=2", "postgresql://db/gate?a=1&Password=[hidden]&b=2"),
        ("postgresql://u:p@db/gate?sslpassword=h", "postgresql://db/gate?sslpassword=[hidden]"),
    ],
)  # fmt: skip
def test_user_and_password_are_hidden(uri: str, shown: str) -> None:
    assert redacted(uri) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://gate:p@ss/hunter2@db/gate", "postgresql://[hidden]@db/gate"),
        ("postgresql://gate:hun/ter2@db/gate", "postgresql://[hidden]@db/gate"),
        ("postgresql://db/gate?user=a&password=hunter2&x=1",
         "postgresql://db/gate?user=a&password=[hidden]&x=1"),
        ("http://h:1/x,http://u:hunter2@h", "http://h:1/x,http://[hidden]@h"),
        ("at http://127.0.0.1:8400/p@th now", "at http://127.0.0.1:8400/p@th now"),
        ("http://token@host/p@th", "http://[hidden]@host/p@th"),
        ("mail a@b, secrets=2", "mail a@b, secrets=2"),
        ("http://a:" * 9 + "hunter2@b", "[hidden]"),
    ],
)  # fmt: skip
def test_passwords_with_any_characters_are_hidden(text: str, shown: str) -> None:
    assert Redaction(lambda: ()).clean(text) == shown


def test_long_input_is_redacted_quickly() -> None:
    begun = time.monotonic()
    for word in ("://a:", "password=", "@", "a"):
        Redaction(lambda: ()).clean(word * 50_000 + "@")
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("postgresql://gate@db/gate", set()),
        ("http://127.0.0.1:5000", set()),
        ("http://host/p@th:x", set()),
        ("sqlite:////home/a:b@c/mlflow.db", set()),
        ("https://token@host/x", set()),
        ("postgresql://gate:hunter2@db/gate", {"hunter2"}),
        ("--inbox=postgresql://gate:hunter2@db/gate", {"hunter2"}),
        ("postgresql://gate:hun%2Fter2@db/gate", {"hun%2Fter2", "hun/ter2"}),
        ("postgresql://gate:p@s/s@db/gate", {"p@s/s"}),
        ("http://ann:hunter2@host:5000", {"hunter2"}),
        ("postgresql:///gate?password=hunter2&x=1", {"hunter2"}),
    ],
)
def test_passwords_are_found_in_urls(uri: str, found: set[str]) -> None:
    assert passwords(uri) == found


def test_known_password_is_hidden_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:of-the-env@host")
    clean = Redaction(addresses=["postgresql://gate:two%20words@db/gate"]).clean
    shown = clean("login with 'two words' or two%20words or of-the-env failed")
    assert shown == "login with '[hidden]' or [hidden] or [hidden] failed"
    short = Redaction(addresses=["postgresql://gate:gate@db/gate"]).clean
    assert short("gate at postgresql://gate:gate@db") == "gate at postgresql://[hidden]@db"
