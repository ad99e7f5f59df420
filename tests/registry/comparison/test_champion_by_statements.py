"""CI without a ledger compares with the champion that a trusted key signed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gate.decision.champion import Champion
from gate.ledger.ledger import Ledger
from gate.registry.load_champion import champion_if_any, load_champion
from gate.registry.registered_model import RegisteredModel
from gate.signing.trust import Trust
from tests import builders
from tests.registry.releases import NAME, onnx_file
from tests.registry.signed import trust_in
from tests.service.signed_submissions import SigningService
from tests.service.test_submissions import days_ago, edit_json_field


@pytest.fixture
def service(tmp_path: Path) -> SigningService:
    """A service whose ledger has version 1 as the champion."""
    created = SigningService(tmp_path)
    created.submit(created.with_golden(1))
    assert created.reconcile_once()[0] == ("hand_in", "promoted", "1")
    return created


def load_champion_in_ci(service: SigningService, trust: Trust | None) -> Champion:
    """Load the champion with another, empty ledger, as CI does."""
    folder = service.setup.folder / "ci"
    folder.mkdir()
    model = RegisteredModel(service.setup.registry, Ledger(folder / "state.db"), NAME)
    return load_champion(model, into=folder, trust=trust)


def test_champion_with_trusted_statements_is_proven(service: SigningService) -> None:
    result = load_champion_in_ci(service, trust_in(service.ci))
    assert (result.state, result.version, result.absent) == ("proven", "1", None)
    by_ledger = load_champion(service.setup.model(), into=service.setup.folder)
    assert (result.sha256, result.evidence, result.decision) == (
        by_ledger.sha256, by_ledger.evidence, by_ledger.decision,
    )  # fmt: skip
    assert result.onnx_path is not None
    assert result.onnx_path.read_bytes() == service.setup.stored("1").data


def test_champion_with_old_statements_is_proven(tmp_path: Path) -> None:
    service = SigningService(tmp_path)
    number = service.upload_unverified(service.release(1, days=200, at=days_ago(199)))
    service.setup.move_champion(number)
    assert load_champion_in_ci(service, trust_in(service.ci)).state == "proven"


def replace_onnx_file(service: SigningService) -> Trust:
    file = onnx_file(service.setup.folder / "x.onnx", seed=9)
    service.setup.stored("1").data = file.read_bytes()
    return trust_in(service.ci)


def file_change(path: str, change: Callable[[bytes], bytes]) -> Callable[[SigningService], Trust]:
    def tamper(service: SigningService) -> Trust:
        service.change_file("1", path, change)
        return trust_in(service.ci)

    return tamper


def delete_statements(service: SigningService) -> Trust:
    for name in ("evidence", "decision"):
        del service.setup.stored("1").extra_files[f"gate/{name}.dsse.json"]
    return trust_in(service.ci)


def serve_another_model(service: SigningService) -> Trust:
    service.setup.move_champion(service.upload_unverified(service.release(2, model="letters")))
    return trust_in(service.ci)


UNPROVEN: dict[str, tuple[Callable[[SigningService], Trust | None], str]] = {
    "nobody is trusted": (lambda _service: None, "has no entry"),
    "unknown key": (lambda service: trust_in(service.untrusted_key), "is signed by 0 of the keys"),
    "revoked": (
        lambda service: trust_in(service.ci, revoked=(service.ci.public.key_id,)), "is revoked"
    ),
    "other bytes": (replace_onnx_file, "has digest"),
    "edited evidence": (file_change("gate/evidence.json", edit_json_field("measured_at", "2026-11-22")), "has digest"),
    "edited decision": (
        file_change("gate/decision.json", edit_json_field("runtimes", ["ort-cpu"])), "is about decision"
    ),
    "exchanged golden vectors": (
        file_change("golden/golden.json", lambda data: data + b" "), "golden vectors"
    ),
    "invalid statement": (file_change("gate/evidence.dsse.json", lambda _: b"[1]"), "evidence.dsse.json"),
    "no statement": (delete_statements, "has no statement"),
    "of another model": (serve_another_model, "letters"),
}  # fmt: skip


@pytest.mark.rows(4)
@pytest.mark.parametrize("case", UNPROVEN)
def test_unproven_champion_is_left_to_the_service(service: SigningService, case: str) -> None:
    tamper, message = UNPROVEN[case]
    result = load_champion_in_ci(service, tamper(service))
    assert result.state == "unvouched"
    assert (result.onnx_path, result.evidence) == (None, None)
    assert "has no entry that it passed" in str(result.absent)
    assert message in str(result.absent)
    assert result.compared_by(builders.policy(promotion="by_service")) is None


def test_champion_is_shown_when_the_policy_requires_no_comparison(service: SigningService) -> None:
    model = RegisteredModel(service.setup.registry, Ledger(service.setup.folder / "other.db"), NAME)
    shown = champion_if_any(model, into=service.setup.folder, trust=trust_in(service.ci))
    assert shown.state == "proven"
