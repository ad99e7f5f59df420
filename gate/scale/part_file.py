"""What one unit gave, as a file: with the plan and the lead that it belongs to, and a digest."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Literal, Protocol, Self

from gate.errors import EvidenceError
from gate.parity.units.part import LeadState, UnitPart
from gate.parity.units.unit import Unit
from gate.storage.digest import Digest
from gate.storage.record import Count, Record, Sha256

_HEADER = 200
"""Bytes in which a part says its unit."""


def named_unit(text: bytes) -> int | None:
    """The unit that a part says it is, torn or not; None: it says none."""
    named = re.search(rb'"unit":\s*(\d+)', text[:_HEADER])
    return int(named[1]) if named else None


class UnitTable(Protocol):
    """What parts belong to: a plan."""

    def digest(self) -> Digest:
        """Of all that decides their numbers."""

    def unit(self, index: int) -> Unit:
        """One of them."""

    def verify(self, index: int, *, samples: Digest | None, labels: Digest | None) -> None:
        """Raise DigestMismatch unless the unit's samples and labels are these."""


class PartFile(Record):
    """Of unit 0 it holds what the lead gives to others, of another one what was compared."""

    schema_version: Literal[1] = 1
    unit: Count
    plan_sha256: Sha256
    lead_sha256: Sha256
    """Of the lead by which it was judged."""
    body_sha256: Sha256
    """Of what follows, so that one flipped bit is noticed."""
    body: UnitPart | LeadState

    @classmethod
    def of_lead(cls, plan: UnitTable, lead: LeadState) -> Self:
        """Unit 0."""
        return cls(
            unit=0,
            plan_sha256=plan.digest(),
            lead_sha256=lead.digest(),
            body_sha256=lead.digest(),
            body=lead,
        )

    @classmethod
    def of_unit(cls, plan: UnitTable, lead: LeadState, part: UnitPart) -> Self:
        """Any other."""
        return cls(
            unit=part.index,
            plan_sha256=plan.digest(),
            lead_sha256=lead.digest(),
            body_sha256=part.digest(),
            body=part,
        )

    @classmethod
    def open(cls, path: Path, *, plan: UnitTable) -> Self:
        """Read and verify one. Raises EvidenceError, which names file and unit, where it is torn,
        damaged, or of another plan."""
        try:
            endless = stat.S_ISCHR(path.stat().st_mode)
            text = b"" if endless else path.read_bytes()
        except OSError as error:
            raise EvidenceError(
                f"cannot read {path}: {error.strerror}. Name a file that gate measure wrote."
            ) from error
        if b'"parity_gate"' in text[:_HEADER]:
            raise EvidenceError(f"{path} is a plan. Name it before the parts, and once.")
        try:
            part = cls.from_json(text)
        except EvidenceError as error:
            named = named_unit(text)
            unit = "" if named is None else f" (unit {named})"
            raise EvidenceError(f"{path}{unit} is no whole part: {error}") from error
        part._verify(path, plan)
        return part

    def _verify(self, path: Path, plan: UnitTable) -> None:
        what = f"{path} (unit {self.unit})"
        if self.plan_sha256 != plan.digest():
            raise EvidenceError(
                f"{what} belongs to another plan: {self.plan_sha256.short}, this one is "
                f"{plan.digest().short}. Measure the unit by this plan."
            )
        digest = self.body.digest()
        if isinstance(self.body, LeadState):
            whole, fits = digest == self.body_sha256 == self.lead_sha256, self.unit == 0
        else:
            whole = digest == self.body_sha256
            fits = self.unit > 0 and self.body.unit == plan.unit(self.unit)
        if not whole:
            raise EvidenceError(f"{what} was damaged: its digest is another. Measure it again.")
        if not fits:
            raise EvidenceError(f"{what} holds another unit than it says. Measure it again.")
        plan.verify(self.unit, samples=self.body.samples_sha256, labels=self.body.labels_sha256)

    @property
    def lead(self) -> LeadState:
        """Of unit 0. Raises EvidenceError of another one."""
        if isinstance(self.body, LeadState):
            return self.body
        raise EvidenceError(f"unit {self.unit} is not the lead. Give the part of unit 0.")

    @property
    def part(self) -> UnitPart:
        """Of any other. Raises EvidenceError of unit 0."""
        if isinstance(self.body, UnitPart):
            return self.body
        raise EvidenceError("unit 0 holds the lead alone. Give the parts of the others, too.")
