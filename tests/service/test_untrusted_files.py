"""A malicious file with valid evidence costs the service at most the limits of the sandbox."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gate.deploy.store import EXACT, ModelStore
from gate.registry.registered_model import Reading
from gate.sandbox.limits import SandboxLimits
from gate.service.monitoring import StepResult
from gate.service.reconciler import Reconciler, reconciler
from gate.service.settings import ServiceSettings
from tests.onnx_file import hostile
from tests.onnx_file.hostile import PARENT_BYTES, WIDE_LIMITS
from tests.registry.promoting import promote
from tests.registry.releases import NAME, evidence, release
from tests.sandbox.peak import bounded_growth
from tests.service.registry_setup import AUTOMATIC, RegistrySetup

STRICT_LIMITS = SandboxLimits(12.0, 200 * 10**6)
"""Limits that also suffice for valid files on a busy machine."""


class Service:
    """A service that deployed version 1, a valid file."""

    def __init__(self, folder: Path) -> None:
        self.setup = RegistrySetup(folder, AUTOMATIC)
        self.store = ModelStore(folder / "store")
        self.setup.promote(1)
        assert self.reconcile_once(WIDE_LIMITS) == [("deploy", "deployed")]

    def reconcile_once(self, limits: SandboxLimits) -> list[tuple[str, str]]:
        """Reconcile once with a new service, which reads the bytes of all versions."""
        setup = self.setup
        reconcile = Reconciler(
            setup.registry, setup.ledger, AUTOMATIC, store=self.store, reading=Reading(limits)
        )
        result = reconcile(NAME, cause="timer")
        assert all(isinstance(item, StepResult) for item in result), result
        return [(item.kind, item.outcome) for item in result if isinstance(item, StepResult)]

    def promote(self, path: Path) -> None:
        """Promote a file that was measured on another machine."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        release_of_file = replace(
            release(path, evidence=evidence(path, measured_at=at)), run_id="run"
        )
        result = promote(
            self.setup.registry, release_of_file, policy=AUTOMATIC, ledger=self.setup.ledger
        )
        assert result.outcome == "promoted"

    def serves_version_1(self) -> bool:
        live = self.store.live(NAME)
        first = self.setup.ledger.entries()[0].sha256
        return live is not None and live.slots[EXACT].sha256 == first


@pytest.fixture(autouse=True)
def read_untrusted_files_in_process() -> None:
    """Override the fixture of conftest.py: these tests use the sandbox."""


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_sandbox_limits_come_from_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"models": ("digits",), "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    settings = ServiceSettings.from_options(**arguments, time_limit_s=5.0, memory_limit=10**9)
    created = [
        reconciler(of)._reading for of in (settings, ServiceSettings.from_options(**arguments))
    ]
    assert [reading and reading.limits for reading in created] == [
        SandboxLimits(5.0, 10**9), SandboxLimits.for_service(),
    ]  # fmt: skip


@pytest.mark.proof
def test_file_that_exceeds_the_load_limit_is_refused_once(service, tmp_path):
    service.promote(hostile.nested_functions(tmp_path / "model.onnx"))
    with bounded_growth(PARENT_BYTES):
        assert service.reconcile_once(STRICT_LIMITS) == [("deploy", "refused")]
        assert service.reconcile_once(STRICT_LIMITS) == []
    assert service.serves_version_1()
    assert [action for action, version in service.setup.lines() if version == "2"] == [
        "promoted", "not_deployed",
    ]  # fmt: skip
    assert (
        "loading model.onnx took more than the time limit of 12 s"
        in service.setup.ledger.entries()[-1].reason
    )
