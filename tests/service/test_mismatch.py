"""Stored bytes that differ from the promoted ones: one rule for the model and its golden vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gate.deploy.store import EXACT
from gate.registry.interface import CHAMPION
from gate.registry.registered_model import MismatchMemory, Reading
from tests.registry.releases import NAME
from tests.service.signed_submissions import POLICY_WITH_TWIN, SigningService
from tests.service.test_submissions import release_with_twin_vectors


def _flip_last_bytes(data: bytes) -> bytes:
    return data[:-4] + bytes(byte ^ 0xFF for byte in data[-4:])


def _change(service: SigningService, file: str, change: Callable[[bytes], bytes]) -> None:
    if file == "model.onnx":
        stored = service.setup.stored("2")
        stored.data = change(stored.data)
    else:
        service.change_file("2", file, change)


@pytest.fixture
def promoted_with_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[SigningService, list[float]]:
    """A service where version 2 was promoted with golden vectors and is not deployed yet."""
    service, clock = SigningService(tmp_path), [0.0]
    service.reading = Reading(mismatches=MismatchMemory(60.0, wait=None, clock=lambda: clock[0]))
    service.restart()
    service.submit(service.release(1))
    service.reconcile_once()
    service.submit(service.with_golden(2))
    with monkeypatch.context() as patch:
        patch.setattr("gate.service.reconciler.deploy_champion", lambda *_, **__: [])
        service.reconcile_once()
    assert (service.setup.registry.aliases[CHAMPION], service.live) == ("2", "1")
    return service, clock


FILES = ["model.onnx", "golden"]


def _stored_path(service: SigningService, file: str) -> str:
    if file == "model.onnx":
        return file
    extra_files = service.setup.stored("2").extra_files
    return next(
        n for n in sorted(extra_files) if n.startswith("golden/") and not n.endswith(".json")
    )


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "change",
    [
        _flip_last_bytes,
        lambda _: b"<html>503</html>",
    ],
)
def test_version_is_reverted_when_a_later_download_confirms_the_mismatch(
    promoted_with_clock: tuple[SigningService, list[float]],
    file: str,
    change: Callable[[bytes], bytes],
) -> None:
    """The kind of change does not matter; the deployed version keeps serving."""
    service, clock = promoted_with_clock
    _change(service, _stored_path(service, file), change)
    for clock[0] in (0.0, 5.0, 59.0):
        assert {outcome for _, outcome, _ in service.reconcile_once()} == {"MismatchUnconfirmed"}
        assert (service.setup.registry.aliases[CHAMPION], service.live) == ("2", "1")
    clock[0] = 60.0
    service.reconcile_once()
    service.reconcile_once()
    assert (service.setup.registry.aliases[CHAMPION], service.live) == ("1", "1")
    assert "violation" not in service.actions_of("2")


@pytest.mark.parametrize("file", FILES)
def test_different_wrong_bytes_each_time_do_not_revert(
    promoted_with_clock: tuple[SigningService, list[float]], file: str
) -> None:
    service, clock = promoted_with_clock
    for number, clock[0] in enumerate((0.0, 60.0, 120.0, 180.0)):
        _change(service, _stored_path(service, file), lambda _, n=number: b"error %d" % n)
        assert {outcome for _, outcome, _ in service.reconcile_once()} == {"MismatchUnconfirmed"}
    assert (service.setup.registry.aliases[CHAMPION], service.live) == ("2", "1")


def test_deployed_version_does_not_need_its_golden_vectors(tmp_path: Path) -> None:
    """The golden vectors of the twin are not needed either."""
    service = SigningService(tmp_path, POLICY_WITH_TWIN)
    service.reading = Reading(mismatches=MismatchMemory(0.0, wait=None))
    service.restart()
    service.submit(release_with_twin_vectors(service, "2"))
    assert service.reconcile_once() == [("hand_in", "promoted", "1"), ("deploy", "deployed", "1")]
    extra_files = service.setup.stored("1").extra_files
    names = [name for name in extra_files if "/golden/" in name and not name.endswith(".json")]
    assert names
    for name in names:
        service.change_file("1", name, _flip_last_bytes)
    for _ in range(3):
        service.restart()  # the next pass is a thorough one
        assert service.reconcile_once() == []
    assert (service.setup.registry.aliases[CHAMPION], service.live) == ("1", "1")


def test_failing_redeployment_has_one_ledger_entry(tmp_path: Path) -> None:
    service = SigningService(tmp_path)
    service.reading = Reading(mismatches=MismatchMemory(0.0, wait=None))
    service.restart()
    service.submit(service.with_golden(1))
    service.reconcile_once()
    service.change_file("1", "golden/golden.json", _flip_last_bytes)
    live = service.store.live(NAME)
    assert live is not None
    slot = live.slots[EXACT]
    service.store.file(slot.sha256, slot.model).unlink()
    for _ in range(6):
        service.restart()  # the next pass is a thorough one
        service.reconcile_once()
    assert service.actions_of("1") == ["promoted", "deployed", "not_deployed"]
