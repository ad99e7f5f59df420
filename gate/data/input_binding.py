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
    """Maps the inputs of a file, in order, to the names of the sample arrays.

    The batch axis of every sample array is axis 0. If an input of the file has it elsewhere, or has
    none, the arrays are rearranged for the call of the file and of the model.
    """

    pairs: tuple[tuple[str, str], ...]
    """(input of the file, name of the sample array)."""
    batch_size: int
    fixed: bool
    """True if the file has a fixed batch size."""
    double: bool = False
    """True if the model gets float64 inputs unchanged. False: it gets all floats as float32."""
    sample_names: tuple[str, ...] = ()
    """Names of all sample arrays, in order, if the model takes more inputs than the file: exporters
    drop an input that affects no output."""
    layout: BatchAxes | None = None
    """None: axis 0 of every input and output is the batch axis."""
    reduced: bool = False
    """True if outputs in float16 or bfloat16 are compared with those of a float32 model."""
    halves: tuple[tuple[str, str], ...] = ()
    """(name of the sample array, dtype of the file's input) for float16 and bfloat16 inputs."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the names of the sample arrays, in the order of the model's arguments."""
        return self.sample_names or tuple(sample for _, sample in self.pairs)

    @property
    def model_only(self) -> tuple[str, ...]:
        """Return the names of the sample arrays that only the model takes."""
        return _unbound_names(self.sample_names, {sample for _, sample in self.pairs})

    def rows_by_input(self, batch: Batch) -> dict[str, OutputArray]:
        """Return a batch, with the batch axis on axis 0, by the names of the file's inputs."""
        return {name: self._rounded(batch[sample], sample) for name, sample in self.pairs}

    def _rounded(self, array: OutputArray, sample: str) -> OutputArray:
        half = dict(self.halves).get(sample)
        return array if half is None else rounded(array, half)

    def check_range(self, batch: Batch, *, start: int) -> None:
        """Raise DataError for a sample beyond the range of the file's half-precision inputs.
        `start`: the index of the first sample."""
        for name, half in self.halves:
            with np.errstate(over="ignore"):  # The limit of bfloat16 overflows in float16.
                beyond = np.isfinite(batch[name]) & (np.abs(batch[name]) > largest(half))
            if beyond.any():
                row = int(beyond.reshape(len(beyond), -1).any(axis=1).argmax())
                raise DataError(
                    f"input '{name}' has {batch[name][beyond].flat[0]:.6g} in sample "
                    f"{start + row}, beyond the range of {half}, the dtype of the file's input. "
                    "Scale the samples as the file expects them."
                )

    def by_input(self, batch: Batch) -> dict[str, OutputArray]:
        """Return the arrays of one call of the file, by the names of its inputs."""
        call = self.to_call(batch)
        return {name: self._rounded(call[sample], sample) for name, sample in self.pairs}

    def by_argument(self, batch: Batch) -> list[OutputArray]:
        """Return the arguments of one call of the model, rounded like the file's 16-bit inputs."""
        call, halves = self.to_call(batch), dict(self.halves)
        return [
            self._rounded(call[name], name).astype(np.float32) if name in halves else call[name]
            for name in self.arguments
        ]

    def to_call(self, batch: Batch) -> Batch:
        """Return the arrays of a batch in the layout of the model, by the names of the samples.

        An input without a batch axis gets the value of the first sample. Raises InputMismatch for
        several samples if a call takes one sample.
        """
        if self.layout is None:
            return batch
        axes = self.layout
        count = len(next(iter(batch.values())))
        if axes.is_unbatched and count != 1:
            raise InputMismatch(f"one call takes one sample, but the batch has {count}.")
        inputs = {sample: name for name, sample in self.pairs}
        return {
            sample: _placed(array, axes.inputs.get(inputs.get(sample, sample), 0))
            for sample, array in batch.items()
        }

    def from_call(self, outputs: Sequence[RuntimeArray]) -> list[RuntimeArray]:
        """Return the outputs of a call, in the file's order, with any batch axis on axis 0."""
        if self.layout is None:
            return list(outputs)
        axes = self.layout
        if axes.is_unbatched:
            return [np.asarray(output)[None] for output in outputs]
        output_axes = [*axes.outputs.values(), *[None] * len(outputs)]
        return [
            np.ascontiguousarray(np.moveaxis(output, axis, 0))
            if axis and axis < np.ndim(output)
            else output
            for output, axis in zip(outputs, output_axes, strict=False)
        ]

    def to_outputs(self, outputs: Sequence[RuntimeArray]) -> list[RuntimeArray]:
        """Undo `from_call`: return the outputs in the layout of the file."""
        if self.layout is None:
            return list(outputs)
        if self.layout.is_unbatched:
            return [_placed(output, None) for output in outputs]
        output_axes = self.layout.outputs.values()
        return [_placed(out, axis or 0) for out, axis in zip(outputs, output_axes, strict=True)]

    @property
    def shared(self) -> frozenset[str]:
        """Return the names of samples whose input has no batch axis while other inputs have one."""
        if self.layout is None or self.layout.is_unbatched:
            return frozenset()
        axes = self.layout.inputs
        return frozenset(sample for name, sample in self.pairs if axes[name] is None)

    def canonical(self, inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of the file's inputs with the batch axis on axis 0."""
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
    parameters: Sequence[str] | None = None,
    layout: BatchAxes | None = None,
    reduced: bool = False,
) -> InputBinding:
    """Bind sample arrays to inputs: by name if all inputs are named, by position if none is.

    inputs: the file's inputs. samples: the specs of a `SampleSet` with `count` samples.
    batch_size: replaced by the file's batch size if that is fixed.
    parameters: names of forward's parameters; None without a model, or if it takes any names.
    Other sample arrays are passed to the model only, if they are named like its parameters.
    reduced: whether float16 and bfloat16 inputs accept samples of other floats, rounded.
    layout: the layout of the samples (`gate.data.batch_axes`).

    Raises InputMismatch if only some names match, if the number, dtype, rank or fixed size differs,
    or if the samples do not fill the fixed batches.
    """
    if batch_size < 1:
        raise InputMismatch(f"the batch size is {batch_size}, expected at least 1.")
    if layout is not None:
        inputs = [layout.canonical(spec) for spec in inputs]
    pairs = pair_inputs(inputs, samples, parameters)
    _check_shapes(pairs)
    for spec, sample in pairs:
        _check_dtype(spec, sample, reduced=reduced)
    fixed = {spec.shape[0] for spec in inputs if isinstance(spec.shape[0], int)}
    if len(fixed) > 1:
        raise InputMismatch(
            f"the file's inputs have different fixed batch sizes: {describe(inputs)}. "
            "Export with a dynamic batch axis: set export.dynamic_batch: true."
        )
    size = max(fixed, default=min(batch_size, count))
    if fixed and (size < 1 or count % size):
        raise InputMismatch(
            f"the file has a fixed batch size of {size}, and {count} samples are not a multiple of "
            "it. Use a multiple, or export with export.dynamic_batch: true. If axis 0 is not the "
            "batch axis of the file: --batch-axis NAME=AXIS."
        )
    unbatched = layout is not None and layout.is_unbatched
    halves = ((sample.name, spec.dtype) for spec, sample in pairs if spec.dtype in HALF)
    return InputBinding(
        tuple((spec.name, sample.name) for spec, sample in pairs),
        1 if unbatched else size,
        unbatched or bool(fixed),
        sample_names=tuple(spec.name for spec in samples) if len(samples) > len(pairs) else (),
        layout=layout,
        reduced=reduced,
        halves=tuple(halves) if reduced else (),
    )


