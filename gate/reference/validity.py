"""Check whether the float64 reference computes the same function as the model."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gate.records.instruments import EPSILON, UNDERFLOW, ReferenceValidity
from gate.statistics.error_groups import Floats, chunks, representable
from gate.storage.arrays import OutputArray

# docs/metrics.md, "Valid references", has the rule and its measurement. Notation: `run` is a
# random-rounding run of the model, `null` a run with scale 0, q the error r32 - r64 of a sample in
# units of run - null.


MAX_ERROR = 28.0
"""Q: the largest q of a float64 reference that computes the model's function. Twice 13.7, the
99.9th percentile of the largest q of 231 correct models (measured on 27 November 2026)."""

NULL_UNITS = 8.0
"""Largest distance of a null run from the reference, in roundings."""

WIDE_FLOOR = 1e-4
"""Share of an output's spread above which more draws measure the floor."""

_MAX_EXCEPTIONS = 0.01
"""Share of the samples (at least one) that may exceed Q if a correct run explains them."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class GroupedSquares:
    """Sums of squares of one output, by sample and group of elements.

    Groups are the whole output, each channel (index of axis 1) and each column (of the last axis).
    """

    sums: tuple[Floats, ...]
    """Sums by kind of group, shape (samples, groups)."""

    @classmethod
    def between(cls, left: OutputArray, right: OutputArray, *, samples: int) -> GroupedSquares:
        """Return the sums for the difference of two arrays of equal shape, one batch."""
        parts = [
            grouped(
                difference(np.atleast_1d(left)[rows], np.atleast_1d(right)[rows]),
                batched=rows != slice(None),
            )
            for rows in _rows(left, samples)
        ]
        return functools.reduce(cls.joined, parts)

    def joined(self, later: GroupedSquares) -> GroupedSquares:
        """Return the sums of both. `later`: sums of the following samples. Kinds with a different
        number of groups are dropped."""
        pairs = zip(self.sums, later.sums, strict=False)
        alike = itertools.takewhile(lambda pair: pair[0].shape[1:] == pair[1].shape[1:], pairs)
        return GroupedSquares(tuple(np.concatenate(pair) for pair in alike))


@dataclass(frozen=True)
class OutputErrors:
    """Errors of the float64 reference on some samples of one output of floats."""

    errors: GroupedSquares
    """Sums for r32 - r64; infinite where r32 is finite and r64 is not."""
    values: GroupedSquares
    """Sums for r32, over the elements with an error."""
    counts: GroupedSquares
    """Number of elements with an error."""
    total: float
    """Sum of r32 over all finite elements."""
    squares: float
    """Sum of the squares of r32 over all finite elements."""
    elements: int

    @classmethod
    def between(cls, reference: OutputArray, truth: OutputArray, *, samples: int) -> OutputErrors:
        """Return the errors of one batch of outputs of equal shape."""
        parts = [
            cls._of_rows(
                np.atleast_1d(reference)[rows],
                np.atleast_1d(truth)[rows],
                batched=rows != slice(None),
            )
            for rows in _rows(reference, samples)
        ]
        return functools.reduce(cls.joined, parts)

    @classmethod
    def _of_rows(cls, reference: OutputArray, truth: OutputArray, *, batched: bool) -> OutputErrors:
        finite = np.isfinite(reference)
        values = np.where(finite, reference, 0.0).astype(np.float64)
        errors = difference(reference, representable(truth, reference))
        wrong = errors != 0.0
        return cls(
            grouped(errors, batched=batched),
            grouped(np.where(wrong, values, 0.0), batched=batched),
            grouped(wrong.astype(np.float64), batched=batched),
            float(values.sum()),
            float(np.square(values).sum()),
            int(finite.sum()),
        )

    def joined(self, later: OutputErrors) -> OutputErrors:
        """Return the errors of both. `later`: errors of the following samples."""
        return OutputErrors(
            self.errors.joined(later.errors),
            self.values.joined(later.values),
            self.counts.joined(later.counts),
            self.total + later.total,
            self.squares + later.squares,
            self.elements + later.elements,
        )

    @property
    def share(self) -> float:
        """The largest error as a share of the spread of the output, or of the rms of a channel or
        column. Errors of up to 8 roundings count as 0."""
        spread = max(self.squares - self.total**2 / max(self.elements, 1), 0.0)
        scales = [np.array([spread]), *(values.sum(axis=0) for values in self.values.sums[1:])]
        shares = [0.0]
        for errors, scale, least in zip(self.errors.sums, scales, self._least(), strict=True):
            total = errors.sum(axis=0)
            counts = total > NULL_UNITS**2 * least.sum(axis=0)
            with np.errstate(divide="ignore"):
                shares += np.sqrt(total[counts] / scale[counts]).tolist()
        return max(shares)

    @property
    def is_wide(self) -> bool:
        """Return True if the error exceeds 1e-4 of the spread of the output, or of the rms of a
        channel or column."""
        return self.share > WIDE_FLOOR

    def ratios(self, draws: Sequence[GroupedSquares]) -> list[Floats]:
        """Return q by kind of group, shape (samples, groups). `draws`: run - null on the same
        samples.

        The unit is the maximum of the rounding error of this sample, the median over the samples,
        and one rounding of the sample, because a group may be a single element.
        """
        return self._ratios(draws, lambda several: np.median(several, axis=0))

    def explained(self, draws: Sequence[GroupedSquares]) -> list[Mask]:
        """Return a mask of samples that one of the runs changes as much as float64 does."""
        ratios = self._ratios(draws, lambda several: several.max(axis=0))
        return [q <= MAX_ERROR for q in ratios]

    def _ratios(
        self, draws: Sequence[GroupedSquares], combine: Callable[[Floats], Floats]
    ) -> list[Floats]:
        ratios = []
        for kind, (errors, least) in enumerate(zip(self.errors.sums, self._least(), strict=True)):
            rounding = least
            if draws:
                several = np.stack([draw.sums[kind] for draw in draws])
                typical = np.median(np.median(several, axis=0), axis=0)
                rounding = np.maximum(np.maximum(least, combine(several)), typical)
            with np.errstate(all="ignore"):
                q = np.sqrt(errors / np.maximum(rounding, UNDERFLOW**2))
            ratios.append(np.where(errors > 0.0, q, 0.0))
        return ratios

    def _least(self) -> list[Floats]:
        """Return the effect of one rounding of the whole sample on each group."""
        count = np.maximum(self.counts.sums[0], 1.0)
        each = EPSILON**2 * self.values.sums[0] / count
        return [each * counts for counts in self.counts.sums]


def difference(left: OutputArray, right: OutputArray) -> Floats:
    """Return left - right in float64: 0 where `left` is not finite, infinite where only `right` is
    not."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(all="ignore"):
        result = np.where(np.isfinite(b), a - b, np.inf)
    return np.where(np.isfinite(a), result, 0.0)


