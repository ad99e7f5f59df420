"""All outputs of one runtime against the reference's, in the file's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.parity.float64.late import LateErrors, by_floor
from gate.parity.float64.look import Look
from gate.parity.float64.runtime_floor import RuntimeFloor
from gate.parity.output_check import OutputCheck
from gate.parity.runners.runner import Runner
from gate.parity.statistics.answers import LOGITS, ClassReading
from gate.parity.statistics.output import Array, OutputStatistics, Span
from gate.parity.units.packing import packed, unpacked
from gate.records.output_parity import OutputParity


class OutputComparison:
    """Checks number, dtype and shape of the outputs of each batch, then accumulates.

    merge is associative up to the rounding of float64 sums; the left one is of earlier samples.
    """

    def __init__(
        self, check: OutputCheck, *, readings: Mapping[str, ClassReading] | None = None
    ) -> None:
        """`readings`: how outputs of classes are read, by name; else as logits."""
        self._check = check
        self._names = check.names
        self._readings = dict(readings or {})
        self._example: tuple[tuple[int, ...], ...] | None = None
        self._outputs: list[OutputStatistics] = []
        self._late: dict[str, LateErrors] = {}
        self._axes: dict[str, int] = {}
        """Of the samples, by output, where another batch size shows it; shared by all units."""
        self.floor = RuntimeFloor(check.names)
        """Of the first samples; one for all that come after."""

    def successor(self) -> OutputComparison:
        """An empty one for samples that come after, which are judged by the same floor."""
        empty = OutputComparison(self._check, readings=self._readings)
        empty._example, empty._axes, empty.floor = self._example, self._axes, self.floor
        return empty

    def state(self) -> Any:
        """What was accumulated, as JSON can hold it; the floor apart."""
        return packed({"outputs": self._outputs, "late": self._late})

    def take(self, state: Any) -> None:
        """Go on from what `state` gave. Raises EvidenceError for anything else."""
        taken = unpacked(state)
        self._outputs, self._late = taken["outputs"], taken["late"]
        for name, late in self._late.items():
            late.judged_by(self.floor.of_late(name))

    def merge(self, other: OutputComparison) -> OutputComparison:
        """Of both streams; both with the same floor."""
        merged = self.successor()
        pairs = zip(self._outputs, other._outputs, strict=True)
        whole = bool(self._outputs and other._outputs)
        merged._outputs = (
            [a.merge(b) for a, b in pairs] if whole else self._outputs or other._outputs
        )
        both = {
            name: late.merge(other._late[name])
            for name, late in self._late.items()
            if name in other._late
        }
        merged._late = {**self._late, **other._late, **both}
        return merged

    def note_example(self, reference: Sequence[Array]) -> None:
        """Remember the shapes of a batch of another size: an axis 1 that grows with the batch, as
        that of CLIP's matrices of similarity, is not one of classes."""
        self._example = tuple(output.shape for output in reference)

    def update(self, reference: Sequence[Array], candidate: Sequence[Array], span: Span) -> None:
        """Add one batch. Raises OutputMismatch, before anything of the batch is added."""
        self._check.check(reference, candidate)
        if not self._outputs:
            self._outputs = [
                OutputStatistics(name, r.dtype.name, self._readings.get(name, LOGITS))
                for name, r in zip(self._names, reference, strict=True)
            ]
            self._drop_matrices(reference)
        for statistics, r, c in zip(self._outputs, reference, candidate, strict=True):
            statistics.update(r, c, span)

    def _drop_matrices(self, reference: Sequence[Array]) -> None:
        for statistics, r, shape in zip(
            self._outputs, reference, self._example or (), strict=False
        ):
            if r.ndim == len(shape) == 2 and r.shape[1] != shape[1]:
                statistics.never_logits()

    def update_noise(
        self,
        truth: Sequence[Array],
        reference: Sequence[Array],
        candidate: Sequence[Array],
        *,
        samples: int,
    ) -> None:
        """Add one checked batch of outputs against those of the float64 reference."""
        self.floor.update(truth, reference, candidate, samples=samples)
        for output, r64, r in zip(self._outputs, truth, reference, strict=False):
            if output.logits is not None and r64.shape == r.shape:
                output.logits.update_truth(r64.argmax(axis=1), r.argmax(axis=1))

    def update_late(
        self, reference: Sequence[Array], candidate: Sequence[Array], span: Span
    ) -> None:
        """Add one checked batch that has no truth, in units of those that have one."""
        for name, r, c in zip(self._names, reference, candidate, strict=False):
            floors = self.floor.of_late(name)
            if not floors:
                continue
            if name not in self._late:
                self._late[name] = LateErrors(floors, axis=self._axis(name, r.shape, span.count))
            self._late[name].update(r, c, span)

    def _axis(self, name: str, shape: tuple[int, ...], count: int) -> int | None:
        """Of the samples: the only one that has another length in another batch, as in the states
        of an LSTM, else the first. It is the same in all batches."""
        example = dict(zip(self._names, self._example or (), strict=False)).get(name, ())
        lengths = zip(shape, example, strict=True) if len(example) == len(shape) else ()
        grown = [axis for axis, (one, other) in enumerate(lengths) if one != other]
        if len(grown) == 1 and shape[grown[0]] == count:
            return self._axes.setdefault(name, grown[0])
        return self._axes.get(name, 0 if shape[:1] == (count,) else None)

    @property
    def doubtful(self) -> list[int]:
        """Samples that need a second look, the worst ones of each output first."""
        lists = [late.doubtful for late in self._late.values()]
        lists += [output.logits.doubtful for output in self._outputs if output.logits]
        turns = chain.from_iterable(zip_longest(*lists))
        return list(dict.fromkeys(sample for sample in turns if sample is not None))

    @property
    def torn(self) -> list[int]:
        """Samples of which integers or bools differ."""
        return sorted({s for output in self._outputs for s in output.mismatches.doubtful})

    def excuse(self, sample: int, run: Sequence[Array | None]) -> None:
        """Take the integers that an honest runtime may have in a sample, by output, for ties."""
        for output, array in zip(self._outputs, run, strict=False):
            if array is not None:
                output.mismatches.look(sample, array)

    def unexplained(self, sample: int) -> int:
        """How many integers of a sample no honest runtime had so far."""
        return sum(output.mismatches.unexplained(sample) for output in self._outputs)

    def look(self, look: Look, runner: Runner) -> None:
        """Take what rounding makes of a doubtful sample for what an honest runtime may say."""
        measured: Sequence[Array] | None = None
        for index, output in enumerate(self._outputs):
            late, floor = self._late.get(output.name), look.floor(index)
            if floor is None:
                continue
            truth = np.asarray(look.truth[index], np.float64)
            logits = output.logits
            # All pairs of a batch have other columns in another batch.
            same = logits is not None and truth.shape == (1, logits.classes)
            if logits is not None and same and look.sample in logits.doubtful:
                logits.look(look.sample, truth, floor)
            if late is not None and late.axis is not None and look.sample in late.doubtful:
                measured = measured or look.measured(runner)
                c = look.part(measured[index], late.axis)
                if c.shape == truth.shape:
                    late.settle(look.sample, **self._settled(output.name, c, truth, floor))

    def _settled(self, name: str, candidate: Array, truth: Array, floor: Array) -> dict[str, float]:
        """The worst element of a sample in units of its own floor; and where the first samples'
        floor is larger, of that."""
        with np.errstate(all="ignore"):
            error = np.abs(np.subtract(candidate, truth, dtype=np.float64))
            error[~np.isfinite(error)] = 0.0
            by_first = by_floor(error, truth, self.floor.now(name))
            by_own = error / floor
        return {
            "by_own": float(by_own.max(initial=0.0)),
            "by_first": float(np.minimum(by_first, by_own).max(initial=0.0)),
        }

    def result(self) -> tuple[OutputParity, ...]:
        """One record an output, in the file's order."""
        return tuple(self._of(statistics) for statistics in self._outputs)

    def drain_rows(self) -> dict[str, NDArray[np.void]]:
        """One row for each sample since the last call, by output; none of an output whose axis 0 is
        not the batch."""
        return {statistics.name: statistics.drain_rows() for statistics in self._outputs}

    @property
    def of_classes(self) -> dict[str, bool]:
        """Whether its answers are classes, by output."""
        return {statistics.name: statistics.of_classes for statistics in self._outputs}

    def _of(self, statistics: OutputStatistics) -> OutputParity:
        late = self._late.get(statistics.name)
        noise = self.floor.result(statistics.name, diff=late.worst if late else None)
        parity = statistics.result()
        return parity if noise is None else parity.model_copy(update={"noise": noise})
