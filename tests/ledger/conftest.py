"""Ledgers in SQLite and PostgreSQL, and releases to record."""

from __future__ import annotations

import pytest

from gate.ledger.ledger import Ledger
from tests.registry.conftest import (  # noqa: F401
    _no_dvc_experiment,
    _no_pause_before_second_download,
    _short_lock_timeout,
    first,
    ledger,
    read_untrusted_files_in_process,
    second,
    third,
)
from tests.service.conftest import database as database_url  # noqa: F401
from tests.service.conftest import postgres_server  # noqa: F401


@pytest.fixture
def database_ledger(database_url: str) -> Ledger:  # noqa: F811
    """A ledger, once in SQLite and once in PostgreSQL."""
    return Ledger(database_url)
