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

from gate.decision.decide import decide
from gate.errors import DigestMismatch, Untrusted
from gate.golden.folder import GOLDEN_JSON
from gate.ledger.ledger import Ledger
from gate.policy.policy import Policy
from gate.records.layout import RECORDS
from gate.registry.interface import CHAMPION
from gate.registry.release import GoldenFolder, Release
from gate.registry.verify_release import MeasuredFile, VerdictSigning, verify_release
from gate.registry.version_files import write_records
from gate.signing.keys import SigningKey
from gate.signing.predicates import CodeVersion
from gate.signing.subjects import resource_uri
from gate.signing.trust import Trust
from gate.signing.verification import Signatory, StatementPair
from gate.storage.digest import Digest
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
    release,
)
from tests.registry.signed import Signing, trust_in
from tests.registry.simulator import Simulator

POLICY = test_quantized_twin.POLICY
"""It names a twin."""


def signed(of: Release, key: SigningKey, policy: Policy = POLICY, **place: str) -> Release:
    """Decided when it was measured, for this place."""
    return Signing(key, at=MEASURED_AT, **place).signed(of, policy)


@dataclass(frozen=True)
class SignedRelease:
    """A release with golden vectors and a twin, signed by the key that is trusted."""

    release: Release
    key: SigningKey
    other: SigningKey
    trust: Trust
    folder: Path

    def signed(self, *, key: SigningKey | None = None, **place: str) -> Release:
        return signed(self.release, key or self.key, **place)


@pytest.fixture
def signed_release(tmp_path: Path) -> SignedRelease:
    of = test_quantized_twin.made(tmp_path)
    origin = vectors.origin().model_copy(update={"policy_sha256": POLICY.digest()})
    vectors.golden_of(tmp_path / "golden", of.onnx_path, origin=origin)
    of = replace(of, golden=GoldenFolder.open(tmp_path / "golden"))
    keys = [SigningKey.make(tmp_path / f"{name}.pem") for name in ("ci", "mallory")]
    return SignedRelease(of, *keys, trust_in(keys[0]), tmp_path)


def promoted(
    signed_release: SignedRelease, of: Release, ledger: Ledger, *, trust: Trust | None = None
):
    registry = Simulator()
    result = promote(
        registry, of, policy=POLICY, ledger=ledger, trust=trust or signed_release.trust
    )
    return result, registry


def test_release_signed_by_a_trusted_key_is_promoted_with_its_signer(
    signed_release: SignedRelease, ledger: Ledger
) -> None:
    of = signed_release.signed()
    result, registry = promoted(signed_release, of, ledger)
    assert (result.outcome, result.signers) == ("promoted", (signed_release.key.public.key_id,))
    assert ledger.entries()[-1].signers == result.signers
    beside = registry.versions[0].beside
    assert beside["gate/decision.dsse.json"] == of.statements.decision.data
    assert beside["quantized/gate/evidence.dsse.json"] == of.twin.statements.evidence.data


def test_unsigned_release_is_promoted_without_trust(
    signed_release: SignedRelease, ledger: Ledger
) -> None:
    result = promote(Simulator(), signed_release.release, policy=POLICY, ledger=ledger)
    assert (result.outcome, result.signers) == ("promoted", ())
    assert ledger.entries()[-1].signers == ()


def test_external_data_is_a_subject_of_the_statement(signed_release: SignedRelease) -> None:
    instruments = builders.policy().instruments.model_copy(update={"graph_forbid": ()})
    path = onnx_file_with_data(signed_release.folder / "with" / "model.onnx")
    policy = builders.policy(instruments=instruments)
    of = signed(release(path, policy=policy), signed_release.key, policy)
    names = {each.name: each.sha256 for each in of.statements.decision.statement.subject}
    (data,) = of.evidence.subject.external_data
    assert names == {
        name: Digest.from_file(path.parent / name).hex for name in ("model.onnx", data)
    }
    here = {"trust": signed_release.trust, "registries": frozenset({"simulator"})}
    assert verify_release(of, policy=policy, **here).signers
    (path.parent / data).write_bytes(b"\0" * (path.parent / data).stat().st_size)
    with pytest.raises(DigestMismatch, match="bytes changed since they were measured"):
        verify_release(of, policy=policy, **here)
    (path.parent / data).unlink()
    with pytest.raises(DigestMismatch, match="needs the data file"):
        verify_release(of, policy=policy, **here)


