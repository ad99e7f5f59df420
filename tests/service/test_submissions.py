"""Submissions by someone who may write to the registry only: verified, then promoted or refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gate.errors import ArtifactMissing, RegistryUnavailable
from gate.golden.manifest import Origin
from gate.ledger.ledger import Ledger
from gate.policy.sections import ChampionPolicy
from gate.registry import alias
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import MismatchMemory, Reading
from gate.registry.release import EvaluatedFile, GoldenFolder, Release
from gate.signing.statement import Resource, SignedStatement, Statement
from gate.signing.trust import Trust
from gate.signing.verification import StatementPair
from tests import builders
from tests.golden_vectors import vectors
from tests.registry.promoting import promote, submit
from tests.registry.releases import NAME, failing_release, onnx_file
from tests.registry.signed import Signing, save, trust_in
from tests.registry.simulator import Watched
from tests.service.registry_setup import REVIEWED
from tests.service.signed_submissions import TWINNED, SigningService

Forgery = Callable[[SigningService], str]


@pytest.fixture
def service(tmp_path) -> SigningService:
    """Version 1 was handed in, serves and is deployed."""
    created = SigningService(tmp_path)
    created.submit(created.release(1))
    assert created.reconcile_once() == [("hand_in", "promoted", "1"), ("deploy", "deployed", "1")]
    return created


def test_submission_by_a_trusted_key_is_promoted_and_deployed_once(service: SigningService) -> None:
    number = service.submit(service.release(2))
    assert service.page(number).startswith("Status: handed in, waits for the service")
    assert service.reconcile_once() == [("hand_in", "promoted", "2"), ("deploy", "deployed", "2")]
    assert (service.setup.champion, service.live) == ("2", "2")
    (line,) = [
        e for e in service.setup.ledger.entries() if (e.action, e.version) == ("promoted", "2")
    ]
    assert line.signers == (service.ci.public.key_id,)
    assert "signed by ci" in line.reason
    assert service.page(number).startswith("Status: champion since ")
    assert service.reconcile_once() == []


def test_golden_vectors_and_spec_are_promoted_with_the_file(service: SigningService) -> None:
    for seed, make in ((2, service.with_golden), (3, service.with_spec)):
        number = service.submit(make(seed))
        assert service.reconcile_once()[0] == ("hand_in", "promoted", number)
        line = service.setup.model().history().approving_entry(number)
        assert line is not None
        assert (line.golden_sha256 is not None, line.preprocess_sha256 is not None) == (
            seed == 2, seed == 3,
        )  # fmt: skip
        assert line.extent is not None


def test_submission_waits_when_the_policy_requires_review(tmp_path) -> None:
    service = SigningService(tmp_path, REVIEWED)
    number = service.submit(service.release(1))
    assert service.reconcile_once() == [("hand_in", "passed", number)]
    assert service.setup.champion is None
    assert service.page(number).startswith("Status: waits for review")
    assert service.reconcile_once() == []
    service.setup.tag(number, "approved")
    assert service.reconcile_once() == [
        ("review", "promoted", number),
        ("deploy", "deployed", number),
    ]
    assert service.setup.ledger.entries()[-2].signers == (service.ci.public.key_id,)


def test_approval_is_refused_when_the_key_was_revoked_meanwhile(tmp_path) -> None:
    service = SigningService(tmp_path, REVIEWED)
    number = service.submit(service.release(1))
    service.reconcile_once()
    save(
        trust_in(service.ci, service.untrusted_key, revoked=(service.ci.public.key_id,)),
        service.trust,
    )
    service.setup.tag(number, "approved")
    assert service.reconcile_once() == [("review", "refused", number)]
    assert "is revoked" in service.setup.ledger.entries()[-1].reason
    assert service.setup.champion is None


def days_ago(days: float) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")


def submitted(**signing: Any) -> Forgery:
    """Version 2, signed otherwise than by CI for this model now."""
    return lambda service: service.submit(service.release(2, **signing))


def by_untrusted_key(service: SigningService) -> str:
    return service.submit(service.release(2, key=service.untrusted_key))


def while_trusting_both_keys(forge: Forgery, **fields: Callable[[SigningService], Any]) -> Forgery:
    """Handed in while both keys are trusted, and with these fields of the trust."""

    def later(service: SigningService) -> str:
        more = {name: of(service) for name, of in fields.items()}
        save(trust_in(service.ci, service.untrusted_key, **more), service.trust)
        return forge(service)

    return later


def with_tampered_files(
    *places: str, by: Callable[[SigningService, bytes], bytes] | None = None, make: Any = SigningService.release,
    send: Forgery | None = None,
) -> Forgery:  # fmt: skip
    """Files beside the version changed in the registry after it was handed in; removed without
    `by`: those whose names begin so."""

    def forge(service: SigningService) -> str:
        number = send(service) if send else service.submit(make(service, 2))
        beside = service.setup.stored(number).beside
        for location in [name for name in beside if name.startswith(places)]:
            before = beside.pop(location)
            if by is not None:
                beside[location] = by(service, before)
                assert beside[location] != before
        return number

    return forge


def edited(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | {key: value}).encode()


def field(key: str, value: Any) -> Callable[[SigningService, bytes], bytes]:
    return lambda _, data: edited(key, value)(data)


def with_another_payload(service: SigningService, data: bytes) -> bytes:
    """The statement says PASSED of other bytes, under the signature of the right one."""
    second = service.release(3).statements
    assert second is not None
    return field("payload", json.loads(second.decision.data)["payload"])(service, data)


def signed_twice(as_stranger: bool) -> Callable[[SigningService, bytes], bytes]:
    """The one signature once more, under another name or not."""

    def change(service: SigningService, data: bytes) -> bytes:
        (first,) = json.loads(data)["signatures"]
        second = first | ({"keyid": service.untrusted_key.public.key_id} if as_stranger else {})
        return field("signatures", [first, second])(service, data)

    return change


def with_a_trusted_key_id(service: SigningService, data: bytes) -> bytes:
    stranger, ours = (key.public.key_id.encode() for key in (service.untrusted_key, service.ci))
    return data.replace(stranger, ours)


def with_fields_of_another_release(change: Callable[[Release, Release], dict[str, Any]]) -> Forgery:
    """Version 2 with something of version 3."""

    def forge(service: SigningService) -> str:
        ours, second = service.release(2), service.release(3)
        return service.upload_unverified(replace(ours, **change(ours, second)))

    return forge


def statement_on_other_evidence(ours: Release, other: Release) -> dict[str, Any]:
    assert ours.statements is not None
    assert other.statements is not None
    return {"statements": StatementPair(other.statements.evidence, ours.statements.decision)}


def with_other_bytes(service: SigningService) -> str:
    number = service.submit(service.release(2))
    service.setup.stored(number).data = onnx_file(
        service.setup.folder / "x.onnx", seed=9
    ).read_bytes()
    return number


def by_reviewer_key(service: SigningService) -> str:
    save(trust_in(service.ci, reviewers=trust_in(service.untrusted_key).measurers), service.trust)
    return by_untrusted_key(service)


def by_expired_key(service: SigningService) -> str:
    """Backdated or not."""
    (ours,) = trust_in(service.ci).measurers
    lapsed = ours.model_copy(update={"valid_until": days_ago(40)})
    save(Trust(measurers=(lapsed, *trust_in(service.untrusted_key).measurers)), service.trust)
    return service.submit(service.release(2, at=days_ago(60)))


def old_evidence(service: SigningService) -> str:
    save(trust_in(service.ci, max_age_days=365.0), service.trust)
    patient = builders.policy(max_age_days=365.0)
    return service.submit(service.release(2, policy=patient, days=91), policy=patient)


def by_weaker_policy(service: SigningService) -> str:
    """It passes by the policy of whoever hands in, and not by the service's."""
    service.setup.policy = builders.policy(min_samples=500)
    service.restart()
    return service.submit(service.release(2))


