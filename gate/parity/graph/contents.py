"""What the tensors of a file hold: read one at a time, so that big weights are in memory once.

`condense` leaves every tensor's name, dtype and shape in the model, and the values of small ones;
the values of the others are dropped once they are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from gate.errors import OnnxFileError
from gate.onnxfile.candidate import Candidate
from gate.onnxfile.walk import tensors_of

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
INTEGERS = (
    TensorProto.INT64, TensorProto.INT32, TensorProto.INT16, TensorProto.INT8, TensorProto.UINT8,
    TensorProto.BOOL,
)  # fmt: skip
_SMALL = 1024
"""Elements of a tensor whose values stay: shapes, flags and scalars are all smaller."""
_CHUNK = 1 << 20
_BITS = {"INT2": 2, "UINT2": 2, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4}


@dataclass(frozen=True)
class Contents:
    """How many elements a tensor of floats has, and how many of them are zero or not finite."""

    elements: int
    zeros: int = 0
    nans: int = 0
    infinities: int = 0

    @classmethod
    def of(cls, array: NDArray[Any]) -> Contents:
        """Count in pieces, so that the masks stay small beside the array."""
        flat = array.reshape(-1)
        zeros = nans = infinities = 0
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            zeros += part.size - int(np.count_nonzero(part))
            if not np.isfinite(part).all():
                nans += int(np.isnan(part).sum())
                infinities += int(np.isinf(part).sum())
        return cls(flat.size, zeros, nans, infinities)

    @classmethod
    def of_tensor(cls, tensor: TensorProto, values: NDArray[Any]) -> Contents:
        """The same for the values of `tensor`; of other than floats only the number."""
        return cls.of(values) if tensor.data_type in FLOATS else cls(math.prod(tensor.dims))


class DroppedContents:
    """What was counted of the tensors whose values were dropped."""

    def __init__(self) -> None:
        self._counted: list[Contents] = []
        self._notes: list[object] = []

    def contents(self, tensor: TensorProto) -> Contents:
        """What the tensor holds or, if its values were dropped, held."""
        if _is_dropped(tensor):
            return self._counted[int(tensor.external_data[0].value)]
        return Contents.of_tensor(tensor, numpy_helper.to_array(tensor))

    def dropped(self, tensor: TensorProto) -> bool:
        """True if the tensor has no values any more."""
        return _is_dropped(tensor)

    def note(self, tensor: TensorProto) -> object:
        """What was noted of a tensor before its values were dropped; None for small ones."""
        return self._notes[int(tensor.external_data[0].value)] if _is_dropped(tensor) else None

    def drop(self, tensor: TensorProto, contents: Contents, note: object = None) -> None:
        """Drop the values of a tensor and leave the place of their count as its data file."""
        self._counted.append(contents)
        self._notes.append(note)
        _clear(tensor)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=str(len(self._counted) - 1))


def condense(
    model: onnx.ModelProto,
    folder: Path,
    files: tuple[str, ...],
    *,
    look: Callable[[TensorProto, NDArray[Any]], object] | None = None,
) -> DroppedContents:
    """Drop the values of the big tensors of `model`, and take in those of small external ones.

    `look` sees each big tensor once more, and the ledger keeps what it returns as its note.
    Data is read from `files` in `folder` only. Raises OnnxFileError for any other.
    """
    ledger = DroppedContents()
    for tensor in tensors_of(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            data = _external_bytes(tensor, folder, files)
            _clear(tensor)
            tensor.raw_data = data
        if math.prod(tensor.dims) <= _SMALL:
            continue
        if tensor.data_type not in (FLOATS if look is None else (*FLOATS, *INTEGERS)):
            ledger.drop(tensor, Contents(math.prod(tensor.dims)))
            continue
        values = numpy_helper.to_array(tensor)
        note = None if look is None else look(tensor, values)
        ledger.drop(tensor, Contents.of_tensor(tensor, values), note)
    return ledger


def small_values(tensor: TensorProto) -> NDArray[Any] | None:
    """The values of a tensor of a condensed model, None if they were dropped."""
    return None if _is_dropped(tensor) else numpy_helper.to_array(tensor)


def size_of(tensor: TensorProto) -> int:
    """Bytes of the tensor's data; types of less than a byte are packed."""
    elements: int = math.prod(tensor.dims)
    bits = _BITS.get(TensorProto.DataType.Name(tensor.data_type))
    if bits is not None:
        return math.ceil(elements * bits / 8)
    return elements * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def inlined(tensor: TensorProto, candidate: Candidate) -> TensorProto:
    """The tensor with its data inside, read from the file's data files, links followed; as it is
    where its data is inside. Raises OSError, ValueError and OnnxFileError."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    whole = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    files = candidate.subject.external_data
    whole.raw_data = _external_bytes(tensor, candidate.path.parent, files)
    return whole


def _external_bytes(tensor: TensorProto, folder: Path, files: tuple[str, ...]) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = PurePosixPath(entries.get("location", "").replace("\\", "/")).as_posix()
    if location not in files:
        raise OnnxFileError(
            f"the tensor {tensor.name} reads its data from {location!r}, expected one of the "
            f"data files that were hashed, {list(files)}. Read the subject of the file again."
        )
    with (folder / location).open("rb") as stream:
        stream.seek(int(entries.get("offset") or 0))
        return stream.read(size_of(tensor))


def _is_dropped(tensor: TensorProto) -> bool:
    # `condense` leaves no other tensor with external data.
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def _clear(tensor: TensorProto) -> None:
    """Drop the values, keep name, dtype and shape."""
    for field, _ in tensor.ListFields():
        if field.name not in ("name", "data_type", "dims"):
            tensor.ClearField(field.name)
