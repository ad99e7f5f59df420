"""Trusted keys and their validity periods."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from gate.errors import Untrusted
from gate.signing.keys import PublicKey
from gate.signing.statement import SignedStatement
from gate.storage.record import Record, added_field
from gate.storage.yaml_section import has_section, load_section

SECTION = "trust"

MAX_CLOCK_SKEW = timedelta(minutes=5)
"""Maximum difference between the clocks of two machines."""

Role = Literal["measurers", "reviewers", "writers"]

KeyId = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""The full ID: an abbreviated one would revoke nothing."""

Threshold = Annotated[int, Field(ge=1, le=16)]


class TrustedKey(PublicKey):
    """A trusted key, with its validity period."""

    valid_from: str | None = None
    """ISO 8601. None: no start."""
    valid_until: str | None = None
    """ISO 8601. None: no end."""

    @model_validator(mode="after")
    def _is_valid_period(self) -> Self:
        begin, end = (parse_time(text) for text in (self.valid_from, self.valid_until))
        for text, time in ((self.valid_from, begin), (self.valid_until, end)):
            if text is not None and time is None:
                raise ValueError(f"'{text}' is not an ISO 8601 time, such as 2026-01-31T12:00:00Z")
        if begin is not None and end is not None and begin >= end:
            raise ValueError(f"valid_from {self.valid_from} is not before {self.valid_until}")
        return self

    def expiry_problem(self, at: datetime) -> str | None:
        """Return why the key is not valid at this time, or None."""
        begin, end = parse_time(self.valid_from), parse_time(self.valid_until)
        if begin is not None and at < begin:
            return f"is valid from {self.valid_from} on"
        if end is not None and at >= end:
            return f"was valid until {self.valid_until}"
        return None