def signed_rejection(service: SigningService) -> str:
    """A verdict that says no, signed, under tags that say yes."""
    path = onnx_file(service.setup.folder / "2.onnx", seed=2)
    return service.upload_unverified(
        Signing(service.ci).signed(failing_release(path), service.policy)
    )


def rolled_back_bytes(service: SigningService) -> str:
    """Whoever hands in took the tag away, and signed anew."""
    number = service.submit(service.release(2))
    service.reconcile_once()
    rollback(service.setup.registry, NAME, ledger=service.setup.ledger, reason="wrong answers")
    service.reconcile_once()
    del service.setup.stored(number).tags[Tag.ROLLED_BACK]
    return service.upload_unverified(service.release(2, at=days_ago(0.01)))


def rejected_bytes(service: SigningService) -> str:
    """A reviewer was faster than the service; then somebody took his word away."""
    service.setup.tag(service.submit(service.release(2)), "rejected")
    assert service.reconcile_once() == [("hand_in", "passed", "2"), ("review", "rejected", "2")]
    del service.setup.stored("2").tags[Tag.REVIEW]
    return service.upload_unverified(service.release(2))


def replayed_verdict(service: SigningService) -> str:
    """The verdict on what served before, under a new number."""
    for seed in (2, 3):
        service.submit(service.release(seed))
        service.reconcile_once()
        rollback(service.setup.registry, NAME, ledger=service.setup.ledger, reason="slow")
    service.reconcile_once()
    assert service.setup.champion == "1"
    service.setup.stored("1").tags.clear()  # so that nothing is found by them
    return service.upload_unverified(service.release(1))