def _rows(array: OutputArray, samples: int) -> Iterator[slice]:
    """Yield `chunks`, or one slice with everything if axis 0 is not the batch."""
    return chunks(array, single=not array.ndim or not len(array) == samples > 0)


def grouped(values: Floats, *, batched: bool) -> GroupedSquares:
    """Return the sums of squares by sample and group. An output without a batch axis counts as one
    sample."""
    rows = values if batched else values[None]
    with np.errstate(all="ignore"):
        squares = np.square(rows)
    sums = [squares.reshape(len(rows), -1).sum(axis=1, keepdims=True)]
    for axis in _axes(rows.shape) if batched else ():
        reduced_axes = tuple(each for each in range(1, rows.ndim) if each != axis)
        sums.append(squares.sum(axis=reduced_axes))
    return GroupedSquares(tuple(sums))


def _axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return channels and columns of an output with the samples on axis 0."""
    return tuple(dict.fromkeys([1, len(shape) - 1])) if len(shape) > 1 else ()


def exceeding(ratios: Sequence[Floats], rank: int) -> Mask | None:
    """Return the elements of an output of this rank, of all samples, whose group exceeds Q, in a
    shape that broadcasts; None without any."""
    over = [q > MAX_ERROR for q in ratios]
    if not any(kind.any() for kind in over):
        return None
    mask = over[0].reshape(-1, *[1] * (rank - 1))
    for axis, kind in zip(_axes((1,) * rank), over[1:], strict=False):
        mask = mask | np.expand_dims(kind, tuple(a for a in range(1, rank) if a != axis))
    return mask


def most_flips(samples: int) -> int:
    """Return how many samples a correct run may decide differently: 1 %, or one."""
    return max(1, math.floor(_MAX_EXCEPTIONS * samples))


def are_few(ratios: Sequence[Floats]) -> bool:
    """Return True if no group exceeds Q in more than one sample, or 1 % of them."""
    return all(bool(((q > MAX_ERROR).sum(axis=0) <= most_flips(len(q))).all()) for q in ratios)


def is_near(truth: OutputArray, reference: OutputArray) -> bool:
    """Return True if the error of float64 is small relative to the output, always for integers.

    The rules for ties cover integers.
    """
    if reference.dtype.kind != "f" or truth.shape != reference.shape:
        return True
    samples = len(reference) if reference.ndim else 1
    return not OutputErrors.between(reference, truth, samples=samples).is_wide


def is_valid(truth: OutputArray, reference: OutputArray, runs: Sequence[OutputArray]) -> bool:
    """Return True if float64 is valid for one output on inputs other than the first samples.

    Its error is small relative to the output, or one of `runs` changes each group as much. For
    integers, one of the runs has each integer that differs.
    """
    if truth.shape != reference.shape:
        return False
    runs = [run for run in runs if run.shape == reference.shape]
    if reference.dtype.kind != "f":
        differs = truth != reference
        for run in runs:
            differs &= run == reference
        return not bool(differs.any())
    samples = len(reference) if reference.ndim else 1
    errors = OutputErrors.between(reference, truth, samples=samples)
    if not errors.is_wide:
        return True
    draws = [GroupedSquares.between(reference, run, samples=samples) for run in runs]
    return all(bool(kind.all()) for kind in errors.explained(draws))


@dataclass(frozen=True)
class Validity:
    """The valid uses of the float64 reference and of random rounding."""

    record: ReferenceValidity = field(default_factory=ReferenceValidity)
    flipped: Mapping[int, Mask] = field(default_factory=dict)
    """By output, the elements of the first samples that float64 decides differently from float32 (a
    clamp, an argmax), as a correct run may. They do not count toward a floor."""

    @property
    def is_restricted(self) -> bool:
        """Return True if float64 is invalid for some of the first samples."""
        return bool(self.record.float64_differs or self.flipped)

    @property
    def needs_rounding(self) -> bool:
        """Return True if the floor of an output comes from random rounding only."""
        return bool(self.record.float64_differs) and self.record.rounding == "valid"

    def evidence(self) -> ReferenceValidity | None:
        """Return the record, or None if there are no limits."""
        if self.record in (ReferenceValidity(), ReferenceValidity(rounding="failed")):
            return None
        return self.record

    def baseline(
        self, truth: Sequence[OutputArray], reference: Sequence[OutputArray]
    ) -> list[OutputArray]:
        """Return the reference for the errors of each output: r64, or r32 if r64 computes another
        function."""
        if not self.record.float64_differs or len(truth) != len(reference):
            return list(truth)
        pairs = enumerate(zip(truth, reference, strict=True))
        return [r64 if self.record.uses_float64(index) else _wide(r) for index, (r64, r) in pairs]

    def checked(
        self,
        truth: Sequence[OutputArray],
        reference: Sequence[OutputArray],
        runs: Sequence[Sequence[OutputArray]],
    ) -> list[OutputArray]:
        """Return `baseline` for inputs without a measured q. Float64 is checked by random-rounding
        runs on these inputs, because the functions may differ only there; without runs it is not
        checked."""
        baseline = self.baseline(truth, reference)
        if len(truth) != len(reference) or not runs:
            return baseline
        return [
            r64 if is_valid(r64, r, [run[index] for run in runs if index < len(run)]) else _wide(r)
            for index, (r64, r) in enumerate(zip(baseline, reference, strict=True))
        ]

    def about_reference(
        self,
        run: Sequence[OutputArray],
        null: Sequence[OutputArray],
        reference: Sequence[OutputArray],
    ) -> list[OutputArray]:
        """Return a run in which r32 + sqrt(2) (run - null) replaces each output whose float64
        reference computes another function."""
        if [o.shape for o in run] != [o.shape for o in reference]:
            return list(run)
        # Bounds for reduced precision are those of float16; bfloat16 has 3 bits less.
        factor = math.sqrt(2.0) * (8.0 if self.record.half_dtype == "bfloat16" else 1.0)
        outputs = enumerate(zip(run, null, reference, strict=True))
        return [
            output
            if self.record.uses_float64(index) or output.dtype.kind != "f"
            else np.add(r, factor * difference(output, zero), dtype=np.float64)
            for index, (output, zero, r) in outputs
        ]

    def without_flips(
        self,
        output: int,
        truth: OutputArray,
        reference: OutputArray,
        candidate: OutputArray,
        *,
        start: int,
    ) -> tuple[OutputArray, OutputArray]:
        """Return truth and reference of a batch of the first samples. Where float64 decides
        differently, both have the value that is closer to the runtime's. `start`: the index of the
        first sample."""
        mask = self.flipped.get(output)
        if mask is None or not (flips := mask[start : start + len(truth)]).any():
            return truth, reference
        closer = _distance(candidate, truth) < _distance(candidate, reference)
        nearer = np.where(closer, truth, reference)
        return np.where(flips, nearer, truth), np.where(flips, nearer, reference)


UNRESTRICTED = Validity()
"""Float64 is assumed to be valid for every output."""


def _wide(array: OutputArray) -> OutputArray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _distance(left: OutputArray, right: OutputArray) -> Floats:
    with np.errstate(all="ignore"):
        return np.abs(np.subtract(left, right, dtype=np.float64))
