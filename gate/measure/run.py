"""The measurement, phase by phase; builds the evidence."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gate.data.array_files import check_labels
from gate.data.input_binding import InputBinding
from gate.data.reader import length
from gate.errors import (
    DataError,
    DigestMismatch,
    EvidenceError,
    PackageMissing,
    PolicyError,
    RuntimeUnusable,
)
from gate.measure.context import MeasurementContext, ReferencePass
from gate.measure.job import MeasurementJob
from gate.measure.outliers import RoundingFloor, analyze_outliers
from gate.measure.reference_assessment import ReferenceAssessment
from gate.measure.runtime_measurement import Track, floor_of, judge_by, part_of, proof_of, take
from gate.measure.session_runner import SessionRunner, conditions
from gate.measure.undefined_values import casts_on_samples
from gate.measure.work_units import (
    Crew,
    FirstUnitState,
    ReferenceDigests,
    RunProof,
    RuntimeUnitResult,
    UnitResult,
    WorkUnit,
    split_into_units,
)
from gate.onnx_file.shape_nodes import reads_double
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.evidence import (
    Cost,
    CrewRecord,
    Dataset,
    Determinism,
    Environment,
    Evidence,
    ExportRecord,
    Latency,
    RuntimeEvidence,
    Source,
    Subject,
    differences,
)
from gate.records.instruments import GraphReport, ReferenceValidity, TraceSearch, UndefinedCast
from gate.reference.environment import cublas_reason, describe_environment, deterministic
from gate.reference.float64 import Truth
from gate.reference.torch_session import TorchSession, copy_model
from gate.reference.validity import Validity
from gate.runtimes.recorded import RecordedRuntime
from gate.runtimes.runtime import RunnableFile, Session
from gate.runtimes.selection import SelectedRuntime, chosen_of
from gate.statistics.classification import ClassReading
from gate.statistics.output import Span
from gate.statistics.sample_table import SampleTable
from gate.statistics.serialization import InOrder
from gate.storage.arrays import HALF, Batch, OutputArray
from gate.storage.digest import Digest


class Instrument(Protocol):
    """A measurement beyond the samples. `measure` gets a list of them."""

    needs_runtimes: bool
    """True: it runs after the samples, on the open runtimes. False: it runs before any opens."""
    title: str
    """What it does, for the progress bar."""
    cost: int
    """Number of samples that it computes, for the progress bar."""

    def __init__(self, context: MeasurementContext) -> None:
        """Prepare the measurement, without running the model."""

    @staticmethod
    def is_enabled(job: MeasurementJob) -> bool:
        """Return True if the policy of the job asks for this instrument."""

    def run(self, tracks: Sequence[Track], advance: Callable[[int], None]) -> None:
        """Measure. `advance` gets the numbers of samples as they are done."""

    def evidence(self) -> Mapping[str, Any]:
        """Return the fields of `Measurement` that this instrument measured."""


_steps = logging.getLogger("gate.steps")

_RUNNING = "while running"
"""What ONNX Runtime says where it breaks on the first batch, and not on the file."""

_HARMLESS = ("cores", "operating system", "kernel")


_Hear = Callable[[list[OutputArray], list[OutputArray] | None, int], None]


class SamplePass:
    """Made by `SamplePass.open`; what it holds is given back at the end of that."""

    def __init__(self, case: MeasurementJob, switches: Determinism, *, noise: bool) -> None:
        policy, self.binding = case.policy, case.bind()
        self.case, self.samples, self.switches = case, case.inputs, switches
        self._labels = (
            None if case.labels is None else check_labels(case.labels, samples=len(self.samples))
        )
        self._names = [spec.name for spec in case.candidate.subject.outputs]
        readings = {
            name: ClassReading(
                normalised=policy.role_for(name) == "probabilities", points=policy.points
            )
            for name in self._names
        }
        self._proofs: dict[str, RunProof | None] = {}
        self.tracks = [
            Track(chosen, self._names, readings=readings)
            for chosen in chosen_of(policy, case.recordings)
        ]
        self.model = copy_model(case.model, device="cpu", double=self.binding.double)
        self.reference = ReferencePass(self.model, self.binding, original=case.model)
        wanted = policy.instruments.noise_samples
        self.truth = Truth(self.model, self.binding, samples=wanted if noise else 0)
        self.stand = MeasurementContext(
            self.model,
            self.reference,
            self.truth,
            self.binding,
            self.samples,
            policy,
            case.candidate,
        )
        self.truth.decisions = self.stand.decisions
        self.truth.part_size = self.stand.part_size
        self.rounding = RoundingFloor(self.stand, self.tracks)
        self.environments: tuple[Environment, ...] = (describe_environment(switches),)
        """This one, and others that units were measured in."""
        self.expected = self.stand.run_example()
        self.samples = self.stand.samples
        self.example = self.stand.example
        self.stand.answers.note_reference(self.example, self.expected)
        if noise:
            self.truth.extend(self.stand.noise_samples - wanted)
        self.units = split_into_units(
            len(self.samples),
            batch_size=self.binding.batch_size,
            lead=self.stand.noise_samples,
            most=case.units,
            least=self.stand.smallest,
        )

    @classmethod
    @contextlib.contextmanager
    def open(cls, case: MeasurementJob, *, noise: bool = True) -> Iterator[SamplePass]:
        """Inside, PyTorch's switches are those of the policy. The runtimes are still to be opened.
        `noise`: with the float64 reference.

        Raises InputMismatch and DataError for samples and labels that don't fit, ModelError and
        EvidenceError where the reference itself can't be computed.
        """
        with deterministic(case.policy.determinism) as switches:
            sample_pass = cls(case, switches, noise=noise)
            try:
                yield sample_pass
            finally:
                for track in sample_pass.tracks:
                    track.close()

    def open_runtimes(self) -> None:
        """Open the file in each, and compute a batch of another size in it. What breaks is that
        runtime's failure."""
        for track in self.tracks:
            _open(track, self.model, self.case, start=(self.binding, self.example))
            track.probe(self.example, self.expected, self.reference.keys)

    def run(self, unit: WorkUnit, advance: Callable[[int], None]) -> None:
        """Compute one unit on both sides; every track compares. `advance` gets the numbers of
        samples as they are done.

        Raises DataError for samples and labels that fit neither side, EvidenceError where the
        reference breaks.
        """
        self._run(unit, self._labels_of(unit), advance)

    def _run(
        self,
        unit: WorkUnit,
        labels: NDArray[np.int64] | None,
        advance: Callable[[int], None],
        hear: _Hear = lambda _expected, _truth, _count: None,
    ) -> None:
        """`hear`: gets the outputs of the reference for each batch, those in float64 or None, and
        the number of samples."""
        at, samples = unit.start, self.samples.slice(unit.start, unit.stop)
        for batch in samples.batches(self.binding.batch_size):
            count, start = length(batch), at - unit.start
            self.binding.check_range(batch, start=at)
            span = Span(at, count, None if labels is None else labels[start : start + count])
            expected = self.reference.timed_run(batch)
            _check_classes(expected, self._names, span, policy=self.case.policy)
            if not self.truth.is_done:
                self.stand.answers.note_reference(batch, expected)
            true = self.truth.of_first(batch)
            if true is None:  # the samples from here on are judged by the floor of those before
                self.rounding.widen()
            else:
                self.stand.answers.note(batch, expected, true)
            hear(expected, true, count)
            for track in self.tracks:
                track.step(
                    batch,
                    expected,
                    span,
                    truth=true,
                    validity=self.truth.validity,
                    replayed=partial(self.stand.replayed, track.name),
                )
            at += count
            advance(count)

    def run_first(self, advance: Callable[[int], None]) -> None:
        """Compute the first unit, and again where float64 is no truth for all of it: by then it is
        known for what. Raises as `run`."""
        unit = self.units[0]
        self._assess(unit, advance)
        if self.truth.validity.record.own_choices:
            self.stand.answers.forget_truth()
            self._restart()
            self._assess(unit, _ignore)
        if self.truth.validity.is_restricted:
            self._restart()
            self.run(unit, _ignore)
        self.end_unit()

    def _assess(self, unit: WorkUnit, advance: Callable[[int], None]) -> None:
        assessment = ReferenceAssessment()
        self._run(unit, self._labels_of(unit), advance, assessment.update)
        self.truth.validity = assessment.result(self.stand)

    def _restart(self) -> None:
        self.truth.rewind()
        for track in self.tracks:
            track.restart()

    def end_unit(self) -> None:
        """What was compared since the last end is one unit, for every track."""
        for track in self.tracks:
            track.end_unit()

    def lead(self) -> FirstUnitState:
        """What those need who measure the units after the first, which is done."""
        self.rounding.widen()
        self._proofs = {track.name: proof_of(track) for track in self.tracks}
        samples, labels = self.digests(self.units[0])
        floors = {track.name: floor_of(track) for track in self.tracks}
        return FirstUnitState(
            floors=floors,
            samples_sha256=samples,
            labels_sha256=labels,
            validity=self.truth.validity.record,
        )

    def judge_by(self, lead: FirstUnitState) -> None:
        """Take what another pass gave as its lead. Raises EvidenceError."""
        self.rounding.given()
        self.truth.validity = Validity(lead.validity)
        for track in self.tracks:
            judge_by(track, lead.floors.get(track.name))

    def part(self, unit: WorkUnit) -> UnitResult:
        """Measure one unit for another pass. Raises as `run`."""
        labels, answers = self._labels_of(unit), hashlib.sha256()
        self._run(unit, labels, lambda _count: None, lambda outputs, *_: _add(answers, outputs))
        return UnitResult(
            **self._answers(unit, labels, answers.hexdigest()).to_plain(),
            environment=self.environments[0],
            reference_seconds=self.reference.meter.drain(),
            runtimes={track.name: part_of(track) for track in self.tracks},
        )

    def answers(self, unit: WorkUnit) -> ReferenceDigests:
        """What the reference answers to a unit; nothing else is computed. Raises as `run`."""
        answers = hashlib.sha256()
        samples = self.samples.slice(unit.start, unit.stop)
        for batch in samples.batches(self.binding.batch_size):
            _add(answers, self.reference.run(batch))
        return self._answers(unit, self._labels_of(unit), answers.hexdigest())

    def digests(self, unit: WorkUnit) -> tuple[Digest, Digest | None]:
        """Of the samples of a unit, in their order, and of their labels, if there are any."""
        samples = self.samples.slice(unit.start, unit.stop).digest()
        return samples, _digest_of(self._labels_of(unit))

    def _answers(
        self, unit: WorkUnit, labels: NDArray[np.int64] | None, answers: str
    ) -> ReferenceDigests:
        return ReferenceDigests(
            index=unit.index,
            start=unit.start,
            stop=unit.stop,
            samples_sha256=self.samples.slice(unit.start, unit.stop).digest(),
            labels_sha256=_digest_of(labels),
            answers_sha256=Digest(answers),
        )

    def take(self, part: UnitResult, unit: WorkUnit) -> None:
        """Add what another pass measured of the unit that comes next.

        Raises DigestMismatch where it had other samples or labels, EvidenceError where that was
        another machine, and the policy takes no other.
        """
        self._verify(part, unit)
        self.reference.meter.add(part.reference_seconds)
        anywhere = self.case.policy.environments == "any"
        for track in self.tracks:
            given = part.runtimes.get(track.name) or RuntimeUnitResult(failure="it gave nothing")
            take(track, given, own=self._proofs.get(track.name), anywhere=anywhere)

    def _labels_of(self, unit: WorkUnit) -> NDArray[np.int64] | None:
        if self.case.source_labels:
            return self.samples.slice(unit.start, unit.stop).labels()
        return None if self._labels is None else self._labels[unit.start : unit.stop]

    def _verify(self, part: UnitResult, unit: WorkUnit) -> None:
        if part.unit != unit or self.digests(unit) != (part.samples_sha256, part.labels_sha256):
            raise DigestMismatch(
                f"unit {unit.index} (samples {unit.start} to {unit.stop - 1}) was measured on "
                "other samples or labels than are here. Give all processes the same data set, in "
                "one order, or measure with one job."
            )
        if part.environment not in self.environments:
            self.environments += (part.environment,)
        policy, unlike = self.case.policy, _unlike(self.environments[0], part.environment)
        if unlike and policy.precision == "exact" and policy.environments == "same":
            raise EvidenceError(
                f"unit {part.index} was measured in another environment: {unlike}. Measure it "
                "again in this one, or say environments: any in the policy."
            )


