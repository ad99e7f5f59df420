"""Process submitted candidates and their reviews."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gate.errors import (
    DigestMismatch,
    EvidenceError,
    GateError,
    LimitExceeded,
    MismatchUnconfirmed,
    OnnxFileError,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
    Untrusted,
)
from gate.ledger.entry import Action, LedgerEntry
from gate.ledger.history import ModelHistory
from gate.policy.policy import Policy
from gate.records.layout import GOLDEN
from gate.registry import reviews
from gate.registry.alias import move_alias
from gate.registry.comparison import comparison_in, outdated
from gate.registry.eligibility import examine, objection_to_submission
from gate.registry.interface import CANDIDATE, CHAMPION, Tag, Version
from gate.registry.load_champion import champion_recorded, compare_records
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import GoldenFolder
from gate.registry.reviews import ReviewCounter, ReviewSubmission, ReviewTally
from gate.registry.verify_release import (
    ReadTrust,
    Terms,
    claimed_entry,
    judge_version,
    no_trust,
    release_from_version,
)
from gate.registry.version_files import (
    ExpectedDigests,
    SignedExpectation,
    load_evidence,
    load_records,
)
from gate.registry.version_page import (
    TOO_EARLY,
    UNTRUSTING,
    answer,
    is_waiting_for_service,
    unjudged,
    with_status,
    write_status,
)
from gate.service.monitoring import Failed, Kind, StepResult
from gate.signing.trust import Trust
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.untrusted_files import as_mismatch

# A submitter can write to the registry, and so controls tags, aliases, records and bytes. Therefore
# a trusted key must sign evidence, verdict and all bytes for this model in this registry. The
# service then repeats the decision with its own policy, trust and clock.
_MAX_TRIES = 3
"""Maximum number of tries if the candidate changes while it is judged; the next event retries."""

_log = logging.getLogger(__name__)


def process_submission(
    model: RegisteredModel, policy: Policy, *, trust: ReadTrust
) -> list[StepResult]:
    """Judge the candidate, unless the ledger already has its outcome.

    It becomes champion, waits for review, or is refused with a ledger entry, a tag and the reason
    on its page. If no key is trusted, or a single download had wrong bytes, only its page shows
    this. Raises RegistryError (including MismatchUnconfirmed), PolicyError, EvidenceError and
    StorageError if it can't be judged now; then it is not refused but judged again later.
    """
    for _ in range(_MAX_TRIES):
        number, history = model.alias(CANDIDATE), model.history()
        if number is None:
            return []
        if number == model.alias(CHAMPION):  # the guard handles the champion
            if not history.passed_any:
                _explain_first(model, number)
            return []
        version = model.registry.version(model.name, number)
        if history.has_outcome(number, created_at=version.created_at):
            return []
        terms = Terms.now(policy, trust)
        if terms.trust is None:
            _explain(model, version, UNTRUSTING)
            return []
        try:
            result = _Submission(model, version, history, terms, terms.trust).act()
        except MismatchUnconfirmed as error:
            # Bytes that differ each time never confirm it: without this no page would say so.
            _explain(model, version, unjudged(str(error).partition(". ")[0]))
            raise
        if result is not None:
            return [result]
    return []


def _explain_first(model: RegisteredModel, number: str) -> None:
    """Explain why a champion without a ledger line is not served.

    If it passed by another ledger, its page shows that and is not changed.
    """
    version = model.registry.version(model.name, number)
    if is_waiting_for_service(version.description):
        _explain(model, version, TOO_EARLY)


def _explain(model: RegisteredModel, version: Version, line: str) -> None:
    """Show on the version's page why it is not promoted; a failure to do so is only logged."""
    text = with_status(version.description, line)
    if text == version.description:
        return
    try:
        model.registry.set_description(model.name, version.number, text)
    except RegistryError as error:
        _log.warning("the page of version %s is out of date: %s", version.number, error)


