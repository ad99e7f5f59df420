"""Plans and parts: units of a check as files."""

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
"""Number of leading bytes that contain the unit of a part."""


def named_unit(text: bytes) -> int | None:
    """Return the unit that a possibly damaged part names, or None."""
    match = re.search(rb'"unit":\s*(\d+)', text[:_HEADER])
    return int(match[1]) if match else None


class UnitFile(Record):
    """The result of one unit: for unit 0 the state for the other units, else the comparisons."""

    schema_version: Literal[1] = 1
    unit: Count
    plan_sha256: Sha256
    lead_sha256: Sha256
    """Digest of the lead that was used."""
    body_sha256: Sha256
    """Digest of `body`, to detect damage."""
    body: UnitResult | FirstUnitState

    @classmethod
    def from_result(
        cls, plan: MeasurementPlan, lead: FirstUnitState, body: UnitResult | FirstUnitState
    ) -> Self:
        """Return the file of a unit; for unit 0, `body` is `lead`."""
        return cls(
            unit=body.index if isinstance(body, UnitResult) else 0,
            plan_sha256=plan.digest(),
            lead_sha256=lead.digest(),
            body_sha256=body.digest(),
            body=body,
        )

    @classmethod
    def open(cls, path: Path, *, plan: MeasurementPlan) -> Self:
        """Read and verify a part. Raises EvidenceError with file and unit if it is truncated,
        damaged, or belongs to another plan."""
        try:
            endless = stat.S_ISCHR(path.stat().st_mode)
            text = b"" if endless else path.read_bytes()
        except OSError as error:
            raise EvidenceError(
                f"cannot read {path}: {error.strerror}. Name an output of gate measure."
            ) from error
        if b'"parity_gate"' in text[:_HEADER]:
            raise EvidenceError(f"{path} is a plan. Name it before the parts, and once.")
        try:
            part = cls.from_json(text)
        except EvidenceError as error:
            number = named_unit(text)
            unit = "" if number is None else f" (unit {number})"
            raise EvidenceError(f"{path}{unit} is not a complete part: {error}") from error
        part._verify(path, plan)
        return part

    def _verify(self, path: Path, plan: MeasurementPlan) -> None:
        label = f"{path} (unit {self.unit})"
        if self.plan_sha256 != plan.digest():
            raise EvidenceError(
                f"{label} belongs to another plan: {self.plan_sha256.short}, this one is "
                f"{plan.digest().short}. Measure the unit with this plan."
            )
        digest = self.body.digest()
        if isinstance(self.body, FirstUnitState):
            is_intact, fits = digest == self.body_sha256 == self.lead_sha256, self.unit == 0
        else:
            is_intact = digest == self.body_sha256
            fits = self.unit > 0 and self.body.unit == plan.unit(self.unit)
        if not is_intact:
            raise EvidenceError(f"{label} is damaged: its digest differs. Measure it again.")
        if not fits:
            raise EvidenceError(f"{label} has the data of another unit. Measure it again.")
        plan.verify(self.unit, samples=self.body.samples_sha256, labels=self.body.labels_sha256)

    @property
    def lead(self) -> FirstUnitState:
        """The values from unit 0. Raises EvidenceError for any other unit."""
        if isinstance(self.body, FirstUnitState):
            return self.body
        raise EvidenceError(f"unit {self.unit} is not the lead. Name the part of unit 0.")

    @property
    def part(self) -> UnitResult:
        """The comparisons of a unit. Raises EvidenceError for unit 0."""
        if isinstance(self.body, UnitResult):
            return self.body
        raise EvidenceError("unit 0 has only the lead. Also name the parts of the other units.")


class PlannedUnit(Record):
    """A fixed range of whole batches, with the digests of samples and labels."""

    start: Count
    stop: Count
    samples_sha256: Sha256
    labels_sha256: Sha256 | None
    """Digest of the labels, if any."""