def _unlike(own: Environment, other: Environment) -> str:
    """What may change numbers and differs; empty: nothing does."""
    apart = [each for each in differences(own, other) if each.name not in _HARMLESS]
    texts = [f"{each.name} {each.now}, here {each.before}" for each in apart]
    if own.determinism != other.determinism and "threads" not in {each.name for each in apart}:
        texts.append("other switches of PyTorch")
    return "; ".join(texts)


def _add(answers: hashlib._Hash, outputs: list[OutputArray]) -> None:
    for output in outputs:
        answers.update(f"{output.dtype} {output.shape}\n".encode())
        answers.update(np.ascontiguousarray(output).tobytes())


def _ignore(_samples: int) -> None:
    """Advance no progress: the unit is measured again."""


def _digest_of(labels: NDArray[np.int64] | None) -> Digest | None:
    return None if labels is None else Digest.of_bytes(labels.astype("<i8").tobytes())


def _fed(chosen: SelectedRuntime, binding: InputBinding | None, batch: Batch) -> Batch:
    """Return the inputs of a runtime. A recording has the samples on axis 0. `binding`: None for a
    runtime of the model, which takes the samples as they are."""
    if binding is None:
        return batch
    recorded = isinstance(chosen.runtime, RecordedRuntime)
    return binding.rows_by_input(batch) if recorded else binding.by_input(batch)


