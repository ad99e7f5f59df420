"""Measure a file against its model: one reference pass, every runtime of the policy beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gate.errors import EvidenceError, describe_failure
from gate.parity.bench import Bench
from gate.parity.case import Case
from gate.parity.examination import Examination
from gate.parity.float64.second_look import look_again
from gate.parity.graph.report import read_graph
from gate.parity.graph.witness import Witness
from gate.parity.runners.environment import describe_environment
from gate.parity.statistics.table import SampleTable
from gate.parity.turns import take_turns
from gate.parity.units.fold import InOrder
from gate.parity.units.part import Crew, UnitPart
from gate.records.cost import Cost, Latency
from gate.records.evidence import (
    Dataset,
    Environment,
    Evidence,
    ExportRecord,
    RuntimeEvidence,
    Source,
    Subject,
)
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
    with Bench.open(case) as bench:
        spread = bench.reference.spread(bench.example, bench.expected)
        graph, graph_unread = _graph(bench)
        bench.open_runtimes()
        subject = case.candidate.subject
        examination = Examination(bench.stand, subject.inputs, sha256=subject.sha256)
        advance = _Advance(progress, len(bench.samples) + examination.samples)
        start = time.perf_counter()
        head, *others = bench.units
        bench.run(head, advance)
        bench.end_unit()
        if crew is not None and others:  # which works while the examination does
            crew.begin(bench.head(), others)
            search = examination.run(bench.tracks, advance)
            _take_parts(bench, crew, advance)
        else:
            for unit in others:
                bench.run(unit, advance)
                bench.end_unit()
        for track in bench.tracks:
            track.fold()
        take_turns(bench.stand, bench.tracks, seconds=time.perf_counter() - start)
        bench.rounding.widen()
        look_again(bench.stand, bench.tracks)
        if crew is None or not others:
            search = examination.run(bench.tracks, advance)
        measurement = Measurement(
            runtimes=tuple(track.evidence() for track in bench.tracks),
            environment=describe_environment(bench.switches),
            dataset=Dataset(
                sha256=bench.samples.digest(),
                samples=len(bench.samples),
                labelled=case.labels is not None,
                model_only=bench.binding.model_only,
            ),
            reference_latency=bench.reference.meter.latency(),
            reference_cost=bench.reference.meter.cost(),
            reference_spread=spread,
            noise_unmeasured=bench.truth.unmeasured,
            trace_search=search,
            graph=graph,
            graph_unread=graph_unread,
            samples=SampleTable.of({t.name: t.sample_rows() for t in bench.tracks}),
        )
    case.candidate.verify()
    return measurement


def _take_parts(bench: Bench, crew: Crew, advance: Callable[[int], None]) -> None:
    """Fold what the crew gives in the order of units."""

    def take(part: UnitPart) -> None:
        bench.take(part)
        advance(len(part.unit))

    ordered, first = InOrder(take), bench.units[1].index
    for part in crew.parts():
        ordered.add(part.index - first, part)
    if ordered.next != len(bench.units) - first:
        missing = bench.units[first + ordered.next]
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


def _graph(bench: Bench) -> tuple[GraphReport | None, str | None]:
    """The report on the graph, or the reason why there is none, if the policy asks for it."""
    if not bench.case.policy.instruments.graph:
        return None, None
    try:
        witness = Witness(bench.model, bench.reference.run, bench.example)
        return read_graph(bench.case.candidate, witness), None
    except Exception as error:
        return None, describe_failure(error)