@dataclass(frozen=True)
class _Submission:
    """A candidate and the terms by which it is judged."""

    model: RegisteredModel
    version: Version
    history: ModelHistory
    terms: Terms
    trust: Trust

    def act(self) -> StepResult | None:
        """Judge the candidate. None if another version became the candidate meanwhile."""
        model, number = self.model, self.version.number
        entry = self._new_entry()
        try:
            with temporary_folder() as folder:
                expected = SignedExpectation(
                    lambda path: ExpectedDigests.from_entry(self._claimed_entry(path))
                )
                entry, problem = model.read(number, expected, self._evaluate, into=folder)
        except (DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError) as error:
            problem = str(error)
        if entry.sha256 is not None and problem is None:
            problem = objection_to_submission(model, self.history, entry)
            if problem is None and self.terms.policy.incumbent is not None:
                problem = outdated(comparison_in(entry), model.alias(CHAMPION), self.history)
        if model.alias(CANDIDATE) != number:
            return None
        return self._accept(entry) if problem is None else self._refuse(entry, problem)

    def _new_entry(self) -> LedgerEntry:
        """Return a ledger entry about the version, without digests."""
        version = self.version
        entry = self.model.entry("passed", "handed in", version=version.number)
        return entry.model_copy(update={"made_at": version.created_at, "run_id": version.run_id})

    def _claimed_entry(self, path: Path) -> LedgerEntry:
        """Return a ledger entry with the claims that trusted keys signed for the file at `path`.

        Raises EvidenceError, StorageError.
        """
        entry, at = self._new_entry(), self.terms.at
        with as_mismatch(f"the submitted version {self.version.number}"):
            return claimed_entry(path, self.model, entry, trust=self.trust, now=at)

    def _evaluate(self, path: Path) -> tuple[LedgerEntry, str | None]:
        """Return the ledger entry for verified files, and the objection of the terms or None."""
        entry = self._add_comparison(self._claimed_entry(path), path)
        problem = judge_version(path, self.model, entry=entry, terms=self.terms)
        if problem is not None:
            return entry, problem
        records = load_records(path, evidence=entry.evidence_sha256)
        release = release_from_version(records, name=self.model.name, twin=entry.twin)
        if entry.golden_sha256 is not None:
            golden = GoldenFolder.open(path.parent / GOLDEN, sha256=entry.golden_sha256)
            release = replace(release, golden=golden)
        return entry.model_copy(update={"extent": release.extent}), None

    def _add_comparison(self, entry: LedgerEntry, path: Path) -> LedgerEntry:
        """Return the entry with the service's comparison, if the submission has none.

        Raises MismatchUnconfirmed if the champion can't be downloaded now, which is not evidence
        against this version.
        """
        if self.terms.policy.incumbent is None or entry.compared_with is not None:
            return entry
        with as_mismatch(f"the submitted version {self.version.number}"):
            evidence = load_evidence(path, sha256=entry.evidence_sha256)
        comparison = compare_records(champion_recorded(self.model), evidence)
        return entry.model_copy(update={"incumbent": comparison})

    def _accept(self, entry: LedgerEntry) -> StepResult:
        model, number, champion = self.model, self.version.number, self.model.alias(CHAMPION)
        keys = ", ".join(key.label for key in self.trust.measurers if key.key_id in entry.signers)
        reason = f"handed in, signed by {keys}; it passes by the policy in force"
        if entry.incumbent is not None:
            compared = entry.incumbent.version or "none"
            reason += f", compared by the records of both with version {compared}"
        # The review step comes next, and makes a rejection final with its ledger entry.
        if self.terms.policy.review != "automatic" or reviews.rejects(
            self.version.tags, model.reviews.tag
        ):
            reason += ", and waits for review"
            model.write("passed", reason, version=number, previous=champion, about=entry)
            write_status(model, (number,))
            return StepResult("hand_in", "passed", number, reason)
        move_alias(
            model, model.entry("promoted", reason, version=number, previous=champion, about=entry)
        )
        return StepResult("hand_in", "promoted", number, reason)

    def _refuse(self, entry: LedgerEntry, problem: str) -> StepResult:
        model = self.model
        # The tag comes before the entry: a crash in between repeats the refusal instead of losing
        # it. It also makes a resubmission a new version.
        model.note(self.version, Tag.REFUSED, problem)
        return _record(model, "hand_in", "refused", entry, f"handed in, and refused: {problem}")