def _open(
    track: Track, model: nn.Module, case: MeasurementJob, *, start: tuple[InputBinding, Batch]
) -> None:
    """Give the track its runner, or the reason why it has none."""
    binding, example = start
    chosen, candidate, policy = track.chosen, case.candidate, case.policy

    def in_torch(device: str) -> Session:
        unusable = cublas_reason(policy.determinism)
        if unusable is not None:
            raise RuntimeUnusable(unusable)
        own = copy_model(model, device=device, double=binding.double)
        return TorchSession(own, binding, device=device, original=model)

    try:
        track.absent_reason = chosen.absent_reason()
        if track.absent_reason is not None:
            return
        by_inputs = binding if chosen.runtime.runs == "file" else None

        def opened(first: Batch = example) -> Session:
            if case.chained is not None and by_inputs is not None:
                return case.chained.session(chosen, policy, conditions=conditions(policy))
            return chosen.open(
                RunnableFile(candidate, in_torch),
                conditions=conditions(policy),
                example=_fed(chosen, by_inputs, first),
            )

        try:
            session = track.meter.open(opened, cuda=chosen.takes_cuda)
        except Exception as error:
            if _RUNNING in str(error):
                track.fail_on(example, error, compute=lambda batch: opened(batch).close())
                return
            raise
        track.runner = SessionRunner(session, candidate.subject, by_inputs)
    except (PolicyError, PackageMissing):  # which say nothing of the file
        raise
    except Exception as error:
        _refuse_missing_kernel(error, candidate)
        track.fail(error)


