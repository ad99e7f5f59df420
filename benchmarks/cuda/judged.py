"""Decide on measurements, and derive bounds on CUDA from those of correct files.

    bound = max(the CPU's bound, margin × the largest value of a correct file)

The bound is rounded up to two digits. Correct files are those of the matrix with TF32 off and those
of the corpus, each in every runtime that ran on the device. `margin` is the ratio of the CPU's
bound to the largest value of a correct file on the CPU (benchmarks/README.md). If n values lie
below the largest, then with 95 % confidence less than 3 / n of such files lie above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.corpus.judge import numbers
from benchmarks.cuda.measuring import BY_NAME, Measurement, Status
from benchmarks.cuda.settings import BASELINE, Device, Role
from gate.decision.check_result import CheckResult
from gate.decision.decide import decide
from gate.policy.defaults import exact_bounds
from gate.policy.sections import Bounds, Instruments
from gate.records.evidence import RuntimeEvidence

MARGINS = {
    "noise_ratio": 1.2,  # 1.5 / 1.25
    "noise_peak": 2.3,  # 6 / 2.6
    "noise_diff": 4.6,  # 32 / 7.0
    "repeatability_ratio": 4.2,  # The CPU repeats itself exactly, so this is the next margin.
    "batch_invariance_ratio": 4.2,  # 16 / 3.8
    "probe_noise_ratio": 4.2,  # 32 / 7.7
}
PROBES = "probe_noise_ratio"
"""The metric with one bound for all runtimes, in `Instruments`."""
MIN_FILES = 200
"""Smallest number of correct files; the maximum of fewer is a poor estimate for further files."""


@dataclass(frozen=True)
class Cell:
    """One measurement in one runtime."""

    measured: Measurement
    role: Role
    status: Status
    reason: str
    runtime: RuntimeEvidence | None = None
    numbers: dict[str, float] | None = None
    """Worst value of each metric over the outputs and probes."""
    problems: tuple[CheckResult, ...] = ()
    """Failed checks of this runtime and of the file itself."""

    @property
    def name(self) -> str:
        """Return the name, such as `tf32/resnet50/ort-cuda`."""
        return f"{self.measured.setting.name}/{self.measured.subject}/{self.role}"

    @property
    def passes(self) -> bool:
        """Return True if the cell has numbers and no problem."""
        return self.numbers is not None and not self.problems

    @property
    def refused(self) -> bool:
        """Return True if the cell was judged and does not pass."""
        return not self.passes and self.status in ("measured", "refused")

    @property
    def faulty(self) -> bool:
        """Return True if the gate must refuse the file."""
        return is_faulty(self.measured)

    @property
    def tf32(self) -> bool:
        """Return True if TF32 was on."""
        return self.measured.setting.tf32

    @property
    def calibrates(self) -> bool:
        """Return True if bounds on CUDA must accept the cell."""
        ran = self.numbers is not None and all(
            problem.name != "provider" for problem in self.problems
        )
        return ran and not (self.faulty or self.tf32 or self.role == BASELINE)

    @property
    def explanation(self) -> str:
        """Return the labels of the failed checks, or the reason why nothing was measured."""
        return "; ".join(dict.fromkeys(problem.label for problem in self.problems)) or self.reason


def is_faulty(measured: Measurement) -> bool:
    """Return True for a fault of the corpus."""
    return measured.setting.in_corpus and BY_NAME[measured.subject].faulty


def judge(
    measured: Measurement, device: Device, proposed: tuple[Bounds, float] | None = None
) -> Iterator[Cell]:
    """Yield the cell of each runtime, judged by the default bounds or by proposed ones."""
    evidence, setting = measured.evidence, measured.setting
    if evidence is None:
        for role in setting.roles:
            yield Cell(measured, role, measured.status, measured.reason)
        return
    policy = setting.policy(device, proposed=proposed)
    problems = decide(policy, evidence, decided_at="1970-01-01T00:00:00+00:00").problems
    on_cpu = evidence.runtime(BASELINE)
    # A runtime may fail on a file that also fails on the CPU.
    fails_on_cpu = is_faulty(measured) and on_cpu is not None and on_cpu.failure is not None
    for role in setting.roles:
        name = device.name(role)
        runtime = evidence.runtime(name)
        reason = "no record of the runtime"
        if runtime is not None:
            reason = runtime.failure or runtime.absent_reason or ""
        runtime_evidence = evidence.model_copy(update={"runtimes": (runtime,) if runtime else ()})
        yield Cell(
            measured,
            role,
            "failed" if reason and not fails_on_cpu else "measured",
            reason,
            runtime,
            numbers(runtime_evidence) if runtime is not None and runtime.measured else None,
            tuple(problem for problem in problems if problem.runtime in (None, name)),
        )


@dataclass(frozen=True)
class Spread:
    """The distribution of one metric over the correct files."""

    metric: str
    values: int
    median: float
    high: float
    """The 95 % quantile."""
    most: float
    cell: str
    """The cell with the largest value."""
    default: float
    bound: float
    """The bound by the formula; infinite if a value is."""


@dataclass(frozen=True)
class Proposal:
    """Bounds by the formula, and their effect on all cells."""

    spreads: tuple[Spread, ...]
    objections: tuple[str, ...]
    """Reasons not to use these bounds; empty if there are none."""
    faults_passing: tuple[str, ...] = ()
    """Faults of the corpus that no runtime on CUDA rejects."""
    correct_refused: tuple[str, ...] = ()
    tf32_passing: tuple[str, ...] = ()

    @property
    def bounds(self) -> dict[str, float]:
        """Return the bound of each metric."""
        return {spread.metric: spread.bound for spread in self.spreads}


def propose(measured: Sequence[Measurement], device: Device) -> Proposal:
    """Return the proposed bounds for runtimes on CUDA."""
    cells = [cell for measurement in measured for cell in judge(measurement, device)]
    spreads = tuple(
        spread for metric in MARGINS if (spread := _measure_spread(metric, cells)) is not None
    )
    objections = ["dry run: the CPU stands in for CUDA"] if device.dry else []
    files = {cell.measured.subject for cell in cells if cell.calibrates}
    if len(files) < MIN_FILES:
        objections.append(f"{len(files)} correct files were measured; {MIN_FILES} are needed")
    infinite = [spread.metric for spread in spreads if not math.isfinite(spread.bound)]
    missing = [metric for metric in MARGINS if metric not in {spread.metric for spread in spreads}]
    objections += [f"{name} of a correct file is infinite" for name in infinite]
    objections += [f"{name} was not measured" for name in missing]
    if infinite or missing:
        return Proposal(spreads, tuple(objections))
    bounds = {spread.metric: spread.bound for spread in spreads}
    probes = bounds.pop(PROBES)
    merged_bounds = exact_bounds("cuda", classes=True).model_dump() | bounds
    proposed = Bounds.model_validate(merged_bounds), probes
    proposed_cells = [
        cell for measurement in measured for cell in judge(measurement, device, proposed)
    ]
    return Proposal(
        spreads,
        tuple(objections),
        faults_passing=faults_passing(proposed_cells),
        correct_refused=tuple(
            cell.name for cell in proposed_cells if cell.calibrates and cell.problems
        ),
        tf32_passing=tuple(cell.name for cell in proposed_cells if cell.tf32 and cell.passes),
    )


def faults_passing(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the faults that were measured on CUDA and that no CUDA runtime rejects."""
    passes: dict[str, bool] = {}
    for cell in cells:
        if cell.faulty and cell.role != BASELINE and (cell.passes or cell.refused):
            subject = cell.measured.subject
            passes[subject] = passes.get(subject, True) and cell.passes
    return tuple(name for name, passing in passes.items() if passing)


def round_up(value: float) -> float:
    """Round up to two digits: 3.21 to 3.3, 0.0451 to 0.046, 317 to 320."""
    if value <= 0.0 or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.12g}")


def _measure_spread(metric: str, cells: Sequence[Cell]) -> Spread | None:
    named_values = sorted(
        (cell.numbers[metric], cell.name)
        for cell in cells
        if cell.calibrates and cell.numbers and metric in cell.numbers
    )
    if not named_values:
        return None
    values = [value for value, _ in named_values]
    largest, cell = named_values[-1]
    on_cpu = on_cuda = Instruments().probe_noise_ratio
    if metric != PROBES:
        on_cpu = getattr(exact_bounds("cpu", classes=True), metric)
        on_cuda = getattr(exact_bounds("cuda", classes=True), metric)
    bound = max(on_cpu, round_up(MARGINS[metric] * largest))
    median, high = (values[math.ceil(share * len(values)) - 1] for share in (0.5, 0.95))
    return Spread(metric, len(values), median, high, largest, cell, on_cuda, bound)
