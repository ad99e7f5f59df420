"""Probes of other batch sizes, and of other sizes along the axes that the file says are dynamic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from gate.evidence import TensorSpec
from gate.parity.probes.observed import Observed, Probe
from gate.parity.runner import Batch
from gate.parity.stand import Stand

_Axis = tuple[str, int]
"""Name of the samples, and an axis of them."""


def batch_probes(stand: Stand, observed: Observed) -> Iterator[Probe]:
    """Batches of the policy's sizes; with a fixed batch axis only of that one."""
    sizes = stand.policy.instruments.probe_batch_sizes
    for size in (observed.small,) if observed.fixed else sizes:
        yield Probe(f"batch_{size}", "batch", size, partial(observed.batch, size))


def size_probes(stand: Stand, observed: Observed, inputs: Sequence[TensorSpec]) -> Iterator[Probe]:
    """A little smaller, larger, odd, and not square; nothing without a dynamic axis.

    Axes of one name change together, whichever input they are of. The samples are cut off, or
    repeated from their beginning.
    """
    groups = _groups(stand, observed, inputs)
    now = [size for size, _ in groups]
    seen = {tuple(now)}
    for sizes in _variations(now):
        if tuple(sizes) in seen:
            continue
        seen.add(tuple(sizes))
        new = {axis: size for (_, axes), size in zip(groups, sizes, strict=True) for axis in axes}
        name = "size_" + "x".join(str(size) for size in sizes)
        yield Probe(name, "size", observed.small, partial(_resized, observed, new))


def _groups(
    stand: Stand, observed: Observed, inputs: Sequence[TensorSpec]
) -> list[tuple[int, list[_Axis]]]:
    """The present size, and the axes that have one name; an axis without a name has its own."""
    shapes = {spec.name: spec.shape for spec in inputs}
    groups: dict[str, tuple[int, list[_Axis]]] = {}
    for file_name, name in stand.binding.pairs:
        batch_axis = shapes[file_name][0]
        for axis, size in enumerate(shapes[file_name]):
            if axis == 0 or isinstance(size, int) or size == batch_axis != _UNNAMED:
                continue
            key = f"{name} {axis}" if size == _UNNAMED else size
            present = observed.rows[name].shape[axis]
            groups.setdefault(key, (present, []))[1].append((name, axis))
    return list(groups.values())


def _variations(now: list[int]) -> Iterator[list[int]]:
    """Three quarters, five quarters, the next odd number; and every other axis longer."""
    if not now:
        return
    smaller = [max(1, size * 3 // 4) for size in now]
    larger = [size + max(1, size // 4) for size in now]
    yield smaller
    yield larger
    yield [size + 1 + size % 2 for size in now]
    if len(now) > 1:
        yield [larger[i] if i % 2 else smaller[i] for i in range(len(now))]


def _resized(observed: Observed, new: Mapping[_Axis, int]) -> Batch:
    batch = observed.batch(observed.small)
    for (name, axis), size in new.items():
        indices = np.arange(size) % batch[name].shape[axis]
        batch[name] = np.ascontiguousarray(batch[name].take(indices, axis=axis))
    return batch


_UNNAMED = "?"
"""How `gate.evidence.TensorSpec` writes a dynamic axis that the file gives no name."""