def with_edited_statement(*place: str | int, to: Any) -> Forgery:
    """The statement on the decision says something else, signed by the key that is trusted."""

    def forge(service: SigningService) -> str:
        of = service.with_spec(2)
        assert of.statements is not None
        plain = of.statements.decision.statement.to_plain()
        inside: Any = plain
        for name in place[:-1]:
            inside = inside[name]
        inside[place[-1]] = to(inside[place[-1]]) if callable(to) else to
        again = SignedStatement.sign(Statement.from_json(json.dumps(plain)), service.ci)
        return service.upload_unverified(
            replace(of, statements=StatementPair(of.statements.evidence, again))
        )

    return forge


TWIN = Resource.from_digest(builders.digest("twin"), name="quantized/model.onnx").to_plain()
POLICY_DIGEST = ("predicate", "policy", "digest")
BOTH = ("gate/evidence.dsse.json", "gate/decision.dsse.json")

FORGERIES: dict[str, tuple[Forgery, str]] = {
    "states another file": (with_edited_statement("subject", 0, "digest", "sha256", to="0" * 64), "file"),
    "states a bad digest": (
        with_edited_statement("subject", -1, "digest", "sha256", to="x"),
        "no SHA-256 digest of the preprocessing"),
    "states a twin that is not there": (
        with_edited_statement("subject", to=lambda all_: [*all_, TWIN]),
        "the quantized twin: the file has no signed statements"),
    "states another policy": (with_edited_statement(*POLICY_DIGEST, "sha256", to="0" * 64), "is about decision"),
    "states another algorithm": (
        with_edited_statement(*POLICY_DIGEST, to={"sha512": "0" * 128}), "no SHA-256 digest of the policy"),
    "states another result": (
        with_edited_statement("predicate", "verificationResult", to="FAILED"), "FAILED"),
    "states two pieces of evidence": (
        with_edited_statement("predicate", "inputAttestations", to=lambda all_: all_ * 2),
        "2 evidence records"),
    "unsigned": (
        lambda w: w.upload_unverified(replace(w.release(2), statements=None)),
        "the file has no signed statements"),
    "unknown key": (by_untrusted_key, "is signed by 0 of the keys that are trusted"),
    "unknown key under a trusted id": (
        with_tampered_files(*BOTH, by=with_a_trusted_key_id, send=by_untrusted_key), "is signed by 0"),
    "reviewer's key": (by_reviewer_key, "is signed by 0"),
    "expired key": (by_expired_key, "was valid until"),
    "revoked key": (
        while_trusting_both_keys(submitted(), revoked=lambda w: (w.ci.public.key_id,)), "is revoked"),
    "too few signatures": (
        while_trusting_both_keys(submitted(), threshold=lambda _: 2), "is signed by 1 of the keys"),
    "one key twice": (
        while_trusting_both_keys(with_tampered_files(BOTH[1], by=signed_twice(False)), threshold=lambda _: 2), "statement"),
    "one key under two names": (
        while_trusting_both_keys(with_tampered_files(*BOTH, by=signed_twice(True)), threshold=lambda _: 2),
        "is signed by 1 of"),
    "expired": (submitted(at=days_ago(91)), "days old"),
    "of the future": (submitted(at=days_ago(-1)), "is dated in the future"),
    "old evidence": (old_evidence, "its evidence is 91.0 days old"),
    "of another model": (submitted(model="letters"), "letters"),
    "of another registry": (
        submitted(registry="https://elsewhere"),
        "start the service: gate serve --same-registry https://elsewhere"),
    "for no registry": (submitted(registry="sqlite:///m.db"), "sqlite:"),
    "of another file": (with_fields_of_another_release(lambda _, other: {"statements": other.statements}), "has digest"),
    "with the evidence of another": (
        with_fields_of_another_release(lambda _, other: {"evidence": other.evidence}), "has digest"),
    "statement on other evidence": (with_fields_of_another_release(statement_on_other_evidence), "is about evidence"),
    "edited evidence": (
        with_tampered_files("gate/evidence.json", by=field("measured_at", "2026-11-22T00:00:00+00:00")),
        "has digest"),
    "edited decision": (
        with_tampered_files("gate/decision.json", by=field("runtimes", ["ort-cpu"])), "is about decision"),
    "other bytes": (with_other_bytes, "has digest"),
    "exchanged golden vectors": (
        with_tampered_files("golden/golden.json", by=lambda _, data: data + b" ", make=SigningService.with_golden),
        "golden vectors"),
    "without golden vectors": (with_tampered_files("golden", make=SigningService.with_golden), "golden vectors"),
    "exchanged spec": (
        with_tampered_files("prep", by=lambda _, data: data.replace(b"0.485", b"0.486"), make=SigningService.with_spec),
        "preprocessing"),
    "without spec": (with_tampered_files("prep", make=SigningService.with_spec), "preprocessing"),
    "stripped": (with_tampered_files(BOTH[1], by=field("signatures", [])), "signatures"),
    "of another type": (
        with_tampered_files(BOTH[1], by=field("payloadType", "application/json")), "its payloadType is"),
    "another payload": (with_tampered_files(BOTH[1], by=with_another_payload), "is signed by 0"),
    "one statement missing": (with_tampered_files(BOTH[0]), "evidence.dsse.json"),
    "weaker policy": (by_weaker_policy, "it was judged by another policy"),
    "no pass": (signed_rejection, "its decision is FAIL"),
    "rolled-back bytes": (rolled_back_bytes, "these bytes were rolled back as version 2"),
    "rejected bytes": (rejected_bytes, "a reviewer rejected these bytes as version 2"),
    "replayed": (replayed_verdict, "version 1 was promoted with the same verdict before"),
}  # fmt: skip


