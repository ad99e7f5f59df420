"""The values that instruments share, and the instrument interface."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import onnx
import torch

from gate.data.input_binding import InputBinding
from gate.data.reader import length
from gate.data.samples import SampleSet
from gate.errors import EvidenceError, GateError, describe_failure
from gate.measure.cost_meter import CostMeter
from gate.measure.job import MeasurementJob
from gate.model.model_state import ModelState
from gate.onnx_file.choices import Choice, ChoiceSession
from gate.onnx_file.reading import nodes_of
from gate.onnx_file.release_file import onnx_files
from gate.onnx_file.tested_file import TestedFile
from gate.onnx_file.value_trace import NanTrace, OpenCasts
from gate.policy.policy import Policy
from gate.policy.runtime_options import ort_setup
from gate.records.runtime import RuntimeName
from gate.reference.cache import ReferenceCache, agree
from gate.reference.choices import ChoiceReplay, ReplayedReference, Run, model_choices, replay
from gate.reference.discretization import FakeQuantization
from gate.reference.float64 import Truth
from gate.reference.random_rounding import RoundingRun, run_rounded
from gate.reference.reference import ReferenceModel, ReferenceSession
from gate.reference.torch_session import (
    ActivationSizes,
    DispatchMode,
    run_in_parts,
)
from gate.runtimes.recording_format import row_digests
from gate.statistics.accumulators import columns, worst_ratio
from gate.storage.arrays import Batch, OutputArray

if TYPE_CHECKING:
    from gate.measure.runtime_measurement import RuntimeMeasurement

_Mode = TypeVar("_Mode", bound=contextlib.AbstractContextManager[Any])

_LOOKED_AT = 256
"""Samples among which the first with something to measure are looked for."""

_ROOM = 2**26
"""Bytes of the largest tensor by which a batch may exceed the measurement's. PyTorch and two
sessions of ONNX Runtime hold about three such tensors each: 576 MiB together. The rest of the
1 GiB that a check may take beyond a loop by hand holds what the C library keeps."""

_PART = 2**23
"""Bytes of the largest tensor in a run in float64 or under random rounding. The C library returns
large blocks to the kernel at once, and page faults then cost more than the arithmetic: 0.49 s a
sample in tensors of 52 MiB, 0.15 s in tensors of 6.5 MiB (measured on the net `convnet` of
`benchmarks.cost_nets` at 160 x 160)."""

UNLIMITED = 2**31
"""Samples of a batch, where memory is no concern."""

_DRAWS = 3
"""Runs under random rounding that tell which choices are open."""


class ReferencePass:
    """The reference pass, timed. What breaks here is an error, because nothing can be judged."""

    def __init__(self, session: ReferenceSession) -> None:
        self._session = session
        self.meter = CostMeter()
        self.smallest = 1
        """The samples in the smallest batch that the model takes."""

    @property
    def keys(self) -> tuple[str | None, ...]:
        """Under which name the last run returned each output."""
        return self._session.keys

    @property
    def state(self) -> ModelState:
        """The parameters and buffers that forward changes, which can be restored."""
        return self._session.state

    def run(self, batch: Batch) -> list[OutputArray]:
        """All outputs. Raises EvidenceError."""
        try:
            return self._session.run(batch)
        except GateError:
            raise
        except Exception as error:
            shapes = {name: f"{array.dtype} {array.shape}" for name, array in batch.items()}
            raise EvidenceError(
                f"the reference model can't compute {shapes}: {describe_failure(error)}. "
                "Check that the model is the one that was exported and takes these inputs."
            ) from error

    def run_operators(self, batch: Batch, outputs: list[OutputArray]) -> list[OutputArray]:
        """Run `ReferenceSession.run_operators`."""
        return self._session.run_operators(batch, outputs)

    def spread(self, batch: Batch, expected: list[OutputArray]) -> float:
        """max|a - b| / max|a| of a further run; the worst over the outputs and their columns,
        infinite for another number of outputs, other shapes, or other integers, bools or
        non-finite values."""
        again = self.run(batch)
        if len(again) != len(expected):
            return math.inf
        return max((_spread(a, b) for a, b in zip(expected, again, strict=True)), default=0.0)

    def state_spread(self, batch: Batch, expected: list[OutputArray]) -> dict[str, float]:
        """Return the `spread` of each parameter and buffer that forward changes.

        It is that of a run which begins with the state that a run before has left in it.
        """
        if not self.state.changed:
            return {}
        left = self.state.after(lambda: self.run(batch))

        def spread(*names: str) -> float:
            self.state.replace({name: left[name] for name in names})
            return self.spread(batch, expected)

        together = spread(*left)
        if together == 0.0:
            return dict.fromkeys(left, 0.0)
        alone = {name: spread(name) for name in left}
        if not any(alone.values()):
            return dict.fromkeys(left, together)
        worst = max(alone, key=lambda name: alone[name])
        return alone | {worst: max(together, alone[worst])}

    def timed_run(self, batch: Batch) -> list[OutputArray]:
        """Run a batch of the samples and time it."""
        start = time.perf_counter()
        outputs = self.run(batch)
        self.meter.batch(time.perf_counter() - start, batch_size=length(batch))
        return outputs

    def single_run(self, sample: Batch) -> list[OutputArray]:
        """Run a batch of one sample, in addition to the batches of the samples, and time it."""
        start = time.perf_counter()
        outputs = self.run(sample)
        self.meter.single(time.perf_counter() - start)
        return outputs

    def first_run(self, batch: Batch) -> list[OutputArray]:
        """Run the first batch of all and time it."""
        start = time.perf_counter()
        outputs = self.run(batch)
        self.meter.first(time.perf_counter() - start, batch_size=length(batch))
        return outputs


def _spread(one: OutputArray, other: OutputArray) -> float:
    if one.shape != other.shape:
        return math.inf
    if np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
        return 0.0
    if one.dtype.kind != "f" or not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return math.inf
    finite = np.isfinite(one)
    a, b = (np.where(finite, array, 0.0).astype(np.float64) for array in (one, other))
    return worst_ratio(columns(np.abs(a - b)), columns(np.abs(a)))


class Instrument(Protocol):
    """A measurement beyond the samples. `MeasurementRun.run` gets a list of them."""

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

    def run(self, runtimes: Sequence[RuntimeMeasurement], advance: Callable[[int], None]) -> None:
        """Measure. `advance` gets the numbers of samples as they are done."""

    def evidence(self) -> Mapping[str, Any]:
        """Return the fields of `gate.records.evidence.Evidence` that it measured."""


class ProbeSource(Protocol):
    """The inputs from which probes are made."""

    @property
    def binding(self) -> InputBinding:
        """Which samples go to which input."""

    @property
    def samples(self) -> SampleSet:
        """All of them."""

    @property
    def policy(self) -> Policy:
        """The policy of the measurement."""

    @property
    def smallest(self) -> int:
        """The smallest batch that the file and the model take."""

    @property
    def most(self) -> int:
        """The samples of the largest batch that is computed in addition to the measurement."""


@dataclass(frozen=True)
class MeasurementContext:
    """The objects that the instruments work with, inside `deterministic`."""

    model: ReferenceModel
    """A copy of the reference: float32, CPU, eval. Never changed."""
    reference: ReferencePass
    truth: Truth
    binding: InputBinding
    samples: SampleSet
    policy: Policy
    tested_file: TestedFile
    sample_bytes: int = 0
    """The bytes that a sample adds to the largest tensor of the forward; 0: not measured."""

    @classmethod
    def bare(cls, case: MeasurementJob) -> MeasurementContext:
        """One that makes probes and does not judge by them: without a float64 reference.

        Raises InputMismatch and DataError for samples that don't fit.
        """
        binding = case.bind()
        own = case.reference.copy(double=binding.double)
        truth = Truth(own, binding, samples=0)
        reference = ReferencePass(own.session(binding))
        bare = cls(own, reference, truth, binding, case.inputs, case.policy, case.candidate)
        with contextlib.suppress(EvidenceError):  # each probe reports it itself
            bare.run_example()
            bare.measure_sample_bytes()
        return bare

    def rounded_run(
        self,
        batch: Batch,
        *,
        draw: int,
        scale: float = 1.0,
        ties: bool = False,
        near: Batch | None = None,
    ) -> list[OutputArray]:
        """All outputs of one run under random rounding, as `gate.reference.random_rounding`.
        `near`: what the batch is but for rounding, where it is moved itself.

        Raises EvidenceError where the model can't be computed so, or computes something else then.
        """
        validity = self.truth.validity
        if validity.record.rounding == "differs":
            raise EvidenceError(
                "the model computes something else operator by operator, so that random rounding "
                "measures nothing. Keep its forward free of state and of fused paths."
            )
        return self.rounding_run(
            batch, RoundingRun(draw, scale, ties, fast_path=validity.record.fast_path), near=near
        )

    def rounding_run(
        self,
        batch: Batch,
        rounding: RoundingRun,
        *,
        mode: DispatchMode | None = None,
        near: Batch | None = None,
    ) -> list[OutputArray]:
        """Run a batch under random rounding, even if the runs may compute another function.

        `mode`: the mode that processes the operators; None: that of `decisions`.
        """
        mode = mode or self.decisions(batch)
        size = length(batch) if mode else self.part_size(near or batch)

        def run(batch: Batch) -> list[OutputArray]:
            with mode or nullcontext():
                return run_in_parts(self.reference.run, batch, size=size)

        rounding = replace(rounding, by_squares=lambda: self._groups_by_squares)
        return run_rounded(run, self.policy.determinism, batch, rounding)

    @cached_property
    def _groups_by_squares(self) -> bool:
        """Whether the file has GroupNormalization, whose kernel subtracts the squared mean."""
        files = onnx_files(self.tested_file.path).values()
        models = (onnx.load(path, load_external_data=False) for path in files)
        return any(n.op_type == "GroupNormalization" for model in models for n in nodes_of(model))

    def _fake_quantizes(self) -> bool:
        """Return whether the reference rounds floats to the steps of a quantized type."""
        watch = FakeQuantization()
        with watch:
            self.reference.run(self.example)
        return watch.is_used

    def reference_choices(self, batch: Batch) -> list[Choice]:
        """Return the decisions of the reference on a batch, kept for the last one. Raises
        EvidenceError."""
        key = row_digests(batch).tobytes()
        if key not in self._choices_by_batch:
            self._choices_by_batch.clear()
            self._choices_by_batch[key] = model_choices(partial(self.reference.run, batch))
        return self._choices_by_batch[key]

    @cached_property
    def _choices_by_batch(self) -> dict[bytes, list[Choice]]:
        return {}

    def decisions(self, batch: Batch) -> DispatchMode | None:
        """Return what lets a run decide as the reference does; None where each run decides by
        itself, because rounding changes no decision."""
        if not self.truth.validity.record.own_choices:
            return None
        return ChoiceReplay(self.reference_choices(batch), own=True)

    def replayed(
        self, runtime: RuntimeName, batch: Batch, *, scale: float = 1.0
    ) -> ReplayedReference | None:
        """The reference with the choices that the file makes on a batch in this runtime; None
        where no choice differs, or rounding does not leave one open (`gate.reference.choices`)."""
        session = self._choice_session(runtime)
        if session is None:
            return None
        fast_path = self.truth.validity.record.fast_path

        def rounded(run: Run, draw: int) -> list[OutputArray]:
            rounding = RoundingRun(
                draw, scale, fast_path=fast_path, by_squares=lambda: self._groups_by_squares
            )
            return run_rounded(lambda _: run(), self.policy.determinism, batch, rounding)

        def truth(mode: DispatchMode) -> list[OutputArray] | None:
            return self.truth.aside(batch, mode=mode)

        try:
            choices = session.run(self.binding.by_input(batch))
            run = partial(self.reference.run, batch)
            return replay(run, choices, rounded, truth, draws=_DRAWS) if choices else None
        except Exception:  # the choices of a wrong file may be none that the model can go on with
            return None

    def _choice_session(self, runtime: RuntimeName) -> ChoiceSession | None:
        if runtime not in self._choice_sessions:
            self._choice_sessions[runtime] = None
            setup = ort_setup(self.policy, runtime)
            if setup is None:
                return None
            with contextlib.suppress(Exception):  # a runtime that cannot open it fails by itself
                self._choice_sessions[runtime] = ChoiceSession(
                    self.tested_file,
                    setup,
                    threads=torch.get_num_threads(),
                    deterministic=torch.are_deterministic_algorithms_enabled(),
                    quantizes=self._fake_quantizes,
                )
        return self._choice_sessions[runtime]

    @cached_property
    def _choice_sessions(self) -> dict[RuntimeName, ChoiceSession | None]:
        return {}

    @cached_property
    def nan_trace(self) -> NanTrace | None:
        """Finds where ONNX Runtime loses NaN; None if the graph cannot be edited."""
        with contextlib.suppress(Exception):  # a release of several files, a graph with odd types
            return NanTrace(self.tested_file)
        return None

    @cached_property
    def open_casts(self) -> OpenCasts | None:
        """Conversions of the file whose result ONNX leaves open; None as of `nan_trace`."""
        with contextlib.suppress(Exception):
            return OpenCasts(self.tested_file)
        return None

    def baseline(self, batch: Batch) -> list[OutputArray] | None:
        """Return the values against which errors on a batch are measured.

        They are the outputs in float64, or those of the reference where float64 is another
        function; None where the model can't run in float64.
        """
        truth = self.answers.truth(batch)
        if truth is None:
            return None
        return self.truth.validity.baseline(truth, self.answers.reference(batch))

    @cached_property
    def example(self) -> Batch:
        """A small batch of another size than the measured ones, where the file allows it."""
        size = self.binding.batch_size
        if self.binding.fixed:
            return next(self.samples.batches(size))
        return next(self.samples.batches(self.smallest if size > 1 else 2))

    @property
    def smallest(self) -> int:
        """The smallest batch that the file and the model take, as far as `run_example` has seen."""
        return self.binding.batch_size if self.binding.fixed else self.reference.smallest

    @cached_property
    def applied_policy(self) -> Policy:
        """The policy as it bounds the file."""
        return self.policy.for_file(self.tested_file.subject)

    @property
    def most(self) -> int:
        """The samples of the largest batch that is computed in addition to the measurement's.

        They are so many more than its batches have as fit into memory with what both sides hold of
        them.
        """
        if not self.sample_bytes:
            return UNLIMITED
        return self.binding.batch_size + _ROOM // self.sample_bytes

    @property
    def part(self) -> int:
        """The samples of the largest part in which a batch is computed."""
        if not self.sample_bytes:
            return UNLIMITED
        least = 2 * self.smallest - 1  # of more samples each part has at least `smallest`
        return max(least, _PART // self.sample_bytes)

    def part_size(self, batch: Batch) -> int:
        """Return how many samples of a batch to compute at a time in float64 or under random
        rounding: all, unless the tensors are large and each sample has its own answer."""
        count = length(batch)
        size = self.part
        if size >= count:
            return count
        key = row_digests(batch).tobytes()
        if key not in self._separable:
            self._separable[key] = self._is_separable(batch, size)
        return size if self._separable[key] else count

    @cached_property
    def _separable(self) -> dict[bytes, bool]:
        return {}

    def _is_separable(self, batch: Batch, size: int) -> bool:
        """Return True if the first and the last part of a batch have the answers that they have in
        the whole batch. What one sample does to all others changes at least one of them."""
        try:
            whole = self.answers.reference(batch)
            if any(r.ndim == 0 or len(r) != length(batch) for r in whole):
                return False
            for rows in (slice(size), slice(-size, None)):
                part = self.reference.run({name: array[rows] for name, array in batch.items()})
                if len(part) != len(whole):
                    return False
                if not all(agree(one, r[rows]) for one, r in zip(part, whole, strict=True)):
                    return False
        except GateError:
            return False
        return True

    def watch(self, batch: Batch, make: Callable[[], _Mode]) -> _Mode:
        """Return a new mode of PyTorch after the reference ran this batch in it; one that saw
        nothing if the reference can't run it."""
        mode = make()
        try:
            with mode:
                self.reference.run(batch)
        except GateError:
            return make()
        return mode

    def measure_sample_bytes(self) -> None:
        """Measure `sample_bytes` by two forwards of few samples. It stays 0 of a fixed batch, and
        of a model that does not take batches of two sizes."""
        count, small = len(self.samples), self.smallest
        sizes = []
        for size in () if self.binding.fixed else (small, 2 * small):
            places = [place % count for place in range(size)]
            sizes.append(ActivationSizes())
            try:
                batch = next(self.samples.take(places).batches(size))
                with sizes[-1]:
                    self.reference.run(batch)
            except Exception:  # of a model that other checks refuse
                return
        if sizes:
            vars(self)["sample_bytes"] = sizes[0].each(sizes[1], samples=small)

    def run_example(self) -> list[OutputArray]:
        """Return the outputs for `example`, in the first run of all. Raises EvidenceError.

        From here on `smallest` is 2 for a model that takes two samples and not one: a batch norm
        that computes its own statistics needs two rows.
        """
        try:
            return self.reference.first_run(self.example)
        except EvidenceError:
            if self.binding.fixed or length(self.example) > 1:
                raise
            self.reference.smallest = 2
            vars(self).pop("example")
            vars(self)["samples"] = self.samples.with_least(2)  # no last batch of one sample
            with contextlib.suppress(EvidenceError):
                return self.reference.first_run(self.example)
            raise

    @cached_property
    def first(self) -> int:
        """Index of the sample from which on every output had a value; 0 mostly.

        A detector may find nothing in the first pictures: noise floor and stability need others.
        Outputs without a value in all of the first 256 samples are left out.
        """
        try:
            lacking = _without_value(self.answers.reference(self.example))
        except EvidenceError:
            return 0
        first = at = 0
        for batch in self.samples.batches(self.binding.batch_size) if lacking else ():
            rest = lacking & _without_value(self.answers.reference(batch))
            if rest != lacking:
                first, lacking = at, rest
            at += length(batch)
            if not lacking or at >= _LOOKED_AT:
                break
        return first

    @property
    def noise_samples(self) -> int:
        """How many of the first samples are computed in float64."""
        wanted = self.policy.instruments.noise_samples
        return wanted and self.first + wanted

    def batches_with_truth(self) -> Iterator[Batch]:
        """Yield the batches of the measurement that are computed in float64, too."""
        done = 0
        for batch in self.samples.batches(self.binding.batch_size):
            if done >= self.noise_samples:
                return
            yield batch
            done += length(batch)

    @cached_property
    def rounding_errors(self) -> dict[int, list[Any]]:
        """The errors of the first samples under random rounding, by number of the run.

        See `gate.measure.noise_floor`.
        """
        return {}

    @cached_property
    def answers(self) -> ReferenceCache:
        """The outputs of the reference for the batches that instruments make of the samples."""
        return ReferenceCache(self.reference.run, self.truth.aside)


def _without_value(outputs: list[OutputArray]) -> frozenset[int]:
    """Places of the outputs without an element, and of those of floats that are all zero."""
    return frozenset(
        place
        for place, output in enumerate(outputs)
        if not output.size or (output.dtype.kind == "f" and not output.any())
    )
