"""Probes of other batch sizes, and of other sizes along the axes that the file says are dynamic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gate.evidence import TensorSpec
from gate.parity.probes.observed import Observed, Probe
from gate.parity.runner import Batch
from gate.parity.stand import Stand

_UNNAMED = "?"
"""How `gate.evidence.TensorSpec` writes a dynamic axis that the file gives no name."""


@dataclass(frozen=True)
class Axes:
    """The dynamic axes of the file beside the batch.

    Axes of one name are one, whichever inputs have them; one without a name is its own.
    """

    observed: Observed
    now: tuple[int, ...]
    """The samples' size along each."""
    places: tuple[tuple[tuple[str, int], ...], ...]
    """Of each: names of samples, and the axis there."""

    @classmethod
    def of(cls, stand: Stand, observed: Observed, inputs: Sequence[TensorSpec]) -> Axes:
        """`inputs`: the file's."""
        shapes = {spec.name: spec.shape for spec in inputs}
        places: dict[str, list[tuple[str, int]]] = {}
        for file_name, name in stand.binding.pairs:
            batch_axis, *others = shapes[file_name]
            for axis, size in enumerate(others, start=1):
                if size == _UNNAMED:
                    places[f"{name} {axis}"] = [(name, axis)]
                elif isinstance(size, str) and size != batch_axis:
                    places.setdefault(size, []).append((name, axis))
        now = tuple(observed.rows[name].shape[axis] for (name, axis), *_ in places.values())
        return cls(observed, now, tuple(map(tuple, places.values())))

    def batch(self, size: int, sizes: Sequence[int]) -> Batch:
        """`size` samples, cut off or repeated from their beginning along each axis."""
        batch = self.observed.batch(size)
        for length, places in zip(sizes, self.places, strict=True):
            for name, axis in places:
                indices = np.arange(length) % batch[name].shape[axis]
                batch[name] = np.ascontiguousarray(batch[name].take(indices, axis=axis))
        return batch


def batch_probes(stand: Stand, observed: Observed) -> Iterator[Probe]:
    """Batches of the policy's sizes; with a fixed batch axis only of that one."""
    sizes = stand.policy.instruments.probe_batch_sizes
    for size in (observed.small,) if observed.fixed else sizes:
        yield Probe(f"batch_{size}", "batch", size, partial(observed.batch, size))


def size_probes(axes: Axes) -> Iterator[Probe]:
    """Smaller, larger, odd, and not square; an axis that is the only one also twice as long."""
    small = axes.observed.small
    for sizes in dict.fromkeys(_variations(axes.now)):
        if sizes != axes.now:
            name = f"size_{'x'.join(map(str, sizes))}"
            yield Probe(name, "size", small, partial(axes.batch, small, sizes))


def _variations(now: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not now:
        return
    smaller = tuple(max(1, size * 3 // 4) for size in now)
    larger = tuple(size + max(1, size // 4) for size in now)
    yield smaller
    yield larger
    yield tuple(size + 1 + size % 2 for size in now)
    if len(now) > 1:
        yield tuple(larger[i] if i % 2 else smaller[i] for i in range(len(now)))
    else:
        yield (2 * now[0],)
