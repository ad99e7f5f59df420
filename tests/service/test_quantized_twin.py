"""Deployment slots of one release: the exact file and its quantized twin change together."""

from __future__ import annotations

import pytest

from gate.deploy.store import EXACT, ModelStore
from gate.records.layout import QUANTIZED
from gate.registry.promotion import rollback
from gate.service.reconciler import deploy_champion
from gate.storage.digest import Digest
from tests import builders
from tests.registry.releases import NAME, twin_policy
from tests.registry.simulator import Watched
from tests.service.registry_setup import RegistrySetup, Service

POLICY = builders.policy(twin=twin_policy())
REVIEWED = builders.policy(twin=twin_policy(), review="required")


def slots(service: Service) -> dict[str, Digest]:
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
    location, store = service.setup, ModelStore(tmp_path / "another")
    location.registry = watched = Watched(location.registry)
    assert [used.outcome for used in deploy_champion(location.model(), store, POLICY)] == [
        "deployed"
    ]
    assert watched.calls.count("download") == 1
    live = store.live(NAME)
    assert live is not None
    assert {name: slot.sha256 for name, slot in live.slots.items()} == expected_slots(service, 1)


def test_missing_twin_deploys_neither_file(service: Service) -> None:
    service.setup.promote(2)
    beside = service.setup.stored("2").beside
    for name in [name for name in beside if name.startswith(QUANTIZED)]:
        del beside[name]
    (used,) = deploy_champion(service.setup.model(), service.store, POLICY)
    assert used.outcome == "refused"
    assert "expected only" in used.reason
    assert slots(service) == expected_slots(service, 1)


def test_rollback_restores_both_slots(service: Service) -> None:
    service.setup.promote(2)
    assert service.reconcile_once() == [("deploy", "deployed", "2")]
    assert slots(service) == expected_slots(service, 2)
    rollback(service.setup.registry, NAME, ledger=service.setup.ledger, reason="slow")
    assert service.reconcile_once() == [("deploy", "deployed", "1")]
    assert slots(service) == expected_slots(service, 1)


def test_release_without_a_twin_removes_the_old_twin(service: Service) -> None:
    service.setup.policy = builders.policy()
    service.restart()
    service.setup.promote(2)
    service.reconcile_once()
    assert slots(service).keys() == {EXACT}


def test_twin_without_a_ledger_entry_is_reverted(service: Service, tmp_path) -> None:
    """An editor puts a good one beside the file."""
    second = RegistrySetup(tmp_path / "other", POLICY)
    second.folder.mkdir()
    second.promote(2)
    service.setup.promote(2, policy=builders.policy())
    service.setup.stored("2").beside |= {
        name: data for name, data in second.stored("1").beside.items() if name.startswith(QUANTIZED)
    }
    assert ("guard", "reverted", "1") in service.reconcile_once()
    assert "no quantized twin" in service.setup.ledger.entries()[-1].reason
    assert slots(service) == expected_slots(service, 1)


def test_twin_is_decided_again_by_the_service_policy(service: Service) -> None:
    """The promoter's policy of the twin is weaker than the service's."""
    service.setup.policy = builders.policy(twin=twin_policy(min_samples=500))
    service.restart()
    service.setup.promote(2, policy=POLICY)
    assert ("guard", "reverted", "1") in service.reconcile_once()
    assert "the quantized twin: " in service.setup.ledger.entries()[-1].reason
    service.setup.policy = builders.policy(twin=twin_policy(min_samples=350))
    service.restart()
    service.setup.promote(3, policy=POLICY)
    assert service.reconcile_once() == [("deploy", "deployed", "3")]


def tamper(service: Service, number: str, place: str) -> None:
    service.setup.stored(number).beside[f"{QUANTIZED}/{place}"] += b"x"


@pytest.mark.parametrize("place", ["model.onnx", "gate/evidence.json", "gate/decision.json"])
def test_approval_verifies_the_twin(tmp_path, place: str) -> None:
    service = Service(tmp_path, REVIEWED)
    service.setup.promote(1)
    tamper(service, "1", place)
    service.setup.tag("1", "approved")
    assert [outcome for _, outcome, _ in service.reconcile_once()] == ["refused"]
    assert service.setup.champion is None
