"""Deployment slots of one release: the exact file and its quantized twin change together."""

from __future__ import annotations

import pytest

from gate import Digest
from gate.deploy.store import EXACT, ModelStore
from gate.records.layout import QUANTIZED
from gate.registry.promotion import rollback
from gate.service.reconciler import deploy_champion
from tests import builders
from tests.registry.releases import NAME, twin_policy
from tests.registry.simulator import Watched
from tests.service.registry_setup import RegistrySetup, Service

POLICY = builders.policy(twin=twin_policy())
REVIEWED = builders.policy(twin=twin_policy(), review="required")


def live_slots(service: Service) -> dict[str, Digest]:
    manifest = service.store.live(NAME)
    assert manifest is not None
    return {name: slot.sha256 for name, slot in manifest.slots.items()}


def expected_slots(service: Service, seed: int) -> dict[str, Digest]:
    folder = service.setup.folder
    exact, twin = folder / f"{seed}.onnx", folder / f"twin-{seed}" / "model.onnx"
    return {EXACT: Digest.from_file(exact), QUANTIZED: Digest.from_file(twin)}


@pytest.fixture
def service(tmp_path) -> Service:
    created = Service(tmp_path, POLICY)
    created.setup.promote(1)
    assert created.reconcile_once() == [("deploy", "deployed", "1")]
    return created


def test_version_is_downloaded_once_for_both_slots(service: Service, tmp_path) -> None:
    setup, store = service.setup, ModelStore(tmp_path / "another")
    setup.registry = watched = Watched(setup.registry)
    assert [result.outcome for result in deploy_champion(setup.model(), store, POLICY)] == [
        "deployed"
    ]
    assert watched.calls.count("download") == 1
    live = store.live(NAME)
    assert live is not None
    assert {name: slot.sha256 for name, slot in live.slots.items()} == expected_slots(service, 1)


def test_missing_twin_deploys_neither_file(service: Service) -> None:
    service.setup.promote(2)
    extra_files = service.setup.stored("2").extra_files
    for name in [name for name in extra_files if name.startswith(QUANTIZED)]:
        del extra_files[name]
    (result,) = deploy_champion(service.setup.model(), service.store, POLICY)
    assert result.outcome == "refused"
    assert "expected only" in result.reason
    assert live_slots(service) == expected_slots(service, 1)


def test_rollback_restores_both_slots(service: Service) -> None:
    service.setup.promote(2)
    assert service.reconcile_once() == [("deploy", "deployed", "2")]
    assert live_slots(service) == expected_slots(service, 2)
    rollback(service.setup.registry, NAME, ledger=service.setup.ledger, reason="slow")
    assert service.reconcile_once() == [("deploy", "deployed", "1")]
    assert live_slots(service) == expected_slots(service, 1)


def test_release_without_a_twin_removes_the_old_twin(service: Service) -> None:
    service.setup.policy = builders.policy()
    service.restart()
    service.setup.promote(2)
    service.reconcile_once()
    assert live_slots(service).keys() == {EXACT}


def test_twin_without_a_ledger_entry_is_reverted(service: Service, tmp_path) -> None:
    """An editor adds a valid twin to the version in the registry."""
    other_setup = RegistrySetup(tmp_path / "other", POLICY)
    other_setup.folder.mkdir()
    other_setup.promote(2)
    service.setup.promote(2, policy=builders.policy())
    service.setup.stored("2").extra_files |= {
        name: data
        for name, data in other_setup.stored("1").extra_files.items()
        if name.startswith(QUANTIZED)
    }
    assert ("guard", "reverted", "1") in service.reconcile_once()
    assert "no quantized twin" in service.setup.ledger.entries()[-1].reason
    assert live_slots(service) == expected_slots(service, 1)


def test_twin_is_decided_again_by_the_service_policy(service: Service) -> None:
    """The promoter's twin policy is weaker than the one of the service."""
    service.setup.policy = builders.policy(twin=twin_policy(min_samples=500))
    service.restart()
    service.setup.promote(2, policy=POLICY)
    assert ("guard", "reverted", "1") in service.reconcile_once()
    assert "the quantized twin: " in service.setup.ledger.entries()[-1].reason
    service.setup.policy = builders.policy(twin=twin_policy(min_samples=350))
    service.restart()
    service.setup.promote(3, policy=POLICY)
    assert service.reconcile_once() == [("deploy", "deployed", "3")]


def tamper(service: Service, number: str, path: str) -> None:
    service.setup.stored(number).extra_files[f"{QUANTIZED}/{path}"] += b"x"


@pytest.mark.parametrize("place", ["model.onnx", "gate/evidence.json", "gate/decision.json"])
def test_approval_verifies_the_twin(tmp_path, place: str) -> None:
    service = Service(tmp_path, REVIEWED)
    service.setup.promote(1)
    tamper(service, "1", place)
    service.setup.tag("1", "approved")
    assert [outcome for _, outcome, _ in service.reconcile_once()] == ["refused"]
    assert service.setup.champion is None
