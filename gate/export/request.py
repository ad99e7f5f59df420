"""One export request: model, example input, names, dynamic axes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_map_only

from gate.errors import ExportError, ModelError
from gate.export.export_warnings import shorten_message
from gate.model.forward_signature import ForwardSignature, Leaf, PositionalModel, is_plain, leaves
from gate.model.model_state import ModelState
from gate.onnx_file import reading
from gate.records.evidence import Subject, TensorSpec
from gate.records.export import ExportSettings
from gate.storage.arrays import resized


@dataclass(frozen=True)
class Example:
    """Arrays by input name, in the order of the file's inputs."""

    arrays: dict[str, NDArray[Any]]
    axes: Mapping[str, int | None] = field(default_factory=dict)
    """The batch axis of each input, None for none. Inputs that are not listed have axis 0."""

    @classmethod
    def bind(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        names: tuple[str, ...] | None,
        settings: ExportSettings | None = None,
    ) -> Example:
        """Name `arrays` after the inputs: by name if all names match, else by position.

        Without `names` the arrays keep their names. `settings` may state batch axes other than 0.
        Raises ExportError for a wrong number of arrays, no samples, unequal numbers of samples,
        dtypes that are not numbers, and values that are not finite.
        """
        names = tuple(arrays) if names is None else names
        if not names or len(arrays) != len(names):
            raise ExportError(
                f"the example has {len(arrays)} array(s) ({', '.join(arrays) or 'none'}), "
                f"export.input_names has {len(names)} ({', '.join(names)}). "
                "Pass one array for each argument of forward, in the same order."
            )
        ordered = arrays if set(arrays) == set(names) else dict(zip(names, arrays.values()))  # noqa: B905
        bound = {name: np.asarray(ordered[name]) for name in names}
        for name, array in bound.items():
            _check(name, array, alone=len(bound) == 1)
        axes = _batch_axes(bound, settings or ExportSettings())
        lengths = {
            name: array.shape[axis]
            for name, array in bound.items()
            if (axis := axes[name]) is not None
        }
        if len(set(lengths.values())) > 1 or 0 in lengths.values():
            raise ExportError(
                f"the example's arrays have unequal numbers of samples: {lengths}. If the batch "
                "is not axis 0 of every input, state it: --batch-axis NAME=AXIS, or NAME=none."
            )
        return cls(bound, axes)

    @property
    def batched(self) -> dict[str, int]:
        """Return the batch axis of each input that has one."""
        axes = {name: self.axes.get(name, 0) for name in self.arrays}
        return {name: axis for name, axis in axes.items() if axis is not None}

    def notices(self, settings: ExportSettings) -> tuple[str, ...]:
        """Return what the export decided about the batch axis by default."""
        if self.batched or settings.batch_axes or settings.dynamic_axes:
            return ()
        return ("one call is one sample: no batch axis is dynamic (--batch-axis NAME=AXIS)",)

    def batch(self, size: int) -> Example:
        """Return exactly `size` samples: the first ones, repeated if there are too few."""
        return self.resized({name: {axis: size} for name, axis in self.batched.items()})

    def resized(self, sizes: Mapping[str, Mapping[int, int]]) -> Example:
        """Return a copy with other sizes of some axes, by input: truncated, or repeated."""
        arrays = dict(self.arrays)
        for name, axes in sizes.items():
            for axis, size in axes.items():
                arrays[name] = resized(arrays[name], axis, size)
        return Example({name: np.array(a, order="C") for name, a in arrays.items()}, self.axes)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the arrays as CPU tensors that own their memory."""
        return tuple(torch.from_numpy(np.array(array)) for array in self.arrays.values())

    def describe(self) -> str:
        """Return names, dtypes and shapes for messages."""
        return ", ".join(
            f"{name}: {array.dtype}{list(array.shape)}" for name, array in self.arrays.items()
        )


def _batch_axes(
    arrays: Mapping[str, NDArray[Any]], settings: ExportSettings
) -> dict[str, int | None]:
    """Return the batch axis of each input: the stated one, the axis named batch, or axis 0.

    Empty if the arrays have no length in common: then one call is one sample.
    """
    stated: dict[str, int | None] = {
        name: axis
        for name, labels in settings.dynamic_axes.items()
        for axis, label in labels.items()
        if label == BATCH and name in arrays
    }
    stated |= settings.batch_axes
    for name, axis in stated.items():
        if name not in arrays:
            raise ExportError(
                f"export.batch_axes (--batch-axis) names the input '{name}', the example has "
                f"{', '.join(arrays)}. An .npy is the input 'input'; an .npz names its inputs."
            )
        if axis is not None and axis >= arrays[name].ndim:
            shapes = {key: list(array.shape) for key, array in arrays.items()}
            raise ExportError(
                f"export.batch_axes names axis {axis} of {name}, and the example has {shapes}. "
                "Name one of its axes, counted from 0."
            )
    counts = {arrays[name].shape[axis] for name, axis in stated.items() if axis is not None}
    unstated = [name for name in arrays if name not in stated]
    are_equal = len({arrays[name].shape[:1] for name in unstated}) == 1
    first_labels = {settings.dynamic_axes.get(name, {}).get(0, BATCH) for name in unstated}
    shapes_of = [set(arrays[name].shape) for name in unstated if arrays[name].ndim]
    # No length is in all arrays, or an axis 0 is named, such as x:0=nodes of a graph.
    are_disjoint = len(shapes_of) > 1 and not set.intersection(*shapes_of)
    is_one_sample = not counts and not are_equal and (are_disjoint or first_labels != {BATCH})
    inferred: dict[str, int | None] = {}
    for name in unstated:
        shape = arrays[name].shape
        is_batched = bool(shape) and not is_one_sample and (not counts or shape[0] in counts)
        inferred[name] = 0 if is_batched else None
    return {name: {**inferred, **stated}[name] for name in arrays}


def _check(name: str, array: NDArray[Any], *, alone: bool) -> None:
    if array.dtype.kind not in "fiub":
        raise ExportError(
            f"the example input {name} has dtype {array.dtype}, expected numbers or bool."
        )
    if alone and (array.ndim == 0 or array.size == 0):
        raise ExportError(
            f"the example input {name} has shape {list(array.shape)}, expected at least one "
            "sample along axis 0."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ExportError(
            f"the example input {name} holds NaN or infinity. Give an example of real data."
        )


Axes = dict[str, dict[int, str]]
"""By input or output: axis to label. Axes with the same label have the same size."""

BATCH = "batch"


def input_axes(example: Example, settings: ExportSettings, *, outputs: Iterable[str] = ()) -> Axes:
    """Return the dynamic axes of the inputs of `example`.

    Raises ExportError for an unknown input or axis that is not one of `outputs` either, and for a
    label with two sizes.
    """
    unknown = sorted(set(settings.dynamic_axes) - {*example.arrays, *outputs})
    if unknown:
        raise ExportError(
            f"export.dynamic_axes names {', '.join(unknown)}, the inputs are "
            f"{', '.join(example.arrays)}, the outputs {', '.join(outputs)}. Name one of them."
        )
    axes: Axes = {}
    for name, array in example.arrays.items():
        is_batched = settings.dynamic_batch and name in example.batched
        labels = {example.batched[name]: BATCH} if is_batched else {}
        labels |= dict(sorted(settings.dynamic_axes.get(name, {}).items()))
        if labels and max(labels) >= array.ndim:
            raise ExportError(
                f"export.dynamic_axes names axis {max(labels)} of {name}, the example's shape is "
                f"{list(array.shape)}. Count axes from 0."
            )
        if labels:
            axes[name] = labels
    for label, labeled in axes_by_label(axes).items():
        sizes = {example.arrays[name].shape[axis] for name, axis in labeled}
        if len(sizes) > 1:
            raise ExportError(
                f"the dynamic axes with the label {label} have the sizes {sorted(sizes)} in the "
                "example. Axes with one label must have one size: use different labels."
            )
    return axes


def axes_by_label(axes: Axes) -> dict[str, list[tuple[str, int]]]:
    """Return each label with the inputs and axes that have it."""
    labeled: dict[str, list[tuple[str, int]]] = {}
    for name, labels in axes.items():
        for axis, label in labels.items():
            labeled.setdefault(label, []).append((name, axis))
    return labeled


def resized_batches(
    batch: Example, labeled: list[tuple[str, int]], *, samples: Example
) -> Iterator[Example]:
    """Yield the batch at other sizes of one label, the most likely sizes first.

    For the batch an odd number of samples, taken from all `samples`. For other axes an odd step,
    common strides and patch sizes, twice and half the size.
    """
    name, axis = labeled[0]
    size = batch.arrays[name].shape[axis]
    is_batch_axis = batch.batched.get(name) == axis
    tries = [size + 1 + size % 2] if is_batch_axis else [size + 3, size + 32, 2 * size, size // 2]
    batch_inputs = {n for n, input_axis in labeled if batch.batched.get(n) == input_axis}
    source = {n: (samples if n in batch_inputs else batch).arrays[n] for n in batch.arrays}
    for candidate in dict.fromkeys(tries):
        if candidate not in (0, size):
            sizes: dict[str, dict[int, int]] = {}
            for input_name, input_axis in labeled:
                sizes.setdefault(input_name, {})[input_axis] = candidate
            yield Example(source, batch.axes).resized(sizes)


def axes_text(axes: Mapping[str, Mapping[int, str]]) -> str:
    """Return text such as `input:0=batch;input:2=height`, for records."""
    return ";".join(
        f"{name}:{axis}={label}" for name, labels in axes.items() for axis, label in labels.items()
    )


def output_axis_label(name: str, axis: int) -> str:
    """Return a label for an output axis that changes with the inputs but matches none of theirs."""
    return f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{axis}"


Shapes = dict[str, torch.Size]
"""Shapes of the outputs, by name."""


@dataclass(frozen=True)
class OutputShapes:
    """The shapes that the model itself returned for one batch."""

    batch: Example
    shapes: Shapes

    def size(self, input_axis: tuple[str, int]) -> int:
        """Return the size of an axis of an input."""
        name, axis = input_axis
        return int(self.batch.arrays[name].shape[axis])

    def same(self, name: str, axis: int, *, as_in: OutputShapes) -> bool:
        """Return whether an output's axis has the size of this axis of an input."""
        shape, input_shape = self.shapes.get(name, ()), as_in.shapes[name]
        return axis >= len(shape) or shape[axis] == input_shape[axis]


