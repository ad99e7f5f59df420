"""Which side changes between CPU and GPU: PyTorch or the runtime?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.decision.bound_rules import BoundedMetric, noise_metrics, numeric_metrics
from gate.decision.check_result import CheckResult, Problem, Verdict
from gate.policy.policy import Policy
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.runtime import CUDA_PROVIDER, RUNTIMES, RuntimeName

# A large difference on CUDA usually comes from a fallback. If both sides are proven to have run on
# CUDA, the cause is another one, and the evidence shows which side changed.


LARGE = 10.0
"""Multiple of its bound above which a difference is not due to rounding."""

_ON_CPU: dict[RuntimeName, RuntimeName] = {
    "ort-cuda": "ort-cpu",
    "ort-cuda-optimized": "ort-cpu-optimized",
}

_OPPOSITE_LEVEL: dict[RuntimeName, RuntimeName] = {
    "ort-cuda": "ort-cuda-optimized",
    "ort-cuda-optimized": "ort-cuda",
}


def check_device(
    policy: Policy, bounds: Bounds, evidence: Evidence, runtime: RuntimeEvidence
) -> Iterator[CheckResult]:
    """Yield a check of both devices and the explanation of a large difference on CUDA.

    FAIL if a side is not on its device, or if a difference is `LARGE`. Such a difference fails its
    own check, too, so this adds no bound. Worse numbers never make it pass.
    """
    if runtime.runtime not in _ON_CPU:
        return
    torch, torch_policy = _measured(evidence, "torch-cuda"), policy.runtimes.get("torch-cuda")
    only_warns = torch_policy is not None and torch_policy.exceeded == "warn"
    misplaced: list[Problem] = [
        {"code": "not_on_cuda", "runtime": side.runtime}
        for side in (None if only_warns else torch, runtime)
        if side is not None and not _on_cuda(side)
    ]
    large = _large_factors(bounds, runtime)
    notes = [_torch_side(evidence), _runtime_side(runtime), *misplaced]
    if large:
        notes += _explain_difference(policy, large, evidence, runtime)
    yield CheckResult(
        name="device",
        runtime=runtime.runtime,
        verdict=Verdict.FAIL if misplaced or large else Verdict.PASS,
        code="large" if large else "misplaced" if misplaced else "same",
        params={"notes": notes},
    )


def _explain_difference(
    policy: Policy, large: dict[str, float], evidence: Evidence, runtime: RuntimeEvidence
) -> Iterator[Problem]:
    worst, factor = max(large.items(), key=lambda item: item[1])
    name, torch = runtime.runtime, _measured(evidence, "torch-cuda")
    on_cuda = torch is not None and _on_cuda(torch) and _on_cuda(runtime)
    code = "factor_no_fallback" if on_cuda else "factor"
    yield {"code": code, "worst": worst, "factor": factor}
    yield {"code": _differing_side(policy, evidence, name)}
    yield from _compare_levels(policy, evidence, name)
    switches, options = evidence.environment.determinism.to_plain(), runtime.session_options
    names = ("tf32_matmul", "tf32_cudnn", "cudnn_deterministic")
    yield {
        "code": "switches",
        **{name: "on" if switches[name] else "off" for name in names},
        "use_tf32": options.get("use_tf32", "not recorded"),
        "algorithm": options.get("cudnn_conv_algo_search", "not recorded"),
    }
    yield {"code": "locate", "factory": evidence.source.factory, "runtime": name}


def _differing_side(policy: Policy, evidence: Evidence, name: RuntimeName) -> str:
    """Return which side is wrong: the file, the device, or the file on the device."""
    if _exceeds_by_far(policy, evidence, _ON_CPU[name]):
        return "moved_file"
    by_torch = _exceeds_by_far(policy, evidence, "torch-cuda")
    if by_torch is None:
        return "moved_unknown"
    return "moved_both" if by_torch else "moved_runtime"


def _compare_levels(policy: Policy, evidence: Evidence, name: RuntimeName) -> Iterator[Problem]:
    opposite = _OPPOSITE_LEVEL[name]
    far = _exceeds_by_far(policy, evidence, opposite)
    if far is None:
        return
    fused = RUNTIMES[name].optimization == "ORT_ENABLE_ALL"
    code = "level_no_fusion" if far else "level_fusion" if fused else "level_kernel"
    yield {"code": code, "other": opposite}


def _torch_side(evidence: Evidence) -> Problem:
    torch = _measured(evidence, "torch-cuda")
    if torch is None:
        record = evidence.runtime("torch-cuda")
        reason = (record.failure or record.absent_reason) if record else None
        if reason is None:
            return {"code": "torch_not_measured"}
        return {"code": "torch_on_cpu", "reason": reason.rstrip(".")}
    return {
        "code": "torch_on",
        "providers": torch.providers_active or ["no provider"],
        "device": torch.session_options.get("device", "unknown"),
    }


def _runtime_side(runtime: RuntimeEvidence) -> Problem:
    nodes = [f"{count} on {name}" for name, count in runtime.nodes_per_provider.items()]
    return {
        "code": "runtime_on",
        "provider": runtime.providers_active[0] if runtime.providers_active else "no provider",
        "nodes": nodes or ["unknown"],
    }


def _measured(evidence: Evidence, name: RuntimeName) -> RuntimeEvidence | None:
    """Return the evidence of a runtime with numbers, or None."""
    runtime = evidence.runtime(name)
    return runtime if runtime is not None and runtime.measured else None


def _on_cuda(runtime: RuntimeEvidence) -> bool:
    return runtime.providers_active[:1] == (CUDA_PROVIDER,)


def _exceeds_by_far(policy: Policy, evidence: Evidence, name: RuntimeName) -> bool | None:
    """Return whether another runtime exceeds its bounds by far, or None if not measured."""
    runtime, runtime_policy = _measured(evidence, name), policy.runtimes.get(name)
    if runtime is None or runtime_policy is None:
        return None
    return bool(_large_factors(runtime_policy.bounds, runtime))


def _large_factors(bounds: Bounds, runtime: RuntimeEvidence) -> dict[str, float]:
    """Return the multiple of the bound by `output / metric`, if it is `LARGE` or NaN."""
    factors = {}
    for output in runtime.outputs:
        for metric in (*numeric_metrics(bounds, output), *noise_metrics(bounds, output)):
            factor = _bound_factor(metric)
            if factor is not None and factor >= LARGE:
                factors[f"{output.name} / {metric.name}"] = factor
    return factors


def _bound_factor(metric: BoundedMetric) -> float | None:
    """Return the observed number in units of its bound, or None without bound or number."""
    if metric.observed is None or metric.bound is None:
        return None
    if not math.isfinite(metric.observed):
        return math.inf
    if metric.bound > 0.0:
        return metric.observed / metric.bound
    return math.inf if metric.observed > 0.0 else 0.0
