"""Submissions by users without a ledger are verified, then promoted or refused."""

from __future__ import annotations

import json
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
from tests.registry.promoting import submit
from tests.registry.releases import NAME, failing_release, onnx_file
from tests.registry.signed import Signing, save_trust, trust_in
from tests.registry.simulator import Watched
from tests.service.registry_setup import REVIEWED
from tests.service.signed_submissions import POLICY_WITH_TWIN, SigningService

Forgery = Callable[[SigningService], str]


@pytest.fixture
def service(tmp_path) -> SigningService:
    """A service whose version 1 was submitted, promoted and deployed."""
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
    for seed, make_release in ((2, service.with_golden), (3, service.with_spec)):
        number = service.submit(make_release(seed))
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
    save_trust(
        trust_in(service.ci, service.untrusted_key, revoked=(service.ci.public.key_id,)),
        service.trust,
    )
    service.setup.tag(number, "approved")
    assert service.reconcile_once() == [("review", "refused", number)]
    assert "is revoked" in service.setup.ledger.entries()[-1].reason
    assert service.setup.champion is None


def days_ago(days: float) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")


def submit_signed(**signing: Any) -> Forgery:
    """Submit version 2, signed with other settings than CI uses."""
    return lambda service: service.submit(service.release(2, **signing))


def submit_by_untrusted_key(service: SigningService) -> str:
    return service.submit(service.release(2, key=service.untrusted_key))


def trust_both_keys(forge: Forgery, **fields: Callable[[SigningService], Any]) -> Forgery:
    """Submit while the trust accepts both keys and has these fields."""

    def forge_later(service: SigningService) -> str:
        more = {name: of(service) for name, of in fields.items()}
        save_trust(trust_in(service.ci, service.untrusted_key, **more), service.trust)
        return forge(service)

    return forge_later


def tamper_files(
    *prefixes: str, by: Callable[[SigningService, bytes], bytes] | None = None, make_release: Any = SigningService.release,
    send: Forgery | None = None,
) -> Forgery:  # fmt: skip
    """Change files of version 2 in the registry after its submission.

    `places`: the beginnings of the names. `by`: the change; without it the files are removed.
    """

    def forge(service: SigningService) -> str:
        number = send(service) if send else service.submit(make_release(service, 2))
        extra_files = service.setup.stored(number).extra_files
        for file_path in [name for name in extra_files if name.startswith(prefixes)]:
            before = extra_files.pop(file_path)
            if by is not None:
                extra_files[file_path] = by(service, before)
                assert extra_files[file_path] != before
        return number

    return forge


def edit_json_field(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | {key: value}).encode()


def edit_signed_field(key: str, value: Any) -> Callable[[SigningService, bytes], bytes]:
    return lambda _, data: edit_json_field(key, value)(data)


def replace_payload(service: SigningService, data: bytes) -> bytes:
    """Replace the payload by a PASSED statement on other bytes, and keep the signature."""
    other_statements = service.release(3).statements
    assert other_statements is not None
    return edit_signed_field("payload", json.loads(other_statements.decision.data)["payload"])(
        service, data
    )


def repeat_signature(as_other_key: bool) -> Callable[[SigningService, bytes], bytes]:
    """Repeat the signature, under the key id of the untrusted key or the same one."""

    def change(service: SigningService, data: bytes) -> bytes:
        (first,) = json.loads(data)["signatures"]
        second = first | ({"keyid": service.untrusted_key.public.key_id} if as_other_key else {})
        return edit_signed_field("signatures", [first, second])(service, data)

    return change


def forge_key_id(service: SigningService, data: bytes) -> bytes:
    untrusted, trusted = (key.public.key_id.encode() for key in (service.untrusted_key, service.ci))
    return data.replace(untrusted, trusted)


def mix_releases(change: Callable[[Release, Release], dict[str, Any]]) -> Forgery:
    """Upload version 2 with fields of version 3."""

    def forge(service: SigningService) -> str:
        base, second = service.release(2), service.release(3)
        return service.upload_unverified(replace(base, **change(base, second)))

    return forge


def use_other_evidence_statement(base: Release, other: Release) -> dict[str, Any]:
    assert base.statements is not None
    assert other.statements is not None
    return {"statements": StatementPair(other.statements.evidence, base.statements.decision)}


