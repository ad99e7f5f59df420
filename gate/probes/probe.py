"""A probe, and a profile of the samples that probes are made from."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gate.data.samples import SampleSet
from gate.measure.context import UNLIMITED, ProbeSource
from gate.records.instruments import ProbeKind
from gate.reference.random_rounding import seed
from gate.storage.arrays import Batch, OutputArray

_MAX_EXAMINED = 256
"""Number of samples whose range of values is examined, evenly spread."""

_MAX_ELEMENTS = 2**22
"""Largest number of elements that are examined; at least 64 samples of any size."""

_MIN_EXAMINED = 64

MIN_RATIO = 3.0
"""Smallest ratio to the samples' range at which a scaled sample counts as scaled. Ten times a small
sample may still lie within the range."""

_SOURCE_SAMPLES = 8
"""Number of samples that probes are made from."""


@dataclass(frozen=True)
class Probe:
    """A generated input by name; its arrays are built on first use."""

    name: str
    kind: ProbeKind
    size: int
    """Samples in the batch."""
    build: Callable[[], Batch] = field(repr=False)
    scaled_by_sample: bool = False
    """True if the samples have different scales, so each is judged in its own scale."""
    finite: bool = False
    """True if the model accepts the input only if all its outputs are finite."""
    beyond: bool = False
    """True if NaN or infinity in an output means that the model does not accept the input."""
    emptied: bool = False
    """True if a mask leaves nothing, so the result of attention is undefined."""
    factors: tuple[float, ...] = ()
    """Scale factor of each sample; empty if no sample is scaled."""

    @cached_property
    def batch(self) -> Batch:
        """Return the input arrays, with the samples' dtypes."""
        return self.build()


@dataclass(frozen=True)
class SampleProfile:
    """Some of the samples, and the range of values of each input."""

    rows: Batch
    """The first samples."""
    spread: Batch
    """As many samples spread over the whole set, including the last one."""
    low: dict[str, OutputArray]
    """Smallest value of each numeric input, with its dtype and shape ()."""
    high: dict[str, OutputArray]
    integers: Batch
    """All examined samples of the integer inputs."""
    small: int
    """Smallest batch that the file accepts: one, or the fixed batch size."""
    fixed: bool
    seed: int
    most: int = UNLIMITED
    """Largest batch that fits into memory, by the size of one sample's activations."""
    shared: frozenset[str] = frozenset()
    """Inputs without a batch axis, if others have one. A call accepts one value of them."""

    @classmethod
    def from_source(cls, context: ProbeSource) -> SampleProfile:
        """Create the profile of the context's samples."""
        binding, samples = context.binding, context.samples
        rows = next(samples.batches(binding.batch_size if binding.fixed else _SOURCE_SAMPLES))
        row_count = len(next(iter(rows.values())))
        values = _evenly_spread(samples, _examined_count(rows))
        numbers = {name: a for name, a in values.items() if a.dtype.kind != "U"}
        return cls(
            rows=rows,
            spread=_evenly_spread(samples, row_count),
            low={name: _finite(array).min() for name, array in numbers.items()},
            high={name: _finite(array).max() for name, array in numbers.items()},
            integers={name: a for name, a in values.items() if a.dtype.kind in "iu"},
            small=context.smallest,
            fixed=binding.fixed,
            seed=seed(context.policy.determinism, 0),
            most=context.most,
            shared=binding.shared,
        )

    def batch(self, size: int, *, start: int = 0) -> dict[str, OutputArray]:
        """Return copies of `size` samples from `start` on, repeated if there are too few."""
        return self.rows_at([*range(start, start + size)])

    def rows_at(self, indices: Sequence[int]) -> dict[str, OutputArray]:
        """Return copies of the samples at these indices of `rows`, modulo their number."""
        return {
            name: np.ascontiguousarray(array[np.asarray(indices) % len(array)])
            for name, array in self.rows.items()
        }

    def reach(self, probe: Probe) -> NDArray[np.float64]:
        """Return by what factor the floats of each sample of a probe exceed the samples'.

        Shape (samples of the probe,).
        """
        ratios = np.zeros(probe.size)
        for name, array in probe.batch.items():
            if array.dtype.kind == "f" and len(array) == probe.size:
                ratios = np.maximum(ratios, self.ratios(name, array))
        scaled = np.abs(probe.factors) if probe.factors else ratios
        return np.where(ratios >= MIN_RATIO, np.maximum(ratios, scaled), ratios)

    def ratios(self, name: str, array: OutputArray) -> NDArray[np.float64]:
        """Return the largest magnitude of each sample divided by that of all samples; 0 if all
        samples are zero."""
        peak = max(abs(float(self.low[name])), abs(float(self.high[name])))
        rows = np.abs(array.astype(np.float64)).reshape(len(array), -1)
        largest = np.where(np.isfinite(rows), rows, 0.0).max(axis=1, initial=0.0)
        return largest / peak if peak else np.zeros(len(array))

    def random(self, name: str) -> np.random.Generator:
        """Return a generator for `name`, seeded by the policy, independent of earlier draws."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])


def _finite(array: OutputArray) -> OutputArray:
    """Return the finite numbers; one zero if there are none."""
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return finite if finite.size else np.zeros(1, array.dtype)


def _examined_count(rows: Batch) -> int:
    width = sum(int(array[0].size) for array in rows.values())
    return min(_MAX_EXAMINED, max(_MIN_EXAMINED, _MAX_ELEMENTS // max(width, 1)))


def _evenly_spread(samples: SampleSet, count: int) -> Batch:
    """Return at most `count` evenly spread samples, including the first and the last."""
    last = len(samples) - 1
    return samples.at([int(index) for index in np.linspace(0, last, min(count, last + 1))])