class MeasurementPlan(Record):
    """A measurement, divided into units.

    Unit 0 is the lead: it measures the noise floor for all other units. The process that merges the
    parts measures stability, probes and the input search.
    """

    schema_version: Literal[1] = 1
    parity_gate: str
    """The version that made the plan; units must be measured with the same version."""
    assignment: JobSpec
    threads: Count
    """Threads of each worker."""
    units: tuple[PlannedUnit, ...]

    @classmethod
    def from_job(
        cls, job: MeasurementJob, reference: Reference, workload: EvaluationData, *, threads: int
    ) -> Self:
        """Split the job into at most `workload.units` units in addition to the lead.

        Reads all samples once. Raises PolicyError if other processes can't open the job, and the
        exceptions of `MeasurementRun.open`.
        """
        _check(job.policy)
        assignment = JobSpec.from_job(job, reference, workload)
        with MeasurementRun.open(job, noise=False) as run:
            digests = ((unit, *run.digests(unit)) for unit in run.units)
            units = tuple(
                PlannedUnit(
                    start=unit.start,
                    stop=unit.stop,
                    samples_sha256=samples,
                    labels_sha256=labels,
                )
                for unit, samples, labels in digests
            )
        return cls(
            parity_gate=metadata.version("parity-gate"),
            assignment=assignment,
            threads=threads,
            units=units,
        )

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a plan. Raises EvidenceError with the file name."""
        try:
            return cls.load(path)
        except EvidenceError as error:
            problem = str(error).partition(". ")[0]
            raise EvidenceError(
                f"{path} is not a complete plan of this version: {problem}. Run gate plan again."
            ) from error

    def unit(self, index: int) -> WorkUnit:
        """Return a unit. Raises DataError for an invalid number."""
        if not 0 <= index < len(self.units):
            raise DataError(
                f"the plan has no unit {index}. Expected a number from 0 to {len(self.units) - 1}."
            )
        return WorkUnit(index, self.units[index].start, self.units[index].stop)

    def job(self) -> MeasurementJob:
        """Open the planned job. Raises GateError; DigestMismatch for changed files, EvidenceError
        for another version of the gate."""
        version = metadata.version("parity-gate")
        if version != self.parity_gate:
            raise EvidenceError(
                f"the plan was made by parity-gate {self.parity_gate}, but this is {version}. Use "
                "the same version for all units."
            )
        return self.assignment.to_job()

    def verify(self, index: int, *, samples: Digest | None, labels: Digest | None) -> None:
        """Raise DigestMismatch unless the unit's samples and labels are the planned ones."""
        planned = self.units[index]
        for name, actual, expected in (
            ("samples", samples, planned.samples_sha256),
            ("labels", labels, planned.labels_sha256),
        ):
            if actual != expected:
                unit = self.unit(index)
                raise DigestMismatch(
                    f"unit {index} (samples {unit.start} to {unit.stop - 1}): the {name} are "
                    f"{_short(actual)}, {_short(expected)} was planned. The data set was shuffled "
                    "or changed: use the planned one, or plan again."
                )


def _short(digest: Digest | None) -> str:
    return "none" if digest is None else digest.short


def _check(policy: Policy) -> None:
    sections = {"preprocessing": policy.preprocessing, "incumbent": policy.incumbent}
    unsupported = [name for name, section in sections.items() if section is not None]
    if unsupported:
        raise PolicyError(
            f"the policy requires {' and '.join(unsupported)}, which units can't measure. Use gate "
            "check --jobs, or plan with a policy without these sections."
        )


def measure_unit(plan: MeasurementPlan, index: int, *, lead: Path | None = None) -> UnitFile:
    """Measure unit `index`.

    `lead`: the part of unit 0; None: measure the lead again first, including float64. Raises
    DataError, EvidenceError, DigestMismatch and the exceptions of opening the planned files.
    """
    unit = plan.unit(index)
    measured = None if lead is None else UnitFile.open(lead, plan=plan).lead
    with opened(plan.job(), threads=plan.threads, noise=measured is None) as run:
        state = measured or _lead(run)
        plan.verify(0, samples=state.samples_sha256, labels=state.labels_sha256)
        if index == 0:
            return UnitFile.from_result(plan, state, state)
        if measured is not None:
            run.use_first_unit(measured)
        part = run.measure_for(unit)
    plan.verify(index, samples=part.samples_sha256, labels=part.labels_sha256)
    return UnitFile.from_result(plan, state, part)


