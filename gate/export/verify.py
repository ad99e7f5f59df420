"""Is the written file the one that was asked for: names, opset, dynamic axes?"""

from __future__ import annotations

from pathlib import Path

from gate.errors import OnnxFileError
from gate.export.foreign import foreign_objection
from gate.export.request import Request
from gate.export.strategies.exporter import RungFailed
from gate.onnxfile.subject import read_subject, verify_file
from gate.records.evidence import TensorSpec


def verified(path: Path, request: Request, *, opset: int) -> None:
    """Check the file `path` against the request. Raises RungFailed."""
    try:
        subject = read_subject(path)
    except OnnxFileError as error:
        raise _invalid(error, path) from error
    if subject.opset != opset:
        raise RungFailed.because(
            f"the file is written in opset {subject.opset}, expected opset {opset}",
            f"Set export.opset to {subject.opset}, or to auto for the lowest that works.",
            since=subject.opset if subject.opset > opset else None,
        )
    try:
        verify_file(path, opset=opset)
    except OnnxFileError as error:
        raise _invalid(error, path) from error
    if foreign := foreign_objection(path):
        raise RungFailed.because(*foreign)
    inputs = tuple(spec.name for spec in subject.inputs)
    if request.settings.export_params and inputs != request.input_names:
        raise RungFailed.because(
            f"the exported file has the inputs {list(inputs)}, expected "
            f"{list(request.input_names)}: forward ignores an argument",
            "Leave the argument out of the example, or use it in forward.",
        )
    outputs = [spec.name for spec in subject.outputs]
    if tuple(outputs) != request.output_names:
        raise RungFailed.because(
            f"the exported file has the outputs {outputs}, expected {list(request.output_names)}",
            "Name what forward returns, in its order, or set export.output_names: null.",
        )
    for spec in (*subject.inputs, *subject.outputs):
        _check_dynamic(spec, request)


def _check_dynamic(spec: TensorSpec, request: Request) -> None:
    for axis, label in request.axes.get(spec.name, {}).items():
        if axis >= len(spec.shape) or isinstance(spec.shape[axis], str):
            continue
        place = "first axis" if axis == 0 else f"axis {axis}"
        raise RungFailed.because(
            f"{spec.name} has the shape {list(spec.shape)} in the file, expected a dynamic "
            f"{place} ({label}): forward fixes its size (len(x), int(x.shape[{axis}]))",
            f"Use -1 or x.shape[{axis}] as it is.",
        )


def _invalid(error: OnnxFileError, path: Path) -> RungFailed:
    # The name of the temporary file would tell nobody anything.
    cause, _, remedy = str(error).replace(str(path), path.name).rstrip(".").rpartition(". ")
    cause = cause or str(error)
    return RungFailed.because(f"the exporter wrote a file that is not valid: {cause}", f"{remedy}.")