def edited_evidence(signed_release: SignedRelease, *, of_the_twin: bool = False) -> Release:
    """Consistently: the decision is on the edited evidence."""
    complete = signed_release.signed()
    of = complete.twin if of_the_twin else complete
    environment = of.evidence.environment.model_copy(update={"cpu": "a better one"})
    evidence = of.evidence.model_copy(update={"environment": environment})
    policy = test_quantized_twin.TWIN if of_the_twin else POLICY
    decision = decide(policy, evidence, decided_at=of.decision.decided_at)
    edited = replace(of, evidence=evidence, decision=decision)
    return replace(complete, twin=edited) if of_the_twin else edited


def edited_decision(signed_release: SignedRelease) -> Release:
    of = signed_release.signed()
    return replace(of, decision=of.decision.model_copy(update={"checks": of.decision.checks[:-1]}))


def edited_golden(signed_release: SignedRelease) -> Release:
    """A wider tolerance: another golden.json, whole in itself."""
    of = signed_release.signed()
    file = of.golden.path / GOLDEN_JSON
    plain = json.loads(file.read_text())
    plain["outputs"][0]["max_abs_diff"] = 1e9
    file.write_text(json.dumps(plain))
    return replace(of, golden=GoldenFolder.open(of.golden.path))


def replaced_twin(signed_release: SignedRelease) -> Release:
    exchanged = test_quantized_twin.made(signed_release.folder, twin_seed=200)
    mine = replace(signed_release.release, twin=exchanged.twin)
    return replace(signed_release.signed(), twin=signed(mine, signed_release.key).twin)


def of_another_file(signed_release: SignedRelease) -> Release:
    second = signed(test_quantized_twin.made(signed_release.folder, seed=2), signed_release.key)
    return replace(signed_release.signed(), statements=second.statements)


def for_invalid_registry(signed_release: SignedRelease) -> Release:
    of = signed_release.signed()
    return replace(
        of, statements=_resigned(of, signed_release.key, resource="urn:sha256:" + "0" * 64)
    )


def measured_days_ago(signed_release: SignedRelease, days: float) -> Release:
    return replace(signed_release, release=_measured(signed_release.release, days=-days)).signed()


def without_statement_of_the_twin(signed_release: SignedRelease) -> Release:
    of = signed_release.signed()
    return replace(of, twin=replace(of.twin, statements=None))


TAMPERED: dict[str, tuple[Callable[[SignedRelease], Release], str]] = {
    "no statement": (lambda w: w.release, "the file has no signed statements"),
    "no statement of the twin": (
        without_statement_of_the_twin, "the quantized twin: the file has no signed statements"),
    "edited evidence": (edited_evidence, "The evidence was edited"),
    "edited evidence of the twin": (
        lambda w: edited_evidence(w, of_the_twin=True),
        "the quantized twin: the statement on the evidence"),
    "edited decision": (edited_decision, "The decision was edited"),
    "edited golden vectors": (edited_golden, "names golden/golden.json with digest"),
    "golden vectors left out": (
        lambda w: replace(w.signed(), golden=None),
        "names golden/golden.json, which was not submitted"),
    "another twin": (replaced_twin, "The twin was replaced"),
    "twin left out": (
        lambda w: replace(w.signed(), twin=None),
        "names quantized/model.int8.onnx, which was not submitted"),
    "another file": (of_another_file, "The evidence was edited, or belongs to another model"),
    "another name": (
        lambda w: w.signed(model="letters"),
        "is for simulator#/models/letters, expected digits in simulator"),
    "another registry": (
        lambda w: w.signed(registry="https://elsewhere"),
        "is for https://elsewhere#/models/digits, expected digits in simulator"),
    "no registry": (for_invalid_registry, "is for urn:sha256:"),
    "unknown key": (
        lambda w: w.signed(key=w.other),
        "signed by 0 of the keys that are trusted as measurers"),
    "old": (lambda w: measured_days_ago(w, 91), "days old, 90 are allowed"),
}  # fmt: skip


