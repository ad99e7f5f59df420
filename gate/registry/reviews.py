"""Read and count reviews, by tag or signed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self

from gate.decision.decide import Decision
from gate.errors import DigestMismatch, EvidenceError, RegistryError, Untrusted
from gate.ledger.entry import plain
from gate.policy.policy import Policy
from gate.policy.sections import REJECTED, ReviewTag
from gate.records.layout import DECISION, DECISION_STATEMENT, EVIDENCE_STATEMENT, RECORDS
from gate.registry.interface import Registry, Tag, Version
from gate.registry.version_files import load_decision, load_statements
from gate.signing.keys import PublicKey, SigningKey
from gate.signing.predicates import Approval, Reviewable, Word, trusted_reviewers
from gate.signing.statement import ENVELOPE_LIMIT, SignedStatement
from gate.signing.trust import Trust, parse_time
from gate.signing.verification import StatementPair, summary_in
from gate.storage.files import temporary_folder
from gate.storage.safe_text import make_printable, shorten
from gate.storage.untrusted_files import RECORD_LIMIT

# `gate.policy.sections` defines the review tag and its two words. Case and surrounding space do not
# matter. Only the word of approval approves. The word of rejection also counts in the gate's own
# tag, and in any spelling.
COMMENT_LIMIT = 500
"""Maximum number of characters of a comment."""

STATEMENT_TAG = "gate.review_statement."
"""Prefix of the tags with signed reviews; the short ID of the reviewer's key follows."""

_MAX_QUOTED = 80
"""Maximum number of quoted characters of an invalid review word."""


@dataclass(frozen=True)
class ReviewSettings:
    """How the versions of a model are reviewed."""

    tag: ReviewTag = field(default_factory=ReviewTag)
    signed: bool = False
    """Whether approvals must be signed. Rejections need no signature."""

    @classmethod
    def from_policy(cls, policy: Policy) -> Self:
        """Create the settings that a policy specifies."""
        return cls(policy.review_tag, policy.review == "signed")

    def waits(self, model: str, version: str) -> str:
        """Return the text that a version waits for review, and how to review it."""
        if self.signed:
            return (
                f"waits for review: gate approve {model} {version} --key KEY, or gate reject with "
                "the same arguments"
            )
        tag = self.tag
        return f"waits for review: set the tag {tag.name} to {tag.approved} or {tag.rejected}"


