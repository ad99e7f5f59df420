"""A multi-file release in the service: deployed, guarded and rolled back as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import Digest
from gate.deploy.store import EXACT, QUANTIZED
from gate.registry.release import Release
from tests import builders
from tests.registry import parts
from tests.registry.promoting import promote
from tests.registry.releases import NAME, twin_policy
from tests.registry.signed import Signing
from tests.service.registry_setup import Service
from tests.service.signed_submissions import SigningService


def promote_release(service: Service, seed: int) -> None:
    path = parts.write_release(service.setup.folder / f"parts-{seed}", seed=seed)
    created = parts.with_golden(parts.release(path))
    result = promote(
        service.setup.registry, created, policy=service.setup.policy, ledger=service.setup.ledger
    )
    assert result.outcome == "promoted", result.reason


def head_digests(service: Service, seed: int) -> tuple[Digest, Digest]:
    """Return the digests of the deployed head and of the head of this seed."""
    manifest = service.store.live(NAME)
    assert manifest is not None
    path = service.setup.folder / f"parts-{seed}" / "head.onnx"
    return manifest.slots[EXACT].parts["head"].sha256, Digest.from_file(path)


def serves(service: Service, seed: int) -> bool:
    live, expected = head_digests(service, seed)
    return live == expected


@pytest.fixture
def service(tmp_path: Path) -> Service:
    created = Service(tmp_path)
    promote_release(created, 1)
    assert created.reconcile_once() == [("deploy", "deployed", "1")]
    return created


@pytest.mark.parametrize("file", ["head.onnx", "encoder.onnx", "golden/golden.json"])
def test_release_with_a_replaced_file_does_not_serve(service: Service, file: str) -> None:
    promote_release(service, 2)
    service.setup.stored("2").extra_files[file] = b"\x08\x08" * 40
    service.reconcile_once()
    assert serves(service, 1)
    assert service.setup.champion == "1"


def sign_release(service: SigningService, seed: int) -> Release:
    path = parts.write_release(service.setup.folder / f"parts-{seed}", seed=seed)
    created = parts.with_golden(parts.release(path))
    return Signing(service.ci).signed(created, service.policy)


def test_submitted_multi_file_release_is_deployed_as_one(tmp_path: Path) -> None:
    service = SigningService(tmp_path)
    number = service.submit(sign_release(service, 1))
    assert service.reconcile_once() == [
        ("hand_in", "promoted", number),
        ("deploy", "deployed", number),
    ]
    manifest = service.store.live(NAME)
    assert manifest is not None
    assert set(manifest.slots[EXACT].parts) == set(parts.NAMES)


@pytest.mark.parametrize("file", ["head.onnx", "release.yaml"])
def test_submission_with_a_replaced_file_never_serves(tmp_path: Path, file: str) -> None:
    service = SigningService(tmp_path)
    number = service.upload_unverified(sign_release(service, 1))
    stored = service.setup.stored(number)
    if file == "release.yaml":
        stored.data = stored.data.replace(b"tiny:run", b"tiny:ran")
    else:
        service.change_file(number, file, lambda data: stored.extra_files["encoder.onnx"])
    service.reconcile_once()
    assert service.actions_of(number) == ["refused"]
    assert service.store.live(NAME) is None


POLICY_WITH_TWIN = builders.policy(twin=twin_policy())


def promote_with_twin(service: Service, seed: int) -> Release:
    path = parts.write_release(service.setup.folder / f"parts-{seed}", seed=seed)
    created = parts.with_twin(
        parts.with_golden(parts.release(path)), policy=POLICY_WITH_TWIN, seed=seed
    )
    result = promote(
        service.setup.registry, created, policy=POLICY_WITH_TWIN, ledger=service.setup.ledger
    )
    assert result.outcome == "promoted", result.reason
    return created


def live_slots(service: Service) -> dict[str, Digest]:
    manifest = service.store.live(NAME)
    assert manifest is not None
    return {label: slot.sha256 for label, slot in manifest.slots.items()}


def release_digests(new_release: Release) -> dict[str, Digest]:
    assert new_release.twin is not None
    return {
        EXACT: new_release.evidence.subject.sha256,
        QUANTIZED: new_release.twin.evidence.subject.sha256,
    }


def test_guard_reverts_a_release_with_a_replaced_twin(
    tmp_path: Path,
) -> None:
    service = Service(tmp_path, POLICY_WITH_TWIN)
    first = promote_with_twin(service, 1)
    service.reconcile_once()
    promote_with_twin(service, 2)
    service.setup.stored("2").extra_files["quantized/head.onnx"] = b"\x08\x08" * 40
    service.reconcile_once()
    assert service.setup.champion == "1"
    assert live_slots(service) == release_digests(first)