def assert_page_says_refused(service: SigningService, number: str) -> None:
    """That, and why; and what was handed in with it is a claim."""
    verdict, page = service.setup.stored(number).tags[Tag.VERDICT], service.page(number)
    assert verdict.startswith("REFUSED (see gate.refused); handed in as ")
    assert not page.startswith("Status: champion")
    assert "refused" in page
    assert "are claims of the submitter and did not count." in page


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_submission_is_refused_once(service: SigningService, name: str) -> None:
    forge, problem = FORGERIES[name]
    number = forge(service)
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert (service.setup.champion, service.live) == ("1", "1")
    assert problem in service.refusal(number)
    assert ("--same-registry" in service.refusal(number)) is ("registry" in name)
    assert_page_says_refused(service, number)
    assert service.reconcile_once() == []
    assert service.actions_of(number) == ["refused"]


TWINS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "quantized/model.onnx": (lambda data: data.replace(b"tiny", b"tidy"), "has digest"),
    "quantized/gate/evidence.json": (edited("measured_at", "2026-11-22T00:00:00Z"), "has digest"),
    "quantized/gate/decision.json": (edited("runtimes", []), "is about decision"),
    "quantized/gate/decision.dsse.json": (lambda _: b"[1]", "the quantized twin"),
    "quantized/gate/evidence.dsse.json": (lambda _: b"[1]", "evidence.dsse.json"),
}


@pytest.mark.parametrize("place", TWINS)
def test_tampered_twin_is_refused(tmp_path, place: str) -> None:
    service = SigningService(tmp_path, TWINNED)
    number = service.submit(service.release(1))
    change, problem = TWINS[place]
    service.change_file(number, place, change)
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert problem in service.refusal(number)
    assert service.setup.champion is None


def test_validly_signed_twin_of_another_file_is_refused(tmp_path) -> None:
    service = SigningService(tmp_path, TWINNED)
    first, second = service.release(1), service.release(2)
    number = service.upload_unverified(replace(first, twin=second.twin))
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert "does not name the quantized twin" in service.refusal(number)


