"""Map sample arrays to model inputs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gate.errors import DataError, InputMismatch
from gate.records.evidence import BatchAxes, TensorSpec
from gate.storage.arrays import HALF, STRING, Batch, OutputArray, RuntimeArray, largest, rounded


@dataclass(frozen=True)
class InputBinding:
    """Input names of the file in its order, each with the name of its samples.

    Every array of a batch has the samples on axis 0. Where an input of the file has them on another
    axis, or none, arrays are moved at the call of the file and of the model.
    """

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
    reduced: bool = False
    """True if outputs in float16 or bfloat16 are compared with those of a float32 model."""
    halves: tuple[tuple[str, str], ...] = ()
    """(name of the samples, dtype of the file's input), where that is float16 or bfloat16."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the samples, in the order in which the model gets them."""
        return self.given or tuple(sample for _, sample in self.pairs)

    @property
    def model_only(self) -> tuple[str, ...]:
        """Names of the samples of what only the model takes."""
        return _unbound_names(self.given, {sample for _, sample in self.pairs})

    def rows_by_input(self, batch: Batch) -> dict[str, OutputArray]:
        """Return a batch, with the samples on axis 0, by the names of the file's inputs."""
        return {name: self._rounded(batch[sample], sample) for name, sample in self.pairs}

    def _rounded(self, array: OutputArray, sample: str) -> OutputArray:
        half = dict(self.halves).get(sample)
        return array if half is None else rounded(array, half)

    def check_range(self, batch: Batch, *, start: int) -> None:
        """Raise DataError for a sample that the file's inputs in half precision cannot hold.
        `start`: the index of the first one."""
        for name, half in self.halves:
            with np.errstate(over="ignore"):  # the limit, of samples in float16
                beyond = np.isfinite(batch[name]) & (np.abs(batch[name]) > largest(half))
            if beyond.any():
                row = int(beyond.reshape(len(beyond), -1).any(axis=1).argmax())
                raise DataError(
                    f"input '{name}' has {batch[name][beyond].flat[0]:.6g} in sample "
                    f"{start + row}, beyond the range of {half}, which the file takes. "
                    "Scale the samples as the file expects them."
                )

    def by_input(self, batch: Batch) -> dict[str, OutputArray]:
        """Return the arrays of one call of the file, by the names of its inputs."""
        call = self.to_call(batch)
        return {name: self._rounded(call[sample], sample) for name, sample in self.pairs}

    def by_argument(self, batch: Batch) -> list[OutputArray]:
        """Return the arguments of one call of the model, rounded where the file takes 16 bits."""
        call, halves = self.to_call(batch), dict(self.halves)
        return [
            self._rounded(call[name], name).astype(np.float32) if name in halves else call[name]
            for name in self.arguments
        ]

    def to_call(self, batch: Batch) -> Batch:
        """Return the arrays of a batch in the layout of the model, by the names of the samples.

        An input without a batch axis gets the value of the first sample. Raises InputMismatch for
        several samples where one sample is one call.
        """
        if self.layout is None:
            return batch
        axes = self.layout
        count = len(next(iter(batch.values())))
        if axes.is_unbatched and count != 1:
            raise InputMismatch(f"one call takes one sample, and {count} were given.")
        inputs = {sample: name for name, sample in self.pairs}
        return {
            sample: _placed(array, axes.inputs.get(inputs.get(sample, sample), 0))
            for sample, array in batch.items()
        }

    def from_call(self, outputs: Sequence[RuntimeArray]) -> list[RuntimeArray]:
        """Return the outputs of a call, in the file's order, with the samples on axis 0 of every
        output that has a batch axis."""
        if self.layout is None:
            return list(outputs)
        axes = self.layout
        if axes.is_unbatched:
            return [np.asarray(output)[None] for output in outputs]
        places = [*axes.outputs.values(), *[None] * len(outputs)]
        return [
            np.ascontiguousarray(np.moveaxis(output, axis, 0))
            if axis and axis < np.ndim(output)
            else output
            for output, axis in zip(outputs, places, strict=False)
        ]

    def to_outputs(self, outputs: Sequence[RuntimeArray]) -> list[RuntimeArray]:
        """Undo `from_call`: return the outputs in the layout of the file."""
        if self.layout is None:
            return list(outputs)
        if self.layout.is_unbatched:
            return [_placed(output, None) for output in outputs]
        places = self.layout.outputs.values()
        return [_placed(out, axis or 0) for out, axis in zip(outputs, places, strict=True)]

    @property
    def shared(self) -> frozenset[str]:
        """Return the names of samples whose input has no batch axis while other inputs have one."""
        if self.layout is None or self.layout.is_unbatched:
            return frozenset()
        axes = self.layout.inputs
        return frozenset(sample for name, sample in self.pairs if axes[name] is None)

    def canonical(self, inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the inputs of the file with the samples on axis 0."""
        return tuple(inputs if self.layout is None else map(self.layout.canonical, inputs))


def _placed(array: RuntimeArray, axis: int | None) -> RuntimeArray:
    if axis is None:
        return np.asarray(array[0])
    return np.ascontiguousarray(np.moveaxis(array, 0, axis)) if axis else array


def bind_inputs(  # noqa: PLR0913 - the facts of the file, the samples and the policy
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    *,
    count: int,
    batch_size: int,
    parameters: Collection[str] | None = None,
    layout: BatchAxes | None = None,
    reduced: bool = False,
) -> InputBinding:
    """Bind by name where the samples have all names of the file, by position where no name is
    shared.

    `inputs` are the file's, `samples` those of `gate.data.samples.SampleSet`, with
    `count` samples. A file with a fixed batch axis is measured with that batch size.
    `parameters`: those of the model's forward; None without a model, and for one that takes any.
    `reduced`: inputs in float16 or bfloat16 take samples of other floats, rounded.
    Samples beyond the file's inputs go into the model alone, if they are named as its parameters.
    `layout`: that of the samples (`gate.data.batch_axes`). Raises InputMismatch where only some
    names of the file are shared (position would contradict them), on another number, dtype, rank or
    fixed size, and where the samples don't fill the fixed batches.
    """
    if batch_size < 1:
        raise InputMismatch(f"the batch size is {batch_size}, at least 1 is expected.")
    if layout is not None:
        inputs = [layout.canonical(spec) for spec in inputs]
    pairs = pair_up(inputs, samples, parameters)
    _check_shapes(pairs)
    for wanted, given in pairs:
        _check(wanted, given, reduced=reduced)
    fixed = {spec.shape[0] for spec in inputs if isinstance(spec.shape[0], int)}
    if len(fixed) > 1:
        raise InputMismatch(
            f"the file's inputs have different fixed batch axes: {describe(inputs)}. "
            "Export with one batch axis for all: set export.dynamic_batch: true."
        )
    size = max(fixed, default=min(batch_size, count))
    if fixed and (size < 1 or count % size):
        raise InputMismatch(
            f"the file has a fixed batch axis of {size}, and {count} samples are no multiple of "
            "it. Give a multiple, or export with export.dynamic_batch: true."
        )
    alone = layout is not None and layout.is_unbatched
    return InputBinding(
        tuple((wanted.name, given.name) for wanted, given in pairs),
        1 if alone else size,
        alone or bool(fixed),
        given=tuple(spec.name for spec in samples) if len(samples) > len(pairs) else (),
        layout=layout,
        reduced=reduced,
        halves=tuple((given.name, wanted.dtype) for wanted, given in pairs if wanted.dtype in HALF)
        if reduced
        else (),
    )


def pair_up(
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    parameters: Collection[str] | None,
) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return each input of the file with its samples, by name or by position. Raises
    InputMismatch."""
    by_name = {spec.name: spec for spec in samples}
    named = {spec.name for spec in inputs}
    if named <= set(by_name) and (named or not by_name):
        if parameters is not None:
            _check_parameters(inputs, samples, parameters)
        return [(spec, by_name[spec.name]) for spec in inputs]
    if len(inputs) != len(samples):
        raise InputMismatch(
            f"the file takes {len(inputs)} inputs, {describe(inputs)}; "
            f"the samples hold {len(samples)}, {describe(samples)}. "
            "Give an .npz with one array for each input, named as the inputs."
        )
    shared = [spec.name for spec in inputs if spec.name in by_name]
    if shared:
        raise InputMismatch(
            f"the samples {describe(samples)} share only the names {shared} with the file's "
            f"inputs, {describe(inputs)}. Name every array as its input, or none."
        )
    return list(zip(inputs, samples, strict=True))


def _unbound_names(samples: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in samples if name not in names)


def _check_parameters(
    inputs: Sequence[TensorSpec], samples: Sequence[TensorSpec], parameters: Collection[str]
) -> None:
    others = _unbound_names([spec.name for spec in samples], {spec.name for spec in inputs})
    strangers = [name for name in others if name.partition(".")[0] not in parameters]
    if strangers:
        raise InputMismatch(
            f"the samples hold {describe(samples)}; {strangers} is no input of the file, "
            f"{describe(inputs)}, and no parameter of the model's forward, {sorted(parameters)}. "
            "Leave it out, or name it as the parameter that takes it."
        )


def _check_shapes(pairs: Sequence[tuple[TensorSpec, TensorSpec]]) -> None:
    sizes = [(batched(w.shape, 0), batched(g.shape, 0), g.name) for w, g in pairs]
    for (wanted, given), (expected, shape, _) in zip(pairs, sizes, strict=True):
        if not agrees(expected, shape):
            remedy = shape_remedy(sizes) or (
                "Preprocess to the file's shape, samples on axis 0, or export again with an "
                "example of the samples' shape."
            )
            raise InputMismatch(
                f"input {describe([wanted])} of the file doesn't fit the samples "
                f"{describe([given])}. {remedy}"
            )


def _check(wanted: TensorSpec, given: TensorSpec, *, reduced: bool) -> None:
    half = wanted.dtype in HALF and given.dtype.startswith("float")
    if wanted.dtype != given.dtype and not (half and reduced):
        remedy = f"Save the samples as {wanted.dtype}."
        if given.dtype == STRING:
            remedy = (
                f"Give samples in {wanted.dtype}. If these texts are the paths of pictures: "
                "--preprocessing SPEC."
            )
        if wanted.dtype == STRING:
            remedy = "Save the samples as texts: numpy.array(texts), of dtype U."
        if half:
            remedy = (
                f"A file in {wanted.dtype} on purpose is judged by --precision reduced, which "
                "rounds the samples."
            )
        raise InputMismatch(
            f"input {describe([wanted])} of the file doesn't take the samples' dtype: "
            f"{describe([given])}. {remedy}"
        )


def describe(specs: Sequence[TensorSpec]) -> str:
    """Return names, dtypes and shapes in one line."""
    texts = [
        f"'{spec.name}' {spec.dtype} ({', '.join(str(size) for size in spec.shape)})"
        for spec in specs
    ]
    return ", ".join(texts) or "none"


def agrees(wanted: Sequence[int | str], shape: Sequence[int | str]) -> bool:
    """Return True if an array of this shape has the sizes that are wanted; a text is any size."""
    return len(wanted) == len(shape) and all(
        isinstance(size, str) or size == there for size, there in zip(wanted, shape, strict=True)
    )


def batched(shape: Sequence[int | str], axis: int | None) -> tuple[int | str, ...]:
    """Return the shape with `samples` as the size of the batch axis."""
    return tuple("samples" if at == axis else size for at, size in enumerate(shape))


def shape_remedy(
    pairs: Sequence[tuple[Sequence[int | str], Sequence[int | str], str]],
) -> str | None:
    """Return how to fix arrays that are transposed or swapped; None if neither explains the shapes.

    `pairs`: shape that is wanted, shape that is given, name of the array.
    """
    wrong = [pair for pair in pairs if not agrees(pair[0], pair[1])]
    for wanted, given, name in wrong:
        last = len(given) - 1
        orders = ((0, last, *range(1, last)), (0, *range(2, last + 1), 1))
        for order in orders if len(given) == len(wanted) > 2 else ():
            if agrees(wanted, [given[axis] for axis in order]):
                return (
                    f"The axes of '{name}' are in another order: transpose it with "
                    f"x.transpose({', '.join(map(str, order))})."
                )
    for (one, first, a), (other, second, b) in itertools.combinations(pairs, 2):
        if wrong and agrees(one, second) and agrees(other, first):
            return f"The arrays '{a}' and '{b}' are swapped: exchange their names or their order."
    return None