@dataclass(frozen=True)
class OutputAxes:
    """How the output shapes of `first` change when a labeled input axis has another size."""

    first: OutputShapes
    changed: Mapping[str, OutputShapes]
    """Output shapes by the label of the input axes that had another size."""
    inputs: Axes

    def detect(self) -> Axes:
        """Return the output axes that changed, with the label of the same size if there is one."""
        axes: Axes = {}
        for label, changed in self.changed.items():
            input_axis = axes_by_label(self.inputs)[label][0]
            for name, shape in self.first.shapes.items():
                for axis, size in enumerate(shape):
                    if not changed.same(name, axis, as_in=self.first):
                        labels = axes.setdefault(name, {})
                        same = size == self.first.size(input_axis) and axis not in labels
                        labels[axis] = label if same else output_axis_label(name, axis)
        return {name: dict(sorted(labels.items())) for name, labels in axes.items()}

    def declared(self, settings: ExportSettings, *, changed_data: Iterable[OutputShapes]) -> Axes:
        """Return the axes of outputs that `settings.dynamic_axes` names.

        `changed_data`: output shapes for other data of the same sizes as `first`, used only if no
        size changes the axis. Raises ExportError for an unknown axis, one that never changes, and
        a label whose axes have several sizes.
        """
        declared = {
            name: labels
            for name, labels in settings.dynamic_axes.items()
            if name in self.first.shapes and name not in self.first.batch.arrays
        }
        labeled = axes_by_label({name: dict(labels) for name, labels in declared.items()})
        axes = [axis for outputs in labeled.values() for axis in outputs]
        for axis in axes:
            self._check_axis(*axis)
        constant = [axis for axis in axes if not self._changes(axis, self.changed.values())]
        data = list(changed_data) if constant else []
        for axis in constant:
            if not self._changes(axis, data):
                raise self._never_changes(*axis)
        for label, outputs in labeled.items():
            for run in (self.first, *self.changed.values()):
                self._check_label(label, outputs, run)
        return {name: dict(sorted(labels.items())) for name, labels in declared.items()}

    def _check_axis(self, name: str, axis: int) -> None:
        shape = self.first.shapes[name]
        if axis >= len(shape):
            raise ExportError(
                f"export.dynamic_axes names axis {axis} of {name}, the model returns the shape "
                f"{list(shape)}. Count axes from 0."
            )

    def _changes(self, output_axis: tuple[str, int], runs: Iterable[OutputShapes]) -> bool:
        return any(not run.same(*output_axis, as_in=self.first) for run in runs)

    def _never_changes(self, name: str, axis: int) -> ExportError:
        tried = ", ".join(
            f"{label} {self.first.size(labeled[0])} and {self.changed[label].size(labeled[0])}"
            for label, labeled in axes_by_label(self.inputs).items()
        )
        return ExportError(
            f"export.dynamic_axes says that axis {axis} of {name} may have any size, and "
            f"the model returns {self.first.shapes[name][axis]} there at every size that was "
            f"tried ({tried or 'no axis of an input is dynamic'}), and for other data. Declare the "
            "axis of the input that it depends on, too, or leave it out."
        )

    def _check_label(self, label: str, outputs: list[tuple[str, int]], run: OutputShapes) -> None:
        sizes = {
            f"axis {axis} of {name}": run.shapes[name][axis]
            for name, axis in outputs
            if axis < len(run.shapes.get(name, ()))
        }
        for name, axis in axes_by_label(self.inputs).get(label, ()):
            sizes[f"axis {axis} of {name}"] = run.size((name, axis))
        if len(set(sizes.values())) > 1:
            text = ", ".join(f"{axis_text} is {size}" for axis_text, size in sizes.items())
            raise ExportError(
                f"the dynamic axes with the label {label} have several sizes: {text}. Axes with "
                "one label must have one size: use different labels."
            )


