"""A plan: one check cut into units, for whoever measures them and wherever."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Literal, Self

from gate.errors import DataError, DigestMismatch, EvidenceError, PolicyError
from gate.front_door import Reference
from gate.parity.case import Case
from gate.parity.sample_pass import SamplePass
from gate.parity.units.unit import Unit
from gate.parity.workload import Workload
from gate.policy.policy import Policy
from gate.scale.assignment import Assignment
from gate.storage.digest import Digest
from gate.storage.record import Count, Record, Sha256


class PlannedUnit(Record):
    """A fixed range of whole batches, and what its samples hold."""

    start: Count
    stop: Count
    samples_sha256: Sha256
    labels_sha256: Sha256 | None
    """Of their labels; None: there are none."""


class MeasuringPlan(Record):
    """What is measured, in which units. Unit 0 is the lead: it carries the noise floor by which all
    others are judged; whoever merges measures stability, probes and the search."""

    schema_version: Literal[1] = 1
    parity_gate: str
    """Version of the code that cut it; others measure with the same."""
    assignment: Assignment
    threads: Count
    """Of each worker."""
    units: tuple[PlannedUnit, ...]

    @classmethod
    def of(cls, case: Case, reference: Reference, workload: Workload, *, threads: int) -> Self:
        """Cut the case into at most `case.units` units beside the lead. Reads all samples once.

        Raises PolicyError where other processes can't open it, and what opening a pass raises.
        """
        _check(case.policy)
        assignment = Assignment.of(case, reference, workload)
        with SamplePass.open(case, noise=False) as sample_pass:
            units = []
            for unit in sample_pass.units:
                samples, labels = sample_pass.digests(unit)
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

    def unit(self, index: int) -> Unit:
        """One of them. Raises DataError where there is none of that number."""
        if not 0 <= index < len(self.units):
            raise DataError(
                f"the plan has no unit {index}: it has {len(self.units)}, from 0 on. Name one of "
                "them."
            )
        return Unit(index, self.units[index].start, self.units[index].stop)

    def case(self) -> Case:
        """Open what it names. Raises GateError, DigestMismatch where something is another one,
        EvidenceError where this is other code than cut it."""
        own = metadata.version("parity-gate")
        if own != self.parity_gate:
            raise EvidenceError(
                f"the plan was cut by parity-gate {self.parity_gate}, this is {own}. Measure all "
                "units with one version."
            )
        return self.assignment.case()

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
