"""A crew of files: units that others measured by a plan, wherever and whenever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gate.errors import EvidenceError
from gate.parity.units.part import LeadState, UnitPart
from gate.parity.units.unit import Unit
from gate.records.crew import CrewRecord
from gate.scale.part_file import PartFile
from gate.scale.plan import MeasuringPlan
from gate.storage.digest import Digest


@dataclass
class MergedParts:
    """As `gate.parity.units.part.Crew`. Files are read one by one, in the order of units."""

    plan: MeasuringPlan
    paths: dict[int, Path]
    """By unit."""
    _lead: LeadState | None = None
    _units: Sequence[Unit] = field(default=())

    @classmethod
    def of(cls, plan: MeasuringPlan, paths: Sequence[Path]) -> MergedParts:
        """Verify all of them. Raises EvidenceError where one is damaged, foreign, doubled with
        other content, or missing."""
        found: dict[int, Path] = {}
        contents: dict[int, Digest] = {}
        for path in paths:
            part = PartFile.open(path, plan=plan)
            content = _untimed(part)
            if contents.setdefault(part.unit, content) != content:
                raise EvidenceError(
                    f"unit {part.unit} is there twice, with other numbers: {found[part.unit]} and "
                    f"{path}. Find out which machine is wrong, and merge one of them."
                )
            found.setdefault(part.unit, path)
        missing = sorted(set(range(1, len(plan.units))) - set(found))
        if missing:
            shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            raise EvidenceError(
                f"{len(missing)} of {len(plan.units)} units are missing: {shown}. Measure them: "
                f"gate measure PLAN --unit {missing[0]} -o part-{missing[0]}.json"
            )
        return cls(plan, found)

    @property
    def record(self) -> CrewRecord:
        """As `Crew.record`."""
        return CrewRecord(engine="parts", workers=max(len(self.paths), 1))

    def begin(self, lead: LeadState, units: Sequence[Unit]) -> LeadState:
        """As `Crew.begin`. Raises DigestMismatch where unit 0 has not the samples and labels that
        were planned, EvidenceError where the units are not those of the plan, or the part of unit 0
        holds another lead in an environment that must be the same."""
        if list(units) != [self.plan.unit(index) for index in range(1, len(self.plan.units))]:
            raise EvidenceError(
                f"there are other samples here than were planned: {len(units) + 1} units, planned "
                f"are {len(self.plan.units)}. Give the planned data set, or plan again."
            )
        self.plan.verify(0, samples=lead.samples_sha256, labels=lead.labels_sha256)
        self._lead, self._units = lead, units
        if 0 in self.paths:
            self._lead = PartFile.open(self.paths[0], plan=self.plan).lead
        policy = self.plan.assignment.policy
        if self._lead != lead and policy.precision == "exact" and policy.environments == "same":
            raise EvidenceError(
                f"unit 0 gave other numbers here than in {self.paths[0]}: not the same machine or "
                "libraries. Measure and merge in one environment, or say environments: any in the "
                "policy."
            )
        return self._lead

    def parts(self) -> Iterator[UnitPart]:
        """As `Crew.parts`."""
        assert self._lead is not None
        wanted = self._lead.digest()
        for unit in self._units:
            file = PartFile.open(self.paths[unit.index], plan=self.plan)
            if file.lead_sha256 != wanted:
                raise EvidenceError(
                    f"unit {unit.index} ({self.paths[unit.index]}) was judged by another noise "
                    "floor than unit 0 gives. Measure it with --lead, the part of unit 0, and "
                    "merge that part, too."
                )
            yield file.part


def _untimed(part: PartFile) -> Digest:
    """Of what must be the same whoever measures the unit: all but times."""
    plain = part.body.to_plain()
    plain.pop("reference_seconds", None)
    plain.pop("environment", None)
    for runtime in plain.get("runtimes", {}).values():
        runtime.pop("seconds", None)
    return Digest.of_json(plain)
