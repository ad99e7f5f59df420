"""Read the graph, compare the weights, report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from typing import Any

import onnx
import onnxruntime
from onnx import TensorProto, helper, shape_inference

from gate.errors import describe_failure
from gate.measure.context import MeasurementContext
from gate.measure.job import MeasurementJob
from gate.measure.runtime_measurement import RuntimeMeasurement
from gate.onnx_file.reading import (
    DOMAIN,
    STANDARD_DOMAINS,
    inline_functions,
    is_of_runtime,
    load_graph,
)
from gate.onnx_file.sessions import open_on_cpu
from gate.onnx_file.tested_file import TestedFile
from gate.records.evidence import BatchAxes, Subject, batch_sizes
from gate.records.instruments import GraphFinding, GraphReport
from gate.storage.digest import Digest
from gate.weights.findings import (
    external_data,
    finding,
    float16,
    float64,
    most_common,
    nonfinite_initializer,
    quantized,
    training_mode,
    zero_initializer,
)
from gate.weights.matching import Constants
from gate.weights.model_tensors import ReferenceObserver
from gate.weights.value_graph import GraphValue, ValueGraph, condense

_OLDEST_OPSET = 13


def fixed_batch(
    subject: Subject, observer: ReferenceObserver, axes: BatchAxes | None = None
) -> Iterator[GraphFinding]:
    """Yield inputs with a fixed batch axis, and outputs with one although the model has none.

    Batch sizes that are baked in elsewhere, such as in a reshape, are left to the probes. axes: the
    batch axes; None: axis 0 of all inputs and outputs.
    """
    fixed = {
        name: rows
        for name, rows in batch_sizes(subject.inputs, axes).items()
        if isinstance(rows, int)
    }
    for name, rows in fixed.items():
        yield finding("fixed_batch", name, "fixed_input", rows=rows)
    sizes = batch_sizes(subject.outputs, axes)
    declared = [size if isinstance(size := sizes[o.name], int) else None for o in subject.outputs]
    if all(size is None for size in declared):
        return
    for spec, size, rows_out in zip(subject.outputs, declared, observer.rows, strict=False):
        # If there are as many samples as rows, the axis may or may not be the batch.
        if size is not None and rows_out == observer.samples and (fixed or size != rows_out):
            yield finding("fixed_batch", spec.name, "fixed_output", rows=size)


def unused_output(graph: ValueGraph, subject: Subject) -> Iterator[GraphFinding]:
    """Yield inputs, initializers and nodes on which no output of the file depends."""
    used = {value.name for value in graph.live_values if value.scope == 0}
    for spec in subject.inputs:
        if spec.name not in used:
            yield finding("unused_output", spec.name, "unused", kind="input")
    for value in graph.tensors:
        if value not in graph.live_values and value not in graph.producers:
            yield finding("unused_output", value.name, "unused", kind="initializer")
    for node in graph.nodes:
        if not graph.is_live(node):
            yield finding("unused_output", node.location, "unused", kind="node")


def domain(graph: ValueGraph) -> Iterator[GraphFinding]:
    """Yield the numbers of operators outside of the standard domain, by domain."""
    counts_by_domain: dict[str, Counter[str]] = {}
    for node in graph.nodes:
        is_builtin = is_of_runtime(node.proto, opset=graph.opset)
        name = DOMAIN if is_builtin else node.proto.domain
        if name not in STANDARD_DOMAINS:
            counts_by_domain.setdefault(name, Counter())[node.proto.op_type] += 1
    for name, counts in sorted(counts_by_domain.items()):
        operators = most_common(counts)
        yield finding("domain", name, "domain", count=counts.total(), operators=operators)


def opset(versions: Sequence[int]) -> Iterator[GraphFinding]:
    """Yield problems of the standard domain's versions in the model and its functions."""
    if not versions:  # a model with operators of ai.onnx.ml only
        return
    oldest, newest, location = min(versions), max(versions), "opset_import"
    if newest > oldest:
        yield finding("opset", location, "several_opsets", versions=sorted(set(versions)))
    if oldest < _OLDEST_OPSET:
        yield finding("opset", location, "old_opset", version=oldest, oldest=_OLDEST_OPSET)
    if newest > _OLDEST_OPSET and not _is_supported_opset(newest):
        installed = onnxruntime.__version__
        yield finding("opset", location, "new_opset", version=newest, installed=installed)


def checker(subject: Subject, name: str) -> Iterator[GraphFinding]:
    """Yield the error of onnx's checker, if it rejects the file."""
    if subject.checker is not None:
        yield finding("checker", name, "checker", reason=subject.checker.rstrip("."))


