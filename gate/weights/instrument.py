"""How the graph meets the world: its batch axis, what it leaves unused, what it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import onnx
import onnxruntime
from onnx import TensorProto, helper

from gate.onnxfile.runtime_operators import DOMAIN, is_of_runtime
from gate.onnxfile.session import open_on_cpu
from gate.parity.graph.values import STANDARD, FlatGraph
from gate.parity.graph.witness import Witness
from gate.records.evidence import Subject, TensorSpec
from gate.records.instruments import GraphFinding

_OLDEST = 13


def fixed_batch(subject: Subject, witness: Witness) -> Iterator[GraphFinding]:
    """Inputs with a fixed first axis, and outputs of which the model returns one row a sample.

    A batch size that is baked in deeper, such as in a reshape, is left to the probes.
    """
    fixed = [spec for spec in subject.inputs if _rows(spec) is not None]
    for spec in fixed:
        detail = f"the input takes {_rows(spec)} samples, no more and no less"
        yield GraphFinding(code="fixed_batch", place=spec.name, detail=detail)
    declared = [_rows(spec) for spec in subject.outputs]
    if all(rows is None for rows in declared):
        return
    for spec, rows, returned in zip(subject.outputs, declared, witness.rows, strict=False):
        # For as many samples as rows nobody can tell whether the axis follows the batch.
        if rows is not None and returned == witness.samples and (fixed or rows != returned):
            detail = f"the output has {rows} rows, the model returns one for each sample"
            yield GraphFinding(code="fixed_batch", place=spec.name, detail=detail)


def unused_output(graph: FlatGraph, subject: Subject) -> Iterator[GraphFinding]:
    """Inputs, initializers and nodes on which no output of the file depends."""
    used = {value.name for value in graph.live_values if value.scope == 0}
    for spec in subject.inputs:
        if spec.name not in used:
            yield _unused(spec.name, "input")
    for value in graph.tensors:
        if value not in graph.live_values and value not in graph.makers:
            yield _unused(value.name, "initializer")
    for node in graph.nodes:
        if not graph.is_live(node):
            yield _unused(node.place, "node")


def domain(graph: FlatGraph) -> Iterator[GraphFinding]:
    """Operators outside of the standard domain, counted by domain."""
    foreign: dict[str, Counter[str]] = {}
    for node in graph.nodes:
        own = is_of_runtime(node.proto, opset=graph.opset)
        name = DOMAIN if own else node.proto.domain
        if name not in STANDARD:
            foreign.setdefault(name, Counter())[node.proto.op_type] += 1
    for name, counts in sorted(foreign.items()):
        shown = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(5))
        detail = f"{counts.total()} nodes need this domain: {shown}"
        yield GraphFinding(code="domain", place=name, detail=detail)


def opset(versions: Sequence[int]) -> Iterator[GraphFinding]:
    """Versions of the standard domain, of the model and of its functions, that are out of place."""
    newest = max(versions)
    if len(set(versions)) > 1:
        detail = f"the file names several versions: {', '.join(map(str, sorted(set(versions))))}"
        yield GraphFinding(code="opset", place="opset_import", detail=detail)
    if min(versions) < _OLDEST:
        detail = f"version {min(versions)} is older than {_OLDEST}"
        yield GraphFinding(code="opset", place="opset_import", detail=detail)
    if newest > _OLDEST and not _runs(newest):
        detail = f"ONNX Runtime {onnxruntime.__version__} does not run version {newest}"
        yield GraphFinding(code="opset", place="opset_import", detail=detail)


@cache
def _runs(version: int) -> bool:
    """True if the installed ONNX Runtime loads a model of this opset."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    same = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [same])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
    model.ir_version = 8  # old, so that only the opset can be refused
    try:
        open_on_cpu(model.SerializeToString())
    except Exception:
        return False
    return True


def versions(model: onnx.ModelProto) -> list[int]:
    """The versions of the standard domain that the model and its functions name."""
    imports = [*model.opset_import, *(o for f in model.functions for o in f.opset_import)]
    return [int(entry.version) for entry in imports if entry.domain in STANDARD]


def _unused(place: str, what: str) -> GraphFinding:
    detail = f"no output depends on this {what}"
    return GraphFinding(code="unused_output", place=place, detail=detail)


def _rows(spec: TensorSpec) -> int | None:
    """The fixed size of the first axis, None if it is dynamic or there is none."""
    first = spec.shape[0] if spec.shape else None
    return first if isinstance(first, int) else None
