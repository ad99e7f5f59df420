"""The ballot: which reviewers' statements on a version count, by the service's own trust.

Law: what makes the trust stricter, or takes a statement away, never turns waiting into approved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from gate.attestation.approval import Approval, Reviewable, signers_of
from gate.attestation.envelope import SignedStatement
from gate.attestation.keys import PublicKey
from gate.attestation.trust import Trust, time_of
from gate.errors import Untrusted
from gate.registry.page.reviewer import COMMENT_LIMIT, shortened
from gate.registry.signed_review import STATEMENT_LIMIT, statements_in

_LINES_IN_SECONDS = timedelta(seconds=1)
"""The ledger's lines have no smaller parts: what was signed within that second was before."""
_SHOWN = 3
"""Statements of unknown keys that are named; anybody may put as many there as he likes."""
_KEY_LENGTH = 12


@dataclass(frozen=True)
class Voice:
    """One reviewer's word that counts."""

    key: PublicKey
    comment: str | None

    def __str__(self) -> str:
        return f"{shortened(self.key.name, 80)} ({self.key.short})"


@dataclass(frozen=True)
class Ballot:
    """What was counted: each key once, and why others do not count."""

    needed: int
    approvals: Mapping[str, Voice]
    """By the id of the key."""
    rejections: Mapping[str, Voice]
    problems: tuple[str, ...]

    @property
    def is_approved(self) -> bool:
        """Whether enough reviewers approve it, and none rejects it."""
        return len(self.approvals) >= self.needed and not self.rejections

    @property
    def comment(self) -> str | None:
        """What they wrote, with their names where several did; for the ledger."""
        voices = [*self.rejections.values()] or [*self.approvals.values()]
        written = [voice for voice in voices if voice.comment]
        if len(written) == 1:
            return shortened(written[0].comment or "", COMMENT_LIMIT) or None
        texts = (f"{voice.key.name}: {voice.comment}" for voice in written)
        return shortened("; ".join(texts), COMMENT_LIMIT) or None

    def __str__(self) -> str:
        """What is there, and what is not, for reviewers."""
        names = ", ".join(map(str, self.approvals.values()))
        counted = f"{len(self.approvals)} of {self.needed} signed approvals"
        return "; ".join([f"{counted} ({names})" if names else counted, *self.problems])


@dataclass(frozen=True, kw_only=True)
class Poll:
    """By what statements are counted."""

    trust: Trust
    registries: frozenset[str]
    """All addresses of the registry."""
    measurers: frozenset[str]
    """Ids of the keys that vouched for the verdict."""
    closed_at: str | None
    """When the version was refused, promoted or left before it waited now: each approval is used
    once."""
    now: datetime

    def names_a_reviewer(self, tags: Mapping[str, str]) -> bool:
        """Whether there is anything to count."""
        return any(short in self._reviewers for short in statements_in(tags))

    def count(self, tags: Mapping[str, str], of: Reviewable | None) -> Ballot:
        """Of the statements in these tags, those on exactly this version; None: there is nothing to
        count. Total: whatever the tags hold, it is counted or told of."""
        approvals: dict[str, Voice] = {}
        rejections: dict[str, Voice] = {}
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
                voice = Voice(key, approval.comment)
                reason = self._refusal(key, approval)
                if approval.word == "rejected":
                    rejections[key.key_id] = voice
                elif reason is None:
                    approvals[key.key_id] = voice
                else:
                    problems.append(f"the approval by {voice} does not count: {reason}")
        needed = self.trust.reviewers_threshold
        return Ballot(needed, approvals, rejections, (*problems, *self._unknown(tags)))

    @property
    def _reviewers(self) -> frozenset[str]:
        return frozenset(key.short for key in self.trust.reviewers)

    def _read(self, text: str, of: Reviewable) -> tuple[Approval, tuple[PublicKey, ...]]:
        if len(text) > STATEMENT_LIMIT:
            raise Untrusted(f"it has {len(text)} characters, {STATEMENT_LIMIT} are read")
        signed = SignedStatement.of(text.encode("utf-8", "replace"), what="it")
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