_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '(.*?)'")


def _refuse_missing_kernel(error: Exception, candidate: TestedFile) -> None:
    """Raise EvidenceError where ONNX Runtime's CPU provider has no kernel of an operator in the
    half or double precision of the file. Other devices may have one, so it is no fault of the
    file."""
    found = _NO_KERNEL.search(str(error))
    if found is None:
        return
    subject = candidate.subject
    dtypes = [spec.dtype for spec in (*subject.inputs, *subject.outputs)]
    halves = [dtype for dtype in dtypes if dtype in HALF]
    if halves:
        dtype, remedy = halves[0], "export it in float16 or float32"
    elif "float64" in dtypes or reads_double(RunnableFile(candidate).parsed(), found[1], found[2]):
        dtype, remedy = "float64", "export it in float32: call model.float() before the export"
    else:
        return
    raise EvidenceError(
        f"ONNX Runtime's CPU provider can't run {found[1]} in {dtype} (node '{found[2]}'). Set its "
        "runtimes to 'never' in the policy and judge the file on a device that can, or "
        f"{remedy}."
    ) from error


def _check_classes(
    outputs: list[OutputArray], names: list[str], span: Span, *, policy: Policy
) -> None:
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


_LEAST, _LEAST_WHOLE, _MOST = 3, 2, 20
"""Turns of one sample and of a whole batch; the first one warms up."""

