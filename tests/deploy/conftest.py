from __future__ import annotations

import pytest

from tests.sandbox.here import read_here


@pytest.fixture(autouse=True)
def _files_are_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)
