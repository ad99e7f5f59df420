"""Rules for CUDA runtimes cover noise bounds (measured on an H200, docs/cuda.md), CPU nodes and
devices.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import CheckResult, Decision, Evidence, Policy, Verdict
from gate.decision.cuda_kernels import cuda_kernels
from gate.decision.decide import iter_checks
from gate.policy.defaults import exact_bounds
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.evidence import RuntimeEvidence
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER, RUNTIMES, CpuNode, RuntimeName
from gate.weights.instrument import last_operators
from gate.weights.value_graph import ValueGraph
from tests import builders
from tests.builders import find_check, judge
from tests.onnx_file.test_shape_nodes import model, node

ON_CUDA = ("ort-cuda", "ort-cuda-optimized")


def output_with_noise_ratio(ratio: float, name: str = "logits"):
    noise = builders.noise_parity(ratio=ratio, peak=ratio, diff=ratio, candidate_rms=ratio * 1e-6)
    return builders.output_parity(name=name, noise=noise)


def decide_with_ratio(name: str, ratio: float, policy: Policy | None = None, **fields):
    runtimes = [
        builders.runtime_evidence(
            each, **({"outputs": (output_with_noise_ratio(ratio),)} if each == name else {})
        )
        for each in ("torch-cuda", "ort-cpu", "ort-cpu-optimized", *ON_CUDA)
    ]
    all_measured = builders.evidence(runtimes=tuple(runtimes), **fields)
    return judge(all_measured, by=policy or Policy.default())


RATIOS = {"RMSNorm epsilon 1e-8 for 1e-6": 2.4, "BatchNorm mean off by 2e-5": 6.4, "TF32": 569.0}


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("fault", RATIOS)
def test_fault_visible_only_on_cuda_fails_only_cuda_runtime(name, fault):
    decision = decide_with_ratio(name, RATIOS[fault])
    refused = {(c.runtime, c.name) for c in decision.problems if c.output}
    assert decision.verdict is Verdict.FAIL
    assert (name, "noise_ratio") in refused
    assert {runtime for runtime, _ in refused} == {name}


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("ratio", [0.6, 2.0])
def test_correct_file_passes_on_cuda(name, ratio):
    assert decide_with_ratio(name, ratio).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("last", "ratio", "passes"),
    [
        (None, 5.7, True),  # older evidence: all operators of the file count
        (("LogSoftmax",), 5.7, True),
        (("LogSoftmax",), 9.2, False),
        (("Gemm",), 5.7, False),
        ((), 5.7, False),
    ],
)
def test_log_softmax_as_last_operator_has_wider_bound(last, ratio, passes):
    operators = {"Gemm": 1, "LogSoftmax": 1}
    ends = {} if last is None else {"last_operators": {"logits": last}}
    graph = builders.graph_report(operators=operators, nodes=2, **ends)
    decision = decide_with_ratio("ort-cuda", ratio, graph=graph)
    assert (decision.verdict is Verdict.PASS) is passes
    assert decide_with_ratio("ort-cpu", 5.7, graph=graph).verdict is Verdict.FAIL
    assert decide_with_ratio("ort-cuda", 5.7).verdict is Verdict.FAIL


def policy_with_stated_bounds(**torch) -> Policy:
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


def test_stated_bounds_override_built_in_bounds():
    assert decide_with_ratio("ort-cuda", 20.7, policy_with_stated_bounds()).verdict is Verdict.PASS
    assert decide_with_ratio("ort-cuda", 40.0, policy_with_stated_bounds()).verdict is Verdict.FAIL
    graph = builders.graph_report(operators={"LogSoftmax": 1}, nodes=1)
    assert (
        decide_with_ratio("ort-cpu", 1.9, policy_with_stated_bounds(), graph=graph).verdict
        is Verdict.FAIL
    )


@pytest.mark.parametrize(("policy", "verdict"), [
    (Policy.default(), Verdict.PASS),
    (Policy.reduced(), Verdict.PASS),
    (policy_with_stated_bounds(exceeded="warn"), Verdict.PASS),
    (policy_with_stated_bounds(), Verdict.FAIL),
])  # fmt: skip
def test_torch_cuda_difference_fails_only_when_policy_says_fail(policy, verdict):
    decision = decide_with_ratio("torch-cuda", 1e6, policy)
    assert decision.verdict is verdict
    check = find_check(decision, "noise_ratio", "torch-cuda")
    assert check.verdict is (Verdict.WAIVED if verdict is Verdict.PASS else Verdict.FAIL)


@pytest.mark.parametrize("broken", [
    {"failure": "CUDA error", "outputs": ()},
    {"failure": "no driver", "unusable": True, "outputs": ()},
    {"providers_active": (CPU_PROVIDER,)},
])  # fmt: skip
def test_broken_torch_cuda_fails_only_when_policy_says_fail(broken):
    runtimes = tuple(
        builders.runtime_evidence(name, **(broken if name == "torch-cuda" else {}))
        for name in ("torch-cuda", "ort-cpu", "ort-cpu-optimized", *ON_CUDA)
    )
    evidence = builders.evidence(runtimes=runtimes)
    assert judge(evidence, by=Policy.default()).verdict is Verdict.PASS
    assert judge(evidence, by=policy_with_stated_bounds()).verdict is not Verdict.PASS


def test_required_torch_cuda_is_an_error_when_absent():
    policy = policy_with_stated_bounds(exceeded="warn")
    torch = policy.runtimes["torch-cuda"].model_copy(update={"required": "always"})
    policy = policy.model_copy(update={"runtimes": {**policy.runtimes, "torch-cuda": torch}})
    runtimes = (builders.absent("torch-cuda"), *builders.evidence().runtimes[1:3])
    runtimes += (builders.runtime_evidence("ort-cuda"),)
    assert judge(builders.evidence(runtimes=runtimes), by=policy).verdict is Verdict.ERROR
    without = builders.evidence(runtimes=runtimes[1:])  # incomplete evidence
    decision = judge(without, by=policy_with_stated_bounds(exceeded="warn"))
    assert decision.verdict is Verdict.ERROR


@pytest.mark.parametrize("name", ["ort-cpu", "ort-cuda", "phone"])
def test_exceeded_warn_is_refused_for_runtimes_of_the_file(name):
    runtimes = policy_with_stated_bounds().runtimes
    kind = {"kind": "ort", "options": {"providers": [CPU_PROVIDER]}} if name == "phone" else {}
    custom_policy = RuntimePolicy(
        required="always", bounds=runtimes["ort-cpu"].bounds, exceeded="warn", **kind
    )
    with pytest.raises(ValueError, match="exceeded"):
        Policy(runtimes={**runtimes, name: custom_policy})


def test_operator_bound_without_general_bound_is_refused():
    bounds = Bounds(noise_ratio_by_operator={"LogSoftmax": 7.0})
    with pytest.raises(ValueError, match="no bound"):
        Policy(
            task="tensors", runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=bounds)}
        )


def test_bounds_of_other_devices_have_no_operator_exception():
    assert exact_bounds("device", classes=True).noise_ratio == 32.0
    assert exact_bounds("device", classes=True).noise_ratio_by_operator is None


@pytest.mark.parametrize(("nodes", "last"), [
    ([node("LogSoftmax", ["x"], "y")], ("LogSoftmax",)),
    ([node("LogSoftmax", ["x"], "l"), node("Transpose", ["l"], "t"), node("Neg", ["t"], "y")], ("LogSoftmax",)),
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
])  # fmt: skip
def test_last_operators_of_an_output(nodes, last):
    graph = ValueGraph(model(*nodes))
    assert last_operators(graph, graph.outputs[0]) == last


ATAN = CpuNode(name="Atan:/Atan", operator="Atan", since_version=7, inputs=("float",))
ARGMAX = CpuNode(name="ArgMax:/m/ArgMax", operator="ArgMax", since_version=13, inputs=("int64",))
STFT = CpuNode(name="STFT:stft", operator="STFT", since_version=17)
RELU = CpuNode(name="Relu:/Relu", operator="Relu", since_version=14, inputs=("float",))
CONV = CpuNode(name="Conv:/Conv", operator="Conv", since_version=11, inputs=("float", "float"))
EINSUM = CpuNode(name="Einsum:e", operator="Einsum", since_version=12, inputs=("int64", "int64"))
FUSED = CpuNode(name="FusedGemm:g", operator="com.microsoft::FusedGemm", since_version=1)
NCHW = CpuNode(name="Conv:c", operator="com.microsoft.nchwc::Conv")
REORDER = CpuNode(name="ReorderOutput:r", operator="com.microsoft.nchwc::ReorderOutput")
CUSTOM = CpuNode(name="Fold:f", operator="acme::Fold", since_version=1)


def cuda_runtime(*nodes: CpuNode, shapes: int = 0, **fields: object) -> RuntimeEvidence:
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


def evidence_with_cuda(runtime: RuntimeEvidence, **fields: object) -> Evidence:
    return builders.evidence(
        runtimes=(
            *builders.evidence().runtimes[:3],
            runtime,
            builders.absent("ort-cuda-optimized"),
        ),
        **fields,
    )


def provider_check(evidence: Evidence) -> tuple[Decision, CheckResult]:
    decision = judge(evidence)
    return decision, find_check(decision, "provider", "ort-cuda")


def with_node(operator: str, since: int | None, *inputs: str) -> tuple[CpuNode]:
    return (CpuNode(name="n", operator=operator, since_version=since, inputs=inputs),)


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
        ((CUSTOM,), False),
        (with_node("ArgMax", 13, "float"), False),
        (with_node("ArgMax", 13), False),
        (with_node("Atan", None, "float"), False),
        (with_node("LSTM", 1), False),
        (with_node("com.microsoft::MultiHeadAttention", 1, "double"), False),
        (with_node("Add", 14, "float", "float"), False),
        (with_node("Add", 7, "float", "float"), False),
        (with_node("Add", 14, "bool", "bool"), True),
        (with_node("Gather", 13, "float", "int64"), False),
        # an open version range includes only its first version
        (with_node("Gather", 99, "float", "int64"), True),
        (with_node("com.microsoft::Tokenizer", 1), True),
    ],
)
def test_only_nodes_without_cuda_kernel_may_run_on_cpu(nodes, passes):
    decision, check = provider_check(evidence_with_cuda(cuda_runtime(*nodes, shapes=9)))
    assert (check.verdict is Verdict.PASS) is passes
    assert (decision.verdict is Verdict.PASS) is passes
    providers = None if passes else [CUDA_PROVIDER, CPU_PROVIDER]
    assert check.params.get("providers") == providers
    assert ("shape_nodes" in [note["code"] for note in check.params.get("notes", [])]) is passes


@pytest.mark.parametrize(("version", "passes"), [
    ("1.31.1", True), ("1.31.0", True), ("1.22.0", True), ("1.40.0", False), ("2.0", False),
])  # fmt: skip
def test_kernel_table_does_not_apply_to_later_versions(version, passes):
    environment = builders.evidence().environment
    versions = {**environment.versions, "onnxruntime": version}
    environment = environment.model_copy(update={"versions": versions})
    _, check = provider_check(evidence_with_cuda(cuda_runtime(ATAN), environment=environment))
    assert (check.verdict is Verdict.PASS) is passes


@pytest.mark.parametrize(("node", "fields", "verdict"), [
    (ATAN, {"cpu_nodes": (), "cpu_time_share": None}, Verdict.FAIL),  # older evidence
    *((RELU, {"cpu_time_share": share}, Verdict.FAIL) for share in (1e-6, 0.999)),
    *((ATAN, {"cpu_time_share": share}, Verdict.PASS) for share in (1e-6, 0.999)),
])  # fmt: skip
def test_unknown_cpu_nodes_fail_and_time_share_is_ignored(node, fields, verdict):
    _, check = provider_check(evidence_with_cuda(cuda_runtime(node, **fields)))
    assert check.verdict is verdict


@pytest.mark.parametrize("node", [FUSED, NCHW, REORDER])
def test_file_optimized_for_cpu_has_cause_cpu_optimized(node):
    graph = builders.graph_report(operators={"Relu": 3, node.operator: 1})
    for evidence, code in (
        (evidence_with_cuda(cuda_runtime(RELU, node), graph=graph), "cpu_optimized"),
        # ONNX Runtime fused the fallback node
        (evidence_with_cuda(cuda_runtime(RELU, node)), "cpu_nodes"),
        (evidence_with_cuda(cuda_runtime(RELU), graph=graph), "cpu_nodes"),
    ):
        _, check = provider_check(evidence)
        assert (check.verdict, check.code) == (Verdict.FAIL, code)


def test_kernel_table_has_pinned_onnxruntime_version():
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^onnxruntime-gpu==(\S+)$", pins, re.MULTILINE)
    assert cuda_kernels().version == pinned


FAIL, PASS = Verdict.FAIL, Verdict.PASS
NAN, INF = math.nan, math.inf
LARGE_DIFF = 2e-3
"""Twenty times the bound on `max_abs_diff`."""


def runtime_with(name: RuntimeName, diff: float = 1e-5, **fields: Any) -> RuntimeEvidence:
    output = builders.output_parity(max_abs_diff=diff)
    return builders.runtime_evidence(name, **{"outputs": (output,), **fields})


def make_evidence(
    diffs: dict[RuntimeName, float], **records_by_name: RuntimeEvidence | None
) -> Evidence:
    """Return evidence of all runtimes.

    `diffs`: the max_abs_diff of some runtimes; `more`: records that replace a runtime.
    """
    records = {name: runtime_with(name, diffs.get(name, 1e-5)) for name in RUNTIMES}
    for name, record in records_by_name.items():
        records[name.replace("_", "-")] = record  # type: ignore[index]
    return builders.evidence(runtimes=tuple(r for r in records.values() if r is not None))


def device_checks(evidence: Evidence, **policy: Any) -> dict[str, CheckResult]:
    """Return the `device` checks by runtime."""
    checks = iter_checks(builders.policy(**policy), evidence)
    return {str(check.runtime): check for check in checks if check.name == "device"}


def notes_of(check: CheckResult) -> dict[str, dict[str, Any]]:
    """Return the notes of a check by code."""
    return {note["code"]: note for note in check.params["notes"]}


def test_device_check_states_devices_of_both_sides():
    torch = runtime_with("torch-cuda", session_options={"device": "cuda"})
    observed = device_checks(make_evidence({}, torch_cuda=torch))
    assert list(observed) == ["ort-cuda", "ort-cuda-optimized"]
    for check in observed.values():
        assert check.verdict is PASS
        assert notes_of(check) == {
            "torch_on": {"code": "torch_on", "providers": [CUDA_PROVIDER], "device": "cuda"},
            "runtime_on": {
                "code": "runtime_on", "provider": CUDA_PROVIDER, "nodes": [f"49 on {CUDA_PROVIDER}"]
            },
        }  # fmt: skip


@pytest.mark.parametrize(("record", "note"), [
    (None, {"code": "torch_not_measured"}),
    (builders.absent("torch-cuda"), {"code": "torch_on_cpu", "reason": "no CUDA device"}),
    (runtime_with("torch-cuda", outputs=(), failure="out of memory."),
     {"code": "torch_on_cpu", "reason": "out of memory"}),
])  # fmt: skip
@pytest.mark.parametrize(("diff", "verdict"), [(1e-5, PASS), (LARGE_DIFF, FAIL)])
def test_device_check_says_when_reference_ran_on_cpu_only(record, note, diff, verdict):
    check = device_checks(make_evidence({"ort-cuda": diff}, torch_cuda=record))["ort-cuda"]
    assert check.verdict is verdict
    assert check.params["notes"][0] == note
    assert ({"factor", "moved_unknown"} <= {*notes_of(check)}) is (verdict is FAIL)


@pytest.mark.parametrize(("diffs", "code"), [
    ({}, "moved_runtime"),
    ({"torch-cuda": LARGE_DIFF}, "moved_both"),
    ({"ort-cpu": LARGE_DIFF}, "moved_file"),
    ({}, "level_kernel"),
    ({"ort-cuda-optimized": LARGE_DIFF}, "level_no_fusion"),
])  # fmt: skip
def test_large_difference_is_explained_by_other_runtimes(diffs, code):
    check = device_checks(make_evidence({"ort-cuda": LARGE_DIFF, **diffs}))["ort-cuda"]
    notes = notes_of(check)
    assert check.verdict is FAIL
    assert code in notes
    factor = notes["factor_no_fallback"]
    assert (factor["worst"], factor["factor"]) == ("logits / max_abs_diff", pytest.approx(20))


@pytest.mark.parametrize(
    ("name", "on"),
    [("ort-cuda", "ort-cuda"), ("torch-cuda", "ort-cuda"), ("torch-cuda", "ort-cuda-optimized")],
)
def test_runtime_without_its_cuda_provider_fails(name, on):
    for active in ((CPU_PROVIDER,), ()):
        record = runtime_with(name, providers_active=active)
        check = device_checks(make_evidence({}, **{name.replace("-", "_"): record}))[on]
        assert check.verdict is FAIL
        assert notes_of(check)["not_on_cuda"]["runtime"] == name


@pytest.mark.parametrize(("diff", "verdict"), [(0.0, PASS), (1e-30, FAIL)])
def test_any_difference_exceeds_a_bound_of_zero(diff, verdict):
    policy = builders.policy()
    bounds = policy.runtimes["ort-cuda"].bounds.model_copy(update={"max_abs_diff": 0.0})
    runtimes = {**policy.runtimes, "ort-cuda": RuntimePolicy(required="always", bounds=bounds)}
    assert (
        device_checks(make_evidence({"ort-cuda": diff}), runtimes=runtimes)["ort-cuda"].verdict
        is verdict
    )


def test_device_check_names_fusions_tf32_and_fallback_nodes():
    check = device_checks(make_evidence({"ort-cuda-optimized": LARGE_DIFF}))["ort-cuda-optimized"]
    assert notes_of(check)["level_fusion"]["other"] == "ort-cuda"
    record = runtime_with("ort-cuda", LARGE_DIFF, session_options={"use_tf32": "1"})
    observed = make_evidence({}, ort_cuda=record)
    determinism = observed.environment.determinism.model_copy(update={"tf32_matmul": True})
    environment = observed.environment.model_copy(update={"determinism": determinism})
    observed = observed.model_copy(update={"environment": environment})
    assert notes_of(device_checks(observed)["ort-cuda"])["switches"] == {
        "code": "switches", "tf32_matmul": "on", "tf32_cudnn": "off", "cudnn_deterministic": "on",
        "use_tf32": "1", "algorithm": "not recorded",
    }  # fmt: skip
    record = runtime_with("ort-cuda", LARGE_DIFF, providers_active=(CPU_PROVIDER,))
    notes = notes_of(device_checks(make_evidence({}, ort_cuda=record))["ort-cuda"])
    assert "factor_no_fallback" not in notes


@pytest.mark.parametrize(("field", "bound"), [("ratio", 3.0), ("peak", 6.0), ("diff", 32.0)])
def test_noise_metrics_count_as_large_differences(field, bound):
    # With few elements, the bound of the ratio is slightly wider.
    for times, verdict in ((9.0, PASS), (13.0, FAIL)):
        noise = builders.noise_parity(**{field: times * bound})
        record = runtime_with("ort-cuda", outputs=(builders.output_parity(noise=noise),))
        check = device_checks(make_evidence({}, ort_cuda=record))["ort-cuda"]
        assert check.verdict is verdict
        worst = notes_of(check).get("factor_no_fallback", {}).get("worst")
        assert worst == (f"logits / noise_{field}" if verdict is FAIL else None)


diffs = st.floats(0.0, 1.0) | st.sampled_from([NAN, INF])
diffs_by_runtime = st.dictionaries(st.sampled_from(sorted(RUNTIMES)), diffs)


@given(diffs_by_runtime, diffs, diffs)
def test_larger_difference_never_passes_device_check(rest, a, b):
    better, worse = sorted((a, b), key=lambda x: x if math.isfinite(x) else INF)
    if device_checks(make_evidence({**rest, "ort-cuda": better}))["ort-cuda"].verdict is FAIL:
        assert device_checks(make_evidence({**rest, "ort-cuda": worse}))["ort-cuda"].verdict is FAIL


@given(diffs_by_runtime)
def test_device_check_fails_only_with_another_check(rest):
    """Fail only together with another check of the runtime: the device check adds no bound."""
    matches = list(iter_checks(builders.policy(), make_evidence(rest)))
    for check in matches:
        if check.name == "device" and check.verdict is FAIL:
            other_checks = [c for c in matches if c.runtime == check.runtime and c.name != "device"]
            assert FAIL in {c.verdict for c in other_checks}