def submit_and_replace_bytes(service: SigningService) -> str:
    number = service.submit(service.release(2))
    service.setup.stored(number).data = onnx_file(
        service.setup.folder / "x.onnx", seed=9
    ).read_bytes()
    return number


def submit_by_reviewer_key(service: SigningService) -> str:
    save_trust(
        trust_in(service.ci, reviewers=trust_in(service.untrusted_key).measurers), service.trust
    )
    return submit_by_untrusted_key(service)


def submit_by_expired_key(service: SigningService) -> str:
    """Sign with a key that has expired, with a time after its expiry."""
    (trusted_key,) = trust_in(service.ci).measurers
    expired_key = trusted_key.model_copy(update={"valid_until": days_ago(40)})
    save_trust(
        Trust(measurers=(expired_key, *trust_in(service.untrusted_key).measurers)), service.trust
    )
    return service.submit(service.release(2, at=days_ago(60)))


def submit_old_evidence(service: SigningService) -> str:
    save_trust(trust_in(service.ci, max_age_days=365.0), service.trust)
    policy = builders.policy(max_age_days=365.0)
    return service.submit(service.release(2, policy=policy, days=91), policy=policy)


def submit_by_weaker_policy(service: SigningService) -> str:
    """Submit a release that passes the submitter's policy but not the service's."""
    service.setup.policy = builders.policy(min_samples=500)
    service.restart()
    return service.submit(service.release(2))


def upload_signed_failure(service: SigningService) -> str:
    """Upload a release with a signed FAIL decision and tags that claim PASS."""
    path = onnx_file(service.setup.folder / "2.onnx", seed=2)
    return service.upload_unverified(
        Signing(service.ci).signed(failing_release(path), service.policy)
    )


def resubmit_rolled_back_bytes(service: SigningService) -> str:
    """Submit rolled-back bytes again, without the rollback tag and with a new signature."""
    number = service.submit(service.release(2))
    service.reconcile_once()
    rollback(service.setup.registry, NAME, ledger=service.setup.ledger, reason="wrong answers")
    service.reconcile_once()
    del service.setup.stored(number).tags[Tag.ROLLED_BACK]
    return service.upload_unverified(service.release(2, at=days_ago(0.01)))


def resubmit_rejected_bytes(service: SigningService) -> str:
    """Submit rejected bytes again after an editor removed the rejection tag."""
    service.setup.tag(service.submit(service.release(2)), "rejected")
    assert service.reconcile_once() == [("hand_in", "passed", "2"), ("review", "rejected", "2")]
    del service.setup.stored("2").tags[Tag.REVIEW]
    return service.upload_unverified(service.release(2))


def replay_verdict(service: SigningService) -> str:
    """Upload the verdict on an earlier champion as a new version."""
    for seed in (2, 3):
        service.submit(service.release(seed))
        service.reconcile_once()
        rollback(service.setup.registry, NAME, ledger=service.setup.ledger, reason="slow")
    service.reconcile_once()
    assert service.setup.champion == "1"
    service.setup.stored("1").tags.clear()  # the version cannot be found by its tags
    return service.upload_unverified(service.release(1))


def edit_statement(*path: str | int, to: Any) -> Forgery:
    """Upload a decision statement with a changed field, signed by the trusted key."""

    def forge(service: SigningService) -> str:
        of = service.with_spec(2)
        assert of.statements is not None
        plain = of.statements.decision.statement.to_plain()
        container: Any = plain
        for name in path[:-1]:
            container = container[name]
        container[path[-1]] = to(container[path[-1]]) if callable(to) else to
        again = SignedStatement.sign(Statement.from_json(json.dumps(plain)), service.ci)
        return service.upload_unverified(
            replace(of, statements=StatementPair(of.statements.evidence, again))
        )

    return forge


TWIN = Resource.from_digest(builders.digest("twin"), name="quantized/model.onnx").to_plain()
POLICY_DIGEST = ("predicate", "policy", "digest")
BOTH = ("gate/evidence.dsse.json", "gate/decision.dsse.json")

