"""Axes of outputs that have any size: those that move with the inputs', and those that were
declared, which must move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from gate.errors import ExportError
from gate.export.axes import Axes, own_label, places_of
from gate.export.example import Example
from gate.records.evidence import Subject, TensorSpec
from gate.records.strategy import ExportSettings

Shapes = dict[str, torch.Size]
"""Of the outputs, by name."""


@dataclass(frozen=True)
class Sized:
    """The shapes that the model itself returned for one batch."""

    batch: Example
    shapes: Shapes

    def size(self, place: tuple[str, int]) -> int:
        """Of an axis of an input."""
        name, axis = place
        return int(self.batch.arrays[name].shape[axis])

    def same(self, name: str, axis: int, *, as_in: Sized) -> bool:
        """Whether an output's axis has the size that it has there."""
        mine, other = self.shapes.get(name, ()), as_in.shapes[name]
        return axis >= len(mine) or mine[axis] == other[axis]


@dataclass(frozen=True)
class OutputAxes:
    """What the outputs of `first` become when a labelled axis of the inputs has another size."""

    first: Sized
    moved: Mapping[str, Sized]
    """By the label of the inputs' axes that had another size."""
    inputs: Axes

    def found(self) -> Axes:
        """Axes that moved, by the label that they moved with if they have its size."""
        axes: Axes = {}
        for label, other in self.moved.items():
            place = places_of(self.inputs)[label][0]
            for name, shape in self.first.shapes.items():
                for axis, size in enumerate(shape):
                    if not other.same(name, axis, as_in=self.first):
                        taken = axes.setdefault(name, {})
                        same = size == self.first.size(place) and axis not in taken
                        taken[axis] = label if same else own_label(name, axis)
        return {name: dict(sorted(labels.items())) for name, labels in axes.items()}

    def declared(self, settings: ExportSettings, *, other_data: Iterable[Sized]) -> Axes:
        """Axes of outputs that `settings.dynamic_axes` names.

        `other_data`: shapes for other data of the sizes of `first`; only taken where sizes move
        nothing. Raises ExportError for an axis that is not there, one that never moves, and a
        label whose axes have several sizes.
        """
        wanted = {
            name: labels
            for name, labels in settings.dynamic_axes.items()
            if name in self.first.shapes and name not in self.first.batch.arrays
        }
        places = places_of({name: dict(labels) for name, labels in wanted.items()})
        all_places = [place for outputs in places.values() for place in outputs]
        for place in all_places:
            self._check_place(*place)
        fixed = [place for place in all_places if not self._moves(place, self.moved.values())]
        data = list(other_data) if fixed else []
        for place in fixed:
            if not self._moves(place, data):
                raise self._never(*place)
        for label, outputs in places.items():
            for run in (self.first, *self.moved.values()):
                self._check_label(label, outputs, run)
        return {name: dict(sorted(labels.items())) for name, labels in wanted.items()}

    def _check_place(self, name: str, axis: int) -> None:
        shape = self.first.shapes[name]
        if axis >= len(shape):
            raise ExportError(
                f"export.dynamic_axes names axis {axis} of {name}, the model returns the shape "
                f"{list(shape)}. Count axes from 0."
            )

    def _moves(self, place: tuple[str, int], runs: Iterable[Sized]) -> bool:
        return any(not run.same(*place, as_in=self.first) for run in runs)

    def _never(self, name: str, axis: int) -> ExportError:
        tried = ", ".join(
            f"{moving} {self.first.size(places[0])} and {self.moved[moving].size(places[0])}"
            for moving, places in places_of(self.inputs).items()
        )
        return ExportError(
            f"export.dynamic_axes says that axis {axis} of {name} may have any size, and "
            f"the model returns {self.first.shapes[name][axis]} there at every size that was "
            f"tried ({tried or 'no axis of an input is dynamic'}), and for other data. Declare the "
            "axis of the input that it depends on, too, or leave it out."
        )

    def _check_label(self, label: str, outputs: list[tuple[str, int]], run: Sized) -> None:
        sizes = {
            f"axis {axis} of {name}": run.shapes[name][axis]
            for name, axis in outputs
            if axis < len(run.shapes.get(name, ()))
        }
        for name, axis in places_of(self.inputs).get(label, ()):
            sizes[f"axis {axis} of {name}"] = run.size((name, axis))
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{place} is {size}" for place, size in sizes.items())
            raise ExportError(
                f"the dynamic axes that are called {label} have several sizes: {listed}. Axes of "
                "one label have one size: give others another label."
            )


def notices(subject: Subject, axes: Axes, settings: ExportSettings) -> tuple[str, ...]:
    """Axes without a fixed size in the file that nobody asked for, in words.

    `axes`: of inputs and outputs, as the model itself has them. What follows from the axes of the
    inputs was asked for, but for outputs whose axes were declared.
    """
    return tuple(
        f"axis {axis} of {spec.name} has no fixed size in the file ({size}), and nobody asked for "
        f"that{_why(spec, axis, axes)}"
        for spec in (*subject.inputs, *subject.outputs)
        for axis, size in enumerate(spec.shape)
        if isinstance(size, str) and not _wanted(spec, axis, axes, settings)
    )


def _wanted(spec: TensorSpec, axis: int, axes: Axes, settings: ExportSettings) -> bool:
    declared = settings.dynamic_axes.get(spec.name)
    of_batch = axis == 0 and settings.dynamic_batch
    if declared is None or of_batch:
        return axis in axes.get(spec.name, {})
    return axis in declared


def _why(spec: TensorSpec, axis: int, axes: Axes) -> str:
    if axis in axes.get(spec.name, {}):
        return ": it moves with the inputs, and export.dynamic_axes declares other axes of it"
    return ": it depends on the data, or the exporter lost its size"
