"""Where both sides computed, and what a large difference on CUDA means."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import iter_checks
from gate.policy.sections import RuntimePolicy
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.runtime import CPU_PROVIDER, RUNTIMES, RuntimeName
from gate.summary.render import render_check
from tests import builders

FAIL, PASS = Verdict.FAIL, Verdict.PASS
NAN, INF = math.nan, math.inf
FAR = 2e-3
"""Twenty times the bound on `max_abs_diff`."""


def runtime(name: RuntimeName, diff: float = 1e-5, **fields: Any) -> RuntimeEvidence:
    output = builders.output_parity(max_abs_diff=diff)
    return builders.runtime_evidence(name, **{"outputs": (output,), **fields})


def evidence(diffs: dict[RuntimeName, float], **more: RuntimeEvidence | None) -> Evidence:
    """All five runtimes measured; `diffs` gives the max_abs_diff of some, `more` a whole record."""
    records = {name: runtime(name, diffs.get(name, 1e-5)) for name in RUNTIMES}
    for name, record in more.items():
        records[name.replace("_", "-")] = record  # type: ignore[index]
    return builders.evidence(runtimes=tuple(r for r in records.values() if r is not None))


def checks(seen: Evidence, **policy: Any) -> dict[str, CheckResult]:
    """The checks `device`, by runtime."""
    found = iter_checks(builders.policy(**policy), seen)
    return {str(check.runtime): check for check in found if check.name == "device"}


def test_both_devices_are_stated_for_onnx_runtime_on_cuda_only():
    torch = runtime("torch-cuda", session_options={"device": "cuda"})
    seen = checks(evidence({}, torch_cuda=torch))
    assert list(seen) == ["ort-cuda", "ort-cuda-optimized"]
    for check in seen.values():
        assert check.verdict is PASS
        assert "PyTorch computed on CUDAExecutionProvider (device cuda)" in render_check(check)
        assert "ONNX Runtime computed on CUDAExecutionProvider" in render_check(check)
        assert "49 on CUDAExecutionProvider" in render_check(check)
        assert "times its bound" not in render_check(check)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "torch-cuda was not asked for"),
        (builders.absent("torch-cuda"), "no CUDA device"),
        (runtime("torch-cuda", outputs=(), failure="out of memory."), "out of memory"),
    ],
)
@pytest.mark.parametrize(("diff", "verdict"), [(1e-5, PASS), (FAR, FAIL)])
def test_a_reference_on_the_cpu_only_is_said_so(record, why, diff, verdict):
    check = checks(evidence({"ort-cuda": diff}, torch_cuda=record))["ort-cuda"]
    assert f"PyTorch computed on the CPU only ({why})" in render_check(check)
    assert check.verdict is verdict
    assert ("it is open whether the device or the file is the cause" in render_check(check)) is (
        diff == FAR
    )
    assert "both ran on CUDA" not in render_check(check)


@pytest.mark.parametrize(
    ("diffs", "words"),
    [
        ({}, "PyTorch on CUDA agrees with its output on the CPU, so ONNX Runtime moved"),
        ({"torch-cuda": FAR}, "so both sides moved with the device: look at TF32"),
        ({"ort-cpu": FAR}, "The file is far off on the CPU too, so the device is not the cause"),
        ({"ort-cpu": FAR, "torch-cuda": FAR}, "the device is not the cause"),
        ({}, "ort-cuda-optimized is not, which points at a single kernel"),
        (
            {"ort-cuda-optimized": FAR},
            "ort-cuda-optimized is far off as well, so a fusion is not the cause",
        ),
    ],
)
def test_a_large_difference_is_explained_by_the_other_runtimes(diffs, words):
    check = checks(evidence({"ort-cuda": FAR, **diffs}))["ort-cuda"]
    assert check.verdict is FAIL
    assert words in render_check(check)
    assert "logits / max_abs_diff is 20 times its bound although both ran on CUDA" in render_check(
        check
    )
    assert "so this is no fallback" in render_check(check)
    assert render_check(check).endswith(
        "Next: gate locate MODEL.onnx --reference torchvision:resnet18 --inputs SAMPLES "
        "--runtime ort-cuda."
    )


def test_only_with_optimizations_it_is_a_fusion():
    check = checks(evidence({"ort-cuda-optimized": FAR}))["ort-cuda-optimized"]
    assert "ort-cuda is not, which points at a fusion" in render_check(check)
    assert "--runtime ort-cuda-optimized" in render_check(check)


def test_the_switches_in_force_are_told():
    options = {"use_tf32": "1", "cudnn_conv_algo_search": "EXHAUSTIVE"}
    seen = evidence({}, ort_cuda=runtime("ort-cuda", FAR, session_options=options))
    determinism = seen.environment.determinism.model_copy(update={"tf32_matmul": True})
    environment = seen.environment.model_copy(update={"determinism": determinism})
    told = render_check(checks(seen.model_copy(update={"environment": environment}))["ort-cuda"])
    assert "PyTorch with TF32 on for matmul and off for cuDNN, cudnn_deterministic on" in told
    assert "ONNX Runtime with use_tf32 1, cudnn_conv_algo_search EXHAUSTIVE" in told
    bare = evidence({}, ort_cuda=runtime("ort-cuda", FAR, session_options={}))
    assert "use_tf32 not recorded" in render_check(checks(bare)["ort-cuda"])


@pytest.mark.parametrize(
    ("name", "on"),
    [("ort-cuda", "ort-cuda"), ("torch-cuda", "ort-cuda"), ("torch-cuda", "ort-cuda-optimized")],
)
def test_a_side_that_is_not_on_its_device_fails(name, on):
    for active in ((CPU_PROVIDER,), ()):
        record = runtime(name, providers_active=active)
        check = checks(evidence({}, **{name.replace("-", "_"): record}))[on]
        assert check.verdict is FAIL
        assert f"{name} is not on CUDA, see its check 'provider'" in render_check(check)


def test_a_fallback_is_not_called_none():
    record = runtime("ort-cuda", FAR, providers_active=(CPU_PROVIDER,))
    told = render_check(checks(evidence({}, ort_cuda=record))["ort-cuda"])
    assert "no fallback" not in told
    assert "20 times its bound." in told


@pytest.mark.parametrize(
    ("diff", "verdict"),
    [(9.9e-4, PASS), (1e-3, FAIL), (NAN, FAIL), (INF, FAIL), (-INF, FAIL), (0.0, PASS)],
)
def test_ten_times_the_bound_is_large(diff, verdict):
    assert checks(evidence({"ort-cuda": diff}))["ort-cuda"].verdict is verdict


@pytest.mark.parametrize(("diff", "verdict"), [(0.0, PASS), (1e-30, FAIL)])
def test_a_bound_of_zero_is_exceeded_by_anything(diff, verdict):
    policy = builders.policy()
    bounds = policy.runtimes["ort-cuda"].bounds.model_copy(update={"max_abs_diff": 0.0})
    runtimes = {**policy.runtimes, "ort-cuda": RuntimePolicy(required="always", bounds=bounds)}
    assert checks(evidence({"ort-cuda": diff}), runtimes=runtimes)["ort-cuda"].verdict is verdict


@pytest.mark.parametrize(("field", "bound"), [("ratio", 3.0), ("peak", 6.0), ("diff", 32.0)])
def test_differences_in_units_of_rounding_count_too(field, bound):
    # The bound of the ratio is a little wider where there are few elements.
    for times, verdict in ((9.0, PASS), (13.0, FAIL)):
        noise = builders.noise_parity(**{field: times * bound})
        record = runtime("ort-cuda", outputs=(builders.output_parity(noise=noise),))
        check = checks(evidence({}, ort_cuda=record))["ort-cuda"]
        assert check.verdict is verdict
        assert (f"noise_{field} is 1" in render_check(check)) is (verdict is FAIL)


def test_no_noise_floor_is_no_difference():
    record = runtime("ort-cuda", outputs=(builders.output_parity(noise=None),))
    assert checks(evidence({}, ort_cuda=record))["ort-cuda"].verdict is PASS


diffs = st.floats(0.0, 1.0) | st.sampled_from([NAN, INF])
others = st.dictionaries(st.sampled_from(sorted(RUNTIMES)), diffs)


@given(others, diffs, diffs)
def test_worse_numbers_never_make_it_pass(rest, a, b):
    better, worse = sorted((a, b), key=lambda x: x if math.isfinite(x) else INF)
    if checks(evidence({**rest, "ort-cuda": better}))["ort-cuda"].verdict is FAIL:
        assert checks(evidence({**rest, "ort-cuda": worse}))["ort-cuda"].verdict is FAIL


@given(others)
def test_it_fails_only_where_another_check_fails_too(rest):
    """So it explains, and adds no bound."""
    found = list(iter_checks(builders.policy(), evidence(rest)))
    for check in found:
        if check.name == "device" and check.verdict is FAIL:
            same = [c for c in found if c.runtime == check.runtime and c.name != "device"]
            assert FAIL in {c.verdict for c in same}
