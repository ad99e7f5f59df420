"""Map sample arrays to model inputs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gate.data.samples import SampleSet
from gate.errors import InputMismatch
from gate.records.evidence import BatchAxes, TensorSpec
from gate.storage.arrays import Batch, OutputArray, RuntimeArray

# Inside the gate every array of a batch has the samples on axis 0. Where an input of the file has
# them on another axis, or none, arrays are moved at the call of the file and of the model.


Axes = dict[str, int | None]

_UNNAMED = "?"
"""A dynamic axis without a name."""


@dataclass(frozen=True)
class InputBinding:
    """Input names of the file in its order, each with the name of its samples."""

    pairs: tuple[tuple[str, str], ...]
    """(input of the file, name of the samples)."""
    batch_size: int
    fixed: bool
    """True if the file has a fixed batch axis."""
    double: bool = False
    """True if inputs of float64 go into the model as they are; else all floats as float32."""
    given: tuple[str, ...] = ()
    """Names of all samples, in their order, where the model takes more of them than the file:
    exporters drop an input that changes no output."""
    layout: BatchAxes | None = None
    """None: axis 0 of every input and output is the batch."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the samples, in the order in which the model gets them."""
        return self.given or tuple(sample for _, sample in self.pairs)

    @property
    def model_only(self) -> tuple[str, ...]:
        """Names of the samples of what only the model takes."""
        return _others(self.given, {sample for _, sample in self.pairs})

    def by_input(self, batch: Batch) -> dict[str, OutputArray]:
        """The call of the file for a batch of the samples, by the names of the file's inputs."""
        call = self.to_call(batch)
        return {name: call[sample] for name, sample in self.pairs}

    def to_call(self, batch: Batch) -> Batch:
        """The arrays of a batch as the model takes them, by the names of the samples.

        An input without a batch axis is that of the first sample. Raises InputMismatch for several
        samples where one sample is one call.
        """
        if self.layout is None:
            return batch
        axes = self.layout
        count = len(next(iter(batch.values())))
        if axes.one_call and count != 1:
            raise InputMismatch(f"one call takes one sample, and {count} were given.")
        inputs = {sample: name for name, sample in self.pairs}
        return {
            sample: _placed(array, axes.inputs.get(inputs.get(sample, sample), 0))
            for sample, array in batch.items()
        }

    def from_call(self, outputs: Sequence[RuntimeArray]) -> list[RuntimeArray]:
        """The outputs of a call, in the file's order, with the samples on axis 0 of those that
        have a batch axis."""
        if self.layout is None:
            return list(outputs)
        axes = self.layout
        if axes.one_call:
            return [np.asarray(output)[None] for output in outputs]
        places = [*axes.outputs.values(), *[None] * len(outputs)]
        return [
            np.ascontiguousarray(np.moveaxis(output, axis, 0))
            if axis and axis < np.ndim(output)
            else output
            for output, axis in zip(outputs, places, strict=False)
        ]

    @property
    def shared(self) -> frozenset[str]:
        """Names of the samples of inputs without a batch axis, beside others that have one."""
        if self.layout is None or self.layout.one_call:
            return frozenset()
        axes = self.layout.inputs
        return frozenset(sample for name, sample in self.pairs if axes[name] is None)

    def canonical(self, inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The inputs of the file as they are inside the gate, with the samples on axis 0."""
        return tuple(inputs if self.layout is None else map(self.layout.canonical, inputs))


def _placed(array: RuntimeArray, axis: int | None) -> RuntimeArray:
    if axis is None:
        return np.asarray(array[0])
    return np.ascontiguousarray(np.moveaxis(array, 0, axis)) if axis else array


def bind_inputs(
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    *,
    count: int,
    batch_size: int,
    parameters: Collection[str] | None = None,
    layout: BatchAxes | None = None,
) -> InputBinding:
    """Bind by name where the samples have all names of the file, by position where no name is
    shared.

    `inputs` are the file's, `samples` those of `gate.data.samples.SampleSet`, with
    `count` samples. A file with a fixed batch axis is measured with that batch size.
    `parameters`: those of the model's forward; None without a model, and for one that takes any.
    Samples beyond the file's inputs go into the model alone, if they are named as its parameters.
    `layout`: of samples that `arrange` returned. Raises InputMismatch where only some names of the file are shared (position would contradict
    them), on another number, dtype, rank or fixed size, and where the samples don't fill the
    fixed batches.
    """
    if batch_size < 1:
        raise InputMismatch(f"the batch size is {batch_size}, at least 1 is expected.")
    if layout is not None:
        inputs = [layout.canonical(spec) for spec in inputs]
    pairs = _pairs(inputs, samples, parameters)
    _check_shapes(pairs)
    for wanted, given in pairs:
        _check(wanted, given)
    fixed = {spec.shape[0] for spec in inputs if isinstance(spec.shape[0], int)}
    if len(fixed) > 1:
        raise InputMismatch(
            f"the file's inputs have different fixed batch axes: {_describe(inputs)}. "
            "Export with one batch axis for all: set export.dynamic_batch: true."
        )
    size = max(fixed, default=min(batch_size, count))
    if fixed and (size < 1 or count % size):
        raise InputMismatch(
            f"the file has a fixed batch axis of {size}, and {count} samples are no multiple of "
            "it. Give a multiple, or export with export.dynamic_batch: true."
        )
    alone = layout is not None and layout.one_call
    return InputBinding(
        tuple((wanted.name, given.name) for wanted, given in pairs),
        1 if alone else size,
        alone or bool(fixed),
        given=tuple(spec.name for spec in samples) if len(samples) > len(pairs) else (),
        layout=layout,
    )


def arrange(
    samples: SampleSet,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    parameters: Collection[str] | None = None,
) -> SampleSet:
    """The samples with the samples on axis 0 of every array, and the layout of the calls.

    Samples come in one of three forms: as the file takes a batch of all of them; with the samples
    on axis 0 of every array; or as calls, where every array has one more axis in front. The batch
    axes are, in this order: those that the samples state (`SampleSet.with_batch_axes`); those of
    the symbolic dimension that occurs in an output and in the most inputs; axis 0 of all; none, so
    that one call is one sample. Samples of files with the batch on axis 0 of all inputs stay as
    they are. Raises InputMismatch where nothing fits, DataError.
    """
    if samples.layout is not None:
        return samples
    shapes = samples.shapes
    pairs = [(wanted, given.name) for wanted, given in _pairs(inputs, samples.specs, parameters)]
    others = [name for name in shapes if name not in {sample for _, sample in pairs}]
    ruled, tied = _axes(inputs, outputs, samples.stated)
    first = all(spec.shape for spec in inputs) and _fits(pairs, shapes, _first_axes(inputs))
    if _are_calls(pairs, shapes):
        if any(axis is not None for axis in samples.stated.values()):
            raise InputMismatch(_mixed(pairs, shapes, ruled or _no_axes(inputs, outputs)))
        return _arranged(samples, (pairs, others), _no_axes(inputs, outputs), in_calls=True)
    if ruled is None:
        dynamic = all(isinstance(size, str) for spec in inputs for size in spec.shape[:1] or (0,))
        called = not dynamic and _fits(pairs, shapes, _no_axes(inputs, outputs))
        if (first and not called) or (dynamic and not tied):
            return samples
        if tied:
            raise InputMismatch(
                f"the batch axis may be {' or '.join(map(repr, tied))} in the file's inputs "
                f"{_describe(inputs)}. State it: --batch-axis NAME=AXIS, or NAME=none if one call "
                "is one sample."
            )
        ruled = _no_axes(inputs, outputs)
    if set(ruled.inputs.values()) == {0}:
        return samples
    if _fits(pairs, shapes, ruled):
        return _arranged(samples, (pairs, others), ruled)
    if not ruled.one_call and _fits_rows(pairs, shapes, ruled):
        return _arranged(samples, (pairs, others), ruled, in_rows=True)
    if first and not samples.stated and set(ruled.inputs.values()) == {0, None}:
        return samples  # axis 0 of an input is fixed, although it is the batch
    raise InputMismatch(_mixed(pairs, shapes, ruled))


Pairs = Sequence[tuple[TensorSpec, str]]
Shapes = Mapping[str, tuple[int, ...]]


def _arranged(
    samples: SampleSet,
    names: tuple[Pairs, Sequence[str]],
    axes: BatchAxes,
    *,
    in_rows: bool = False,
    in_calls: bool = False,
) -> SampleSet:
    pairs, others = names
    shapes = samples.shapes
    counts = {shapes[name][axis] for spec, name in pairs
              if (axis := axes.inputs[spec.name]) is not None}  # fmt: skip
    of_model: Axes = {}
    for name in others:
        batched = in_rows or (bool(counts) and shapes[name][:1] == (max(counts),))
        of_model[name] = 0 if batched else None
    axes = axes.model_copy(update={"inputs": {**axes.inputs, **of_model}})
    now: Axes = {name: axes.inputs[spec.name] for spec, name in pairs} | of_model
    if in_rows or in_calls:
        now = dict.fromkeys(now, 0)
    moved = samples.rearranged(now, axes)
    shared = [name for spec, name in pairs if axes.inputs[spec.name] is None]
    differing = [name for name in shared if in_rows and not moved.is_same(name)]
    if differing:
        raise InputMismatch(
            f"input '{differing[0]}' of the file has no batch axis, and the samples differ in it: "
            "no batch takes them together. Give calls: one more axis in front of every array, and "
            "a batch of one sample in each call."
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
    """The batch axes by what is stated and by the symbolic dimensions of the file; None where they
    say nothing, with the dimensions between which they can't tell."""
    _check_stated([*inputs, *outputs], stated)
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


def _check_stated(specs: Sequence[TensorSpec], stated: Mapping[str, int | None]) -> None:
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
                "from 0. Name one of them, or none."
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
    """The symbolic dimension that occurs in an output and in the most inputs, at most once in each;
    on a tie the one on axis 0; else those that tie."""
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
    return len(lengths) == 1 and all(_agrees(wanted, shape[1:]) for wanted, shape in given)


def _fits(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> bool:
    """True if the arrays are as the file takes a batch of all of them."""
    counts = set()
    for spec, name in pairs:
        shape, axis = shapes[name], axes.inputs[spec.name]
        if len(shape) != len(spec.shape):
            return False
        wanted = spec.shape if axis is None else _without(spec.shape, axis)
        if not _agrees(wanted, shape if axis is None else _without(shape, axis)):
            return False
        if axis is not None:
            counts.add(shape[axis])
    sized = ((spec.shape, shapes[name]) for spec, name in pairs) if axes.one_call else ()
    return len(counts) == (0 if axes.one_call else 1) and _one_size(sized)


def _fits_rows(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> bool:
    """True if the samples are on axis 0 of every array, and on no other axis."""
    counts = set()
    for spec, name in pairs:
        axis = axes.inputs[spec.name]
        wanted = spec.shape if axis is None else _without(spec.shape, axis)
        if not shapes[name] or not _agrees(wanted, shapes[name][1:]):
            return False
        counts.add(shapes[name][0])
    return len(counts) == 1


def _without(shape: Sequence[int | str], axis: int) -> tuple[int | str, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _agrees(wanted: Sequence[int | str], shape: Sequence[int | str]) -> bool:
    """True if an array of this shape has the sizes that are wanted; a text is any size."""
    return len(wanted) == len(shape) and all(
        isinstance(size, str) or size == there for size, there in zip(wanted, shape, strict=True)
    )


def _one_size(given: Iterable[tuple[Sequence[int | str], Sequence[int]]]) -> bool:
    """True if each symbolic dimension has one size wherever it occurs."""
    sizes: dict[str, int] = {}
    return all(
        not isinstance(symbol, str) or symbol == _UNNAMED or sizes.setdefault(symbol, size) == size
        for wanted, shape in given
        for symbol, size in zip(wanted, shape, strict=True)
    )


def _mixed(pairs: Pairs, shapes: Shapes, axes: BatchAxes) -> str:
    """What the samples are, and each way in which they could be given."""
    places = [(spec, name, axes.inputs[spec.name]) for spec, name in pairs]
    batch = {spec.name: _batched(spec.shape, axis) for spec, _, axis in places}
    calls = {spec.name: ("calls", *spec.shape) for spec, _, _ in places}
    remedy = _remedy([(batch[spec.name], shapes[name], name) for spec, name, _ in places])
    return (
        f"the samples {_listed({name: shapes[name] for _, name, _ in places})} don't fit the file. "
        f"Expected {'one call' if axes.one_call else 'one batch of all samples'}, "
        f"{_listed(batch)}, or calls with one more axis in front, {_listed(calls)}. "
        f"{remedy or 'If the batch is on other axes: --batch-axis NAME=AXIS, or NAME=none.'}"
    )


def _batched(shape: Sequence[int | str], axis: int | None) -> tuple[int | str, ...]:
    return tuple("samples" if at == axis else size for at, size in enumerate(shape))


def _listed(shapes: Mapping[str, Sequence[int | str]]) -> str:
    return ", ".join(f"'{name}' ({', '.join(map(str, s))})" for name, s in shapes.items())


def _remedy(pairs: Sequence[tuple[Sequence[int | str], Sequence[int | str], str]]) -> str | None:
    """The way out where arrays are transposed or two of them are swapped; None: it is not known.

    `pairs`: shape that is wanted, shape that is given, name of the array.
    """
    wrong = [pair for pair in pairs if not _agrees(pair[0], pair[1])]
    for wanted, given, name in wrong:
        last = len(given) - 1
        orders = ((0, last, *range(1, last)), (0, *range(2, last + 1), 1))
        for order in orders if len(given) == len(wanted) > 2 else ():
            if _agrees(wanted, [given[axis] for axis in order]):
                return (
                    f"The axes of '{name}' are in another order: transpose it with "
                    f"x.transpose({', '.join(map(str, order))})."
                )
    for (one, first, a), (other, second, b) in itertools.combinations(pairs, 2):
        if wrong and _agrees(one, second) and _agrees(other, first):
            return f"The arrays '{a}' and '{b}' are swapped: exchange their names or their order."
    return None


def _pairs(
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    parameters: Collection[str] | None,
) -> list[tuple[TensorSpec, TensorSpec]]:
    by_name = {spec.name: spec for spec in samples}
    named = {spec.name for spec in inputs}
    if named <= set(by_name) and (named or not by_name):
        if parameters is not None:
            _check_parameters(inputs, samples, parameters)
        return [(spec, by_name[spec.name]) for spec in inputs]
    if len(inputs) != len(samples):
        raise InputMismatch(
            f"the file takes {len(inputs)} inputs, {_describe(inputs)}; "
            f"the samples hold {len(samples)}, {_describe(samples)}. "
            "Give an .npz with one array for each input, named as the inputs."
        )
    shared = [spec.name for spec in inputs if spec.name in by_name]
    if shared:
        raise InputMismatch(
            f"the samples {_describe(samples)} share only the names {shared} with the file's "
            f"inputs, {_describe(inputs)}. Name every array as its input, or none."
        )
    return list(zip(inputs, samples, strict=True))


def _others(samples: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in samples if name not in names)


def _check_parameters(
    inputs: Sequence[TensorSpec], samples: Sequence[TensorSpec], parameters: Collection[str]
) -> None:
    others = _others([spec.name for spec in samples], {spec.name for spec in inputs})
    strangers = [name for name in others if name.partition(".")[0] not in parameters]
    if strangers:
        raise InputMismatch(
            f"the samples hold {_describe(samples)}; {strangers} is no input of the file, "
            f"{_describe(inputs)}, and no parameter of the model's forward, {sorted(parameters)}. "
            "Leave it out, or name it as the parameter that takes it."
        )


def _check_shapes(pairs: Sequence[tuple[TensorSpec, TensorSpec]]) -> None:
    sizes = [(_batched(w.shape, 0), _batched(g.shape, 0), g.name) for w, g in pairs]
    for (wanted, given), (expected, shape, _) in zip(pairs, sizes, strict=True):
        if not _agrees(expected, shape):
            remedy = _remedy(sizes) or (
                "Preprocess to the file's shape, samples on axis 0, or export again with an "
                "example of the samples' shape."
            )
            raise InputMismatch(
                f"input {_describe([wanted])} of the file doesn't fit the samples "
                f"{_describe([given])}. {remedy}"
            )


def _check(wanted: TensorSpec, given: TensorSpec) -> None:
    if wanted.dtype != given.dtype:
        remedy = f"Save the samples as {wanted.dtype}."
        if (wanted.dtype, given.dtype) == ("float16", "float32"):
            remedy = (
                "Convert the file with inputs and outputs in float32 (keep_io_types=True), and "
                "judge it by --precision reduced."
            )
        raise InputMismatch(
            f"input {_describe([wanted])} of the file doesn't take the samples' dtype: "
            f"{_describe([given])}. {remedy}"
        )


def _describe(specs: Sequence[TensorSpec]) -> str:
    texts = [
        f"'{spec.name}' {spec.dtype} ({', '.join(str(size) for size in spec.shape)})"
        for spec in specs
    ]
    return ", ".join(texts) or "none"
