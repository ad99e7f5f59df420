"""A hostile file with true evidence costs the service a child's limits, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gate.deploy.store import EXACT, ModelStore
from gate.registry.eligibility import examine
from gate.registry.interface import CHAMPION
from gate.registry.registered_model import Reading
from gate.registry.verify_release import Terms
from gate.sandbox.limits import SandboxLimits
from gate.service.monitoring import StepResult
from gate.service.reconciler import Reconciler, reconciler
from gate.service.settings import ServiceSettings
from tests.exhaustive import exhaustive
from tests.onnx_file import hostile
from tests.onnx_file.hostile import PARENT_BYTES, ROOMY
from tests.registry.promoting import promote
from tests.registry.releases import NAME, evidence, release
from tests.sandbox.peak import bounded_growth
from tests.service.places import AUTOMATIC, Place

QUICK = SandboxLimits(20.0, 200 * 10**6)
"""For good files too, on a busy machine."""


class Service:
    """Version 1 is good, and serves."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder, AUTOMATIC)
        self.store = ModelStore(folder / "store")
        self.place.promote(1)
        assert self.look(ROOMY) == [("deploy", "deployed")]

    def look(self, limits: SandboxLimits) -> list[tuple[str, str]]:
        """A service that was just started, so that it looks at the bytes, too."""
        place = self.place
        reconcile = Reconciler(
            place.registry, place.ledger, AUTOMATIC, store=self.store, reading=Reading(limits)
        )
        done = reconcile(NAME, cause="timer")
        assert all(isinstance(one, StepResult) for one in done), done
        return [(one.kind, one.outcome) for one in done if isinstance(one, StepResult)]

    def promote(self, path: Path) -> None:
        """As a promoter who measured the file somewhere else."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        handed = replace(release(path, evidence=evidence(path, measured_at=at)), run_id="run")
        done = promote(self.place.registry, handed, policy=AUTOMATIC, ledger=self.place.ledger)
        assert done.outcome == "promoted"

    def serves_version_1(self) -> bool:
        live = self.store.live(NAME)
        first = self.place.ledger.entries()[0].sha256
        return live is not None and live.slots[EXACT].sha256 == first


@pytest.fixture(autouse=True)
def _files_are_read_here() -> None:
    """Here they are read in children, as they are."""


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_the_limits_of_the_settings_are_those_of_the_children(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"models": ("digits",), "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    settings = ServiceSettings.from_options(**given, time_limit_s=5.0, memory_limit=10**9)
    made = [reconciler(of)._reading for of in (settings, ServiceSettings.from_options(**given))]
    assert [reading and reading.limits for reading in made] == [
        SandboxLimits(5.0, 10**9), SandboxLimits.for_service(),
    ]  # fmt: skip


@pytest.mark.proof
def test_what_can_not_be_loaded_within_the_limits_is_written_down_once(service, tmp_path):
    service.promote(hostile.nested_functions(tmp_path / "model.onnx"))
    with bounded_growth(PARENT_BYTES):
        assert service.look(QUICK) == [("deploy", "refused")]
        assert service.look(QUICK) == []
    assert service.serves_version_1()
    assert [action for action, version in service.place.lines() if version == "2"] == [
        "promoted", "not_deployed",
    ]  # fmt: skip
    assert (
        "loading model.onnx took more than the time limit of 20 s"
        in service.place.ledger.entries()[-1].reason
    )


@exhaustive
@pytest.mark.proof
def test_what_can_not_be_read_within_the_limits_is_a_problem_of_that_version(service, tmp_path):
    service.promote(hostile.empty_notes(tmp_path / "model.onnx"))
    with bounded_growth(PARENT_BYTES):
        model = replace(service.place.model(), reading=Reading(QUICK))
        found = examine(model, "2", history=model.history(), terms=Terms.now(AUTOMATIC))
        assert "reading model.onnx took more than the memory limit of 200 MB" in str(found.problem)
        assert service.look(QUICK) == [("guard", "reverted")]
        assert service.look(QUICK) == []
    assert service.place.registry.alias(NAME, CHAMPION) == "1"
    assert service.serves_version_1()