class Trust(Record):
    """The trusted keys and the rules for their statements.

    It is the section `trust:` of a YAML file, or the whole file.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    schema_version: Literal[1] = 1
    measurers: Annotated[tuple[TrustedKey, ...], Field(min_length=1)]
    """Keys that may sign measurements and decisions."""
    reviewers: tuple[TrustedKey, ...] = ()
    """Keys that may approve, with `review: signed`."""
    writers: tuple[TrustedKey, ...] = ()
    """Keys that may write the ledger. Empty: ledger entries need no signatures."""
    threshold: Threshold = 1
    """Number of measurers that must sign each statement."""
    reviewers_threshold: Threshold = 1
    """Number of reviewers that must approve a version."""
    max_age_days: Annotated[float, Field(gt=0.0)] = 90.0
    """Maximum age of a statement."""
    revoked: tuple[KeyId, ...] = ()
    """IDs of keys that are not trusted, not even for earlier signatures."""
    measurer_may_approve: bool = False
    """Whether a reviewer may approve a measurement that is signed with the same key."""
    unsigned: Literal["refuse", "accept_existing"] = added_field("refuse")
    """Whether versions without a statement that were promoted earlier may continue to serve."""
    _origin: str | None = PrivateAttr(default=None)
    """Where the trust was read from, for messages. Not part of its content."""

    @model_validator(mode="after")
    def _has_enough_keys(self) -> Self:
        for role in get_args(Role):
            threshold = self._threshold(role)
            ids = [key.key_id for key in self._listed(role)]
            if len(set(ids)) < len(ids):
                raise ValueError(f"{role} lists a key twice")
            if ids and len(ids) < threshold:
                raise ValueError(f"{len(ids)} {role} are listed, their threshold is {threshold}")
        # Revoked keys may leave a threshold unmet: after the last key is revoked, no signature is
        # trusted.
        return self

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a YAML file that has a section `trust:` or is one. Raises PolicyError."""
        trust = load_section(cls, path, SECTION if has_section(path, SECTION) else None)
        return trust.read_from(str(path))

    def read_from(self, origin: str) -> Self:
        """Return a copy whose messages name this origin."""
        trust = self.model_copy()
        trust._origin = origin
        return trust

    @property
    def by(self) -> str:
        """Return the origin of the trust in the form that messages append to "trusted"."""
        return "" if self._origin is None else f" by {self._origin}"

    def keys(self, role: Role, *, at: datetime) -> tuple[TrustedKey, ...]:
        """Return the keys of a role that are valid at a time and not revoked."""
        return tuple(
            key
            for key in self._listed(role)
            if key.key_id not in self.revoked and key.expiry_problem(at) is None
        )

    def signers(
        self, signed: SignedStatement, *, role: Role, timestamp: str, now: datetime, label: str
    ) -> tuple[PublicKey, ...]:
        """Return the trusted keys that signed a statement, at least as many as the threshold.

        timestamp: the statement's own time. label: the name of the statement in messages. Raises
        Untrusted if there are fewer, or if the statement is too old or dated in the future.
        """
        signed_at = parse_time(timestamp)
        if signed_at is None:
            raise Untrusted(f"{label} was made at '{timestamp}', which is not an ISO 8601 time.")
        listed = signed.signers(self._listed(role))
        reasons = {key.key_id: self._refusal(key, signed_at, now) for key in listed}
        accepted = tuple(key for key in listed if reasons[key.key_id] is None)
        problems = [*self._age_problems(signed_at, now, label=label)]
        threshold = self._threshold(role)
        if not len(accepted) >= threshold:
            refusals = [reason for reason in reasons.values() if reason]
            causes = (*refusals, *self._signature_problems(signed, role))
            details = "".join(f"; {cause}" for cause in causes)
            # Do not suggest trusting a revoked or expired key.
            suggestion = "" if refusals else ", or trust its key: gate keys trust"
            problems.append(
                f"{label} is signed by {len(accepted)} of the keys that are trusted as "
                f"{role}{self.by}, expected {threshold}{details}. Have it signed by one of "
                f"them{suggestion}."
            )
        if problems:
            raise Untrusted(" ".join(problems))
        return accepted

    def refusal_of(self, key: PublicKey, role: Role, *, at: datetime) -> str | None:
        """Return why signatures of this key in a role are not trusted at a time, or None."""
        listed = (each for each in self._listed(role) if each.key_id == key.key_id)
        return self._refusal(next(listed, key), at, at)

    def _age_problems(self, signed_at: datetime, now: datetime, *, label: str) -> Iterator[str]:
        """Yield why a statement made at that time is not trusted now."""
        age = (now - signed_at) / timedelta(days=1)
        if not age <= self.max_age_days:
            yield (
                f"{label} is {age:.1f} days old, {self.max_age_days:g} are allowed "
                "(trust.max_age_days). Measure and sign again."
            )
        if not signed_at - now <= MAX_CLOCK_SKEW:
            yield f"{label} is dated in the future: {signed_at.isoformat()}. Correct the clocks."

    def _signature_problems(self, signed: SignedStatement, role: Role) -> Iterator[str]:
        """Yield messages on the envelope's keys that are not listed or whose signature is wrong."""
        verified = {key.key_id for key in signed.signers(self._listed(role))}
        names = {key.key_id: key.name for key in self._listed(role)}
        for key_id in signed.key_ids:
            short = key_id[:12]
            if key_id in names and key_id not in verified:
                yield f"the signature of {names[key_id]} ({short}) does not verify"
            elif key_id not in names and _is_id(key_id):
                yield f"the key {short} is not among them"

    def _refusal(self, key: PublicKey, signed_at: datetime, now: datetime) -> str | None:
        """Return why a signature of this key is not trusted, or None."""
        if not isinstance(key, TrustedKey):
            return f"{key.label} is not listed"
        if key.key_id in self.revoked:
            return f"{key.label} is revoked"
        expiry = key.expiry_problem(signed_at) or key.expiry_problem(now)
        return f"{key.label} {expiry}" if expiry else None

    def _threshold(self, role: Role) -> int:
        """Return how many keys must sign. A ledger entry has exactly one signature."""
        needed = {"measurers": self.threshold, "reviewers": self.reviewers_threshold}
        return needed.get(role, 1)

    def _listed(self, role: str) -> tuple[TrustedKey, ...]:
        listed: tuple[TrustedKey, ...] = getattr(self, role)
        return listed


def _is_id(text: str) -> bool:
    """Return whether the text has the form of a key ID: an envelope may contain any text."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def parse_time(text: str | None) -> datetime | None:
    """Parse an ISO 8601 time; UTC if it has no zone. None if it is not a time."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
