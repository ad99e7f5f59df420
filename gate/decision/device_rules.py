"""Which side changes between CPU and GPU: PyTorch or the runtime?"""

from __future__ import annotations

import math

from gate.decision.bound_rules import BoundedMetric, noise_metrics, numeric
from gate.decision.catalog import REMEDIES
from gate.decision.check_result import CheckResult, Verdict
from gate.policy.policy import Policy
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.runtime import CUDA_PROVIDER, RUNTIMES, RuntimeName

# A difference on CUDA that is far beyond its bound is mostly taken for a fallback. Where both sides
# are proven to have run on CUDA it is something else, and the evidence says which side moved.


LARGE = 10.0
"""From so many times its bound on, a difference is no rounding."""


_ON_CPU: dict[RuntimeName, RuntimeName] = {
    "ort-cuda": "ort-cpu",
    "ort-cuda-optimized": "ort-cpu-optimized",
}

_OTHER_LEVEL: dict[RuntimeName, RuntimeName] = {
    "ort-cuda": "ort-cuda-optimized",
    "ort-cuda-optimized": "ort-cuda",
}


def compares(name: RuntimeName) -> bool:
    """Whether there is a runtime on the CPU, and one of PyTorch on CUDA, to compare it with."""
    return name in _ON_CPU


def device(
    policy: Policy, bounds: Bounds, evidence: Evidence, runtime: RuntimeEvidence
) -> CheckResult:
    """Both devices, and the explanation of a large difference; for ONNX Runtime on CUDA.

    FAIL where a side is not on the device of its name, and where a difference is `LARGE`: that
    one fails its own check too, so this adds no bound. Worse numbers never make it pass.
    """
    torch = _measured(evidence, "torch-cuda")
    misplaced = [
        f"{side.runtime} is not on CUDA, see its check 'provider'"
        for side in (None if _only_warns(policy, torch) else torch, runtime)
        if side is not None and not _on_cuda(side)
    ]
    large = _large(bounds, runtime)
    explanation = f"{_torch_side(evidence)}; {_runtime_side(runtime)}."
    if misplaced:
        explanation += f" {'; '.join(misplaced)}."
    if large:
        explanation += f" {_explained(policy, bounds, evidence, runtime)}"
    return CheckResult(
        name="device",
        runtime=runtime.runtime,
        verdict=Verdict.FAIL if misplaced or large else Verdict.PASS,
        explanation=explanation,
        remedy=REMEDIES["device"],
    )


def _explained(policy: Policy, bounds: Bounds, evidence: Evidence, runtime: RuntimeEvidence) -> str:
    worst, factor = max(_large(bounds, runtime).items(), key=lambda item: item[1])
    name = runtime.runtime
    no_fallback = (
        " although both ran on CUDA, so this is no fallback" if _both(evidence, runtime) else ""
    )
    return (
        f"{worst} is {factor:.3g} times its bound{no_fallback}. "
        f"{_moved(policy, evidence, name)} {_level(policy, evidence, name)}"
        f"In force: {_switches(evidence, runtime)}. Next: gate locate MODEL.onnx --reference "
        f"{evidence.source.factory} --inputs SAMPLES --runtime {name}."
    )


def _moved(policy: Policy, evidence: Evidence, name: RuntimeName) -> str:
    """Which side is off: the file, the device, or the file on the device."""
    on_cpu = _far_off(policy, evidence, _ON_CPU[name])
    by_torch = _far_off(policy, evidence, "torch-cuda")
    if on_cpu:
        return "The file is far off on the CPU too, so the device is not the cause."
    if by_torch:
        return (
            "PyTorch on CUDA is far from its own answer on the CPU too, so both sides moved with "
            "the device: look at TF32, the cuDNN algorithms and the driver."
        )
    if by_torch is None:
        return "PyTorch ran on the CPU only, so it is open whether the device or the file moved."
    return (
        "PyTorch on CUDA stays with its answer on the CPU, so ONNX Runtime moved: look at TF32, "
        "the cuDNN algorithm and fusions."
    )


