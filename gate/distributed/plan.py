"""`gate plan`, `measure`, `merge`: units as files."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal, Self

from gate.distributed.worker import JobSpec, opened
from gate.errors import DataError, DigestMismatch, EvidenceError, PolicyError
from gate.measure.job import EvaluationData, MeasurementJob, Reference
from gate.measure.run import MeasurementRun
from gate.measure.work_units import FirstUnitState, UnitResult, WorkUnit
from gate.policy.policy import Policy
from gate.records.evidence import WorkerPoolRecord
from gate.storage.digest import Digest
from gate.storage.record import Count, Record, Sha256

_HEADER = 200
"""Bytes in which a part says its unit."""


def named_unit(text: bytes) -> int | None:
    """Return the unit that a part claims to be, damaged or not; None: it has no number."""
    named = re.search(rb'"unit":\s*(\d+)', text[:_HEADER])
    return int(named[1]) if named else None


class UnitFile(Record):
    """The result of one unit: for unit 0 the values that all others need, else the comparisons."""

    schema_version: Literal[1] = 1
    unit: Count
    plan_sha256: Sha256
    lead_sha256: Sha256
    """Of the lead by which it was judged."""
    body_sha256: Sha256
    """Of what follows, so that one flipped bit is noticed."""
    body: UnitResult | FirstUnitState

    @classmethod
    def of_lead(cls, plan: MeasurementPlan, lead: FirstUnitState) -> Self:
        """Unit 0."""
        return cls(
            unit=0,
            plan_sha256=plan.digest(),
            lead_sha256=lead.digest(),
            body_sha256=lead.digest(),
            body=lead,
        )

    @classmethod
    def of_unit(cls, plan: MeasurementPlan, lead: FirstUnitState, part: UnitResult) -> Self:
        """Any other."""
        return cls(
            unit=part.index,
            plan_sha256=plan.digest(),
            lead_sha256=lead.digest(),
            body_sha256=part.digest(),
            body=part,
        )

    @classmethod
    def open(cls, path: Path, *, plan: MeasurementPlan) -> Self:
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

    def _verify(self, path: Path, plan: MeasurementPlan) -> None:
        what = f"{path} (unit {self.unit})"
        if self.plan_sha256 != plan.digest():
            raise EvidenceError(
                f"{what} belongs to another plan: {self.plan_sha256.short}, this one is "
                f"{plan.digest().short}. Measure the unit by this plan."
            )
        digest = self.body.digest()
        if isinstance(self.body, FirstUnitState):
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
    def lead(self) -> FirstUnitState:
        """The values from unit 0. Raises EvidenceError for any other unit."""
        if isinstance(self.body, FirstUnitState):
            return self.body
        raise EvidenceError(f"unit {self.unit} is not the lead. Give the part of unit 0.")

    @property
    def part(self) -> UnitResult:
        """The comparisons of a unit. Raises EvidenceError for unit 0."""
        if isinstance(self.body, UnitResult):
            return self.body
        raise EvidenceError("unit 0 holds the lead alone. Give the parts of the others, too.")


class PlannedUnit(Record):
    """A fixed range of whole batches, and what its samples hold."""

    start: Count
    stop: Count
    samples_sha256: Sha256
    labels_sha256: Sha256 | None
    """Of their labels; None: there are none."""


class MeasurementPlan(Record):
    """A measurement, divided into units.

    Unit 0 is the lead: it carries the noise floor by which all others are judged. The process that
    merges the parts measures stability, probes and the search.
    """

    schema_version: Literal[1] = 1
    parity_gate: str
    """Version of the code that cut it; others measure with the same."""
    assignment: JobSpec
    threads: Count
    """Of each worker."""
    units: tuple[PlannedUnit, ...]

    @classmethod
    def of(
        cls, case: MeasurementJob, reference: Reference, workload: EvaluationData, *, threads: int
    ) -> Self:
        """Cut the case into at most `case.units` units in addition to the lead.

        Reads all samples once. Raises PolicyError where other processes can't open it, and any
        error of opening a pass.
        """
        _check(case.policy)
        assignment = JobSpec.from_job(case, reference, workload)
        with MeasurementRun.open(case, noise=False) as run:
            units = []
            for unit in run.units:
                samples, labels = run.digests(unit)
                units.append(
                    PlannedUnit(
                        start=unit.start,
                        stop=unit.stop,
                        samples_sha256=samples,
                        labels_sha256=labels,
                    )
                )
        return cls(
            parity_gate=metadata.version("parity-gate"),
            assignment=assignment,
            threads=threads,
            units=tuple(units),
        )

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read one. Raises EvidenceError, which names the file."""
        try:
            return cls.load(path)
        except EvidenceError as error:
            problem = str(error).partition(". ")[0]
            raise EvidenceError(
                f"{path} is no whole plan of this version: {problem}. Plan again: gate plan."
            ) from error

    def unit(self, index: int) -> WorkUnit:
        """One of them. Raises DataError where there is none of that number."""
        if not 0 <= index < len(self.units):
            raise DataError(
                f"the plan has no unit {index}: it has {len(self.units)}, from 0 on. Name one of "
                "them."
            )
        return WorkUnit(index, self.units[index].start, self.units[index].stop)

    def case(self) -> MeasurementJob:
        """Open what it names. Raises GateError, DigestMismatch where something is another one,
        EvidenceError where this is other code than cut it."""
        own = metadata.version("parity-gate")
        if own != self.parity_gate:
            raise EvidenceError(
                f"the plan was cut by parity-gate {self.parity_gate}, this is {own}. Measure all "
                "units with one version."
            )
        return self.assignment.to_job()

    def verify(self, index: int, *, samples: Digest | None, labels: Digest | None) -> None:
        """Raise DigestMismatch unless the unit's samples and labels are those that were planned."""
        planned = self.units[index]
        for what, given, wanted in (
            ("samples", samples, planned.samples_sha256),
            ("labels", labels, planned.labels_sha256),
        ):
            if given != wanted:
                unit = self.unit(index)
                raise DigestMismatch(
                    f"unit {index} (samples {unit.start} to {unit.stop - 1}): the {what} are "
                    f"{_short(given)}, {_short(wanted)} was planned. The data set was shuffled or "
                    "changed: give the planned one, or plan again."
                )


