"""Find the batch axis of each input and output of a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gate.data.input_binding import (
    InputBinding,
    agrees,
    batched,
    bind_inputs,
    describe,
    pair_inputs,
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

_GENERATED_NAME = re.compile(r"\?|unk__\d+|.+_dynamic_axes_\d+")
"""An axis without a name, or with a generated one, which differs in every input."""


def bind_samples(
    inputs: Sequence[TensorSpec],
    samples: SampleSet,
    *,
    batch_size: int,
    parameters: Sequence[str] | None = None,
    reduced: bool = False,
) -> InputBinding:
    """Bind samples that `arrange` returned to the inputs of a file. The other arguments are those
    of `bind_inputs`."""
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
    parameters: Sequence[str] | None = None,
) -> SampleSet:
    """Return the samples with the batch axis on axis 0 of every array, and the layout of the calls.

    Samples have one of three forms: one batch in the file's layout; the batch axis on axis 0 of
    every array; or calls, where every array has one additional leading axis. The batch axes are,
    in this order of preference: those that the user states (`SampleSet.with_batch_axes`); those of
    the symbolic dimension that occurs in an output and in the most inputs; axis 0 of all inputs;
    none, so that one call is one sample. Samples whose batch axis is axis 0 of all inputs are
    returned unchanged. `parameters`: as in `bind_inputs`. Raises InputMismatch, DataError.
    """
    if samples.layout is not None or samples.arranged or not inputs:
        return samples
    shapes = samples.shapes
    pairs = [(spec, sample.name) for spec, sample in pair_inputs(inputs, samples.specs, parameters)]
    none = _no_axes(inputs, outputs)
    axes, tied = _axes(inputs, outputs, samples.stated)
    if _are_calls(pairs, shapes):
        if any(axis is not None for axis in samples.stated.values()):
            raise InputMismatch(_shape_mismatch(pairs, shapes, axes or none))
        return _arranged(samples, pairs, none, on_first=True)
    first = all(spec.shape for spec in inputs) and _fits(pairs, shapes, _first_axes(inputs))
    if axes is None:
        axes = _default_axes(pairs, shapes, tied, none, first=first)
    if set(axes.inputs.values()) == {0}:
        return samples
    is_batch = _fits(pairs, shapes, axes)
    if is_batch or (not axes.is_unbatched and _fits_rows(pairs, shapes, axes)):
        return _arranged(samples, pairs, axes, on_first=not is_batch)
    if first and not samples.stated and set(axes.inputs.values()) == {0, None}:
        return samples  # Axis 0 of an input has a fixed size, although it is the batch axis.
    raise InputMismatch(_shape_mismatch(pairs, shapes, axes))


def axes_of_file(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, even: bool
) -> BatchAxes | None:
    """Return the batch axes by the symbolic dimensions of a file. None: axis 0 of all inputs.

    even: whether all arrays of a call have the same length on axis 0. If the dimensions do not
    determine the axes, this decides between axis 0 and no batch axes.
    """
    axes, _ = _axes(inputs, outputs, {})
    if axes is None:
        return None if even else _no_axes(inputs, outputs)
    return None if set(axes.inputs.values()) == {0} else axes


def _default_axes(
    pairs: Pairs, shapes: Shapes, tied: Sequence[str], none: BatchAxes, *, first: bool
) -> BatchAxes:
    """Return the batch axes if the dimensions of the file do not determine them. `first`: whether
    the samples fit the file with the batch axis on axis 0."""
    inputs = [spec for spec, _ in pairs]
    sizes = [spec.shape[0] if spec.shape else None for spec in inputs]
    dynamic = all(isinstance(size, str) for size in sizes)
    unnamed = dynamic and any(_GENERATED_NAME.fullmatch(str(size)) for size in sizes)
    fits_call = _fits(pairs, shapes, none)
    if (first and (dynamic or not fits_call)) or (unnamed and not tied and not fits_call):
        return _first_axes(inputs)
    # Without a dimension that all inputs share, such as nodes and edges, one call is one sample.
    if any(all(symbol in spec.shape for spec in inputs if _symbols(spec)) for symbol in tied):
        raise InputMismatch(
            f"the batch axis may be {' or '.join(map(repr, tied))} in the file's inputs "
            f"{describe(inputs)}. Specify it: --batch-axis NAME=AXIS, or NAME=none if one call is "
            "one sample."
        )
    return none


def _arranged(samples: SampleSet, pairs: Pairs, axes: BatchAxes, *, on_first: bool) -> SampleSet:
    """Move the batch axis to axis 0. `on_first`: it is axis 0 already."""
    shapes = samples.shapes
    counts = {
        shapes[name][axis] for spec, name in pairs if (axis := axes.inputs[spec.name]) is not None
    }
    current: Axes = {name: axes.inputs[spec.name] for spec, name in pairs}
    model_only: Axes = {
        name: 0 if counts and (on_first or shape[:1] == (max(counts),)) else None
        for name, shape in shapes.items()
        if name not in current
    }
    axes = axes.model_copy(update={"inputs": {**axes.inputs, **model_only}})
    current |= model_only
    moved = samples.rearranged(dict.fromkeys(current, 0) if on_first else current, axes)
    for spec, name in pairs if on_first and not axes.is_unbatched else ():
        if axes.inputs[spec.name] is None and not moved.is_same(name):
            raise InputMismatch(
                f"input '{spec.name}' of the file has no batch axis, but its values differ between "
                "samples, so they can't be batched. Save calls instead: add a leading axis to "
                "every array, and put one sample into each call."
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
    """Return the batch axes that the user states or that the file's symbolic dimensions determine.

    If neither does, return None and the dimensions that tie.
    """
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
        unrelated = [spec for spec in free if size not in spec.shape and _symbols(spec)]
        if size is not None and unrelated and not stated:  # For example, a graph's edges.
            return None, []
    axes, returned = (
        {s.name: stated[s.name] if s.name in stated else _axis_of(size, s) for s in specs}
        for specs in (inputs, outputs)
    )
    if all(axis is None for axis in axes.values()):
        return _no_axes(inputs, outputs), []
    return BatchAxes(inputs=axes, outputs=returned), []


def _check_named_axes(specs: Sequence[TensorSpec], stated: Mapping[str, int | None]) -> None:
    ranks = {spec.name: len(spec.shape) for spec in specs}
    for name, axis in stated.items():
        if name not in ranks:
            raise InputMismatch(
                f"--batch-axis: '{name}' is not an input or output of the file, which has "
                f"{sorted(ranks)}."
            )
        if axis is not None and not 0 <= axis < ranks[name]:
            raise InputMismatch(
                f"--batch-axis {name}={axis}: '{name}' of the file has {ranks[name]} axes, counted "
                "from 0. Use one of them, or none."
            )


def _axis_of(size: int | str | None, spec: TensorSpec) -> int | None:
    if size is None or not spec.shape:
        return None
    if isinstance(size, str) and size != _UNNAMED:
        return spec.shape.index(size) if spec.shape.count(size) == 1 else None
    matches = isinstance(spec.shape[0], str) if size == _UNNAMED else spec.shape[0] == size
    return 0 if matches else None


def _fixed(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Return whether axis 0 of all inputs has the same fixed size, 1 or that of an output."""
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
    axes_by_symbol = {
        symbol: [spec.shape.index(symbol) for spec in inputs if symbol in spec.shape]
        for symbol in sorted(returned)
        if all(spec.shape.count(symbol) <= 1 for spec in inputs)
    }
    maximum = max(map(len, axes_by_symbol.values()), default=0)
    best = [symbol for symbol, axes in axes_by_symbol.items() if maximum and len(axes) == maximum]
    first = [symbol for symbol in best if not any(axes_by_symbol[symbol])]
    chosen = best if len(best) == 1 else first
    return (chosen[0], []) if len(chosen) == 1 else (None, best)


