"""Parse and check a file with its external data; walk its graph; externalize large weights."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import onnx
from onnx import (
    checker,
    defs,
    external_data_helper,
    helper,
    inliner,
    numpy_helper,
    shape_inference,
)

from gate.errors import OnnxFileError, StorageError, first_line
from gate.records.evidence import Subject, TensorSpec
from gate.storage.digest import Digest
from gate.storage.files import is_inside, temporary_folder, wrong_name
from gate.storage.untrusted_files import detect_pointer_file


@dataclass(frozen=True)
class WithData:
    """A model and its data files, in memory."""

    model: bytes
    data: dict[str, bytes]
    """By name relative to the model's folder."""


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's own attributes: the branches of an If, the body of a Loop."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes, and all that are in their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from nodes_within(graph.node)


def nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes."""
    yield from nodes_within(model.graph.node)
    for function in model.functions:
        yield from nodes_within(function.node)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name: numbers, lists, bytes, tensors and graphs."""
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


_NUMBERS = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor of a Constant node, also of one that is written as numbers; None for any
    other node, and for a Constant of texts or a sparse one."""
    for attribute in node.attribute if node.op_type == "Constant" else ():
        value = helper.get_attribute_value(attribute)
        if attribute.name == "value":
            tensor: onnx.TensorProto = value
            return tensor
        if attribute.name in _NUMBERS:
            return numpy_helper.from_array(np.asarray(value, _NUMBERS[attribute.name]))
    return None


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without functions. Raises what onnx raises.

    onnx's inliner ignores the defaults of a function's attributes, so each call states them first.
    It leaves functions of another opset than the model's; ONNX Runtime computes their nodes by the
    model's opset (measured with Softmax of opset 12 in a model of opset 17), and so does the copy.
    """
    defaults = {(f.domain, f.name, f.overload): f.attribute_proto for f in model.functions}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for node in nodes_of(made):
        own = {attribute.name for attribute in node.attribute}
        stated = defaults.get((node.domain, node.op_type, node.overload), ())
        node.attribute.extend(each for each in stated if each.name not in own)
    versions = {each.domain: each.version for each in made.opset_import}
    for each in (opset for function in made.functions for opset in function.opset_import):
        each.version = versions.get(each.domain, each.version)
    return inliner.inline_local_functions(made)


def replace_messages(field: Any, kept: Iterable[Any]) -> None:
    """Put these messages in the place of all of a repeated field, which may hold them."""
    copies = [type(message).FromString(message.SerializeToString()) for message in kept]
    del field[:]
    field.extend(copies)


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All tensors: initializers and those in attributes, of sparse ones values and indices."""
    yield from _in_graph(model.graph)
    for function in model.functions:
        yield from _in_nodes(function.node)


def _in_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _in_nodes(graph.node)


def _in_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            own = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            for sparse in (*own, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
        for graph in subgraphs(node):
            yield from _in_graph(graph)


def external_files(model: onnx.ModelProto, path: Path) -> tuple[str, ...]:
    """Names of the data files of `model`, read from `path`, relative to its folder, sorted.

    A data file may itself be a link to a plain file elsewhere, as the caches of model hubs have it:
    that link was made by the owner of the folder. Raises OnnxFileError for a name or a folder that
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
    if (pointer := detect_pointer_file(file)) is not None:
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


def externalize_weights(path: Path, *, name: str) -> Path:
    """Move the weights of the model `path` into one new data file beside it; return that file.

    It is called `<name>.<16 hex digits of its SHA-256>.data`, so that a model that is replaced
    never points to new data, nor a new one to old data. The same weights give the same bytes; they
    are copied in pieces, never held whole. Raises OSError.
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
            piece = _gathered_read(stream, min(left, _CHUNK), file)
            left -= len(piece)
            yield piece


def _gathered_read(stream: IO[bytes], size: int, file: Path) -> bytes:
    piece = stream.read(size)
    if not piece:
        raise OSError(f"{file} is shorter than the model says")
    return piece


DOMAIN = "com.microsoft"
"""Where they belong, as far as anybody else can tell."""

_FUSED = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})

_STANDARD = ("", "ai.onnx")


def is_of_runtime(node: onnx.NodeProto, *, opset: int) -> bool:
    """Whether the standard domain of that opset lacks the operator, and ONNX Runtime has it."""
    if node.op_type not in _FUSED or node.domain not in _STANDARD:
        return False
    try:
        defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return True
    return False


def with_ort_domain(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with these operators in ONNX Runtime's own domain, which the checker takes; the
    very same object where there are none."""
    opset = max((o.version for o in model.opset_import if o.domain in _STANDARD), default=0)
    if not any(is_of_runtime(node, opset=opset) for node in nodes_of(model)):
        return model
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    for node in nodes_of(moved):
        if is_of_runtime(node, opset=opset):
            node.domain = DOMAIN
    if all(entry.domain != DOMAIN for entry in moved.opset_import):
        moved.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return moved


