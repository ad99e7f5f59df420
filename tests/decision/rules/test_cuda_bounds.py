"""What CUDA alone refuses by the built-in policy: numbers that an H200 gave (docs/cuda.md)."""

from __future__ import annotations

import pytest

from gate.decision.check_result import Verdict
from gate.decision.decide import decide
from gate.policy.defaults import exact_bounds
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.runtime import CPU_PROVIDER
from gate.weights.instrument import last_operators
from gate.weights.value_graph import ValueGraph
from tests import builders
from tests.onnx_file.test_shape_nodes import model, node

CUDA = ("ort-cuda", "ort-cuda-optimized")


def output(ratio: float, name: str = "logits"):
    noise = builders.noise_parity(ratio=ratio, peak=ratio, diff=ratio, candidate_rms=ratio * 1e-6)
    return builders.output_parity(name=name, noise=noise)


def judged(name: str, ratio: float, policy: Policy | None = None, **fields):
    runtimes = [
        builders.runtime_evidence(each, **({"outputs": (output(ratio),)} if each == name else {}))
        for each in ("torch-cuda", "ort-cpu", "ort-cpu-optimized", *CUDA)
    ]
    measured = builders.evidence(runtimes=tuple(runtimes), **fields)
    return decide(policy or Policy.default(), measured, decided_at="now")


FAULTS = {
    "RMSNorm epsilon 1e-8 for 1e-6": 2.4,
    "a float16 bias": 5.0,
    "BatchNorm mean off by 2e-5": 6.4,
    "BatchNorm epsilon 1.2e-5 for 1e-5": 9.2,
    "RMSNorm epsilon 1e-5 for 1e-6": 20.7,
    "TF32": 569.0,
}


@pytest.mark.parametrize("name", CUDA)
@pytest.mark.parametrize("fault", FAULTS)
def test_cuda_alone_refuses_what_cuda_shows(name, fault):
    decision = judged(name, FAULTS[fault])
    refused = {(c.runtime, c.name) for c in decision.problems if c.output}
    assert decision.verdict is Verdict.FAIL
    assert (name, "noise_ratio") in refused
    assert {runtime for runtime, _ in refused} == {name}


@pytest.mark.parametrize("name", CUDA)
@pytest.mark.parametrize("ratio", [0.6, 1.03, 1.22, 1.6, 2.0])
def test_correct_files_pass(name, ratio):
    assert judged(name, ratio).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("last", "ratio", "passes"),
    [
        (None, 5.7, True),  # evidence of before: any operator of the file
        (("LogSoftmax",), 5.7, True),
        (("LogSoftmax",), 9.2, False),
        (("Gemm",), 5.7, False),
        ((), 5.7, False),
    ],
)
def test_log_softmax_is_less_exact(last, ratio, passes):
    operators = {"Gemm": 1, "LogSoftmax": 1}
    ends = {} if last is None else {"last_operators": {"logits": last}}
    graph = builders.graph_report(operators=operators, nodes=2, **ends)
    decision = judged("ort-cuda", ratio, graph=graph)
    assert (decision.verdict is Verdict.PASS) is passes
    assert judged("ort-cpu", 5.7, graph=graph).verdict is Verdict.FAIL


def test_without_the_operator_there_is_no_exception():
    assert judged("ort-cuda", 5.7).verdict is Verdict.FAIL


def stated(**torch) -> Policy:
    bounds = exact_bounds("cpu", classes=True)
    return Policy(
        runtimes={
            "ort-cpu": RuntimePolicy(required="always", bounds=bounds),
            "ort-cuda": RuntimePolicy(
                required="when_present", bounds=exact_bounds("device", classes=True)
            ),
            "torch-cuda": RuntimePolicy(required="when_present", bounds=bounds, **torch),
        }
    )


