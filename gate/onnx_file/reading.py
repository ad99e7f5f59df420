"""Reading and verifying ONNX files: whole, valid, with all of their bytes accounted for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import checker, helper, shape_inference

from gate.errors import OnnxFileError, StorageError, first_line
from gate.onnxfile.external_data import external_files, linked
from gate.onnxfile.runtime_operators import in_own_domain
from gate.records.evidence import Subject, TensorSpec
from gate.storage.digest import Digest
from gate.storage.pointer import missing_content
from gate.storage.temporary import temporary_folder

_DEFAULT_DOMAINS = ("", "ai.onnx")
_UNKNOWN_AXIS = "?"
_PROTOBUF_LIMIT = 2**31 - 1
"""Bytes of one protobuf, which no reader takes more of."""
_SORT = (
    "ONNX Runtime puts nodes in order by itself, other tools don't: sort them before you save, by "
    "onnxruntime.transformers.onnx_model.OnnxModel(model).topological_sort()."
)


def read_subject(path: Path) -> Subject:
    """Describe the ONNX file `path`: digest, size, opset, producer, inputs, outputs.

    Dynamic axes are text: their name, or `?`. With external data the digest is that of the
    manifest {file name: SHA-256} over the model file and all data files. Raises OnnxFileError if
    the file is missing, empty, truncated, no ONNX model, not valid, has inputs or outputs that
    are no tensors, or names external data that is missing, short, or outside of its folder.
    """
    data = _read(path)
    model = _parse(data, path)
    files = external_files(model, path)
    checked = in_own_domain(model)
    whole = data if checked is model else checked.SerializeToString()
    _check_whole(whole, path, files, changed=checked is not model)
    try:
        sha256 = (
            Digest.of_manifest(path.parent, (path.name, *files)) if files else Digest.of_bytes(data)
        )
        size = len(data) + sum((path.parent / name).stat().st_size for name in files)
    except (OSError, StorageError) as error:
        raise OnnxFileError(
            f"{path}: its external data can't be read: {error}. Check permissions."
        ) from error
    return Subject(
        sha256=sha256,
        size_bytes=size,
        opset=_opset(model, path),
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        inputs=_specs(_true_inputs(model), path),
        outputs=_specs(model.graph.output, path),
        external_data=files,
    )


def verify_file(path: Path, *, opset: int) -> None:
    """Check `path` thoroughly: checker with full check, strict shape inference, opset, IR version.

    Raises OnnxFileError if anything is wrong, or the file's opset is not `opset`.
    """
    model = _parse(_read(path), path)
    written = _opset(model, path)
    if written != opset:
        raise OnnxFileError(
            f"{path} is written in opset {written}, expected opset {opset}. The exporter took "
            "another one in silence: set export.opset to what it can write."
        )
    needed = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    if not needed <= model.ir_version <= onnx.IR_VERSION:
        raise OnnxFileError(
            f"{path} has IR version {model.ir_version}, expected {needed} (for opset {opset}) "
            f"to {onnx.IR_VERSION} (what the installed onnx reads). Export it again."
        )
    _check(path, path, full=True)
    try:
        shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:  # InferenceError has no public common base with the others
        raise OnnxFileError(
            f"{path}: the shapes in the graph contradict each other: "
            f"{first_line(error).rstrip('.')}. Export it again."
        ) from error


def _read(path: Path) -> bytes:
    if (pointer := missing_content(path)) is not None:
        raise OnnxFileError(pointer)
    try:
        if not path.is_file():
            found = "a folder" if path.is_dir() else "not a file" if path.exists() else "missing"
            raise OnnxFileError(
                f"{path} is {found}, expected an ONNX file. Export the model first."
            )
        if path.stat().st_size > _PROTOBUF_LIMIT:
            raise OnnxFileError(
                f"{path} has {path.stat().st_size} bytes, an ONNX file has at most "
                f"{_PROTOBUF_LIMIT}. Export it with its weights in a file beside it."
            )
        data = path.read_bytes()
    except OSError as error:
        raise OnnxFileError(f"cannot read {path}: {error.strerror}. Check permissions.") from error
    if not data:
        raise OnnxFileError(f"{path} is empty, expected an ONNX model. Export it again.")
    return data


def _parse(data: bytes, path: Path) -> onnx.ModelProto:
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except MemoryError:
        raise
    except Exception as error:  # protobuf's DecodeError
        raise OnnxFileError(
            f"{path} ({len(data)} bytes) is not an ONNX model, or only a part of one. "
            "Copy or export it again."
        ) from error
    if not model.HasField("graph"):
        raise OnnxFileError(
            f"{path} holds no graph: it is truncated, or another kind of protobuf. "
            "Copy or export it again."
        )
    return model


def _check(model: bytes | Path, path: Path, *, full: bool = False) -> None:
    try:
        checker.check_model(model, full_check=full)
    except MemoryError:
        raise
    except Exception as error:  # ValidationError, InferenceError, and plain ones from C++
        again = _SORT if "topologically sorted" in str(error) else "Copy or export it again."
        raise OnnxFileError(
            f"{path} is not a valid ONNX model: {first_line(error).rstrip('.')}. {again}"
        ) from error


def _check_whole(data: bytes, path: Path, files: tuple[str, ...], *, changed: bool) -> None:
    """Check the model with its data beside it: only with a path does the checker find it.
    `changed`: `data` is not what the path holds.

    It refuses links, so it gets the model beside files as long as those that the links lead to:
    what is in them is no part of what it checks.
    """
    if not files:
        _check(data, path)
    elif not (changed or linked(path, files)):
        _check(path, path)
    else:
        with temporary_folder() as folder:
            for name in files:
                empty = Path(folder, name)
                empty.parent.mkdir(parents=True, exist_ok=True)
                empty.touch()
                os.truncate(empty, (path.parent / name).stat().st_size)
            copy = Path(folder, path.name)
            copy.write_bytes(data)
            _check(copy, path)


def _opset(model: onnx.ModelProto, path: Path) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in _DEFAULT_DOMAINS]
    if not versions:
        raise OnnxFileError(f"{path} names no opset of the ONNX domain. Export it again.")
    return int(versions[0])


def _true_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs without the weights, which old files list as inputs too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def _specs(values: Iterable[onnx.ValueInfoProto], path: Path) -> tuple[TensorSpec, ...]:
    return tuple(_spec(value, path) for value in values)


def _spec(value: onnx.ValueInfoProto, path: Path) -> TensorSpec:
    if value.type.WhichOneof("value") != "tensor_type":
        kind = value.type.WhichOneof("value") or "nothing"
        raise OnnxFileError(
            f"{path}: {value.name} is declared as {kind}, expected a tensor: "
            "only tensors can be compared. Export a model whose inputs and outputs are tensors."
        )
    tensor = value.type.tensor_type
    return TensorSpec(
        name=value.name,
        dtype=_dtype(tensor.elem_type),
        shape=tuple(_axis(dim) for dim in tensor.shape.dim),  # the checker demands that it is there
    )


def _dtype(elem_type: int) -> str:
    if elem_type == onnx.TensorProto.STRING:
        return "string"
    return str(helper.tensor_dtype_to_np_dtype(elem_type).name)


def _axis(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or _UNKNOWN_AXIS
