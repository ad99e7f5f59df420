"""A malicious file with valid evidence costs the service at most the limits of the sandbox."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from gate.registry.registered_model import Reading
from gate.sandbox.limits import SandboxLimits
from gate.service.reconciler import reconciler
from gate.service.settings import ServiceSettings
from tests.onnx_file import hostile
from tests.onnx_file.hostile import PARENT_BYTES, WIDE_LIMITS
from tests.registry.promoting import promote
from tests.registry.releases import evidence, release
from tests.sandbox.peak import bounded_growth
from tests.service.registry_setup import AUTOMATIC, Service

STRICT_LIMITS = SandboxLimits(12.0, 200 * 10**6)
"""Limits that also suffice for valid files on a busy machine."""


def reconcile_once(service: Service, limits: SandboxLimits) -> list[tuple[str, str]]:
    """Reconcile once with a new service, which reads the bytes of all versions."""
    service.reading = Reading(limits)
    service.restart()
    return [(kind, outcome) for kind, outcome, _ in service.reconcile_once()]


@pytest.fixture(autouse=True)
def read_untrusted_files_in_process() -> None:
    """Override the fixture of conftest.py: these tests use the sandbox."""


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
def test_file_that_exceeds_the_load_limit_is_refused_once(tmp_path):
    """Version 2 was measured on another machine, without limits."""
    service = Service(tmp_path)
    service.setup.promote(1)
    assert reconcile_once(service, WIDE_LIMITS) == [("deploy", "deployed")]
    path = hostile.nested_functions(tmp_path / "model.onnx")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    created = replace(release(path, evidence=evidence(path, measured_at=at)), run_id="run")
    setup = service.setup
    result = promote(setup.registry, created, policy=AUTOMATIC, ledger=setup.ledger)
    assert result.outcome == "promoted"
    with bounded_growth(PARENT_BYTES):
        assert reconcile_once(service, STRICT_LIMITS) == [("deploy", "refused")]
        assert reconcile_once(service, STRICT_LIMITS) == []
    assert service.live == "1"
    assert [action for action, version in setup.lines() if version == "2"] == [
        "promoted", "not_deployed",
    ]  # fmt: skip
    expected = "loading model.onnx took more than the time limit of 12 s"
    assert expected in setup.ledger.entries()[-1].reason
