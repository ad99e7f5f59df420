"""Write the static int8 twin with ONNX Runtime's quantizer."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
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
from gate.storage.record import Record

# Apart from the quantizer, so that params.yaml is read without onnx.


class QuantizeSettings(Record):
    """Every choice of the quantizer."""

    samples: Annotated[int, Field(ge=1)] = 128
    """Calibration samples: the ranges of the activations are taken from them."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    method: Literal["minmax", "entropy", "percentile"] = "minmax"
    """How a range is taken from the values that were seen."""
    per_channel: bool = True
    """A scale for each output channel of a weight, instead of one for the tensor."""
    reduce_range: bool = True
    """Seven bits for weights: processors without VNNI saturate products of eight, so that the same
    file would answer otherwise there."""
    activation: Literal["uint8", "int8"] = "uint8"
    weight: Literal["uint8", "int8"] = "int8"


# It is another model with other answers, and judged as such: by its own policy, beside the exact
# one.


Batches = Iterator[Mapping[str, NDArray[Any]]]
"""Arrays by the names of the file's inputs, shape (batch, ...)."""


@dataclass(frozen=True)
class Quantized:
    """A file that was quantized, and how."""

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

    `calibration` gives batches until `settings.samples` are used. `axes`: where the samples are in
    them; None: on axis 0. The same file, samples and
    settings give the same bytes. Raises OnnxFileError for a file that is none, ExportError where
    nothing can be calibrated, NothingQuantized, PackageBroken, StorageError; an older `output`
    stays then.
    """
    onnx_runtime()  # or the file would be blamed for it
    subject = read_subject(exact)
    if _is_quantized(onnx.load(str(exact), load_external_data=False)):
        raise ExportError(f"{exact} is quantized already. Give the exact file.")
    used = _Used(calibration, settings, subject, axes)
    with temporary_folder() as folder:
        prepared, made = Path(folder, "prepared.onnx"), Path(folder, "quantized.onnx")
        try:
            with _quiet():
                _prepare(exact, prepared)
                _quantize(prepared, used, made, settings)
        except Exception as error:
            raise ExportError(
                f"{exact} can't be quantized: {type(error).__name__}: {first_line(error)}. "
                "Check that the calibration samples fit the file's inputs and are finite."
            ) from error
        proto = onnx.load(str(made))
        if not _is_quantized(proto):
            raise NothingQuantized(
                f"nothing in {exact} could be quantized: it has no operator that the quantizer "
                "knows (Conv, MatMul, Gemm and others). Serve the exact file."
            )
        onnx.helper.set_model_props(proto, {**_props(proto), QUANTIZED_FROM: str(subject.sha256)})
        data = proto.SerializeToString(deterministic=True)
        made.write_bytes(data)
        twin = read_subject(made)  # valid, before it takes the place of an older one
        files.write_bytes(output, data)
    recorded = {
        **settings.to_plain(),
        "format": "QDQ",
        "calibration_samples": used.count,
        "calibration_sha256": str(used.digest()),
        "of_sha256": str(subject.sha256),
    }
    return Quantized(output, twin, ExportRecord(strategy="quantized", settings=recorded))


class _Used:
    """The calibration data as the quantizer reads it; counts and hashes what was used."""

    def __init__(
        self,
        batches: Batches,
        settings: QuantizeSettings,
        subject: Subject,
        axes: BatchAxes | None,
    ) -> None:
        self._batches, self._axes = batches, axes
        self._limit = settings.samples
        self._names = tuple(spec.name for spec in subject.inputs)
        self._used: list[str] = []
        self.count = 0

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """One batch by input names; None after the last."""
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
                f"{name} {array.dtype} {array.shape} {Digest.of_bytes(array.tobytes())}"
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
        """Of all that was used."""
        return Digest.of_json({"batches": self._used})


def _prepare(exact: Path, prepared: Path) -> None:
    """Shapes for the quantizer, and BatchNorms folded into convolutions."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(str(exact), str(prepared), skip_symbolic_shape=True)


def _quantize(prepared: Path, used: _Used, made: Path, settings: QuantizeSettings) -> None:
    from onnxruntime import quantization
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # untyped
        """The quantizer asks for this very class."""

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return used.get_next()

    types = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}
    methods = {
        "minmax": CalibrationMethod.MinMax,
        "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }
    quantize_static(
        str(prepared),
        str(made),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=settings.per_channel,
        reduce_range=settings.reduce_range,
        activation_type=types[settings.activation],
        weight_type=types[settings.weight],
        calibrate_method=methods[settings.method],
    )


def _is_quantized(proto: onnx.ModelProto) -> bool:
    return any("uantizeLinear" in node.op_type for node in proto.graph.node)


def _props(proto: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The quantizer prints what it does, and warns that shapes may be missing, which we have seen
    to. Not `captured`: it would swallow the caller's progress bar."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)
