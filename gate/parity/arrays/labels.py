"""Class indices of the samples: from a file, or as they came."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.parity.arrays.rows import Array
from gate.parity.arrays.shards import open_array

_LARGEST = np.iinfo(np.int64).max


def open_labels(path: Path, *, samples: int) -> NDArray[np.int64]:
    """Class indices of the samples, shape (samples,), from an integer `.npy` file.

    Raises DataError on another length, rank or dtype, on negative labels and those beyond int64.
    """
    if path.suffix.lower() != ".npy":
        raise DataError(f"{path.name} is no .npy file. Save the labels with numpy.save.")
    return np.array(check_labels(open_array(path), samples=samples))  # the file may change


def check_labels(labels: Array, *, samples: int) -> NDArray[np.int64]:
    """`labels` as int64, shape (samples,), no copy if they are. Raises DataError if they don't fit
    the samples."""
    if labels.shape != (samples,):
        raise DataError(
            f"labels have shape {labels.shape}, the samples need ({samples},). "
            "Give one class index for each sample, in the same order."
        )
    return check_indices(labels, start=0)


def check_indices(labels: Array, *, start: int) -> NDArray[np.int64]:
    """`labels` as int64, no copy if they are. `start`: the place of the first one's sample. Raises
    DataError."""
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype}, integers are expected. "
            "Give class indices, one for each sample."
        )
    given: NDArray[np.integer] = labels.view(np.ndarray)
    wrong = (given < 0) | (given > _LARGEST)
    if wrong.any():
        place = int(wrong.argmax())
        raise DataError(
            f"the label of sample {start + place} is {labels[place]}. "
            "Class indices start at 0, and are no larger than an int64."
        )
    return np.asarray(given, np.int64)
