from __future__ import annotations

import pytest

from tests.sandbox.in_process import read_in_process


@pytest.fixture(autouse=True)
def read_untrusted_files_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_process(monkeypatch)
