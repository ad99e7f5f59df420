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

CLOCKS_APART = timedelta(minutes=5)
"""How far the clocks of two machines may be apart."""

Role = Literal["measurers", "reviewers", "writers"]

KeyId = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""Whole: the first digits of one would revoke nothing."""

Threshold = Annotated[int, Field(ge=1, le=16)]


class TrustedKey(PublicKey):
    """A trusted key, with its validity period."""

    valid_from: str | None = None
    """ISO 8601; None: always was."""
    valid_until: str | None = None
    """None: until it is taken off, or revoked."""

    @model_validator(mode="after")
    def _has_times(self) -> Self:
        begin, end = (time_of(text) for text in (self.valid_from, self.valid_until))
        for text, time in ((self.valid_from, begin), (self.valid_until, end)):
            if text is not None and time is None:
                raise ValueError(f"'{text}' is no time; expected ISO 8601, as 2026-01-31T12:00:00Z")
        if begin is not None and end is not None and begin >= end:
            raise ValueError(f"valid_from {self.valid_from} is not before {self.valid_until}")
        return self

    def expiry_problem(self, at: datetime) -> str | None:
        """Return why it does not count at this moment, or None."""
        begin, end = time_of(self.valid_from), time_of(self.valid_until)
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
    """Keys that may write the ledger; none: its lines need no signatures."""
    threshold: Threshold = 1
    """How many measurers must have signed one statement."""
    reviewers_threshold: Threshold = 1
    """How many reviewers must have approved."""
    max_age_days: Annotated[float, Field(gt=0.0)] = 90.0
    """How old a statement may be."""
    revoked: tuple[KeyId, ...] = ()
    """IDs of keys that never count, not even for earlier signatures."""
    measurer_may_approve: bool = False
    """Whether a reviewer may approve a measurement that is signed with the same key."""
    unsigned: Literal["refuse", "accept_existing"] = added_field("refuse")
    """What becomes of versions without a statement: those that the ledger had promoted before may
    go on serving, or not."""
    _origin: str | None = PrivateAttr(default=None)
    """Where it was read; no part of what it says."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        for role in get_args(Role):
            threshold = self._threshold(role)
            ids = [key.key_id for key in self._listed(role)]
            if len(set(ids)) < len(ids):
                raise ValueError(f"{role} lists a key twice")
            if ids and len(ids) < threshold:
                raise ValueError(f"{len(ids)} {role} are listed, their threshold is {threshold}")
        # A threshold that revoked keys leave unmet is not a mistake: revoking the last key means
        # that no signature counts any more.
        return self

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a file with a `trust:` section, or with the trust itself. Raises PolicyError."""
        found = load_section(cls, path, SECTION if has_section(path, SECTION) else None)
        return found.read_from(str(path))

    def read_from(self, origin: str) -> Self:
        """The same, that names in messages where it was read."""
        found = self.model_copy()
        found._origin = origin
        return found

    @property
    def by(self) -> str:
        """Return the origin of the trust, as messages append it to the word "trusted"."""
        return "" if self._origin is None else f" by {self._origin}"

    def keys(self, role: Role, *, at: datetime) -> tuple[TrustedKey, ...]:
        """Those that count at a moment."""
        return tuple(
            key
            for key in self._listed(role)
            if key.key_id not in self.revoked and key.expiry_problem(at) is None
        )

    def signers(
        self, signed: SignedStatement, *, role: Role, made_at: str, now: datetime, what: str
    ) -> tuple[PublicKey, ...]:
        """Which trusted keys signed a statement that says it was made then, at least as many as the
        threshold. `what`: how messages call it.

        Raises Untrusted where there are fewer, or it is too old, or of the future.
        """
        made = time_of(made_at)
        if made is None:
            raise Untrusted(f"{what} was made at '{made_at}', which is no time (ISO 8601).")
        listed = signed.signers(self._listed(role))
        reasons = {key.key_id: self._refusal(key, made, now) for key in listed}
        good = tuple(key for key in listed if reasons[key.key_id] is None)
        problems = [*self._untimely(made, now, what=what)]
        threshold = self._threshold(role)
        if not len(good) >= threshold:
            refusals = [reason for reason in reasons.values() if reason]
            others = "".join(f"; {why}" for why in (*refusals, *self._unproven(signed, role)))
            # Revoked or expired keys are not proposed again.
            trusting = "" if refusals else ", or trust its key: gate keys trust"
            problems.append(
                f"{what} is signed by {len(good)} of the keys that are trusted as {role}{self.by}, "
                f"expected {threshold}{others}. Have it signed by one of them{trusting}."
            )
        if problems:
            raise Untrusted(" ".join(problems))
        return good

    def refusal_of(self, key: PublicKey, role: Role, *, at: datetime) -> str | None:
        """Return why nothing counts that this key signs in a role at a moment; None: it does."""
        listed = (each for each in self._listed(role) if each.key_id == key.key_id)
        return self._refusal(next(listed, key), at, at)

    def _untimely(self, made: datetime, now: datetime, *, what: str) -> Iterator[str]:
        """Return why a statement of that time does not count now."""
        age = (now - made) / timedelta(days=1)
        if not age <= self.max_age_days:
            yield (
                f"{what} is {age:.1f} days old, {self.max_age_days:g} are allowed "
                "(trust.max_age_days). Measure and sign anew."
            )
        if not made - now <= CLOCKS_APART:
            yield f"{what} is of the future: {made.isoformat()}. Set the clocks right."

    def _unproven(self, signed: SignedStatement, role: Role) -> Iterator[str]:
        """Which keys the envelope names that are not listed, or did not make the signature."""
        proven = {key.key_id for key in signed.signers(self._listed(role))}
        names = {key.key_id: key.name for key in self._listed(role)}
        for key_id in signed.key_ids:
            short = key_id[:12]
            if key_id in names and key_id not in proven:
                yield f"the signature of {names[key_id]} ({short}) does not verify"
            elif key_id not in names and _is_id(key_id):
                yield f"the key {short} is not among them"

    def _refusal(self, key: PublicKey, made: datetime, now: datetime) -> str | None:
        """Return why a key that is listed, and signed, does not count; None: it does."""
        if not isinstance(key, TrustedKey):
            return f"{key.label} is not listed"
        if key.key_id in self.revoked:
            return f"{key.label} is revoked"
        late = key.expiry_problem(made) or key.expiry_problem(now)
        return f"{key.label} {late}" if late else None

    def _threshold(self, role: Role) -> int:
        """Return how many keys must sign one statement. A ledger line has exactly one signature."""
        needed = {"measurers": self.threshold, "reviewers": self.reviewers_threshold}
        return needed.get(role, 1)

    def _listed(self, role: str) -> tuple[TrustedKey, ...]:
        listed: tuple[TrustedKey, ...] = getattr(self, role)
        return listed


def _is_id(text: str) -> bool:
    """Return whether it is a key's id: an envelope may name any text as one."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def time_of(text: str | None) -> datetime | None:
    """The time that an ISO 8601 text names, UTC without a zone; None where it is no time."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
