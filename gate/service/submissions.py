"""Review: a reviewer's word on the candidate, given as a tag in the registry's pages, or signed.

Approval can veto, never waive: what is approved is examined as if it were promoted now. With
`review: signed` a tag approves nothing; a rejection needs no signature.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from gate.errors import (
    DigestMismatch,
    EvidenceError,
    GateError,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
    Untrusted,
)
from gate.ledger.entry import Action, LedgerEntry, now
from gate.policy.policy import Policy
from gate.registry.ballot import Ballot, Poll
from gate.registry.champion import move
from gate.registry.comparison.compared import comparison_in, outdated
from gate.registry.may_serve import examine
from gate.registry.page import reviewer
from gate.registry.page.version_page import answer, refresh
from gate.registry.port import CANDIDATE, CHAMPION, Tag, Version
from gate.registry.registered_model import RegisteredModel
from gate.registry.signed_review import Submission
from gate.registry.terms import ReadTrust, Terms, nobody
from gate.service.port import Failed, Taken
from gate.storage.digest import Digest

_TAG_LIMIT = 4000
"""Characters of a tag's value; databases other than SQLite refuse more than 5000."""
_log = logging.getLogger(__name__)


def review(
    model: RegisteredModel, policy: Policy, *, trust: ReadTrust = nobody
) -> Iterator[Taken | Failed]:
    """Act on what reviewers said of the versions that wait for it. Only the candidate is promoted;
    the others may be rejected, and an approval of them is answered with the reason. A version that
    is gone waits no longer; one of which nothing can be said now stands in no other's way.

    `trust`: whose signatures count; where it is nobody's, nothing that needs one is approved.

    Raises RegistryUnavailable; what else can't be read, as the versions are.
    """
    history, candidate = model.history(), model.alias(CANDIDATE)
    look = _Look(model, policy, trust, candidate)
    for waiting in history.waiting:
        try:
            taken = look.at(waiting)
        except ResourceGone:
            reason = f"version {waiting.version} waited for review, and was deleted"
            yield _close(model, waiting, "refused", reason=reason)
        except RegistryUnavailable:  # of the others neither
            raise
        except GateError as error:
            yield Failed("review", error)
        else:
            yield from taken


