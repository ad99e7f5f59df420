"""Is the written file the one that was asked for: names, opset, dynamic axes, known operators?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from gate.errors import OnnxFileError
from gate.export.request import Request
from gate.export.strategies.exporter import RungFailed
from gate.onnxfile.subject import read_subject, verify_file
from gate.onnxfile.walk import nodes_within
from gate.records.evidence import TensorSpec
from gate.records.strategy import ExportSettings

_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")
"""Those that every build of ONNX Runtime carries."""
_MOST = 8


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
    if request.settings.operator_export_type == "ONNX" and (foreign := foreign_objection(path)):
        raise RungFailed.because(*foreign)
    _check_domains(path, request.settings.custom_opsets)
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


def foreign_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """`domain::operator at node` for each node that no runtime brings and no function of the file
    defines, subgraphs and the file's own functions included."""
    defined = {(function.domain, function.name) for function in model.functions}
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    return tuple(
        f"{node.domain}::{node.op_type} at {node.name or 'a node without name'}"
        for body in bodies
        for node in nodes_within(body)
        if node.domain not in _DOMAINS and (node.domain, node.op_type) not in defined
    )


def foreign_objection(path: Path) -> tuple[str, str] | None:
    """Cause and remedy, if the ONNX file `path` has an operator that ONNX Runtime can't run."""
    found = foreign_operators(onnx.load(path, load_external_data=False))
    if not found:
        return None
    return (
        f"the file needs operators that ONNX Runtime does not have: {_listed(found)}",
        "Write them by ONNX's own operators in the symbolic function, see "
        "docs/custom-operators.md.",
    )


def unplain(path: Path, settings: ExportSettings) -> tuple[str, ...]:
    """A hazard in words, where another `operator_export_type` than ONNX was asked for."""
    chosen = settings.operator_export_type
    if chosen == "ONNX":
        return ()
    found = foreign_operators(onnx.load(path, load_external_data=False))
    if not found:
        return (
            f"operator_export_type {chosen} changed nothing: all operators are plain ONNX. "
            "Leave it out",
        )
    return (
        f"the file is no plain ONNX, as operator_export_type {chosen} allows: {_listed(found)}. No "
        "runtime of the gate runs it, and nothing of it was checked",
    )


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def _check_domains(path: Path, wanted: Mapping[str, int]) -> None:
    """The exporter leaves out what the file does not use, in silence."""
    if not wanted:
        return
    model = onnx.load(path, load_external_data=False)
    written = {entry.domain: entry.version for entry in model.opset_import}
    for domain, version in wanted.items():
        if written.get(domain) != version:
            has = ", ".join(sorted(f"{name or 'ai.onnx'}: {v}" for name, v in written.items()))
            raise RungFailed.because(
                f"the file uses the domains {{{has}}}, expected {domain}: {version} as "
                "export.custom_opsets says",
                f"Leave {domain} out of it, or write an operator of it in custom_symbolics.",
            )


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