def _are_calls(pairs: Pairs, shapes: Shapes) -> bool:
    """Return whether every array has one additional leading axis, all of the same length."""
    lengths = {shapes[name][:1] for _, name in pairs}
    return len(lengths) == 1 and all(agrees(spec.shape, shapes[name][1:]) for spec, name in pairs)


def _fits(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> bool:
    """Return whether the arrays are one batch in the file's layout."""
    counts = set()
    for spec, name in pairs:
        shape, axis = shapes[name], axes.inputs[spec.name]
        if len(shape) != len(spec.shape):
            return False
        if not agrees(_without(spec.shape, axis), _without(shape, axis)):
            return False
        if axis is not None:
            counts.add(shape[axis])
    sized = ((spec.shape, shapes[name]) for spec, name in pairs) if axes.is_unbatched else ()
    return len(counts) == (0 if axes.is_unbatched else 1) and _has_consistent_sizes(sized)


def _fits_rows(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> bool:
    """Return whether the batch axis of every array is axis 0, whatever it is in the file."""
    counts = set()
    for spec, name in pairs:
        expected = _without(spec.shape, axes.inputs[spec.name])
        if not shapes[name] or not agrees(expected, shapes[name][1:]):
            return False
        counts.add(shapes[name][0])
    return len(counts) == 1


def _without(shape: Sequence[int | str], axis: int | None) -> Sequence[int | str]:
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def _has_consistent_sizes(pairs: Iterable[tuple[Sequence[int | str], Sequence[int]]]) -> bool:
    """Return whether each symbolic dimension has the same size wherever it occurs."""
    sizes: dict[str, int] = {}
    return all(
        not isinstance(symbol, str) or symbol == _UNNAMED or sizes.setdefault(symbol, size) == size
        for expected, shape in pairs
        for symbol, size in zip(expected, shape, strict=True)
    )


def _shape_mismatch(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> str:
    """Return the error with the shapes of the samples and both layouts that the file accepts."""
    rows = [(spec, name, axes.inputs[spec.name]) for spec, name in pairs]
    batch = {spec.name: batched(spec.shape, axis) for spec, _, axis in rows}
    calls = {spec.name: ("calls", *spec.shape) for spec, _, _ in rows}
    remedy = shape_remedy([(batch[spec.name], shapes[name], name) for spec, name, _ in rows])
    return (
        f"the samples {_listed({name: shapes[name] for _, name, _ in rows})} don't fit the file. "
        f"Expected {'one call' if axes.is_unbatched else 'one batch of all samples'}, "
        f"{_listed(batch)}, or calls with an additional leading axis, {_listed(calls)}. "
        f"{remedy or 'If the batch axes are others: --batch-axis NAME=AXIS, or NAME=none.'}"
    )


def _listed(shapes: Mapping[str, Sequence[int | str]]) -> str:
    return ", ".join(f"'{name}' ({', '.join(map(str, s))})" for name, s in shapes.items())
