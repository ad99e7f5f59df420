"""Ledgers, in a file and in PostgreSQL, and releases to tell of."""

from __future__ import annotations

import pytest

from gate.ledger.ledger import Ledger
from tests.registry.conftest import (  # noqa: F401
    _little_patience,
    _no_dvc_experiment,
    _second_download_at_once,
    first,
    ledger,
    read_untrusted_files_in_process,
    second,
    third,
)
from tests.service.conftest import database as both_urls  # noqa: F401
from tests.service.conftest import postgres_server  # noqa: F401


@pytest.fixture
def both(both_urls: str) -> Ledger:  # noqa: F811
    """In either."""
    return Ledger(both_urls)
