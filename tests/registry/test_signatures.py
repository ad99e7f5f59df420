"""Statements that must accompany a release before it is promoted."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gate import Digest, Policy, decide
from gate.errors import DigestMismatch, Untrusted
from gate.golden.folder import GOLDEN_JSON
from gate.ledger.ledger import Ledger
from gate.records.layout import RECORDS
from gate.registry.interface import CHAMPION
from gate.registry.release import GoldenFolder, Release
from gate.registry.verdict_signing import MeasuredFile, VerdictSigning
from gate.registry.verify_release import verify_release
from gate.registry.version_files import write_records
from gate.signing.keys import SigningKey
from gate.signing.predicates import CodeVersion
from gate.signing.subjects import resource_uri
from gate.signing.trust import Trust
from gate.signing.verification import Signatory, StatementPair
from tests import builders
from tests.golden_vectors import vectors
from tests.registry import test_preprocessing_spec, test_quantized_twin
from tests.registry.promoting import promote
from tests.registry.releases import (
    DECIDED_AT,
    MEASURED_AT,
    NAME,
    failing_release,
    onnx_file,
    onnx_file_with_data,
    policy_with_external_data,
    release,
)
from tests.registry.signed import Signing, trust_in
from tests.registry.simulator import Simulator

POLICY = test_quantized_twin.POLICY
"""A policy that requires a twin."""


def sign_release(
    new_release: Release, key: SigningKey, policy: Policy = POLICY, **options: str
) -> Release:
    """Sign the release with the time of its measurement as decision time."""
    return Signing(key, at=MEASURED_AT, **options).signed(new_release, policy)


@dataclass(frozen=True)
class SignedRelease:
    """A release with golden vectors and a twin, a trusted key and an untrusted key."""

    release: Release
    key: SigningKey
    other: SigningKey
    trust: Trust
    folder: Path

    def signed(self, *, key: SigningKey | None = None, **options: str) -> Release:
        return sign_release(self.release, key or self.key, **options)


@pytest.fixture
def signed_release(tmp_path: Path) -> SignedRelease:
    release = test_quantized_twin.make_release(tmp_path)
    golden = vectors.write_golden_of(release.onnx_path, tmp_path / "golden", POLICY)
    release = replace(release, golden=golden)
    keys = [SigningKey.make(tmp_path / f"{name}.pem") for name in ("ci", "mallory")]
    return SignedRelease(release, *keys, trust_in(keys[0]), tmp_path)


def promote_signed(
    signed_release: SignedRelease,
    new_release: Release,
    ledger: Ledger,
    *,
    trust: Trust | None = None,
):
    registry = Simulator()
    result = promote(
        registry, new_release, policy=POLICY, ledger=ledger, trust=trust or signed_release.trust
    )
    return result, registry


def test_release_signed_by_a_trusted_key_is_promoted_with_its_signer(
    signed_release: SignedRelease, ledger: Ledger
) -> None:
    new_release = signed_release.signed()
    result, registry = promote_signed(signed_release, new_release, ledger)
    assert (result.outcome, result.signers) == ("promoted", (signed_release.key.public.key_id,))
    assert ledger.entries()[-1].signers == result.signers
    extra_files = registry.versions[0].extra_files
    assert extra_files["gate/decision.dsse.json"] == new_release.statements.decision.data
    assert (
        extra_files["quantized/gate/evidence.dsse.json"]
        == new_release.twin.statements.evidence.data
    )


def test_external_data_is_a_subject_of_the_statement(signed_release: SignedRelease) -> None:
    path = onnx_file_with_data(signed_release.folder / "with" / "model.onnx")
    policy = policy_with_external_data()
    new_release = sign_release(release(path, policy=policy), signed_release.key, policy)
    names = {each.name: each.sha256 for each in new_release.statements.decision.statement.subject}
    (data,) = new_release.evidence.subject.external_data
    assert names == {
        name: Digest.from_file(path.parent / name).hex for name in ("model.onnx", data)
    }
    arguments = {"trust": signed_release.trust, "registries": frozenset({"simulator"})}
    assert verify_release(new_release, policy=policy, **arguments).signers
    (path.parent / data).write_bytes(b"\0" * (path.parent / data).stat().st_size)
    with pytest.raises(DigestMismatch, match="bytes changed since they were measured"):
        verify_release(new_release, policy=policy, **arguments)
    (path.parent / data).unlink()
    with pytest.raises(DigestMismatch, match="needs the data file"):
        verify_release(new_release, policy=policy, **arguments)


def edit_evidence(signed_release: SignedRelease, *, of_the_twin: bool = False) -> Release:
    """Edit the evidence and make a decision that fits it."""
    signed_original = signed_release.signed()
    new_release = signed_original.twin if of_the_twin else signed_original
    environment = new_release.evidence.environment.model_copy(update={"cpu": "a better one"})
    evidence = new_release.evidence.model_copy(update={"environment": environment})
    policy = test_quantized_twin.TWIN if of_the_twin else POLICY
    decision = decide(policy, evidence, decided_at=new_release.decision.decided_at)
    edited = replace(new_release, evidence=evidence, decision=decision)
    return replace(signed_original, twin=edited) if of_the_twin else edited


def edit_decision(signed_release: SignedRelease) -> Release:
    new_release = signed_release.signed()
    return replace(
        new_release,
        decision=new_release.decision.model_copy(
            update={"checks": new_release.decision.checks[:-1]}
        ),
    )


def edit_golden(signed_release: SignedRelease) -> Release:
    """Write a valid golden.json with a wider tolerance."""
    new_release = signed_release.signed()
    file = new_release.golden.path / GOLDEN_JSON
    plain = json.loads(file.read_text())
    plain["outputs"][0]["max_abs_diff"] = 1e9
    file.write_text(json.dumps(plain))
    return replace(new_release, golden=GoldenFolder.open(new_release.golden.path))


def replace_twin(signed_release: SignedRelease) -> Release:
    other_release = test_quantized_twin.make_release(signed_release.folder, twin_seed=200)
    with_other_twin = replace(signed_release.release, twin=other_release.twin)
    return replace(
        signed_release.signed(), twin=sign_release(with_other_twin, signed_release.key).twin
    )


def use_foreign_statements(signed_release: SignedRelease) -> Release:
    second = sign_release(
        test_quantized_twin.make_release(signed_release.folder, seed=2), signed_release.key
    )
    return replace(signed_release.signed(), statements=second.statements)


def sign_for_invalid_registry(signed_release: SignedRelease) -> Release:
    new_release = signed_release.signed()
    return replace(
        new_release,
        statements=_sign_decision_again(
            new_release, signed_release.key, resource="urn:sha256:" + "0" * 64
        ),
    )


def date_measurement_back(signed_release: SignedRelease, days: float) -> Release:
    return replace(signed_release, release=_measure_at(signed_release.release, days=-days)).signed()


def delete_twin_statements(signed_release: SignedRelease) -> Release:
    new_release = signed_release.signed()
    return replace(new_release, twin=replace(new_release.twin, statements=None))


TAMPERED: dict[str, tuple[Callable[[SignedRelease], Release], str]] = {
    "no statement": (lambda w: w.release, "the file has no signed statements"),
    "no statement of the twin": (
        delete_twin_statements, "the quantized twin: the file has no signed statements"),
    "edited evidence": (edit_evidence, "The evidence was edited"),
    "edited evidence of the twin": (
        lambda w: edit_evidence(w, of_the_twin=True),
        "the quantized twin: the statement on the evidence"),
    "edited decision": (edit_decision, "The decision was edited"),
    "edited golden vectors": (edit_golden, "names golden/golden.json with digest"),
    "golden vectors left out": (
        lambda w: replace(w.signed(), golden=None),
        "names golden/golden.json, which was not submitted"),
    "another twin": (replace_twin, "The twin was replaced"),
    "twin left out": (
        lambda w: replace(w.signed(), twin=None),
        "names quantized/model.int8.onnx, which was not submitted"),
    "another file": (use_foreign_statements, "The evidence was edited, or belongs to another model"),
    "another name": (
        lambda w: w.signed(model="letters"),
        "is for simulator#/models/letters, expected digits in simulator"),
    "another registry": (
        lambda w: w.signed(registry="https://elsewhere"),
        "is for https://elsewhere#/models/digits, expected digits in simulator"),
    "no registry": (sign_for_invalid_registry, "is for urn:sha256:"),
    "unknown key": (
        lambda w: w.signed(key=w.other),
        "signed by 0 of the keys that are trusted as measurers"),
    "old": (lambda w: date_measurement_back(w, 91), "days old, 90 are allowed"),
}  # fmt: skip


@pytest.mark.parametrize(("tamper", "reason"), TAMPERED.values(), ids=TAMPERED)
def test_tampered_release_is_refused_and_the_champion_stays(
    signed_release: SignedRelease,
    ledger: Ledger,
    tamper: Callable[[SignedRelease], Release],
    reason: str,
) -> None:
    registry = Simulator()
    before = sign_release(
        test_quantized_twin.make_release(signed_release.folder, seed=9), signed_release.key
    )
    promote(registry, before, policy=POLICY, ledger=ledger, trust=signed_release.trust)
    assert registry.aliases[CHAMPION] == "1"

    new_release = tamper(signed_release)
    result = promote(
        registry, new_release, policy=POLICY, ledger=ledger, trust=signed_release.trust
    )
    assert (result.outcome, result.signers) == ("refused", ())
    assert reason in result.reason
    line = ledger.entries()[-1]
    assert (line.action, line.reason, line.signers) == ("refused", result.reason, ())
    assert registry.aliases[CHAMPION] == "1"
    assert len(registry.versions) == 1


def test_old_signatures_are_accepted_for_the_champion_only(
    signed_release: SignedRelease, ledger: Ledger
) -> None:
    registry, new_release = Simulator(), signed_release.signed()
    strict = signed_release.trust.model_copy(update={"max_age_days": 1e-9})
    promote(registry, new_release, policy=POLICY, ledger=ledger, trust=signed_release.trust)
    again = promote(registry, new_release, policy=POLICY, ledger=ledger, trust=strict)
    assert again.outcome == "unchanged"
    registry.aliases.clear()
    promoted_again = promote(registry, new_release, policy=POLICY, ledger=ledger, trust=strict)
    assert promoted_again.outcome == "refused"
    assert "days old" in promoted_again.reason
    assert CHAMPION not in registry.aliases


def test_unsigned_preprocessing_spec_is_refused(
    signed_release: SignedRelease, ledger: Ledger
) -> None:
    new_release = test_preprocessing_spec.make_release(signed_release.folder)
    policy = test_preprocessing_spec.POLICY
    with_spec = sign_release(new_release, signed_release.key, policy)
    without_spec = sign_release(
        replace(new_release, preprocessing=None), signed_release.key, policy
    )
    for submitted, reason in (
        (
            replace(with_spec, statements=without_spec.statements),
            "names preprocessing with digest none",
        ),
        (
            replace(without_spec, statements=with_spec.statements),
            "names preprocessing, which was not submitted",
        ),
    ):
        result = promote(
            Simulator(), submitted, policy=policy, ledger=ledger, trust=signed_release.trust
        )
        assert result.outcome == "refused"
        assert reason in result.reason
    result = promote(
        Simulator(), with_spec, policy=policy, ledger=ledger, trust=signed_release.trust
    )
    assert result.outcome == "promoted"


class TestSigning:
    """A verdict is signed for a model only if the release is the one that was measured."""

    def signing(self, signed_release: SignedRelease) -> VerdictSigning:
        signatory = Signatory(signed_release.key, CodeVersion(parity_gate="1"))
        return VerdictSigning(signatory, signed_release.trust, resource_uri("simulator", NAME))

    def sign(self, signed_release: SignedRelease, new_release: Release) -> Release:
        before = signed_release.signed(model="letters")
        exact, twin = before.statements.evidence, before.twin.statements.evidence
        return self.signing(signed_release).sign(
            replace(new_release, statements=None),
            POLICY,
            measured=MeasuredFile(exact, signed_release.folder / "golden"),
            twin=MeasuredFile(twin, signed_release.folder / "twin golden"),
        )

    def test_measured_release_is_signed_for_this_model(
        self, signed_release: SignedRelease, ledger: Ledger
    ) -> None:
        new_release = self.sign(signed_release, signed_release.signed(model="letters"))
        assert promote_signed(signed_release, new_release, ledger)[0].outcome == "promoted"

    def test_changed_tolerances_of_the_same_vectors_can_be_signed(
        self, signed_release: SignedRelease
    ) -> None:
        new_release = signed_release.signed()
        shutil.copytree(signed_release.folder / "golden", signed_release.folder / "copied")
        copied = GoldenFolder.open(signed_release.folder / "copied")
        wider = copied.golden.outputs[0].model_copy(update={"max_abs_diff": 1.0})
        copied.golden.model_copy(update={"outputs": (wider,)}).save(copied.path / GOLDEN_JSON)
        new_release = self.sign(
            signed_release, replace(new_release, golden=GoldenFolder.open(copied.path))
        )
        verified = verify_release(
            new_release,
            policy=POLICY,
            trust=signed_release.trust,
            registries=frozenset({"simulator"}),
        )
        (signer,) = verified.signers
        assert signer.key_id == signed_release.key.public.key_id

    def test_edited_evidence_is_not_signed(self, signed_release: SignedRelease) -> None:
        with pytest.raises(Untrusted, match="evidence was edited"):
            self.sign(signed_release, edit_evidence(signed_release))
        with pytest.raises(Untrusted, match="the quantized twin: the statement on the evidence"):
            self.sign(signed_release, edit_evidence(signed_release, of_the_twin=True))

    def test_changed_golden_vectors_are_not_signed(self, signed_release: SignedRelease) -> None:
        new_release = signed_release.signed()
        (signed_release.folder / "else").mkdir()
        vectors.write_model_vectors(
            signed_release.folder / "else",
            new_release.onnx_path,
            outputs={"logits": vectors.ExpectedOutput(vectors.inputs() @ vectors.weights(new_release.onnx_path) * 2, 1.0)},
            origin=new_release.golden.golden.origin,
        )  # fmt: skip
        with pytest.raises(Untrusted, match="golden vectors differ"):
            self.sign(
                signed_release,
                replace(new_release, golden=GoldenFolder.open(signed_release.folder / "else")),
            )
        with pytest.raises(Untrusted, match="were signed when .* but they are missing"):
            self.sign(signed_release, replace(new_release, golden=None))
        file = signed_release.folder / "golden" / GOLDEN_JSON
        file.write_text(file.read_text() + "\n")
        with pytest.raises(Untrusted, match="are not those that were signed"):
            self.sign(signed_release, new_release)

    def test_untrusted_or_revoked_key_is_detected(self, signed_release: SignedRelease) -> None:
        signing = self.signing(signed_release)
        assert signing.is_trusted
        revoked = {"revoked": (signed_release.key.public.key_id,)}
        trust = trust_in(signed_release.key, signed_release.other, **revoked)
        assert not dataclasses.replace(signing, trust=trust).is_trusted
        assert not dataclasses.replace(signing, trust=trust_in(signed_release.other)).is_trusted


def test_signed_rejection_is_refused(signed_release: SignedRelease, ledger: Ledger) -> None:
    bad = failing_release(onnx_file(signed_release.folder / "bad.onnx", seed=3))
    new_release = sign_release(bad, signed_release.key, builders.policy())
    write_records(new_release, signed_release.folder / RECORDS)
    back = StatementPair.from_folder(signed_release.folder / RECORDS)
    result = promote(
        Simulator(),
        replace(new_release, statements=back),
        policy=builders.policy(),
        ledger=ledger,
        trust=signed_release.trust,
    )
    assert result.outcome == "refused"
    assert result.reason.startswith("FAIL: ")
    assert ledger.entries()[-1].signers == (signed_release.key.public.key_id,)


def _sign_decision_again(new_release: Release, key: SigningKey, *, resource: str) -> StatementPair:
    subjects = {
        each.name: Digest(each.sha256) for each in new_release.statements.decision.statement.subject
    }
    signatory = Signatory(key, CodeVersion(parity_gate="1"))
    decision = signatory.sign_decision(
        new_release.decision, subjects, precision="exact", resource=resource
    )
    return StatementPair(new_release.statements.evidence, decision)


def _measure_at(new_release: Release, *, days: float) -> Release:
    """Return the release measured `days` from now; the decision time is unchanged."""
    at = (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")
    evidence = new_release.evidence.model_copy(update={"measured_at": at})
    decision = decide(POLICY, evidence, decided_at=DECIDED_AT)
    return replace(new_release, evidence=evidence, decision=decision)
