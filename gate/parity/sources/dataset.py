"""A `torch.utils.data.Dataset` of map style, or anything else with a length and items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gate.errors import DataError, ModelError
from gate.parity.arrays.rows import Block, SourceRows
from gate.parity.sources.items import Items, guarded
from gate.parity.sources.named import Fields
from gate.parity.sources.pictures import Pictures
from gate.parity.sources.spool import spooled

_EXPECTED = (
    "a callable without arguments that returns a torch.utils.data.Dataset, a sequence, or an "
    "iterable of samples"
)


def rows_of_factory(factory: str, fields: Fields, pictures: Pictures) -> SourceRows:
    """The samples that `package.module:factory` gives. Raises DataError, StorageError."""
    from torch.utils.data import DataLoader, IterableDataset

    from gate.model.loading import call_factory

    try:
        data = call_factory(factory, expected=_EXPECTED)
    except ModelError as error:
        raise DataError(str(error)) from error
    if isinstance(data, DataLoader | Mapping | str | bytes):
        raise DataError(
            f"{factory} returned a {type(data).__name__}, expected single samples. "
            "Return the data set itself, or a list of samples."
        )
    make = partial(Items, fields=fields, pictures=pictures, origin=factory)
    by_place = hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    count = _length(data, factory) if by_place else None
    if count is not None:
        return DatasetRows(data, count, make, origin=factory)
    if not hasattr(data, "__iter__"):
        raise DataError(f"{factory} returned {type(data).__name__}, expected {_EXPECTED}.")
    return spooled(data, make, origin=factory)


class DatasetRows(SourceRows):
    """Items by their place; each is asked for when it is needed."""

    def __init__(self, data: Any, count: int, make: Callable[[Any], Items], *, origin: str) -> None:
        """`make`: what the first item says of all. Raises DataError."""
        if count < 1:
            raise DataError(f"{origin} has {count} samples: nothing to measure. Give samples.")
        self.origin = origin
        self._data, self._count = data, count
        self._items = make(self._item(0))
        self.specs, self.labelled = self._items.specs, self._items.labelled

    def __len__(self) -> int:
        """Number of samples."""
        return self._count

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        return self._items.block(self._item, places)

    def _item(self, place: int) -> Any:
        what = f"sample {place} of {self.origin}"
        try:
            return guarded(lambda: self._data[place], what=what)
        except StopIteration as error:
            raise DataError(f"{what} raised StopIteration. Mend the data set.") from error


def _length(data: Any, origin: str) -> int | None:
    """None: it has none, as iterables may."""
    if not hasattr(data, "__len__"):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
    except Exception as error:
        raise DataError(
            f"the length of {origin} raised {type(error).__name__}: {error}. Mend the data set."
        ) from error
