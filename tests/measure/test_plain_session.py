"""Files that ONNX Runtime can't open without optimizations are measured with optimizations."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate import Evidence, MeasurementJob, SampleSet, Verdict, decide
from gate.api import measure_job
from gate.errors import EvidenceError
from gate.onnx_file import sessions
from tests import builders
from tests.measure import tiny
from tests.modules import Function

CPU_RUNTIMES = ("ort-cpu", "ort-cpu-optimized")
OFF, BASIC, ALL = "ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"


@pytest.fixture
def fail_sessions(monkeypatch):
    """Return a function that makes sessions of some levels fail, as NFNet does in the CUDA
    provider.
    """

    def at(*levels: str) -> None:
        create_session = sessions.create_session

        def create(file, *, options=None, **more):
            if options.graph_optimization_level.name in levels and options.enable_profiling:
                raise Exception("[ONNXRuntimeError] : 1 : FAIL : Exception during initialization")
            return create_session(file, options=options, **more)

        monkeypatch.setattr(sessions, "create_session", create)

    return at


def measure_and_decide(
    model, good, *names
) -> tuple[Evidence, dict[tuple[str, str], Verdict], Verdict]:
    policy = tiny.policy(*names)
    measured = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy))
    evidence = tiny.stored(measured)
    decision = decide(policy, evidence, decided_at="now")
    checks = {(c.runtime, c.name): c.verdict for c in decision.checks if c.runtime}
    return evidence, checks, decision.verdict


@pytest.mark.parametrize(("levels", "waived"), [((OFF,), "session"), ((OFF, BASIC), "runtime")])
def test_failing_plain_session_is_replaced(model, good, fail_sessions, levels, waived):
    """Use basic optimizations, or decide by the optimized session if those fail too."""
    fail_sessions(*levels)
    evidence, checks, verdict = measure_and_decide(model, good, *CPU_RUNTIMES)
    plain = evidence.runtime("ort-cpu")
    failure = plain.failure if BASIC in levels else plain.plain_failure
    assert "Exception during initialization" in failure
    assert (checks["ort-cpu", waived], verdict) == (Verdict.WAIVED, Verdict.PASS)
    if BASIC in levels:
        assert plain.outputs == ()
    else:
        assert (plain.failure, bool(plain.outputs)) == (None, True)
        assert plain.session_options["graph_optimization_level"] == BASIC


@pytest.mark.parametrize("levels", [(ALL,), (OFF, ALL), (OFF, BASIC, ALL)])
def test_failing_optimized_session_fails(model, good, fail_sessions, levels):
    fail_sessions(*levels)
    _, checks, verdict = measure_and_decide(model, good, *CPU_RUNTIMES)
    assert checks["ort-cpu-optimized", "runtime"] is Verdict.FAIL
    assert verdict is Verdict.FAIL


@pytest.mark.parametrize("levels", [(OFF,), (OFF, BASIC)])
def test_failing_plain_session_without_optimized_runtime_fails(model, good, fail_sessions, levels):
    fail_sessions(*levels)
    assert measure_and_decide(model, good, "ort-cpu")[2] is Verdict.FAIL


NAMES = ("ort-cpu", "ort-cpu-optimized", "ort-cuda", "ort-cuda-optimized")


@pytest.mark.parametrize(("served", "verdict"), [
    ({}, Verdict.PASS),
    ({"outputs": (builders.output_parity(max_abs_diff=1.0),)}, Verdict.FAIL),
    ({"outputs": (), "failure": "boom"}, Verdict.FAIL),
    ({"outputs": (), "absent_reason": "no device"}, Verdict.FAIL),
])  # fmt: skip
def test_optimized_cuda_session_decides(served, verdict):
    plain = {"outputs": (), "failure": "Fail: initialization", "plain_failure": "Fail: init"}
    changed = {"ort-cuda": plain, "ort-cuda-optimized": served}
    runtimes = tuple(builders.runtime_evidence(n, **changed.get(n, {})) for n in NAMES)
    runtimes += (builders.absent("torch-cuda"),)
    evidence = builders.evidence(runtimes=runtimes)
    assert decide(builders.policy(), evidence, decided_at="now").verdict is verdict


def test_lower_optimization_level_without_failure_fails():
    options = builders.runtime_evidence("ort-cuda").session_options
    options = {**options, "graph_optimization_level": BASIC}
    runtimes = tuple(
        builders.runtime_evidence(n, **({"session_options": options} if n == "ort-cuda" else {}))
        for n in NAMES
    )
    evidence = builders.evidence(runtimes=(*runtimes, builders.absent("torch-cuda")))
    assert decide(builders.policy(), evidence, decided_at="now").verdict is Verdict.FAIL


class Double(nn.Module):
    """A convolution in float64, for which ONNX Runtime has no CPU kernel.

    `whole`: the output is float64 too.
    """

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1, bias=False)
        self.whole = whole

    def forward(self, x):
        y = nn.functional.conv2d(x.double(), self.conv.weight.double()).mean((2, 3))
        return y if self.whole else y.float()


@pytest.mark.parametrize("whole", [True, False])
def test_float64_operator_without_kernel_suggests_float32(tmp_path, whole):
    model = Double(whole=whole).eval()
    kind = TensorProto.DOUBLE if whole else TensorProto.FLOAT
    nodes = [
        *([] if whole else [helper.make_node("Cast", ["input"], ["d"], "cast", to=11)]),
        helper.make_node("Conv", ["input" if whole else "d", "w"], ["c"], "conv"),
        helper.make_node("ReduceMean", ["c"], ["m"], "mean", axes=[2, 3], keepdims=0),
        helper.make_node("Cast", ["m"], ["logits"], "last", to=kind),
    ]
    values = [
        helper.make_tensor_value_info("input", kind, ["batch", 3, 8, 8]),
        helper.make_tensor_value_info("logits", kind, ["batch", 2]),
    ]
    weight = numpy_helper.from_array(model.conv.weight.detach().double().numpy(), "w")
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)  # fmt: skip
    images = tiny.images(8).astype(np.float64 if whole else np.float32)
    job = MeasurementJob(
        model,
        tiny.candidate(path),
        SampleSet.from_arrays({"input": images}),
        policy=tiny.policy("ort-cpu"),
    )
    assert model(torch.from_numpy(images)).shape == (8, 2)
    with pytest.raises(EvidenceError, match=r"Conv in float64 .*float32"):
        measure_job(job)


def test_bfloat16_operator_without_kernel_suggests_another_dtype(tmp_path):
    """Inputs and outputs are float32; only the node computes in bfloat16."""
    nodes = [
        helper.make_node("Cast", ["input"], ["b"], "cast", to=TensorProto.BFLOAT16),
        helper.make_node("Mul", ["b", "b"], ["m"], "mul"),
        helper.make_node("Cast", ["m"], ["logits"], "last", to=TensorProto.FLOAT),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4])
        for name in ("input", "logits")
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)  # fmt: skip
    job = MeasurementJob(
        Function(lambda x: (x.bfloat16() * x.bfloat16()).float()),
        tiny.candidate(path),
        SampleSet.from_arrays({"input": np.ones((8, 4), np.float32)}),
        policy=tiny.policy("ort-cpu"),
    )
    with pytest.raises(EvidenceError, match=r"Mul in bfloat16 .*float32"):
        measure_job(job)
