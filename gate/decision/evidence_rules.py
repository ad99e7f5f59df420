"""Is the evidence complete and measured as requested?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from gate.decision.bound_rules import BoundedMetric, check_metric
from gate.decision.check_result import CheckResult, Problem, Verdict, check_result, statement
from gate.decision.cuda_kernels import cuda_kernels
from gate.policy.policy import Policy
from gate.policy.runtime_options import (
    BASIC,
    OPTIMIZATIONS_OFF,
    OrtSetup,
    is_recorded,
    is_server,
    ort_setup,
)
from gate.records.evidence import Evidence, RuntimeEvidence, SubjectPart
from gate.records.runtime import (
    BUILTIN_NAMES,
    CPU_PROVIDER,
    CUDA_PROVIDER,
    HEAVY,
    PROVIDERS,
    RUNTIMES,
    SERVER,
    CpuNode,
    RuntimeName,
)


def check_part(part: SubjectPart, measured: Evidence | None) -> CheckResult:
    """Check that the evidence of a part exists and is about its file."""
    verdict, code, actual = Verdict.ERROR, "unmeasured", "nothing"
    if measured is not None:
        code, actual = "wrong_file", measured.subject.sha256.short
        if measured.subject.sha256 == part.sha256:
            verdict, code = Verdict.PASS, "measured"
    expected = part.sha256.short
    return check_result("part", code, verdict, file=part.file, sha256=expected, measured=actual)


_SPREAD = 1e-4
"""Share of the largest output: far above the rounding difference of two runs of one batch."""


def check_samples(policy: Policy, evidence: Evidence) -> CheckResult:
    """Check that there are enough samples. Fewer prove nothing. With a single sample the probes
    must have run: they are a second one."""
    n, least = evidence.dataset.samples, policy.min_samples
    check = check_metric(BoundedMetric("samples", float(n), ">=", float(least)), samples=n)
    unprobed = [r.runtime for r in evidence.runtimes if r.outputs and not _probed(r)]
    if n == 1 and unprobed:
        return check.with_code("unprobed", Verdict.ERROR, runtimes=unprobed)
    verdict, code = (Verdict.PASS, "enough") if n >= least else (Verdict.ERROR, "too_few")
    return check.with_code(code, verdict)


def _probed(runtime: RuntimeEvidence) -> bool:
    """Return True if the runtime computed a probe with new values. A batch-size probe repeats the
    samples."""
    return any(p.kind != "batch" and p.relative_diff is not None for p in runtime.probes)


def check_determinism(policy: Policy, evidence: Evidence) -> CheckResult:
    """Check that the switches of the run were those of the policy."""
    required, recorded = policy.determinism, evidence.environment.determinism
    wanted = {
        "tf32_matmul": required.tf32,
        "tf32_cudnn": required.tf32,
        "cudnn_deterministic": required.cudnn_deterministic,
        "cudnn_benchmark": required.cudnn_benchmark,
        "grad": False,
        "seed": required.seed % 2**64,  # as PyTorch does with a negative seed
        "threads": required.threads or recorded.threads,
        "algorithms": required.algorithms,
    }
    return statement("determinism", [*_differing_switches(dict(recorded), wanted)])


def _differing_switches(
    recorded: Mapping[str, object], wanted: Mapping[str, object]
) -> Iterator[Problem]:
    for switch, value in wanted.items():
        actual = recorded.get(switch, "not recorded")
        if actual != value:
            yield {"code": "switch_differs", "switch": switch, "actual": actual, "wanted": value}


def check_measured(evidence: Evidence) -> CheckResult:
    """Check that each runtime is recorded once, and that at least one was measured."""
    names = [runtime.runtime for runtime in evidence.runtimes]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems: list[Problem] = [{"code": "recorded_twice", "runtime": name} for name in twice]
    if not any(runtime.outputs for runtime in evidence.runtimes):
        problems.append({"code": "none_measured"})
    return statement("measured", problems, verdict=Verdict.ERROR)


def check_missing(policy: Policy, evidence: Evidence, name: RuntimeName) -> CheckResult:
    """Return the only check of a runtime without outputs.

    An absent runtime may be waived, a failed one never, unless the file does not open with
    optimizations off. A runtime that can't run any file is not a fault of this file.
    """
    runtime_policy, runtime = policy.runtimes[name], evidence.runtime(name)
    served = _find_optimized(policy, evidence, name)
    if runtime is None:
        return check_result("runtime", "no_record", Verdict.ERROR)
    failure = runtime.failure
    params: Problem = {"failure": failure}
    by_network = (runtime_policy.kind or name) == SERVER
    if failure and runtime.unusable:
        code = "unusable_server" if by_network else "unusable"
        return check_result("runtime", code, Verdict.ERROR, **params)
    if failure and runtime.plain_failure and served:
        return check_result(
            "runtime",
            "not_plain",
            Verdict.WAIVED,
            plain_failure=runtime.plain_failure,
            served=served,
        )
    if failure:
        code = runtime.failure_code or "failed"
        if code == "wrong_outputs" and any(each.measured for each in evidence.runtimes):
            code = "failed"
        if code == "failed" and by_network:
            code = "failed_server"
        elif code == "failed" and evidence.subject.parts:
            code = "chain_failed"
        return check_result("runtime", code, Verdict.FAIL, **params | runtime.failure_params)
    if not runtime.absent_reason:
        return check_result("runtime", "empty", Verdict.ERROR)
    waived = runtime_policy.required == "when_present"
    code, verdict = ("absent_waived", Verdict.WAIVED) if waived else ("absent", Verdict.ERROR)
    return check_result("runtime", code, verdict, reason=runtime.absent_reason)


def _find_optimized(policy: Policy, evidence: Evidence, name: RuntimeName) -> RuntimeName | None:
    """Return the optimized runtime that corresponds to one without optimizations.

    None if the policy does not judge it, or it was not measured.
    """
    optimized = f"{name}-optimized"
    runtime_policy, runtime = policy.runtimes.get(optimized), evidence.runtime(optimized)
    if optimized not in RUNTIMES or runtime_policy is None or runtime_policy.required == "never":
        return None
    return optimized if runtime is not None and runtime.measured else None


def check_session(policy: Policy, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    """Check that the session options were those of the policy and of the runtime's name, except for
    a file that does not open with optimizations off."""
    expected: dict[str, str] = {}
    setup = ort_setup(policy, runtime.runtime)
    if setup is not None:
        expected["graph_optimization_level"] = setup.optimization
        threads = setup.settings.threads or policy.determinism.threads
        if threads is not None:
            expected["intra_op_num_threads"] = str(threads)
        if policy.determinism.algorithms:
            expected["use_deterministic_compute"] = "1"
        expected |= dict(setup.reported())
    plain = setup is not None and setup.is_named_plain and runtime.plain_failure is not None
    if plain:
        expected["graph_optimization_level"] = BASIC
        if evidence.subject.parts:  # some of which may open
            del expected["graph_optimization_level"]
    problems = [*_identity_problems(policy, runtime)]
    problems += _differing_switches(runtime.session_options, expected)
    served = _find_optimized(policy, evidence, runtime.runtime)
    failure = {"plain_failure": runtime.plain_failure}
    if plain and served is None:
        problems.append({"code": "not_plain", **failure})
    if plain and not problems:
        return check_result("session", "basic", Verdict.WAIVED, **failure, served=served)
    return statement("session", problems)


def _identity_problems(policy: Policy, runtime: RuntimeEvidence) -> Iterator[Problem]:
    """Yield the differences from the policy's runtime of this name."""
    name, identity = runtime.runtime, runtime.identity
    required = policy.runtimes[name]
    kind = name if name in BUILTIN_NAMES else required.kind or name
    if identity is None and name not in RUNTIMES:
        yield {"code": "unknown_kind", "wanted": kind}
        return
    options = identity.options if identity else {}
    if identity is not None and identity.kind != kind:
        yield {"code": "other_kind", "kind": identity.kind, "wanted": kind}
    if options != required.options:
        yield {"code": "other_options", "options": str(options), "wanted": str(required.options)}


