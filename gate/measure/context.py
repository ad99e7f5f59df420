"""The test stand: the reference, in float64 too, and the samples, for all instruments to share."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import nn

from gate.errors import EvidenceError, GateError, ModelError, describe_failure
from gate.parity.arrays.binding import Binding
from gate.parity.arrays.samples import Samples
from gate.parity.case import Case
from gate.parity.float64.reference import Float64Reference
from gate.parity.reference_answers import ReferenceAnswers
from gate.parity.runners.meter import Meter
from gate.parity.runners.torch_runner import TorchRunner, private_copy
from gate.parity.statistics.change import columns, worst_ratio
from gate.parity.statistics.output import Array
from gate.policy.policy import Policy
from gate.runtimes.runtime import Batch


class ReferencePass:
    """The reference pass, timed. What breaks here is an error, because nothing can be judged."""

    def __init__(self, model: nn.Module, binding: Binding) -> None:
        self._runner = TorchRunner(model, binding, device="cpu")
        self.meter = Meter()

    @property
    def keys(self) -> tuple[str | None, ...]:
        """Under which name the last run returned each output."""
        return self._runner.keys

    def run(self, batch: Batch) -> list[Array]:
        """All outputs. Raises EvidenceError."""
        try:
            return self._runner.run(batch)
        except GateError:
            raise
        except Exception as error:
            shapes = {name: f"{array.dtype} {array.shape}" for name, array in batch.items()}
            raise EvidenceError(
                f"the reference model can't compute {shapes}: {describe_failure(error)}. "
                "Check that the model is the one that was exported and takes these inputs."
            ) from error

    def spread(self, batch: Batch, expected: list[Array]) -> float:
        """max|a - b| / max|a| of a further run; the worst over the outputs and their columns,
        infinite for another number of outputs, other shapes, or other integers, bools or
        non-finite values."""
        again = self.run(batch)
        if len(again) != len(expected):
            return math.inf
        return max((_spread(a, b) for a, b in zip(expected, again, strict=True)), default=0.0)

    def timed_run(self, batch: Batch) -> list[Array]:
        """The same, on the clock."""
        start = time.perf_counter()
        outputs = self.run(batch)
        self.meter.batch(time.perf_counter() - start, batch_size=length(batch))
        return outputs

    def single_run(self, sample: Batch) -> list[Array]:
        """The same of a batch of one sample, beside the others."""
        start = time.perf_counter()
        outputs = self.run(sample)
        self.meter.single(time.perf_counter() - start)
        return outputs

    def first_run(self, batch: Batch) -> list[Array]:
        """The same of the first run of all."""
        start = time.perf_counter()
        outputs = self.run(batch)
        self.meter.first(time.perf_counter() - start, batch_size=length(batch))
        return outputs


class Truth:
    """The float64 reference as far as it goes: `unmeasured` says why it stopped, if it did."""

    def __init__(self, model: nn.Module, binding: Binding, *, samples: int) -> None:
        """`samples`: how many of the first samples `of_first` computes; 0 for none at all."""
        self._left = samples
        self._float64: Float64Reference | None = None
        self.unmeasured: str | None = None
        if not samples:
            self.unmeasured = "the policy asks for no noise floor (instruments.noise_samples: 0)"
            return
        try:
            self._float64 = Float64Reference(model, binding)
        except ModelError as error:
            self.unmeasured = str(error)

    def of(self, batch: Batch) -> list[Array] | None:
        """All outputs in float64, None where the model can't run in float64."""
        if self._float64 is None:
            return None
        try:
            return self._float64.run(batch)
        except ModelError as error:
            self._float64, self.unmeasured = None, str(error)
            return None

    def aside(self, batch: Batch) -> list[Array] | None:
        """The same for inputs beside the samples: what fails there is no reason for the samples."""
        if self._float64 is None:
            return None
        try:
            return self._float64.run(batch)
        except ModelError:
            return None

    def of_first(self, batch: Batch) -> list[Array] | None:
        """The same, in whole batches until the first `samples` are computed; then None."""
        if self._left <= 0:
            return None
        self._left -= length(batch)
        return self.of(batch)


def _spread(one: Array, other: Array) -> float:
    if one.shape != other.shape:
        return math.inf
    if np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
        return 0.0
    if one.dtype.kind != "f" or not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return math.inf
    finite = np.isfinite(one)
    a, b = (np.where(finite, array, 0.0).astype(np.float64) for array in (one, other))
    return worst_ratio(columns(np.abs(a - b)), columns(np.abs(a)))


class Material(Protocol):
    """What probes are made of."""

    @property
    def binding(self) -> Binding:
        """Which samples go to which input."""

    @property
    def samples(self) -> Samples:
        """All of them."""

    @property
    def policy(self) -> Policy:
        """What is asked for."""


@dataclass(frozen=True)
class Stand:
    """What the instruments work with, inside `deterministic`."""

    model: nn.Module
    """Our own copy of the reference: float32, CPU, eval. Never changed."""
    reference: ReferencePass
    truth: Truth
    binding: Binding
    samples: Samples
    policy: Policy

    @classmethod
    def bare(cls, case: Case) -> Stand:
        """One that makes probes and does not judge by them: without a float64 reference.

        Raises InputMismatch and DataError for samples that don't fit.
        """
        binding = case.bind()
        own = private_copy(case.model, device="cpu", double=binding.double)
        truth = Truth(own, binding, samples=0)
        return cls(own, ReferencePass(own, binding), truth, binding, case.inputs, case.policy)

    @cached_property
    def answers(self) -> ReferenceAnswers:
        """Of the reference to the batches that instruments make of the samples."""
        return ReferenceAnswers(self.reference.run, self.truth.aside)


def length(batch: Batch) -> int:
    """The number of samples in a batch."""
    return len(next(iter(batch.values())))
