"""Measure a file against its model: one reference pass, every runtime of the policy beside it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from torch import nn

from gate.errors import DataError, EvidenceError, PolicyError, describe_failure
from gate.onnxfile.candidate import Candidate
from gate.parity.arrays.binding import Binding
from gate.parity.arrays.samples import check_labels
from gate.parity.case import Case
from gate.parity.examination import Examination
from gate.parity.float64.second_look import RoundingFloor, look_again
from gate.parity.graph.report import read_graph
from gate.parity.graph.witness import Witness
from gate.parity.runners.determinism import cublas_reason, deterministic
from gate.parity.runners.environment import describe_environment
from gate.parity.runners.runner import Runner, conditions
from gate.parity.runners.torch_runner import TorchRunner, private_copy
from gate.parity.stand import ReferencePass, Stand, Truth, length
from gate.parity.statistics.answers import ClassReading
from gate.parity.statistics.output import Array, Span
from gate.parity.statistics.table import SampleTable
from gate.parity.track import Track
from gate.parity.turns import take_turns
from gate.parity.units.unit import cut
from gate.policy.policy import Policy
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
from gate.runtimes.chosen import chosen_of
from gate.runtimes.runtime import Batch, RunnableFile, Session

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


def measure(case: Case, *, progress: Callable[[int, int], None] | None = None) -> Measurement:
    """Compare the file with the model on all samples, in every runtime that the policy asks for.

    The reference is a copy of the model on the CPU, in eval mode, in float32 but for what the file
    has in float64 too (`gate.parity.case`); the model and all global switches are
    afterwards as they were. A file with a fixed batch axis is measured with that batch size.
    `progress` is called with (samples done, samples in all), those that stability and probes
    compute after the dataset's included.

    A runtime that breaks is recorded as failed while the others go on. Raises InputMismatch
    and DataError for samples and labels that don't fit, ModelError and EvidenceError where the
    reference itself can't be computed, DigestMismatch if the file is not (any more) the one
    that `candidate.subject` describes.
    """
    candidate, samples, policy = case.candidate, case.inputs, case.policy
    binding = case.bind()
    labels = None if case.labels is None else check_labels(case.labels, samples=len(samples))
    names = [spec.name for spec in candidate.subject.outputs]
    readings = {
        name: ClassReading(normalised=policy.role_of(name) == "probabilities", points=policy.points)
        for name in names
    }
    tracks = [
        Track(chosen, names, readings=readings) for chosen in chosen_of(policy, case.recordings)
    ]
    with contextlib.ExitStack() as opened, deterministic(policy.determinism) as switches:
        for track in tracks:
            opened.callback(track.close)
        own = private_copy(case.model, device="cpu", double=binding.double)
        reference = ReferencePass(own, binding)
        truth = Truth(own, binding, samples=policy.instruments.noise_samples)
        example = next(samples.batches(_example_size(binding)))
        expected = reference.first_run(example)
        spread = reference.spread(example, expected)
        graph, graph_unread = _graph(candidate, Witness(own, reference.run, example), policy=policy)
        for track in tracks:
            _open(track, own, candidate, policy=policy, start=(binding, example))
            track.probe(example, expected, reference.keys)
        stand = Stand(own, reference, truth, binding, samples, policy)
        examination = Examination(stand, candidate.subject.inputs, sha256=candidate.subject.sha256)
        advance = _Advance(progress, len(samples) + examination.samples)
        rounding = RoundingFloor(stand, tracks)
        start = time.perf_counter()
        units = cut(len(samples), batch_size=binding.batch_size, head=truth.samples)
        batches = samples.batches(binding.batch_size)
        for unit in units:
            for at in range(unit.start, unit.stop, binding.batch_size):
                batch = next(batches)
                count = length(batch)
                span = Span(at, count, None if labels is None else labels[at : at + count])
                expected = reference.timed_run(batch)
                _check_classes(expected, names, span, policy=policy)
                true = truth.of_first(batch)
                if true is None:  # the samples from here on are judged by the floor before them
                    rounding.widen()
                for track in tracks:
                    track.step(batch, expected, span, truth=true)
                advance(count)
            for track in tracks:
                track.end_unit()
        for track in tracks:
            track.fold()
        take_turns(stand, tracks, seconds=time.perf_counter() - start)
        rounding.widen()
        look_again(stand, tracks)
        search = examination.run(tracks, advance)
        runtimes = tuple(track.evidence() for track in tracks)
        table = SampleTable.of({track.name: track.sample_rows() for track in tracks})
        environment = describe_environment(switches)
    candidate.verify()
    return Measurement(
        runtimes=runtimes,
        environment=environment,
        dataset=Dataset(
            sha256=samples.digest(),
            samples=len(samples),
            labelled=labels is not None,
            model_only=binding.model_only,
        ),
        reference_latency=reference.meter.latency(),
        reference_cost=reference.meter.cost(),
        reference_spread=spread,
        noise_unmeasured=truth.unmeasured,
        trace_search=search,
        graph=graph,
        graph_unread=graph_unread,
        samples=table,
    )


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


def _example_size(binding: Binding) -> int:
    """A small batch of another size than the measured ones, where the file allows it."""
    if binding.fixed:
        return binding.batch_size
    return 1 if binding.batch_size > 1 else 2


def _graph(
    candidate: Candidate, witness: Witness, *, policy: Policy
) -> tuple[GraphReport | None, str | None]:
    """The report on the graph, or the reason why there is none, if the policy asks for it."""
    if not policy.instruments.graph:
        return None, None
    try:
        return read_graph(candidate, witness), None
    except Exception as error:
        return None, describe_failure(error)


def _open(
    track: Track,
    model: nn.Module,
    candidate: Candidate,
    *,
    policy: Policy,
    start: tuple[Binding, Batch],
) -> None:
    """Give the track its runner, or the reason why it has none."""
    binding, example = start
    chosen = track.chosen

    def in_torch(device: str) -> Session:
        unusable = cublas_reason(policy.determinism)
        if unusable is not None:
            raise EvidenceError(unusable)
        own = private_copy(model, device=device, double=binding.double)
        return TorchRunner(own, binding, device=device)

    try:
        track.absent_reason = chosen.absent_reason()
        if track.absent_reason is not None:
            return
        by_inputs = binding if chosen.runtime.runs == "file" else None
        session = track.meter.open(
            lambda: chosen.open(
                RunnableFile(candidate, in_torch),
                conditions=conditions(policy),
                example=example if by_inputs is None else by_inputs.by_input(example),
            ),
            cuda=chosen.takes_cuda,
        )
        track.runner = Runner(session, candidate.subject, by_inputs)
    except PolicyError:
        raise
    except Exception as error:
        track.fail(error)


def _check_classes(outputs: list[Array], names: list[str], span: Span, *, policy: Policy) -> None:
    """Refuse labels that no output counted as logits can ever predict."""
    if span.labels is None:
        return
    widths = [
        output.shape[1]
        for name, output in zip(names, outputs, strict=False)
        if output.ndim == 2 and output.dtype.kind == "f" and policy.counts_classes(name)
    ]
    largest = int(span.labels.max())
    if widths and largest >= max(widths):
        sample = span.start + int(span.labels.argmax())
        raise DataError(
            f"the label of sample {sample} is {largest}, the model has {max(widths)} classes. "
            "Give the labels of these samples and this model."
        )