def with_twin_vectors(service: SigningService, torch: str) -> Release:
    """The same exact file and the same twin each time, with golden vectors of their own."""
    created = service.setup.release(1)
    assert created.twin is not None
    assert service.policy.twin is not None
    folder = service.setup.folder / f"vectors-{torch}"
    origin = Origin(policy_sha256=service.policy.twin.digest(), versions={"torch": torch})
    vectors.golden_of(folder, created.twin.onnx_path, origin=origin)
    twin = replace(created.twin, golden=GoldenFolder.open(folder))
    return Signing(service.ci).signed(replace(created, twin=twin), service.policy)


def unchanged_twin(one: EvaluatedFile, _other: EvaluatedFile) -> EvaluatedFile:
    return one


def with_another_statement(_one: EvaluatedFile, other: EvaluatedFile) -> EvaluatedFile:
    """Signed by the same key, on the same bytes."""
    return other


def without_vectors(one: EvaluatedFile, _other: EvaluatedFile) -> EvaluatedFile:
    return replace(one, golden=None)


def with_other_vectors(one: EvaluatedFile, other: EvaluatedFile) -> EvaluatedFile:
    return replace(one, golden=other.golden)


@pytest.mark.parametrize(
    ("change_twin", "problem"),
    [
        (unchanged_twin, None),
        (with_another_statement, "golden"),
        (without_vectors, "golden"),
        (with_other_vectors, "golden"),
    ],
)
def test_golden_vectors_of_the_twin_must_match_the_signed_verdict(
    tmp_path, change_twin, problem
) -> None:
    service = SigningService(tmp_path, TWINNED)
    first, second = (with_twin_vectors(service, torch) for torch in ("2", "3"))
    assert first.twin is not None
    assert second.twin is not None
    assert first.twin.golden_sha256 != second.twin.golden_sha256
    number = service.upload_unverified(replace(first, twin=change_twin(first.twin, second.twin)))
    outcome = "promoted" if problem is None else "refused"
    assert service.reconcile_once()[0] == ("hand_in", outcome, number)
    assert problem is None or problem in service.refusal(number)


def test_policy_of_the_submitter_is_ignored(service: SigningService) -> None:
    """The sender's policy says nothing: neither for nor against."""
    strict = builders.policy(min_samples=500)
    number = service.upload_unverified(service.release(2, policy=strict))
    service.setup.stored(number)
    service.setup.policy = builders.policy(min_samples=350)
    service.restart()
    assert service.reconcile_once()[0] == ("hand_in", "promoted", number)


def test_refused_version_stays_refused_and_resubmission_is_a_new_version(
    service: SigningService,
) -> None:
    refused = service.submit(service.release(2, key=service.untrusted_key))
    service.reconcile_once()
    save(trust_in(service.ci, service.untrusted_key), service.trust)
    assert service.reconcile_once() == []  # what was refused stays refused
    again = service.submit(service.release(2, key=service.untrusted_key))
    assert again != refused
    assert service.reconcile_once()[0] == ("hand_in", "promoted", again)


def test_damaged_trust_file_delays_the_submission(service: SigningService) -> None:
    number = service.submit(service.release(2))
    kept = service.trust.read_text()
    service.trust.write_text("trust: [")
    assert service.reconcile_once() == [("hand_in", "PolicyError", None)]
    assert (service.actions_of(number), service.setup.champion, service.live) == ([], "1", "1")
    service.trust.write_text(kept)
    assert service.reconcile_once()[0] == ("hand_in", "promoted", number)


def test_page_explains_that_the_service_has_no_trust(service: SigningService) -> None:
    number, kept = service.submit(service.release(2)), service.trust
    service.trust = None  # type: ignore[assignment]
    service.restart()
    for _ in range(2):
        assert service.reconcile_once() == []
    assert "gate serve --trust" in service.page(number)
    assert service.actions_of(number) == []
    service.trust = kept
    service.restart()
    assert service.reconcile_once()[0] == ("hand_in", "promoted", number)
    assert service.page(number).startswith("Status: champion since ")