_DEFAULT_DOMAINS = ("", "ai.onnx")

ML_DOMAIN = "ai.onnx.ml"
"""Of the operators that converters of scikit-learn's models write."""

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
    data = _subject_read(path)
    model = _parse(data, path)
    files = external_files(model, path)
    complaint = None
    checked = with_ort_domain(model)
    whole = data if checked is model else checked.SerializeToString()
    try:
        _check_whole(whole, path, files, changed=checked is not model)
    except OnnxFileError as error:
        _complete(model, path, error)
        complaint = first_line(error.__cause__ or error).rstrip(".")
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
        outputs=tuple(_output_specs(model, path)),
        external_data=files,
        checker=complaint,
    )


def _complete(model: onnx.ModelProto, path: Path, error: OnnxFileError) -> None:
    """Give outputs that are declared without a type or shape those that ONNX Runtime infers. Raise
    `error` where it does not run the file, either, or the nodes are in no order."""
    from gate.onnx_file.sessions import open_on_cpu

    if _SORT in str(error) or any(
        not value.type.tensor_type.HasField("shape") for value in _true_inputs(model)
    ):
        raise error
    try:
        inferred = {value.name: value for value in open_on_cpu(path).get_outputs()}
    except Exception:  # of ONNX Runtime, without a common base
        raise error from error.__cause__
    for declared in model.graph.output:
        tensor = declared.type.tensor_type
        if not tensor.HasField("shape") and declared.name in inferred:
            found = inferred[declared.name]
            kind = found.type.removeprefix("tensor(").removesuffix(")").upper()
            shape = [size if size is not None else _UNKNOWN_AXIS for size in found.shape]
            tensor.elem_type = onnx.TensorProto.DataType.Value(kind)
            tensor.shape.CopyFrom(
                helper.make_tensor_type_proto(tensor.elem_type, shape).tensor_type.shape
            )


def verify_file(path: Path, *, opset: int) -> None:
    """Check `path` thoroughly: checker with full check, strict shape inference, opset, IR version.

    Raises OnnxFileError if anything is wrong, or the file's opset is not `opset`.
    """
    model = _parse(_subject_read(path), path)
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


def _subject_read(path: Path) -> bytes:
    if (pointer := detect_pointer_file(path)) is not None:
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
    versions = {entry.domain: int(entry.version) for entry in model.opset_import}
    for domain in _DEFAULT_DOMAINS:
        if domain in versions:
            return versions[domain]
    if ML_DOMAIN in versions:  # trees and linear models alone, which use no operator of ONNX's
        return 1
    raise OnnxFileError(
        f"{path} names no opset of the ONNX domain. If no node has that domain, any version "
        "will do: model.opset_import.append(onnx.helper.make_opsetid('', 17))."
    )


def _true_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs without the weights, which old files list as inputs too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def _specs(values: Iterable[onnx.ValueInfoProto], path: Path) -> tuple[TensorSpec, ...]:
    return tuple(_spec(value, path) for value in values)


def map_keys(model: onnx.ModelProto) -> dict[str, list[str] | list[int]]:
    """Return the sorted keys of the outputs that are lists of maps, by their names. Only the
    operator ZipMap makes maps; it has the keys as attributes."""
    outputs = {value.name for value in model.graph.output}
    found: dict[str, list[str] | list[int]] = {}
    for node in model.graph.node:
        if node.op_type == "ZipMap" and node.domain == ML_DOMAIN and node.output[0] in outputs:
            labels = [each for each in node.attribute if each.name.startswith("classlabels_")]
            found[node.output[0]] = sorted(
                each.decode() if isinstance(each, bytes) else each
                for attribute in labels
                for each in helper.get_attribute_value(attribute)
            )
    return found


def _output_specs(model: onnx.ModelProto, path: Path) -> Iterator[TensorSpec]:
    """Yield the outputs; a list of maps as two tensors, as sessions return it."""
    maps = map_keys(model)
    for value in model.graph.output:
        if value.name not in maps:
            yield _spec(value, path)
            continue
        keys = maps[value.name]
        shape = (_UNKNOWN_AXIS, len(keys))
        of_text = bool(keys) and isinstance(keys[0], str)
        yield TensorSpec(name=value.name, dtype="float32", shape=shape)
        yield TensorSpec(
            name=keys_name(value.name), dtype="string" if of_text else "int64", shape=shape
        )


def keys_name(output: str) -> str:
    """Return the name of the tensor of the keys of an output that is a list of maps."""
    return f"{output} keys"


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
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # Paddle's exporter writes -1
        return int(dim.dim_value)
    return dim.dim_param or _UNKNOWN_AXIS
