"""Read the graph of the candidate: facts, and what a reviewer should know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, groupby

import onnx
from onnx import inliner, shape_inference

from gate.errors import OnnxFileError
from gate.onnxfile.candidate import Candidate
from gate.parity.graph.constants import Constants
from gate.parity.graph.contents import condense
from gate.parity.graph.external import external_data
from gate.parity.graph.interface import domain, fixed_batch, opset, unused_output, versions
from gate.parity.graph.modes import training_mode
from gate.parity.graph.precision import float16, float64, quantized
from gate.parity.graph.values import FlatGraph
from gate.parity.graph.weights import nonfinite_initializer, zero_initializer
from gate.parity.graph.witness import Witness
from gate.records.instruments import GraphFinding, GraphReport
from gate.storage.digest import Digest

_LISTED = 50
"""Findings of one kind that are kept; the last of them says how many more there are."""


def read_graph(candidate: Candidate, witness: Witness) -> GraphReport:
    """The graph of the candidate, its subgraphs and functions included, against the reference.

    Weights are read one at a time. Raises DigestMismatch, StorageError, OnnxFileError, and what
    onnx raises for a file that is no model.
    """
    subject, folder = candidate.subject, candidate.path.parent
    model = _parsed(candidate)
    initializers = len(model.graph.initializer) + len(model.graph.sparse_initializer)
    named = versions(model)
    if not named:
        raise OnnxFileError(
            f"{candidate.path} names no opset of the ONNX domain. Export the model again."
        )
    about_files = list(external_data(model, folder))
    constants = Constants(witness)
    ledger = condense(model, folder, subject.external_data, look=constants.look)
    graph = FlatGraph(_typed(model))
    about_weights, weights = constants.compare(graph, ledger)
    found = chain(
        training_mode(graph, witness),
        fixed_batch(subject, witness),
        zero_initializer(graph, ledger, witness),
        nonfinite_initializer(graph, ledger, witness),
        about_weights,
        float64(graph, witness),
        float16(graph, witness),
        quantized(graph, witness),
        about_files,
        unused_output(graph, subject),
        domain(graph),
        opset(named),
    )
    return GraphReport(
        nodes=len(graph.nodes),
        initializers=initializers,
        operators=dict(sorted(Counter(node.operator for node in graph.nodes).items())),
        external_data={name: str(Digest.of_file(folder / name)) for name in subject.external_data},
        findings=tuple(_limited(found)),
        weights=weights,
    )


def _parsed(candidate: Candidate) -> onnx.ModelProto:
    data = candidate.verified()
    if isinstance(data, str):
        return onnx.load(data, load_external_data=False)
    model: onnx.ModelProto = onnx.ModelProto.FromString(data)
    return model


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The condensed model without functions, with the types of all its values."""
    if model.functions:
        model = inliner.inline_local_functions(model, convert_version=True)
    return shape_inference.infer_shapes(model)


def _limited(findings: Iterable[GraphFinding]) -> Iterable[GraphFinding]:
    for _, group in groupby(findings, key=lambda finding: finding.code):
        together = list(group)
        kept, more = together[:_LISTED], len(together) - _LISTED
        if more > 0:
            last = kept[-1]
            detail = f"{last.detail}; and {more} more"
            kept[-1] = last.model_copy(update={"detail": detail})
        yield from kept
