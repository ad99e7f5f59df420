"""The service counts signed approvals; a rejection needs no signature."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gate import Policy
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    PolicyError,
    RegistryError,
    RegistryUnavailable,
)
from gate.policy.sections import ReviewTag
from gate.registry.interface import CANDIDATE, Tag
from gate.registry.promotion import rollback
from gate.registry.release import Release
from gate.registry.reviews import STATEMENT_TAG, ReviewSubmission
from gate.service.champion_guard import guard_champion
from gate.service.monitoring import Failed
from gate.service.submissions import process_reviews
from gate.signing.keys import SigningKey
from gate.signing.predicates import Word
from gate.signing.trust import Trust, TrustedKey
from gate.signing.verification import StatementPair
from tests import builders
from tests.registry.releases import NAME
from tests.registry.signed import Signing, save_trust, trust_in
from tests.registry.simulator import Watched
from tests.service.registry_setup import AUTOMATIC, REVIEWED, SIGNED, RegistrySetup, failing
from tests.service.signed_submissions import SigningService

DECISION_FILE = "gate/decision.json"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SigningKey]:
    folder = tmp_path_factory.mktemp("keys")
    names = ("alice", "bob", "ci", "mallory")
    return {name: SigningKey.make(folder / f"{name}.pem") for name in names}


class SignedReviewSetup(RegistrySetup):
    """A model whose version 1 passed and waits for signed approvals."""

    def __init__(self, folder: Path, keys: dict[str, SigningKey]) -> None:
        super().__init__(folder, SIGNED)
        self.keys = keys
        self.promote(1)

    def release(self, seed: int, *, days: float = 0.0, policy: Policy | None = None) -> Release:
        """Return a release signed by CI, with a decision time that is the same for each call."""
        policy = policy or self.policy
        signing = Signing(self.keys["ci"], at=self.created_at.isoformat(timespec="seconds"))
        return signing.signed(super().release(seed, days=days, policy=policy), policy)

    def trust(self, **more: Any) -> Trust:
        def trusted(*names: str) -> tuple[TrustedKey, ...]:
            return tuple(TrustedKey(**self.keys[name].public.to_plain()) for name in names)

        fields = {"measurers": trusted("ci"), "reviewers": trusted("alice", "bob", "ci")}
        return Trust(**{**fields, **more})

    def sign(self, by: str, word: Word = "approved", number: str = "1", **more: Any) -> None:
        """Sign a review as `gate approve` and `gate reject` do."""
        submission = ReviewSubmission.read(self.registry, NAME, number)
        submission.review(self.registry, word, self.keys[by], **more)

    def tag_statement_only(self, by: str, word: Word, *, number: str = "1", **more: Any) -> None:
        """Store a signed statement without a review tag."""
        reviewable = ReviewSubmission.read(self.registry, NAME, number).subject
        at = more.pop("at", datetime.now(UTC))
        key = self.keys[by]
        text = reviewable.sign(word, key, at=at, **more).compact
        self.registry.set_tag(NAME, number, key=f"{STATEMENT_TAG}{key.public.short}", value=text)

    def reconcile_once(self, *, trust: Trust | None = None) -> list[Any]:
        results = process_reviews(self.model(), self.policy, trust=lambda: trust or self.trust())
        return [
            item if isinstance(item, Failed) else (item.outcome, item.version) for item in results
        ]

    def result(self, number: str = "1") -> str:
        return self.stored(number).tags.get(Tag.REVIEW_RESULT, "")

    def status(self, number: str = "1") -> str:
        return self.stored(number).description.partition("\n")[0]


@pytest.fixture
def setup(tmp_path: Path, keys: dict[str, SigningKey]) -> SignedReviewSetup:
    return SignedReviewSetup(tmp_path, keys)


def test_passed_version_waits_and_its_page_names_the_command(setup: SignedReviewSetup) -> None:
    assert setup.lines() == [("passed", "1")]
    (line,) = setup.ledger.entries()
    assert line.reason.endswith(
        "waits for review: gate approve digits 1 --key KEY, or gate reject with the same arguments"
    )
    assert setup.status().startswith("Status: waits for review: gate approve digits 1 --key KEY")
    assert setup.reconcile_once() == []
    assert setup.result() == ""


def test_signed_approval_promotes_and_records_the_key(setup: SignedReviewSetup) -> None:
    setup.sign("alice", comment="looked at the sevens")
    assert setup.reconcile_once() == [("promoted", "1")]
    line = setup.ledger.entries()[-1]
    alice = setup.keys["alice"].public
    assert line.approvers == (alice.key_id,)
    assert line.comment == "looked at the sevens"
    assert line.reason == (
        f'version 1 passed and was approved by alice ({alice.short}): "looked at the sevens"'
    )
    assert setup.champion == "1"
    assert f'approved by the key {alice.short}: "looked at the sevens"' in setup.status()
    assert setup.result().startswith("approved: became champion at 20")
    assert setup.reconcile_once() == []


def test_answer_about_an_unreadable_decision_is_written_once(setup: SignedReviewSetup) -> None:
    """Each write of a tag is an event, which reconciles the model again."""
    setup.sign("alice")
    del setup.stored("1").extra_files[DECISION_FILE]
    setup.reconcile_once()
    first = setup.result()
    setup.reconcile_once()
    assert DECISION_FILE.rpartition("/")[2] in first
    assert setup.result() == first


def test_two_reviewers_are_required(setup: SignedReviewSetup) -> None:
    record_measurer(setup)
    trust = setup.trust(reviewers_threshold=2)
    setup.sign("alice")
    watched = setup.registry = Watched(setup.registry)  # type: ignore[assignment]
    for _ in range(3):
        assert setup.reconcile_once(trust=trust) == []
    assert watched.calls.count("set_tag") == 1  # the tag is written once
    setup.registry = watched.inner
    assert setup.result().startswith("1 of 2 signed approvals (alice (")
    setup.sign("ci")
    assert setup.reconcile_once(trust=trust) == []
    assert "this key also signed the verdict" in setup.result()
    setup.sign("bob")
    assert setup.reconcile_once(trust=trust) == [("promoted", "1")]
    line = setup.ledger.entries()[-1]
    assert set(line.approvers) == {setup.keys[name].public.key_id for name in ("alice", "bob")}
    assert "approved by the keys " in setup.status()


def record_measurer(setup: SignedReviewSetup) -> None:
    """Let the ledger entry name the key that signed the verdict."""
    waiting = setup.ledger.entries()[-1]
    signers = (setup.keys["ci"].public.key_id,)
    setup.ledger.append(waiting.model_copy(update={"signers": signers, "parent": None}))


@pytest.mark.parametrize("tag", [ReviewTag(), ReviewTag(name="Approval", approved="Approved")])
def test_approval_tag_without_signature_is_answered(
    tmp_path: Path, keys: dict[str, SigningKey], tag: ReviewTag
) -> None:
    setup = SignedReviewSetup(tmp_path, keys)
    setup.policy = builders.policy(review="signed", review_tag=tag)
    setup.tag("1", tag.approved, tag.name)
    assert setup.reconcile_once() == []
    assert setup.result() == (
        "0 of 1 signed approvals. A tag approves nothing here: gate approve digits 1 --key KEY"
    )
    assert setup.champion is None


@pytest.mark.parametrize("key", ["gate.review", "Approval"])
def test_rejection_tag_without_signature_rejects(setup: SignedReviewSetup, key: str) -> None:
    setup.sign("alice")
    setup.tag("1", "too dark", Tag.REVIEW_COMMENT)
    setup.tag("1", "Rejected!", key)
    setup.policy = builders.policy(review="signed", review_tag=ReviewTag(name="approval"))
    assert setup.reconcile_once() == [("rejected", "1")]
    setup.policy = SIGNED  # the policy of the release; another one would change the digests
    assert setup.ledger.entries()[-1].comment == "too dark"
    assert setup.promote(1).outcome == "refused"


@pytest.mark.parametrize("way", ["gate reject", "a statement alone"])
def test_signed_rejection_rejects_and_records_the_key(setup: SignedReviewSetup, way: str) -> None:
    setup.sign("bob")
    if way == "gate reject":
        setup.sign("alice", "rejected", comment="too dark")
        assert setup.stored("1").tags[Tag.REVIEW] == "rejected"
    else:
        setup.tag_statement_only("alice", "rejected", comment="too dark")
    assert setup.reconcile_once() == [("rejected", "1")]
    line = setup.ledger.entries()[-1]
    assert line.reason == (
        f'version 1 was rejected by alice ({setup.keys["alice"].public.short}): "too dark"'
    )
    assert line.comment == "too dark"
    assert line.approvers == ()
    assert CANDIDATE not in setup.registry.aliases
    assert setup.result().startswith("rejected at 20")
    assert setup.promote(1).outcome == "refused"


def test_rejection_counts_while_the_store_is_unavailable(setup: SignedReviewSetup) -> None:
    setup.sign("mallory", "rejected")

    setup.registry.fetch = failing(RegistryError("the store is away"))  # type: ignore[method-assign]
    assert setup.reconcile_once() == [("rejected", "1")]


def test_nothing_is_approved_without_trust(setup: SignedReviewSetup) -> None:
    setup.sign("alice")
    setup.tag("1", "approved")
    assert list(process_reviews(setup.model(), SIGNED)) == []
    assert "Start it with --trust FILE" in setup.result()
    assert setup.champion is None
    setup.tag("1", "rejected")
    assert [item.outcome for item in process_reviews(setup.model(), SIGNED)] == ["rejected"]  # type: ignore[union-attr]


def test_damaged_trust_blocks_approvals_but_not_rejections(setup: SignedReviewSetup) -> None:
    setup.sign("alice")
    (failed,) = process_reviews(setup.model(), SIGNED, trust=failing(PolicyError("no YAML")))
    assert isinstance(failed, Failed)
    assert setup.result() == ""
    setup.tag("1", "rejected")
    (result,) = process_reviews(setup.model(), SIGNED, trust=failing(PolicyError("no YAML")))
    assert result.outcome == "rejected"  # type: ignore[union-attr]


def test_replaced_decision_blocks_approval_until_restored(setup: SignedReviewSetup) -> None:
    extra_files = setup.stored("1").extra_files
    original = extra_files[DECISION_FILE]
    setup.promote(2)
    extra_files[DECISION_FILE] = setup.stored("2").extra_files[DECISION_FILE]
    setup.registry.aliases[CANDIDATE] = "1"
    setup.tag_statement_only("alice", "approved")
    assert setup.reconcile_once() == []
    assert "it was exchanged, and nothing can be approved" in setup.result()
    extra_files[DECISION_FILE] = b"{}"
    assert setup.reconcile_once() == []
    extra_files[DECISION_FILE] = original
    assert setup.reconcile_once() == []
    assert "it is about file" in setup.result()
    setup.sign("alice")
    assert setup.reconcile_once() == [("promoted", "1")]


def test_decision_replaced_after_counting_is_refused(
    setup: SignedReviewSetup,
) -> None:
    """The decision is replaced after the statements were counted and before the file is downloaded."""
    setup.sign("alice")
    download = setup.registry.download

    def download_other_decision(*arguments: Any, **options: Any) -> Path:
        path = download(*arguments, **options)
        decision = path.parent / DECISION_FILE
        text = decision.read_text()
        decision.write_text(text.replace('"decided_at": "20', '"decided_at": "21'))
        return path

    setup.registry.download = download_other_decision  # type: ignore[method-assign]
    assert setup.reconcile_once() == [("refused", "1")]
    assert "the decision that was approved" in setup.ledger.entries()[-1].reason
    assert setup.champion is None


def test_unreadable_records_do_not_block_other_versions(setup: SignedReviewSetup) -> None:
    setup.sign("alice")
    setup.promote(2)
    setup.sign("alice", number="2")
    fetch = setup.registry.fetch

    def fail_for_version_1(name: str, number: str, *rest: Any, **options: Any) -> None:
        if number == "1":
            raise RegistryError("the store is away")
        fetch(name, number, *rest, **options)

    setup.registry.fetch = fail_for_version_1  # type: ignore[method-assign]
    failed, promoted = setup.reconcile_once()
    assert isinstance(failed, Failed)
    assert promoted == ("promoted", "2")

    setup.registry.fetch = failing(RegistryUnavailable("away"))  # type: ignore[method-assign]
    with pytest.raises(RegistryUnavailable):
        setup.reconcile_once()


def test_approved_version_with_changed_bytes_is_refused(setup: SignedReviewSetup) -> None:
    setup.sign("alice")
    setup.stored("1").data += b"\0"
    assert setup.reconcile_once() == [("refused", "1")]
    assert setup.champion is None


def test_approval_before_a_rollback_does_not_promote_again(setup: SignedReviewSetup) -> None:
    """An editor deletes the rollback tag, and the same bytes are submitted again."""
    setup.tag_statement_only("alice", "approved", at=datetime.now(UTC) - timedelta(hours=1))
    assert setup.reconcile_once() == [("promoted", "1")]
    setup.promote(2)
    setup.tag_statement_only("bob", "approved", number="2")
    assert setup.reconcile_once() == [("promoted", "2")]
    rollback(setup.registry, NAME, ledger=setup.ledger, reason="worse")
    setup.stored("2").tags.pop(Tag.ROLLED_BACK)
    assert setup.promote(2).outcome == "passed"
    assert setup.reconcile_once() == []
    assert "sign again" in setup.result("2")
    setup.tag_statement_only(
        "bob", "approved", number="2", at=datetime.now(UTC) + timedelta(seconds=2)
    )
    assert setup.reconcile_once() == [("promoted", "2")]


def test_champion_moved_by_hand_to_a_waiting_version_is_reverted(setup: SignedReviewSetup) -> None:
    setup.sign("alice")
    setup.reconcile_once()
    setup.promote(2)
    setup.tag("2", "approved")
    setup.move_champion("2")
    (result,) = guard_champion(setup.model(), SIGNED, thoroughly=False)
    assert (result.outcome, setup.champion) == ("reverted", "1")
    assert "no entry with a signed approval" in result.reason
    assert [line.version for line in setup.model().history().waiting] == ["2"]
    assert setup.status("2").startswith("Status: waits for review: gate approve digits 2")
    setup.sign("bob", number="2")
    assert setup.reconcile_once() == [("promoted", "2")]


@pytest.mark.parametrize("mode", ["automatic", "required"])
def test_promotion_without_signed_approval_is_reverted(
    tmp_path: Path, keys: dict[str, SigningKey], mode: str
) -> None:
    setup = SignedReviewSetup(tmp_path, keys)
    setup.sign("alice")
    setup.reconcile_once()
    second = {"automatic": AUTOMATIC, "required": REVIEWED}[mode]
    setup.promote(2, policy=second)
    setup.tag("2", "approved")
    if mode == "required":
        assert [t.outcome for t in process_reviews(setup.model(), second)] == ["promoted"]  # type: ignore[union-attr]
    assert setup.champion == "2"
    (result,) = guard_champion(setup.model(), SIGNED, thoroughly=True)
    assert (result.outcome, setup.champion) == ("reverted", "1")
    setup.tag_statement_only(
        "bob", "approved", number="2", at=datetime.now(UTC) + timedelta(seconds=2)
    )
    assert setup.reconcile_once() == [("promoted", "2")]


def test_approval_stays_valid_for_versions_that_served(setup: SignedReviewSetup) -> None:
    """Move `champion` away and back by hand, then roll back; the version was never deployed."""
    setup.sign("alice")
    setup.reconcile_once()
    setup.promote(2)
    setup.sign("bob", number="2")
    setup.reconcile_once()
    setup.move_champion("1")
    (result,) = guard_champion(setup.model(), SIGNED, thoroughly=True)
    assert result.outcome == "accepted"
    assert guard_champion(setup.model(), SIGNED, thoroughly=True) == []
    assert setup.promote(1).outcome == "unchanged"
    setup.move_champion("2")
    guard_champion(setup.model(), SIGNED, thoroughly=True)
    rollback(setup.registry, NAME, ledger=setup.ledger, reason="worse")
    assert guard_champion(setup.model(), SIGNED, thoroughly=True) == []
    assert setup.champion == "1"
    assert setup.ledger.entries()[-1].approvers == (setup.keys["alice"].public.key_id,)


@pytest.mark.parametrize("tamper", ["verdict", "tag"])
def test_inconsistent_version_is_not_approved(setup: SignedReviewSetup, tamper: str) -> None:
    if tamper == "tag":
        setup.stored("1").tags[Tag.SHA256] = "0" * 64
        with pytest.raises(DigestMismatch, match="One of them was replaced"):
            setup.sign("alice")
    else:
        extra_files = setup.stored("1").extra_files
        extra_files[DECISION_FILE] = extra_files[DECISION_FILE].replace(
            b'"verdict": "PASS"', b'"verdict": "FAIL"'
        )
        with pytest.raises(EvidenceError, match="only a PASS can be approved"):
            setup.sign("alice")
    assert not any(key.startswith(STATEMENT_TAG) for key in setup.stored("1").tags)
    setup.sign("alice", "rejected")
    assert setup.reconcile_once() == [("rejected", "1")]


def make_reviewers(*keys: SigningKey) -> tuple[TrustedKey, ...]:
    return tuple(TrustedKey(**key.public.to_plain()) for key in keys)


def approve(service: SigningService, number: str, by: SigningKey) -> None:
    ReviewSubmission.read(service.setup.registry, NAME, number).review(
        service.setup.registry, "approved", by
    )


def test_measurer_of_the_evidence_cannot_approve(tmp_path: Path) -> None:
    service = SigningService(tmp_path, SIGNED)
    gpu = service.untrusted_key
    save_trust(trust_in(service.ci, gpu, reviewers=make_reviewers(gpu)), service.trust)
    created = service.release(1)
    measured = Signing(gpu).signed(created, service.policy).statements
    assert measured is not None
    assert created.statements is not None
    pair = StatementPair(measured.evidence, created.statements.decision)
    number = service.submit(replace(created, statements=pair))
    assert service.reconcile_once() == [("hand_in", "passed", number)]
    line = service.setup.ledger.entries()[-1]
    assert (line.signers, line.measured_by) == (
        (service.ci.public.key_id,), (gpu.public.key_id,),
    )  # fmt: skip
    approve(service, number, gpu)
    assert service.reconcile_once() == []
    assert (
        "this key also signed the verdict" in (service.setup.stored(number).tags[Tag.REVIEW_RESULT])
    )
    assert service.setup.champion is None


def test_version_approved_by_a_revoked_key_is_not_restored(
    tmp_path: Path, keys: dict[str, SigningKey]
) -> None:
    service = SigningService(tmp_path, SIGNED)
    by = make_reviewers(keys["alice"], keys["bob"])
    save_trust(trust_in(service.ci, reviewers=by), service.trust)
    for seed, name in ((1, "alice"), (2, "bob")):
        number = service.submit(service.release(seed))
        service.reconcile_once()
        approve(service, number, keys[name])
        assert ("review", "promoted", number) in service.reconcile_once()
    revoked = (keys["alice"].public.key_id,)
    save_trust(trust_in(service.ci, reviewers=by, revoked=revoked), service.trust)
    service.setup.move_champion("1")
    assert service.reconcile_once() == [("guard", "reverted", "2")]
    service.setup.tag("2", "rejected")
    assert service.reconcile_once()[0] == ("guard", "reverted", None)