@cache
def _is_supported_opset(version: int) -> bool:
    """Return whether the installed ONNX Runtime loads a model of this opset."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
    model.ir_version = 8  # old, so that only the opset can be refused
    try:
        open_on_cpu(model.SerializeToString())
    except Exception:
        return False
    return True


def versions(model: onnx.ModelProto) -> list[int]:
    """Return the versions of the standard domain in the model and its functions."""
    imports = [*model.opset_import, *(o for f in model.functions for o in f.opset_import)]
    return [int(entry.version) for entry in imports if entry.domain in STANDARD_DOMAINS]


_MAX_LISTED = 50
"""Maximum number of findings of one kind; the last one has the number of omitted findings."""


class WeightInstrument:
    """The instrument that reads the graph and compares the weights."""

    needs_runtimes = False
    title = "weights"
    cost = 0

    def __init__(self, context: MeasurementContext) -> None:
        self._context = context
        self._report: GraphReport | None = None
        self._failure: str | None = None

    @staticmethod
    def is_enabled(job: MeasurementJob) -> bool:
        """Return whether the policy enables it. Each part of a release gets a separate report."""
        return job.chained is None and job.policy.instruments.graph

    def run(self, _runtimes: Sequence[RuntimeMeasurement], _advance: Callable[[int], None]) -> None:
        """Read the graph. The reference is run at most once."""
        context = self._context
        try:
            observer = ReferenceObserver(
                context.model.module, context.reference.run, context.example
            )
            axes = context.binding.layout
            self._report = read_graph(context.tested_file, observer, axes=axes)
        except Exception as error:
            self._failure = describe_failure(error)

    def evidence(self) -> Mapping[str, Any]:
        """Return the report and the reason why there is none."""
        return {"graph": self._report, "graph_unread": self._failure}


def read_graph(
    candidate: TestedFile, observer: ReferenceObserver, *, axes: BatchAxes | None = None
) -> GraphReport:
    """Compare the graph of a file, including subgraphs and functions, with the reference.

    Weights are read one at a time. axes: the batch axes; None: axis 0 of all inputs and outputs.
    Raises DigestMismatch, StorageError, and the exceptions of onnx for a file that is not a model.
    """
    subject, folder = candidate.subject, candidate.path.parent
    model = load_graph(candidate.verified())
    initializers = len(model.graph.initializer) + len(model.graph.sparse_initializer)
    file_findings = list(external_data(model, folder))
    constants = Constants(observer)
    dropped = condense(model, folder, subject.external_data, match=constants.match_constant)
    graph = ValueGraph(_with_types(model))
    weight_findings, weights = constants.compare(graph, dropped)
    findings = chain(
        training_mode(graph, observer),
        fixed_batch(subject, observer, axes),
        zero_initializer(graph, dropped, observer),
        nonfinite_initializer(graph, dropped, observer),
        weight_findings,
        float64(graph, observer),
        float16(graph, observer),
        quantized(graph, observer),
        file_findings,
        unused_output(graph, subject),
        domain(graph),
        opset(versions(model)),
        checker(subject, candidate.path.name),
    )
    return GraphReport(
        nodes=len(graph.nodes),
        initializers=initializers,
        operators=dict(sorted(Counter(node.operator for node in graph.nodes).items())),
        external_data={
            name: str(Digest.from_file(folder / name)) for name in subject.external_data
        },
        findings=tuple(_limit(findings)),
        weights=weights,
        last_operators={value.name: last_operators(graph, value) for value in graph.outputs},
    )


_MOVING_OPERATORS = frozenset(
    {
        "Add", "Cast", "Concat", "Div", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
        "Identity", "Mul", "Neg", "ReduceMean", "ReduceSum", "Reshape", "Slice", "Split", "Squeeze",
        "Sub", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Operators that move, scale or sum values."""


def last_operators(graph: ValueGraph, output: GraphValue) -> tuple[str, ...]:
    """Return the last operators before an output that do more than move, scale or sum values."""
    operators: set[str] = set()
    visited: set[GraphValue] = set()
    pending = [output]
    while pending:
        value = pending.pop()
        node = graph.producers.get(value)
        if node is None or value in visited:
            continue
        visited.add(value)
        if node.operator in _MOVING_OPERATORS or node.branches:
            pending += [source for source in (*node.inputs, *node.branches) if source is not None]
        else:
            operators.add(node.operator)
    return tuple(sorted(operators))


def _with_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the condensed model without functions, with the types of all values."""
    if model.functions:
        model = inline_functions(model)
    return shape_inference.infer_shapes(model)


def _limit(findings: Iterable[GraphFinding]) -> Iterable[GraphFinding]:
    for _, group in groupby(findings, key=lambda finding: finding.code):
        findings_of_code = list(group)
        listed, more = findings_of_code[:_MAX_LISTED], len(findings_of_code) - _MAX_LISTED
        if more > 0:
            last = listed[-1]
            params = {**last.detail_params, "more": more}
            listed[-1] = last.model_copy(update={"detail_params": params})
        yield from listed
