"""Who vouches for a release: a table of statements that do not, before a promotion."""

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
from tests.registry import test_preprocessing_beside, test_twin
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

POLICY = test_twin.POLICY
"""It names a twin."""


def signed(of: Release, key: SigningKey, policy: Policy = POLICY, **place: str) -> Release:
    """Decided when it was measured, for this place."""
    return Signing(key, at=MEASURED_AT, **place).signed(of, policy)


@dataclass(frozen=True)
class World:
    """A release with golden vectors and a twin, signed by the key that is trusted."""

    release: Release
    key: SigningKey
    other: SigningKey
    trust: Trust
    folder: Path

    def signed(self, *, key: SigningKey | None = None, **place: str) -> Release:
        return signed(self.release, key or self.key, **place)


@pytest.fixture
def world(tmp_path: Path) -> World:
    of = test_twin.made(tmp_path)
    origin = vectors.origin().model_copy(update={"policy_sha256": POLICY.digest()})
    vectors.golden_of(tmp_path / "golden", of.onnx_path, origin=origin)
    of = replace(of, golden=GoldenFolder.open(tmp_path / "golden"))
    keys = [SigningKey.make(tmp_path / f"{name}.pem") for name in ("ci", "mallory")]
    return World(of, *keys, trust_in(keys[0]), tmp_path)


def promoted(world: World, of: Release, ledger: Ledger, *, trust: Trust | None = None):
    registry = Simulator()
    found = promote(registry, of, policy=POLICY, ledger=ledger, trust=trust or world.trust)
    return found, registry


def test_what_a_trusted_key_signed_is_promoted_and_the_line_names_the_key(
    world: World, ledger: Ledger
) -> None:
    of = world.signed()
    found, registry = promoted(world, of, ledger)
    assert (found.outcome, found.signers) == ("promoted", (world.key.public.key_id,))
    assert ledger.entries()[-1].signers == found.signers
    beside = registry.versions[0].beside
    assert beside["gate/decision.dsse.json"] == of.statements.decision.data
    assert beside["quantized/gate/evidence.dsse.json"] == of.twin.statements.evidence.data


def test_without_a_trust_nobody_is_asked_to_sign(world: World, ledger: Ledger) -> None:
    found = promote(Simulator(), world.release, policy=POLICY, ledger=ledger)
    assert (found.outcome, found.signers) == ("promoted", ())
    assert ledger.entries()[-1].signers == ()


def test_data_beside_the_file_is_vouched_for_by_its_name(world: World) -> None:
    instruments = builders.policy().instruments.model_copy(update={"graph_forbid": ()})
    path = onnx_file_with_data(world.folder / "with" / "model.onnx")
    policy = builders.policy(instruments=instruments)
    of = signed(release(path, policy=policy), world.key, policy)
    names = {each.name: each.sha256 for each in of.statements.decision.statement.subject}
    (data,) = of.evidence.subject.external_data
    assert names == {
        name: Digest.from_file(path.parent / name).hex for name in ("model.onnx", data)
    }
    here = {"trust": world.trust, "registries": frozenset({"simulator"})}
    assert verify_release(of, policy=policy, **here).signers
    (path.parent / data).write_bytes(b"\0" * (path.parent / data).stat().st_size)
    with pytest.raises(DigestMismatch, match="bytes changed since they were measured"):
        verify_release(of, policy=policy, **here)
    (path.parent / data).unlink()
    with pytest.raises(DigestMismatch, match="needs the data file"):
        verify_release(of, policy=policy, **here)


def edited_evidence(world: World, *, of_the_twin: bool = False) -> Release:
    """Consistently: the decision is on the edited evidence."""
    whole = world.signed()
    of = whole.twin if of_the_twin else whole
    environment = of.evidence.environment.model_copy(update={"cpu": "a better one"})
    evidence = of.evidence.model_copy(update={"environment": environment})
    policy = test_twin.TWIN if of_the_twin else POLICY
    decision = decide(policy, evidence, decided_at=of.decision.decided_at)
    edited = replace(of, evidence=evidence, decision=decision)
    return replace(whole, twin=edited) if of_the_twin else edited


def edited_decision(world: World) -> Release:
    of = world.signed()
    return replace(of, decision=of.decision.model_copy(update={"checks": of.decision.checks[:-1]}))