def _lead(run: MeasurementRun) -> FirstUnitState:
    run.measure_first(lambda _count: None)
    run.reference.meter.batches.drain()
    for runtime in run.runtimes:
        runtime.meter.batches.drain()
    return run.first_unit_state()


@dataclass
class MergedParts:
    """A `gate.measure.work_units.UnitWorkers` that reads parts from files, in unit order."""

    plan: MeasurementPlan
    paths: dict[int, Path]
    """By unit."""
    _lead: FirstUnitState | None = None
    _units: Sequence[WorkUnit] = field(default=())

    @classmethod
    def from_files(cls, plan: MeasurementPlan, paths: Sequence[Path]) -> MergedParts:
        """Verify all files.

        Raises EvidenceError if one is damaged, missing, belongs to another plan, or has the same
        unit as another one with different content.
        """
        by_unit: dict[int, Path] = {}
        contents: dict[int, Digest] = {}
        for path in paths:
            part = UnitFile.open(path, plan=plan)
            content = _untimed(part)
            if contents.setdefault(part.unit, content) != content:
                raise EvidenceError(
                    f"unit {part.unit} has two parts with different numbers: {by_unit[part.unit]} "
                    f"and {path}. Find out which machine is wrong, and merge only the other part."
                )
            by_unit.setdefault(part.unit, path)
        missing = sorted(set(range(1, len(plan.units))) - set(by_unit))
        if missing:
            shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            raise EvidenceError(
                f"{len(missing)} of {len(plan.units)} units are missing: {shown}. Measure them: "
                f"gate measure PLAN --unit {missing[0]} -o part-{missing[0]}.json"
            )
        return cls(plan, by_unit)

    @property
    def record(self) -> WorkerPoolRecord:
        """The value of `UnitWorkers.record`: the engine "parts" and the number of files."""
        return WorkerPoolRecord(engine="parts", workers=max(len(self.paths), 1))

    def begin(self, lead: FirstUnitState, units: Sequence[WorkUnit]) -> FirstUnitState:
        """Start as `UnitWorkers.begin` does.

        Raises DigestMismatch if unit 0 does not have the planned samples and labels, EvidenceError
        if the units are not those of the plan, or the part of unit 0 has another lead although the
        environment must be the same.
        """
        if list(units) != [self.plan.unit(index) for index in range(1, len(self.plan.units))]:
            raise EvidenceError(
                f"the samples give {len(units) + 1} units, but {len(self.plan.units)} were "
                "planned. Use the planned data set, or plan again."
            )
        self.plan.verify(0, samples=lead.samples_sha256, labels=lead.labels_sha256)
        self._lead, self._units = lead, units
        if 0 in self.paths:
            self._lead = UnitFile.open(self.paths[0], plan=self.plan).lead
        policy = self.plan.assignment.policy
        if self._lead != lead and policy.precision == "exact" and policy.environments == "same":
            raise EvidenceError(
                f"unit 0 has other numbers here than in {self.paths[0]}: machine or libraries "
                "differ. Measure and merge in the same environment, or set environments: any in "
                "the policy."
            )
        return self._lead

    def parts(self) -> Iterator[UnitResult]:
        """Yield the results from the files, in the order of units."""
        assert self._lead is not None
        expected = self._lead.digest()
        for unit in self._units:
            file = UnitFile.open(self.paths[unit.index], plan=self.plan)
            if file.lead_sha256 != expected:
                raise EvidenceError(
                    f"unit {unit.index} ({self.paths[unit.index]}) used another noise floor than "
                    "that of unit 0. Measure it with --lead and the part of unit 0, and merge that "
                    "part, too."
                )
            yield file.part


def _untimed(part: UnitFile) -> Digest:
    """Return the digest of a part without times and environment, which may differ by machine."""
    plain = part.body.to_plain()
    plain.pop("reference_seconds", None)
    plain.pop("environment", None)
    for runtime in plain.get("runtimes", {}).values():
        runtime.pop("seconds", None)
    return Digest.from_json(plain)
