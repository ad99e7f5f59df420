"""Map sample arrays to model inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gate.errors import InputMismatch
from gate.records.evidence import TensorSpec
from gate.storage.arrays import Batch, OutputArray


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

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the samples, in the order in which the model gets them."""
        return self.given or tuple(sample for _, sample in self.pairs)

    @property
    def model_only(self) -> tuple[str, ...]:
        """Names of the samples of what only the model takes."""
        return _others(self.given, {sample for _, sample in self.pairs})

    def by_input(self, batch: Batch) -> dict[str, OutputArray]:
        """A batch of the samples, by the names of the file's inputs."""
        return {name: batch[sample] for name, sample in self.pairs}


def bind_inputs(
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    *,
    count: int,
    batch_size: int,
    parameters: Collection[str] | None = None,
) -> InputBinding:
    """Bind by name where the samples have all names of the file, by position where no name is
    shared.

    `inputs` are the file's, `samples` those of `gate.data.samples.SampleSet`, with
    `count` samples. A file with a fixed batch axis is measured with that batch size.
    `parameters`: those of the model's forward; None without a model, and for one that takes any.
    Samples beyond the file's inputs go into the model alone, if they are named as its parameters.
    Raises InputMismatch where only some names of the file are shared (position would contradict
    them), on another number, dtype, rank or fixed size, and where the samples don't fill the
    fixed batches.
    """
    if batch_size < 1:
        raise InputMismatch(f"the batch size is {batch_size}, at least 1 is expected.")
    pairs = _pairs(inputs, samples, parameters)
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
    return InputBinding(
        tuple((wanted.name, given.name) for wanted, given in pairs),
        size,
        bool(fixed),
        given=tuple(spec.name for spec in samples) if len(samples) > len(pairs) else (),
    )


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


def _check(wanted: TensorSpec, given: TensorSpec) -> None:
    fits = len(wanted.shape) == len(given.shape) and all(
        isinstance(size, str) or size == got
        for size, got in zip(wanted.shape[1:], given.shape[1:], strict=True)
    )
    if not fits:
        raise InputMismatch(
            f"input {_describe([wanted])} of the file doesn't fit the samples "
            f"{_describe([given])}. Preprocess to the file's shape, samples on axis 0, or export "
            "again with an example of the samples' shape."
        )
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
