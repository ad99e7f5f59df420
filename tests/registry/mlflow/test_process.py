from __future__ import annotations

import pytest

from gate.registry.mlflow.process import redacted


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
def test_no_user_and_no_password_is_shown(uri: str, shown: str) -> None:
    assert redacted(uri) == shown