def rejects(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Return whether a reviewer rejects, with the configured tag or the gate's own."""
    return any(tag.may_reject(key) and tag.is_no(value) for key, value in tags.items())


def approves(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Return whether a reviewer approves and no tag rejects."""
    return any(map(tag.is_yes, _values(tags, tag))) and not rejects(tags, tag)


def has_review(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Return whether there is a review, as a tag or as a signed statement."""
    signed = any(key.startswith(STATEMENT_TAG) for key in tags)
    return signed or approves(tags, tag) or rejects(tags, tag)


def correction(tags: Mapping[str, str], tag: ReviewTag) -> str | None:
    """Return the answer to a reviewer who wrote an invalid word or used the wrong tag.

    None if the tags contain a valid word, or no word.
    """
    if approves(tags, tag) or rejects(tags, tag):
        return None
    write = f"write {tag.approved} or {tag.rejected}"
    for value in _values(tags, tag):
        return f'{write}; seen: "{shortened(value, _MAX_QUOTED)}"'
    for key, value in tags.items():
        if tag.may_reject(key):
            word = shortened(value, _MAX_QUOTED)
            return f'{write} into the tag {tag.name}; seen: "{word}" in {make_printable(key)}'
    return None


def comment(tags: Mapping[str, str]) -> str | None:
    """Return the reviewer's comment as one printable line of limited length; None if empty."""
    return shortened(tags.get(Tag.REVIEW_COMMENT, ""), COMMENT_LIMIT) or None


def quoted(text: str | None) -> str:
    """Return a comment as the end of a reason in the ledger; empty without a comment."""
    return f': "{text}" ({Tag.REVIEW_COMMENT}; MLflow does not say who)' if text else ""


def shortened(text: str, limit: int) -> str:
    """Return untrusted text printable, on one line, and at most `limit` characters long."""
    return shorten(make_printable(text), limit)


def _values(tags: Mapping[str, str], tag: ReviewTag) -> Iterator[str]:
    return (value for key, value in tags.items() if tag.is_named(key))


# A reviewer needs the right to edit the registered model, but no access to the ledger or the
# service. The data shown to the reviewer is not trusted, because every writer to the registry can
# change it; the service compares it with the ledger.
STATEMENT_LIMIT = 5000
"""Maximum number of characters in a tag's value; databases other than SQLite refuse more."""

_MAX_BYTES = {
    f"{RECORDS}/{DECISION}": RECORD_LIMIT,
    f"{RECORDS}/{EVIDENCE_STATEMENT}": ENVELOPE_LIMIT,
    f"{RECORDS}/{DECISION_STATEMENT}": ENVELOPE_LIMIT,
}


@dataclass(frozen=True)
class ReviewSubmission:
    """A version to review, with its decision and the signed statements."""

    subject: Reviewable
    decision: Decision
    statements: StatementPair | None
    """None if evidence and decision are not signed."""
    version: Version

    @classmethod
    def read(cls, registry: Registry, model: str, number: str) -> Self:
        """Read a version's decision and statements, without the ONNX file.

        Raises EvidenceError and DigestMismatch for a missing or malformed decision, Untrusted for
        malformed statements, the RegistryErrors, StorageError.
        """
        version = registry.version(model, number)
        with temporary_folder() as folder:
            registry.fetch(model, number, folder, most_bytes=_MAX_BYTES)
            path = folder / "model.onnx"
            decision, statements = load_decision(path), load_statements(path)
        subject = Reviewable(
            registry=plain(registry.identity),
            model=model,
            version=number,
            sha256=decision.subject_sha256,
            decision=decision.digest(),
        )
        return cls(subject, decision, statements, version)

    def check(self) -> None:
        """Verify that the decision is a PASS and that version, decision and statement are about the
        same file. Raises EvidenceError, DigestMismatch, Untrusted."""
        subject, label = self.subject, f"version {self.subject.version} of {self.subject.model}"
        if not self.decision.passed:
            raise EvidenceError(
                f"the decision on {label} is {self.decision.verdict}, but only a PASS can be "
                "approved. Measure and submit the file again, or reject it with gate reject."
            )
        named = self.version.tags.get(Tag.SHA256)
        if named is not None and named != subject.sha256.hex:
            raise DigestMismatch(
                f"the decision of {label} is about {subject.sha256}, but its tag {Tag.SHA256} is "
                f"{named[:64]}. One of them was replaced. Submit the file again."
            )
        if self.statements is None:
            return
        summary = summary_in(self.statements.decision)
        if (summary.decision.sha256, summary.model) != (subject.decision.hex, subject.sha256):
            raise Untrusted(
                f"the statement of {label} is about decision {summary.decision.sha256} on "
                f"{summary.model}, but the version has decision {subject.decision} on "
                f"{subject.sha256}. One of them was replaced. Submit the file again."
            )

    def review(
        self, registry: Registry, word: Word, key: SigningKey, *, comment: str | None = None
    ) -> int:
        """Sign a review and write it to the version; return its length in characters.

        A rejection is also written to the gate's own tag, which needs no signature. Raises
        EvidenceError, DigestMismatch and Untrusted if the version can't be approved, KeyUnusable,
        and the RegistryErrors, also if the review is too long or was not stored.
        """
        if word == "approved":
            self.check()
        if comment is not None and len(comment) > COMMENT_LIMIT:
            raise EvidenceError(
                f"the comment has {len(comment)} characters, at most {COMMENT_LIMIT} are allowed. "
                "Shorten it."
            )
        text = self.subject.sign(word, key, at=datetime.now(UTC), comment=comment).compact
        if len(text) > STATEMENT_LIMIT:
            raise RegistryError(
                f"the signed review has {len(text)} characters, a tag holds at most "
                f"{STATEMENT_LIMIT}. Shorten the comment."
            )
        model, number = self.subject.model, self.subject.version
        name = f"{STATEMENT_TAG}{key.public.short}"
        registry.set_tag(model, number, key=name, value=text)
        if registry.version(model, number).tags.get(name) != text:
            raise RegistryError(
                f"the tag {name} of version {number} of {model} was not stored as written. Retry."
            )
        if word == "rejected":
            registry.set_tag(model, number, key=Tag.REVIEW, value=REJECTED)
        return len(text)


def statements_in(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the signed reviews in the tags, by the short key ID in the tag's name."""
    return {
        key.removeprefix(STATEMENT_TAG): tags[key]
        for key in sorted(tags)
        if key.startswith(STATEMENT_TAG)
    }


# Invariant: a stricter trust or a deleted statement never turns a waiting version into an approved
# one.
_LEDGER_RESOLUTION = timedelta(seconds=1)
"""Resolution of times in the ledger. An approval signed within the same second counts as older."""

_MAX_NAMED = 3
"""Maximum number of unknown keys that are named, because users can add any number."""

_KEY_LENGTH = 12


@dataclass(frozen=True)
class Review:
    """A review by one key."""

    key: PublicKey
    comment: str | None

    def __str__(self) -> str:
        return f"{shortened(self.key.name, 80)} ({self.key.short})"


@dataclass(frozen=True)
class ReviewTally:
    """The reviews that count, one for each key, and why the others do not count."""

    needed: int
    approvals: Mapping[str, Review]
    """Approvals by key ID."""
    rejections: Mapping[str, Review]
    problems: tuple[str, ...]

    @property
    def is_approved(self) -> bool:
        """Return whether enough reviewers approve and none rejects."""
        return len(self.approvals) >= self.needed and not self.rejections

    @property
    def comment(self) -> str | None:
        """Return the comments for the ledger, with the reviewers' names if several commented."""
        reviews = [*self.rejections.values()] or [*self.approvals.values()]
        commented = [review for review in reviews if review.comment]
        if len(commented) == 1:
            return shortened(commented[0].comment or "", COMMENT_LIMIT) or None
        texts = (f"{review.key.name}: {review.comment}" for review in commented)
        return shortened("; ".join(texts), COMMENT_LIMIT) or None

    def __str__(self) -> str:
        """Return the approvals that count and the problems as a text for reviewers."""
        names = ", ".join(map(str, self.approvals.values()))
        counted = f"{len(self.approvals)} of {self.needed} signed approvals"
        return "; ".join([f"{counted} ({names})" if names else counted, *self.problems])


@dataclass(frozen=True, kw_only=True)
class ReviewCounter:
    """The rules by which review statements are counted."""

    trust: Trust
    registries: frozenset[str]
    """All addresses of the registry."""
    measurers: frozenset[str]
    """IDs of the keys that signed the verdict."""
    closed_at: str | None
    """Time of the version's last refusal, promotion or replacement, or None. Older approvals do not
    count, because each approval is used once."""
    now: datetime

    def names_a_reviewer(self, tags: Mapping[str, str]) -> bool:
        """Return whether a statement names the key of a trusted reviewer."""
        return any(short in self._reviewers for short in statements_in(tags))

    def count(self, tags: Mapping[str, str], subject: Reviewable | None) -> ReviewTally:
        """Count the statements in the tags that are about exactly the version `subject`.

        If `subject` is None, nothing counts. Never raises: an unreadable tag is a problem.
        """
        approvals: dict[str, Review] = {}
        rejections: dict[str, Review] = {}
        problems = []
        for short, text in statements_in(tags).items():
            if subject is None or short not in self._reviewers:
                continue
            try:
                approval, keys = self._read(text, subject)
            except Untrusted as error:
                problems.append(f"the statement of the key {short} does not count: {error}")
                continue
            for key in keys:
                review = Review(key, approval.comment)
                reason = self._refusal(key, approval)
                if approval.word == "rejected":
                    rejections[key.key_id] = review
                elif reason is None:
                    approvals[key.key_id] = review
                else:
                    problems.append(f"the approval by {review} does not count: {reason}")
        needed = self.trust.reviewers_threshold
        return ReviewTally(needed, approvals, rejections, (*problems, *self._unknown(tags)))

    @property
    def _reviewers(self) -> frozenset[str]:
        return frozenset(key.short for key in self.trust.reviewers)

    def _read(self, text: str, subject: Reviewable) -> tuple[Approval, tuple[PublicKey, ...]]:
        if len(text) > STATEMENT_LIMIT:
            raise Untrusted(f"it has {len(text)} characters, at most {STATEMENT_LIMIT} are allowed")
        signed = SignedStatement.from_bytes(text.encode("utf-8", "replace"), label="it")
        approval = subject.verify(signed, registries=self.registries)
        return approval, trusted_reviewers(signed, approval, trust=self.trust, now=self.now)

    def _refusal(self, key: PublicKey, approval: Approval) -> str | None:
        if key.key_id in self.measurers and not self.trust.measurer_may_approve:
            return "this key also signed the verdict (trust.measurer_may_approve)"
        reviewed_at, closed = parse_time(approval.reviewed_at), parse_time(self.closed_at)
        if self.closed_at is None:
            return None
        if reviewed_at is None or closed is None or reviewed_at < closed + _LEDGER_RESOLUTION:
            return (
                f"it is older than the last change of the version at {self.closed_at}: sign again"
            )
        return None

    def _unknown(self, tags: Mapping[str, str]) -> list[str]:
        unknown = [short for short in statements_in(tags) if short not in self._reviewers]
        if not unknown:
            return []
        names = ", ".join(shortened(short, _KEY_LENGTH) for short in unknown[:_MAX_NAMED])
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        return [f"not among the trusted reviewers (trust.reviewers): the key {names}{more}"]
