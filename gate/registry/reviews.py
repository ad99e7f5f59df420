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
from gate.signing.predicates import Approval, Reviewable, Word, signers_of
from gate.signing.statement import ENVELOPE_LIMIT, SignedStatement
from gate.signing.trust import Trust, time_of
from gate.signing.verification import StatementPair, summary_in
from gate.storage.files import temporary_folder
from gate.storage.safe_text import make_printable, shorten
from gate.storage.untrusted_files import RECORD_LIMIT

# Case and the space around do not matter. What is neither of the two words is no approval; what is
# the word of rejection in any spelling is a rejection, in the configured tag and in the gate's own.
# Which tag and which words: `gate.policy.sections`.
COMMENT_LIMIT = 500
"""Characters of a comment that are kept."""

STATEMENT_TAG = "gate.review_statement."
"""What the key of a tag with a signed review begins with; the short id of the reviewer's key
follows (`gate.registry.reviews`)."""

_QUOTED = 80
"""Largest number of characters of an invalid review word that are quoted."""


@dataclass(frozen=True)
class ReviewSettings:
    """How the versions of a model are reviewed."""

    tag: ReviewTag = field(default_factory=ReviewTag)
    signed: bool = False
    """Whether an approval has to be signed; a rejection never has to be."""

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Create the settings that a policy specifies."""
        return cls(policy.review_tag, policy.review == "signed")

    def waits(self, model: str, version: str) -> str:
        """That a version waits, and for what, for people."""
        if self.signed:
            return (
                f"waits for review: gate approve {model} {version} --key KEY, or gate reject "
                "likewise"
            )
        tag = self.tag
        return f"waits for review: set the tag {tag.name} to {tag.approved} or {tag.rejected}"


def rejects(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Return whether the reviewer rejects: by the configured tag, or by the gate's own."""
    return any(tag.may_reject(key) and tag.is_no(value) for key, value in tags.items())


