"""The edges of conditions on sizes: at which batch, height or length the model's code branches.

To the model's code a size is a number, to the tracer it is a tensor. So the model is traced
while its reads are watched, at the samples' size and at another one: how a comparison's margin
grows along an axis says where it flips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.parity.probes.sizes import Axes
from gate.parity.probes.traced import Traced
from gate.parity.probes.watch import Watch
from gate.runtimes.runtime import Batch

_LARGEST = 2**18
"""Elements of the largest input that is tried, unless 16 samples have more."""
_MOST_SAMPLES = 16


def inputs_beyond_edges(traced: Traced, axes: Axes) -> Iterator[tuple[str, Batch]]:
    """One input beyond each edge that lies near enough; nothing where no size is compared."""
    small = axes.observed.small
    here = (small, *axes.now)
    example = axes.batch(small, axes.now)
    base = traced.sizes_watched(example)
    watch, _ = traced.watched(example)
    if base is None or len(base.reads) == len(watch.reads):
        return
    allowed = max(_LARGEST, _MOST_SAMPLES * _elements(example) // small)
    tried = {here}
    for axis in range(axes.observed.fixed, len(here)):
        step = max(1, here[axis] // 4)
        other = traced.sizes_watched(axes.batch(*_split(_at(here, axis, here[axis] + step))))
        for edge in _edges(base, other, here[axis], step):
            there = _at(here, axis, edge)
            if there in tried or math.prod(there) * _elements(example) > allowed * math.prod(here):
                continue
            tried.add(there)
            title = f"batch_{edge}" if axis == 0 else f"size_{'x'.join(map(str, there[1:]))}"
            yield title, axes.batch(*_split(there))


def _edges(base: Watch, other: Watch | None, size: int, step: int) -> Iterator[int]:
    """The first size beyond the edge of each condition that changes linearly with the size."""
    if other is None:
        return
    for one, two in zip(base.reads, other.reads, strict=False):
        if one.margin is None or two.margin is None or one.margin == two.margin:
            continue
        edge = size - one.margin * step / (two.margin - one.margin)
        beyond = math.floor(edge) + 1 if edge >= size else math.ceil(edge) - 1
        if beyond >= 1:
            yield beyond


def _at(sizes: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def _split(sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return sizes[0], sizes[1:]


def _elements(batch: Batch) -> int:
    return max(array.size for array in batch.values())
