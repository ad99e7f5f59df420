"""Weights that do not fit one protobuf file: all of them in one data file beside the model.

The data file is named after its content, so that a model that is replaced never points to new data,
nor a new one to old data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import onnx
from onnx import external_data_helper

from gate.onnxfile.walk import tensors_of

SINGLE_FILE_LIMIT = 2**31 - 2**24
"""Bytes that one protobuf file may have, with 16 MiB left for what reads and writes it."""
_SMALLEST = 1024
"""Bytes below which a tensor stays in the model: shapes, scalars, which the checker wants there."""
_ALIGNMENT = 4096
"""Tensors start at whole pages, so that they can be mapped into memory."""
_CHUNK = 1 << 24


def is_large(path: Path) -> bool:
    """True if the file, in a folder of its own, is too large to stand alone, or the exporter put
    weights beside it."""
    return path.stat().st_size > SINGLE_FILE_LIMIT or len(list(path.parent.iterdir())) > 1


def gather(path: Path, *, name: str) -> Path:
    """Move the weights of the model `path` into one new data file beside it; return that file.

    It is called `<name>.<16 hex digits of its SHA-256>.data`. The same weights give the same bytes;
    they are copied in pieces, never held whole. Raises OSError.
    """
    model = onnx.load(path, load_external_data=False)
    pending = path.with_name(f".{name}.gathering")
    placed: list[tuple[onnx.TensorProto, int, int]] = []
    sha256 = hashlib.sha256()
    with pending.open("wb") as out:
        for tensor in _moving(model):
            padding = bytes(-out.tell() % _ALIGNMENT)
            out.write(padding)
            sha256.update(padding)
            start = out.tell()
            for piece in _pieces(tensor, path.parent):
                out.write(piece)
                sha256.update(piece)
            placed.append((tensor, start, out.tell() - start))
    data = path.with_name(f"{name}.{sha256.hexdigest()[:16]}.data")
    for tensor, start, length in placed:
        tensor.ClearField("raw_data")
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", data.name), ("offset", start), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
    pending.replace(data)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return data


def data_files(output: Path) -> Iterator[Path]:
    """The data files beside `output` that `gather` once named after it."""
    ours = re.compile(re.escape(output.name) + r"\.[0-9a-f]{16}\.data")
    return (path for path in output.parent.iterdir() if ours.fullmatch(path.name))


def _moving(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initializers that are not small, and whatever the exporter put beside the model."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        inside = tensor.HasField("raw_data") and len(tensor.raw_data) >= _SMALLEST
        if inside or external_data_helper.uses_external_data(tensor):
            yield tensor
    for tensor in tensors_of(model):
        if tensor.name not in weights and external_data_helper.uses_external_data(tensor):
            yield tensor


def _pieces(tensor: onnx.TensorProto, folder: Path) -> Iterator[bytes]:
    if not external_data_helper.uses_external_data(tensor):
        yield tensor.raw_data
        return
    info = external_data_helper.ExternalDataInfo(tensor)
    file = folder / info.location
    left = info.length or file.stat().st_size - (info.offset or 0)
    with file.open("rb") as stream:
        stream.seek(info.offset or 0)
        while left:
            piece = _read(stream, min(left, _CHUNK), file)
            left -= len(piece)
            yield piece


def _read(stream: IO[bytes], size: int, file: Path) -> bytes:
    piece = stream.read(size)
    if not piece:
        raise OSError(f"{file} is shorter than the model says")
    return piece