def _record(
    model: RegisteredModel,
    kind: Kind,
    outcome: Action,
    about: LedgerEntry,
    reason: str,
    comment: str | None = None,
) -> StepResult:
    """Write to the ledger and to the page of a version that it does not become champion."""
    model.write(outcome, reason, version=about.version, about=about, comment=comment)
    write_status(model, (about.version,))
    return StepResult(kind, outcome, about.version, reason)


# Reviews can veto but never waive: an approved version is examined like a new promotion. With
# `review: signed`, a tag can't approve; a rejection needs no signature.
def process_reviews(
    model: RegisteredModel, policy: Policy, *, trust: ReadTrust = no_trust
) -> Iterator[StepResult | Failed]:
    """Process the reviews of the waiting versions.

    Only the candidate is promoted. Other versions may be rejected; an approval of them is answered
    with the reason. A deleted version no longer waits; one that can't be read now does not block
    the others. `trust`: reads the trusted keys; without a trust, signed reviews do not count.
    Raises RegistryUnavailable; other errors are handled for each version.
    """
    history, candidate = model.history(), model.alias(CANDIDATE)
    review = _SubmissionReview(model, policy, trust, candidate)
    for waiting in history.waiting:
        try:
            results = review.process(waiting)
        except ResourceGone:
            reason = f"version {waiting.version} waited for review, and was deleted"
            yield _record(model, "review", "refused", waiting, reason)
        except RegistryUnavailable:  # the others can't be read either
            raise
        except GateError as error:
            yield Failed("review", error)
        else:
            yield from results