def edited_golden(world: World) -> Release:
    """A wider tolerance: another golden.json, whole in itself."""
    of = world.signed()
    file = of.golden.path / GOLDEN_JSON
    plain = json.loads(file.read_text())
    plain["outputs"][0]["max_abs_diff"] = 1e9
    file.write_text(json.dumps(plain))
    return replace(of, golden=GoldenFolder.open(of.golden.path))


def another_twin(world: World) -> Release:
    exchanged = test_twin.made(world.folder, twin_seed=200)
    mine = replace(world.release, twin=exchanged.twin)
    return replace(world.signed(), twin=signed(mine, world.key).twin)


def of_another_file(world: World) -> Release:
    other = signed(test_twin.made(world.folder, seed=2), world.key)
    return replace(world.signed(), statements=other.statements)


def for_no_registry(world: World) -> Release:
    of = world.signed()
    return replace(of, statements=_resigned(of, world.key, resource="urn:sha256:" + "0" * 64))


def measured_days_ago(world: World, days: float) -> Release:
    return replace(world, release=_measured(world.release, days=-days)).signed()


def without_statement_of_the_twin(world: World) -> Release:
    of = world.signed()
    return replace(of, twin=replace(of.twin, statements=None))


SPOILED: dict[str, tuple[Callable[[World], Release], str]] = {
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
    "another twin": (another_twin, "The twin was replaced"),
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
    "no registry": (for_no_registry, "is for urn:sha256:"),
    "unknown key": (
        lambda w: w.signed(key=w.other),
        "signed by 0 of the keys that are trusted as measurers"),
    "old": (lambda w: measured_days_ago(w, 91), "days old, 90 are allowed"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_release_is_refused_and_the_champion_stays(
    world: World, ledger: Ledger, spoil: Callable[[World], Release], reason: str
) -> None:
    registry = Simulator()
    before = signed(test_twin.made(world.folder, seed=9), world.key)
    promote(registry, before, policy=POLICY, ledger=ledger, trust=world.trust)
    assert registry.aliases[CHAMPION] == "1"

    of = spoil(world)
    found = promote(registry, of, policy=POLICY, ledger=ledger, trust=world.trust)
    assert (found.outcome, found.signers) == ("refused", ())
    assert reason in found.reason
    line = ledger.entries()[-1]
    assert (line.action, line.reason, line.signers) == ("refused", found.reason, ())
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
def test_a_trust_that_asks_for_more(
    world: World, ledger: Ledger, overrides: dict, reason: str
) -> None:
    if "revoked" in overrides:
        overrides = {"revoked": (world.key.public.key_id,)}
    trust = trust_in(world.key, world.other, **overrides)
    found, registry = promoted(world, world.signed(), ledger, trust=trust)
    assert found.outcome == "refused"
    assert reason in found.reason
    assert registry.aliases == {}


def test_what_serves_already_is_unchanged_however_old_its_signatures_and_nothing_else_is(
    world: World, ledger: Ledger
) -> None:
    registry, of = Simulator(), world.signed()
    strict = world.trust.model_copy(update={"max_age_days": 1e-9})
    promote(registry, of, policy=POLICY, ledger=ledger, trust=world.trust)
    again = promote(registry, of, policy=POLICY, ledger=ledger, trust=strict)
    assert again.outcome == "unchanged"
    registry.aliases.clear()
    late = promote(registry, of, policy=POLICY, ledger=ledger, trust=strict)
    assert late.outcome == "refused"
    assert "days old" in late.reason
    assert CHAMPION not in registry.aliases


def test_a_spec_that_was_not_signed_does_not_go_along(world: World, ledger: Ledger) -> None:
    of = test_preprocessing_beside.made(world.folder)
    policy = test_preprocessing_beside.POLICY
    whole = signed(of, world.key, policy)
    bare = signed(replace(of, preprocessing=None), world.key, policy)
    for handed_in, reason in (
        (replace(whole, statements=bare.statements), "names preprocessing with digest none"),
        (
            replace(bare, statements=whole.statements),
            "names preprocessing, which was not submitted",
        ),
    ):
        found = promote(Simulator(), handed_in, policy=policy, ledger=ledger, trust=world.trust)
        assert found.outcome == "refused"
        assert reason in found.reason
    found = promote(Simulator(), whole, policy=policy, ledger=ledger, trust=world.trust)
    assert found.outcome == "promoted"


class TestSigning:
    """A verdict is signed for a model only on what was measured."""

    def signing(self, world: World) -> VerdictSigning:
        who = Signatory(world.key, CodeVersion(parity_gate="1"))
        return VerdictSigning(who, world.trust, resource_uri("simulator", NAME))

    def sign(self, world: World, of: Release) -> Release:
        before = world.signed(model="letters")
        exact, twin = before.statements.evidence, before.twin.statements.evidence
        return self.signing(world).sign(
            replace(of, statements=None),
            POLICY,
            measured=MeasuredFile(exact, world.folder / "golden"),
            twin=MeasuredFile(twin, world.folder / "twin golden"),
        )

    def test_what_was_measured_is_signed_for_this_model(self, world: World, ledger: Ledger) -> None:
        of = self.sign(world, world.signed(model="letters"))
        assert promoted(world, of, ledger)[0].outcome == "promoted"

    def test_other_tolerances_of_the_same_vectors_are_the_policys(self, world: World) -> None:
        of = world.signed()
        shutil.copytree(world.folder / "golden", world.folder / "copied")
        copied = GoldenFolder.open(world.folder / "copied")
        wider = copied.golden.outputs[0].model_copy(update={"max_abs_diff": 1.0})
        copied.golden.model_copy(update={"outputs": (wider,)}).save(copied.path / GOLDEN_JSON)
        of = self.sign(world, replace(of, golden=GoldenFolder.open(copied.path)))
        verified = verify_release(
            of, policy=POLICY, trust=world.trust, registries=frozenset({"simulator"})
        )
        (signer,) = verified.signers
        assert signer.key_id == world.key.public.key_id

    def test_nothing_is_signed_on_edited_evidence(self, world: World) -> None:
        with pytest.raises(Untrusted, match="evidence was edited"):
            self.sign(world, edited_evidence(world))
        with pytest.raises(Untrusted, match="the quantized twin: the statement on the evidence"):
            self.sign(world, edited_evidence(world, of_the_twin=True))

    def test_nothing_is_signed_beside_other_vectors(self, world: World) -> None:
        of = world.signed()
        (world.folder / "else").mkdir()
        vectors.golden_of(
            world.folder / "else",
            of.onnx_path,
            outputs={"logits": vectors.ExpectedOutput(vectors.inputs() @ vectors.weights(of.onnx_path) * 2, 1.0)},
            origin=of.golden.golden.origin,
        )  # fmt: skip
        with pytest.raises(Untrusted, match="golden vectors differ"):
            self.sign(world, replace(of, golden=GoldenFolder.open(world.folder / "else")))
        with pytest.raises(Untrusted, match="were signed when .* but they are missing"):
            self.sign(world, replace(of, golden=None))
        file = world.folder / "golden" / GOLDEN_JSON
        file.write_text(file.read_text() + "\n")
        with pytest.raises(Untrusted, match="are not those that were signed"):
            self.sign(world, of)

    def test_whose_key_does_not_count(self, world: World) -> None:
        signing = self.signing(world)
        assert signing.is_trusted
        revoked = {"revoked": (world.key.public.key_id,)}
        trust = trust_in(world.key, world.other, **revoked)
        assert not dataclasses.replace(signing, trust=trust).is_trusted
        assert not dataclasses.replace(signing, trust=trust_in(world.other)).is_trusted


def test_a_rejected_verdict_can_be_signed_and_stays_rejected(world: World, ledger: Ledger) -> None:
    bad = failing_release(onnx_file(world.folder / "bad.onnx", seed=3))
    of = signed(bad, world.key, builders.policy())
    write_records(of, world.folder / RECORDS)
    back = StatementPair.from_folder(world.folder / RECORDS)
    found = promote(
        Simulator(),
        replace(of, statements=back),
        policy=builders.policy(),
        ledger=ledger,
        trust=world.trust,
    )
    assert found.outcome == "refused"
    assert found.reason.startswith("FAIL: ")
    assert ledger.entries()[-1].signers == (world.key.public.key_id,)


def _resigned(of: Release, key: SigningKey, *, resource: str) -> StatementPair:
    subjects = {each.name: Digest(each.sha256) for each in of.statements.decision.statement.subject}
    who = Signatory(key, CodeVersion(parity_gate="1"))
    decided = who.decided(of.decision, subjects, precision="exact", resource=resource)
    return StatementPair(of.statements.evidence, decided)


def _measured(of: Release, *, days: float) -> Release:
    """The same, measured at another time; the verdict's own time is that of the others."""
    at = (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")
    evidence = of.evidence.model_copy(update={"measured_at": at})
    decision = decide(POLICY, evidence, decided_at=DECIDED_AT)
    return replace(of, evidence=evidence, decision=decision)
