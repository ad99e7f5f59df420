"""The example that is exported with: named arrays, with one batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gate.errors import ExportError


@dataclass(frozen=True)
class Example:
    """Arrays by input name, in the order of the file's inputs; axis 0 of each is the sample."""

    arrays: dict[str, NDArray[Any]]

    @classmethod
    def bind(cls, arrays: Mapping[str, NDArray[Any]], names: tuple[str, ...] | None) -> Example:
        """Give `arrays` the names of the inputs: by name where all are the same, else by position.

        Without `names` the arrays keep their own. Raises ExportError for another number of arrays,
        no samples, unequal numbers of samples, dtypes that are not numbers, and values that are
        not finite.
        """
        names = tuple(arrays) if names is None else names
        if not names or len(arrays) != len(names):
            raise ExportError(
                f"the example has {len(arrays)} array(s) ({', '.join(arrays) or 'none'}), "
                f"export.input_names has {len(names)} ({', '.join(names)}). "
                "Give one array for each argument of forward, in its order."
            )
        ordered = arrays if set(arrays) == set(names) else dict(zip(names, arrays.values()))  # noqa: B905
        bound = {name: np.asarray(ordered[name]) for name in names}
        for name, array in bound.items():
            _check(name, array)
        lengths = {name: len(array) for name, array in bound.items()}
        if len(set(lengths.values())) > 1:
            raise ExportError(
                f"the example's arrays have unequal numbers of samples: {lengths}. "
                "Axis 0 of every input must be the sample."
            )
        return cls(bound)

    def batch(self, size: int) -> Example:
        """Exactly `size` samples: the first ones, repeated where there are too few."""
        return self.resized({name: {0: size} for name in self.arrays})

    def resized(self, sizes: Mapping[str, Mapping[int, int]]) -> Example:
        """The same with other sizes of some axes, by input: cut off, or repeated from the start."""
        arrays = dict(self.arrays)
        for name, axes in sizes.items():
            for axis, size in axes.items():
                places = np.arange(size) % arrays[name].shape[axis]
                arrays[name] = np.take(arrays[name], places, axis=axis)
        return Example({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The arrays as CPU tensors that own their memory."""
        return tuple(torch.from_numpy(np.array(array)) for array in self.arrays.values())

    def describe(self) -> str:
        """Names, dtypes and shapes, for messages."""
        return ", ".join(
            f"{name}: {array.dtype}{list(array.shape)}" for name, array in self.arrays.items()
        )


def _check(name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind not in "fiub":
        raise ExportError(
            f"the example input {name} has dtype {array.dtype}, expected numbers or bool."
        )
    if array.ndim == 0 or array.size == 0:
        raise ExportError(
            f"the example input {name} has shape {list(array.shape)}, expected at least one "
            "sample along axis 0."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ExportError(
            f"the example input {name} holds NaN or infinity. Give an example of real data."
        )
