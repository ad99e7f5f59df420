"""One runtime on its way through the samples: its comparison, its clock, and what broke."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gate.errors import EvidenceError, RuntimeAbsent, RuntimeUnusable, describe_failure
from gate.parity.comparison import OutputComparison
from gate.parity.float64.look import Look
from gate.parity.float64.noise import NoiseStatistics
from gate.parity.output_check import OutputCheck
from gate.parity.runners.batch_sizes import failure_of
from gate.parity.runners.meter import Meter
from gate.parity.runners.runner import Runner
from gate.parity.statistics.answers import ClassReading
from gate.parity.statistics.output import Array, Span
from gate.parity.statistics.row_spool import RowSpool
from gate.parity.statistics.table import ROW, OutputRows
from gate.parity.units.fold import PairwiseFold
from gate.records.evidence import RuntimeEvidence
from gate.records.instruments import ProbeParity, StabilityParity
from gate.records.output_parity import OutputParity
from gate.runtimes.chosen import ChosenRuntime
from gate.runtimes.runtime import Batch, Proof


class Track:
    """Follows one runtime. What breaks in it is its failure, and doesn't stop the others."""

    def __init__(
        self,
        chosen: ChosenRuntime,
        outputs: Sequence[str],
        *,
        readings: Mapping[str, ClassReading] | None = None,
    ) -> None:
        """`readings`: as of `OutputComparison`."""
        self.chosen = chosen
        self.name = chosen.name
        self.absent_reason: str | None = None
        self.failure: str | None = None
        self.unusable = False
        """Whether the failure is none of the file's."""
        self.runner: Runner | None = None
        self.stability: tuple[StabilityParity, ...] = ()
        """One an output, in the file's order; empty: not measured."""
        self.probes: list[ProbeParity] = []
        self._unprobed: list[str] = []
        self._check = OutputCheck(self.name, outputs)
        self.comparison = OutputComparison(self._check, readings=readings)
        self._units = PairwiseFold(OutputComparison.merge)
        self._rows = RowSpool(ROW)
        """Of the units that ended."""
        self.meter = Meter()

    def cut_off(self) -> OutputComparison:
        """What was compared since the last unit, as a unit of its own that goes elsewhere."""
        whole, self.comparison = self.comparison, self.comparison.successor()
        return whole

    def end_unit(self) -> None:
        """What was compared since the last end is one unit."""
        unit = self.cut_off()
        for output, rows in unit.drain_rows().items():
            self._rows.add(output, rows)
        self._units.add(unit)

    def fold(self) -> None:
        """Take all units together, after the last one."""
        self.comparison = self._units.result()

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
            with self.meter.watched():
                outputs = self.runner.run(batch)
            self.meter.batch(self.runner.seconds, batch_size=span.count)
            self.comparison.update(reference, outputs, span)
            if truth is not None:
                self.comparison.update_noise(truth, reference, outputs, samples=span.count)
            else:
                self.comparison.update_late(reference, outputs, span)
        except Exception as error:
            self.fail_on(batch, error, compute=self.runner.run)

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
            self.comparison.note_example(reference)
            self._check.check_keys(keys)
            with self.meter.watched():
                self.compute(batch, reference)
            self.meter.first(self.runner.seconds, batch_size=len(next(iter(batch.values()))))
        except Exception as error:
            self.fail_on(batch, error, compute=self.runner.run)

    def compute(
        self,
        batch: Batch,
        reference: Sequence[Array],
        *,
        by: Callable[[Runner, Batch], list[Array]] = Runner.run,
    ) -> list[Array]:
        """The outputs for a batch beside the samples, in number, dtypes and shapes as those of
        the reference. `by`: what of the runner computes them.

        Raises EvidenceError, OutputMismatch, and whatever the runtime raises."""
        if self.runner is None:
            raise EvidenceError(
                f"{self.name} has no runner: {self.failure or self.absent_reason}. "
                "Measure it where it can run."
            )
        outputs = by(self.runner, batch)
        self._check.check(reference, outputs)
        return outputs

    def takes_probe(self, name: str, batch: Batch) -> bool:
        """Whether it can be asked about these inputs; it notes what it can't be asked."""
        if self.runner is None:
            return False
        taken = self.runner.has_probe(batch)
        if not taken:
            self._unprobed.append(name)
        return taken

    @property
    def suspicion(self) -> float:
        """As `RuntimeFloor.suspicion`; 0 of a runtime that does not compute."""
        return 0.0 if self.runner is None else self.comparison.floor.suspicion()

    def widen(self, rounding: Sequence[NoiseStatistics | None]) -> None:
        """Judge by the error of random rounding where it is larger; one an output, in order."""
        self.comparison.floor.widen(rounding)

    @property
    def doubtful(self) -> list[int]:
        """Samples that need a second look; none of a runtime that does not compute."""
        return [] if self.runner is None else self.comparison.doubtful

    @property
    def torn(self) -> list[int]:
        """Samples of which integers differ; none of a runtime that does not compute."""
        return [] if self.runner is None else self.comparison.torn

    def excuse(self, sample: int, run: Sequence[Array | None]) -> None:
        """Take the integers that an honest runtime may have in a sample, by output, for ties."""
        self.comparison.excuse(sample, run)

    def unexplained(self, sample: int) -> int:
        """How many integers of a sample no honest runtime had so far."""
        return 0 if self.runner is None else self.comparison.unexplained(sample)

    def look(self, look: Look) -> None:
        """Judge a doubtful sample again."""
        if self.runner is None:
            return
        try:
            self.comparison.look(look, self.runner)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Note the failure, or that there is no such runtime for this model, and drop the runner
        with its memory."""
        if isinstance(error, RuntimeAbsent) and self.chosen.runtime.runs == "model":
            self.absent_reason = str(error)
        else:
            self.failure = describe_failure(error)
            self.unusable = isinstance(error, RuntimeUnusable | ImportError)
        self.close()

    def fail_on(
        self, batch: Batch, error: Exception, *, compute: Callable[[Batch], object]
    ) -> None:
        """As `fail`, of an error that came with a batch: the batch sizes that `compute` takes are
        noted, too, where it takes some only."""
        self.failure = failure_of(error, batch, compute)
        self.close()

    def close(self) -> None:
        """Give back what the runtime holds. A runtime that breaks even then has its failure."""
        runner, self.runner = self.runner, None
        try:
            if runner is not None:
                runner.close()
            self.chosen.close()
        except Exception as error:
            self.failure = self.failure or describe_failure(error)

    def evidence(self) -> RuntimeEvidence:
        """The record: absent, failed, or measured."""
        if self.runner is not None:
            try:
                return self._measured(self.runner.proof(), live=self.runner.live)
            except Exception as error:  # it can't prove anything, or not in the words of a record
                self.fail(error)
        return RuntimeEvidence(
            runtime=self.name,
            provider_requested=self.chosen.promises.provider,
            absent_reason=self.absent_reason,
            failure=self.failure,
            unusable=self.unusable,
            identity=self.chosen.identity(),
        )

    def _measured(self, proof: Proof, *, live: bool) -> RuntimeEvidence:
        return RuntimeEvidence(
            runtime=self.name,
            provider_requested=self.chosen.promises.provider,
            providers_active=proof.providers_active,
            nodes_per_provider=proof.nodes_per_provider,
            fallback_nodes=proof.fallback_nodes,
            session_options=proof.session_options,
            outputs=self._outputs(),
            latency=self.meter.latency() if live else None,
            memory_bytes=self.meter.memory_bytes(proof) if live else None,
            cost=self.meter.cost(proof) if live else None,
            probes=tuple(self.probes),
            unprobed=tuple(self._unprobed),
            identity=self.chosen.identity(proof),
        )

    def sample_rows(self) -> dict[str, OutputRows]:
        """One row a sample, by output, after `fold`; nothing of a runtime that does not compute."""
        if self.runner is None:
            return {}
        return {
            output: OutputRows(self._rows, output, classes)
            for output, classes in self.comparison.of_classes.items()
            if output in self._rows
        }

    def _outputs(self) -> tuple[OutputParity, ...]:
        outputs = self.comparison.result()
        if not self.stability:
            return outputs
        return tuple(
            output.model_copy(update={"stability": stability})
            for output, stability in zip(outputs, self.stability, strict=True)
        )