def notices(subject: Subject, axes: Axes, settings: ExportSettings) -> tuple[str, ...]:
    """Return the axes without a fixed size in the file that the settings do not name, as text.

    `axes`: axes of inputs and outputs that change in the model itself. Output axes that follow from
    the input axes count as requested, except for outputs whose axes were declared.
    """
    return tuple(
        f"axis {axis} of {spec.name} has no fixed size in the file ({size}), and the settings do "
        f"not ask for that{_explain_axis(spec, axis, axes)}"
        for spec in (*subject.inputs, *subject.outputs)
        for axis, size in enumerate(spec.shape)
        if isinstance(size, str) and not _is_requested(spec, axis, axes, settings)
    )


def _is_requested(spec: TensorSpec, axis: int, axes: Axes, settings: ExportSettings) -> bool:
    declared = settings.dynamic_axes.get(spec.name)
    of_batch = settings.dynamic_batch and axes.get(spec.name, {}).get(axis) == BATCH
    if declared is None or of_batch:
        return axis in axes.get(spec.name, {})
    return axis in declared


def _explain_axis(spec: TensorSpec, axis: int, axes: Axes) -> str:
    if axis in axes.get(spec.name, {}):
        return ": it moves with the inputs, and export.dynamic_axes declares other axes of it"
    return ": it depends on the data, or the exporter lost its size"


