from __future__ import annotations

import os

import pytest

from gate.installation import keep_freed_memory, limit_openmp_spinning

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, ("PASSIVE", "300")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, ("PASSIVE", None)),
        ({"GOMP_SPINCOUNT": "5"}, (None, "5")),
    ],
)
def test_openmp_threads_sleep_by_default(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], then: tuple[str | None, ...]
) -> None:
    rest = {name: text for name, text in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", rest | given)
    limit_openmp_spinning()
    assert tuple(map(os.environ.get, NAMES)) == then


@pytest.mark.parametrize(
    ("given", "trimmed_from"),
    [
        ({}, str(2**28)),
        ({"MALLOC_ARENA_MAX": "2"}, None),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, "0"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, None),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, None),
    ],
)
def test_freed_memory_is_kept_by_default(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], trimmed_from: str | None
) -> None:
    stated = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_")
    rest = {name: text for name, text in os.environ.items() if not name.startswith(stated)}
    monkeypatch.setattr(os, "environ", rest | given)
    keep_freed_memory()
    assert os.environ.get("MALLOC_TRIM_THRESHOLD_") == trimmed_from
    assert given.items() <= os.environ.items()
