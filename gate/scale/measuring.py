"""Measure one unit of a plan."""

from __future__ import annotations

from pathlib import Path

from gate.parity.sample_pass import SamplePass
from gate.parity.units.part import LeadState
from gate.scale.part_file import PartFile
from gate.scale.plan import MeasuringPlan
from gate.scale.worker import opened


def measure_unit(plan: MeasuringPlan, index: int, *, lead: Path | None = None) -> PartFile:
    """What unit `index` gives. `lead`: the part of unit 0; without it the lead is measured first,
    again, which takes a float64 forward of its samples.

    Raises DataError, EvidenceError, DigestMismatch and whatever opening what is planned raises.
    """
    unit = plan.unit(index)
    given = None if lead is None else PartFile.open(lead, plan=plan).lead
    with opened(plan.case(), threads=plan.threads, noise=given is None) as sample_pass:
        state = given or _lead(sample_pass)
        plan.verify(0, samples=state.samples_sha256, labels=state.labels_sha256)
        if index == 0:
            return PartFile.of_lead(plan, state)
        if given is not None:
            sample_pass.judge_by(given)
        part = sample_pass.part(unit)
    plan.verify(index, samples=part.samples_sha256, labels=part.labels_sha256)
    return PartFile.of_unit(plan, state, part)


def _lead(sample_pass: SamplePass) -> LeadState:
    sample_pass.run(sample_pass.units[0], lambda _count: None)
    sample_pass.end_unit()
    sample_pass.reference.meter.drain()
    for track in sample_pass.tracks:
        track.meter.drain()
    return sample_pass.lead()