def check_provider(policy: Policy, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    """Check that the provider is active, comes first and ran the compute nodes, except for those
    without a CUDA kernel in ONNX Runtime."""
    setup = ort_setup(policy, runtime.runtime)
    expected = setup.provider if setup else _guaranteed_provider(policy, runtime)
    problems: list[Problem] = []
    active = runtime.providers_active[0] if runtime.providers_active else "none"
    if not expected:
        problems.append({"code": "unstated"})
    elif active != expected:
        problems.append({"code": "inactive", "active": active, "wanted": expected})
    excused = () if setup is None else _nodes_without_kernel(setup, evidence, runtime)
    if setup is not None:
        problems += _misplaced_nodes(setup, runtime, excused)
    elif runtime.fallback_nodes:
        problems.append({"code": "elsewhere", "count": len(runtime.fallback_nodes)})
    ran = runtime.runtime in RUNTIMES or setup is not None or runtime.nodes_per_provider
    notes = [*_cpu_notes(runtime, excused)]
    holds = "ran" if ran else "holds"
    result = statement("provider", problems, holds=holds, wanted=expected, notes=notes)
    if not problems or setup is None or not runtime.fallback_nodes:
        return result
    fused = {node.operator for node in runtime.cpu_nodes if _CPU_FUSED.match(node.operator)}
    if _optimized_for_cpu(fused, evidence, runtime):
        return result.with_code("cpu_optimized", operators=sorted(fused))
    providers = list(dict.fromkeys((*setup.providers, CPU_PROVIDER)))
    return result.with_code("cpu_nodes", providers=providers)


def _nodes_without_kernel(
    setup: OrtSetup, evidence: Evidence, runtime: RuntimeEvidence
) -> tuple[CpuNode, ...]:
    """Return the nodes on the CPU without a CUDA kernel in this ONNX Runtime. Empty if a node on
    the CPU does main work of the model, such as a convolution."""
    described = {node.name: node.operator for node in runtime.cpu_nodes}  # users choose the names
    operators = [described.get(name, name) for name in runtime.fallback_nodes]
    if CUDA_PROVIDER not in setup.providers or any(map(HEAVY.search, operators)):
        return ()
    version = evidence.environment.versions.get("onnxruntime")
    table = cuda_kernels()
    return tuple(node for node in runtime.cpu_nodes if table.lacks_kernel(node, version))


def _cpu_notes(runtime: RuntimeEvidence, excused: tuple[CpuNode, ...]) -> Iterator[Problem]:
    """Yield the nodes that belong on the CPU."""
    if runtime.cpu_time_share is None:
        return
    share = 100.0 * runtime.cpu_time_share
    shapes = runtime.nodes_per_provider.get(CPU_PROVIDER, 0) - len(runtime.fallback_nodes)
    if shapes > 0:
        yield {"code": "shape_nodes", "count": shapes, "share": share}
    if excused:
        operators = sorted({f"{node.operator}{_input_types(node)}" for node in excused})
        yield {"code": "no_kernel", "count": len(excused), "operators": operators, "share": share}


def _input_types(node: CpuNode) -> str:
    kinds = list(dict.fromkeys(kind for kind in node.inputs if kind))
    return f" on {', '.join(kinds)}" if kinds else ""


def _optimized_for_cpu(fused: set[str], evidence: Evidence, runtime: RuntimeEvidence) -> bool:
    """Return whether the file holds one of these operators of ONNX Runtime's CPU optimizations."""
    if evidence.graph is not None:
        return not fused.isdisjoint(evidence.graph.operators)
    level = runtime.session_options.get("graph_optimization_level")
    return level == OPTIMIZATIONS_OFF and bool(fused)


_CPU_FUSED = re.compile(
    r"com\.microsoft\.nchwc::"
    r"|com\.microsoft::(FusedConv|FusedGemm|DynamicQuantize(MatMul|LSTM)|MatMulIntegerToFloat)$"
)
"""Layouts and fusions for the CPU. ONNX Runtime also creates them for nodes that fell back, so they
are excused only if the file holds them."""


def _guaranteed_provider(policy: Policy, runtime: RuntimeEvidence) -> str:
    """Return the provider on which a runtime must run.

    The tables of the gate come first, so that evidence can't change it.
    """
    traits = RUNTIMES.get(runtime.runtime)
    if traits is not None:
        return traits.provider
    if runtime.identity is None:
        return ""
    kind = policy.runtimes[runtime.runtime].kind or runtime.runtime
    return PROVIDERS.get(kind, runtime.identity.provider)


def _misplaced_nodes(
    setup: OrtSetup, runtime: RuntimeEvidence, excused: tuple[CpuNode, ...]
) -> Iterator[Problem]:
    """Yield the nodes that ran on a provider that is not in the policy."""
    ran = runtime.nodes_per_provider
    if not ran.get(setup.provider):
        yield {"code": "nothing_on", "provider": setup.provider}
    names = {node.name for node in excused}
    stray = [name for name in runtime.fallback_nodes if name not in names]
    if stray:
        count: Problem = {"count": len(stray), "names": stray[:3]}
        share = runtime.cpu_time_share
        if share is None:
            yield {"code": "on_cpu", **count}
        else:
            yield {"code": "on_cpu_share", **count, "share": 100.0 * share}
    # Shapes are always computed on the CPU.
    allowed = {*setup.providers} if setup.on_cpu else {*setup.providers, CPU_PROVIDER}
    if (setup.several or setup.on_cpu) and set(ran) - allowed:
        yield {"code": "other_providers", "providers": sorted(ran)}


def check_precision(policy: Policy, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """Yield a check that a runtime without a built-in name computed in float32.

    Only if the policy requires exact numbers. Providers of ONNX Runtime that do not report their
    precision are judged by their numbers.
    """
    name = runtime.runtime
    if name in RUNTIMES or policy.precision != "exact":
        return
    stated = runtime.identity.precision if runtime.identity else None
    right = ("float32", "tf32") if policy.determinism.tf32 else ("float32",)
    if stated is None and (ort_setup(policy, name) is not None or is_server(policy, name)):
        yield statement("precision", [], holds="unreported", precision=None)
        return
    problem = {"code": "other_precision", "precision": stated or "no", "wanted": right}
    yield statement("precision", [] if stated in right else [problem], precision=stated)


def check_server(policy: Policy, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """Check that a server has loaded the file, and that it refuses inputs of a wrong shape."""
    if not is_server(policy, runtime.runtime):
        return
    stated = runtime.session_options
    proven = stated.get("file", "not proven") != "not proven"
    allowed = policy.runtimes[runtime.runtime].options.get("allow_unproven_file") is True
    yield check_result(
        "server_file",
        "proven" if proven else "unproven",
        Verdict.PASS if proven else Verdict.WAIVED if allowed else Verdict.ERROR,
        **{key: stated.get(key, "not stated") for key in ("server", "model", "model_version")},
        proof=stated.get("file", "nothing"),
    )
    problems = [{"code": "answers_wrong_shape"}] if stated.get("wrong_shape") != "refused" else []
    yield statement("server_input", problems)


def check_repeatability(evidence: Evidence) -> Iterator[CheckResult]:
    """Check that the reference is repeatable: it draws no random numbers in eval mode, and its
    outputs do not depend on earlier calls."""
    spread, state = evidence.reference_spread, evidence.state_spread
    if spread is None:
        return
    problems: list[Problem] = []
    counting = {name: moved for name, moved in state.items() if not _is_small(moved)}
    if not _is_small(spread):
        problems.append({"code": "outputs_vary", "spread": spread})
    elif counting:
        worst = max(counting.values())
        problems.append({"code": "depends_on_calls", "names": sorted(counting), "spread": worst})
    holds = "holds_with_state" if state else "holds"
    yield statement("repeats", problems, verdict=Verdict.ERROR, holds=holds, names=sorted(state))


def _is_small(spread: float) -> bool:
    return math.isfinite(spread) and 0.0 <= spread <= _SPREAD


def check_half_precision(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """Report an ERROR if the model itself computes in 16 bits: no file can match it exactly."""
    where = evidence.validity.half_precision if evidence.validity else None
    if where is not None and policy.precision == "exact":
        problems = [{"code": "sixteen_bits", "where": where}]
        yield statement("half_precision", problems, verdict=Verdict.ERROR)


def check_validity(evidence: Evidence) -> Iterator[CheckResult]:
    """State why float64 or random rounding was not used."""
    limits = evidence.validity
    if limits is None:
        return
    names = [spec.name for spec in evidence.subject.outputs]
    problems: list[Problem] = []
    if limits.float64_differs:
        outputs = [names[index] for index in limits.float64_differs if index < len(names)]
        where, largest = limits.differs_at, limits.largest
        code = "float64_differs_at" if where else "float64_differs"
        problems.append({"code": code, "outputs": outputs, "largest": largest, "where": where})
    if limits.rounding == "differs":
        problems.append({"code": "rounding_differs"})
    if problems:
        yield check_result("float64", "not_used", Verdict.PASS, problems=problems)


def check_fast_path(evidence: Evidence) -> Iterator[CheckResult]:
    """Name the fused path of PyTorch as the cause if it returns different numbers."""
    if evidence.validity is not None and evidence.validity.fast_path:
        yield check_result("fast_path", "violated", Verdict.FAIL)


def describe_inputs(evidence: Evidence) -> Iterator[CheckResult]:
    """State the batch axes, and the inputs that only the model takes. Exporters omit inputs that
    change no output; numbers and probes show whether they do."""
    axes = evidence.dataset.batch_axes
    if axes is not None and axes.is_unbatched:
        yield statement("batch_axes", [], holds="one_call")
    elif axes is not None:
        yield statement("batch_axes", [], axes=axes.listed)
    if evidence.dataset.model_only:
        yield statement("inputs", [], holds="model_only", names=evidence.dataset.model_only)


def check_recording(policy: Policy, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """Yield the check of a recording.

    It must state its origin, and must not contain results that only a run can have.
    """
    if not is_recorded(policy, runtime.runtime):
        return
    options = runtime.session_options
    lacking = [key for key in ("recording", "runtime", "recorded_at") if not options.get(key)]
    problems: list[Problem] = [{"code": "recording_lacks", "keys": lacking}] if lacking else []
    has_cost = runtime.latency or runtime.cost or runtime.memory_bytes is not None
    if has_cost or any(output.stability is not None for output in runtime.outputs):
        problems.append({"code": "recording_ran"})
    yield statement(
        "recording",
        problems,
        recorded_runtime=options.get("runtime"),
        device=(runtime.identity and runtime.identity.device) or "an unnamed device",
        recorded_at=options.get("recorded_at"),
        recording=options.get("recording"),
    )