def approves(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Return whether the reviewer approves, and no tag rejects."""
    return any(map(tag.is_yes, _values(tags, tag))) and not rejects(tags, tag)


def speaks(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Return whether there is a review, by tag or in a statement."""
    signed = any(key.startswith(STATEMENT_TAG) for key in tags)
    return signed or approves(tags, tag) or rejects(tags, tag)


def correction(tags: Mapping[str, str], tag: ReviewTag) -> str | None:
    """Return the answer to a reviewer who wrote an invalid review word or used another tag.

    None where the tags hold a valid word, or none.
    """
    if approves(tags, tag) or rejects(tags, tag):
        return None
    write = f"write {tag.approved} or {tag.rejected}"
    for value in _values(tags, tag):
        return f'{write}; seen: "{shortened(value, _QUOTED)}"'
    for key, value in tags.items():
        if tag.may_reject(key):
            word = shortened(value, _QUOTED)
            return f'{write} into the tag {tag.name}; seen: "{word}" in {make_printable(key)}'
    return None


def comment(tags: Mapping[str, str]) -> str | None:
    """Return the reviewer's comment on one line, without control characters and of limited length.

    None where it is empty.
    """
    return shortened(tags.get(Tag.REVIEW_COMMENT, ""), COMMENT_LIMIT) or None


def quoted(text: str | None) -> str:
    """A comment as the reason of a line ends with it; nothing where there is none."""
    return f': "{text}" ({Tag.REVIEW_COMMENT}; MLflow does not say who)' if text else ""


def shortened(text: str, limit: int) -> str:
    """Return untrusted text printable, on one line, and at most `limit` characters long."""
    return shorten(make_printable(text), limit)


def _values(tags: Mapping[str, str], tag: ReviewTag) -> Iterator[str]:
    return (value for key, value in tags.items() if tag.is_named(key))


# A reviewer needs the right to edit the registered model, and access to neither the ledger nor the
# service. The data shown here is not trusted, because every writer to the registry can change it:
# the service verifies it by the ledger.
STATEMENT_LIMIT = 5000
"""Characters of a tag's value: databases other than SQLite refuse more."""

_MOST_BYTES = {
    f"{RECORDS}/{DECISION}": RECORD_LIMIT,
    f"{RECORDS}/{EVIDENCE_STATEMENT}": ENVELOPE_LIMIT,
    f"{RECORDS}/{DECISION_STATEMENT}": ENVELOPE_LIMIT,
}


@dataclass(frozen=True)
class ReviewSubmission:
    """A version to review, with the decision on it and the signatures of that."""

    of: Reviewable
    decision: Decision
    statements: StatementPair | None
    """None: they are not signed."""
    version: Version

    @classmethod
    def read(cls, registry: Registry, model: str, number: str) -> Self:
        """Read a version's decision and statements, without the ONNX file.

        Raises EvidenceError and DigestMismatch where there is no whole decision, Untrusted for
        malformed statements, the RegistryErrors, StorageError.
        """
        version = registry.version(model, number)
        with temporary_folder() as folder:
            registry.fetch(model, number, folder, most_bytes=_MOST_BYTES)
            beside = folder / "model.onnx"
            decision, statements = load_decision(beside), load_statements(beside)
        of = Reviewable(
            registry=plain(registry.identity),
            model=model,
            version=number,
            sha256=decision.subject_sha256,
            decision=decision.digest(),
        )
        return cls(of, decision, statements, version)

    def check(self) -> None:
        """Prove that it can be approved: a PASS, and version, decision and statement
        are about one file. Raises EvidenceError, DigestMismatch, Untrusted."""
        of, what = self.of, f"version {self.of.version} of {self.of.model}"
        if not self.decision.passed:
            raise EvidenceError(
                f"the decision on {what} is {self.decision.verdict}, and only a PASS can be "
                "approved. Measure and hand in anew, or reject it: gate reject."
            )
        named = self.version.tags.get(Tag.SHA256)
        if named is not None and named != of.sha256.hex:
            raise DigestMismatch(
                f"the decision beside {what} is on {of.sha256}, its tag {Tag.SHA256} names "
                f"{named[:64]}. One of them was exchanged: hand it in anew."
            )
        if self.statements is None:
            return
        summary = summary_in(self.statements.decision)
        if (summary.decision.sha256, summary.model) != (of.decision.hex, of.sha256):
            raise Untrusted(
                f"the statement beside {what} is about decision {summary.decision.sha256} on "
                f"{summary.model}, the decision there is {of.decision} on {of.sha256}. One of them "
                "was exchanged: hand it in anew."
            )

    def review(
        self, registry: Registry, word: Word, key: SigningKey, *, comment: str | None = None
    ) -> int:
        """Sign a review and write it to the version; return its length in characters.

        A rejection is also written to the gate's own tag, which needs no signature. Raises
        EvidenceError, DigestMismatch and Untrusted where an approval is not possible, KeyUnusable,
        and the RegistryErrors, also where the review does not fit or was not stored.
        """
        if word == "approved":
            self.check()
        if comment is not None and len(comment) > COMMENT_LIMIT:
            raise EvidenceError(
                f"the comment has {len(comment)} characters, {COMMENT_LIMIT} are kept. Shorten it."
            )
        text = self.of.signed(word, key, at=datetime.now(UTC), comment=comment).compact
        if len(text) > STATEMENT_LIMIT:
            raise RegistryError(
                f"the signed review takes {len(text)} characters, a tag holds {STATEMENT_LIMIT}. "
                "Shorten the comment."
            )
        model, number = self.of.model, self.of.version
        name = f"{STATEMENT_TAG}{key.public.short}"
        registry.set_tag(model, number, key=name, value=text)
        if registry.version(model, number).tags.get(name) != text:
            raise RegistryError(
                f"the tag {name} of version {number} of {model} reads back otherwise than it was "
                "written. Repeat."
            )
        if word == "rejected":
            registry.set_tag(model, number, key=Tag.REVIEW, value=REJECTED)
        return len(text)


def statements_in(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the signed reviews in the tags, by the short ID of the key that each tag names."""
    return {
        key.removeprefix(STATEMENT_TAG): tags[key]
        for key in sorted(tags)
        if key.startswith(STATEMENT_TAG)
    }


# Law: what makes the trust stricter, or takes a statement away, never turns waiting into approved.
_LINES_IN_SECONDS = timedelta(seconds=1)
"""The ledger's lines have no smaller parts: what was signed within that second was before."""

_SHOWN = 3
"""Largest number of statements by unknown keys that are named: users can add any number."""

_KEY_LENGTH = 12


@dataclass(frozen=True)
class Review:
    """One reviewer's review that counts."""

    key: PublicKey
    comment: str | None

    def __str__(self) -> str:
        return f"{shortened(self.key.name, 80)} ({self.key.short})"


@dataclass(frozen=True)
class ReviewTally:
    """The counted reviews, one for each key, and why the others do not count."""

    needed: int
    approvals: Mapping[str, Review]
    """By the id of the key."""
    rejections: Mapping[str, Review]
    problems: tuple[str, ...]

    @property
    def is_approved(self) -> bool:
        """Return whether enough reviewers approve it, and none rejects it."""
        return len(self.approvals) >= self.needed and not self.rejections

    @property
    def comment(self) -> str | None:
        """Return the comments for the ledger, with the reviewers' names if several commented."""
        voices = [*self.rejections.values()] or [*self.approvals.values()]
        written = [voice for voice in voices if voice.comment]
        if len(written) == 1:
            return shortened(written[0].comment or "", COMMENT_LIMIT) or None
        texts = (f"{voice.key.name}: {voice.comment}" for voice in written)
        return shortened("; ".join(texts), COMMENT_LIMIT) or None

    def __str__(self) -> str:
        """Return the approvals that count and the problems, as a text for reviewers."""
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
    """When the version was refused, promoted or left before it waited now: each approval is used
    once."""
    now: datetime

    def names_a_reviewer(self, tags: Mapping[str, str]) -> bool:
        """Return whether there is anything to count."""
        return any(short in self._reviewers for short in statements_in(tags))

    def count(self, tags: Mapping[str, str], of: Reviewable | None) -> ReviewTally:
        """Count the statements in these tags that are on exactly this version.

        `of` is None: there is nothing to count. Never raises: a tag that can't be read is a problem
        in the tally.
        """
        approvals: dict[str, Review] = {}
        rejections: dict[str, Review] = {}
        problems = []
        for short, text in statements_in(tags).items():
            if of is None or short not in self._reviewers:
                continue
            try:
                approval, keys = self._read(text, of)
            except Untrusted as error:
                problems.append(f"the statement of the key {short} does not count: {error}")
                continue
            for key in keys:
                voice = Review(key, approval.comment)
                reason = self._refusal(key, approval)
                if approval.word == "rejected":
                    rejections[key.key_id] = voice
                elif reason is None:
                    approvals[key.key_id] = voice
                else:
                    problems.append(f"the approval by {voice} does not count: {reason}")
        needed = self.trust.reviewers_threshold
        return ReviewTally(needed, approvals, rejections, (*problems, *self._unknown(tags)))

    @property
    def _reviewers(self) -> frozenset[str]:
        return frozenset(key.short for key in self.trust.reviewers)

    def _read(self, text: str, of: Reviewable) -> tuple[Approval, tuple[PublicKey, ...]]:
        if len(text) > STATEMENT_LIMIT:
            raise Untrusted(f"it has {len(text)} characters, {STATEMENT_LIMIT} are read")
        signed = SignedStatement.from_bytes(text.encode("utf-8", "replace"), what="it")
        approval = of.verify(signed, registries=self.registries)
        return approval, signers_of(signed, approval, trust=self.trust, now=self.now)

    def _refusal(self, key: PublicKey, approval: Approval) -> str | None:
        if key.key_id in self.measurers and not self.trust.measurer_may_approve:
            return "this key vouches for the verdict itself (trust.measurer_may_approve)"
        made, closed = time_of(approval.reviewed_at), time_of(self.closed_at)
        if self.closed_at is None:
            return None
        if made is None or closed is None or made < closed + _LINES_IN_SECONDS:
            return f"it is older than what became of the version on {self.closed_at}: sign it anew"
        return None

    def _unknown(self, tags: Mapping[str, str]) -> list[str]:
        others = [short for short in statements_in(tags) if short not in self._reviewers]
        if not others:
            return []
        names = ", ".join(shortened(short, _KEY_LENGTH) for short in others[:_SHOWN])
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        return [f"not among the trusted reviewers (trust.reviewers): the key {names}{more}"]
