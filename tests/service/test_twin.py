"""The slots of one release: the exact file and its quantized twin, replaced together."""

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
from tests.service.places import Place, Service

POLICY = builders.policy(twin=twin_policy())
REVIEWED = builders.policy(twin=twin_policy(), review="required")


def slots(service: Service) -> dict[str, Digest]:
    manifest = service.store.live(NAME)
    assert manifest is not None
    return {name: slot.sha256 for name, slot in manifest.slots.items()}


def of(service: Service, seed: int) -> dict[str, Digest]:
    folder = service.place.folder
    exact, twin = folder / f"{seed}.onnx", folder / f"twin-{seed}" / "model.onnx"
    return {EXACT: Digest.from_file(exact), QUANTIZED: Digest.from_file(twin)}


@pytest.fixture
def service(tmp_path) -> Service:
    made = Service(tmp_path, POLICY)
    made.place.promote(1)
    assert made.look() == [("deploy", "deployed", "1")]
    return made


def test_a_version_is_downloaded_once_for_both(service: Service, tmp_path) -> None:
    place, store = service.place, ModelStore(tmp_path / "another")
    place.registry = watched = Watched(place.registry)
    assert [taken.outcome for taken in deploy_champion(place.model(), store, POLICY)] == [
        "deployed"
    ]
    assert watched.calls.count("download") == 1
    live = store.live(NAME)
    assert live is not None
    assert {name: slot.sha256 for name, slot in live.slots.items()} == of(service, 1)


def test_a_twin_that_is_gone_takes_neither_into_service(service: Service) -> None:
    service.place.promote(2)
    beside = service.place.stored("2").beside
    for name in [name for name in beside if name.startswith(QUANTIZED)]:
        del beside[name]
    (taken,) = deploy_champion(service.place.model(), service.store, POLICY)
    assert taken.outcome == "refused"
    assert "expected only" in taken.reason
    assert slots(service) == of(service, 1)


def test_a_rollback_brings_both_back(service: Service) -> None:
    service.place.promote(2)
    assert service.look() == [("deploy", "deployed", "2")]
    assert slots(service) == of(service, 2)
    rollback(service.place.registry, NAME, ledger=service.place.ledger, reason="slow")
    assert service.look() == [("deploy", "deployed", "1")]
    assert slots(service) == of(service, 1)


def test_a_release_without_a_twin_takes_the_old_one_away(service: Service) -> None:
    service.place.policy = builders.policy()
    service.restart()
    service.place.promote(2)
    service.look()
    assert slots(service).keys() == {EXACT}


def test_a_release_without_the_twin_that_the_service_asks_for_is_refused(service: Service) -> None:
    service.place.promote(2, policy=builders.policy())
    assert ("guard", "reverted", "1") in service.look()
    assert "no quantized twin" in service.place.ledger.entries()[-1].reason
    assert slots(service) == of(service, 1)


def test_a_twin_that_the_ledger_does_not_name_is_none(service: Service, tmp_path) -> None:
    """An editor puts a good one beside the file."""
    other = Place(tmp_path / "other", POLICY)
    other.folder.mkdir()
    other.promote(2)
    service.place.promote(2, policy=builders.policy())
    service.place.stored("2").beside |= {
        name: data for name, data in other.stored("1").beside.items() if name.startswith(QUANTIZED)
    }
    assert ("guard", "reverted", "1") in service.look()
    assert "no quantized twin" in service.place.ledger.entries()[-1].reason
    assert slots(service) == of(service, 1)


def test_a_twin_is_decided_anew_too(service: Service) -> None:
    """The promoter's policy of the twin is weaker than the service's."""
    service.place.policy = builders.policy(twin=twin_policy(min_samples=500))
    service.restart()
    service.place.promote(2, policy=POLICY)
    assert ("guard", "reverted", "1") in service.look()
    assert "the quantized twin: " in service.place.ledger.entries()[-1].reason
    service.place.policy = builders.policy(twin=twin_policy(min_samples=350))
    service.restart()
    service.place.promote(3, policy=POLICY)
    assert service.look() == [("deploy", "deployed", "3")]


def spoil(service: Service, number: str, place: str) -> None:
    service.place.stored(number).beside[f"{QUANTIZED}/{place}"] += b"x"


@pytest.mark.parametrize("place", ["model.onnx", "gate/evidence.json", "gate/decision.json"])
def test_an_approval_examines_the_twin_too(tmp_path, place: str) -> None:
    service = Service(tmp_path, REVIEWED)
    service.place.promote(1)
    spoil(service, "1", place)
    service.place.tag("1", "approved")
    assert [outcome for _, outcome, _ in service.look()] == ["refused"]
    assert service.place.champion is None
