from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.stack import Stack, run_mlflow_server_with_webhooks, run_stack
from tests.registry.servers import Server
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_mlflow_server_with_webhooks(tmp_path_factory.mktemp("mlflow")) as started:
        yield started


@pytest.fixture
def system(tmp_path: Path, server: Server, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A running stack for a model that no other test uses."""
    name = "".join(char if char.isalnum() else "-" for char in request.node.name)[:50].strip("-")
    with run_stack(tmp_path, server, name) as started:
        yield started
