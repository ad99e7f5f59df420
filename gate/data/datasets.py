"""Items as data sets give them: what a DataLoader would collate, one sample each.

A tensor or an array; `(x, label)`; a mapping of arrays by input name. Pictures become arrays by the
spec. Nothing is unpickled, and no field of Python objects is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gate.errors import DataError
from gate.parity.arrays.mapped import check_dtype
from gate.parity.arrays.rows import Array, Block, spec_of
from gate.parity.arrays.shards import SINGLE_NAME
from gate.parity.sources.named import LABEL, Fields
from gate.parity.sources.pictures import Pictures, is_picture
from gate.records.evidence import TensorSpec


@dataclass(frozen=True)
class Sample:
    """One sample."""

    arrays: dict[str, Array]
    """By name of the input, without an axis of samples."""
    label: int | None


class Items:
    """Makes samples of items. The first one says what all have to be like."""

    def __init__(self, first: Any, fields: Fields, pictures: Pictures, *, origin: str) -> None:
        """Raises DataError."""
        self._fields, self._pictures, self._origin = fields, pictures, origin
        sample = self._sample(first, 0)
        self.labelled = sample.label is not None
        self.specs: tuple[TensorSpec, ...] = tuple(
            spec_of(name, array.dtype, array.shape) for name, array in sample.arrays.items()
        )

    def sample(self, item: Any, place: int) -> Sample:
        """What this item is. Raises DataError, which names the sample, where it is not like the
        first one."""
        sample = self._sample(item, place)
        names = [spec.name for spec in self.specs]
        if sample.arrays.keys() != set(names):
            raise self._wrong(place, f"has {sorted(sample.arrays)}, sample 0 has {sorted(names)}")
        if (sample.label is not None) != self.labelled:
            has = "has a label" if sample.label is not None else "has no label"
            raise self._wrong(place, f"{has}, and sample 0 is not so")
        for spec in self.specs:
            array = sample.arrays[spec.name]
            if (array.dtype.name, array.shape) != (spec.dtype, spec.shape[1:]):
                raise self._wrong(
                    place,
                    f"has '{spec.name}' of {array.dtype} {array.shape}, sample 0 of "
                    f"{spec.dtype} {tuple(spec.shape[1:])}",
                )
        return sample

    def block(self, item: Callable[[int], Any], places: Sequence[int]) -> Block:
        """The samples at these places as a DataLoader collates them, but one item at a time: as an
        object a small one is many times its bytes. `item`: what is at a place. Raises DataError."""
        arrays = {
            spec.name: np.empty((len(places), *map(int, spec.shape[1:])), spec.dtype)
            for spec in self.specs
        }
        labels = np.empty(len(places), np.int64)
        for row, place in enumerate(places):
            sample = self.sample(item(place), place)
            for name, array in arrays.items():
                array[row] = sample.arrays[name]
            if sample.label is not None:
                labels[row] = sample.label
        return Block(arrays, labels if self.labelled else None)

    def _sample(self, item: Any, place: int) -> Sample:
        label = None
        if isinstance(item, tuple | list) and len(item) in (1, 2):
            item, *rest = item
            wanted = rest and self._fields.label != ""
            label = self._label(rest[0], place) if wanted else None
        if isinstance(item, Mapping) and not is_picture(item):
            return self._of_fields(item, place, label)
        return Sample({SINGLE_NAME: self._array(item, SINGLE_NAME, place)}, label)

    def _of_fields(self, item: Mapping[Any, Any], place: int, label: int | None) -> Sample:
        names = [str(name) for name in item]
        inputs, field = self._fields.of(names)
        if field is not None and label is None:
            if _is_index(item[field]):
                label = self._label(item[field], place)
            elif self._fields.label is not None:
                raise self._wrong(place, f"has no integer as its label '{field}'")
            elif self._fields.inputs is None:  # a field of that name which is none
                inputs = tuple(names)
        if not inputs:
            raise self._wrong(place, "has no input")
        return Sample({name: self._array(item[name], name, place) for name in inputs}, label)

    def _label(self, value: Any, place: int) -> int:
        if not _is_index(value):
            raise self._wrong(
                place,
                f"is a pair whose second part is {_described(value)}, and no class index. Give "
                "several inputs as a dict by their names; #label= behind the source leaves it out",
            )
        index = int(value)
        if not 0 <= index <= np.iinfo(np.int64).max:
            raise self._wrong(
                place,
                f"has the label {index}: class indices start at 0 and fit into an int64. #label= "
                "behind the source leaves labels out",
            )
        return index

    def _array(self, value: Any, name: str, place: int) -> Array:
        if is_picture(value):
            return self._pictures.tensor(value, what=f"sample {place} of {self._origin}")
        array = _as_array(value)
        if array is None:
            raise self._wrong(place, f"has {_described(value)} as '{name}'")
        check_dtype(name, array.dtype, origin=f"sample {place} of {self._origin}")
        if not array.size:
            raise self._wrong(place, f"has '{name}' of shape {array.shape}: nothing to measure")
        return np.asarray(array, dtype=array.dtype.newbyteorder("="))

    def _wrong(self, place: int, how: str) -> DataError:
        return DataError(
            f"sample {place} of {self._origin} {how}. Expected items that are all alike: a tensor "
            f"or an array of numbers, (x, label), or a dict of arrays by input name ('{LABEL}': "
            "its class index)."
        )


def guarded(call: Callable[[], Any], *, what: str) -> Any:
    """What the user's code gives. Raises DataError where it raises anything but StopIteration."""
    try:
        return call()
    except (DataError, StopIteration):
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{what} raised {type(error).__name__}: {error}. Mend the data set, or leave that "
            "sample out of it."
        ) from error


def _as_array(value: Any) -> Array | None:
    """None: it is nothing that a DataLoader would make one tensor of."""
    import torch

    if isinstance(value, torch.Tensor):
        try:
            return value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError):  # no dtype or layout of NumPy
            return None
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        return np.asarray(value)
    return None


def _is_index(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    array = value if isinstance(value, int) else _as_array(value)
    return isinstance(array, int) or (
        array is not None and array.shape == () and array.dtype.kind in "iu"
    )


def _described(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        return f"{type(value).__name__} of {dtype} {tuple(shape)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"
