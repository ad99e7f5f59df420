"""A pass over the samples, unit by unit: the reference and every runtime are opened once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gate.errors import (
    DataError,
    DigestMismatch,
    EvidenceError,
    PackageMissing,
    PolicyError,
    RuntimeUnusable,
)
from gate.parity.arrays.binding import Binding
from gate.parity.arrays.samples import check_labels
from gate.parity.case import Case
from gate.parity.float64.second_look import RoundingFloor
from gate.parity.runners.determinism import cublas_reason, deterministic
from gate.parity.runners.environment import describe_environment
from gate.parity.runners.runner import Runner, conditions
from gate.parity.runners.torch_runner import TorchRunner, private_copy
from gate.parity.stand import ReferencePass, Stand, Truth, length
from gate.parity.statistics.answers import ClassReading
from gate.parity.statistics.output import Array, Span
from gate.parity.track import Track
from gate.parity.units.exchange import floor_of, judge_by, part_of, proof_of, take
from gate.parity.units.part import LeadState, RunProof, TrackPart, UnitAnswers, UnitPart
from gate.parity.units.unit import Unit, cut
from gate.policy.policy import Policy
from gate.records.environment import Determinism, Environment
from gate.runtimes.chosen import chosen_of
from gate.runtimes.runtime import Batch, RunnableFile, Session
from gate.storage.digest import Digest
from gate.story.machine import differences

_RUNNING = "while running"
"""What ONNX Runtime says where it breaks on the first batch, and not on the file."""
_HARMLESS = ("cores", "operating system", "kernel")


class SamplePass:
    """Made by `SamplePass.open`; what it holds is given back at the end of that."""

    def __init__(self, case: Case, switches: Determinism, *, noise: bool) -> None:
        policy, self.binding = case.policy, case.bind()
        self.case, self.samples, self.switches = case, case.inputs, switches
        self._labels = (
            None if case.labels is None else check_labels(case.labels, samples=len(self.samples))
        )
        self._names = [spec.name for spec in case.candidate.subject.outputs]
        readings = {
            name: ClassReading(
                normalised=policy.role_of(name) == "probabilities", points=policy.points
            )
            for name in self._names
        }
        self._proofs: dict[str, RunProof | None] = {}
        self.tracks = [
            Track(chosen, self._names, readings=readings)
            for chosen in chosen_of(policy, case.recordings)
        ]
        self.model = private_copy(case.model, device="cpu", double=self.binding.double)
        self.reference = ReferencePass(self.model, self.binding)
        wanted = policy.instruments.noise_samples
        self.truth = Truth(self.model, self.binding, samples=wanted if noise else 0)
        self.stand = Stand(
            self.model, self.reference, self.truth, self.binding, self.samples, policy
        )
        self.rounding = RoundingFloor(self.stand, self.tracks)
        self.units = cut(
            len(self.samples), batch_size=self.binding.batch_size, lead=wanted, most=case.units
        )
        self.environments: tuple[Environment, ...] = (describe_environment(switches),)
        """This one, and others that units were measured in."""
        self.example = next(self.samples.batches(_example_size(self.binding)))
        self.expected = self.reference.first_run(self.example)

    @classmethod
    @contextlib.contextmanager
    def open(cls, case: Case, *, noise: bool = True) -> Iterator[SamplePass]:
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

    def run(self, unit: Unit, advance: Callable[[int], None]) -> None:
        """Compute one unit on both sides; every track compares. `advance` gets the numbers of
        samples as they are done.

        Raises DataError for samples and labels that fit neither side, EvidenceError where the
        reference breaks.
        """
        self._run(unit, self._labels_of(unit), advance, lambda _expected: None)

    def _run(
        self,
        unit: Unit,
        labels: NDArray[np.int64] | None,
        advance: Callable[[int], None],
        hear: Callable[[list[Array]], None],
    ) -> None:
        at, samples = unit.start, self.samples.between(unit.start, unit.stop)
        for batch in samples.batches(self.binding.batch_size):
            count, start = length(batch), at - unit.start
            span = Span(at, count, None if labels is None else labels[start : start + count])
            expected = self.reference.timed_run(batch)
            hear(expected)
            _check_classes(expected, self._names, span, policy=self.case.policy)
            true = self.truth.of_first(batch)
            if true is None:  # the samples from here on are judged by the floor of those before
                self.rounding.widen()
            else:
                self.stand.answers.note(batch, expected, true)
            for track in self.tracks:
                track.step(batch, expected, span, truth=true)
            at += count
            advance(count)

    def end_unit(self) -> None:
        """What was compared since the last end is one unit, for every track."""
        for track in self.tracks:
            track.end_unit()

    def lead(self) -> LeadState:
        """What those need who measure the units after the first, which is done."""
        self.rounding.widen()
        self._proofs = {track.name: proof_of(track) for track in self.tracks}
        samples, labels = self.digests(self.units[0])
        floors = {track.name: floor_of(track) for track in self.tracks}
        return LeadState(floors=floors, samples_sha256=samples, labels_sha256=labels)

    def judge_by(self, lead: LeadState) -> None:
        """Take what another pass gave as its lead. Raises EvidenceError."""
        self.rounding.given()
        for track in self.tracks:
            judge_by(track, lead.floors.get(track.name))

    def part(self, unit: Unit) -> UnitPart:
        """Measure one unit for another pass. Raises as `run`."""
        labels, answers = self._labels_of(unit), hashlib.sha256()
        self._run(unit, labels, lambda _count: None, lambda outputs: _add(answers, outputs))
        return UnitPart(
            **self._answers(unit, labels, answers.hexdigest()).to_plain(),
            environment=self.environments[0],
            reference_seconds=self.reference.meter.drain(),
            runtimes={track.name: part_of(track) for track in self.tracks},
        )

    def answers(self, unit: Unit) -> UnitAnswers:
        """What the reference answers to a unit; nothing else is computed. Raises as `run`."""
        answers = hashlib.sha256()
        samples = self.samples.between(unit.start, unit.stop)
        for batch in samples.batches(self.binding.batch_size):
            _add(answers, self.reference.run(batch))
        return self._answers(unit, self._labels_of(unit), answers.hexdigest())

    def digests(self, unit: Unit) -> tuple[Digest, Digest | None]:
        """Of the samples of a unit, in their order, and of their labels, if there are any."""
        samples = self.samples.between(unit.start, unit.stop).digest()
        return samples, _digest_of(self._labels_of(unit))

    def _answers(self, unit: Unit, labels: NDArray[np.int64] | None, answers: str) -> UnitAnswers:
        return UnitAnswers(
            index=unit.index,
            start=unit.start,
            stop=unit.stop,
            samples_sha256=self.samples.between(unit.start, unit.stop).digest(),
            labels_sha256=_digest_of(labels),
            answers_sha256=Digest(answers),
        )

    def take(self, part: UnitPart, unit: Unit) -> None:
        """Add what another pass measured of the unit that comes next.

        Raises DigestMismatch where it had other samples or labels, EvidenceError where that was
        another machine, and the policy takes no other.
        """
        self._verify(part, unit)
        self.reference.meter.add(part.reference_seconds)
        anywhere = self.case.policy.environments == "any"
        for track in self.tracks:
            given = part.runtimes.get(track.name) or TrackPart(failure="it gave nothing")
            take(track, given, own=self._proofs.get(track.name), anywhere=anywhere)

    def _labels_of(self, unit: Unit) -> NDArray[np.int64] | None:
        if self.case.source_labels:
            return self.samples.between(unit.start, unit.stop).labels()
        return None if self._labels is None else self._labels[unit.start : unit.stop]

    def _verify(self, part: UnitPart, unit: Unit) -> None:
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


def _add(answers: hashlib._Hash, outputs: list[Array]) -> None:
    for output in outputs:
        answers.update(f"{output.dtype} {output.shape}\n".encode())
        answers.update(np.ascontiguousarray(output).tobytes())


def _digest_of(labels: NDArray[np.int64] | None) -> Digest | None:
    return None if labels is None else Digest.of_bytes(labels.astype("<i8").tobytes())


def _example_size(binding: Binding) -> int:
    """A small batch of another size than the measured ones, where the file allows it."""
    if binding.fixed:
        return binding.batch_size
    return 1 if binding.batch_size > 1 else 2


def _open(track: Track, model: nn.Module, case: Case, *, start: tuple[Binding, Batch]) -> None:
    """Give the track its runner, or the reason why it has none."""
    binding, example = start
    chosen, candidate, policy = track.chosen, case.candidate, case.policy

    def in_torch(device: str) -> Session:
        unusable = cublas_reason(policy.determinism)
        if unusable is not None:
            raise RuntimeUnusable(unusable)
        own = private_copy(model, device=device, double=binding.double)
        return TorchRunner(own, binding, device=device)

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
                example=first if by_inputs is None else by_inputs.by_input(first),
            )

        try:
            session = track.meter.open(opened, cuda=chosen.takes_cuda)
        except Exception as error:
            if _RUNNING in str(error):
                track.fail_on(example, error, compute=lambda batch: opened(batch).close())
                return
            raise
        track.runner = Runner(session, candidate.subject, by_inputs)
    except (PolicyError, PackageMissing):  # which say nothing of the file
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
