"""A signed review: the version as its reviewer sees it, and his statement in one of its tags.

A reviewer needs to edit the registered model, and neither the ledger nor the service. What he reads
here anybody may have written who may write to the registry: the service proves it by the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from gate.attestation.approval import Reviewable, Word
from gate.attestation.envelope import ENVELOPE_LIMIT
from gate.attestation.keys import SigningKey
from gate.attestation.statements import Statements, summary_in
from gate.decision.decision import Decision
from gate.errors import DigestMismatch, EvidenceError, RegistryError, Untrusted
from gate.ledger.addresses import plain
from gate.policy.review_tag import REJECTED
from gate.records.names import DECISION, DECISION_STATEMENT, EVIDENCE_STATEMENT
from gate.registry.page.reviewer import COMMENT_LIMIT, STATEMENT_TAG
from gate.registry.port import Registry, Tag, Version
from gate.registry.records import RECORDS, decision_beside, statements_beside
from gate.storage.foreign import RECORD_LIMIT
from gate.storage.temporary import temporary_folder

STATEMENT_LIMIT = 5000
"""Characters of a tag's value: databases other than SQLite refuse more."""
_MOST_BYTES = {
    f"{RECORDS}/{DECISION}": RECORD_LIMIT,
    f"{RECORDS}/{EVIDENCE_STATEMENT}": ENVELOPE_LIMIT,
    f"{RECORDS}/{DECISION_STATEMENT}": ENVELOPE_LIMIT,
}


@dataclass(frozen=True)
class Submission:
    """A version that a reviewer is to judge, with the decision on it and who vouches for that."""

    of: Reviewable
    decision: Decision
    statements: Statements | None
    """None: nobody signed."""
    version: Version

    @classmethod
    def read(cls, registry: Registry, model: str, number: str) -> Self:
        """Read a version and what is beside its file, without the file.

        Raises EvidenceError and DigestMismatch where there is no whole decision, Untrusted for
        statements that are none, the RegistryErrors, StorageError.
        """
        version = registry.version(model, number)
        with temporary_folder() as folder:
            registry.fetch(model, number, folder, most_bytes=_MOST_BYTES)
            beside = folder / "model.onnx"
            decision, statements = decision_beside(beside), statements_beside(beside)
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
        """Sign a word on it and put that on the version; gives how many characters it takes. A
        rejection is said by the gate's own tag as well, which needs no signature.

        Raises EvidenceError, DigestMismatch and Untrusted where an approval makes no sense,
        KeyUnusable, and the RegistryErrors, also where the word does not fit or does not stay.
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
    """What stands in the tags for signed reviews, by the short id of the key that each names."""
    return {
        key.removeprefix(STATEMENT_TAG): tags[key]
        for key in sorted(tags)
        if key.startswith(STATEMENT_TAG)
    }