@pytest.mark.parametrize(("tamper", "reason"), TAMPERED.values(), ids=TAMPERED)
def test_tampered_release_is_refused_and_the_champion_stays(
    signed_release: SignedRelease,
    ledger: Ledger,
    tamper: Callable[[SignedRelease], Release],
    reason: str,
) -> None:
    registry = Simulator()
    before = signed(test_quantized_twin.made(signed_release.folder, seed=9), signed_release.key)
    promote(registry, before, policy=POLICY, ledger=ledger, trust=signed_release.trust)
    assert registry.aliases[CHAMPION] == "1"

    of = tamper(signed_release)
    result = promote(registry, of, policy=POLICY, ledger=ledger, trust=signed_release.trust)
    assert (result.outcome, result.signers) == ("refused", ())
    assert reason in result.reason
    line = ledger.entries()[-1]
    assert (line.action, line.reason, line.signers) == ("refused", result.reason, ())
    assert registry.aliases[CHAMPION] == "1"
    assert len(registry.versions) == 1


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"revoked": "mine"}, "is revoked"),
        ({"threshold": 2}, "signed by 1 of the keys that are trusted as measurers, expected 2"),
        ({"max_age_days": 1e-9}, "days old"),
    ],
)
def test_stricter_trust_refuses_the_release(
    signed_release: SignedRelease, ledger: Ledger, overrides: dict, reason: str
) -> None:
    if "revoked" in overrides:
        overrides = {"revoked": (signed_release.key.public.key_id,)}
    trust = trust_in(signed_release.key, signed_release.other, **overrides)
    result, registry = promoted(signed_release, signed_release.signed(), ledger, trust=trust)
    assert result.outcome == "refused"
    assert reason in result.reason
    assert registry.aliases == {}


def test_old_signatures_are_accepted_for_the_champion_only(
    signed_release: SignedRelease, ledger: Ledger
) -> None:
    registry, of = Simulator(), signed_release.signed()
    strict = signed_release.trust.model_copy(update={"max_age_days": 1e-9})
    promote(registry, of, policy=POLICY, ledger=ledger, trust=signed_release.trust)
    again = promote(registry, of, policy=POLICY, ledger=ledger, trust=strict)
    assert again.outcome == "unchanged"
    registry.aliases.clear()
    late = promote(registry, of, policy=POLICY, ledger=ledger, trust=strict)
    assert late.outcome == "refused"
    assert "days old" in late.reason
    assert CHAMPION not in registry.aliases


def test_unsigned_preprocessing_spec_is_refused(
    signed_release: SignedRelease, ledger: Ledger
) -> None:
    of = test_preprocessing_spec.made(signed_release.folder)
    policy = test_preprocessing_spec.POLICY
    complete = signed(of, signed_release.key, policy)
    bare = signed(replace(of, preprocessing=None), signed_release.key, policy)
    for submitted, reason in (
        (replace(complete, statements=bare.statements), "names preprocessing with digest none"),
        (
            replace(bare, statements=complete.statements),
            "names preprocessing, which was not submitted",
        ),
    ):
        result = promote(
            Simulator(), submitted, policy=policy, ledger=ledger, trust=signed_release.trust
        )
        assert result.outcome == "refused"
        assert reason in result.reason
    result = promote(
        Simulator(), complete, policy=policy, ledger=ledger, trust=signed_release.trust
    )
    assert result.outcome == "promoted"


