"""Which side changes between CPU and GPU: PyTorch or the runtime?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.decision.bound_rules import noise_metrics, numeric_metrics
from gate.decision.check_result import CheckResult, Problem, Verdict, check_result
from gate.policy.policy import Policy
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.runtime import CUDA_PROVIDER, RUNTIMES, RuntimeName

# A large difference on CUDA usually comes from a fallback. If both sides are proven to have run on
# CUDA, the cause is another one, and the evidence shows which side changed.


LARGE = 10.0
"""Multiple of its bound above which a difference is not due to rounding."""

_RELATED: dict[RuntimeName, tuple[RuntimeName, RuntimeName]] = {
    "ort-cuda": ("ort-cpu", "ort-cuda-optimized"),
    "ort-cuda-optimized": ("ort-cpu-optimized", "ort-cuda"),
}
"""Runtimes with the other device, and with the other level of optimization."""


def check_device(
    policy: Policy, bounds: Bounds, evidence: Evidence, runtime: RuntimeEvidence
) -> Iterator[CheckResult]:
    """Yield a check of both devices and the explanation of a large difference on CUDA.

    FAIL if a side is not on its device, or if a difference is `LARGE`. Such a difference fails its
    own check, too, so this adds no bound. Worse numbers never make it pass.
    """
    if runtime.runtime not in _RELATED:
        return
    torch, torch_policy = evidence.runtime("torch-cuda"), policy.runtimes.get("torch-cuda")
    sides = [runtime]
    if torch is not None and torch.measured:
        nodes: Problem = {"providers": torch.providers_active or ["no provider"]}
        device = torch.session_options.get("device", "unknown")
        torch_side = {"code": "torch_on", **nodes, "device": device}
        if torch_policy is None or torch_policy.exceeded != "warn":
            sides.insert(0, torch)
    elif torch is not None and (reason := torch.failure or torch.absent_reason):
        torch_side = {"code": "torch_on_cpu", "reason": reason.rstrip(".")}
    else:
        torch_side = {"code": "torch_not_measured"}
    counts = [f"{count} on {name}" for name, count in runtime.nodes_per_provider.items()]
    active = runtime.providers_active[0] if runtime.providers_active else "no provider"
    notes = [torch_side, {"code": "runtime_on", "provider": active, "nodes": counts or ["unknown"]}]
    misplaced = [side.runtime for side in sides if not _on_cuda(side)]
    notes += [{"code": "not_on_cuda", "runtime": name} for name in misplaced]
    large = _large_factors(bounds, runtime)
    if large:
        notes += _explain_difference(policy, large, evidence, runtime)
    code = "large" if large else "misplaced" if misplaced else "same"
    verdict = Verdict.PASS if code == "same" else Verdict.FAIL
    yield check_result("device", code, verdict, notes=notes)


def _explain_difference(
    policy: Policy, large: dict[str, float], evidence: Evidence, runtime: RuntimeEvidence
) -> Iterator[Problem]:
    worst, factor = max(large.items(), key=lambda item: item[1])
    name, torch = runtime.runtime, evidence.runtime("torch-cuda")
    both_on_cuda = torch is not None and torch.measured and _on_cuda(torch) and _on_cuda(runtime)
    code = "factor_no_fallback" if both_on_cuda else "factor"
    yield {"code": code, "worst": worst, "factor": factor}
    on_cpu, opposite = _RELATED[name]
    by_torch = _exceeds_by_far(policy, evidence, "torch-cuda")
    if _exceeds_by_far(policy, evidence, on_cpu):
        yield {"code": "moved_file"}
    elif by_torch is None:
        yield {"code": "moved_unknown"}
    else:
        yield {"code": "moved_both" if by_torch else "moved_runtime"}
    far = _exceeds_by_far(policy, evidence, opposite)
    if far is not None:
        fused = RUNTIMES[name].optimization == "ORT_ENABLE_ALL"
        code = "level_no_fusion" if far else "level_fusion" if fused else "level_kernel"
        yield {"code": code, "other": opposite}
    switches, options = evidence.environment.determinism.to_plain(), runtime.session_options
    names = ("tf32_matmul", "tf32_cudnn", "cudnn_deterministic")
    yield {
        "code": "switches",
        **{switch: "on" if switches[switch] else "off" for switch in names},
        "use_tf32": options.get("use_tf32", "not recorded"),
        "algorithm": options.get("cudnn_conv_algo_search", "not recorded"),
    }
    yield {"code": "locate", "factory": evidence.source.factory, "runtime": name}


def _on_cuda(runtime: RuntimeEvidence) -> bool:
    return runtime.providers_active[:1] == (CUDA_PROVIDER,)


def _exceeds_by_far(policy: Policy, evidence: Evidence, name: RuntimeName) -> bool | None:
    """Return whether another runtime exceeds its bounds by far, or None if not measured."""
    runtime, runtime_policy = evidence.runtime(name), policy.runtimes.get(name)
    if runtime is None or not runtime.measured or runtime_policy is None:
        return None
    return bool(_large_factors(runtime_policy.bounds, runtime))


def _large_factors(bounds: Bounds, runtime: RuntimeEvidence) -> dict[str, float]:
    """Return the multiple of the bound by `output / metric`, if it is `LARGE` or NaN."""
    factors = {}
    for output in runtime.outputs:
        for metric in (*numeric_metrics(bounds, output), *noise_metrics(bounds, output)):
            if metric.observed is None or metric.bound is None:
                continue
            if not math.isfinite(metric.observed):
                factor = math.inf
            elif metric.bound > 0.0:
                factor = metric.observed / metric.bound
            else:
                factor = math.inf if metric.observed > 0.0 else 0.0
            if factor >= LARGE:
                factors[f"{output.name} / {metric.name}"] = factor
    return factors