@dataclass(frozen=True)
class _SubmissionReview:
    """The context for judging all waiting versions."""

    model: RegisteredModel
    policy: Policy
    trust: ReadTrust
    candidate: str | None

    def process(self, waiting: LedgerEntry) -> list[StepResult]:
        """Process one waiting version."""
        assert waiting.version is not None
        model, tag = self.model, self.model.reviews.tag
        version = model.registry.version(model.name, waiting.version)
        comment = reviews.comment(version.tags)
        if reviews.rejects(version.tags, tag):
            return [self._reject(waiting, version)]
        if self.policy.review == "signed":
            return self._process_signed(waiting, version)
        if not reviews.approves(version.tags, tag):
            _answer(model, version, reviews.correction(version.tags, tag))
            return []
        reason = (
            f"version {version.number} passed and was approved in review{reviews.quoted(comment)}"
        )
        return [self._promote(waiting, version, reason, comment=comment)]

    def _process_signed(self, waiting: LedgerEntry, version: Version) -> list[StepResult]:
        model = self.model
        try:
            tally, decision = self._count_reviews(waiting, version)
        except (Untrusted, EvidenceError, DigestMismatch) as error:
            _answer(model, version, str(error))
            return []
        if tally.rejections:
            return [self._reject(waiting, version, tally)]
        if not tally.is_approved or decision is None:
            _answer(model, version, self._missing_approvals(tally, version))
            return []
        names, comment = ", ".join(map(str, tally.approvals.values())), tally.comment
        reason = f"version {version.number} passed and was approved by {names}{_quoted(comment)}"
        keys = tuple(tally.approvals)
        return [
            self._promote(
                waiting, version, reason, comment=comment, approved=decision, approvers=keys
            )
        ]

    def _reject(
        self, waiting: LedgerEntry, version: Version, tally: ReviewTally | None = None
    ) -> StepResult:
        """Reject a version because of a signed statement (`tally`) or a tag.

        After a rejection by tag, a statement may name the reviewer; an invalid or unreadable
        statement does not block the rejection.
        """
        comment = reviews.comment(version.tags)
        reason = f"a reviewer rejected version {version.number}{reviews.quoted(comment)}"
        if tally is None and self.policy.review == "signed":
            with contextlib.suppress(GateError):
                tally, _ = self._count_reviews(waiting, version)
        if tally is not None and tally.rejections:
            names, comment = ", ".join(map(str, tally.rejections.values())), tally.comment
            reason = f"version {version.number} was rejected by {names}{_quoted(comment)}"
        return _record(self.model, "review", "rejected", waiting, reason, comment)

    def _promote(
        self,
        waiting: LedgerEntry,
        version: Version,
        reason: str,
        *,
        comment: str | None,
        approved: Digest | None = None,
        approvers: tuple[str, ...] = (),
    ) -> StepResult:
        """Promote an approved version, or record why that is impossible.

        `approved`: the digest of the decision that reviewers signed.
        """
        model, number = self.model, version.number
        problem = self._problem(number, approved=approved)
        if problem is not None:
            reason = f"approved, but not promoted: {problem}"
            # The tag comes before the entry; it makes a resubmission a new version.
            model.note(version, Tag.REFUSED, reason)
            return _record(model, "review", "refused", waiting, reason, comment)
        entry = model.entry(
            "promoted", reason, version=number, previous=model.alias(CHAMPION), about=waiting,
            comment=comment, approvers=approvers,
        )  # fmt: skip
        move_alias(model, entry)
        return StepResult("review", "promoted", number, reason)

    def _count_reviews(
        self, waiting: LedgerEntry, version: Version
    ) -> tuple[ReviewTally, Digest | None]:
        """Return the tally of the review statements, and the digest of their decision, if any.

        Raises Untrusted if no reviewer is trusted; EvidenceError, DigestMismatch and Untrusted if
        the files of the version can't be read; PolicyError if the trust can't be read now;
        RegistryError, StorageError.
        """
        trust = self.trust()
        if trust is None:
            raise Untrusted(
                "nothing can be approved: the policy says review: signed, and the service knows "
                "no trusted reviewer. Start it with --trust FILE."
            )
        closed = self.model.history().last_decision_before(waiting)
        counter = ReviewCounter(
            trust=trust,
            registries=self.model.identities(),
            measurers=frozenset((*waiting.signers, *waiting.measured_by)),
            closed_at=None if closed is None else closed.at,
            now=datetime.now(UTC),
        )
        model, tags = self.model, version.tags
        if waiting.sha256 is None or not counter.names_a_reviewer(tags):
            return counter.count(tags, None), None
        subject = ReviewSubmission.read(model.registry, model.name, version.number).subject
        if subject.sha256 != waiting.sha256:
            raise DigestMismatch(
                f"the decision of this version names {subject.sha256}, and {waiting.sha256} "
                "passed: it was exchanged, and nothing can be approved. Hand the file in again."
            )
        return counter.count(tags, subject), subject.decision

    def _missing_approvals(self, tally: ReviewTally, version: Version) -> str | None:
        """Return what an approval still needs; None if no reviewer has acted yet."""
        tags, tag = version.tags, self.model.reviews.tag
        if not reviews.has_review(tags, tag) and reviews.correction(tags, tag) is None:
            return None
        name, number = shlex.quote(self.model.key), version.number
        return f"{tally}. A tag approves nothing here: gate approve {name} {number} --key KEY"

    def _problem(self, number: str, *, approved: Digest | None = None) -> str | None:
        """Return why an approved version is not promoted, or None.

        `approved`: the digest of the decision that reviewers signed.
        """
        model, policy, candidate = self.model, self.policy, self.candidate
        history = model.history()
        if number != candidate:
            candidate_text = f"version {candidate} is" if candidate else "no version is"
            remedy = "approve that, or hand this one in again" if candidate else "hand it in again"
            return f"{candidate_text} the candidate now: {remedy}"
        champion = model.alias(CHAMPION)
        if policy.incumbent is not None and champion != number:
            compared = comparison_in(history.standing(number))
            problem = outdated(compared, champion, history)
            if problem is not None:
                return problem
        terms = Terms.now(policy, self.trust, approved=approved)
        return examine(model, number, history=history, terms=terms).problem


def _answer(model: RegisteredModel, version: Version, text: str | None) -> None:
    """Answer a review that has no effect; a failure to answer is only logged."""
    if text is None:
        return
    try:
        answer(model, version, text)
    except RegistryError as error:
        _log.warning("could not answer the review of version %s: %s", version.number, error)


def _quoted(comment: str | None) -> str:
    return f': "{comment}"' if comment else ""