_SHARE = 0.02
"""Of the time that the samples took: so much more may the turns take beyond the least."""

_FREE_S = 0.05
"""So much they may take in any case."""


def take_turns(stand: MeasurementContext, tracks: Sequence[Track], *, seconds: float) -> None:
    """Time batches of one sample, and the first full batch where there was no second one: its one
    time is that of a first run. `seconds`: how long all samples took.

    A file with a fixed batch can't take one sample, which is noted. A runtime that breaks has
    failed. Raises EvidenceError where the reference breaks.
    """
    size = stand.binding.batch_size
    allowed = max(_SHARE * seconds, _FREE_S)
    if stand.reference.meter.is_cold:
        batch = next(stand.samples.batches(size))
        for _ in _turns(allowed, least=_LEAST_WHOLE, taken=1):
            expected = stand.reference.timed_run(batch)
            for track in tracks:
                _repeat(track, batch, expected)
    if size == 1:  # its batches are of one sample
        return
    if stand.smallest > 1:
        fixed = f"the file has a fixed batch axis of {size}"
        reason = fixed if stand.binding.fixed else "the model takes no batch of one sample"
        for meter in (stand.reference.meter, *(track.meter for track in tracks)):
            meter.single_unmeasured = reason
        return
    samples = cycle(islice(stand.samples.batches(1), _LEAST))
    for sample, _ in zip(samples, _turns(allowed, least=_LEAST), strict=False):
        expected = stand.reference.single_run(sample)
        stand.answers.note_reference(sample, expected)
        for track in tracks:
            _take_turn(track, sample, expected, note=track.meter.single)


def _repeat(track: Track, batch: Batch, expected: Sequence[OutputArray]) -> None:
    note = partial(track.meter.batch, batch_size=length(batch))
    _take_turn(track, batch, expected, note=note)


def _take_turn(
    track: Track, batch: Batch, expected: Sequence[OutputArray], *, note: Callable[[float], None]
) -> None:
    """Compute it on the clock; a recording computes nothing. What it answers is kept for whoever
    asks for another time of it."""
    if track.runner is None or not track.runner.live:
        return
    try:
        track.compute(batch, expected, by=SessionRunner.run_kept)
        note(track.runner.seconds)
    except Exception as error:
        track.fail(error)


def _turns(allowed: float, *, least: int, taken: int = 0) -> Iterator[int]:
    """As many as that many seconds allow, and at least `least`; `taken` were before."""
    start = time.perf_counter()
    for turn in range(taken, _MOST):
        if turn >= least and time.perf_counter() - start > allowed:
            return
        yield turn