FORGERIES: dict[str, tuple[Forgery, str]] = {
    "states another file": (edit_statement("subject", 0, "digest", "sha256", to="0" * 64), "file"),
    "states a bad digest": (
        edit_statement("subject", -1, "digest", "sha256", to="x"),
        "no SHA-256 digest of the preprocessing"),
    "states a twin that is not there": (
        edit_statement("subject", to=lambda all_: [*all_, TWIN]),
        "the quantized twin: the file has no signed statements"),
    "states another policy": (edit_statement(*POLICY_DIGEST, "sha256", to="0" * 64), "is about decision"),
    "states another algorithm": (
        edit_statement(*POLICY_DIGEST, to={"sha512": "0" * 128}), "no SHA-256 digest of the policy"),
    "states another result": (
        edit_statement("predicate", "verificationResult", to="FAILED"), "FAILED"),
    "states two pieces of evidence": (
        edit_statement("predicate", "inputAttestations", to=lambda all_: all_ * 2),
        "2 evidence records"),
    "unsigned": (
        lambda w: w.upload_unverified(replace(w.release(2), statements=None)),
        "the file has no signed statements"),
    "unknown key": (submit_by_untrusted_key, "is signed by 0 of the keys that are trusted"),
    "unknown key under a trusted id": (
        tamper_files(*BOTH, by=forge_key_id, send=submit_by_untrusted_key), "is signed by 0"),
    "reviewer's key": (submit_by_reviewer_key, "is signed by 0"),
    "expired key": (submit_by_expired_key, "was valid until"),
    "revoked key": (
        trust_both_keys(submit_signed(), revoked=lambda w: (w.ci.public.key_id,)), "is revoked"),
    "too few signatures": (
        trust_both_keys(submit_signed(), threshold=lambda _: 2), "is signed by 1 of the keys"),
    "one key twice": (
        trust_both_keys(tamper_files(BOTH[1], by=repeat_signature(False)), threshold=lambda _: 2), "statement"),
    "one key under two names": (
        trust_both_keys(tamper_files(*BOTH, by=repeat_signature(True)), threshold=lambda _: 2),
        "is signed by 1 of"),
    "expired": (submit_signed(at=days_ago(91)), "days old"),
    "of the future": (submit_signed(at=days_ago(-1)), "is dated in the future"),
    "old evidence": (submit_old_evidence, "its evidence is 91.0 days old"),
    "of another model": (submit_signed(model="letters"), "letters"),
    "of another registry": (
        submit_signed(registry="https://elsewhere"),
        "start the service: gate serve --same-registry https://elsewhere"),
    "for no registry": (submit_signed(registry="sqlite:///m.db"), "sqlite:"),
    "of another file": (mix_releases(lambda _, other: {"statements": other.statements}), "has digest"),
    "with the evidence of another": (
        mix_releases(lambda _, other: {"evidence": other.evidence}), "has digest"),
    "statement on other evidence": (mix_releases(use_other_evidence_statement), "is about evidence"),
    "edited evidence": (
        tamper_files("gate/evidence.json", by=edit_signed_field("measured_at", "2026-11-22T00:00:00+00:00")),
        "has digest"),
    "edited decision": (
        tamper_files("gate/decision.json", by=edit_signed_field("runtimes", ["ort-cpu"])), "is about decision"),
    "other bytes": (submit_and_replace_bytes, "has digest"),
    "exchanged golden vectors": (
        tamper_files("golden/golden.json", by=lambda _, data: data + b" ", make_release=SigningService.with_golden),
        "golden vectors"),
    "without golden vectors": (tamper_files("golden", make_release=SigningService.with_golden), "golden vectors"),
    "exchanged spec": (
        tamper_files("prep", by=lambda _, data: data.replace(b"0.485", b"0.486"), make_release=SigningService.with_spec),
        "preprocessing"),
    "without spec": (tamper_files("prep", make_release=SigningService.with_spec), "preprocessing"),
    "stripped": (tamper_files(BOTH[1], by=edit_signed_field("signatures", [])), "signatures"),
    "of another type": (
        tamper_files(BOTH[1], by=edit_signed_field("payloadType", "application/json")), "its payloadType is"),
    "another payload": (tamper_files(BOTH[1], by=replace_payload), "is signed by 0"),
    "one statement missing": (tamper_files(BOTH[0]), "evidence.dsse.json"),
    "weaker policy": (submit_by_weaker_policy, "it was judged by another policy"),
    "no pass": (upload_signed_failure, "its decision is FAIL"),
    "rolled-back bytes": (resubmit_rolled_back_bytes, "these bytes were rolled back as version 2"),
    "rejected bytes": (resubmit_rejected_bytes, "a reviewer rejected these bytes as version 2"),
    "replayed": (replay_verdict, "version 1 was promoted with the same verdict before"),
}  # fmt: skip