def pair_inputs(
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    parameters: Sequence[str] | None,
) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return each input of the file with its samples, by name or by position.

    torch.export writes the names of forward's parameters in lower case. If the file has other
    names, samples that are named after parameters are in the order of the parameters, like the
    inputs of an exported file. Raises InputMismatch.
    """
    by_name = {spec.name: spec for spec in samples}
    lowered = {spec.name.lower(): spec for spec in samples}
    if len(lowered) == len(samples):
        by_name = {**lowered, **by_name}
    named = {spec.name for spec in inputs}
    bound = {by_name[name].name for name in named & set(by_name)}
    if len(bound) == len(named) and (named or not by_name):
        if parameters is not None:
            _check_parameters(inputs, samples, parameters, bound)
        return [(spec, by_name[spec.name]) for spec in inputs]
    if len(inputs) != len(samples):
        raise InputMismatch(
            f"the file has {len(inputs)} inputs, {describe(inputs)}; "
            f"the samples have {len(samples)} arrays, {describe(samples)}. "
            "Save an .npz with one array for each input, under the names of the inputs."
        )
    shared = [spec.name for spec in inputs if spec.name in by_name]
    if shared:
        raise InputMismatch(
            f"the samples {describe(samples)} share only the names {shared} with the file's "
            f"inputs, {describe(inputs)}. Name all arrays like their inputs, or none."
        )
    order = {name: position for position, name in enumerate(parameters or ())}
    heads = [spec.name.partition(".")[0] for spec in samples]
    if order.keys() >= set(heads):
        samples = [samples[i] for i in sorted(range(len(heads)), key=lambda i: order[heads[i]])]
    return list(zip(inputs, samples, strict=True))


def _unbound_names(samples: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in samples if name not in names)


def _check_parameters(
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    parameters: Collection[str],
    bound: Collection[str],
) -> None:
    extra = _unbound_names([spec.name for spec in samples], bound)
    unknown = [name for name in extra if name.partition(".")[0] not in parameters]
    if unknown:
        raise InputMismatch(
            f"the samples have {describe(samples)}; {unknown} is neither an input of the file, "
            f"{describe(inputs)}, nor a parameter of the model's forward, {sorted(parameters)}. "
            "Remove it, or name it like the parameter."
        )


def _check_shapes(pairs: Sequence[tuple[TensorSpec, TensorSpec]]) -> None:
    sizes = [(batched(w.shape, 0), batched(g.shape, 0), g.name) for w, g in pairs]
    for (spec, sample), (expected, shape, _) in zip(pairs, sizes, strict=True):
        if not agrees(expected, shape):
            remedy = shape_remedy(sizes) or (
                "Preprocess the samples to the file's shape, samples on axis 0, or export again "
                "with an example of the samples' shape. If axis 0 is not the batch axis of the "
                "file: --batch-axis NAME=AXIS."
            )
            raise InputMismatch(
                f"input {describe([spec])} of the file doesn't fit the samples "
                f"{describe([sample])}. {remedy}"
            )


def _check_dtype(spec: TensorSpec, sample: TensorSpec, *, reduced: bool) -> None:
    half = spec.dtype in HALF and sample.dtype.startswith("float")
    if spec.dtype != sample.dtype and not (half and reduced):
        remedy = f"Save the samples as {spec.dtype}."
        if sample.dtype == STRING:
            remedy = (
                f"Save the samples as {spec.dtype}. If these strings are paths of pictures, use "
                "--preprocessing SPEC."
            )
        if spec.dtype == STRING:
            remedy = "Save the samples as strings: numpy.array(texts), of dtype U."
        if half:
            remedy = (
                f"If the file is in {spec.dtype} on purpose, use --precision reduced, which "
                "rounds the samples."
            )
        raise InputMismatch(
            f"input {describe([spec])} of the file doesn't accept the samples' dtype: "
            f"{describe([sample])}. {remedy}"
        )


def describe(specs: Sequence[TensorSpec]) -> str:
    """Return names, dtypes and shapes as one line of text."""
    texts = [
        f"'{spec.name}' {spec.dtype} ({', '.join(str(size) for size in spec.shape)})"
        for spec in specs
    ]
    return ", ".join(texts) or "none"


def agrees(expected: Sequence[int | str], shape: Sequence[int | str]) -> bool:
    """Return whether a shape has the expected sizes. A size that is a string matches any size."""
    return len(expected) == len(shape) and all(
        isinstance(size, str) or size == count for size, count in zip(expected, shape, strict=True)
    )


def batched(shape: Sequence[int | str], axis: int | None) -> tuple[int | str, ...]:
    """Return the shape with `samples` as the size of the batch axis."""
    return tuple("samples" if index == axis else size for index, size in enumerate(shape))


def shape_remedy(
    pairs: Sequence[tuple[Sequence[int | str], Sequence[int | str], str]],
) -> str | None:
    """Return how to fix arrays that are transposed or swapped; None if neither explains the shapes.

    `pairs`: expected shape, actual shape, name of the array.
    """
    mismatched = [pair for pair in pairs if not agrees(pair[0], pair[1])]
    for expected, shape, name in mismatched:
        last = len(shape) - 1
        orders = ((0, last, *range(1, last)), (0, *range(2, last + 1), 1))
        for order in orders if len(shape) == len(expected) > 2 else ():
            if agrees(expected, [shape[axis] for axis in order]):
                return (
                    f"The axes of '{name}' are in another order: transpose it with "
                    f"x.transpose({', '.join(map(str, order))})."
                )
    for (first, first_shape, a), (second, second_shape, b) in itertools.combinations(pairs, 2):
        if mismatched and agrees(first, second_shape) and agrees(second, first_shape):
            return f"The arrays '{a}' and '{b}' are swapped: swap their names or their order."
    return None
