"""More workers than cores would slow all of them down."""

from __future__ import annotations

import os

import psutil
import pytest

from gate.installation import cores


@pytest.mark.parametrize(
    ("physical", "allowed", "wanted"), [(4, 8, 4), (4, 2, 2), (None, 3, 1), (0, 2, 1)]
)
def test_physical_cores_available_to_this_process(
    physical: int | None, allowed: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    assert cores() == wanted
