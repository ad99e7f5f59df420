"""Other batch sizes, lengths and dynamic axes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from gate.errors import GateError
from gate.measure.context import MeasurementContext, ProbeSource
from gate.onnx_file.size_conditions import SizeConditions, State
from gate.probes.branches import BranchRecorder, TracedReference
from gate.probes.integer_probes import Lookup, lookups
from gate.probes.probe import Probe, SampleProfile
from gate.records.evidence import TensorSpec
from gate.records.instruments import drawn_batch_sizes
from gate.storage.arrays import Batch, OutputArray, resized
from gate.storage.digest import Digest

# To the model's code a size is a number, to the tracer it is a tensor. So the model is traced while
# its reads are watched, at the samples' size and at another one: how a comparison's margin grows
# along an axis shows where it flips.


_LARGEST = 2**18
"""Elements of the largest input that is tried, unless 16 samples have more."""

_MOST_SAMPLES = 16


def inputs_beyond_edges(traced: TracedReference, axes: DynamicAxes) -> Iterator[tuple[str, Batch]]:
    """Yield one input beyond each edge that lies near enough; nothing where no size is compared."""
    small = axes.observed.small
    here = (small, *axes.now)
    example = axes.batch(small, axes.now)
    base = traced.sizes_watched(example)
    watch, _ = traced.watched(example)
    if base is None or len(base.reads) == len(watch.reads):
        return
    each = _elements(example) // small
    allowed = min(max(_LARGEST, _MOST_SAMPLES * each), axes.observed.most * each)
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


def _edges(
    base: BranchRecorder, other: BranchRecorder | None, size: int, step: int
) -> Iterator[int]:
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


_LONGEST = 1024
"""Of an axis that becomes as long as a table: attention grows with its square."""

_FAR = 512
"""Of an axis that is the only one and becomes ten times as long, where windows end."""

_ALONE = 3
"""Axes that become longer alone."""

_DRAWN_FROM = 2**16
"""Places, which go around: so many more than samples that each comes about as often."""

_BATCH_ELEMENTS = 2**23
"""Of the larger batch that is drawn: 48 pictures of 224 x 224; of larger ones fewer, else it would
take gigabytes."""

_MADE_UP = re.compile(r"\?|s\d+|unk__\d+|.+_dynamic_axes_\d+")
"""A dynamic axis that has no name (so `gate.records.evidence.TensorSpec` writes it), or one that
PyTorch's exporters made: it is another for the mask than for the words, which are always as
long."""


@dataclass(frozen=True)
class DynamicAxes:
    """The dynamic axes of the file other than the batch.

    Axes of one name are one, whichever inputs have them; so are those without a name, if they are
    as long and have the same position in several inputs.
    """

    observed: SampleProfile
    now: tuple[int, ...]
    """The samples' size along each."""
    places: tuple[tuple[tuple[str, int], ...], ...]
    """Of each: names of samples, and the axis there."""

    @classmethod
    def from_inputs(
        cls, context: ProbeSource, observed: SampleProfile, inputs: Sequence[TensorSpec]
    ) -> DynamicAxes:
        """`inputs`: the file's."""
        shapes = {spec.name: spec.shape for spec in context.binding.canonical(inputs)}
        places: dict[str, list[tuple[str, int]]] = {}
        for file_name, name in context.binding.pairs:
            batch_axis, *others = shapes[file_name]
            for axis, size in enumerate(others, start=1):
                if size == "?":
                    places[f"{name}_dynamic_axes_{axis}"] = [(name, axis)]
                elif isinstance(size, str) and size != batch_axis:
                    places.setdefault(size, []).append((name, axis))
        places = _joined(places, observed)
        now = tuple(observed.rows[name].shape[axis] for (name, axis), *_ in places.values())
        for name in context.binding.model_only:
            for axis, size in enumerate(observed.rows[name].shape[1:], start=1):
                alike = [of for of, long in zip(places.values(), now, strict=True) if long == size]
                if len(alike) == 1:  # not in the file: as long as that one axis
                    alike[0].append((name, axis))
        return cls(observed, now, tuple(map(tuple, places.values())))

    def batch(self, size: int, sizes: Sequence[int]) -> Batch:
        """`size` samples, cut off or repeated from their beginning along each axis. A mask is the
        same everywhere, because one that is cut off may leave nothing."""
        batch = self.observed.batch(size)
        for length, places in zip(sizes, self.places, strict=True):
            for name, axis in places:
                usual = _usual(self.observed.rows[name])
                if usual is not None:
                    batch[name][...] = usual
                batch[name] = resized(batch[name], axis, length)
        return batch

    def shaped(self, size: int, sizes: Sequence[int]) -> Batch:
        """Return a batch of these sizes without values, which takes no memory."""
        shapes = {n: [size, *a.shape[1:]] for n, a in self.observed.rows.items()}
        for length, places in zip(sizes, self.places, strict=True):
            for name, axis in places:
                shapes[name][axis] = length
        rows = self.observed.rows
        return {n: np.broadcast_to(np.zeros((), rows[n].dtype), s) for n, s in shapes.items()}


