"""All outputs of one runtime against the reference's, in the file's order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from gate.errors import OutputMismatch
from gate.parity.float64.late import LateErrors, in_units
from gate.parity.float64.look import Look
from gate.parity.float64.noise import NoiseStatistics
from gate.parity.runners.runner import Runner
from gate.parity.statistics.answers import LOGITS, ClassReading
from gate.parity.statistics.output import Array, OutputStatistics, Span
from gate.records.output_parity import OutputParity

_SUSPICIOUS_RATIO, _SUSPICIOUS_PEAK = 1.25, 3.0
"""In units of PyTorch's own error: from here on, that is no unit to judge by alone. Fixed, not the
policy's: the evidence must not depend on bounds."""


class OutputComparison:
    """Checks number, dtype and shape of the outputs of each batch, then accumulates."""

    def __init__(
        self,
        runtime: str,
        names: Sequence[str],
        *,
        readings: Mapping[str, ClassReading] | None = None,
    ) -> None:
        """`readings`: how outputs of classes are read, by name; else as logits."""
        self._runtime = runtime
        self._names = tuple(names)
        self._readings = dict(readings or {})
        self._example: tuple[tuple[int, ...], ...] | None = None
        self._outputs: list[OutputStatistics] = []
        self._noise: dict[str, NoiseStatistics] = {}
        self._rounding: dict[str, NoiseStatistics] = {}
        self._late: dict[str, LateErrors] = {}

    def check(self, reference: Sequence[Array], candidate: Sequence[Array]) -> None:
        """Raise OutputMismatch unless number, dtypes and shapes of the outputs are equal."""
        if not len(reference) == len(candidate) == len(self._names):
            raise OutputMismatch(
                f"{self._runtime} returned {len(candidate)} outputs, the file names "
                f"{list(self._names)}, and the model returns {len(reference)}. "
                "Export again with export.output_names as the model returns them, in its order."
            )
        for name, r, c in zip(self._names, reference, candidate, strict=True):
            self._check_output(name, r, c)

    def check_keys(self, keys: Sequence[str | None]) -> None:
        """Raise OutputMismatch where the file has the names that the model gives in another order,
        or only some of them.

        Some take the outputs of a file by name, some by position: both must get the right ones.
        Parts (`boxes.0`) may have other names beside a `scores` that kept its own, but not the
        name of another output. A number is no name: PyTorch's exporter numbers a constant output.
        """
        pairs = [(key, name) for key, name in zip(keys, self._names, strict=False) if key]
        renamed = [f"'{key}' is '{name}'" for key, name in pairs if key != name]
        taken = any(
            name in keys and name != key for key, name in zip(keys, self._names, strict=False)
        )
        whole = [(key, name) for key, name in pairs if "." not in key]
        kept = any(key in self._names for key, _ in whole)
        partly = kept and any(key != name and not name.isdecimal() for key, name in whole)
        if renamed and {key for key, _ in pairs} == {name for _, name in pairs}:
            raise OutputMismatch(
                f"{self._runtime} returned the outputs {list(self._names)}, the model returns "
                f"{list(keys)}: the same names in another order, so whoever takes them by position "
                "gets others. Export again with export.output_names in the model's order."
            )
        if partly or taken:
            raise OutputMismatch(
                f"{self._runtime} returned the outputs {list(self._names)}, and the model has "
                f"names of its own for some of them only: its {', '.join(renamed)}. Export again "
                "with export.output_names: null, or with other names for all."
            )

    def note_example(self, reference: Sequence[Array]) -> None:
        """Remember the shapes of a batch of another size: an axis 1 that grows with the batch, as
        that of CLIP's matrices of similarity, is not one of classes."""
        self._example = tuple(output.shape for output in reference)

    def update(self, reference: Sequence[Array], candidate: Sequence[Array], span: Span) -> None:
        """Add one batch. Raises OutputMismatch, before anything of the batch is added."""
        self.check(reference, candidate)
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
        """Add one checked batch of outputs against those of the float64 reference, floats only.

        An output that it returns in another shape has no noise floor.
        """
        for name, r64, r, c in zip(self._names, truth, reference, candidate, strict=False):
            if r.dtype.kind == "f" and r64.shape == r.shape:
                statistics = self._noise.setdefault(name, NoiseStatistics(columns=True))
                statistics.update(r64, r, c, samples=samples)
        for output, r64, r in zip(self._outputs, truth, reference, strict=False):
            if output.logits is not None and r64.shape == r.shape:
                output.logits.update_truth(r64.argmax(axis=1), r.argmax(axis=1))

    def update_late(
        self, reference: Sequence[Array], candidate: Sequence[Array], span: Span
    ) -> None:
        """Add one checked batch that has no truth, in units of those that have one."""
        for name, r, c in zip(self._names, reference, candidate, strict=False):
            noise = self._noise.get(name)
            if noise is None:
                continue
            if name not in self._late:
                units = noise.units(self._rounding.get(name))
                if not units:
                    continue
                self._late[name] = LateErrors(units, axis=self._axis(name, r.shape, span.count))
            self._late[name].update(r, c, span)

    def _axis(self, name: str, shape: tuple[int, ...], count: int) -> int | None:
        """Of the samples: the first, or the only one that has another length in another batch, as
        in the states of an LSTM."""
        if shape[:1] == (count,):
            return 0
        example = dict(zip(self._names, self._example or (), strict=False)).get(name, ())
        if len(example) != len(shape):
            return None
        grown = [axis for axis, length in enumerate(shape) if length != example[axis]]
        return grown[0] if len(grown) == 1 and shape[grown[0]] == count else None

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
            by_first = in_units(error, truth, self._noise[name].units(self._rounding.get(name)))
            by_own = error / floor
        return {
            "by_own": float(by_own.max(initial=0.0)),
            "by_first": float(np.minimum(by_first, by_own).max(initial=0.0)),
        }

    def suspicion(self) -> float:
        """How far the runtime is off, in any output, in units of what calls for another look at the
        floor: PyTorch's own error, or that of random rounding where it was measured."""
        noises = [
            statistics.result(rounding=self._rounding.get(name))
            for name, statistics in self._noise.items()
        ]
        parts = [
            max(
                noise.ratio / _SUSPICIOUS_RATIO,
                noise.peak / _SUSPICIOUS_PEAK,
                noise.diff * (noise.scatter or 1.0) / _SUSPICIOUS_PEAK,
            )
            for noise in noises
            if math.isfinite(noise.ratio)
        ]
        return max(parts, default=0.0)

    def widen(self, rounding: Sequence[NoiseStatistics | None]) -> None:
        """Judge by the error of random rounding where that is larger; one an output, in order."""
        floors = zip(self._names, rounding, strict=False)
        self._rounding = {name: floor for name, floor in floors if floor is not None}

    def result(self) -> tuple[OutputParity, ...]:
        """One record an output, in the file's order."""
        return tuple(self._of(statistics) for statistics in self._outputs)

    def sample_rows(self) -> dict[str, NDArray[np.void]]:
        """One row a sample, by output; none of an output whose axis 0 is not the batch."""
        rows = {statistics.name: statistics.sample_rows() for statistics in self._outputs}
        return {name: own for name, own in rows.items() if len(own)}

    def _of(self, statistics: OutputStatistics) -> OutputParity:
        noise = self._noise.get(statistics.name)
        parity = statistics.result()
        if noise is None:
            return parity
        late = self._late.get(statistics.name)
        noise_parity = noise.result(
            diff=late.worst if late else None, rounding=self._rounding.get(statistics.name)
        )
        return parity.model_copy(update={"noise": noise_parity})

    def _check_output(self, name: str, r: Array, c: Array) -> None:
        if r.dtype == c.dtype and r.shape == c.shape:
            return
        if r.dtype == c.dtype and r.ndim and r.ndim == c.ndim and r.shape[1:] == c.shape[1:]:
            remedy = "The batch axis was probably fixed at export: set export.dynamic_batch: true."
        elif r.dtype == c.dtype:
            remedy = "Export the same model again, with an example of the samples' shape."
        elif r.dtype == "float64":
            remedy = (
                "The model's forward makes it float64 by itself (a buffer or NumPy scalar of "
                "float64, .double()): cast it in forward, or keep float64 in the file."
            )
        else:
            remedy = "Export the model in float32, with the outputs that its forward returns."
        raise OutputMismatch(
            f"{self._runtime} returned {c.dtype} {c.shape} for output '{name}', "
            f"the model returns {r.dtype} {r.shape}. {remedy}"
        )