@dataclass(frozen=True)
class Measurement:
    """What `measure` saw; `evidence` adds where the file and the model come from."""

    runtimes: tuple[RuntimeEvidence, ...]
    environment: Environment
    dataset: Dataset
    reference_latency: Latency | None
    reference_cost: Cost | None
    reference_spread: float
    state_spread: dict[str, float]
    noise_unmeasured: str | None
    validity: ReferenceValidity | None = None
    undefined: tuple[UndefinedCast, ...] = ()
    trace_search: TraceSearch | None = None
    sample_bytes: int | None = None
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
            state_spread=self.state_spread,
            noise_unmeasured=self.noise_unmeasured,
            validity=self.validity,
            undefined=self.undefined,
            trace_search=self.trace_search,
            sample_bytes=self.sample_bytes,
            graph=self.graph,
            graph_unread=self.graph_unread,
            crew=self.crew,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def measure(
    case: MeasurementJob,
    *,
    instruments: Sequence[type[Instrument]],
    progress: Callable[[int, int], None] | None = None,
    crew: Crew | None = None,
) -> Measurement:
    """Compare the file with the model on all samples, in every runtime that the policy asks for.

    The reference is a copy of the model on the CPU, in eval mode, in float32 but for what the file
    has in float64 too (`gate.measure.job`); the model and all global switches are
    afterwards as they were. A file with a fixed batch axis is measured with that batch size.
    `instruments`: what is measured beyond the samples, in this order. `progress` is called with
    (samples done, samples in all), those that instruments compute included. `crew`: who measures
    all units but the first; the numbers are the same as without one.

    A runtime that breaks is recorded as failed while the others go on. Raises InputMismatch
    and DataError for samples and labels that don't fit, ModelError and EvidenceError where the
    reference itself can't be computed, DigestMismatch if the file is not (any more) the one
    that `candidate.subject` describes.
    """
    with SamplePass.open(case) as sample_pass:
        reference, first = sample_pass.reference, (sample_pass.example, sample_pass.expected)
        spread, state_spread = reference.spread(*first), reference.state_spread(*first)
        enabled = [kind for kind in instruments if kind.is_enabled(case)]
        before = [kind(sample_pass.stand) for kind in enabled if not kind.needs_runtimes]
        for instrument in before:
            instrument.run((), lambda _count: None)
        sample_pass.open_runtimes()
        if len(before) < len(enabled):
            sample_pass.stand.measure_sample_bytes()
        after = [kind(sample_pass.stand) for kind in enabled if kind.needs_runtimes]
        cost = sum(instrument.cost for instrument in after)
        advance = _Advance(progress, len(sample_pass.samples) + cost)
        start = time.perf_counter()
        others = sample_pass.units[1:]
        sample_pass.run_first(advance)
        if crew is not None and others:  # which works while the examination does
            _begin(crew, sample_pass, others)
            _run_all(after, sample_pass.tracks, advance)
            _take_parts(sample_pass, crew, advance)
        else:
            for unit in others:
                sample_pass.run(unit, advance)
                sample_pass.end_unit()
        for track in sample_pass.tracks:
            track.fold()
        take_turns(sample_pass.stand, sample_pass.tracks, seconds=time.perf_counter() - start)
        _steps.debug("rounding floor and second looks")
        sample_pass.rounding.widen()
        analyze_outliers(sample_pass.stand, sample_pass.tracks)
        if crew is None or not others:
            _run_all(after, sample_pass.tracks, advance)
        measured = [instrument.evidence() for instrument in (*before, *after)]
        measurement = Measurement(
            runtimes=tuple(track.evidence() for track in sample_pass.tracks),
            environment=sample_pass.environments[0],
            dataset=Dataset(
                sha256=sample_pass.samples.digest(),
                samples=len(sample_pass.samples),
                labelled=case.labels is not None,
                model_only=sample_pass.binding.model_only,
                batch_axes=sample_pass.binding.layout,
            ),
            reference_latency=sample_pass.reference.meter.latency(),
            reference_cost=sample_pass.reference.meter.cost(),
            reference_spread=spread,
            state_spread=state_spread,
            noise_unmeasured=sample_pass.truth.unmeasured,
            validity=sample_pass.truth.validity.evidence(),
            undefined=casts_on_samples(sample_pass.stand),
            crew=_record(crew, sample_pass) if crew is not None and others else None,
            samples=SampleTable.of({t.name: t.sample_rows() for t in sample_pass.tracks}),
            **dict(chain.from_iterable(fields.items() for fields in measured)),
        )
    case.candidate.verify()
    return measurement


def _run_all(
    instruments: Sequence[Instrument], tracks: Sequence[Track], advance: Callable[[int], None]
) -> None:
    for instrument in instruments:
        _steps.debug(instrument.title)
        instrument.run(tracks, advance)


def _record(crew: Crew, sample_pass: SamplePass) -> CrewRecord:
    return crew.record.model_copy(update={"environments": sample_pass.environments[1:]})


def _begin(crew: Crew, sample_pass: SamplePass, units: Sequence[WorkUnit]) -> None:
    own = sample_pass.lead()
    lead = crew.begin(own, units)
    if lead != own:
        sample_pass.judge_by(lead)


def _take_parts(sample_pass: SamplePass, crew: Crew, advance: Callable[[int], None]) -> None:
    """Fold what the crew gives in the order of units."""

    def take(part: UnitResult) -> None:
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
