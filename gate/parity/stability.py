"""Repeatability and batch invariance: the same samples again, alone, and in other batches.

A runtime that keeps dropout, or BatchNorm in training mode, or a batch size in its graph gives a
sample another answer each time, or in other company.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gate.errors import EvidenceError
from gate.instruments import StabilityParity
from gate.parity.runner import Batch
from gate.parity.stand import Stand, length
from gate.parity.statistics import Array
from gate.parity.track import describe_failure

_EPSILON = 2.0**-24
"""Half the distance of 1.0 to the next float32."""

Compute = Callable[[Batch, Sequence[Array]], list[Array]]
"""Computes a batch and checks number, dtype and shapes of the outputs against the reference's."""


@dataclass(frozen=True)
class _Part:
    """Some of the samples as a batch of their own, as the reference computes it."""

    start: int
    batch: Batch
    expected: list[Array]

    @property
    def size(self) -> int:
        return length(self.batch)


class Stability:
    """The reference side, computed once; `of` judges one runtime after the other.

    All samples in one batch are the baseline; they are computed again in batches of one, of
    `instruments.probe_batch_sizes` and of the measurement's size, as far as the samples last. A
    file with a fixed batch axis is computed in batches of that size only: it is repeatable or not.

    A sample's place in an output is every axis that grows with the batch, whichever axis that is;
    an output that does not grow is compared whole. An output whose shape follows the data has no
    place for a sample: it is only repeated, and its batches are left to the probes. One sample has
    no other batch, so its batch invariance is NaN.
    """

    def __init__(self, stand: Stand) -> None:
        """Raises EvidenceError if the reference can't compute the samples."""
        self._bases = _bases(stand)
        self._parts: list[_Part] = []
        self._truth = [stand.truth.aside(base.batch) for base in self._bases]
        if not stand.binding.fixed:
            self._parts = list(_company(stand, self._bases[0]))
        self._samples = sum(base.size for base in self._bases)
        self._alone = not stand.binding.fixed and self._samples < 2
        self._units = [self._unit(index) for index in range(len(self._bases[0].expected))]

    @staticmethod
    def cost(stand: Stand) -> int:
        """How many samples `of` computes for one runtime, the baseline twice."""
        count, sizes = _count(stand), _sizes(stand)
        return 2 * count + sum(count // size * size for size in sizes)

    def of(self, compute: Compute) -> tuple[StabilityParity, ...]:
        """One record an output. Raises EvidenceError if the runtime can't compute a batch size,
        or returns other shapes in it."""
        first = [_outputs(compute, base) for base in self._bases]
        moved = [math.nan if self._alone else 0.0] * len(self._units)
        sizes = [{base.size for base in self._bases} for _ in self._units]
        for part in self._parts:
            outputs = _outputs(compute, part)
            for index, output in enumerate(outputs):
                place = self._place(index, part)
                if place is None:
                    continue
                sizes[index].add(part.size)
                known = part.expected[index]
                moved[index] = _worse(
                    moved[index], difference(output, first[0][index][place], known)
                )
        again = [_outputs(compute, base) for base in self._bases]
        records = []
        for index, unit in enumerate(self._units):
            repeated = 0.0
            for one, other, base in zip(first, again, self._bases, strict=True):
                known = base.expected[index]
                repeated = _worse(repeated, difference(one[index], other[index], known))
            records.append(
                StabilityParity(
                    samples=self._samples,
                    batch_sizes=tuple(sorted(sizes[index])),
                    repeatability=repeated,
                    batch_invariance=moved[index],
                    unit=unit,
                    repeatability_ratio=_in_units(repeated, unit),
                    batch_invariance_ratio=_in_units(moved[index], unit),
                )
            )
        return tuple(records)

    def _place(self, index: int, part: _Part) -> tuple[slice, ...] | None:
        """Where the part lies in the baseline's output, by the reference's shapes, or None."""
        base = self._bases[0]
        whole, seen = base.expected[index].shape, part.expected[index].shape
        if len(whole) != len(seen):
            return None
        place = []
        for long, short in zip(whole, seen, strict=True):
            if long == short:
                place.append(slice(None))
            elif long * part.size == short * base.size:
                rows = long // base.size
                place.append(slice(part.start * rows, part.start * rows + short))
            else:
                return None
        return tuple(place)

    def _unit(self, index: int) -> float:
        """See `StabilityParity.unit`; NaN where the reference itself has no stable answer.

        Integers have no rounding: theirs is the change of the reference alone.
        """
        unit = 0.0
        for part in self._parts:
            place = self._place(index, part)
            if place is not None:
                inside = self._bases[0].expected[index][place]
                unit = _worse(unit, difference(part.expected[index], inside, inside))
        for base, truth in zip(self._bases, self._truth, strict=True):
            known = base.expected[index]
            if known.dtype.kind == "f":
                unit = _worse(unit, _rounding(known, truth[index] if truth else None))
        return unit if math.isfinite(unit) else math.nan


def difference(left: Array, right: Array, reference: Array) -> float:
    """max|left - right| of two results of the same side, as float64.

    NaN or infinite in both is no agreement: the result is NaN, unless `reference` has the same
    there; on one side only it is infinite. NaN for arrays without an element, which prove nothing.
    """
    if left.size == 0:
        return math.nan
    if left.dtype.kind != "f":
        distance = float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max())
        return 0.0 if np.array_equal(left, right) else max(distance, 1.0)
    one, other, known = (array.astype(np.float64) for array in (left, right, reference))
    finite = np.isfinite(one) & np.isfinite(other)
    if (np.isfinite(one) != np.isfinite(other)).any():
        return math.inf
    alike = (np.isnan(one) & np.isnan(other) & np.isnan(known)) | ((one == other) & (one == known))
    if not (finite | alike).all():
        return math.nan
    return float(np.abs(one[finite] - other[finite]).max(initial=0.0))


