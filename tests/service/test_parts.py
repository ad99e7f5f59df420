"""A release of several files in the service: deployed, guarded and taken back as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.deploy.store import EXACT, QUANTIZED
from gate.registry.promotion import rollback
from gate.registry.release import Release
from gate.storage.digest import Digest
from tests import builders
from tests.registry import parts
from tests.registry.promoting import promote
from tests.registry.releases import NAME, twin_policy
from tests.registry.signed import Signing
from tests.service.handing_in import World
from tests.service.places import Service


def hand_in(service: Service, seed: int) -> None:
    path = parts.files(service.place.folder / f"parts-{seed}", seed=seed)
    made = parts.with_golden(parts.release(path))
    done = promote(
        service.place.registry, made, policy=service.place.policy, ledger=service.place.ledger
    )
    assert done.outcome == "promoted", done.reason


def heads(service: Service, seed: int) -> tuple[Digest, Digest]:
    """Of the head that serves, and of that of this seed."""
    manifest = service.store.live(NAME)
    assert manifest is not None
    there = service.place.folder / f"parts-{seed}" / "head.onnx"
    return manifest.slots[EXACT].parts["head"].sha256, Digest.from_file(there)


def serves(service: Service, seed: int) -> bool:
    live, wanted = heads(service, seed)
    return live == wanted


@pytest.fixture
def service(tmp_path: Path) -> Service:
    made = Service(tmp_path)
    hand_in(made, 1)
    assert made.look() == [("deploy", "deployed", "1")]
    return made


@pytest.mark.parametrize("file", ["head.onnx", "encoder.onnx", "golden/golden.json"])
def test_a_release_of_which_a_file_was_exchanged_does_not_serve(
    service: Service, file: str
) -> None:
    hand_in(service, 2)
    service.place.stored("2").beside[file] = b"\x08\x08" * 40
    service.look()
    assert serves(service, 1)
    assert service.place.champion == "1"


def handed_in(world: World, seed: int) -> Release:
    path = parts.files(world.place.folder / f"parts-{seed}", seed=seed)
    made = parts.with_golden(parts.release(path))
    return Signing(world.ci).signed(made, world.policy)


def test_what_was_handed_in_is_judged_and_deployed_as_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    number = world.send(handed_in(world, 1))
    assert world.look() == [("hand_in", "promoted", number), ("deploy", "deployed", number)]
    manifest = world.store.live(NAME)
    assert manifest is not None
    assert set(manifest.slots[EXACT].parts) == set(parts.NAMES)


@pytest.mark.parametrize("file", ["head.onnx", "release.yaml"])
def test_what_was_exchanged_after_it_was_signed_never_serves(tmp_path: Path, file: str) -> None:
    world = World(tmp_path)
    number = world.put(handed_in(world, 1))
    stored = world.place.stored(number)
    if file == "release.yaml":
        stored.data = stored.data.replace(b"tiny:run", b"tiny:ran")
    else:
        world.spoil(number, file, lambda data: stored.beside["encoder.onnx"])
    world.look()
    assert world.about(number) == ["refused"]
    assert world.store.live(NAME) is None


TWINNED = builders.policy(twin=twin_policy())


def hand_in_both(service: Service, seed: int) -> Release:
    path = parts.files(service.place.folder / f"parts-{seed}", seed=seed)
    made = parts.with_twin(parts.with_golden(parts.release(path)), policy=TWINNED, seed=seed)
    done = promote(service.place.registry, made, policy=TWINNED, ledger=service.place.ledger)
    assert done.outcome == "promoted", done.reason
    return made


def both(service: Service) -> dict[str, Digest]:
    manifest = service.store.live(NAME)
    assert manifest is not None
    return {label: slot.sha256 for label, slot in manifest.slots.items()}


def digests(of: Release) -> dict[str, Digest]:
    assert of.twin is not None
    return {EXACT: of.evidence.subject.sha256, QUANTIZED: of.twin.evidence.subject.sha256}


def test_a_release_and_its_twin_serve_and_go_back_together(tmp_path: Path) -> None:
    service = Service(tmp_path, TWINNED)
    first = hand_in_both(service, 1)
    assert service.look() == [("deploy", "deployed", "1")]
    assert both(service) == digests(first)
    assert service.look() == []
    second = hand_in_both(service, 2)
    service.look()
    assert both(service) == digests(second)
    rollback(service.place.registry, NAME, ledger=service.place.ledger, reason="worse")
    assert service.look() == [("deploy", "deployed", "1")]
    assert both(service) == digests(first)


def test_the_guard_takes_the_alias_from_a_release_whose_twin_was_exchanged(
    tmp_path: Path,
) -> None:
    service = Service(tmp_path, TWINNED)
    first = hand_in_both(service, 1)
    service.look()
    hand_in_both(service, 2)
    service.place.stored("2").beside["quantized/head.onnx"] = b"\x08\x08" * 40
    service.look()
    assert service.place.champion == "1"
    assert both(service) == digests(first)