def test_bounds_that_a_policy_states_mean_what_they_say():
    assert judged("ort-cuda", 20.7, stated()).verdict is Verdict.PASS
    assert judged("ort-cuda", 40.0, stated()).verdict is Verdict.FAIL
    graph = builders.graph_report(operators={"LogSoftmax": 1}, nodes=1)
    assert judged("ort-cpu", 1.9, stated(), graph=graph).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        (Policy.default(), Verdict.PASS),
        (Policy.reduced(), Verdict.PASS),
        (stated(exceeded="warn"), Verdict.PASS),
        (stated(), Verdict.FAIL),
    ],
)
def test_how_far_pytorch_moves_refuses_a_file_only_where_the_policy_says_so(policy, verdict):
    decision = judged("torch-cuda", 1e6, policy)
    assert decision.verdict is verdict
    (check,) = [
        c for c in decision.checks if (c.runtime, c.name) == ("torch-cuda", "noise_ratio")
    ]  # fmt: skip
    assert check.verdict is (Verdict.WAIVED if verdict is Verdict.PASS else Verdict.FAIL)


@pytest.mark.parametrize(
    "broken",
    [
        {"failure": "CUDA error", "outputs": ()},
        {"failure": "no driver", "unusable": True, "outputs": ()},
        {"providers_active": (CPU_PROVIDER,)},
    ],
)
def test_a_broken_torch_cuda_refuses_nothing_either(broken):
    runtimes = tuple(
        builders.runtime_evidence(name, **(broken if name == "torch-cuda" else {}))
        for name in ("torch-cuda", "ort-cpu", "ort-cpu-optimized", *CUDA)
    )
    evidence = builders.evidence(runtimes=runtimes)
    assert decide(Policy.default(), evidence, decided_at="now").verdict is Verdict.PASS
    assert decide(stated(), evidence, decided_at="now").verdict is not Verdict.PASS


def test_what_must_be_measured_still_must():
    policy = stated(exceeded="warn")
    torch = policy.runtimes["torch-cuda"].model_copy(update={"required": "always"})
    policy = policy.model_copy(update={"runtimes": {**policy.runtimes, "torch-cuda": torch}})
    runtimes = (builders.absent("torch-cuda"), *builders.evidence().runtimes[1:3])
    runtimes += (builders.runtime_evidence("ort-cuda"),)
    decision = decide(policy, builders.evidence(runtimes=runtimes), decided_at="now")
    assert decision.verdict is Verdict.ERROR
    without = builders.evidence(runtimes=runtimes[1:])  # evidence that is not whole
    decision = decide(stated(exceeded="warn"), without, decided_at="now")
    assert decision.verdict is Verdict.ERROR


@pytest.mark.parametrize("name", ["ort-cpu", "ort-cuda", "phone"])
def test_a_runtime_of_the_file_can_not_only_warn(name):
    runtimes = stated().runtimes
    kind = {"kind": "ort", "options": {"providers": [CPU_PROVIDER]}} if name == "phone" else {}
    wanted = RuntimePolicy(
        required="always", bounds=runtimes["ort-cpu"].bounds, exceeded="warn", **kind
    )
    with pytest.raises(ValueError, match="exceeded"):
        Policy(runtimes={**runtimes, name: wanted})


def test_an_exception_alone_bounds_nothing():
    with pytest.raises(ValueError, match="no bound"):
        RuntimePolicy(required="always", bounds=Bounds(noise_ratio_by_operator={"LogSoftmax": 7.0}))


def test_other_devices_keep_the_wider_bound():
    assert exact_bounds("device", classes=True).noise_ratio == 32.0
    assert exact_bounds("device", classes=True).noise_ratio_by_operator is None


@pytest.mark.parametrize(
    ("nodes", "last"),
    [
        ([node("LogSoftmax", ["x"], "y")], ("LogSoftmax",)),
        (
            [
                node("LogSoftmax", ["x"], "l"),
                node("Transpose", ["l"], "t"),
                node("Neg", ["t"], "y"),
            ],
            ("LogSoftmax",),
        ),
        ([node("LogSoftmax", ["x"], "l"), node("Gemm", ["l", "w"], "y")], ("Gemm",)),
        (
            [
                node("LogSoftmax", ["x"], "l"),
                node("Gemm", ["x", "w"], "g"),
                node("Add", ["l", "g"], "y"),
            ],
            ("Gemm", "LogSoftmax"),
        ),
        ([node("Identity", ["x"], "y")], ()),
    ],
)
def test_the_operators_that_an_output_ends_in(nodes, last):
    graph = ValueGraph(model(*nodes))
    assert last_operators(graph, graph.outputs[0]) == last