def assert_page_says_refused(service: SigningService, number: str) -> None:
    """Assert that the page shows the refusal and marks the submitted texts as claims."""
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
    "quantized/gate/evidence.json": (
        edit_json_field("measured_at", "2026-11-22T00:00:00Z"),
        "has digest",
    ),
    "quantized/gate/decision.json": (edit_json_field("runtimes", []), "is about decision"),
    "quantized/gate/decision.dsse.json": (lambda _: b"[1]", "the quantized twin"),
    "quantized/gate/evidence.dsse.json": (lambda _: b"[1]", "evidence.dsse.json"),
}


@pytest.mark.parametrize("place", TWINS)
def test_tampered_twin_is_refused(tmp_path, place: str) -> None:
    service = SigningService(tmp_path, POLICY_WITH_TWIN)
    number = service.submit(service.release(1))
    change, problem = TWINS[place]
    service.change_file(number, place, change)
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert problem in service.refusal(number)
    assert service.setup.champion is None


def release_with_twin_vectors(service: SigningService, torch: str) -> Release:
    """Return a release with the same file and twin each time, and different golden vectors."""
    created = service.setup.release(1)
    assert created.twin is not None
    assert service.policy.twin is not None
    folder = service.setup.folder / f"vectors-{torch}"
    origin = Origin(policy_sha256=service.policy.twin.digest(), versions={"torch": torch})
    vectors.write_model_vectors(folder, created.twin.onnx_path, origin=origin)
    twin = replace(created.twin, golden=GoldenFolder.open(folder))
    return Signing(service.ci).signed(replace(created, twin=twin), service.policy)


def keep_twin(twin: EvaluatedFile, _other_twin: EvaluatedFile) -> EvaluatedFile:
    return twin


def replace_twin_statement(_twin: EvaluatedFile, other: EvaluatedFile) -> EvaluatedFile:
    """Return a twin with another statement of the same key on the same bytes."""
    return other


def remove_vectors(twin: EvaluatedFile, _other_twin: EvaluatedFile) -> EvaluatedFile:
    return replace(twin, golden=None)


def replace_vectors(twin: EvaluatedFile, other: EvaluatedFile) -> EvaluatedFile:
    return replace(twin, golden=other.golden)


@pytest.mark.parametrize(
    ("change_twin", "problem"),
    [
        (keep_twin, None),
        (replace_twin_statement, "golden"),
        (remove_vectors, "golden"),
        (replace_vectors, "golden"),
    ],
)
def test_golden_vectors_of_the_twin_must_match_the_signed_verdict(
    tmp_path, change_twin, problem
) -> None:
    service = SigningService(tmp_path, POLICY_WITH_TWIN)
    first, second = (release_with_twin_vectors(service, torch) for torch in ("2", "3"))
    assert first.twin is not None
    assert second.twin is not None
    assert first.twin.golden_sha256 != second.twin.golden_sha256
    number = service.upload_unverified(replace(first, twin=change_twin(first.twin, second.twin)))
    outcome = "promoted" if problem is None else "refused"
    assert service.reconcile_once()[0] == ("hand_in", outcome, number)
    assert problem is None or problem in service.refusal(number)


def test_policy_of_the_submitter_is_ignored(service: SigningService) -> None:
    """The policy of the submission neither helps nor harms."""
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
    save_trust(trust_in(service.ci, service.untrusted_key), service.trust)
    assert service.reconcile_once() == []  # a refused version is not evaluated again
    again = service.submit(service.release(2, key=service.untrusted_key))
    assert again != refused
    assert service.reconcile_once()[0] == ("hand_in", "promoted", again)


def test_damaged_trust_file_delays_the_submission(service: SigningService) -> None:
    number = service.submit(service.release(2))
    original = service.trust.read_text()
    service.trust.write_text("trust: [")
    assert service.reconcile_once() == [("hand_in", "PolicyError", None)]
    assert (service.actions_of(number), service.setup.champion, service.live) == ([], "1", "1")
    service.trust.write_text(original)
    assert service.reconcile_once()[0] == ("hand_in", "promoted", number)