def test_submission_made_champion_by_hand_is_reverted_then_evaluated(
    service: SigningService,
) -> None:
    good, bad = (
        service.submit(service.release(2)),
        service.submit(service.release(3, key=service.untrusted_key)),
    )
    service.setup.move_champion(bad)
    assert service.reconcile_once() == [("guard", "reverted", "1"), ("hand_in", "refused", bad)]
    service.setup.registry.set_alias(NAME, CANDIDATE, good)
    service.setup.move_champion(good)
    assert service.reconcile_once() == [
        ("guard", "reverted", "1"), ("hand_in", "promoted", good), ("deploy", "deployed", good),
    ]  # fmt: skip


@pytest.mark.parametrize("days", [0.0, 91.0], ids=["another policy", "old evidence"])
def test_champion_moved_by_hand_to_an_approved_submission_is_still_verified(tmp_path, days) -> None:
    """The alias is moved before the service reads the approval, and what passed is long ago."""
    service = SigningService(tmp_path, REVIEWED)
    if days:
        service.setup.policy = builders.policy(review="required", max_age_days=365.0)
        save(trust_in(service.ci, max_age_days=365.0), service.trust)
        service.restart()
    policy = service.setup.policy
    number = service.submit(service.release(1, policy=policy, days=days), policy=policy)
    assert service.reconcile_once() == [("hand_in", "passed", number)]
    service.setup.policy = REVIEWED if days else builders.policy(review="required", min_samples=500)
    service.restart()
    service.setup.tag(number, "approved")
    service.setup.move_champion(number)
    assert ("guard", "reverted", None) in service.reconcile_once()
    problem = "its evidence is 91.0 days old" if days else "it was judged by another policy"
    assert problem in service.setup.stored(number).tags[Tag.REVERTED]
    assert (service.setup.champion, service.live) == (None, None)


@pytest.mark.parametrize("error", [RegistryUnavailable, ArtifactMissing])
def test_unavailable_store_delays_the_submission(
    service: SigningService, error: type[Exception]
) -> None:
    number = service.submit(service.release(2))
    watched = Watched(service.setup.registry)

    def away(call: str, _index: int) -> None:
        if call == "download":
            raise error("away")

    watched.before = away
    service.setup.registry = watched  # type: ignore[assignment]
    service.restart()
    assert ("hand_in", error.__name__, None) in service.reconcile_once()
    assert service.actions_of(number) == []
    watched.before = lambda _call, _index: None
    assert service.reconcile_once()[0] == ("hand_in", "promoted", number)


def test_error_page_instead_of_a_statement_delays_the_submission(service: SigningService) -> None:
    number = service.submit(service.release(2))
    service.reading = Reading(mismatches=MismatchMemory(3600.0, wait=None))
    stored = service.setup.stored(number)
    kept, stored.beside["gate/decision.dsse.json"] = (
        stored.beside["gate/decision.dsse.json"], b'{"error": "try again"}',
    )  # fmt: skip
    watched = service.setup.registry = Watched(service.setup.registry)  # type: ignore[assignment]
    service.restart()
    for _ in range(3):  # within the time after which a second download confirms it
        assert service.reconcile_once() == [("hand_in", "MismatchUnconfirmed", None)]
    assert watched.calls.count("set_description") == 1
    assert service.page(number).startswith("Status: handed in, and not judged yet: version 2 of ")
    stored.beside["gate/decision.dsse.json"] = kept
    assert service.reconcile_once()[0] == ("hand_in", "promoted", number)
    assert service.page(number).startswith("Status: champion since ")


def test_candidate_moved_during_evaluation_is_evaluated_again(service: SigningService) -> None:
    first, second = service.submit(service.release(2)), service.submit(service.release(3))
    service.setup.registry.set_alias(NAME, CANDIDATE, first)
    watched = Watched(service.setup.registry)

    def overtaken(call: str, _index: int) -> None:
        if call == "download" and watched.calls.count("download") == 2:  # the guard's is the first
            watched.inner.set_alias(NAME, CANDIDATE, second)

    watched.after = overtaken
    service.setup.registry = watched  # type: ignore[assignment]
    service.restart()
    assert service.reconcile_once()[0] == ("hand_in", "promoted", second)
    assert service.actions_of(first) == []


def test_recreated_registry_may_reuse_version_numbers(service: SigningService) -> None:
    registry = service.setup.registry
    registry.versions.clear()
    registry.aliases.clear()
    number = service.submit(service.release(5))
    registry.versions[0].made_at = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert number == "1"
    assert service.reconcile_once() == [("hand_in", "promoted", "1"), ("deploy", "deployed", "1")]
    assert service.reconcile_once() == []


