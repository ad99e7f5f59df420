"""What the first samples look like: the material that probes are made of."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np

from gate.instruments import ProbeKind
from gate.parity.runner import Batch
from gate.parity.samples import Samples
from gate.parity.stand import Stand
from gate.parity.statistics import Array

_LOOKED_AT = 64
"""Samples whose range of values is taken."""
_SEEDS = 2**63
"""A policy may have a negative seed, a generator may not."""
_ROWS = 8
"""Samples that are kept as material, at least."""


@dataclass(frozen=True)
class Probe:
    """An input by name, built when it is needed."""

    name: str
    kind: ProbeKind
    size: int
    """Samples in the batch."""
    build: Callable[[], Batch] = field(repr=False)

    @cached_property
    def batch(self) -> Batch:
        """The input, finite arrays of the samples' dtypes."""
        return self.build()


@dataclass(frozen=True)
class Observed:
    """The first samples, and the range of values of each input over the first 64."""

    rows: Batch
    low: dict[str, Array]
    """Smallest value of each input, of its dtype and shape ()."""
    high: dict[str, Array]
    small: int
    """The smallest batch of the file: one, or the fixed batch axis."""
    fixed: bool
    seed: int

    @classmethod
    def of(cls, stand: Stand) -> Observed:
        """Look at the samples of the stand."""
        binding, asked = stand.binding, stand.policy.instruments.probe_batch_sizes
        kept = binding.batch_size if binding.fixed else max(_ROWS, *asked, 1)
        rows = next(stand.samples.batches(kept))
        low, high = _range(stand.samples)
        small = binding.batch_size if binding.fixed else 1
        return cls(rows, low, high, small, binding.fixed, stand.policy.determinism.seed)

    def batch(self, size: int, *, start: int = 0) -> dict[str, Array]:
        """`size` samples from `start` on, around again where there are too few; own copies."""
        return {
            name: np.ascontiguousarray(array[np.arange(start, start + size) % len(array)])
            for name, array in self.rows.items()
        }

    def random(self, name: str) -> np.random.Generator:
        """A generator for what is called `name`: seeded by the policy, whatever came before."""
        return np.random.default_rng([self.seed % _SEEDS, zlib.crc32(name.encode())])


def _range(samples: Samples) -> tuple[dict[str, Array], dict[str, Array]]:
    low: dict[str, Array] = {}
    high: dict[str, Array] = {}
    for batch in islice(samples.batches(_ROWS), _LOOKED_AT // _ROWS):
        for name, array in batch.items():
            low[name] = np.minimum(low[name], array.min()) if name in low else array.min()
            high[name] = np.maximum(high[name], array.max()) if name in high else array.max()
    return low, high
