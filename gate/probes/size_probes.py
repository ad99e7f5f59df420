"""Probes of batch sizes, sequence lengths and dynamic axes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from gate.measure.context import MeasurementContext, ProbeSource
from gate.onnx_file.sessions import open_session, session_options
from gate.onnx_file.size_conditions import SizeConditions, State
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import plain_setup
from gate.probes.branches import BranchRecorder, TracedReference
from gate.probes.integer_probes import Lookup, lookups
from gate.probes.probe import Probe, SampleProfile
from gate.records.evidence import TensorSpec
from gate.records.instruments import drawn_batch_sizes
from gate.storage.arrays import Batch, OutputArray, resized
from gate.storage.digest import Digest

# In the model's code a size is a number, in the tracer it is a tensor. Therefore the model is
# traced with its reads recorded, at the samples' size and at another one: the change of a
# comparison's margin along an axis shows where it flips.


_MAX_INPUT_ELEMENTS = 2**18
"""Largest number of elements of an input, unless 16 samples have more."""

_MAX_SAMPLES = 16


def inputs_beyond_edges(traced: TracedReference, axes: DynamicAxes) -> Iterator[tuple[str, Batch]]:
    """Yield one input beyond each edge that is near enough; none if no size is compared."""
    small = axes.profile.small
    current = (small, *axes.lengths)
    example = axes.batch(small, axes.lengths)
    base_reads = traced.record_size_reads(example)
    plain_reads, _ = traced.record_reads(example)
    if base_reads is None or len(base_reads.reads) == len(plain_reads.reads):
        return
    width = _elements(example) // small
    allowed = min(max(_MAX_INPUT_ELEMENTS, _MAX_SAMPLES * width), axes.profile.most * width)
    tried = {current}
    for axis in range(axes.profile.fixed, len(current)):
        step = max(1, current[axis] // 4)
        sizes = _with_size(current, axis, current[axis] + step)
        longer = traced.record_size_reads(axes.batch(*_split(sizes)))
        for edge in _find_edges(base_reads, longer, current[axis], step):
            changed = _with_size(current, axis, edge)
            elements = math.prod(changed) * _elements(example)
            if changed in tried or elements > allowed * math.prod(current):
                continue
            tried.add(changed)
            title = f"batch_{edge}" if axis == 0 else f"size_{'x'.join(map(str, changed[1:]))}"
            yield title, axes.batch(*_split(changed))


def _find_edges(
    base: BranchRecorder, longer: BranchRecorder | None, size: int, step: int
) -> Iterator[int]:
    """Yield the first size beyond the edge of each condition that is linear in the size."""
    if longer is None:
        return
    for first, second in zip(base.reads, longer.reads, strict=False):
        if first.margin is None or second.margin is None or first.margin == second.margin:
            continue
        edge = size - first.margin * step / (second.margin - first.margin)
        beyond = math.floor(edge) + 1 if edge >= size else math.ceil(edge) - 1
        if beyond >= 1:
            yield beyond


def _with_size(sizes: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def _split(sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return sizes[0], sizes[1:]


def _elements(batch: Batch) -> int:
    return max(array.size for array in batch.values())


_LONGEST = 1024
"""Largest length of an axis that becomes as long as a table; attention grows with its square."""

_LONGEST_SINGLE = 512
"""Largest length of an only axis that becomes ten times as long; attention windows often end here.
"""

_MAX_SINGLE_AXES = 3
"""Largest number of axes that are lengthened one at a time."""

_INDEX_RANGE = 2**16
"""Range of random indices, which are taken modulo the number of samples: large enough that each
sample is about equally likely."""

_BATCH_ELEMENTS = 2**23
"""Largest number of elements of the larger random batch: 48 images of 224 x 224. Fewer samples if
they are larger, because gigabytes would be needed."""

_GENERATED_NAME = re.compile(r"\?|s\d+|unk__\d+|.+_dynamic_axes_\d+")
"""Matches a dynamic axis without a name (`gate.records.evidence.TensorSpec` writes `?`), or with a
name that PyTorch's exporters generate. Such names differ between mask and tokens although their
lengths are equal."""


Position = tuple[str, int]
"""The name of an input, and the index of an axis."""


@dataclass(frozen=True)
class DynamicAxes:
    """The dynamic axes of the file other than the batch.

    Axes with the same name are one axis, whichever inputs have them. So are axes without a name
    that have equal length and position in several inputs. An axis that is named as a sum of others,
    such as `past + length`, is as long as they are together. `with_masks` finds sums without such a
    name.
    """

    profile: SampleProfile
    lengths: tuple[int, ...]
    """Length of each axis in the samples."""
    positions: tuple[tuple[Position, ...], ...]
    """For each axis, the inputs that have it, and its position there."""
    sums: tuple[tuple[Position, tuple[int, ...], int], ...] = ()
    """Each position whose length is a sum: the axes that it adds, and a number."""

    @classmethod
    def from_file(
        cls, context: ProbeSource, profile: SampleProfile, file: TestedFile
    ) -> DynamicAxes:
        """Find the dynamic axes of a file, with the sums that it requires."""

        @cache
        def session() -> Any:
            setup = plain_setup("ort-cpu")
            options = session_options(setup, threads=1, deterministic=False)
            return open_session(file.loadable(), options, setup)

        def runs(batch: Batch) -> bool:
            try:
                session().run(None, context.binding.by_input(batch))
            except Exception:  # of ONNX Runtime
                return False
            return True

        return cls.from_inputs(context, profile, file.subject.inputs).with_masks(runs)

    @classmethod
    def from_inputs(
        cls, context: ProbeSource, profile: SampleProfile, inputs: Sequence[TensorSpec]
    ) -> DynamicAxes:
        """Find the dynamic axes of the file's `inputs`."""
        shapes = {spec.name: spec.shape for spec in context.binding.canonical(inputs)}
        positions: dict[str, list[Position]] = {}
        for file_name, name in context.binding.pairs:
            batch_axis, *further_sizes = shapes[file_name]
            for axis, size in enumerate(further_sizes, start=1):
                if size == "?":
                    positions[f"{name}_dynamic_axes_{axis}"] = [(name, axis)]
                elif isinstance(size, str) and size != batch_axis:
                    positions.setdefault(size, []).append((name, axis))
        sums = _pop_sums(positions, profile)
        positions = _merged_axes(positions, profile)
        lengths = tuple(profile.rows[name].shape[axis] for (name, axis), *_ in positions.values())
        for name in context.binding.model_only:
            for axis, size in enumerate(profile.rows[name].shape[1:], start=1):
                candidates = [
                    group for group, n in zip(positions.values(), lengths, strict=True) if n == size
                ]
                if len(candidates) == 1:  # not an input of the file: as long as that axis
                    candidates[0].append((name, axis))
        groups = tuple(map(tuple, positions.values()))
        axes = {position: index for index, group in enumerate(groups) for position in group}
        added = tuple(
            (position, tuple(axes[addend] for addend in addends), number)
            for position, addends, number in sums
        )
        return cls(profile, lengths, groups, added)

    def with_masks(self, runs: Callable[[Batch], bool]) -> DynamicAxes:
        """Return the axes, where a mask over a cache and the new tokens is as long as both.

        Only if the samples have that length, and the file (`runs` returns whether it runs) refuses
        a longer mask alone, but not one with a longer cache or more tokens. The model may accept
        any mask, because it takes a part of a longer one.
        """
        for index, addends, number in self._possible_sums():
            axes = self._with_sum(index, addends, number)
            longer = [axes._longer(axis) for axis in range(len(axes.lengths))]
            if not runs(self._longer(index)) and all(map(runs, longer)):
                return axes.with_masks(runs)
        return self

    def _possible_sums(self) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Yield the axes of masks, with two axes, or one axis and a number of tokens, that are as
        long together."""
        rows, dynamic = self.profile.rows, {p for group in self.positions for p in group}
        tokens = {
            array.shape[1]
            for name, array in rows.items()
            if array.ndim == 2 and array.dtype.kind in "iu" and (name, 1) not in dynamic
        }
        added = {axis for _, addends, _ in self.sums for axis in addends}
        for index, length in enumerate(self.lengths):
            no_mask = any(_valid_value(rows[name]) is None for name, _ in self.positions[index])
            if no_mask or index in added:
                continue
            others = [axis for axis in range(len(self.lengths)) if axis != index]
            for pair in combinations(others, 2):
                if sum(self.lengths[axis] for axis in pair) == length:
                    yield index, pair, 0
            for axis in others:
                if length - self.lengths[axis] in tokens:
                    yield index, (axis,), length - self.lengths[axis]

    def _with_sum(self, index: int, addends: tuple[int, ...], number: int) -> DynamicAxes:
        """Return the axes without that of an index, which becomes a sum."""
        later = [axis - (axis > index) for axis in range(len(self.lengths))]
        sums = tuple(
            (position, tuple(later[axis] for axis in axes), constant)
            for position, axes, constant in (
                *self.sums,
                *((position, addends, number) for position in self.positions[index]),
            )
        )
        return replace(
            self,
            lengths=(*self.lengths[:index], *self.lengths[index + 1 :]),
            positions=(*self.positions[:index], *self.positions[index + 1 :]),
            sums=sums,
        )

    def _longer(self, axis: int) -> Batch:
        """Return a batch in which one axis is longer by one."""
        sizes = _with_size(self.lengths, axis, self.lengths[axis] + 1)
        return self.batch(self.profile.small, sizes)

    def _lengths(self, sizes: Sequence[int]) -> Iterator[tuple[Position, int]]:
        """Yield each position of a dynamic axis, and its length for these sizes of the axes."""
        for length, positions in zip(sizes, self.positions, strict=True):
            for position in positions:
                yield position, length
        for position, axes, number in self.sums:
            yield position, number + sum(sizes[axis] for axis in axes)

    def batch(self, size: int, sizes: Sequence[int]) -> Batch:
        """Return `size` samples, each axis cut off or repeated from the beginning to the given
        length.

        Masks become constant, because a mask that is cut off may leave nothing.
        """
        batch = self.profile.batch(size)
        for (name, axis), length in self._lengths(sizes):
            valid = _valid_value(self.profile.rows[name])
            if valid is not None:
                batch[name][...] = valid
            batch[name] = resized(batch[name], axis, length)
        return batch

    def shaped(self, size: int, sizes: Sequence[int]) -> Batch:
        """Return arrays of these shapes for computing shapes only; they take no memory."""
        shapes = {n: [size, *a.shape[1:]] for n, a in self.profile.rows.items()}
        for (name, axis), length in self._lengths(sizes):
            shapes[name][axis] = length
        rows = self.profile.rows
        return {n: np.broadcast_to(np.zeros((), rows[n].dtype), s) for n, s in shapes.items()}


def _pop_sums(
    positions: dict[str, list[Position]], profile: SampleProfile
) -> list[tuple[Position, list[Position], int]]:
    """Remove the axes that are named as a sum of other axes and numbers, and that have this length
    in the samples. Return each of their positions, one position of each addend, and the number."""
    lengths = {
        name: profile.rows[group[0][0]].shape[group[0][1]] for name, group in positions.items()
    }
    sums = []
    for name, length in lengths.items():
        terms = name.split(" + ")
        names = [term for term in terms if not term.isdecimal()]
        number = sum(int(term) for term in terms if term.isdecimal())
        if len(terms) == 1 or not names or not lengths.keys() >= set(names):
            continue
        if length == number + sum(lengths[term] for term in names):
            addends = [positions[term][0] for term in names]
            sums += [(position, addends, number) for position in positions.pop(name)]
    return sums


def _merged_axes(
    positions: Mapping[str, list[Position]], profile: SampleProfile
) -> dict[str, list[Position]]:
    merged: dict[str, list[Position]] = {}
    for axis_name, group in positions.items():
        name, axis = group[0]
        shared_name = f"axis {axis}, {profile.rows[name].shape[axis]} long"
        key = shared_name if _GENERATED_NAME.fullmatch(axis_name) else axis_name
        merged.setdefault(key, []).extend(group)
    return merged


def _valid_value(array: OutputArray) -> int | None:
    """Return the value of a mask that marks a valid position; None if the input is no mask.

    A mask has only zeros and ones, or bools. The first position of all samples is valid, or the
    last one if padding comes first.
    """
    if not array.size or not np.isin(array, (0, 1)).all():
        return None
    for edge in (array[..., 0], array[..., -1]) if array.ndim > 1 else ():
        if (edge == edge.flat[0]).all():
            return int(edge.flat[0])
    return int(2 * np.count_nonzero(array) >= array.size)


def batch_probes(context: ProbeSource, profile: SampleProfile, sha256: Digest) -> Iterator[Probe]:
    """Yield batches of the policy's sizes, and two of random samples whose sizes the file's digest
    decides.

    With a fixed batch axis, yield one batch of that size. The larger random batch is smaller if the
    activations of a sample are large.
    """
    if profile.fixed:
        size = profile.small
        yield Probe(f"batch_{size}", "batch", size, partial(profile.batch, size))
        return
    policy_sizes = context.policy.instruments.probe_batch_sizes
    for size in policy_sizes:
        yield _batch_probe(profile, tuple(range(size)))
    small, large = drawn_batch_sizes(sha256, policy_sizes)
    width = sum(int(array[0].size) for array in profile.rows.values())
    largest = min(large, max(_BATCH_ELEMENTS // max(width, 1), 1), profile.most)
    for size in dict.fromkeys((small, largest)):
        if size not in policy_sizes:
            random = profile.random(f"batch_{size}")
            yield _batch_probe(profile, tuple(map(int, random.integers(0, _INDEX_RANGE, size))))


def _batch_probe(profile: SampleProfile, indices: tuple[int, ...]) -> Probe:
    size = len(indices)
    return Probe(f"batch_{size}", "batch", size, partial(profile.rows_at, indices))


def size_probes(axes: DynamicAxes) -> Iterator[Probe]:
    """Yield inputs of other sizes: smaller, larger, odd, not square, and each axis alone three
    times as long.

    A single axis also becomes 1, 2, twice and ten times as long.
    """
    for sizes in dict.fromkeys(_variations(axes.lengths)):
        if sizes != axes.lengths and _fits(axes, sizes):
            yield _size_probe(axes, sizes)


def length_probes(context: MeasurementContext, axes: DynamicAxes) -> Iterator[Probe]:
    """Yield, for each dynamic axis, the longest input that its table of positions allows."""
    if not axes.lengths:
        return
    table_reads = lookups(context, axes.batch(axes.profile.small, axes.lengths))
    for index, length in enumerate(axes.lengths):
        sizes = {
            min(lookup.size - int(lookup.indices.min()), _LONGEST)
            for lookup in table_reads
            if _are_positions(lookup, length)
        }
        for longest in sorted((size for size in sizes if size > length), reverse=True):
            new_sizes = (*axes.lengths[:index], longest, *axes.lengths[index + 1 :])
            if not _fits(axes, new_sizes):
                continue
            if context.reference.accepts(axes.batch(axes.profile.small, new_sizes)):
                yield _size_probe(axes, new_sizes)
                break


_SCANNED = 64
"""Number of sizes of an axis that are tried one by one for conditions in the file."""

_FLIPS = 4
"""Largest number of flips of one condition, nearest to the samples' size. A remainder flips
often."""

_MAX_ELEMENTS = 2**22
"""Largest number of elements of an input made for a condition, unless `_SCANNED` sizes have
more."""


def condition_probes(context: MeasurementContext, axes: DynamicAxes) -> Iterator[Probe]:
    """Yield inputs on both sides of each size at which a condition in the file changes."""
    try:
        conditions = SizeConditions(context.tested_file)
    except Exception:  # several files, or a file whose parsing error is reported elsewhere
        return
    if not conditions:
        return
    current = (axes.profile.small, *axes.lengths)
    for axis in range(axes.profile.fixed, len(current)):
        for size in sorted(_find_flips(context, axes, conditions, (current, axis))):
            if axis == 0:
                yield _batch_probe(axes.profile, tuple(range(size)))
            else:
                yield _size_probe(axes, _with_size(current, axis, size)[1:])


def _find_flips(
    context: MeasurementContext,
    axes: DynamicAxes,
    conditions: SizeConditions,
    location: tuple[tuple[int, ...], int],
) -> set[int]:
    """Return sizes of one axis next to which a condition of the file changes."""
    current, axis = location

    def feed(size: int) -> Batch:
        return context.binding.by_input(axes.batch(*_split(_with_size(current, axis, size))))

    def shapes(size: int) -> Batch:
        empty = axes.shaped(*_split(_with_size(current, axis, size)))
        return context.binding.by_input(empty)

    try:
        state = conditions.along(feed, shapes, current[axis])
        if state is None:
            return set()
        return _edges_of(state, _candidates(axes, conditions, location), current[axis])
    except Exception:  # the conditions can't be computed at other sizes
        return set()


def _candidates(
    axes: DynamicAxes, conditions: SizeConditions, location: tuple[tuple[int, ...], int]
) -> list[int]:
    """Return small sizes, sizes next to the constants of the file, and powers of two."""
    current, axis = location
    width = max(array[0].size for array in axes.profile.rows.values()) * current[0]
    largest = max(_SCANNED, min(_LONGEST + 1, _MAX_ELEMENTS * current[axis] // max(width, 1)))
    near = [constant + step for constant in conditions.constants for step in (-1, 0, 1)]
    sizes = {*range(1, _SCANNED + 1), *near, *(2**power for power in range(11))}
    return sorted(size for size in sizes if 1 <= size <= largest)


def _edges_of(state: Callable[[int], State], sizes: Sequence[int], current: int) -> set[int]:
    states = {size: state(size) for size in sizes}
    edges: list[list[tuple[int, int]]] = [[] for _ in states[sizes[0]]]
    for low, high in pairwise(sizes):
        for number, (a, b) in enumerate(zip(states[low], states[high], strict=True)):
            if a != b:
                edges[number].append(_bisect(state, number, low, high))
    nearest = (sorted(group, key=lambda edge: abs(edge[0] - current))[:_FLIPS] for group in edges)
    return {size for group in nearest for edge in group for size in edge} - {current}


def _bisect(state: Callable[[int], State], number: int, low: int, high: int) -> tuple[int, int]:
    """Return two consecutive sizes between which the condition changes."""
    first = state(low)[number]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if state(middle)[number] == first else (low, middle)
    return low, high


def _are_positions(lookup: Lookup, length: int) -> bool:
    """Return True if consecutive rows were read, as many as the axis is long."""
    rows = np.unique(lookup.indices)
    return len(rows) == length and int(rows[-1]) - int(rows[0]) == length - 1


def _variations(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not lengths:
        return
    smaller = tuple(max(1, size * 3 // 4) for size in lengths)
    larger = tuple(size + max(1, size // 4) for size in lengths)
    yield smaller
    yield larger
    yield tuple(size + 1 + size % 2 for size in lengths)
    if len(lengths) > 1:
        yield tuple(larger[i] if i % 2 else smaller[i] for i in range(len(lengths)))
        for index, size in enumerate(lengths[:_MAX_SINGLE_AXES]):
            yield (*lengths[:index], 3 * size + 1, *lengths[index + 1 :])
    else:
        yield from ((1,), (2,), (2 * lengths[0],), (3 * lengths[0] + 1,))
        if (ten_times := min(10 * lengths[0], _LONGEST_SINGLE)) > 3 * lengths[0] + 1:
            yield (ten_times,)


def _size_probe(axes: DynamicAxes, sizes: tuple[int, ...]) -> Probe:
    small = axes.profile.small
    name = f"size_{'x'.join(map(str, sizes))}"
    return Probe(name, "size", small, partial(axes.batch, small, sizes))


def _fits(axes: DynamicAxes, sizes: tuple[int, ...]) -> bool:
    """Return True if the inputs are not much larger than all samples together."""
    example = max(int(array[0].size) for array in axes.profile.rows.values())
    current, changed = math.prod(axes.lengths), math.prod(sizes)
    most = min(max(_MAX_INPUT_ELEMENTS, _MAX_SAMPLES * example), axes.profile.most * example)
    return changed * example <= most * current