def _joined(
    places: Mapping[str, list[tuple[str, int]]], observed: SampleProfile
) -> dict[str, list[tuple[str, int]]]:
    joined: dict[str, list[tuple[str, int]]] = {}
    for axis_name, group in places.items():
        name, axis = group[0]
        alike = f"axis {axis}, {observed.rows[name].shape[axis]} long"
        key = alike if _MADE_UP.fullmatch(axis_name) else axis_name
        joined.setdefault(key, []).extend(group)
    return joined


def _usual(array: OutputArray) -> int | None:
    """Return which of the two values of a mask marks a valid position; None: the input is no mask.

    A mask has nothing but zeros and ones, or bools. The first position of all samples is valid, or
    the last one where padding comes first.
    """
    if not array.size or not np.isin(array, (0, 1)).all():
        return None
    for place in (array[..., 0], array[..., -1]) if array.ndim > 1 else ():
        if (place == place.flat[0]).all():
            return int(place.flat[0])
    return int(2 * np.count_nonzero(array) >= array.size)


def batch_probes(context: ProbeSource, observed: SampleProfile, sha256: Digest) -> Iterator[Probe]:
    """Batches of the policy's sizes, and of two that the file's digest draws, those in random
    order; with a fixed batch axis only of that one. The larger of the two is smaller where the
    activations of a sample are large."""
    if observed.fixed:
        size = observed.small
        yield Probe(f"batch_{size}", "batch", size, partial(observed.batch, size))
        return
    listed = context.policy.instruments.probe_batch_sizes
    for size in listed:
        yield _batch(observed, tuple(range(size)))
    small, large = drawn_batch_sizes(sha256, listed)
    width = sum(int(array[0].size) for array in observed.rows.values())
    largest = min(large, max(_BATCH_ELEMENTS // max(width, 1), 1), observed.most)
    for size in dict.fromkeys((small, largest)):
        if size not in listed:
            random = observed.random(f"batch_{size}")
            yield _batch(observed, tuple(map(int, random.integers(0, _DRAWN_FROM, size))))


def _batch(observed: SampleProfile, places: tuple[int, ...]) -> Probe:
    size = len(places)
    return Probe(f"batch_{size}", "batch", size, partial(observed.taken, places))


def size_probes(axes: DynamicAxes) -> Iterator[Probe]:
    """Smaller, larger, odd, not square, and each axis alone three times as long; an axis that is
    the only one also one, two, twice and ten times as long."""
    for sizes in dict.fromkeys(_variations(axes.now)):
        if sizes != axes.now and _fits(axes, sizes):
            yield _sized(axes, sizes)


def length_probes(context: MeasurementContext, axes: DynamicAxes) -> Iterator[Probe]:
    """The longest that the model takes by what it counts its places with, such as a table of
    positions: of each dynamic axis alone."""
    if not axes.now:
        return
    read = lookups(context, axes.batch(axes.observed.small, axes.now))
    for place, now in enumerate(axes.now):
        sizes = {
            min(lookup.size - int(lookup.indices.min()), _LONGEST)
            for lookup in read
            if _counts(lookup, now)
        }
        for longest in sorted((size for size in sizes if size > now), reverse=True):
            there = (*axes.now[:place], longest, *axes.now[place + 1 :])
            if _fits(axes, there) and _takes(context, axes.batch(axes.observed.small, there)):
                yield _sized(axes, there)
                break


_SCANNED = 64
"""Sizes of an axis that are tried one by one for what the file decides by them."""

_FLIPS = 4
"""Of one condition, nearest to the samples' size: a remainder flips again and again."""

_MOST_ELEMENTS = 2**22
"""Of an input that is made for a condition in the file, unless `_SCANNED` sizes have more."""


def condition_probes(context: MeasurementContext, axes: DynamicAxes) -> Iterator[Probe]:
    """Both sides of each edge where the file decides something by the batch or another size."""
    try:
        conditions = SizeConditions(context.tested_file)
    except Exception:  # a release of several files; who can't read the file fails by it elsewhere
        return
    if not conditions:
        return
    here = (axes.observed.small, *axes.now)
    for axis in range(axes.observed.fixed, len(here)):
        sizes = _flips(context, axes, conditions, (here, axis))
        for size in sorted(sizes):
            if axis == 0:
                yield _batch(axes.observed, tuple(range(size)))
            else:
                yield _sized(axes, _at(here, axis, size)[1:])


def _flips(
    context: MeasurementContext,
    axes: DynamicAxes,
    conditions: SizeConditions,
    where: tuple[tuple[int, ...], int],
) -> set[int]:
    """Sizes of one axis next to which a condition of the file changes."""
    here, axis = where

    def feed(size: int) -> Batch:
        return context.binding.by_input(axes.batch(*_split(_at(here, axis, size))))

    def shapes(size: int) -> Batch:
        empty = axes.shaped(*_split(_at(here, axis, size)))
        return context.binding.by_input(empty)

    try:
        state = conditions.along(feed, shapes, here[axis])
        if state is None:
            return set()
        return _edges_of(state, _candidates(axes, conditions, where), here[axis])
    except Exception:  # what can't be computed at other sizes is no probe
        return set()


def _candidates(
    axes: DynamicAxes, conditions: SizeConditions, where: tuple[tuple[int, ...], int]
) -> list[int]:
    """The small sizes, those next to the constants of the file, and powers of two beyond."""
    here, axis = where
    each = max(array[0].size for array in axes.observed.rows.values()) * here[0]
    largest = max(_SCANNED, min(_LONGEST + 1, _MOST_ELEMENTS * here[axis] // max(each, 1)))
    near = [constant + step for constant in conditions.constants for step in (-1, 0, 1)]
    sizes = {*range(1, _SCANNED + 1), *near, *(2**power for power in range(11))}
    return sorted(size for size in sizes if 1 <= size <= largest)


def _edges_of(state: Callable[[int], State], sizes: Sequence[int], here: int) -> set[int]:
    states = {size: state(size) for size in sizes}
    edges: list[list[tuple[int, int]]] = [[] for _ in states[sizes[0]]]
    for low, high in pairwise(sizes):
        for number, (one, two) in enumerate(zip(states[low], states[high], strict=True)):
            if one != two:
                edges[number].append(_narrowed(state, number, low, high))
    nearest = (sorted(of, key=lambda edge: abs(edge[0] - here))[:_FLIPS] for of in edges)
    return {size for of in nearest for edge in of for size in edge} - {here}


def _narrowed(state: Callable[[int], State], number: int, low: int, high: int) -> tuple[int, int]:
    """Two sizes in a row between which the condition changes."""
    first = state(low)[number]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if state(middle)[number] == first else (low, middle)
    return low, high


def _counts(lookup: Lookup, now: int) -> bool:
    """True if consecutive rows were read, as many as the axis is long."""
    places = np.unique(lookup.indices)
    return len(places) == now and int(places[-1]) - int(places[0]) == now - 1


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
        for place, size in enumerate(now[:_ALONE]):
            yield (*now[:place], 3 * size + 1, *now[place + 1 :])
    else:
        yield from ((1,), (2,), (2 * now[0],), (3 * now[0] + 1,))
        if (far := min(10 * now[0], _FAR)) > 3 * now[0] + 1:
            yield (far,)


def _sized(axes: DynamicAxes, sizes: tuple[int, ...]) -> Probe:
    small = axes.observed.small
    name = f"size_{'x'.join(map(str, sizes))}"
    return Probe(name, "size", small, partial(axes.batch, small, sizes))


def _fits(axes: DynamicAxes, sizes: tuple[int, ...]) -> bool:
    """True if the inputs are not much larger than the samples are together."""
    example = max(int(array[0].size) for array in axes.observed.rows.values())
    here, there = math.prod(axes.now), math.prod(sizes)
    most = min(max(_LARGEST, _MOST_SAMPLES * example), axes.observed.most * example)
    return there * example <= most * here


def _takes(context: MeasurementContext, batch: Batch) -> bool:
    try:
        context.reference.run(batch)
    except GateError:
        return False
    return True