class TestSigning:
    """A verdict is signed for a model only on what was measured."""

    def signing(self, signed_release: SignedRelease) -> VerdictSigning:
        who = Signatory(signed_release.key, CodeVersion(parity_gate="1"))
        return VerdictSigning(who, signed_release.trust, resource_uri("simulator", NAME))

    def sign(self, signed_release: SignedRelease, of: Release) -> Release:
        before = signed_release.signed(model="letters")
        exact, twin = before.statements.evidence, before.twin.statements.evidence
        return self.signing(signed_release).sign(
            replace(of, statements=None),
            POLICY,
            measured=MeasuredFile(exact, signed_release.folder / "golden"),
            twin=MeasuredFile(twin, signed_release.folder / "twin golden"),
        )

    def test_measured_release_is_signed_for_this_model(
        self, signed_release: SignedRelease, ledger: Ledger
    ) -> None:
        of = self.sign(signed_release, signed_release.signed(model="letters"))
        assert promoted(signed_release, of, ledger)[0].outcome == "promoted"

    def test_changed_tolerances_of_the_same_vectors_can_be_signed(
        self, signed_release: SignedRelease
    ) -> None:
        of = signed_release.signed()
        shutil.copytree(signed_release.folder / "golden", signed_release.folder / "copied")
        copied = GoldenFolder.open(signed_release.folder / "copied")
        wider = copied.golden.outputs[0].model_copy(update={"max_abs_diff": 1.0})
        copied.golden.model_copy(update={"outputs": (wider,)}).save(copied.path / GOLDEN_JSON)
        of = self.sign(signed_release, replace(of, golden=GoldenFolder.open(copied.path)))
        verified = verify_release(
            of, policy=POLICY, trust=signed_release.trust, registries=frozenset({"simulator"})
        )
        (signer,) = verified.signers
        assert signer.key_id == signed_release.key.public.key_id

    def test_edited_evidence_is_not_signed(self, signed_release: SignedRelease) -> None:
        with pytest.raises(Untrusted, match="evidence was edited"):
            self.sign(signed_release, edited_evidence(signed_release))
        with pytest.raises(Untrusted, match="the quantized twin: the statement on the evidence"):
            self.sign(signed_release, edited_evidence(signed_release, of_the_twin=True))

    def test_changed_golden_vectors_are_not_signed(self, signed_release: SignedRelease) -> None:
        of = signed_release.signed()
        (signed_release.folder / "else").mkdir()
        vectors.golden_of(
            signed_release.folder / "else",
            of.onnx_path,
            outputs={"logits": vectors.ExpectedOutput(vectors.inputs() @ vectors.weights(of.onnx_path) * 2, 1.0)},
            origin=of.golden.golden.origin,
        )  # fmt: skip
        with pytest.raises(Untrusted, match="golden vectors differ"):
            self.sign(
                signed_release,
                replace(of, golden=GoldenFolder.open(signed_release.folder / "else")),
            )
        with pytest.raises(Untrusted, match="were signed when .* but they are missing"):
            self.sign(signed_release, replace(of, golden=None))
        file = signed_release.folder / "golden" / GOLDEN_JSON
        file.write_text(file.read_text() + "\n")
        with pytest.raises(Untrusted, match="are not those that were signed"):
            self.sign(signed_release, of)

    def test_untrusted_or_revoked_key_is_detected(self, signed_release: SignedRelease) -> None:
        signing = self.signing(signed_release)
        assert signing.is_trusted
        revoked = {"revoked": (signed_release.key.public.key_id,)}
        trust = trust_in(signed_release.key, signed_release.other, **revoked)
        assert not dataclasses.replace(signing, trust=trust).is_trusted
        assert not dataclasses.replace(signing, trust=trust_in(signed_release.other)).is_trusted


def test_signed_rejection_is_refused(signed_release: SignedRelease, ledger: Ledger) -> None:
    bad = failing_release(onnx_file(signed_release.folder / "bad.onnx", seed=3))
    of = signed(bad, signed_release.key, builders.policy())
    write_records(of, signed_release.folder / RECORDS)
    back = StatementPair.from_folder(signed_release.folder / RECORDS)
    result = promote(
        Simulator(),
        replace(of, statements=back),
        policy=builders.policy(),
        ledger=ledger,
        trust=signed_release.trust,
    )
    assert result.outcome == "refused"
    assert result.reason.startswith("FAIL: ")
    assert ledger.entries()[-1].signers == (signed_release.key.public.key_id,)


def _resigned(of: Release, key: SigningKey, *, resource: str) -> StatementPair:
    subjects = {each.name: Digest(each.sha256) for each in of.statements.decision.statement.subject}
    who = Signatory(key, CodeVersion(parity_gate="1"))
    decided = who.sign_decision(of.decision, subjects, precision="exact", resource=resource)
    return StatementPair(of.statements.evidence, decided)


def _measured(of: Release, *, days: float) -> Release:
    """The same, measured at another time; the verdict's own time is that of the others."""
    at = (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")
    evidence = of.evidence.model_copy(update={"measured_at": at})
    decision = decide(POLICY, evidence, decided_at=DECIDED_AT)
    return replace(of, evidence=evidence, decision=decision)
