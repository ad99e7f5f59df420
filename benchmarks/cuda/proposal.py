"""Bounds for the runtimes on CUDA, from the distribution of the correct files.

    bound = max(the CPU's bound, margin × the largest value of a correct file)

rounded up to two digits. Correct files are those of the matrix with TF32 off, under every setting,
and those of the corpus, each in each runtime that is proven to have run on the device. `margin` is
what the CPU's bound has above the CPU's own correct files (benchmarks/README.md). If n values lie
below the largest, then with 95 % confidence fewer than 3 / n of such files lie above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cuda.device import BASELINE, Device
from benchmarks.cuda.judged import Judged, Proposed, rejudged
from gate.policy.defaults import exact_bounds
from gate.policy.sections import Bounds, Instruments

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
"""Correct files; of fewer the largest says too little about the next one."""


@dataclass(frozen=True)
class Spread:
    """One metric over the correct files."""

    metric: str
    values: int
    median: float
    high: float
    """Of which 95 % are not above."""
    most: float
    of: str
    """The cell that has the largest."""
    built_in: float
    bound: float
    """By the formula; infinite where a correct file is."""


@dataclass(frozen=True)
class Proposal:
    """What the formula gives, and what speaks against it."""

    spreads: tuple[Spread, ...]
    objections: tuple[str, ...]
    """Why it is none; empty: it is one."""
    faults_passing: tuple[str, ...] = ()
    """Faults of the corpus that no runtime on CUDA would refuse."""
    correct_refused: tuple[str, ...] = ()
    tf32_passing: tuple[str, ...] = ()
    """Cells with TF32 that can't be told from float32 by these bounds."""

    @property
    def stands(self) -> bool:
        """Whether it may be taken over."""
        return not self.objections

    @property
    def bounds(self) -> dict[str, float]:
        """Metric to its bound."""
        return {one.metric: one.bound for one in self.spreads}


def propose(cells: Sequence[Judged], device: Device) -> Proposal:
    """From all cells that were judged."""
    spreads = tuple(spread for metric in MARGINS if (spread := _spread(metric, cells)) is not None)
    objections = [device.mark] if device.mark else []
    files = {one.cell.subject for one in cells if one.calibrates}
    if len(files) < LEAST_FILES:
        objections.append(
            f"{len(files)} correct files were measured, {LEAST_FILES} are needed at least"
        )
    endless = [one.metric for one in spreads if not math.isfinite(one.bound)]
    lacking = [metric for metric in MARGINS if metric not in {one.metric for one in spreads}]
    objections += [f"{name} of a correct file is infinite" for name in endless]
    objections += [f"{name} was not measured" for name in lacking]
    if endless or lacking:
        return Proposal(spreads, tuple(objections))
    again = rejudged(cells, device, _as_policy(spreads))
    return Proposal(
        spreads,
        tuple(objections),
        faults_passing=faults_passing(again),
        correct_refused=tuple(one.cell.name for one in again if one.calibrates and one.problems),
        tf32_passing=tuple(one.cell.name for one in again if one.tf32 and one.passes),
    )


def faults_passing(cells: Sequence[Judged]) -> tuple[str, ...]:
    """Faults that were measured on CUDA and that none of its runtimes refuses."""
    passes: dict[str, bool] = {}
    for one in cells:
        if one.faulty and one.cell.role != BASELINE and (one.passes or one.refused):
            passes[one.cell.subject] = passes.get(one.cell.subject, True) and one.passes
    return tuple(name for name, passing in passes.items() if passing)


def rounded_up(value: float) -> float:
    """To two digits: 3.21 to 3.3, 0.0451 to 0.046, 317 to 320."""
    if value <= 0.0 or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.12g}")


def _spread(metric: str, cells: Sequence[Judged]) -> Spread | None:
    found = sorted(
        (value, one.cell.name)
        for one in cells
        if one.calibrates and (value := one.numbers().get(metric)) is not None
    )
    if not found:
        return None
    values = [value for value, _ in found]
    most, of = found[-1]
    on_cpu, built_in = _built_in(metric)
    bound = max(on_cpu, rounded_up(MARGINS[metric] * most))
    return Spread(
        metric, len(values), _at(values, 0.5), _at(values, 0.95), most, of, built_in, bound
    )


def _built_in(metric: str) -> tuple[float, float]:
    """On the CPU, and on CUDA."""
    if metric == PROBES:
        return (Instruments().probe_noise_ratio,) * 2
    kinds = (exact_bounds("cpu", classes=True), exact_bounds("cuda", classes=True))
    return (getattr(kinds[0], metric), getattr(kinds[1], metric))


def _as_policy(spreads: Sequence[Spread]) -> Proposed:
    bounds = {one.metric: one.bound for one in spreads}
    probes = bounds.pop(PROBES)
    plain = exact_bounds("cuda", classes=True).model_dump() | bounds
    return Bounds.model_validate(plain), probes


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
