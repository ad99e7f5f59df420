from __future__ import annotations

import os

import pytest

from gate.installation import wait_asleep

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
def test_threads_sleep_unless_somebody_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], then: tuple[str | None, ...]
) -> None:
    others = {name: text for name, text in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", others | given)
    wait_asleep()
    assert tuple(map(os.environ.get, NAMES)) == then