def test_submission_without_the_required_comparison_is_refused(tmp_path) -> None:
    """The service's policy asks for one; CI's did not."""
    service = SigningService(tmp_path)
    service.submit(service.release(1))
    service.reconcile_once()
    service.setup.policy = builders.policy(incumbent=ChampionPolicy(min_agreement=0.9))
    service.restart()
    number = service.submit(service.release(2))
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert service.setup.champion == "1"


def test_version_promoted_with_the_ledger_is_not_evaluated_again(service: SigningService) -> None:
    release = service.release(2)
    result = promote(
        service.setup.registry, release, policy=service.policy, ledger=service.setup.ledger
    )
    assert (result.outcome, service.actions_of("2")) == ("promoted", ["promoted"])
    assert service.reconcile_once() == [("deploy", "deployed", "2")]


def replaced(service: SigningService) -> None:
    service.submit(service.release(3))
    assert ("hand_in", "promoted", "3") in service.reconcile_once()


def rolled_back(service: SigningService) -> None:
    rollback(service.setup.registry, NAME, ledger=service.setup.ledger, reason="slow")
    service.reconcile_once()


def reverted(service: SigningService) -> None:
    """As the guard does with what it can't prove, or what does not pass by the policy in force."""
    model = service.setup.model()
    about = model.history().approving_entry("1")
    entry = model.entry("reverted", "unproven", version="1", previous="2", about=about)
    alias.move_alias(model, entry)


CLOSED = {
    replaced: "was champion until",
    rolled_back: "rolled back on",
    reverted: "reverted by the guard on",
}


@pytest.mark.parametrize("close", CLOSED)
def test_resubmission_of_an_evaluated_version_is_refused_with_the_reason(
    service: SigningService, close, caplog
):
    """The service judges a version once; which one is the candidate does not change then."""
    caplog.set_level(logging.INFO)
    release = service.release(2)
    service.submit(release)
    service.reconcile_once()
    close(service)
    candidate = service.setup.registry.alias(NAME, CANDIDATE)
    again = submit(service.setup.registry, release, policy=service.policy)
    assert (again.outcome, again.version) == ("refused", "2")
    for part in (CLOSED[close], f"gate rollback {NAME}", "'champion'", "version 2"):
        assert part in again.reason
    assert service.setup.registry.alias(NAME, CANDIDATE) == candidate
    service.setup.registry.set_alias(NAME, CANDIDATE, "2")
    for _ in range(2):
        assert not [item for item in service.reconcile_once() if item[0] == "hand_in"]
    (record,) = [each for each in caplog.records if "judged before" in each.message]
    assert CLOSED[close] in record.message
    assert f"gate rollback {NAME}" in record.message


def test_resubmission_of_a_version_with_a_reverted_tag_is_refused(service: SigningService) -> None:
    """Somebody edited its page."""
    release = service.release(2)
    number = service.submit(release)
    service.setup.tag(number, "then: it must not serve", key=Tag.REVERTED)
    again = submit(service.setup.registry, release, policy=service.policy)
    assert (again.outcome, again.version) == ("refused", number)
    assert f"tag {Tag.REVERTED}: then: it must not serve" in again.reason


def test_page_explains_a_champion_set_before_any_version_passed(tmp_path) -> None:
    service = SigningService(tmp_path)
    number = service.submit(service.release(1))
    service.setup.move_champion(number)
    for _ in range(2):
        assert service.reconcile_once() == [("guard", "RegistryError", None)]
    assert (service.setup.lines(), service.live) == ([], None)
    assert "'champion' was pointed at it before anything passed" in service.page(number)
    assert "Take that alias away" in service.page(number)
    service.setup.registry.delete_alias(NAME, CHAMPION)
    assert service.reconcile_once() == [
        ("hand_in", "promoted", number),
        ("deploy", "deployed", number),
    ]


def test_service_with_another_ledger_changes_no_page(service: SigningService, tmp_path) -> None:
    page = service.page("1")
    service.setup.ledger = Ledger(tmp_path / "another.db")
    service.restart()
    assert ("guard", "RegistryError", None) in service.reconcile_once()
    assert service.page("1") == page
