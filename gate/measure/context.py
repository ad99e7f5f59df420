"""The values that instruments share, and the instrument interface."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from gate.data.input_binding import InputBinding
from gate.data.reader import length
from gate.data.samples import SampleSet
from gate.errors import EvidenceError, GateError, describe_failure
from gate.measure.cost_meter import CostMeter, Stopwatch
from gate.measure.job import MeasurementJob
from gate.onnx_file.choices import Choice, ChoiceSession
from gate.onnx_file.reading import nodes_of
from gate.onnx_file.release_file import load_graphs
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
from gate.reference.torch_session import ActivationSizes, DispatchMode, run_in_parts
from gate.runtimes.recording_format import row_digests
from gate.statistics.accumulators import columns, worst_ratio
from gate.storage.arrays import Batch, OutputArray

if TYPE_CHECKING:
    from gate.measure.runtime_measurement import RuntimeMeasurement

_Mode = TypeVar("_Mode", bound=contextlib.AbstractContextManager[Any])

_SEARCHED = 256
"""Number of samples searched for the first one with nonzero outputs."""

_ROOM = 2**26
"""Bytes by which the largest tensor of an additional batch may exceed that of the measurement.
PyTorch and two ONNX Runtime sessions hold about three such tensors each, together 576 MiB. The C
library keeps the rest of the 1 GiB that a check may use in addition to a manual loop."""

_PART = 2**23
"""Bytes of the largest tensor in a run in float64 or under random rounding. The C library returns
large blocks to the kernel at once, and page faults then cost more than the arithmetic: 0.49 s per
sample with tensors of 52 MiB, 0.15 s with tensors of 6.5 MiB (measured on the net `convnet` of
`benchmarks.cost_nets` at 160 x 160)."""

UNLIMITED = 2**31
"""Batch size if memory is not a concern."""

_REPEATS = 15
"""Number of further runs of a model that draws random numbers."""

_DRAWS = 3
"""Number of runs under random rounding that determine which choices are open."""


_CHECK_MODEL = "Check that it is the model of the judged file and that it accepts these inputs."

_CAST = (
    "The gate computes the model in float32: cast to the dtype of the weights in forward, not to "
    "float16 or bfloat16."
)


class ReferencePass:
    """Timed runs of the reference. A failure is an error, because nothing can be judged."""

    def __init__(self, session: ReferenceSession) -> None:
        self.session = session
        self.meter = CostMeter()
        self.smallest = 1
        """The smallest batch size that the model accepts."""

    def run(self, batch: Batch) -> list[OutputArray]:
        """Return all outputs. Raises EvidenceError."""
        try:
            return self.session.run(batch)
        except GateError:
            raise
        except Exception as error:
            shapes = {name: f"{array.dtype} {array.shape}" for name, array in batch.items()}
            halves = any(dtype in str(error) for dtype in ("Half", "BFloat16"))
            remedy = _CAST if halves else _CHECK_MODEL
            raise EvidenceError(
                f"the reference model can't compute {shapes}: "
                f"{describe_failure(error).rstrip('.')}. {remedy}"
            ) from error

    def accepts(self, batch: Batch) -> bool:
        """Return whether the model can compute a batch."""
        try:
            self.run(batch)
        except GateError:
            return False
        return True

    def spread(self, batch: Batch, expected: list[OutputArray]) -> float:
        """Repeat a run and return max|a - b| / max|a|, the worst of all outputs and columns.

        It is infinite if the number of outputs, shapes, integers, bools or nonfinite values differ.
        A model that draws random numbers runs more often, because sampled classes may repeat.
        """
        state = torch.get_rng_state()
        spread = self._repeat(batch, expected)
        if torch.equal(torch.get_rng_state(), state):
            return spread
        return max(spread, *(self._repeat(batch, expected) for _ in range(_REPEATS)))

    def _repeat(self, batch: Batch, expected: list[OutputArray]) -> float:
        repeated = self.run(batch)
        if len(repeated) != len(expected):
            return math.inf
        return max((_spread(a, b) for a, b in zip(expected, repeated, strict=True)), default=0.0)

    def state_spread(self, batch: Batch, expected: list[OutputArray]) -> dict[str, float]:
        """Return the `spread` due to each parameter and buffer that forward changes.

        The repeated run starts with the value that the previous run left there.
        """
        state = self.session.state
        if not state.changed:
            return {}
        final_state = state.after(lambda: self.run(batch))

        def spread(*names: str) -> float:
            state.replace({name: final_state[name] for name in names})
            return self.spread(batch, expected)

        combined = spread(*final_state)
        if combined == 0.0:
            return dict.fromkeys(final_state, 0.0)
        individual = {name: spread(name) for name in final_state}
        if not any(individual.values()):
            return dict.fromkeys(final_state, combined)
        worst = max(individual, key=lambda name: individual[name])
        return individual | {worst: max(combined, individual[worst])}

    def timed_run(self, batch: Batch, stopwatch: Stopwatch) -> list[OutputArray]:
        """Run a batch and add its time to a stopwatch of `meter`."""
        start = time.perf_counter()
        outputs = self.run(batch)
        stopwatch.add(time.perf_counter() - start, batch_size=length(batch))
        return outputs

    def first_run(self, batch: Batch) -> list[OutputArray]:
        """Run the very first batch and time it."""
        start = time.perf_counter()
        outputs = self.run(batch)
        self.meter.first(time.perf_counter() - start, batch_size=length(batch))
        return outputs


def _spread(left: OutputArray, right: OutputArray) -> float:
    if left.shape != right.shape:
        return math.inf
    if np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"):
        return 0.0
    if left.dtype.kind != "f" or not np.array_equal(np.isfinite(left), np.isfinite(right)):
        return math.inf
    finite = np.isfinite(left)
    a, b = (np.where(finite, array, 0.0).astype(np.float64) for array in (left, right))
    return worst_ratio(columns(np.abs(a - b)), columns(np.abs(a)))


class Instrument(Protocol):
    """An additional measurement. `MeasurementRun.run` receives a list of instruments."""

    needs_runtimes: bool
    """True: runs after the samples, on open runtimes. False: runs before any runtime opens."""
    title: str
    """The label for the progress bar."""
    cost: int
    """Number of computed samples, for the progress bar."""

    def __init__(self, context: MeasurementContext) -> None:
        """Prepare the measurement, without running the model."""

    @staticmethod
    def is_enabled(job: MeasurementJob) -> bool:
        """Return whether the policy of the job enables this instrument."""

    def run(self, runtimes: Sequence[RuntimeMeasurement], advance: Callable[[int], None]) -> None:
        """Measure. Call `advance` with the number of samples after each step."""

    def evidence(self) -> Mapping[str, Any]:
        """Return the measured fields of `gate.records.evidence.Evidence`."""


class ProbeSource(Protocol):
    """The data from which probes are generated."""

    @property
    def binding(self) -> InputBinding:
        """The mapping of samples to inputs."""

    @property
    def samples(self) -> SampleSet:
        """All samples."""

    @property
    def policy(self) -> Policy:
        """The policy of the measurement."""

    @property
    def smallest(self) -> int:
        """The smallest batch size that the file and the model accept."""

    @property
    def most(self) -> int:
        """The largest size of additional batches."""


@dataclass(eq=False)
class MeasurementContext:
    """The objects that instruments share; valid inside `deterministic`.

    Only `run_example` and `measure_sample_bytes` change it.
    """

    model: ReferenceModel
    """A copy of the reference in float32, on the CPU, in eval mode. Never changed."""
    reference: ReferencePass
    truth: Truth
    binding: InputBinding
    samples: SampleSet
    policy: Policy
    tested_file: TestedFile
    sample_bytes: int = 0
    """Bytes per sample in the largest tensor of the forward; 0 if not measured."""
    rounding_errors: dict[int, list[Any]] = field(default_factory=dict, init=False)
    """Errors of the first samples under random rounding, by run; see `noise_floor`."""
    _choices: dict[bytes, list[Choice]] = field(default_factory=dict, init=False)
    """Decisions of the reference on the last batch."""
    _choice_sessions: dict[RuntimeName, ChoiceSession | None] = field(
        default_factory=dict, init=False
    )
    _separable: dict[bytes, bool] = field(default_factory=dict, init=False)

    @classmethod
    def bare(cls, job: MeasurementJob) -> MeasurementContext:
        """Return a context without a float64 reference, which only generates probes.

        Raises InputMismatch and DataError for samples that don't fit.
        """
        binding = job.bind()
        model = job.reference.copy(double=binding.double)
        truth = Truth(model, binding, samples=0)
        reference = ReferencePass(model.session(binding))
        bare = cls(model, reference, truth, binding, job.inputs, job.policy, job.candidate)
        with contextlib.suppress(EvidenceError):  # each probe reports the error itself
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
        """Return all outputs of one run under random rounding (`gate.reference.random_rounding`).

        `near`: the unperturbed batch, if `batch` is a perturbed copy of it. Raises EvidenceError if
        the model can't be run this way, or computes another function then.
        """
        validity = self.truth.validity
        if validity.record.rounding == "differs":
            raise EvidenceError(
                "the model gives other outputs if its operators run one by one, so that random "
                "rounding can't be measured. Remove state and fused paths from its forward."
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
        """Run a batch under random rounding, even if this may compute another function.

        `mode`: the dispatch mode for the operators; None: the mode of `decisions`.
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
        """True if the file uses GroupNormalization, whose kernel subtracts the squared mean."""
        return any(
            node.op_type == "GroupNormalization"
            for model in load_graphs(self.tested_file.path)
            for node in nodes_of(model)
        )

    def _fake_quantizes(self) -> bool:
        """Return whether the reference rounds floats to the steps of a quantized type."""
        mode = FakeQuantization()
        with mode:
            self.reference.run(self.example)
        return mode.is_used

    def reference_choices(self, batch: Batch) -> list[Choice]:
        """Return the decisions of the reference on a batch; cached for the last batch.

        Raises EvidenceError.
        """
        key = row_digests(batch).tobytes()
        if key not in self._choices:
            self._choices.clear()
            self._choices[key] = model_choices(partial(self.reference.run, batch))
        return self._choices[key]

    def decisions(self, batch: Batch) -> DispatchMode | None:
        """Return a mode that replays the decisions of the reference; None if rounding changes no
        decision, so that each run can decide by itself."""
        if not self.truth.validity.record.own_choices:
            return None
        return ChoiceReplay(self.reference_choices(batch), from_model=True)

    def replayed(
        self, runtime: RuntimeName, batch: Batch, *, scale: float = 1.0
    ) -> ReplayedReference | None:
        """Run the reference with the choices that the file makes in this runtime.

        Return None if no choice differs, or rounding leaves none open (`gate.reference.choices`).
        """
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
            return self.truth.extra_outputs(batch, mode=mode)

        try:
            choices = session.run(self.binding.by_input(batch))
            run = partial(self.reference.run, batch)
            return replay(run, choices, rounded, truth, draws=_DRAWS) if choices else None
        except Exception:  # a wrong file may make choices that are impossible in the model
            return None

    def _choice_session(self, runtime: RuntimeName) -> ChoiceSession | None:
        if runtime not in self._choice_sessions:
            self._choice_sessions[runtime] = None
            setup = ort_setup(self.policy, runtime)
            if setup is None:
                return None
            with contextlib.suppress(Exception):  # a failure to open is reported by the runtime
                self._choice_sessions[runtime] = ChoiceSession(
                    self.tested_file,
                    setup,
                    threads=torch.get_num_threads(),
                    deterministic=torch.are_deterministic_algorithms_enabled(),
                    quantizes=self._fake_quantizes,
                )
        return self._choice_sessions[runtime]

    @cached_property
    def nan_trace(self) -> NanTrace | None:
        """Finds where ONNX Runtime loses NaN; None if the graph can't be edited."""
        with contextlib.suppress(Exception):  # a release of several files, unsupported types
            return NanTrace(self.tested_file)
        return None

    @cached_property
    def open_casts(self) -> OpenCasts | None:
        """Casts in the file whose result ONNX leaves undefined; None as for `nan_trace`."""
        with contextlib.suppress(Exception):
            return OpenCasts(self.tested_file)
        return None

    def baseline(self, batch: Batch) -> list[OutputArray] | None:
        """Return the outputs from which errors on a batch are measured.

        They are the float64 outputs, or the reference's if float64 computes another function; None
        if the model can't run in float64.
        """
        truth = self.answers.truth(batch)
        if truth is None:
            return None
        return self.truth.validity.baseline(truth, self.answers.reference(batch))

    @cached_property
    def example(self) -> Batch:
        """A small batch with a size that differs from the measured ones, if the file allows it."""
        size = self.binding.batch_size
        if self.binding.fixed:
            return next(self.samples.batches(size))
        return next(self.samples.batches(self.smallest if size > 1 else 2))

    @property
    def smallest(self) -> int:
        """The smallest batch size that file and model accept; final after `run_example`."""
        return self.binding.batch_size if self.binding.fixed else self.reference.smallest

    @cached_property
    def applied_policy(self) -> Policy:
        """The policy with the bounds for this file."""
        return self.policy.for_file(self.tested_file.subject)

    @property
    def most(self) -> int:
        """The largest size of additional batches.

        It exceeds the batch size of the measurement by the number of samples that fit into `_ROOM`.
        """
        if not self.sample_bytes:
            return UNLIMITED
        return self.binding.batch_size + _ROOM // self.sample_bytes

    @property
    def part(self) -> int:
        """The largest number of samples that are computed at a time."""
        if not self.sample_bytes:
            return UNLIMITED
        least = 2 * self.smallest - 1  # then each part has at least `smallest` samples
        return max(least, _PART // self.sample_bytes)

    def part_size(self, batch: Batch) -> int:
        """Return how many samples of a batch to compute at a time in float64 or under random
        rounding: all, unless the tensors are large and the samples are independent."""
        count = length(batch)
        size = self.part
        if size >= count:
            return count
        key = row_digests(batch).tobytes()
        if key not in self._separable:
            self._separable[key] = self._is_separable(batch, size)
        return size if self._separable[key] else count

    def _is_separable(self, batch: Batch, size: int) -> bool:
        """Return whether the first and the last part have the same outputs as in the whole batch.

        If one sample affects all others, at least one of these parts changes.
        """
        try:
            outputs = self.answers.reference(batch)
            if any(r.ndim == 0 or len(r) != length(batch) for r in outputs):
                return False
            for rows in (slice(size), slice(-size, None)):
                part = self.reference.run({name: array[rows] for name, array in batch.items()})
                if len(part) != len(outputs):
                    return False
                if not all(map(agree, part, (output[rows] for output in outputs))):
                    return False
        except GateError:
            return False
        return True

    def watch(self, batch: Batch, make: Callable[[], _Mode]) -> _Mode:
        """Run the reference on this batch in a new dispatch mode and return the mode; an unused
        mode if the run fails."""
        mode = make()
        try:
            with mode:
                self.reference.run(batch)
        except GateError:
            return make()
        return mode

    def measure_sample_bytes(self) -> None:
        """Measure `sample_bytes` with two small forwards.

        It stays 0 for a fixed batch size and for a model that does not accept two batch sizes.
        """
        count, small = len(self.samples), self.smallest
        sizes = []
        for size in () if self.binding.fixed else (small, 2 * small):
            indices = [index % count for index in range(size)]
            sizes.append(ActivationSizes())
            try:
                batch = next(self.samples.take(indices).batches(size))
                with sizes[-1]:
                    self.reference.run(batch)
            except Exception:  # other checks report a model that fails here
                return
        if sizes:
            self.sample_bytes = sizes[0].bytes_per_sample(sizes[1], samples=small)

    def run_example(self) -> list[OutputArray]:
        """Return the outputs for `example`; this is the first run. Raises EvidenceError.

        Sets `smallest` to 2 for a model that accepts two samples but not one, such as a batch norm
        that computes its statistics from the batch.
        """
        try:
            return self.reference.first_run(self.example)
        except EvidenceError:
            if self.binding.fixed or length(self.example) > 1:
                raise
            self.reference.smallest = 2
            del self.example  # computed again, with two samples
            self.samples = self.samples.with_least(2)  # no last batch of one sample
            with contextlib.suppress(EvidenceError):
                return self.reference.first_run(self.example)
            raise

    @cached_property
    def first(self) -> int:
        """Index of the first sample that noise floor and stability use; usually 0.

        A detector may find nothing in the first pictures, which then have empty or zero outputs.
        Outputs without a value in the first 256 samples are ignored.
        """
        try:
            missing = _without_value(self.answers.reference(self.example))
        except EvidenceError:
            return 0
        first = at = 0
        for batch in self.samples.batches(self.binding.batch_size) if missing else ():
            rest = missing & _without_value(self.answers.reference(batch))
            if rest != missing:
                first, missing = at, rest
            at += length(batch)
            if not missing or at >= _SEARCHED:
                break
        return first

    @property
    def noise_samples(self) -> int:
        """Number of leading samples that are computed in float64."""
        count = self.policy.instruments.noise_samples
        return count and self.first + count

    def batches_with_truth(self) -> Iterator[Batch]:
        """Yield the batches of the measurement that are also computed in float64."""
        count = 0
        for batch in self.samples.batches(self.binding.batch_size):
            if count >= self.noise_samples:
                return
            yield batch
            count += length(batch)

    def measured_batch(self, sample: int) -> tuple[int, Batch]:
        """Return the batch of the measurement with a sample, after the index of its first one."""
        indices = self.samples.batch_around(sample, self.binding.batch_size)
        return indices.start, self._pick(indices)

    def smallest_batch(self, sample: int) -> tuple[Batch, int]:
        """Return the smallest possible batch with a sample, and the sample's row in it."""
        if self.smallest == 1:
            return self._pick([sample]), 0
        start, measured = self.measured_batch(sample)
        return measured, sample - start

    def _pick(self, indices: Sequence[int]) -> Batch:
        return next(self.samples.take(indices).batches(len(indices)))

    @cached_property
    def answers(self) -> ReferenceCache:
        """Cached outputs of the reference for the batches of instruments."""
        return ReferenceCache(self.reference.run, self.truth.extra_outputs)


def _without_value(outputs: list[OutputArray]) -> frozenset[int]:
    """Return the indices of outputs that are empty, or floats that are all zero."""
    return frozenset(
        index
        for index, output in enumerate(outputs)
        if not output.size or (output.dtype.kind == "f" and not output.any())
    )
