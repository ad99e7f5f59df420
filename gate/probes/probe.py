"""One probe; the profile of the samples."""

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
from gate.storage.arrays import Batch, OutputArray

_LOOKED_AT = 256
"""Samples whose range of values is taken, spread over all."""

_ELEMENTS = 2**22
"""Elements of a probe; at least 64 samples of any size."""

_LEAST_LOOKED_AT = 64

_SEEDS = 2**63
"""A policy may have a negative seed, a generator may not."""

LEAST_RATIO = 3.0
"""A scaled sample counts as that many times the samples only if it is well beyond their range: a
tenfold small sample may still lie within it."""

_ROWS = 8
"""Samples that are kept as material."""


@dataclass(frozen=True)
class Probe:
    """An input by name, built when it is needed."""

    name: str
    kind: ProbeKind
    size: int
    """Samples in the batch."""
    build: Callable[[], Batch] = field(repr=False)
    apart: bool = False
    """True where the samples have scales of their own, so that each is judged in its own."""
    finite: bool = False
    """True where only a finite answer says that the model takes the input."""
    beyond: bool = False
    """True where an answer with NaN or infinity says that the model does not take the input."""
    emptied: bool = False
    """True where a mask leaves nothing, so that attention has no answer."""
    factors: tuple[float, ...] = ()
    """By what each sample is scaled; empty: no sample is."""

    @cached_property
    def batch(self) -> Batch:
        """The input, arrays of the samples' dtypes."""
        return self.build()


@dataclass(frozen=True)
class SampleProfile:
    """Some of the samples, and the range of values of each input."""

    rows: Batch
    """The first ones."""
    spread: Batch
    """As many from everywhere, the last one included."""
    low: dict[str, OutputArray]
    """Smallest value of each input of numbers, of its dtype and shape ()."""
    high: dict[str, OutputArray]
    integers: Batch
    """All samples of the inputs of integers that were looked at."""
    small: int
    """The smallest batch of the file: one, or the fixed batch axis."""
    fixed: bool
    seed: int
    most: int = UNLIMITED
    """The samples of the largest batch, by the memory that the activations of one take."""
    shared: frozenset[str] = frozenset()
    """Inputs without a batch axis, if others have one: a call takes one value of them."""

    @classmethod
    def from_source(cls, context: ProbeSource) -> SampleProfile:
        """Look at the samples of the context."""
        binding, samples = context.binding, context.samples
        rows = next(samples.batches(binding.batch_size if binding.fixed else _ROWS))
        kept = len(next(iter(rows.values())))
        looked_at = _some(samples, _count(rows))
        numbers = {name: a for name, a in looked_at.items() if a.dtype.kind != "U"}
        return cls(
            rows=rows,
            spread=_some(samples, kept),
            low={name: _finite(array).min() for name, array in numbers.items()},
            high={name: _finite(array).max() for name, array in numbers.items()},
            integers={name: a for name, a in looked_at.items() if a.dtype.kind in "iu"},
            small=context.smallest,
            fixed=binding.fixed,
            seed=context.policy.determinism.seed,
            most=context.most,
            shared=binding.shared,
        )

    def batch(self, size: int, *, start: int = 0) -> dict[str, OutputArray]:
        """`size` samples from `start` on, around again where there are too few; own copies."""
        return self.taken([*range(start, start + size)])

    def taken(self, places: Sequence[int]) -> dict[str, OutputArray]:
        """The samples at these places of `rows`, around again beyond the last; own copies."""
        return {
            name: np.ascontiguousarray(array[np.asarray(places) % len(array)])
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
        return np.where(ratios >= LEAST_RATIO, np.maximum(ratios, scaled), ratios)

    def ratios(self, name: str, array: OutputArray) -> NDArray[np.float64]:
        """The largest magnitude of each sample in units of that of all samples; 0 where those are
        all zero."""
        peak = max(abs(float(self.low[name])), abs(float(self.high[name])))
        rows = np.abs(array.astype(np.float64)).reshape(len(array), -1)
        largest = np.where(np.isfinite(rows), rows, 0.0).max(axis=1, initial=0.0)
        return largest / peak if peak else np.zeros(len(array))

    def random(self, name: str) -> np.random.Generator:
        """Return a generator for `name`, seeded by the policy, independent of earlier draws."""
        return np.random.default_rng([self.seed % _SEEDS, zlib.crc32(name.encode())])


def _finite(array: OutputArray) -> OutputArray:
    """The numbers among them; zero without any."""
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return finite if finite.size else np.zeros(1, array.dtype)


def _count(rows: Batch) -> int:
    width = sum(int(array[0].size) for array in rows.values())
    return min(_LOOKED_AT, max(_LEAST_LOOKED_AT, _ELEMENTS // max(width, 1)))


def _some(samples: SampleSet, count: int) -> Batch:
    """At most `count` samples, the first and the last among them, evenly spread."""
    last = len(samples) - 1
    return samples.at([int(place) for place in np.linspace(0, last, min(count, last + 1))])
