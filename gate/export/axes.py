"""Axes of any size: which inputs have them, under which label, and another size for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from gate.errors import ExportError
from gate.export.example import Example
from gate.records.strategy import ExportSettings

Axes = dict[str, dict[int, str]]
"""By input or output: axis to label. Axes of one label have one size."""

BATCH = "batch"


def input_axes(example: Example, settings: ExportSettings, *, outputs: Iterable[str] = ()) -> Axes:
    """The dynamic axes of the inputs of `example`.

    Raises ExportError for an input or axis that is not there (nor one of `outputs`), and for a
    label of two sizes.
    """
    strange = sorted(set(settings.dynamic_axes) - {*example.arrays, *outputs})
    if strange:
        raise ExportError(
            f"export.dynamic_axes names {', '.join(strange)}, the inputs are "
            f"{', '.join(example.arrays)}, the outputs {', '.join(outputs)}. Name one of them."
        )
    axes: Axes = {}
    for name, array in example.arrays.items():
        labels = {0: BATCH} if settings.dynamic_batch else {}
        labels |= dict(sorted(settings.dynamic_axes.get(name, {}).items()))
        if labels and max(labels) >= array.ndim:
            raise ExportError(
                f"export.dynamic_axes names axis {max(labels)} of {name}, the example's shape is "
                f"{list(array.shape)}. Count axes from 0."
            )
        if labels:
            axes[name] = labels
    for label, places in places_of(axes).items():
        sizes = {example.arrays[name].shape[axis] for name, axis in places}
        if len(sizes) > 1:
            raise ExportError(
                f"the dynamic axes that are called {label} have the sizes {sorted(sizes)} in the "
                "example. Axes of one label have one size: give others another label."
            )
    return axes


def places_of(axes: Axes) -> dict[str, list[tuple[str, int]]]:
    """Each label with the inputs and axes that have it."""
    places: dict[str, list[tuple[str, int]]] = {}
    for name, labels in axes.items():
        for axis, label in labels.items():
            places.setdefault(label, []).append((name, axis))
    return places


def others(batch: Example, places: list[tuple[str, int]], *, samples: Example) -> Iterator[Example]:
    """The batch at other sizes of one label, the likely ones first.

    An odd number of samples, taken from all `samples`; of other axes an odd step, the strides and
    patches that networks usually want, twice and half the size.
    """
    name, axis = places[0]
    size = batch.arrays[name].shape[axis]
    tries = [size + 1 + size % 2] if axis == 0 else [size + 3, size + 32, 2 * size, size // 2]
    of_samples = {input_name for input_name, input_axis in places if input_axis == 0}
    source = {n: (samples if n in of_samples else batch).arrays[n] for n in batch.arrays}
    for other in dict.fromkeys(tries):
        if other not in (0, size):
            sizes: dict[str, dict[int, int]] = {}
            for input_name, input_axis in places:
                sizes.setdefault(input_name, {})[input_axis] = other
            yield Example(source).resized(sizes)


def axes_text(axes: Mapping[str, Mapping[int, str]]) -> str:
    """`input:0=batch;input:2=height`, for records."""
    return ";".join(
        f"{name}:{axis}={label}" for name, labels in axes.items() for axis, label in labels.items()
    )


def own_label(name: str, axis: int) -> str:
    """A label for an axis of an output that moves with the inputs, but is none of theirs."""
    return f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{axis}"
