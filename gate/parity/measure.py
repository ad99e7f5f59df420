"""Measure a file against its model: one reference pass, every runtime of the policy beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gate.errors import EvidenceError, describe_failure
from gate.parity.case import Case
from gate.parity.examination import Examination
from gate.parity.float64.second_look import look_again
from gate.parity.graph.report import read_graph
from gate.parity.graph.witness import Witness
from gate.parity.sample_pass import SamplePass
from gate.parity.statistics.table import SampleTable
from gate.parity.turns import take_turns
from gate.parity.units.fold import InOrder
from gate.parity.units.part import Crew, UnitPart
from gate.parity.units.unit import Unit
from gate.records.cost import Cost, Latency
from gate.records.crew import CrewRecord
from gate.records.environment import Environment
from gate.records.evidence import Dataset, Evidence, ExportRecord, RuntimeEvidence, Source, Subject
from gate.records.instruments import GraphReport, TraceSearch

__all__ = ["Measurement", "measure"]


@dataclass(frozen=True)
class Measurement:
    """What `measure` saw; `evidence` adds where the file and the model come from."""

    runtimes: tuple[RuntimeEvidence, ...]
    environment: Environment
    dataset: Dataset
    reference_latency: Latency | None
    reference_cost: Cost | None
    reference_spread: float
    noise_unmeasured: str | None
    trace_search: TraceSearch | None = None
    graph: GraphReport | None = None
    graph_unread: str | None = None
    crew: CrewRecord | None = None
    samples: SampleTable = field(default_factory=SampleTable)
    """One row a sample, for a file beside the report: no part of the evidence."""

    def evidence(
        self, subject: Subject, *, source: Source, export: ExportRecord | None = None
    ) -> Evidence:
        """The whole evidence, measured now (UTC)."""
        return Evidence(
            subject=subject,
            source=source,
            dataset=self.dataset,
            export=export,
            environment=self.environment,
            runtimes=self.runtimes,
            reference_latency=self.reference_latency,
            reference_cost=self.reference_cost,
            reference_spread=self.reference_spread,
            noise_unmeasured=self.noise_unmeasured,
            trace_search=self.trace_search,
            graph=self.graph,
            graph_unread=self.graph_unread,
            crew=self.crew,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def measure(
    case: Case,
    *,
    progress: Callable[[int, int], None] | None = None,
    crew: Crew | None = None,
) -> Measurement:
    """Compare the file with the model on all samples, in every runtime that the policy asks for.

    The reference is a copy of the model on the CPU, in eval mode, in float32 but for what the file
    has in float64 too (`gate.parity.case`); the model and all global switches are
    afterwards as they were. A file with a fixed batch axis is measured with that batch size.
    `progress` is called with (samples done, samples in all), those that stability and probes
    compute after the dataset's included. `crew`: who measures all units but the first; the numbers
    are the same as without one.

    A runtime that breaks is recorded as failed while the others go on. Raises InputMismatch
    and DataError for samples and labels that don't fit, ModelError and EvidenceError where the
    reference itself can't be computed, DigestMismatch if the file is not (any more) the one
    that `candidate.subject` describes.
    """
    with SamplePass.open(case) as sample_pass:
        spread = sample_pass.reference.spread(sample_pass.example, sample_pass.expected)
        graph, graph_unread = _graph(sample_pass)
        sample_pass.open_runtimes()
        subject = case.candidate.subject
        examination = Examination(sample_pass.stand, subject.inputs, sha256=subject.sha256)
        advance = _Advance(progress, len(sample_pass.samples) + examination.samples)
        start = time.perf_counter()
        lead, *others = sample_pass.units
        sample_pass.run(lead, advance)
        sample_pass.end_unit()
        if crew is not None and others:  # which works while the examination does
            _begin(crew, sample_pass, others)
            search = examination.run(sample_pass.tracks, advance)
            _take_parts(sample_pass, crew, advance)
        else:
            for unit in others:
                sample_pass.run(unit, advance)
                sample_pass.end_unit()
        for track in sample_pass.tracks:
            track.fold()
        take_turns(sample_pass.stand, sample_pass.tracks, seconds=time.perf_counter() - start)
        sample_pass.rounding.widen()
        look_again(sample_pass.stand, sample_pass.tracks)
        if crew is None or not others:
            search = examination.run(sample_pass.tracks, advance)
        measurement = Measurement(
            runtimes=tuple(track.evidence() for track in sample_pass.tracks),
            environment=sample_pass.environments[0],
            dataset=Dataset(
                sha256=sample_pass.samples.digest(),
                samples=len(sample_pass.samples),
                labelled=case.labels is not None,
                model_only=sample_pass.binding.model_only,
            ),
            reference_latency=sample_pass.reference.meter.latency(),
            reference_cost=sample_pass.reference.meter.cost(),
            reference_spread=spread,
            noise_unmeasured=sample_pass.truth.unmeasured,
            trace_search=search,
            graph=graph,
            graph_unread=graph_unread,
            crew=_record(crew, sample_pass) if crew is not None and others else None,
            samples=SampleTable.of({t.name: t.sample_rows() for t in sample_pass.tracks}),
        )
    case.candidate.verify()
    return measurement


def _record(crew: Crew, sample_pass: SamplePass) -> CrewRecord:
    return crew.record.model_copy(update={"environments": sample_pass.environments[1:]})


def _begin(crew: Crew, sample_pass: SamplePass, units: Sequence[Unit]) -> None:
    own = sample_pass.lead()
    lead = crew.begin(own, units)
    if lead != own:
        sample_pass.judge_by(lead)


def _take_parts(sample_pass: SamplePass, crew: Crew, advance: Callable[[int], None]) -> None:
    """Fold what the crew gives in the order of units."""

    def take(part: UnitPart) -> None:
        sample_pass.take(part, sample_pass.units[first + ordered.next])
        advance(len(part.unit))

    ordered, first = InOrder(take), sample_pass.units[1].index
    for part in crew.parts():
        ordered.add(part.index - first, part)
    if ordered.next != len(sample_pass.units) - first:
        missing = sample_pass.units[first + ordered.next]
        raise EvidenceError(f"nobody measured unit {missing.index}. Measure it again.")


class _Advance:
    """Adds up the samples that are done, for a progress callback."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def __call__(self, samples: int) -> None:
        self._done += samples
        if self._progress is not None:
            self._progress(self._done, self._total)


def _graph(sample_pass: SamplePass) -> tuple[GraphReport | None, str | None]:
    """The report on the graph, or the reason why there is none, if the policy asks for it."""
    if sample_pass.case.chained or not sample_pass.case.policy.instruments.graph:
        return None, None
    try:
        witness = Witness(sample_pass.model, sample_pass.reference.run, sample_pass.example)
        return read_graph(sample_pass.case.candidate, witness), None
    except Exception as error:
        return None, describe_failure(error)
