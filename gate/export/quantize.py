"""Write the static int8 twin with ONNX Runtime's quantizer."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from pydantic import Field

from gate.errors import ExportError, NothingQuantized, first_line
from gate.installation import onnx_runtime
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import QUANTIZED_FROM
from gate.records.evidence import BatchAxes, ExportRecord, Subject
from gate.storage import files
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.record import Record, added_field
from gate.storage.yaml_section import load_section


class QuantizeSettings(Record):
    """All settings of the quantizer."""

    samples: Annotated[int, Field(ge=1)] = 128
    """Number of calibration samples, which determine the ranges of the activations."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    method: Literal["minmax", "entropy", "percentile"] = "minmax"
    """The calibration method: how a range follows from the observed values."""
    per_channel: bool = True
    """A scale for each output channel of a weight, instead of one for the tensor."""
    reduce_range: bool = True
    """Use seven bits for weights: processors without VNNI saturate sums of products of eight bits,
    so the same file would return other values there."""
    activation: Literal["uint8", "int8"] = "uint8"
    weight: Literal["uint8", "int8"] = "int8"
    symmetric_activations: bool = added_field(False)
    """Use activation ranges that are symmetric about zero."""
    exclude: tuple[str, ...] = added_field(())
    """Names of nodes that stay in float32."""

    @classmethod
    def load(cls, path: Path) -> QuantizeSettings:
        """Read the section `quantize:` of a YAML file. Raises PolicyError."""
        return load_section(cls, path, "quantize")


Batches = Iterator[Mapping[str, NDArray[Any]]]
"""Arrays by the names of the file's inputs, shape (batch, ...)."""


@dataclass(frozen=True)
class Quantized:
    """A quantized file with its settings."""

    path: Path
    subject: Subject
    record: ExportRecord


def quantize(
    exact: Path,
    calibration: Batches,
    output: Path,
    *,
    settings: QuantizeSettings,
    axes: BatchAxes | None = None,
) -> Quantized:
    """Write the static int8 twin (QDQ) of the ONNX file `exact` to the single file `output`.

    The outputs differ from those of `exact`, so the twin has a separate policy. Takes batches from
    `calibration` until `settings.samples` are used. `axes`: the batch axis of each input, None for
    axis 0. The same file, samples and settings give the same bytes. Raises OnnxFileError for an
    invalid file, ExportError if calibration fails or `settings.exclude` names an unknown node,
    NothingQuantized, PackageBroken, StorageError; an existing `output` stays unchanged then.
    """
    onnx_runtime()  # a broken package must not look like an invalid file
    subject = read_subject(exact)
    if _is_quantized(onnx.load(str(exact), load_external_data=False)):
        raise ExportError(f"{exact} is already quantized. Pass the exact file.")
    reader = _CalibrationReader(calibration, settings, subject, axes)
    with temporary_folder() as folder:
        prepared, quantized = Path(folder, "prepared.onnx"), Path(folder, "quantized.onnx")
        with _quantizer_errors(exact):
            _prepare(exact, prepared)
        _check_names(settings.exclude, prepared, exact)
        with _quantizer_errors(exact):
            _quantize(prepared, reader, quantized, settings)
        proto = onnx.load(str(quantized))
        if not _is_quantized(proto):
            raise NothingQuantized(
                f"nothing in {exact} could be quantized: it has no operator that the quantizer "
                "knows (Conv, MatMul, Gemm and others). Serve the exact file."
            )
        properties = {entry.key: entry.value for entry in proto.metadata_props}
        onnx.helper.set_model_props(proto, properties | {QUANTIZED_FROM: str(subject.sha256)})
        data = proto.SerializeToString(deterministic=True)
        quantized.write_bytes(data)
        twin = read_subject(quantized)  # validated before it replaces an older file
        files.write_bytes(output, data)
    stated = settings.to_plain()
    if "exclude" in stated:
        stated["exclude"] = json.dumps(stated["exclude"])  # the record holds no lists
    stated_ = {
        **stated,
        "format": "QDQ",
        "calibration_samples": reader.count,
        "calibration_sha256": str(reader.digest()),
        "of_sha256": str(subject.sha256),
    }
    return Quantized(output, twin, ExportRecord(strategy="quantized", settings=stated_))


class QuantizerTrials:
    """An exact file that is prepared and calibrated once, then quantized with many settings.

    These files do not hold the digest of the exact file: create the final one with `quantize`.
    """

    def __init__(
        self, exact: Path, calibration: Sequence[Mapping[str, NDArray[Any]]], folder: Path
    ) -> None:
        """`calibration`: batches as in `quantize`. `folder`: the folder for the prepared file and
        the ranges. Raises ExportError."""
        onnx_runtime()
        self._exact, self._calibration, self._folder = exact, calibration, folder
        self._subject, self._prepared = read_subject(exact), folder / "prepared.onnx"
        with _quantizer_errors(exact):
            _prepare(exact, self._prepared)

    def write(
        self, output: Path, settings: QuantizeSettings, *, only: Collection[str] = ()
    ) -> Path:
        """Write the int8 file and return its path. `only`: the nodes to quantize; empty for all but
        `settings.exclude`. Raises ExportError."""
        reader = _CalibrationReader(iter(self._calibration), settings, self._subject, None)
        ranges = self._folder / f"{settings.method}-{settings.samples}.json"
        with _quantizer_errors(self._exact):
            _quantize(self._prepared, reader, output, settings, only=only, ranges=ranges)
        return output


