"""External data of an ONNX model: which files hold its weights, and whether they are all there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import onnx
from onnx import helper

from gate.errors import OnnxFileError
from gate.onnxfile.walk import tensors_of
from gate.storage.files import is_inside, wrong_name
from gate.storage.pointer import missing_content


def external_files(model: onnx.ModelProto, path: Path) -> tuple[str, ...]:
    """Names of the data files of `model`, read from `path`, relative to its folder, sorted.

    A data file may itself be a link to a plain file elsewhere, as the caches of model hubs have it:
    that link was made by whoever owns the folder. Raises OnnxFileError for a name or a folder that
    leads outside (a model could else read any file of the machine), for a file that is missing, or
    too short for what the model reads from it.
    """
    names: set[str] = set()
    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            try:
                names.add(_checked(tensor, path))
            except (
                OSError,
                ValueError,
                TypeError,
                RuntimeError,
            ) as error:  # links in a loop, bytes
                raise OnnxFileError(
                    f"{path}: the external data of the tensor {tensor.name!r} can't be found: "
                    f"{error}. Export the model again."
                ) from error
    return tuple(sorted(names))


def linked(path: Path, files: Iterable[str]) -> bool:
    """True if one of the data files of the model `path` is a link, or has further names: what
    onnx takes for an attack, and ONNX Runtime only where it leads into the model's own folder."""
    beside = [path.parent / name for name in files]
    return any(file.is_symlink() or file.stat().st_nlink > 1 for file in beside)


def _checked(tensor: onnx.TensorProto, path: Path) -> str:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = PurePosixPath(entries.get("location", "").replace("\\", "/"))
    name = location.as_posix()
    if wrong_name(name) or not is_inside(path.parent, location.parent.as_posix()):
        raise _outside(tensor, path, name)
    file = path.parent / location
    if (pointer := missing_content(file)) is not None:
        raise OnnxFileError(f"{path}: the data of the tensor {tensor.name}: {pointer}")
    if not file.is_file():  # nor a device, nor a pipe
        raise OnnxFileError(
            f"{path}: the data file {name} of the tensor {tensor.name} is missing. "
            "Copy it beside the model, or export to a single file."
        )
    end = _end(tensor, entries, path)
    size = file.stat().st_size
    if size < end:
        raise OnnxFileError(
            f"{path}: the data file {name} has {size} bytes, the tensor {tensor.name} needs "
            f"{end}. It is truncated: copy or export it again."
        )
    return name


def _outside(tensor: onnx.TensorProto, path: Path, name: str) -> OnnxFileError:
    return OnnxFileError(
        f"{path}: the tensor {tensor.name} reads its data from {name[:300]!r}, expected a file "
        "inside the model's folder. Do not trust this file: export the model again."
    )


def _end(tensor: onnx.TensorProto, entries: dict[str, str], path: Path) -> int:
    """Offset behind the tensor's last byte in its data file."""
    try:
        offset, stated = int(entries.get("offset") or 0), int(entries.get("length") or 0)
        size = math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (ValueError, KeyError) as error:
        raise OnnxFileError(
            f"{path}: the tensor {tensor.name} describes its external data wrongly: {error}. "
            "Export the model again."
        ) from error
    if offset < 0 or stated < 0:
        raise OnnxFileError(
            f"{path}: the tensor {tensor.name} has a negative offset or length. "
            "Export the model again."
        )
    return offset + (stated or size)
