"""Decide on measurements, and derive bounds on CUDA from those of correct files.

    bound = max(the CPU's bound, margin × the largest value of a correct file)

rounded up to two digits. Correct files are those of the matrix with TF32 off and those of the
corpus, each in each runtime that ran on the device. `margin` is the ratio of the CPU's bound to its
own correct files (benchmarks/README.md). If n values lie below the largest, then with 95 %
confidence fewer than 3 / n of such files lie above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.corpus.judge import numbers
from benchmarks.cuda.measuring import BY_NAME, Measured, Status
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
    "repeatability_ratio": 4.2,  # as the next one: the CPU repeats itself
    "batch_invariance_ratio": 4.2,  # 16 / 3.8
    "probe_noise_ratio": 4.2,  # 32 / 7.7
}
PROBES = "probe_noise_ratio"
"""One bound for all runtimes, of `Instruments`."""
LEAST_FILES = 200
"""Correct files; the largest value of fewer says too little about the next one."""


@dataclass(frozen=True)
class Cell:
    """One measurement in one runtime."""

    measured: Measured
    role: Role
    status: Status
    reason: str
    runtime: RuntimeEvidence | None = None
    numbers: dict[str, float] | None = None
    """Metric to its worst value over the outputs and probes."""
    problems: tuple[CheckResult, ...] = ()
    """Of this runtime, and of the file itself."""

    @property
    def name(self) -> str:
        """Return `tf32/resnet50/ort-cuda`."""
        return f"{self.measured.setting.name}/{self.measured.subject}/{self.role}"

    @property
    def passes(self) -> bool:
        """True if it has numbers and no problem."""
        return self.numbers is not None and not self.problems

    @property
    def refused(self) -> bool:
        """True if it was judged and does not pass."""
        return not self.passes and self.status in ("measured", "refused")

    @property
    def faulty(self) -> bool:
        """True if its file must not pass."""
        return is_faulty(self.measured)

    @property
    def tf32(self) -> bool:
        """True if TF32 was on."""
        return self.measured.setting.tf32

    @property
    def calibrates(self) -> bool:
        """True if bounds on CUDA must let it pass."""
        ran = self.numbers is not None and all(one.name != "provider" for one in self.problems)
        return ran and not (self.faulty or self.tf32 or self.role == BASELINE)

    @property
    def why(self) -> str:
        """Why it does not pass, in words."""
        return "; ".join(dict.fromkeys(one.label for one in self.problems)) or self.reason


def is_faulty(measured: Measured) -> bool:
    """True for a fault of the corpus."""
    return measured.setting.in_corpus and BY_NAME[measured.subject].faulty


def judge(
    measured: Measured, device: Device, proposed: tuple[Bounds, float] | None = None
) -> Iterator[Cell]:
    """Yield the cell of each runtime, by the default bounds or by proposed ones."""
    evidence, setting = measured.evidence, measured.setting
    if evidence is None:
        for role in setting.roles:
            yield Cell(measured, role, measured.status, measured.reason)
        return
    gaps = setting.in_corpus and BY_NAME[measured.subject].architecture.gaps
    policy = setting.policy(device, gaps=gaps, proposed=proposed)
    problems = decide(policy, evidence, decided_at="1970-01-01T00:00:00+00:00").problems
    on_cpu = evidence.runtime(BASELINE)
    # A runtime that fails on a file which fails on the CPU, too, is expected.
    broken = is_faulty(measured) and on_cpu is not None and on_cpu.failure is not None
    for role in setting.roles:
        name = device.name(role)
        runtime = evidence.runtime(name)
        reason = "no record of the runtime"
        if runtime is not None:
            reason = runtime.failure or runtime.absent_reason or ""
        own = evidence.model_copy(update={"runtimes": (runtime,) if runtime else ()})
        yield Cell(
            measured,
            role,
            "failed" if reason and not broken else "measured",
            reason,
            runtime,
            numbers(own) if runtime is not None and runtime.measured else None,
            tuple(one for one in problems if one.runtime in (None, name)),
        )


@dataclass(frozen=True)
class Spread:
    """One metric over the correct files."""

    metric: str
    values: int
    median: float
    high: float
    """95 % are at most this large."""
    most: float
    cell: str
    """The cell of the largest value."""
    default: float
    bound: float
    """By the formula; infinite if a value is."""


@dataclass(frozen=True)
class Proposal:
    """Bounds by the formula, and their effect on all cells."""

    spreads: tuple[Spread, ...]
    objections: tuple[str, ...]
    """Why these are no bounds to use; empty: they are."""
    faults_passing: tuple[str, ...] = ()
    """Faults of the corpus that no runtime on CUDA rejects."""
    correct_refused: tuple[str, ...] = ()
    tf32_passing: tuple[str, ...] = ()

    @property
    def bounds(self) -> dict[str, float]:
        """Metric to its bound."""
        return {one.metric: one.bound for one in self.spreads}


def propose(measured: Sequence[Measured], device: Device) -> Proposal:
    """Return bounds for runtimes on CUDA."""
    cells = [cell for one in measured for cell in judge(one, device)]
    spreads = tuple(one for metric in MARGINS if (one := _spread(metric, cells)) is not None)
    objections = ["dry run: the CPU stands in for CUDA"] if device.dry else []
    files = {one.measured.subject for one in cells if one.calibrates}
    if len(files) < LEAST_FILES:
        objections.append(f"{len(files)} correct files were measured; {LEAST_FILES} are needed")
    endless = [one.metric for one in spreads if not math.isfinite(one.bound)]
    lacking = [metric for metric in MARGINS if metric not in {one.metric for one in spreads}]
    objections += [f"{name} of a correct file is infinite" for name in endless]
    objections += [f"{name} was not measured" for name in lacking]
    if endless or lacking:
        return Proposal(spreads, tuple(objections))
    bounds = {one.metric: one.bound for one in spreads}
    probes = bounds.pop(PROBES)
    plain = exact_bounds("cuda", classes=True).model_dump() | bounds
    proposed = Bounds.model_validate(plain), probes
    again = [cell for one in measured for cell in judge(one, device, proposed)]
    return Proposal(
        spreads,
        tuple(objections),
        faults_passing=faults_passing(again),
        correct_refused=tuple(one.name for one in again if one.calibrates and one.problems),
        tf32_passing=tuple(one.name for one in again if one.tf32 and one.passes),
    )


def faults_passing(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the faults that were measured on CUDA and that none of its runtimes rejects."""
    passes: dict[str, bool] = {}
    for one in cells:
        if one.faulty and one.role != BASELINE and (one.passes or one.refused):
            subject = one.measured.subject
            passes[subject] = passes.get(subject, True) and one.passes
    return tuple(name for name, passing in passes.items() if passing)


def rounded_up(value: float) -> float:
    """Round up to two digits: 3.21 to 3.3, 0.0451 to 0.046, 317 to 320."""
    if value <= 0.0 or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.12g}")


def _spread(metric: str, cells: Sequence[Cell]) -> Spread | None:
    found = sorted(
        (one.numbers[metric], one.name)
        for one in cells
        if one.calibrates and one.numbers and metric in one.numbers
    )
    if not found:
        return None
    values = [value for value, _ in found]
    most, cell = found[-1]
    on_cpu = on_cuda = Instruments().probe_noise_ratio
    if metric != PROBES:
        on_cpu = getattr(exact_bounds("cpu", classes=True), metric)
        on_cuda = getattr(exact_bounds("cuda", classes=True), metric)
    bound = max(on_cpu, rounded_up(MARGINS[metric] * most))
    half, high = (values[math.ceil(share * len(values)) - 1] for share in (0.5, 0.95))
    return Spread(metric, len(values), half, high, most, cell, on_cuda, bound)
