"""One export as it is asked for: the model, the example, names and axes, before any exporter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.errors import ExportError, ModelError
from gate.export.axes import BATCH, Axes, input_axes, others, places_of
from gate.export.example import Example
from gate.export.output_axes import OutputAxes, Shapes, Sized
from gate.export.refusals.refusal import brief
from gate.model.call import Call, Leaf, is_plain, leaves
from gate.onnxfile import gathered
from gate.records.strategy import ExportSettings

Array = NDArray[Any]
Run = Callable[[Example], object]


@dataclass(frozen=True)
class Request:
    """What every strategy exports. Built by `Request.of`, inside of `exporter.neutral`."""

    model: nn.Module
    """A private copy, in eval mode."""
    settings: ExportSettings
    example: Example
    """All samples that were given."""
    batch: Example
    """The samples that are traced, in the order of the file's inputs."""
    call: Call
    output_names: tuple[str, ...]
    axes: Axes
    """Of inputs and outputs."""
    other_sizes: dict[str, Example]
    """For each label of a dynamic axis, the batch at another size of it."""
    plain: bool
    """True if forward takes tensors by position and returns tensors in tuples."""
    hazards: tuple[str, ...]
    declared: Axes
    """Of outputs, as `settings.dynamic_axes` has them; each of them moved."""

    @classmethod
    def of(cls, model: nn.Module, example: Example, settings: ExportSettings) -> Request:
        """Run `model` on the example, and once more at another size of each dynamic axis.

        Raises ExportError where the model does not compute them, returns what is no tensor, or
        another number of tensors than there are names.
        """
        call = Call(model, tuple(example.arrays))
        if settings.input_names is None:
            names = call.sorted(tuple(example.arrays))
            example = Example({name: example.arrays[name] for name in names})
            call = Call(model, tuple(example.arrays))
        batch = example.batch(settings.batch_size)
        returned = _forward(call, model, batch)
        found = _leaves(returned)
        outputs = _names(found, settings)
        shapes = _shapes(outputs, found)
        inputs = input_axes(batch, settings, outputs=outputs)
        run = partial(_forward, call, model)
        sizes = {
            label: _other(run, (batch, example), label, places)
            for label, places in places_of(inputs).items()
        }
        moved = {
            label: Sized(other, _shapes(outputs, leaf)) for label, (other, leaf) in sizes.items()
        }
        of_outputs = OutputAxes(Sized(batch, shapes), moved, inputs)
        moving = of_outputs.found()
        declared = of_outputs.declared(settings, other_data=_other_data(run, batch, outputs))
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
            other_sizes={label: other for label, (other, _) in sizes.items()},
            plain=call.plain and is_plain(returned),
            hazards=_batchless(shapes, moving, settings),
            declared=declared,
        )

    @property
    def input_names(self) -> tuple[str, ...]:
        """In the file's order."""
        return tuple(self.batch.arrays)

    @property
    def large(self) -> bool:
        """True if the weights do not fit one protobuf file."""
        weights = (*self.model.parameters(), *self.model.buffers())
        size = sum(value.numel() * value.element_size() for value in weights)
        return size > gathered.SINGLE_FILE_LIMIT

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The batch as tensors of their own."""
        return self.batch.tensors()

    def answers(self, example: Example) -> list[Array]:
        """What the model itself returns, in the order of `output_names`. Raises ExportError."""
        found = _leaves(_forward(self.call, self.model, example))
        return [np.asarray(leaf.tensor.detach().numpy()) for leaf in found]

    @contextlib.contextmanager
    def flat(self) -> Iterator[nn.Module]:
        """The model, for a while with a forward that takes and returns flat tensors.

        The model itself rather than one around it: names of nodes stay those of its parts.
        """
        if self.plain:
            yield self.model
            return
        hooked = self.model._forward_hooks or self.model._forward_pre_hooks
        if hooked:  # they would see the flat tensors
            yield Flat(self.model, self.call)
            return
        before, original = vars(self.model).get("forward"), self.model.forward

        def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(leaf.tensor for leaf in leaves(self.call(original, tensors)))

        self.model.forward = forward
        try:
            yield self.model
        finally:
            del self.model.forward
            if before is not None:
                self.model.forward = before


class Flat(nn.Module):
    """Takes tensors by position, returns a tuple of tensors, whatever the model does."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model."""
        return tuple(leaf.tensor for leaf in leaves(self._call(self.model, tensors)))


def _forward(call: Call, model: nn.Module, batch: Example) -> object:
    try:
        return call(model, batch.tensors())
    except Exception as error:
        raise ExportError(
            f"the model does not accept the example ({batch.describe()}): {brief(error)}. "
            "Check the example's shapes and dtypes, and that export.input_names are the names of "
            "forward's arguments, or in their order."
        ) from error


def _leaves(returned: object) -> list[Leaf]:
    try:
        return leaves(returned)
    except ModelError as error:
        raise ExportError(str(error)) from error


def _names(found: list[Leaf], settings: ExportSettings) -> tuple[str, ...]:
    names = settings.output_names
    if names is None:
        names = tuple(leaf.name for leaf in found)
    if len(found) != len(names) or not found:
        raise ExportError(
            f"the model returns {len(found)} tensor(s) "
            f"({', '.join(leaf.name for leaf in found) or 'none'}), "
            f"export.output_names has {len(names)} ({', '.join(names)}). "
            "Give one name for each returned tensor, in order, or null for the model's own."
        )
    return names


def _other(
    run: Run, examples: tuple[Example, Example], label: str, places: list[tuple[str, int]]
) -> tuple[Example, list[Leaf]]:
    """The batch at the first other size of the label that the model itself computes."""
    batch, samples = examples
    failure: ExportError | None = None
    for other in others(batch, places, samples=samples):
        try:
            return other, _leaves(run(other))
        except ExportError as error:
            failure = failure or error
    off = "export.dynamic_batch: false" if label == BATCH else "leave it out of export.dynamic_axes"
    raise ExportError(
        f"the model itself does not compute another size of the dynamic axis {label}: {failure} "
        f"If it has only one size: {off}."
    ) from failure


def _other_data(run: Run, batch: Example, names: tuple[str, ...]) -> Iterator[Sized]:
    """Shapes for data that was made up, which the model may refuse."""
    for change in (np.zeros_like, np.negative):
        arrays = {
            name: change(array) if array.dtype.kind == "f" or change is np.zeros_like else array
            for name, array in batch.arrays.items()
        }
        with contextlib.suppress(ExportError):
            other = Example(arrays)
            yield Sized(other, _shapes(names, _leaves(run(other))))


def _shapes(names: tuple[str, ...], found: list[Leaf]) -> Shapes:
    """By name; where another number of tensors is returned, of those that are."""
    return {name: leaf.tensor.shape for name, leaf in zip(names, found, strict=False)}


def _batchless(shapes: Shapes, axes: Axes, settings: ExportSettings) -> tuple[str, ...]:
    if not settings.dynamic_batch:
        return ()
    return tuple(
        f"output {name} has the shape {list(shape)} for {settings.batch_size} samples: "
        "its first axis is not the batch"
        for name, shape in shapes.items()
        if 0 not in axes.get(name, {})
    )