def _bases(stand: Stand) -> list[_Part]:
    """All samples in one batch, or in one of the measurement's size where the reference takes no
    more; of a file with a fixed batch axis, in as many batches as they fill."""
    count, measured = _count(stand), stand.binding.batch_size
    if stand.binding.fixed:
        return list(_parts(stand, measured, count))
    try:
        return list(_parts(stand, count, count))
    except EvidenceError:
        return list(_parts(stand, measured, measured))


def _parts(stand: Stand, size: int, count: int) -> Iterator[_Part]:
    for start, batch in zip(range(0, count, size), stand.samples.batches(size), strict=False):
        yield _Part(start, batch, stand.reference.run(batch))


def _company(stand: Stand, base: _Part) -> Iterator[_Part]:
    """The samples of the baseline in smaller batches. A size that the reference itself can't
    compute is no size of this model, and is left out for every runtime."""
    for size in _sizes(stand):
        for start in range(0, base.size // size * size, size):
            batch = {name: array[start : start + size] for name, array in base.batch.items()}
            try:
                expected = stand.reference.run(batch)
            except EvidenceError:
                break
            yield _Part(start, batch, expected)


def _count(stand: Stand) -> int:
    asked, there = stand.policy.instruments.stability_samples, len(stand.samples)
    if stand.binding.fixed:
        size = stand.binding.batch_size
        return min(math.ceil(asked / size) * size, there)
    return min(asked, there)


def _sizes(stand: Stand) -> list[int]:
    """The batch sizes beside the baseline's."""
    if stand.binding.fixed:
        return []
    sizes = {1, stand.binding.batch_size, *stand.policy.instruments.probe_batch_sizes}
    return sorted(size for size in sizes if size < _count(stand))


def _outputs(compute: Compute, part: _Part) -> list[Array]:
    try:
        return compute(part.batch, part.expected)
    except Exception as error:
        reason = describe_failure(error).rstrip(".")
        raise EvidenceError(
            f"a batch of {part.size} samples can't be computed: {reason}. A batch size was "
            "probably baked in: use x.shape[0] as it is, and export with dynamic_batch: true."
        ) from error


def _rounding(known: Array, truth: Array | None) -> float:
    """The larger of max|r32 - r64| and 2^-24 max|r32|, over finite elements."""
    r32 = known.astype(np.float64)
    finite = np.isfinite(r32)
    least = _EPSILON * float(np.abs(r32[finite]).max(initial=0.0))
    if truth is None or truth.shape != known.shape:
        return least
    r64 = truth.astype(np.float64)
    finite &= np.isfinite(r64)
    return max(least, float(np.abs(r32[finite] - r64[finite]).max(initial=0.0)))


def _worse(left: float, right: float) -> float:
    """The larger; NaN if any is."""
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


def _in_units(moved: float, unit: float) -> float:
    """0 without any change, infinite where there is no unit, NaN where either is unknown."""
    if math.isnan(moved) or math.isnan(unit):
        return math.nan
    if moved == 0.0:
        return 0.0
    return moved / unit if unit > 0.0 else math.inf
