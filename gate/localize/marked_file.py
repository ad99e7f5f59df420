"""Write a copy of the file with its layers as additional outputs, for a viewer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper, shape_inference

from gate.errors import EvidenceError, StorageError, first_line
from gate.localize.file_graph import FileGraph, SubgraphSession
from gate.measure.job import MeasurementJob
from gate.onnx_file.reading import load_graph, read_subject
from gate.onnx_file.sessions import open_on_cpu
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import plain_setup
from gate.records.localization import LayerRow, Localization
from gate.storage import files
from gate.storage.arrays import OutputArray

_SAMPLES = 2
"""Number of samples on which the dtypes and ranks of the tensors are determined."""


@dataclass(frozen=True)
class MarkedFile:
    """An ONNX file that was written with additional outputs."""

    path: Path
    outputs: tuple[str, ...]
    """The added outputs, in the order of the layers."""


def write_marked_file(job: MeasurementJob, localization: Localization, path: Path) -> MarkedFile:
    """Write the file with the tensor of each mapped layer as an additional output, atomically.

    The description of an output names its layer's module and verdict. An older file at `path` is
    replaced, but never the model itself.

    Raises StorageError if `path` belongs to the model, or is in another folder although the model
    has external data; EvidenceError if ONNX Runtime can't compute the tensors or load the file;
    OnnxFileError if it is not valid.
    """
    candidate = job.candidate
    _check_output_path(candidate, path)
    rows = _rows_by_tensor(localization, candidate)
    arrays = _compute_tensors(job, tuple(rows))
    model = load_graph(candidate.verified())
    shapes = _declared_shapes(model)
    for name, array in arrays.items():
        model.graph.output.append(_describe_output(rows[name], array, shapes.get(name)))
    with files.replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))
        read_subject(temporary)
        try:
            open_on_cpu(temporary)
        except Exception as error:  # of ONNX Runtime, without a common base
            raise EvidenceError(
                f"ONNX Runtime does not take the file with {len(arrays)} more outputs: "
                f"{first_line(error).rstrip('.')}. Nothing was written; update ONNX Runtime."
            ) from error
    return MarkedFile(path, tuple(arrays))


def _check_output_path(candidate: TestedFile, path: Path) -> None:
    external_files = candidate.subject.external_data
    folder = candidate.path.parent
    model_files = [candidate.path, *(folder / name for name in external_files)]
    if any(path.exists() and path.samefile(model_file) for model_file in model_files):
        raise StorageError(
            f"cannot write {path}: it is a file of the model itself. Choose another file."
        )
    if external_files and path.parent.resolve() != folder.resolve():
        raise StorageError(
            f"cannot write {path}: the model's external data is in {folder} ({external_files[0]}), "
            f"and ONNX readers look for it next to the model. Name a file in {folder}."
        )


def _rows_by_tensor(localization: Localization, candidate: TestedFile) -> dict[str, LayerRow]:
    """Return the first row of each tensor that is not an output yet."""
    rows: dict[str, LayerRow] = {}
    interface = {spec.name for spec in (*candidate.subject.inputs, *candidate.subject.outputs)}
    for row in localization.layers:
        if row.tensor is not None and row.tensor not in interface:
            rows.setdefault(row.tensor, row)
    return rows


def _compute_tensors(job: MeasurementJob, names: tuple[str, ...]) -> dict[str, OutputArray]:
    """Return the tensors on a few samples, computed by the file without optimizations."""
    if not names:  # the only layer computes the output itself
        return {}
    binding = job.bind(batch_size=_SAMPLES)
    batch = next(job.inputs.batches(binding.batch_size))
    graph = FileGraph(job.candidate)
    try:
        session = SubgraphSession(graph.marked(names), plain_setup("ort-cpu"))
        tensors = [name for name in session.outputs if name in names]
        return session(binding.by_input(batch), only=tensors)
    except Exception as error:  # of ONNX Runtime, without a common base
        raise EvidenceError(
            f"ONNX Runtime can't compute the tensors of the layers: "
            f"{first_line(error).rstrip('.')}. Nothing was written."
        ) from error


def _declared_shapes(model: onnx.ModelProto) -> Mapping[str, onnx.TensorShapeProto]:
    """Return the shapes that the file states or shape inference derives."""
    try:
        graph = shape_inference.infer_shapes(model).graph
    except Exception:  # shapes are optional for a viewer
        graph = model.graph
    return {
        value.name: value.type.tensor_type.shape
        for value in graph.value_info
        if value.type.tensor_type.HasField("shape")
    }


def _describe_output(
    row: LayerRow, array: OutputArray, shape: onnx.TensorShapeProto | None
) -> onnx.ValueInfoProto:
    axes: list[int | str | None] = [None] * array.ndim
    if shape is not None and len(shape.dim) == array.ndim:
        axes = [dim.dim_value or dim.dim_param or None for dim in shape.dim]
    ratio = "" if row.noise_ratio is None else f", {row.noise_ratio:.4g} x rounding"
    detail = f": {row.detail}" if row.detail else ""
    return helper.make_tensor_value_info(
        str(row.tensor),
        helper.np_dtype_to_tensor_dtype(array.dtype),
        axes,
        doc_string=f"{row.title}, {row.kind}, {row.verdict}{ratio}{detail}",
    )