def _level(policy: Policy, evidence: Evidence, name: RuntimeName) -> str:
    other = _OTHER_LEVEL[name]
    far = _far_off(policy, evidence, other)
    if far is None:
        return ""
    if far:
        return f"{other} is far off as well, so it is no fusion. "
    fusion = "a fusion" if RUNTIMES[name].optimization == "ORT_ENABLE_ALL" else "a single kernel"
    return f"{other} is not, which points at {fusion}. "


def _switches(evidence: Evidence, runtime: RuntimeEvidence) -> str:
    switches = evidence.environment.determinism
    options = runtime.session_options
    return (
        f"PyTorch with TF32 {_on_off(switches.tf32_matmul)} for matmul and "
        f"{_on_off(switches.tf32_cudnn)} for cuDNN, cudnn_deterministic "
        f"{_on_off(switches.cudnn_deterministic)}; ONNX Runtime with use_tf32 "
        f"{options.get('use_tf32', 'not recorded')}, cudnn_conv_algo_search "
        f"{options.get('cudnn_conv_algo_search', 'not recorded')}"
    )


def _torch_side(evidence: Evidence) -> str:
    torch = _measured(evidence, "torch-cuda")
    if torch is None:
        record = evidence.runtime("torch-cuda")
        reason = (record.failure or record.absent_reason) if record else None
        why = (reason or "torch-cuda was not asked for").rstrip(".")
        return f"PyTorch computed on the CPU only ({why})"
    active = ", ".join(torch.providers_active) or "no provider"
    return f"PyTorch computed on {active} (device {torch.session_options.get('device', 'unknown')})"


def _runtime_side(runtime: RuntimeEvidence) -> str:
    active = runtime.providers_active[0] if runtime.providers_active else "no provider"
    nodes = ", ".join(f"{count} on {name}" for name, count in runtime.nodes_per_provider.items())
    return f"ONNX Runtime on {active} (nodes: {nodes or 'unknown'})"


def _measured(evidence: Evidence, name: RuntimeName) -> RuntimeEvidence | None:
    """The evidence of a runtime that has numbers."""
    runtime = evidence.runtime(name)
    return runtime if runtime is not None and runtime.measured else None


def _only_warns(policy: Policy, runtime: RuntimeEvidence | None) -> bool:
    wanted = None if runtime is None else policy.runtimes.get(runtime.runtime)
    return wanted is not None and wanted.exceeded == "warn"


def _on_cuda(runtime: RuntimeEvidence) -> bool:
    return runtime.providers_active[:1] == (CUDA_PROVIDER,)


def _both(evidence: Evidence, runtime: RuntimeEvidence) -> bool:
    torch = _measured(evidence, "torch-cuda")
    return torch is not None and _on_cuda(torch) and _on_cuda(runtime)


def _far_off(policy: Policy, evidence: Evidence, name: RuntimeName) -> bool | None:
    """Whether another runtime has a large difference by its own bounds; None: not measured."""
    runtime, wanted = _measured(evidence, name), policy.runtimes.get(name)
    if runtime is None or wanted is None:
        return None
    return bool(_large(wanted.bounds, runtime))


def _large(bounds: Bounds, runtime: RuntimeEvidence) -> dict[str, float]:
    """`output / metric` to how many times its bound it is, where that is `LARGE` or no number."""
    factors = {}
    for output in runtime.outputs:
        for metric in (*numeric(bounds, output), *noise_metrics(bounds, output)):
            factor = _times(metric)
            if factor is not None and factor >= LARGE:
                factors[f"{output.name} / {metric.name}"] = factor
    return factors


def _times(metric: BoundedMetric) -> float | None:
    """The observed number in units of its bound; None where there is no bound or no number."""
    if metric.observed is None or metric.bound is None:
        return None
    if not math.isfinite(metric.observed):
        return math.inf
    if metric.bound > 0.0:
        return metric.observed / metric.bound
    return math.inf if metric.observed > 0.0 else 0.0


def _on_off(switch: bool) -> str:
    return "on" if switch else "off"
