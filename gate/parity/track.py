"""One runtime on its way through the samples: its comparison, its clock, and what broke."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gate.errors import EvidenceError, GateError, first_line
from gate.parity.comparison import OutputComparison
from gate.parity.float64.look import Look
from gate.parity.float64.noise import NoiseStatistics
from gate.parity.runners.footprint import Footprint
from gate.parity.runners.latency import Stopwatch
from gate.parity.runners.runner import Batch, Runner
from gate.parity.statistics.answers import ClassReading
from gate.parity.statistics.output import Array, Span
from gate.records.evidence import OutputParity, RuntimeEvidence
from gate.records.instruments import ProbeParity, StabilityParity
from gate.records.runtime import RUNTIMES, RuntimeName


class Track:
    """Follows one runtime. What breaks in it is its failure, and doesn't stop the others."""

    def __init__(
        self,
        name: RuntimeName,
        outputs: Sequence[str],
        *,
        readings: Mapping[str, ClassReading] | None = None,
    ) -> None:
        """`readings`: as of `OutputComparison`."""
        self.name = name
        self.absent_reason: str | None = None
        self.failure: str | None = None
        self.runner: Runner | None = None
        self.stability: tuple[StabilityParity, ...] = ()
        """One an output, in the file's order; empty: not measured."""
        self.probes: list[ProbeParity] = []
        self._comparison = OutputComparison(name, outputs, readings=readings)
        self._stopwatch = Stopwatch()
        self.memory = Footprint()
        self._ran = False

    def step(
        self,
        batch: Batch,
        reference: Sequence[Array],
        span: Span,
        *,
        truth: Sequence[Array] | None = None,
    ) -> None:
        """Compute the batch and compare it, unless the runtime is absent or has failed.

        `truth`: the outputs of the float64 reference, where it ran on this batch.
        """
        if self.runner is None:
            return
        try:
            with contextlib.nullcontext() if self._ran else self.memory.watched():
                start = time.perf_counter()
                outputs = self.runner.run(batch)
                seconds = time.perf_counter() - start
            self._ran = True
            self._stopwatch.add(seconds, batch_size=span.count)
            self._comparison.update(reference, outputs, span)
            if truth is not None:
                self._comparison.update_noise(truth, reference, outputs, samples=span.count)
            else:
                self._comparison.update_late(reference, outputs, span)
        except Exception as error:
            self.fail(error)

    def probe(
        self, batch: Batch, reference: Sequence[Array], keys: Sequence[str | None] = ()
    ) -> None:
        """Compute a batch of another size, only to see that the outputs have the right shapes,
        and the names of `keys`, by which the model returns them.

        A batch size that was baked in passes unseen where all batches have that size.
        """
        if self.runner is None:
            return
        try:
            self._comparison.note_example(reference)
            self._comparison.check_keys(keys)
            self.compute(batch, reference)
        except Exception as error:
            self.fail(error)

    def compute(self, batch: Batch, reference: Sequence[Array]) -> list[Array]:
        """The outputs for a batch beside the samples, in number, dtypes and shapes as those of
        the reference. Raises EvidenceError, OutputMismatch, and whatever the runtime raises."""
        if self.runner is None:
            raise EvidenceError(
                f"{self.name} has no runner: {self.failure or self.absent_reason}. "
                "Measure it where it can run."
            )
        outputs = self.runner.run(batch)
        self._comparison.check(reference, outputs)
        return outputs

    @property
    def suspicion(self) -> float:
        """As `Comparison.suspicion`; 0 of a runtime that does not compute."""
        return 0.0 if self.runner is None else self._comparison.suspicion()

    def widen(self, rounding: Sequence[NoiseStatistics | None]) -> None:
        """Judge by the error of random rounding where it is larger; one an output, in order."""
        self._comparison.widen(rounding)

    @property
    def doubtful(self) -> list[int]:
        """Samples that need a second look; none of a runtime that does not compute."""
        return [] if self.runner is None else self._comparison.doubtful

    @property
    def torn(self) -> list[int]:
        """Samples of which integers differ; none of a runtime that does not compute."""
        return [] if self.runner is None else self._comparison.torn

    def excuse(self, sample: int, run: Sequence[Array | None]) -> None:
        """Take the integers that an honest runtime may have in a sample, by output, for ties."""
        self._comparison.excuse(sample, run)

    def unexplained(self, sample: int) -> int:
        """How many integers of a sample no honest runtime had so far."""
        return 0 if self.runner is None else self._comparison.unexplained(sample)

    def look(self, look: Look) -> None:
        """Judge a doubtful sample again."""
        if self.runner is None:
            return
        try:
            self._comparison.look(look, self.runner)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Note the failure and drop the runner with its memory."""
        self.failure = describe_failure(error)
        self.runner = None

    def evidence(self) -> RuntimeEvidence:
        """The record: absent, failed, or measured."""
        provider = RUNTIMES[self.name].provider
        if self.runner is None:
            return RuntimeEvidence(
                runtime=self.name,
                provider_requested=provider,
                absent_reason=self.absent_reason,
                failure=self.failure,
            )
        proof = self.runner.proof()
        return RuntimeEvidence(
            runtime=self.name,
            provider_requested=provider,
            providers_active=proof.providers_active,
            nodes_per_provider=proof.nodes_per_provider,
            fallback_nodes=proof.fallback_nodes,
            session_options=proof.session_options,
            outputs=self._outputs(),
            latency=self._stopwatch.result(),
            memory_bytes=self.memory.bytes,
            probes=tuple(self.probes),
        )

    def sample_rows(self) -> dict[str, NDArray[np.void]]:
        """One row a sample, by output; nothing of a runtime that does not compute."""
        return {} if self.runner is None else self._comparison.sample_rows()

    def _outputs(self) -> tuple[OutputParity, ...]:
        outputs = self._comparison.result()
        if not self.stability:
            return outputs
        return tuple(
            output.model_copy(update={"stability": stability})
            for output, stability in zip(outputs, self.stability, strict=True)
        )


def describe_failure(error: Exception) -> str:
    """The exception in one line; the gate's own errors speak for themselves."""
    if isinstance(error, GateError):
        return str(error).strip()
    line, remedy = first_line(error), ""
    if isinstance(error, MemoryError) or "memory" in line.lower():
        remedy = " Use a smaller batch size, or free the device."
    return f"{type(error).__name__}: {line}{remedy}"