def test_page_explains_that_the_service_has_no_trust(service: SigningService) -> None:
    number, trust_path = service.submit(service.release(2)), service.trust
    service.trust = None  # type: ignore[assignment]
    service.restart()
    for _ in range(2):
        assert service.reconcile_once() == []
    assert "gate serve --trust" in service.page(number)
    assert service.actions_of(number) == []
    service.trust = trust_path
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
    """The alias moves before the service reads the approval; the policy or age limit changed since."""
    service = SigningService(tmp_path, REVIEWED)
    if days:
        service.setup.policy = builders.policy(review="required", max_age_days=365.0)
        save_trust(trust_in(service.ci, max_age_days=365.0), service.trust)
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

    def raise_error(call: str, _index: int) -> None:
        if call == "download":
            raise error("away")

    watched.before = raise_error
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
    original, stored.extra_files["gate/decision.dsse.json"] = (
        stored.extra_files["gate/decision.dsse.json"], b'{"error": "try again"}',
    )  # fmt: skip
    watched = service.setup.registry = Watched(service.setup.registry)  # type: ignore[assignment]
    service.restart()
    for _ in range(3):  # before the time at which a second download confirms the mismatch
        assert service.reconcile_once() == [("hand_in", "MismatchUnconfirmed", None)]
    assert watched.calls.count("set_description") == 1
    assert service.page(number).startswith("Status: handed in, and not judged yet: version 2 of ")
    stored.extra_files["gate/decision.dsse.json"] = original
    assert service.reconcile_once()[0] == ("hand_in", "promoted", number)
    assert service.page(number).startswith("Status: champion since ")


def test_candidate_moved_during_evaluation_is_evaluated_again(service: SigningService) -> None:
    first, second = service.submit(service.release(2)), service.submit(service.release(3))
    service.setup.registry.set_alias(NAME, CANDIDATE, first)
    watched = Watched(service.setup.registry)

    def move_candidate(call: str, _index: int) -> None:
        if (
            call == "download" and watched.calls.count("download") == 2
        ):  # the first download is the guard's
            watched.inner.set_alias(NAME, CANDIDATE, second)

    watched.after = move_candidate
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
    """The service's policy requires a comparison; the policy of CI did not."""
    service = SigningService(tmp_path)
    service.submit(service.release(1))
    service.reconcile_once()
    service.setup.policy = builders.policy(incumbent=ChampionPolicy(min_agreement=0.9))
    service.restart()
    number = service.submit(service.release(2))
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert service.setup.champion == "1"


def replace_champion(service: SigningService) -> None:
    service.submit(service.release(3))
    assert ("hand_in", "promoted", "3") in service.reconcile_once()


def roll_back(service: SigningService) -> None:
    rollback(service.setup.registry, NAME, ledger=service.setup.ledger, reason="slow")
    service.reconcile_once()


def revert_champion(service: SigningService) -> None:
    """Revert version 2, as the guard does when a version cannot be verified or no longer passes."""
    model = service.setup.model()
    about = model.history().approving_entry("1")
    entry = model.entry("reverted", "unproven", version="1", previous="2", about=about)
    alias.move_alias(model, entry)


CLOSED = {
    replace_champion: "was champion until",
    roll_back: "rolled back on",
    revert_champion: "reverted by the guard on",
}


@pytest.mark.parametrize("close", CLOSED)
def test_resubmission_of_an_evaluated_version_is_refused_with_the_reason(
    service: SigningService, close
):
    """The service evaluates a version once; `candidate` does not move for a second submission."""
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
    assert not [item for item in service.reconcile_once() if item[0] == "hand_in"]


def test_resubmission_of_a_version_with_a_reverted_tag_is_refused(service: SigningService) -> None:
    """An editor set the tag."""
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


def test_validly_signed_twin_of_another_file_is_refused(tmp_path) -> None:
    service = SigningService(tmp_path, POLICY_WITH_TWIN)
    first, second = service.release(1), service.release(2)
    number = service.upload_unverified(replace(first, twin=second.twin))
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert "does not name the quantized twin" in service.refusal(number)
