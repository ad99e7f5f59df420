"""Named arrays with a common axis 0, read in batches, with a digest."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gate.data.array_files import SINGLE_NAME, MappedRows, Shard, as_texts
from gate.data.location import Fields
from gate.data.reader import SampleReader
from gate.errors import DataError
from gate.storage.arrays import Batch, RowsArray, value_bytes
from gate.storage.digest import Digest, canonical_json

if TYPE_CHECKING:
    from gate.preprocess.spec import PreprocessSpec
    from gate.records.evidence import BatchAxes, TensorSpec


class SampleSet:
    """The samples of a source, or a range of them: named arrays of bool, int, float or str.

    They are streamed in batches. The digest depends only on names, dtypes, shapes and values, not
    on the format of the source: `from_data(a).digest() == open(saved(a)).digest()`, and
    `samples.slice(i, j).digest() == from_data(rows i to j).digest()`.
    """

    def __init__(self, rows: SampleReader, indices: range | None = None) -> None:
        """`indices`: the indices of the samples, without gaps; None for all."""
        self._rows = rows
        self._range = indices
        self._gaps = False
        self._least = 1
        self._digests: dict[range, Digest] = {}
        self.stated: dict[str, int | None] = {}
        """Batch axes that the user stated, by name of an input or output of the file."""
        self.layout: BatchAxes | None = None
        """How the arrays of one batch become the inputs of one call; None: not determined yet."""
        self.arranged = False
        """True if the samples were taken from an arranged set: their batch axis is axis 0."""

    @classmethod
    def open(
        cls,
        inputs: Path | str,
        *,
        preprocessing: PreprocessSpec | None = None,
        decode_workers: int | None = 0,
    ) -> SampleSet:
        """Open the samples that `gate check --inputs` names (docs/data.md).

        inputs: `FILE.npy` (one array, named `input`), `FILE.npz`, Parquet, Arrow or `.tar` shards,
        a folder of such files, their URL, or `package.module:factory` of a data set. preprocessing:
        the preprocessing of pictures. decode_workers: number of processes that read data sets and
        pictures ahead; None chooses it. Raises DataError unless the source is a complete set of
        samples with the same dtypes and shapes, and StorageError if there is not enough space to
        unpack or spool.
        """
        from gate.data.open_samples import Opening, read_ahead

        opening = Opening(str(inputs), preprocessing)
        return cls(read_ahead(opening.rows(), opening, workers=decode_workers))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> SampleSet:
        """Create samples from arrays in memory. Raises DataError as `open` does."""
        shard = Shard({name: as_texts(array) for name, array in arrays.items()})
        return cls(MappedRows([shard], origin="the mapping of arrays"))

    @classmethod
    def from_data(cls, data: Any) -> SampleSet:
        """Create samples from anything that `open` takes, an array, a tensor, a mapping of these,
        or a torch DataLoader, Dataset or iterable. Raises DataError, StorageError as `open`."""
        if isinstance(data, cls):
            return data
        if isinstance(data, str | Path):
            return cls.open(data)
        if isinstance(data, Mapping):
            return cls.from_arrays({str(name): _array(value) for name, value in data.items()})
        if hasattr(data, "__array__"):
            return cls.from_arrays({SINGLE_NAME: _array(data)})
        if not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
            raise DataError(
                f"the samples are a {type(data).__name__}. Expected a path, an array, a mapping of "
                "arrays by input name, or a torch DataLoader or Dataset."
            )
        from gate.data.datasets import PictureDecoder, rows_of_data

        origin = f"the {type(data).__name__}"
        return cls(rows_of_data(data, Fields(), PictureDecoder(None), origin=origin))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        return self._rows.names

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the inputs: name, dtype, and shape ("samples", ...)."""
        return self._rows.specs

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the whole array of each input."""
        if self._range is None:
            return self._rows.shapes
        return {name: (len(self), *shape[1:]) for name, shape in self._rows.shapes.items()}

    def __len__(self) -> int:
        """Return the number of samples. Raises DataError if axis 0 is not the batch axis yet."""
        return len(self._indices)

    @property
    def count(self) -> int | None:
        """Return the number of samples; None if axis 0 is not the batch axis yet."""
        try:
            return len(self)
        except DataError:
            return None

    @property
    def _indices(self) -> range:
        return range(len(self._rows)) if self._range is None else self._range

    def with_batch_axes(self, axes: Mapping[str, int | None]) -> SampleSet:
        """Return the same samples with the batch axes that the user states, by name of an input or
        output of the file. None: no batch axis."""
        return self._with(stated=dict(axes))

    def _with(self, **attributes: Any) -> SampleSet:
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

    def rearranged(self, axes: Mapping[str, int | None], layout: BatchAxes) -> SampleSet:
        """Return the same samples with the batch axis on axis 0 of every array.

        `axes`: the batch axis of each array; None: all samples share the array. `layout`: the
        layout of the calls. Raises DataError.
        """
        if not any(axis != 0 for axis in axes.values()):
            return self._with(layout=layout)
        rows = self._rows.rearranged(axes)
        return self._with(layout=layout, _rows=rows, _range=None, _digests={})

    def like(self, batch: Batch) -> SampleSet:
        """Return samples in memory with the layout of these samples."""
        samples = SampleSet.from_arrays(batch)
        samples.stated, samples.layout = self.stated, self.layout
        samples._gaps, samples._least = self._gaps, self._least
        samples.arranged = True
        return samples

    def is_same(self, name: str) -> bool:
        """Return whether an input has the same values in all samples."""
        first: RowsArray | None = None
        for chunk in self._rows.column(name, self._indices):
            first = chunk[:1] if first is None else first
            if not (chunk == first).all():
                return False
        return True

    def with_least(self, least: int) -> SampleSet:
        """Return the same samples, whose last batch is joined to the one before if it has fewer
        than `least` samples."""
        return self._with(_least=least)

    def batch_around(self, sample: int, size: int) -> range:
        """Return the range of the batch of `batches(size)` that contains a sample."""
        count = len(self)
        start = min(sample // size * size, self._last_start(count, size))
        last = start == self._last_start(count, size)
        return range(start, count if last else start + size)

    def _last_start(self, count: int, size: int) -> int:
        start = max(count - 1, 0) // size * size
        return start - size if start and count - start < self._least else start

    def allow_nan(self) -> SampleSet:
        """Return the same samples, where NaN and infinities are valid values."""
        return self._with(_gaps=True)

    def slice(self, start: int, stop: int) -> SampleSet:
        """Return the samples from `start` up to `stop`.

        Errors still name samples by their index in the whole set. Raises DataError if the range is
        not within the set.
        """
        if not 0 <= start < stop <= len(self):
            raise DataError(
                f"there are no samples {start} to {stop - 1}: {self._rows.origin} has {len(self)}. "
                "Plan the ranges again."
            )
        return self._with(_range=self._indices[start:stop])

    def batches(self, size: int) -> Iterator[dict[str, RowsArray]]:
        """Yield batches of `size` samples in order. The last one may be smaller, or larger if it
        was joined (`with_least`).

        Arrays are contiguous, writable copies in native byte order. Raises DataError on the first
        NaN or infinite value of a float array, unless `allow_nan` was called, and if a sample
        differs from an earlier read.
        """
        start = self._indices.start
        last = self._last_start(len(self), size)
        rest = self._indices[last:]
        blocks = (
            itertools.chain(
                self._rows.batches(self._indices[:last], size), self._rows.batches(rest, len(rest))
            )
            if len(rest) > size
            else self._rows.batches(self._indices, size)
        )
        for block in blocks:
            for name, array in block.arrays.items() if not self._gaps else ():
                _check_finite(name, array, start=start)
            start += len(block.arrays[self.names[0]])
            yield block.arrays

    def whole(self) -> dict[str, RowsArray]:
        """Return all arrays unchanged, in memory, with any batch axis."""
        axes: dict[str, int | None] = dict.fromkeys(self.names)
        return {
            name: array[0] for name, array in self._rows.rearranged(axes).read([0]).arrays.items()
        }

    def take(self, indices: Sequence[int]) -> SampleSet:
        """Return the samples with these indices, in memory."""
        return self.like(self.at(indices))

    def at(self, indices: Sequence[int]) -> dict[str, RowsArray]:
        """Return the samples with these indices as one batch, without a check for NaN."""
        return self._rows.read([self._indices[index] for index in indices]).arrays

    def labels(self) -> NDArray[np.int64] | None:
        """Return the class indices, shape (samples,), or None if the source has no labels.

        If this reads the source, the same pass computes the digest.
        """
        if not self._rows.labelled:
            return None
        if self._rows.repeated:
            self.digest()
        return self._rows.labels(self._indices)

    def digest(self) -> Digest:
        """Return the SHA-256 of names, dtypes, shapes and little-endian values.

        Cached for sources whose repeated reads are compared: these are read once for each input.
        """
        digest = self._digests.get(self._indices)
        if digest is None:
            digest = self._digest()
            if self._rows.repeated:
                self._digests[self._indices] = digest
        return digest

    def _digest(self) -> Digest:
        sha256 = hashlib.sha256()
        for spec in self.specs:
            shape = [len(self), *spec.shape[1:]]
            header = {"name": spec.name, "dtype": spec.dtype, "shape": shape}
            sha256.update(canonical_json(header) + b"\n")
            for chunk in self._rows.column(spec.name, self._indices):
                sha256.update(value_bytes(chunk))
        return Digest(sha256.hexdigest())


def _check_finite(name: str, array: RowsArray, *, start: int) -> None:
    if array.dtype.kind != "f":
        return
    finite = np.isfinite(array)
    if not finite.all():
        bad = ~finite.reshape(len(array), -1).all(axis=1)
        sample = int(bad.argmax())
        raise DataError(
            f"input '{name}' has NaN or infinite values, first in sample {start + sample}. "
            "Fix the preprocessing or remove the sample. If the model handles such values, set "
            "nonfinite: same_places in the policy."
        )


def _array(value: Any) -> NDArray[np.generic]:
    """Convert an array, a list or a tensor, also one on a device or with a gradient."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