def quantized_layers(path: Path) -> tuple[str, ...]:
    """Return the names of the nodes that compute on quantized values, in the file's order."""
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    stored = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    return tuple(
        node.name
        for node in nodes
        if "uantizeLinear" not in node.op_type and stored.intersection(node.input)
    )


class _CalibrationReader:
    """The calibration data as the quantizer reads it; counts and hashes what was used."""

    def __init__(
        self, batches: Batches, settings: QuantizeSettings, subject: Subject, axes: BatchAxes | None
    ) -> None:
        self._batches, self._axes = batches, axes
        self._limit = settings.samples
        self._names = tuple(spec.name for spec in subject.inputs)
        self._used: list[str] = []
        self.count = 0

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """Return the next batch by input name, None after the last one."""
        batch = next(self._batches, None) if self.count < self._limit else None
        if batch is None:
            if self.count == 0:
                raise ValueError("there is no calibration sample")
            return None
        arrays = {name: np.array(batch[name], order="C") for name in self._names}
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"a calibration sample of {name} has NaN or infinite values")
            self._used.append(
                f"{name} {array.dtype} {array.shape} {Digest.from_bytes(array.tobytes())}"
            )
        self.count += self._samples(arrays)
        return arrays

    def _samples(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        if self._axes is None:
            return len(arrays[self._names[0]])
        axes = ((name, self._axes.inputs[name]) for name in self._names)
        sizes = [arrays[name].shape[axis] for name, axis in axes if axis is not None]
        return max(sizes, default=1)

    def digest(self) -> Digest:
        """Return the digest of all samples that were used."""
        return Digest.from_json({"batches": self._used})


def _prepare(exact: Path, prepared: Path) -> None:
    """Shapes for the quantizer, and BatchNorms folded into convolutions."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(str(exact), str(prepared), skip_symbolic_shape=True)
    model = onnx.load(str(prepared))
    if name_nodes(model.graph):
        onnx.save(model, str(prepared))


def name_nodes(graph: onnx.GraphProto) -> bool:
    """Name each node without a unique name after its operator and position. Return whether there
    was one."""
    uses = Counter(node.name for node in graph.node)
    unnamed = [i for i, node in enumerate(graph.node) if not node.name or uses[node.name] > 1]
    for i in unnamed:
        node = graph.node[i]
        name = f"{node.op_type}_{i}"
        while uses[name]:
            name += "_"
        uses[name], node.name = 1, name
    return bool(unnamed)


def _check_names(names: Collection[str], prepared: Path, exact: Path) -> None:
    nodes = onnx.load(str(prepared), load_external_data=False).graph.node
    present = {node.name for node in nodes}
    missing = sorted(set(names) - present)
    if missing:
        near = difflib.get_close_matches(missing[0], present, n=1)
        raise ExportError(
            f"quantize.exclude names the node {missing[0]!r}, and {exact} has none of this name."
            + (f" Did you mean {near[0]!r}?" if near else " Name nodes of the file.")
        )


@contextlib.contextmanager
def _quantizer_errors(exact: Path) -> Iterator[None]:
    """Raise ExportError for any exception of the quantizer, and suppress its output."""
    try:
        with _suppress_output():
            yield
    except Exception as error:
        raise ExportError(
            f"{exact} can't be quantized: {type(error).__name__}: {first_line(error)}. "
            "Check that the calibration samples fit the file's inputs and are finite."
        ) from error


def _quantize(
    prepared: Path,
    reader: _CalibrationReader,
    output: Path,
    settings: QuantizeSettings,
    *,
    only: Collection[str] = (),
    ranges: Path | None = None,
) -> None:
    """Run the quantizer. `ranges`: a file that stores the calibrated ranges for further calls, if
    this version of ONNX Runtime supports it."""
    from onnxruntime import quantization
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # untyped
        """The quantizer requires a subclass of CalibrationDataReader."""

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return reader.get_next()

    types = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}
    methods = {
        "minmax": CalibrationMethod.MinMax,
        "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }
    options: dict[str, Any] = {}
    if (
        ranges is not None
        and "calibration_cache_path" in inspect.signature(quantize_static).parameters
    ):
        options["calibration_cache_path"] = ranges
    if settings.symmetric_activations:
        options["extra_options"] = {"ActivationSymmetric": True}
    quantize_static(
        str(prepared),
        str(output),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=settings.per_channel,
        reduce_range=settings.reduce_range,
        activation_type=types[settings.activation],
        weight_type=types[settings.weight],
        calibrate_method=methods[settings.method],
        nodes_to_quantize=list(only),
        nodes_to_exclude=list(settings.exclude),
        **options,
    )


def _is_quantized(proto: onnx.ModelProto) -> bool:
    return any("uantizeLinear" in node.op_type for node in proto.graph.node)


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress the quantizer's output and its warning about missing shapes, which were inferred
    before. `captured` would also suppress the caller's progress bar."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)
