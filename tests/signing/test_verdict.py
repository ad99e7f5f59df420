"""verify_verdict compares a signed verdict with all artifacts and reports each problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gate import Digest, Policy, decide
from gate.errors import StorageError
from gate.signing.trust import Trust
from gate.signing.verification import ComparedArtifacts, verify_verdict
from tests import builders
from tests.signing import signing
from tests.signing.released import NAME, REGISTRY, ReleaseFolder, release


def artifacts(release_folder: ReleaseFolder, **fields: Any) -> ComparedArtifacts:
    everything = ComparedArtifacts(
        release_folder.model,
        registered=(frozenset({REGISTRY}), NAME),
        evidence=release_folder.evidence,
        measurement=release_folder.statements.evidence,
        policy=release_folder.policy,
        golden=release_folder.folder / "golden",
        preprocessing=builders.digest("spec"),
    )
    return replace(everything, **fields)


def verify(
    release_folder: ReleaseFolder, artifacts_: ComparedArtifacts | None = None, **options: Any
):
    arguments: dict[str, Any] = {
        "trust": Trust.from_file(release_folder.trust),
        "now": datetime.now(UTC),
    }
    signed = options.pop("signed", release_folder.statements.decision)
    return verify_verdict(signed, artifacts_ or artifacts(release_folder), **arguments | options)


@pytest.mark.parametrize("data", [False, True])
def test_valid_verdict_is_trusted(tmp_path: Path, data: bool) -> None:
    result = verify(release(tmp_path, data=data))
    assert result.problems == ()
    assert result.trusted
    assert [key.name for key in result.signers] == ["key 0"]
    assert set(result.checked) == {
        "signature", "result", "model", "resource", "evidence", "measurement", "policy",
        "decision", "golden", "preprocessing",
    }  # fmt: skip
    assert result.unchecked == ()


def test_missing_artifacts_are_reported_as_unchecked(tmp_path: Path) -> None:
    created = release(tmp_path)
    result = verify(created, ComparedArtifacts(created.model))
    assert result.trusted
    assert result.checked == ("signature", "result", "model")
    assert result.unchecked == ("golden/golden.json", "preprocessing")


def weaker_policy() -> Policy:
    return builders.policy(min_samples=2)


Tamper = Callable[[ReleaseFolder], dict[str, Any]]


def replace_model(release_folder: ReleaseFolder) -> dict[str, Any]:
    release_folder.model.write_bytes(b"another")
    return {}


def replace_golden(release_folder: ReleaseFolder) -> dict[str, Any]:
    (release_folder.folder / "golden" / "golden.json").write_text("{}")
    return {}


def with_artifacts(change: Callable[[ReleaseFolder], dict[str, Any]]) -> Tamper:
    return lambda release_folder: {
        "artifacts_": artifacts(release_folder, **change(release_folder))
    }


TAMPERED: dict[str, tuple[Tamper, str]] = {
    "unknown key": (lambda m: {"trust": signing.trust(signing.key(1))}, "signed by 0 of the keys"),
    "revoked": (
        lambda m: {"trust": signing.trust(revoked=(signing.key().public.key_id,))}, "is revoked",
    ),
    "threshold": (
        lambda m: {"trust": signing.trust(signing.key(), signing.key(1), threshold=2)},
        "expected 2",
    ),
    "too old": (lambda m: {"now": datetime.now(UTC) + timedelta(days=91)}, "days old"),
    "of the future": (lambda m: {"now": datetime.now(UTC) - timedelta(days=1)}, "in the future"),
    "another file": (replace_model, "which the statement does not name"),
    "another name": (
        with_artifacts(lambda m: {"registered": (frozenset({REGISTRY}), "letters")}), "expected letters in",
    ),
    "another registry": (
        with_artifacts(lambda m: {"registered": (frozenset({"https://b"}), NAME)}), "expected digits in https",
    ),
    "another evidence": (
        with_artifacts(lambda m: {"evidence": m.evidence.model_copy(update={"measured_at": "2026"})}),
        "the verdict was made on evidence",
    ),
    "another measurement": (
        with_artifacts(lambda m: {"measurement": signing.statements(*signing.evidence_and_decision()).evidence}),
        "the statement on the evidence is about evidence",
    ),
    "measured by a stranger": (
        with_artifacts(lambda m: {"measurement": signing.statements(
            m.evidence, m.decision, signer=signing.key(1)).evidence}),
        "the statement on the evidence is signed by 0",
    ),
    "another policy": (with_artifacts(lambda m: {"policy": weaker_policy()}), "the verdict was made by policy"),
    "other vectors": (replace_golden, "the golden vectors in"),
    "another spec": (
        with_artifacts(lambda m: {"preprocessing": builders.digest("x")}), "names preprocessing with digest",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tamper", "why"), TAMPERED.values(), ids=TAMPERED.keys())
def test_each_tampered_artifact_is_reported(tmp_path: Path, tamper: Tamper, why: str) -> None:
    created = release(tmp_path)
    result = verify(created, **tamper(created))
    assert not result.trusted
    assert why in "\n".join(result.problems)


def test_verdict_that_cannot_be_reproduced_is_refused(tmp_path: Path) -> None:
    """A forged decision on this evidence and policy, signed by a trusted key."""
    created = release(tmp_path)
    forged = decide(
        weaker_policy(), created.evidence, decided_at=created.decision.decided_at
    ).model_copy(update={"policy_sha256": created.policy.digest()})
    files = {
        each.name: Digest(str(each.sha256))
        for each in created.statements.decision.statement.subject
        if each.name
    }
    signed = signing.statements(created.evidence, forged, files=files).decision
    result = verify(created, artifacts(created, registered=None), signed=signed)
    assert [why[:44] for why in result.problems] == ["this evidence and policy lead to the verdict"]
    assert not result.trusted
    assert verify(created, artifacts(created, registered=None, evidence=None, measurement=None),
                signed=signed).trusted  # fmt: skip


def test_all_problems_are_reported(tmp_path: Path) -> None:
    created = release(tmp_path)
    replace_model(created)
    replace_golden(created)
    result = verify(
        created, artifacts(created, policy=weaker_policy()), trust=signing.trust(signing.key(1))
    )
    assert len(result.problems) == 5  # signature, measurement, model, policy, golden
    assert set(result.checked) == {"result", "resource", "evidence", "preprocessing"}


def test_signed_rejection_is_not_trusted(tmp_path: Path) -> None:
    result = verify(release(tmp_path, runtimes=()))
    assert [why[:24] for why in result.problems] == ["the verdict is FAILED: t"]
    assert "decision" in result.checked
    assert not result.trusted


def test_twin_policy_is_found_in_the_policy(tmp_path: Path) -> None:
    from tests.registry.releases import twin_policy

    created = release(tmp_path)
    policy_with_twin = builders.policy(twin=twin_policy())
    twin = policy_with_twin.twin
    assert twin is not None
    decision = decide(twin, created.evidence, decided_at=created.decision.decided_at)
    signed = signing.Signatory(signing.key(), signing.CODE).sign_decision(
        decision,
        {"model.onnx": Digest.from_file(created.model)},
        precision=twin.precision,
        resource="r",
    )
    artifacts_ = ComparedArtifacts(
        created.model, evidence=created.evidence, policy=policy_with_twin
    )
    result = verify(created, artifacts_, signed=signed)
    assert {"policy", "decision"} <= set(result.checked)


def test_other_statement_is_not_a_verdict(tmp_path: Path) -> None:
    created = release(tmp_path)
    result = verify(created, signed=created.statements.evidence)
    assert (result.trusted, result.summary) == (False, None)
    assert "is of type urn:parity-gate:measurement:v1" in result.problems[0]
    assert result.to_plain()["statement"] is None


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    created = release(tmp_path)
    created.model.unlink()
    with pytest.raises(StorageError):
        verify(created)
