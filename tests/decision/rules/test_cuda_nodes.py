"""Nodes on the CPU though CUDA was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gate.decision.catalog import cause_for
from gate.decision.check_result import Verdict
from gate.decision.cuda_kernels import cuda_kernels
from gate.decision.decide import decide
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER, CpuNode
from gate.summary.render import render_check
from tests import builders

ATAN = CpuNode(name="Atan:/Atan", operator="Atan", since_version=7, inputs=("float",))
ARGMAX = CpuNode(name="ArgMax:/m/ArgMax", operator="ArgMax", since_version=13, inputs=("int64",))
STFT = CpuNode(name="STFT:stft", operator="STFT", since_version=17)
RELU = CpuNode(name="Relu:/Relu", operator="Relu", since_version=14, inputs=("float",))
CONV = CpuNode(name="Conv:/Conv", operator="Conv", since_version=11, inputs=("float", "float"))
EINSUM = CpuNode(name="Einsum:e", operator="Einsum", since_version=12, inputs=("int64", "int64"))
FUSED = CpuNode(name="FusedGemm:g", operator="com.microsoft::FusedGemm", since_version=1)
NCHW = CpuNode(name="Conv:c", operator="com.microsoft.nchwc::Conv")
REORDER = CpuNode(name="ReorderOutput:r", operator="com.microsoft.nchwc::ReorderOutput")
OWN = CpuNode(name="Fold:f", operator="acme::Fold", since_version=1)


def ran(*nodes: CpuNode, shapes: int = 0, **fields: object) -> RuntimeEvidence:
    return builders.runtime_evidence(
        "ort-cuda",
        **{
            "nodes_per_provider": {CUDA_PROVIDER: 40, CPU_PROVIDER: shapes + len(nodes)},
            "fallback_nodes": tuple(node.name for node in nodes),
            "cpu_nodes": nodes,
            "cpu_time_share": 0.125,
            **fields,
        },
    )


def measured(runtime: RuntimeEvidence, **fields: object) -> Evidence:
    return builders.evidence(
        runtimes=(
            *builders.evidence().runtimes[:3],
            runtime,
            builders.absent("ort-cuda-optimized"),
        ),
        **fields,
    )


def provider(evidence: Evidence):
    decision = decide(builders.policy(), evidence, decided_at="now")
    (check,) = [
        c for c in decision.checks if (c.name, c.runtime) == ("provider", "ort-cuda")
    ]  # fmt: skip
    return decision, check


@pytest.mark.parametrize(
    ("nodes", "passes"),
    [
        ((), True),
        ((ATAN,), True),
        ((ARGMAX, STFT), True),
        ((RELU,), False),
        ((ATAN, RELU), False),
        ((ATAN, CONV), False),
        ((EINSUM,), False),
        ((OWN,), False),
        ((ARGMAX.model_copy(update={"inputs": ("float",)}),), False),
        ((ARGMAX.model_copy(update={"inputs": ()}),), False),
        ((ATAN.model_copy(update={"since_version": None}),), False),
        ((CpuNode(name="LSTM:l", operator="LSTM", since_version=1),), False),
        ((CpuNode(name="MultiHeadAttention:a", operator="com.microsoft::MultiHeadAttention", since_version=1, inputs=("double",)),), False),
    ],
)  # fmt: skip
def test_only_nodes_without_a_kernel_may_run_on_the_cpu(nodes, passes):
    decision, check = provider(measured(ran(*nodes, shapes=9)))
    assert (check.verdict is Verdict.PASS) is passes
    assert (decision.verdict is Verdict.PASS) is passes
    wording = render_check(check) if passes else str(render_check(check, "remedy"))
    assert ("Warning" if passes else f"providers: [{CUDA_PROVIDER}, {CPU_PROVIDER}]") in wording


@pytest.mark.parametrize(
    ("version", "passes"),
    [("1.31.1", True), ("1.31.0", True), ("1.22.0", True), ("1.40.0", False), ("2.0", False)],
)
def test_the_table_says_nothing_of_later_versions(version, passes):
    environment = builders.evidence().environment
    versions = {**environment.versions, "onnxruntime": version}
    environment = environment.model_copy(update={"versions": versions})
    _, check = provider(measured(ran(ATAN), environment=environment))
    assert (check.verdict is Verdict.PASS) is passes


def test_evidence_of_before_is_refused_as_before():
    old = ran(ATAN, cpu_nodes=(), cpu_time_share=None)
    _, check = provider(measured(old))
    assert check.verdict is Verdict.FAIL


def test_time_decides_nothing():
    for share in (1e-6, 0.999):
        assert provider(measured(ran(RELU, cpu_time_share=share)))[1].verdict is Verdict.FAIL
        assert provider(measured(ran(ATAN, cpu_time_share=share)))[1].verdict is Verdict.PASS


@pytest.mark.parametrize("node", [FUSED, NCHW, REORDER])
def test_a_file_that_was_optimized_for_the_cpu_has_that_cause(node):
    graph = builders.graph_report(operators={"Relu": 3, node.operator: 1})
    for evidence, cause in (
        (measured(ran(RELU, node), graph=graph), "cpu_optimized"),
        (measured(ran(RELU, node)), "device"),  # ONNX Runtime made it of a node that fell back
        (measured(ran(RELU), graph=graph), "device"),
    ):
        _, check = provider(evidence)
        assert check.verdict is Verdict.FAIL
        assert cause_for(check) == cause


def test_the_table_is_that_of_the_pinned_version():
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^onnxruntime-gpu==(\S+)$", pins, re.MULTILINE)
    assert cuda_kernels().version == pinned


@pytest.mark.parametrize(
    ("operator", "since", "inputs", "lacks"),
    [
        ("Add", 14, ("float", "float"), False),
        ("Add", 14, ("bool", "bool"), True),
        ("Add", 7, ("float", "float"), False),
        ("Atan", 22, ("float",), True),
        ("ArgMax", 13, ("int64",), True),
        ("ArgMax", 13, ("float",), False),
        ("Gather", 13, ("float", "int64"), False),
        ("Gather", 99, ("float", "int64"), True),  # an open range is of its first version alone
        ("com.microsoft::Attention", 1, ("float",), False),
        ("com.microsoft::FusedGemm", 1, ("float",), True),
    ],
)
def test_kernels_by_type_and_version(operator, since, inputs, lacks):
    node = CpuNode(name="n", operator=operator, since_version=since, inputs=inputs)
    assert cuda_kernels().lacks_kernel(node, "1.31.1") is lacks
