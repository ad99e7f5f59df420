"""Parse and check a file with its external data; walk its graph; externalize large weights."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from onnx import checker, defs, external_data_helper, helper, inliner, numpy_helper, shape_inference

from gate.errors import OnnxFileError, StorageError, first_line
from gate.records.evidence import Subject, TensorSpec
from gate.storage.digest import Digest
from gate.storage.files import is_inside, temporary_folder, wrong_name
from gate.storage.untrusted_files import detect_pointer_file


@dataclass(frozen=True)
class WithData:
    """A model and its data files in memory."""

    model: bytes
    data: dict[str, bytes]
    """Contents by name relative to the model's folder."""


def load_graph(source: bytes | str) -> onnx.ModelProto:
    """Parse the bytes or the file of a model without its external data. Raises the exceptions of
    onnx."""
    if isinstance(source, bytes):
        return onnx.load_from_string(source)
    return onnx.load(source, load_external_data=False)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in a node's attributes: the branches of an If, the body of a Loop."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and all nodes in their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from nodes_within(graph.node)


def nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of a model, including those in subgraphs and functions."""
    yield from nodes_within(model.graph.node)
    for function in model.functions:
        yield from nodes_within(function.node)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name: numbers, lists, bytes, tensors and graphs."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


_NUMBERS = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor of a Constant node; None for other nodes and for constants of strings or
    sparse tensors."""
    for attribute in node.attribute if node.op_type == "Constant" else ():
        value = helper.get_attribute_value(attribute)
        if attribute.name == "value":
            tensor: onnx.TensorProto = value
            return tensor
        if attribute.name in _NUMBERS:
            return numpy_helper.from_array(np.asarray(value, _NUMBERS[attribute.name]))
    return None


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without functions. Raises the exceptions of onnx.

    onnx's inliner ignores the defaults of a function's attributes, so they are first copied into
    each call. It skips functions of another opset than the model's. ONNX Runtime computes their
    nodes with the model's opset (measured with Softmax of opset 12 in a model of opset 17), and so
    does the copy.
    """
    defaults = {(f.domain, f.name, f.overload): f.attribute_proto for f in model.functions}
    copied = copy.deepcopy(model)
    for node in nodes_of(copied):
        names = {attribute.name for attribute in node.attribute}
        function_defaults = defaults.get((node.domain, node.op_type, node.overload), ())
        node.attribute.extend(each for each in function_defaults if each.name not in names)
    versions = {each.domain: each.version for each in copied.opset_import}
    for each in (opset for function in copied.functions for opset in function.opset_import):
        each.version = versions.get(each.domain, each.version)
    return inliner.inline_local_functions(copied)


def replace_messages(field: Any, messages: Iterable[Any]) -> None:
    """Replace the contents of a repeated field by messages, which may be elements of the field."""
    copies = [type(message).FromString(message.SerializeToString()) for message in messages]
    del field[:]
    field.extend(copies)


def add_outputs(graph: onnx.GraphProto, names: Iterable[str]) -> None:
    """Add these tensors to the outputs of a graph, unless they are outputs already."""
    stated = {value.name for value in graph.output}
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in stated)


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a model: initializers and attributes; for sparse tensors, values and
    indices."""
    yield from _tensors_in_graph(model.graph)
    for function in model.functions:
        yield from _tensors_in_nodes(function.node)


def _tensors_in_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _tensors_in_nodes(graph.node)