def _short(digest: Digest | None) -> str:
    return "none" if digest is None else digest.short


def _check(policy: Policy) -> None:
    wanted = {"preprocessing": policy.preprocessing, "incumbent": policy.incumbent}
    beyond = [name for name, section in wanted.items() if section is not None]
    if beyond:
        raise PolicyError(
            f"the policy asks for {' and '.join(beyond)}, which no unit of samples gives. Use gate "
            "check --jobs, or plan by a policy without them."
        )


def measure_unit(plan: MeasurementPlan, index: int, *, lead: Path | None = None) -> UnitFile:
    """Measure unit `index`.

    `lead`: the part of unit 0; without it the lead is measured again first, which takes a float64
    forward of its samples. Raises DataError, EvidenceError, DigestMismatch and any error that
    opening the planned files raises.
    """
    unit = plan.unit(index)
    given = None if lead is None else UnitFile.open(lead, plan=plan).lead
    with opened(plan.case(), threads=plan.threads, noise=given is None) as run:
        state = given or _lead(run)
        plan.verify(0, samples=state.samples_sha256, labels=state.labels_sha256)
        if index == 0:
            return UnitFile.of_lead(plan, state)
        if given is not None:
            run.judge_by(given)
        part = run.measure_for(unit)
    plan.verify(index, samples=part.samples_sha256, labels=part.labels_sha256)
    return UnitFile.of_unit(plan, state, part)


def _lead(run: MeasurementRun) -> FirstUnitState:
    run.measure_first(lambda _count: None)
    run.reference.meter.drain()
    for runtime in run.runtimes:
        runtime.meter.drain()
    return run.first_unit_state()


@dataclass
class MergedParts:
    """A `gate.measure.work_units.UnitWorkers` of files, read one by one in the order of units."""

    plan: MeasurementPlan
    paths: dict[int, Path]
    """By unit."""
    _lead: FirstUnitState | None = None
    _units: Sequence[WorkUnit] = field(default=())

    @classmethod
    def of(cls, plan: MeasurementPlan, paths: Sequence[Path]) -> MergedParts:
        """Verify all files.

        Raises EvidenceError where one is damaged, of another plan, doubled with other content, or
        missing.
        """
        found: dict[int, Path] = {}
        contents: dict[int, Digest] = {}
        for path in paths:
            part = UnitFile.open(path, plan=plan)
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
    def record(self) -> WorkerPoolRecord:
        """The value of `UnitWorkers.record`: the engine "parts" and the number of files."""
        return WorkerPoolRecord(engine="parts", workers=max(len(self.paths), 1))

    def begin(self, lead: FirstUnitState, units: Sequence[WorkUnit]) -> FirstUnitState:
        """Start as `UnitWorkers.begin` does.

        Raises DigestMismatch where unit 0 has not the samples and labels that were planned,
        EvidenceError where the units are not those of the plan, or the part of unit 0 holds another
        lead in an environment that must be the same.
        """
        if list(units) != [self.plan.unit(index) for index in range(1, len(self.plan.units))]:
            raise EvidenceError(
                f"there are other samples here than were planned: {len(units) + 1} units, planned "
                f"are {len(self.plan.units)}. Give the planned data set, or plan again."
            )
        self.plan.verify(0, samples=lead.samples_sha256, labels=lead.labels_sha256)
        self._lead, self._units = lead, units
        if 0 in self.paths:
            self._lead = UnitFile.open(self.paths[0], plan=self.plan).lead
        policy = self.plan.assignment.policy
        if self._lead != lead and policy.precision == "exact" and policy.environments == "same":
            raise EvidenceError(
                f"unit 0 gave other numbers here than in {self.paths[0]}: not the same machine or "
                "libraries. Measure and merge in one environment, or say environments: any in the "
                "policy."
            )
        return self._lead

    def parts(self) -> Iterator[UnitResult]:
        """Yield the results of the units in their order, from the files."""
        assert self._lead is not None
        wanted = self._lead.digest()
        for unit in self._units:
            file = UnitFile.open(self.paths[unit.index], plan=self.plan)
            if file.lead_sha256 != wanted:
                raise EvidenceError(
                    f"unit {unit.index} ({self.paths[unit.index]}) was judged by another noise "
                    "floor than unit 0 gives. Measure it with --lead, the part of unit 0, and "
                    "merge that part, too."
                )
            yield file.part


def _untimed(part: UnitFile) -> Digest:
    """Return the digest of a part without times and environment, which may differ by machine."""
    plain = part.body.to_plain()
    plain.pop("reference_seconds", None)
    plain.pop("environment", None)
    for runtime in plain.get("runtimes", {}).values():
        runtime.pop("seconds", None)
    return Digest.of_json(plain)
