"""Measure the new file and the champion on the same samples."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.data.input_binding import InputBinding, bind_inputs
from gate.data.samples import SampleSet
from gate.decision.champion import Champion
from gate.errors import GateError, InputMismatch, LimitExceeded, OutputMismatch, first_line
from gate.measure.cost_meter import Stopwatch
from gate.measure.job import Opener
from gate.onnx_file.sessions import open_session, quiet_options, refuse_out_of_memory
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.policy.runtime_options import plain_setup
from gate.records.champion_comparison import AnswersBeside, ChampionComparison
from gate.records.evidence import Evidence, Latency
from gate.statistics.classification import ClassAnswers, ClassStatistics
from gate.storage.arrays import Batch

# ONNX Runtime on the CPU, optimised, as a consumer opens a file. Batches are computed by the two in
# turns, so that what slows the machine down slows down both.


_TIMED = 16
"""Batches that are timed at least: of few samples the first batch again and again."""


@dataclass(frozen=True)
class Compared:
    """The new file and what both compute on."""

    candidate: TestedFile
    samples: SampleSet
    labels: NDArray[np.int64] | None
    """Class indices, shape (samples,)."""
    batch_size: int
    policy: Policy
    chained: Opener | None = None
    """Of a release: runs its files, and those of the version that serves."""


def measure_incumbent(
    champion: Champion, *, beside: Compared, evidence: Evidence
) -> ChampionComparison:
    """Compare; or say why there is nothing to compare. `evidence`: on the new file.

    Raises LimitExceeded where memory runs out, StorageError and DigestMismatch where a file is not
    what it was, DataError for samples that can't be read.
    """
    fields = champion.fields_beside(evidence)
    if champion.onnx_path is None or champion.evidence is None:
        return ChampionComparison(state=champion.incomparable, absent=champion.absent, **fields)
    if champion.sha256 == evidence.subject.sha256:
        return ChampionComparison(state="compared", samples=len(beside.samples), **fields)
    old = TestedFile(champion.onnx_path, champion.evidence.subject)
    try:
        _check_preprocessing(champion.evidence, evidence)
        _check_outputs(old, beside.candidate)
        both = _Pair(old, beside)
        both.run()
    except (InputMismatch, OutputMismatch) as error:
        return ChampionComparison(state="incomparable", absent=str(error).rstrip("."), **fields)
    return ChampionComparison(
        state="compared",
        samples=len(beside.samples),
        outputs=both.answers(),
        champion_latency=both.latency(0),
        latency=both.latency(1),
        **fields,
    )


def _check_preprocessing(old: Evidence, new: Evidence) -> None:
    """Samples that were made for one file make the other look worse than it is."""
    theirs, ours = old.source.preprocess_sha256, new.source.preprocess_sha256
    if theirs is not None and ours is not None and theirs != ours:
        raise InputMismatch(
            f"its inputs are made by another preprocessing ({theirs.short}) than these samples "
            f"({ours.short})"
        )


def _check_outputs(old: TestedFile, new: TestedFile) -> None:
    theirs = {spec.name: spec.shape[1:] for spec in old.subject.outputs}
    for spec in new.subject.outputs:
        if spec.name not in theirs or not _fits(theirs[spec.name], spec.shape[1:]):
            has = ", ".join(f"'{name}' {list(shape)}" for name, shape in theirs.items())
            raise OutputMismatch(
                f"it gives {has} a sample, the new file '{spec.name}' {list(spec.shape[1:])}"
            )


def _fits(old: tuple[int | str, ...], new: tuple[int | str, ...]) -> bool:
    return len(old) == len(new) and all(
        isinstance(a, str) or isinstance(b, str) or a == b for a, b in zip(old, new, strict=True)
    )


class _Side(NamedTuple):
    """One of the two files, opened."""

    session: Any
    binding: InputBinding
    stopwatch: Stopwatch

    def run(self, batch: Batch, outputs: list[str]) -> list[Any]:
        """Raises OutputMismatch where ONNX Runtime does not compute it, LimitExceeded."""
        feed = self.binding.by_input(batch)
        start = time.perf_counter()
        try:
            found: list[Any] = self.session.run(outputs, feed)
        except Exception as error:
            raise _unusable(error) from error
        self.stopwatch.add(time.perf_counter() - start, batch_size=len(next(iter(batch.values()))))
        return self.binding.from_call(found)


class _Pair:
    """Both files: first the one that serves."""

    def __init__(self, old: TestedFile, beside: Compared) -> None:
        self._beside = beside
        self._sides = [self._open(old), self._open(beside.candidate)]
        sizes = {side.binding.batch_size for side in self._sides if side.binding.fixed}
        if len(sizes) > 1:
            raise InputMismatch(f"the two files have different fixed batch sizes: {sorted(sizes)}")
        self._batch_size = min(sizes, default=self._sides[0].binding.batch_size)
        self._names = [spec.name for spec in beside.candidate.subject.outputs]
        self._classes: dict[str, ClassStatistics] = {}

    def run(self) -> None:
        """All samples through both, then enough batches to time."""
        labels, start, turns = self._beside.labels, 0, 0
        first: Batch | None = None
        # A sample with NaN is no matter here: both get the same.
        for batch in self._beside.samples.allow_nan().batches(self._batch_size):
            first = batch if first is None else first
            outputs = self._turn(batch, turns)
            rows = len(next(iter(batch.values())))
            self._update(outputs, start, None if labels is None else labels[start : start + rows])
            start, turns = start + rows, turns + 1
        while first is not None and turns < _TIMED:
            self._turn(first, turns)
            turns += 1

    def answers(self) -> tuple[AnswersBeside, ...]:
        """Of each output of classes."""
        return tuple(_answers(name, each) for name, each in self._classes.items())

    def latency(self, side: int) -> Latency | None:
        """Of the one that serves (0), or of the new one (1)."""
        return self._sides[side].stopwatch.result()

    def _open(self, file: TestedFile) -> _Side:
        beside = self._beside
        binding = bind_inputs(
            file.subject.inputs,
            beside.samples.specs,
            count=len(beside.samples),
            batch_size=beside.batch_size,
            layout=beside.samples.layout,
        )
        try:
            session = self._session(file)
        except GateError:
            raise
        except Exception as error:
            raise _unusable(error) from error
        return _Side(session, binding, Stopwatch())

    def _session(self, file: TestedFile) -> Any:
        chained = self._beside.chained
        if (chained is None) == bool(file.subject.parts):
            raise OutputMismatch("one of the two is a release of several files, the other is not")
        if chained is not None:
            return chained.beside(file)
        return open_session(file.loadable(), quiet_options(), plain_setup("ort-cpu-optimized"))

    def _turn(self, batch: Batch, turn: int) -> list[list[Any]]:
        """Outputs of both; who goes first changes from batch to batch."""
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        found = {side: self._sides[side].run(batch, self._names) for side in order}
        return [found[0], found[1]]

    def _update(
        self, outputs: list[list[Any]], start: int, labels: NDArray[np.int64] | None
    ) -> None:
        for name, old, new in zip(self._names, *outputs, strict=True):
            if not (self._beside.policy.counts_classes(name) and _is_classes(old, new)):
                continue
            if name not in self._classes:
                self._classes[name] = ClassStatistics(new.shape[1])
            r, c = (ClassAnswers.of(side.astype(np.float64)) for side in (old, new))
            self._classes[name].update(r, c, start=start, labels=labels)


def _is_classes(old: Any, new: Any) -> bool:
    """Whether both are arrays of shape (batch, classes >= 2), of as many classes."""
    both = (old, new)
    if not all(isinstance(each, np.ndarray) and each.dtype.kind == "f" for each in both):
        return False
    return bool(new.ndim == 2 and new.shape[1] >= 2 and old.shape == new.shape)


def _answers(name: str, classes: ClassStatistics) -> AnswersBeside:
    result = classes.result()
    accuracy = result.accuracy
    return AnswersBeside(
        name=name,
        samples=classes.samples,
        disagreements=result.top1_disagreements,
        champion_accuracy=None if accuracy is None else accuracy.reference,
        accuracy=None if accuracy is None else accuracy.candidate,
    )


def _unusable(error: Exception) -> OutputMismatch:
    """Raises LimitExceeded where memory ran out: that is no word on the files."""
    if isinstance(error, LimitExceeded):
        raise error
    refuse_out_of_memory(error, what="running the new file beside the one that serves")
    return OutputMismatch(f"ONNX Runtime does not compute both: {first_line(error)[:300]}")