def _tensors_in_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            single = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            for sparse in (*single, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
        for graph in subgraphs(node):
            yield from _tensors_in_graph(graph)


def external_files(model: onnx.ModelProto, path: Path) -> tuple[str, ...]:
    """Return the sorted names of a model's data files, relative to the folder of `path`.

    A data file may be a link to a regular file elsewhere, as in the caches of model hubs, because
    the owner of the folder made the link. Raises OnnxFileError for a name or a folder outside of
    the model's folder, since a model could otherwise read any file of the machine, and for a file
    that is missing or too short.
    """
    names: set[str] = set()
    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            try:
                names.add(_checked_data_file(tensor, path))
            # Links may form a cycle, and names may have invalid bytes.
            except (OSError, ValueError, TypeError, RuntimeError) as error:
                raise OnnxFileError(
                    f"{path}: the external data of the tensor {tensor.name!r} can't be found: "
                    f"{error}. Export the model again."
                ) from error
    return tuple(sorted(names))


def has_links(path: Path, files: Iterable[str]) -> bool:
    """Return whether a data file of the model `path` is a symbolic link or has several hard links.

    onnx refuses all of them; ONNX Runtime refuses only links that leave the model's folder."""
    paths = [path.parent / name for name in files]
    return any(file.is_symlink() or file.stat().st_nlink > 1 for file in paths)


def _checked_data_file(tensor: onnx.TensorProto, path: Path) -> str:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = PurePosixPath(entries.get("location", "").replace("\\", "/"))
    name = location.as_posix()
    if wrong_name(name) or not is_inside(path.parent, location.parent.as_posix()):
        raise OnnxFileError(
            f"{path}: the tensor {tensor.name} reads its data from {name[:300]!r}, expected a file "
            "inside the model's folder. Do not trust this file: export the model again."
        )
    file = path.parent / location
    if (pointer := detect_pointer_file(file)) is not None:
        raise OnnxFileError(f"{path}: the data of the tensor {tensor.name}: {pointer}")
    if not file.is_file():  # also refuses devices and pipes
        raise OnnxFileError(
            f"{path}: the data file {name} of the tensor {tensor.name} is missing. "
            "Copy it next to the model, or export to a single file."
        )
    end, size = _data_end(tensor, entries, path), file.stat().st_size
    if size < end:
        raise OnnxFileError(
            f"{path}: the data file {name} has {size} bytes, but the tensor {tensor.name} needs "
            f"{end}. The file is truncated. Copy or export it again."
        )
    return name


def _data_end(tensor: onnx.TensorProto, entries: dict[str, str], path: Path) -> int:
    """Return the offset after the tensor's last byte in its data file."""
    try:
        offset, stated = int(entries.get("offset") or 0), int(entries.get("length") or 0)
        size = math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (ValueError, KeyError) as error:
        raise OnnxFileError(
            f"{path}: the tensor {tensor.name} has an invalid description of its external data: "
            f"{error}. Export the model again."
        ) from error
    if offset < 0 or stated < 0:
        raise OnnxFileError(
            f"{path}: the tensor {tensor.name} has a negative offset or length. "
            "Export the model again."
        )
    return offset + (stated or size)


SINGLE_FILE_LIMIT = 2**31 - 2**24
"""Maximum size in bytes of a model in one protobuf file, with a reserve of 16 MiB."""

_MIN_EXTERNAL = 1024
"""Minimum size in bytes of external tensors. The checker needs shapes and scalars in the model."""

_ALIGNMENT = 4096
"""Alignment of tensors in bytes: whole pages can be mapped into memory."""

_CHUNK = 1 << 24


def is_large(path: Path) -> bool:
    """Return whether a file is too large for one protobuf, or the exporter wrote external data.

    The folder must contain only the exported files."""
    return path.stat().st_size > SINGLE_FILE_LIMIT or len(list(path.parent.iterdir())) > 1


def externalize_weights(path: Path, *, name: str) -> Path:
    """Move the weights of the model `path` into one new data file next to it; return that file.

    Its name is `<name>.<16 hex digits of its SHA-256>.data`, so that an old model never points to
    new data, nor a new model to old data. The result is deterministic. The weights are copied in
    chunks to save memory. Raises OSError.
    """
    model = onnx.load(path, load_external_data=False)
    pending = path.with_name(f".{name}.gathering")
    locations: list[tuple[onnx.TensorProto, int, int]] = []
    sha256 = hashlib.sha256()
    with pending.open("wb") as out:
        for tensor in _tensors_to_move(model):
            padding = bytes(-out.tell() % _ALIGNMENT)
            out.write(padding)
            sha256.update(padding)
            start = out.tell()
            for piece in _read_chunks(tensor, path.parent):
                out.write(piece)
                sha256.update(piece)
            locations.append((tensor, start, out.tell() - start))
    data = path.with_name(f"{name}.{sha256.hexdigest()[:16]}.data")
    for tensor, start, length in locations:
        tensor.ClearField("raw_data")
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", data.name), ("offset", start), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
    pending.replace(data)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return data


def data_files(output: Path) -> Iterator[Path]:
    """Yield the data files that `externalize_weights` wrote for `output`."""
    pattern = re.compile(re.escape(output.name) + r"\.[0-9a-f]{16}\.data")
    return (path for path in output.parent.iterdir() if pattern.fullmatch(path.name))


def _tensors_to_move(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the large initializers, and all tensors that are external already."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        is_large = tensor.HasField("raw_data") and len(tensor.raw_data) >= _MIN_EXTERNAL
        if is_large or external_data_helper.uses_external_data(tensor):
            yield tensor
    for tensor in tensors_of(model):
        if tensor.name not in weights and external_data_helper.uses_external_data(tensor):
            yield tensor


def _read_chunks(tensor: onnx.TensorProto, folder: Path) -> Iterator[bytes]:
    if not external_data_helper.uses_external_data(tensor):
        yield tensor.raw_data
        return
    info = external_data_helper.ExternalDataInfo(tensor)
    file = folder / info.location
    left = info.length or file.stat().st_size - (info.offset or 0)
    with file.open("rb") as stream:
        stream.seek(info.offset or 0)
        while left:
            piece = stream.read(min(left, _CHUNK))
            if not piece:
                raise OSError(f"{file} is shorter than the model says")
            left -= len(piece)
            yield piece


DOMAIN = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

_FUSED = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})