Array = NDArray[Any]

Run = Callable[[Example], object]


@dataclass(frozen=True)
class ExportRequest:
    """The model, inputs and axes that every strategy exports.

    Built by `from_example`, inside of `gate.export.strategies.neutral`.
    """

    model: nn.Module
    """A private copy, in eval mode."""
    settings: ExportSettings
    example: Example
    """All samples of the example."""
    batch: Example
    """The samples for the trace, in the order of the file's inputs."""
    call: ForwardSignature
    output_names: tuple[str, ...]
    axes: Axes
    """Dynamic axes of inputs and outputs."""
    resized_by_label: dict[str, Example]
    """By label of a dynamic axis: the batch at another size of this axis."""
    plain: bool
    """True if forward takes positional tensors and returns tensors in tuples."""
    hazards: tuple[str, ...]
    declared: Axes
    """Axes of outputs in `settings.dynamic_axes`. All of them changed in the model."""
    state: ModelState
    """The state of the model, which is restored after each forward."""

    @classmethod
    def from_example(
        cls,
        model: nn.Module,
        example: Example,
        settings: ExportSettings,
        *,
        original: nn.Module | None = None,
    ) -> ExportRequest:
        """Run `model` on the example, and once more at another size of each dynamic axis.

        `original`: the model that `model` is a copy of. None: clone the state of `model`. Raises
        ExportError if the model fails on the example, returns anything but tensors, or returns a
        number of tensors that differs from the number of names.
        """
        call = ForwardSignature(model, tuple(example.arrays))
        if settings.input_names is None:
            names = call.sorted(tuple(example.arrays))
            example = Example({name: example.arrays[name] for name in names}, example.axes)
            call = ForwardSignature(model, tuple(example.arrays))
        batch = example.batch(settings.batch_size)
        state = ModelState(model, original)
        run = partial(_forward, call, model, state)
        returned = run(batch)
        tensors = _flatten_outputs(returned)
        outputs = _name_outputs(tensors, settings)
        shapes = _shapes_by_name(outputs, tensors)
        inputs = input_axes(batch, settings, outputs=outputs)
        sizes = {
            label: _resized_batch(run, (batch, example), label, labeled)
            for label, labeled in axes_by_label(inputs).items()
        }
        moved = {
            label: OutputShapes(changed, _shapes_by_name(outputs, tensors_))
            for label, (changed, tensors_) in sizes.items()
        }
        named_outputs = OutputAxes(OutputShapes(batch, shapes), moved, inputs)
        moving = named_outputs.detect()
        declared = named_outputs.declared(settings, changed_data=_changed_data(run, batch, outputs))
        for name, labels in declared.items():
            moving[name] = dict(sorted({**moving.get(name, {}), **labels}.items()))
        return cls(
            model=model,
            settings=settings,
            example=example,
            batch=batch,
            call=call,
            output_names=outputs,
            axes=inputs | moving,
            resized_by_label={label: changed for label, (changed, _) in sizes.items()},
            plain=call.plain and is_plain(returned),
            hazards=_batchless_outputs(shapes, moving, settings) if batch.batched else (),
            declared=declared,
            state=state,
        )

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the names in the file's order."""
        return tuple(self.batch.arrays)

    @property
    def large(self) -> bool:
        """Return whether the weights do not fit one protobuf file."""
        weights = (*self.model.parameters(), *self.model.buffers())
        size = sum(value.numel() * value.element_size() for value in weights)
        return size > reading.SINGLE_FILE_LIMIT

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Return the batch as new tensors."""
        return self.batch.tensors()

    def answers(self, example: Example) -> list[Array]:
        """Return the outputs of the model itself, in the order of `output_names`.

        Raises ExportError.
        """
        tensors = _flatten_outputs(_forward(self.call, self.model, self.state, example))
        return [np.array(leaf.tensor.detach().numpy()) for leaf in tensors]

    @contextlib.contextmanager
    def flat(self) -> Iterator[nn.Module]:
        """Yield the model with a temporary forward that takes and returns flat tensors.

        Patching the model instead of wrapping it keeps the names of nodes equal to its submodules'.
        """
        if self.plain:
            yield self.model
            return
        hooked = self.model._forward_hooks or self.model._forward_pre_hooks
        if hooked:  # hooks would see the flat tensors
            yield PositionalModel(self.model, self.call)
            return
        own_forward, original = vars(self.model).get("forward"), self.model.forward

        def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(leaf.tensor for leaf in leaves(self.call(original, tensors)))

        self.model.forward = forward
        try:
            yield self.model
        finally:
            del self.model.forward
            if own_forward is not None:
                self.model.forward = own_forward


def _forward(call: ForwardSignature, model: nn.Module, state: ModelState, batch: Example) -> object:
    try:
        with state.restored():
            returned = call(model, batch.tensors())
            if state.find_changes():  # an output may be a view of restored state
                returned = tree_map_only(torch.Tensor, torch.clone, returned)
            return returned
    except Exception as error:
        raise ExportError(
            f"the model does not accept the example ({batch.describe()}): "
            f"{shorten_message(error)}. "
            "Check the example's shapes and dtypes, and that export.input_names are the names of "
            "forward's arguments, or in their order."
        ) from error


def _flatten_outputs(returned: object) -> list[Leaf]:
    try:
        return leaves(returned)
    except ModelError as error:
        raise ExportError(str(error)) from error


def _name_outputs(tensors: list[Leaf], settings: ExportSettings) -> tuple[str, ...]:
    names = settings.output_names
    if names is None:
        names = tuple(leaf.name for leaf in tensors)
    if len(tensors) != len(names) or not tensors:
        raise ExportError(
            f"the model returns {len(tensors)} tensor(s) "
            f"({', '.join(leaf.name for leaf in tensors) or 'none'}), "
            f"export.output_names has {len(names)} ({', '.join(names)}). "
            "Give one name for each returned tensor, in order, or null for the model's own."
        )
    return names


def _resized_batch(
    run: Run, examples: tuple[Example, Example], label: str, labeled: list[tuple[str, int]]
) -> tuple[Example, list[Leaf]]:
    """Return the batch at the first other size of the label that the model accepts."""
    batch, samples = examples
    failure: ExportError | None = None
    for candidate in resized_batches(batch, labeled, samples=samples):
        try:
            return candidate, _flatten_outputs(run(candidate))
        except ExportError as error:
            failure = failure or error
    fix = "export.dynamic_batch: false" if label == BATCH else "leave it out of export.dynamic_axes"
    raise ExportError(
        f"the model itself fails at every other size of the dynamic axis {label}: {failure} "
        f"If it has only one size: {fix}."
    ) from failure


def _changed_data(run: Run, batch: Example, names: tuple[str, ...]) -> Iterator[OutputShapes]:
    """Yield output shapes for generated data that the model accepts."""
    for change in (np.zeros_like, np.negative):
        arrays = {
            name: change(array) if array.dtype.kind == "f" or change is np.zeros_like else array
            for name, array in batch.arrays.items()
        }
        with contextlib.suppress(ExportError):
            changed = Example(arrays, batch.axes)
            yield OutputShapes(changed, _shapes_by_name(names, _flatten_outputs(run(changed))))


def _shapes_by_name(names: tuple[str, ...], tensors: list[Leaf]) -> Shapes:
    """Return the shapes by name, or by position if the number of tensors differs."""
    return {name: leaf.tensor.shape for name, leaf in zip(names, tensors, strict=False)}


def _batchless_outputs(shapes: Shapes, axes: Axes, settings: ExportSettings) -> tuple[str, ...]:
    if not settings.dynamic_batch:
        return ()
    return tuple(
        f"output {name} has the shape {list(shape)} for {settings.batch_size} samples: "
        "its first axis is not the batch"
        for name, shape in shapes.items()
        if 0 not in axes.get(name, {}) and BATCH not in axes.get(name, {}).values()
    )
