"""Find the batch axis of each input and output of a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from gate.data.input_binding import (
    InputBinding,
    agrees,
    batched,
    bind_inputs,
    describe,
    pair_up,
    shape_remedy,
)
from gate.data.samples import SampleSet
from gate.errors import InputMismatch
from gate.records.evidence import BatchAxes, TensorSpec

Axes = dict[str, int | None]

Pairs = Sequence[tuple[TensorSpec, str]]
"""Inputs of the file, each with the name of its samples."""

Shapes = Mapping[str, tuple[int, ...]]

_UNNAMED = "?"
"""A dynamic axis without a name."""

_MADE_UP = re.compile(r"\?|unk__\d+|.+_dynamic_axes_\d+")
"""Such an axis, or one that an exporter named: in every input another, of any length."""


def bind_samples(
    inputs: Sequence[TensorSpec],
    samples: SampleSet,
    *,
    batch_size: int,
    parameters: Collection[str] | None = None,
    reduced: bool = False,
) -> InputBinding:
    """Bind samples, as `arrange` returned them, to the inputs of a file. The rest is as of
    `bind_inputs`."""
    return bind_inputs(
        inputs,
        samples.specs,
        count=len(samples),
        batch_size=batch_size,
        parameters=parameters,
        layout=samples.layout,
        reduced=reduced,
    )


def arrange(
    samples: SampleSet,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    parameters: Collection[str] | None = None,
) -> SampleSet:
    """Return the samples with the samples on axis 0 of every array, and the layout of the calls.

    Samples come in one of three forms: as the file takes a batch of all of them; with the samples
    on axis 0 of every array; or as calls, where every array has one more axis in front. The batch
    axes are, in this order: those that the user states (`SampleSet.with_batch_axes`); those of
    the symbolic dimension that occurs in an output and in the most inputs; axis 0 of all; none, so
    that one call is one sample. Samples of files with the batch on axis 0 of all inputs stay as
    they are. `parameters`: as of `bind_inputs`. Raises InputMismatch where nothing fits, DataError.
    """
    if samples.layout is not None or samples.arranged or not inputs:
        return samples
    shapes = samples.shapes
    pairs = [(wanted, given.name) for wanted, given in pair_up(inputs, samples.specs, parameters)]
    none = _no_axes(inputs, outputs)
    ruled, tied = _axes(inputs, outputs, samples.stated)
    if _are_calls(pairs, shapes):
        if any(axis is not None for axis in samples.stated.values()):
            raise InputMismatch(_mixed(pairs, shapes, ruled or none))
        return _arranged(samples, pairs, none, on_first=True)
    first = all(spec.shape for spec in inputs) and _fits(pairs, shapes, _first_axes(inputs))
    if ruled is None:
        ruled = _unruled(pairs, shapes, tied, none, first=first)
    if set(ruled.inputs.values()) == {0}:
        return samples
    own = _fits(pairs, shapes, ruled)
    if own or (not ruled.is_unbatched and _fits_rows(pairs, shapes, ruled)):
        return _arranged(samples, pairs, ruled, on_first=not own)
    if first and not samples.stated and set(ruled.inputs.values()) == {0, None}:
        return samples  # axis 0 of an input is fixed, although it is the batch
    raise InputMismatch(_mixed(pairs, shapes, ruled))


def axes_of_file(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, even: bool
) -> BatchAxes | None:
    """Return the batch axes by the symbolic dimensions of a file, none where these do not determine
    them and the arrays of a call are not `even`: of one length on axis 0. None: axis 0 of all
    inputs."""
    axes, _ = _axes(inputs, outputs, {})
    if axes is None:
        return None if even else _no_axes(inputs, outputs)
    return None if set(axes.inputs.values()) == {0} else axes


def _unruled(
    pairs: Pairs, shapes: Shapes, tied: Sequence[str], none: BatchAxes, *, first: bool
) -> BatchAxes:
    """Return the batch axes where the dimensions of the file do not determine them. `first`: the
    samples fit as batches on axis 0."""
    inputs = [spec for spec, _ in pairs]
    sizes = [spec.shape[0] if spec.shape else None for spec in inputs]
    dynamic = all(isinstance(size, str) for size in sizes)
    unnamed = dynamic and any(_MADE_UP.fullmatch(str(size)) for size in sizes)
    called = not dynamic and _fits(pairs, shapes, none)
    if (first and not called) or (unnamed and not tied):
        return _first_axes(inputs)
    if tied:
        raise InputMismatch(
            f"the batch axis may be {' or '.join(map(repr, tied))} in the file's inputs "
            f"{describe(inputs)}. State it: --batch-axis NAME=AXIS, or NAME=none if one call is "
            "one sample."
        )
    return none


def _arranged(samples: SampleSet, pairs: Pairs, axes: BatchAxes, *, on_first: bool) -> SampleSet:
    """Move the samples to axis 0. `on_first`: they are there already."""
    shapes = samples.shapes
    counts = {
        shapes[name][axis] for spec, name in pairs if (axis := axes.inputs[spec.name]) is not None
    }
    now: Axes = {name: axes.inputs[spec.name] for spec, name in pairs}
    of_model: Axes = {
        name: 0 if counts and (on_first or shape[:1] == (max(counts),)) else None
        for name, shape in shapes.items()
        if name not in now
    }
    axes = axes.model_copy(update={"inputs": {**axes.inputs, **of_model}})
    now |= of_model
    moved = samples.rearranged(dict.fromkeys(now, 0) if on_first else now, axes)
    for spec, name in pairs if on_first and not axes.is_unbatched else ():
        if axes.inputs[spec.name] is None and not moved.is_same(name):
            raise InputMismatch(
                f"input '{spec.name}' of the file has no batch axis, and the samples differ in it: "
                "no batch takes them together. Give calls: one more axis in front of every array, "
                "and a batch of one sample in each call."
            )
    return moved


def _no_axes(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> BatchAxes:
    return BatchAxes(
        inputs=dict.fromkeys([spec.name for spec in inputs]),
        outputs=dict.fromkeys([spec.name for spec in outputs]),
    )


def _first_axes(inputs: Sequence[TensorSpec]) -> BatchAxes:
    return BatchAxes(inputs=dict.fromkeys([spec.name for spec in inputs], 0), outputs={})


def _axes(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], stated: Mapping[str, int | None]
) -> tuple[BatchAxes | None, list[str]]:
    """Return the stated batch axes, and those of the symbolic dimension of the file; None where
    neither determines them, with the dimensions that tie."""
    _check_named_axes([*inputs, *outputs], stated)
    tied: list[str] = []
    free = [spec for spec in inputs if spec.name not in stated]
    sizes = [
        spec.shape[axis]
        for spec in inputs
        if (axis := stated.get(spec.name)) is not None and spec.shape[axis] != _UNNAMED
    ]
    size: int | str | None = None
    if any(stated.get(spec.name) is not None for spec in inputs):
        symbols = (size for size in sizes if isinstance(size, str))
        size = next(symbols, next(iter(sizes), _UNNAMED))
    elif free and _fixed(free, outputs):
        size = free[0].shape[0]
    elif free:
        size, tied = _symbol(free, outputs)
        if tied or (size is None and not stated):
            return None, tied
        strangers = [spec for spec in free if size not in spec.shape and _symbols(spec)]
        if size is not None and strangers and not stated:  # as the edges of a graph's nodes
            return None, []
    found: Axes = {spec.name: _axis_of(size, spec) for spec in free}
    given: Axes = {spec.name: stated[spec.name] for spec in inputs if spec.name in stated}
    axes = {spec.name: {**found, **given}[spec.name] for spec in inputs}
    if all(axis is None for axis in axes.values()):
        return _no_axes(inputs, outputs), []
    returned: Axes = {spec.name: _axis_of(size, spec) for spec in outputs}
    returned |= {spec.name: stated[spec.name] for spec in outputs if spec.name in stated}
    return BatchAxes(inputs=axes, outputs=returned), []


def _check_named_axes(specs: Sequence[TensorSpec], stated: Mapping[str, int | None]) -> None:
    ranks = {spec.name: len(spec.shape) for spec in specs}
    for name, axis in stated.items():
        if name not in ranks:
            raise InputMismatch(
                f"--batch-axis names '{name}'; the file has {sorted(ranks)}. Name an input or an "
                "output of the file."
            )
        if axis is not None and not 0 <= axis < ranks[name]:
            raise InputMismatch(
                f"--batch-axis {name}={axis}: '{name}' of the file has {ranks[name]} axes, counted "
                "from 0. Use one of these axes, or none."
            )


def _axis_of(size: int | str | None, spec: TensorSpec) -> int | None:
    if size is None or not spec.shape:
        return None
    if isinstance(size, str) and size != _UNNAMED:
        return spec.shape.index(size) if spec.shape.count(size) == 1 else None
    alike = isinstance(spec.shape[0], str) if size == _UNNAMED else spec.shape[0] == size
    return 0 if alike else None


def _fixed(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """True if axis 0 of all inputs has one fixed size, which is 1 or that of an output."""
    sizes = {spec.shape[0] if spec.shape else None for spec in inputs}
    size = sizes.pop()
    if sizes or not isinstance(size, int):
        return False
    return size == 1 or any(spec.shape[:1] == (size,) for spec in outputs)


def _symbols(spec: TensorSpec) -> set[str]:
    return {size for size in spec.shape if isinstance(size, str)}


def _symbol(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[str | None, list[str]]:
    """Return the symbolic dimension that occurs in an output and in the most inputs, at most once
    in each; on a tie the one on axis 0; otherwise None and the dimensions that tie."""
    returned = {size for spec in outputs for size in _symbols(spec)} - {_UNNAMED}
    places = {
        symbol: [spec.shape.index(symbol) for spec in inputs if symbol in spec.shape]
        for symbol in sorted(returned)
        if all(spec.shape.count(symbol) <= 1 for spec in inputs)
    }
    most = max(map(len, places.values()), default=0)
    best = [symbol for symbol, axes in places.items() if most and len(axes) == most]
    first = [symbol for symbol in best if not any(places[symbol])]
    chosen = best if len(best) == 1 else first
    return (chosen[0], []) if len(chosen) == 1 else (None, best)


def _are_calls(pairs: Pairs, shapes: Shapes) -> bool:
    """True if every array has one more axis in front, all of the same length."""
    given = [(spec.shape, shapes[name]) for spec, name in pairs]
    lengths = {shape[:1] for _, shape in given}
    return len(lengths) == 1 and all(agrees(wanted, shape[1:]) for wanted, shape in given)


def _fits(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> bool:
    """True if the arrays are as the file takes a batch of all of them."""
    counts = set()
    for spec, name in pairs:
        shape, axis = shapes[name], axes.inputs[spec.name]
        if len(shape) != len(spec.shape):
            return False
        wanted = spec.shape if axis is None else _without(spec.shape, axis)
        if not agrees(wanted, shape if axis is None else _without(shape, axis)):
            return False
        if axis is not None:
            counts.add(shape[axis])
    sized = ((spec.shape, shapes[name]) for spec, name in pairs) if axes.is_unbatched else ()
    return len(counts) == (0 if axes.is_unbatched else 1) and _has_consistent_sizes(sized)


def _fits_rows(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> bool:
    """True if the samples are on axis 0 of every array, and on no other axis."""
    counts = set()
    for spec, name in pairs:
        axis = axes.inputs[spec.name]
        wanted = spec.shape if axis is None else _without(spec.shape, axis)
        if not shapes[name] or not agrees(wanted, shapes[name][1:]):
            return False
        counts.add(shapes[name][0])
    return len(counts) == 1


def _without(shape: Sequence[int | str], axis: int) -> tuple[int | str, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _has_consistent_sizes(given: Iterable[tuple[Sequence[int | str], Sequence[int]]]) -> bool:
    """True if each symbolic dimension has one size wherever it occurs."""
    sizes: dict[str, int] = {}
    return all(
        not isinstance(symbol, str) or symbol == _UNNAMED or sizes.setdefault(symbol, size) == size
        for wanted, shape in given
        for symbol, size in zip(wanted, shape, strict=True)
    )


def _mixed(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> str:
    """Return the error: the shapes of the samples, and both layouts that the file accepts."""
    places = [(spec, name, axes.inputs[spec.name]) for spec, name in pairs]
    batch = {spec.name: batched(spec.shape, axis) for spec, _, axis in places}
    calls = {spec.name: ("calls", *spec.shape) for spec, _, _ in places}
    remedy = shape_remedy([(batch[spec.name], shapes[name], name) for spec, name, _ in places])
    return (
        f"the samples {_listed({name: shapes[name] for _, name, _ in places})} don't fit the file. "
        f"Expected {'one call' if axes.is_unbatched else 'one batch of all samples'}, "
        f"{_listed(batch)}, or calls with one more axis in front, {_listed(calls)}. "
        f"{remedy or 'If the batch is on other axes: --batch-axis NAME=AXIS, or NAME=none.'}"
    )


def _listed(shapes: Mapping[str, Sequence[int | str]]) -> str:
    return ", ".join(f"'{name}' ({', '.join(map(str, s))})" for name, s in shapes.items())