STANDARD_DOMAINS = ("", "ai.onnx")
"""Both names of the domain of ONNX's own operators."""

RANDOM_OPERATORS = ("Random", "Bernoulli", "Multinomial")
"""Beginnings of operators whose results are random."""


def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset of the standard domain, or 0 if the model names none."""
    versions = (opset.version for opset in model.opset_import if opset.domain in STANDARD_DOMAINS)
    return max(versions, default=0)


def is_of_runtime(node: onnx.NodeProto, *, opset: int) -> bool:
    """Return whether ONNX Runtime has the node's operator but the standard domain lacks it."""
    if node.op_type not in _FUSED or node.domain not in STANDARD_DOMAINS:
        return False
    try:
        defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return True
    return False


def with_ort_domain(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with such operators in ONNX Runtime's domain, which the checker accepts.

    A model without such operators is returned unchanged."""
    opset = opset_of(model)
    if not any(is_of_runtime(node, opset=opset) for node in nodes_of(model)):
        return model
    copied = copy.deepcopy(model)
    for node in nodes_of(copied):
        if is_of_runtime(node, opset=opset):
            node.domain = DOMAIN
    if all(entry.domain != DOMAIN for entry in copied.opset_import):
        copied.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return copied


ML_DOMAIN = "ai.onnx.ml"
"""Domain of the operators in converted scikit-learn models."""

_UNKNOWN_AXIS = "?"

_PROTOBUF_LIMIT = 2**31 - 1
"""Maximum size of a protobuf in bytes."""

_SORT = (
    "ONNX Runtime sorts the nodes itself, but other tools don't. Sort them before you save the "
    "file: onnxruntime.transformers.onnx_model.OnnxModel(model).topological_sort()."
)


def read_subject(path: Path) -> Subject:
    """Describe the ONNX file `path`: digest, size, opset, producer, inputs, outputs.

    Dynamic axes are strings: their name, or `?`. With external data the digest is that of the
    manifest {file name: SHA-256} over the model file and all data files. Raises OnnxFileError if
    the file is missing, empty, truncated or not a valid ONNX model, has inputs or outputs that are
    not tensors, or names external data that is missing, too short or outside of its folder.
    """
    data = _read_bytes(path)
    model = _parse(data, path)
    files = external_files(model, path)
    checker_message = None
    checked = with_ort_domain(model)
    contents = data if checked is model else checked.SerializeToString()
    try:
        _check_with_data(contents, path, files, changed=checked is not model)
    except OnnxFileError as error:
        _complete_outputs(model, path, error)
        checker_message = first_line(error.__cause__ or error).rstrip(".")
    try:
        sha256 = (
            Digest.from_manifest(path.parent, (path.name, *files))
            if files
            else Digest.from_bytes(data)
        )
        size = len(data) + sum((path.parent / name).stat().st_size for name in files)
    except (OSError, StorageError) as error:
        raise OnnxFileError(
            f"{path}: its external data can't be read: {error}. Check permissions."
        ) from error
    return Subject(
        sha256=sha256,
        size_bytes=size,
        opset=_find_opset(model, path),
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        inputs=tuple(_read_spec(value, path) for value in _inputs_without_weights(model)),
        outputs=tuple(_output_specs(model, path)),
        external_data=files,
        checker=checker_message,
    )


def _complete_outputs(model: onnx.ModelProto, path: Path, error: OnnxFileError) -> None:
    """Add the types and shapes that ONNX Runtime infers to outputs without them.

    Raise `error` if ONNX Runtime can't load the file either, or the nodes are not sorted."""
    from gate.onnx_file.sessions import open_on_cpu

    if _SORT in str(error) or any(
        not value.type.tensor_type.HasField("shape") for value in _inputs_without_weights(model)
    ):
        raise error
    try:
        inferred = {value.name: value for value in open_on_cpu(path).get_outputs()}
    except Exception:  # of ONNX Runtime, without a common base
        raise error from error.__cause__
    for declared in model.graph.output:
        tensor = declared.type.tensor_type
        if not tensor.HasField("shape") and declared.name in inferred:
            output = inferred[declared.name]
            kind = output.type.removeprefix("tensor(").removesuffix(")").upper()
            shape = [size if size is not None else _UNKNOWN_AXIS for size in output.shape]
            tensor.elem_type = onnx.TensorProto.DataType.Value(kind)
            tensor.shape.CopyFrom(
                helper.make_tensor_type_proto(tensor.elem_type, shape).tensor_type.shape
            )


def verify_file(path: Path, *, opset: int) -> None:
    """Check `path` thoroughly: checker with full check, strict shape inference, opset, IR version.

    Raises OnnxFileError if anything is wrong, or the file's opset is not `opset`.
    """
    model = _parse(_read_bytes(path), path)
    written = _find_opset(model, path)
    if written != opset:
        raise OnnxFileError(
            f"{path} has opset {written}, expected opset {opset}. The exporter silently chose "
            "another opset. Set export.opset to an opset that it supports."
        )
    needed = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    if not needed <= model.ir_version <= onnx.IR_VERSION:
        raise OnnxFileError(
            f"{path} has IR version {model.ir_version}, expected {needed} (for opset {opset}) "
            f"to {onnx.IR_VERSION} (the newest of the installed onnx). Export it again."
        )
    _check_model(path, path, full=True)
    try:
        shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:  # InferenceError has no public common base with the others
        raise OnnxFileError(
            f"{path}: the shapes in the graph contradict each other: "
            f"{first_line(error).rstrip('.')}. Export it again."
        ) from error


def _read_bytes(path: Path) -> bytes:
    if (pointer := detect_pointer_file(path)) is not None:
        raise OnnxFileError(pointer)
    try:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not a file" if path.exists() else "missing"
            raise OnnxFileError(f"{path} is {kind}, expected an ONNX file. Export the model first.")
        if path.stat().st_size > _PROTOBUF_LIMIT:
            raise OnnxFileError(
                f"{path} has {path.stat().st_size} bytes, an ONNX file has at most "
                f"{_PROTOBUF_LIMIT}. Export it with external data."
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
            f"{path} contains no graph: it is truncated, or another kind of protobuf. "
            "Copy or export it again."
        )
    return model


def _check_model(model: bytes | Path, path: Path, *, full: bool = False) -> None:
    try:
        checker.check_model(model, full_check=full)
    except MemoryError:
        raise
    except Exception as error:  # ValidationError, InferenceError, and plain ones from C++
        remedy = _SORT if "topologically sorted" in str(error) else "Copy or export it again."
        raise OnnxFileError(
            f"{path} is not a valid ONNX model: {first_line(error).rstrip('.')}. {remedy}"
        ) from error


def _check_with_data(data: bytes, path: Path, files: tuple[str, ...], *, changed: bool) -> None:
    """Check the model with its external data, which the checker needs a path to find.

    changed: `data` differs from the contents of `path`. The checker refuses links, so a model with
    linked data is checked next to empty files of the same sizes; it does not read their contents.
    """
    if not files:
        _check_model(data, path)
    elif not (changed or has_links(path, files)):
        _check_model(path, path)
    else:
        with temporary_folder() as folder:
            for name in files:
                empty = Path(folder, name)
                empty.parent.mkdir(parents=True, exist_ok=True)
                empty.touch()
                os.truncate(empty, (path.parent / name).stat().st_size)
            copied = Path(folder, path.name)
            copied.write_bytes(data)
            _check_model(copied, path)


def _find_opset(model: onnx.ModelProto, path: Path) -> int:
    versions = {entry.domain: int(entry.version) for entry in model.opset_import}
    for domain in STANDARD_DOMAINS:
        if domain in versions:
            return versions[domain]
    if ML_DOMAIN in versions:  # tree or linear models without any operator of the ONNX domain
        return 1
    raise OnnxFileError(
        f"{path} names no opset of the ONNX domain. If no node has that domain, add any version: "
        "model.opset_import.append(onnx.helper.make_opsetid('', 17))."
    )


def _inputs_without_weights(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs without the weights, which old files also list as inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def map_keys(model: onnx.ModelProto) -> dict[str, list[str] | list[int]]:
    """Return the sorted keys of each output that is a list of maps, by output name.

    Only the operator ZipMap creates maps; it has the keys as attributes."""
    outputs = {value.name for value in model.graph.output}
    keys: dict[str, list[str] | list[int]] = {}
    for node in model.graph.node:
        if node.op_type == "ZipMap" and node.domain == ML_DOMAIN and node.output[0] in outputs:
            labels = [label for label in node.attribute if label.name.startswith("classlabels_")]
            keys[node.output[0]] = sorted(
                label.decode() if isinstance(label, bytes) else label
                for attribute in labels
                for label in helper.get_attribute_value(attribute)
            )
    return keys


def _output_specs(model: onnx.ModelProto, path: Path) -> Iterator[TensorSpec]:
    """Yield the outputs; a list of maps as two tensors, in the form that sessions return."""
    maps = map_keys(model)
    for value in model.graph.output:
        if value.name not in maps:
            yield _read_spec(value, path)
            continue
        keys = maps[value.name]
        shape = (_UNKNOWN_AXIS, len(keys))
        has_text = bool(keys) and isinstance(keys[0], str)
        yield TensorSpec(name=value.name, dtype="float32", shape=shape)
        yield TensorSpec(
            name=keys_name(value.name), dtype="string" if has_text else "int64", shape=shape
        )


def keys_name(output: str) -> str:
    """Return the name of the keys' tensor of an output that is a list of maps."""
    return f"{output} keys"


def _read_spec(value: onnx.ValueInfoProto, path: Path) -> TensorSpec:
    if value.type.WhichOneof("value") != "tensor_type":
        kind = value.type.WhichOneof("value") or "nothing"
        raise OnnxFileError(
            f"{path}: {value.name} is declared as {kind}, expected a tensor: "
            "only tensors can be compared. Export a model whose inputs and outputs are tensors."
        )
    tensor = value.type.tensor_type
    return TensorSpec(
        name=value.name,
        dtype=_dtype_name(tensor.elem_type),
        shape=tuple(_read_axis(dim) for dim in tensor.shape.dim),  # the checker requires a shape
    )


def _dtype_name(elem_type: int) -> str:
    if elem_type == onnx.TensorProto.STRING:
        return "string"
    return str(helper.tensor_dtype_to_np_dtype(elem_type).name)


def _read_axis(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # Paddle's exporter writes -1
        return int(dim.dim_value)
    return dim.dim_param or _UNKNOWN_AXIS