@dataclass(frozen=True)
class _Look:
    """What all versions that wait are judged by."""

    model: RegisteredModel
    policy: Policy
    trust: ReadTrust
    candidate: str | None

    def at(self, waiting: LedgerEntry) -> list[Taken]:
        """What is done about one of them."""
        assert waiting.version is not None
        model, tag = self.model, self.model.reviews.tag
        version = model.registry.version(model.name, waiting.version)
        comment = reviewer.comment(version.tags)
        if reviewer.rejects(version.tags, tag):
            return [self._rejected(waiting, version)]
        if self.policy.review == "signed":
            return self._signed(waiting, version)
        if not reviewer.approves(version.tags, tag):
            _answer(model, version, reviewer.correction(version.tags, tag))
            return []
        problem = self._problem(version.number)
        if problem is not None:
            return [_not_promoted(model, waiting, problem, comment=comment)]
        reason = (
            f"version {version.number} passed and was approved in review{reviewer.quoted(comment)}"
        )
        return [_promoted(model, waiting, reason, comment=comment)]

    def _signed(self, waiting: LedgerEntry, version: Version) -> list[Taken]:
        model = self.model
        try:
            ballot, decision = self._counted(waiting, version)
        except (Untrusted, EvidenceError, DigestMismatch) as error:
            _answer(model, version, str(error))
            return []
        if ballot.rejections:
            return [self._rejected(waiting, version, ballot)]
        if not ballot.is_approved or decision is None:
            _answer(model, version, self._what_is_missing(ballot, version))
            return []
        names, comment = ", ".join(map(str, ballot.approvals.values())), ballot.comment
        problem = self._problem(version.number, approved=decision)
        if problem is not None:
            return [_not_promoted(model, waiting, problem, comment=comment)]
        reason = f"version {version.number} passed and was approved by {names}{_quoted(comment)}"
        keys = tuple(ballot.approvals)
        return [_promoted(model, waiting, reason, comment=comment, approvers=keys)]

    def _rejected(
        self, waiting: LedgerEntry, version: Version, ballot: Ballot | None = None
    ) -> Taken:
        """By a statement (`ballot`), or by a tag, beside which there may be one that says by whom;
        but nothing that is wrong with that, and no weather, keeps a no from being heard."""
        comment = reviewer.comment(version.tags)
        reason = f"a reviewer rejected version {version.number}{reviewer.quoted(comment)}"
        if ballot is None and self.policy.review == "signed":
            with contextlib.suppress(GateError):
                ballot, _ = self._counted(waiting, version)
        if ballot is not None and ballot.rejections:
            names, comment = ", ".join(map(str, ballot.rejections.values())), ballot.comment
            reason = f"version {version.number} was rejected by {names}{_quoted(comment)}"
        return _close(self.model, waiting, "rejected", reason=reason, comment=comment)

    def _counted(self, waiting: LedgerEntry, version: Version) -> tuple[Ballot, Digest | None]:
        """What the statements come to, and the decision that they are on; None: there are none.

        Raises Untrusted where nobody's word can count here; EvidenceError, DigestMismatch and
        Untrusted where what is beside the version can't be read; PolicyError where the trust can't
        be read now; the RegistryErrors, StorageError.
        """
        trust = self.trust()
        if trust is None:
            raise Untrusted(
                "nothing can be approved: the policy says review: signed, and the service knows "
                "nobody whose signature counts. Start it with --trust FILE."
            )
        closed = self.model.history().closed_before(waiting)
        poll = Poll(
            trust=trust,
            registries=self.model.identities(),
            measurers=frozenset((*waiting.signers, *waiting.measured_by)),
            closed_at=None if closed is None else closed.at,
            now=datetime.now(UTC),
        )
        model, tags = self.model, version.tags
        if waiting.sha256 is None or not poll.names_a_reviewer(tags):
            return poll.count(tags, None), None
        of = Submission.read(model.registry, model.name, version.number).of
        if of.sha256 != waiting.sha256:
            raise DigestMismatch(
                f"the decision beside this version is on {of.sha256}, and {waiting.sha256} passed: "
                "it was exchanged, and nothing can be approved. Hand the file in again."
            )
        return poll.count(tags, of), of.decision

    def _what_is_missing(self, ballot: Ballot, version: Version) -> str | None:
        """None where no reviewer said anything yet."""
        tags, tag = version.tags, self.model.reviews.tag
        if not reviewer.speaks(tags, tag) and reviewer.correction(tags, tag) is None:
            return None
        name, number = shlex.quote(self.model.name), version.number
        return f"{ballot}. A tag approves nothing here: gate approve {name} {number} --key KEY"

    def _problem(self, number: str, *, approved: Digest | None = None) -> str | None:
        """Why an approved version is not promoted; None where it is. `approved`: the decision of
        which reviewers signed that."""
        model, policy, candidate = self.model, self.policy, self.candidate
        history = model.history()
        if number != candidate:
            other = f"version {candidate} is" if candidate else "no version is"
            instead = "approve that, or hand this one in again" if candidate else "hand it in again"
            return f"{other} the candidate now: {instead}"
        champion = model.alias(CHAMPION)
        if policy.incumbent is not None and champion != number:
            compared = comparison_in(history.standing(number))
            problem = outdated(compared, champion, history)
            if problem is not None:
                return problem
        terms = Terms.now(policy, self.trust, approved=approved)
        return examine(model, number, history=history, terms=terms).problem


def _answer(model: RegisteredModel, version: Version, text: str | None) -> None:
    """Answer a word that does nothing; that it can't be answered now keeps nobody waiting."""
    if text is None:
        return
    try:
        answer(model, version, text)
    except RegistryError as error:
        _log.warning("the reviewer of version %s is not answered: %s", version.number, error)


def _close(
    model: RegisteredModel,
    waiting: LedgerEntry,
    outcome: Action,
    *,
    reason: str,
    comment: str | None = None,
) -> Taken:
    """The version waits no longer, and does not serve."""
    version = waiting.version
    model.write(outcome, reason, version=version, about=waiting, comment=comment)
    refresh(model, (version,))
    return Taken("review", outcome, version, reason)


def _not_promoted(
    model: RegisteredModel, waiting: LedgerEntry, problem: str, *, comment: str | None
) -> Taken:
    reason = f"approved, but not promoted: {problem}"
    # Before the line: what is handed in again becomes another version by it.
    assert waiting.version is not None
    value = f"{now()}: {reason}"[:_TAG_LIMIT]
    model.registry.set_tag(model.name, waiting.version, key=Tag.REFUSED, value=value)
    return _close(model, waiting, "refused", reason=reason, comment=comment)


def _promoted(
    model: RegisteredModel,
    waiting: LedgerEntry,
    reason: str,
    *,
    comment: str | None,
    approvers: tuple[str, ...] = (),
) -> Taken:
    number, champion = waiting.version, model.alias(CHAMPION)
    entry = model.entry(
        "promoted", reason, version=number, previous=champion, about=waiting, comment=comment,
        approvers=approvers,
    )  # fmt: skip
    move(model, entry)
    return Taken("review", "promoted", number, reason)


def _quoted(comment: str | None) -> str:
    return f': "{comment}"' if comment else ""
