"""Is the evidence complete and measured as requested?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from gate.decision.catalog import CHAIN, REMEDIES
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.cuda_kernels import cuda_kernels
from gate.policy.policy import Policy
from gate.policy.runtime_options import (
    BASIC,
    OPTIMISATIONS_OFF,
    OrtSetup,
    is_recorded,
    ort_setup,
)
from gate.policy.sections import RuntimePolicy
from gate.records.evidence import Evidence, RuntimeEvidence, SubjectPart
from gate.records.runtime import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    HEAVY,
    OWN,
    PROVIDERS,
    RUNTIMES,
    CpuNode,
    RuntimeName,
)
from gate.storage.safe_text import make_printable


def whole(part: SubjectPart, measured: Evidence | None, name: str) -> CheckResult:
    """`part`: the evidence is there, and about this file."""
    if measured is None:
        found = "nobody measured it"
    elif measured.subject.sha256 != part.sha256:
        found = f"what was measured is {measured.subject.sha256.short}"
    else:
        return CheckResult(
            name="part", part=name, verdict=Verdict.PASS, explanation=f"measured: {part.file}"
        )
    return CheckResult(
        name="part",
        part=name,
        verdict=Verdict.ERROR,
        explanation=f"the part {name} is {part.file}, {part.sha256.short}, and {found}.",
        remedy="Measure the release again.",
    )


_SPREAD = 1e-4
"""Of the largest output: far above what two runs of one batch differ by in rounding, if at all."""

_NAMED = 5
"""Parameters and buffers that a text lists."""


def samples(policy: Policy, evidence: Evidence) -> CheckResult:
    """Enough samples; fewer prove nothing, for or against the file. Of a single one the probes must
    have been computed: they are the second one."""
    n = evidence.dataset.samples
    explanation = f"{n} samples were measured, at least {policy.min_samples} are asked for."
    unprobed = [r.runtime for r in evidence.runtimes if r.outputs and not _probed(r)]
    alone = n == 1 and bool(unprobed)
    if alone:
        explanation = (
            f"one sample was measured, and no probe of other values in {', '.join(unprobed)}. Give "
            "a second sample, or set instruments.probes: true."
        )
    return CheckResult(
        name="samples",
        observed=float(n),
        bound=float(policy.min_samples),
        relation=">=",
        samples=n,
        verdict=Verdict.PASS if n >= policy.min_samples and not alone else Verdict.ERROR,
        explanation=explanation,
        remedy=REMEDIES["samples"],
    )


def _probed(runtime: RuntimeEvidence) -> bool:
    """Return True if the runtime computed a probe with new values; a batch-size probe repeats the
    samples."""
    return any(p.kind != "batch" and p.relative_diff is not None for p in runtime.probes)


def determinism(policy: Policy, evidence: Evidence) -> CheckResult:
    """The switches in force were the policy's."""
    want, got = policy.determinism, evidence.environment.determinism
    differences = [
        f"{switch} is {actual}, asked for {wanted}"
        for switch, actual, wanted in (
            ("tf32_matmul", got.tf32_matmul, want.tf32),
            ("tf32_cudnn", got.tf32_cudnn, want.tf32),
            ("cudnn_deterministic", got.cudnn_deterministic, want.cudnn_deterministic),
            ("cudnn_benchmark", got.cudnn_benchmark, want.cudnn_benchmark),
            ("grad", got.grad, False),
            ("seed", got.seed, want.seed),
            ("threads", got.threads, want.threads or got.threads),
            ("algorithms", got.algorithms, want.algorithms),
        )
        if actual != wanted
    ]
    return check_statement(
        "determinism",
        problems=differences,
        fine="The determinism switches of the policy were in force.",
    )


def measured_once(evidence: Evidence) -> CheckResult:
    """Each runtime is recorded once, and at least one was measured."""
    names = [runtime.runtime for runtime in evidence.runtimes]
    problems = [f"{n} is recorded twice" for n in sorted({n for n in names if names.count(n) > 1})]
    if not any(runtime.outputs for runtime in evidence.runtimes):
        problems.append("no runtime was measured")
    fine = "Each runtime is recorded once, and at least one was measured."
    return check_statement("measured", problems=problems, fine=fine, verdict=Verdict.ERROR)


def missing(
    runtime_policy: RuntimePolicy,
    runtime: RuntimeEvidence | None,
    name: RuntimeName,
    *,
    chained: bool,
    served: RuntimeName | None,
) -> CheckResult:
    """The only check of a runtime without outputs: absent may be waived, failed never, but where
    the file does not open with optimizations off; what could run no file at all is no fault of this
    one. `chained`: it ran several files, and what is between them. `served`: as by `served`."""
    verdict, remedy = Verdict.ERROR, REMEDIES["runtime"]
    if runtime is None:
        reason = "there is no record of it: neither numbers nor a reason"
    elif runtime.failure and runtime.unusable:
        reason = f"it can run no file here: {runtime.failure}"
    elif runtime.failure and runtime.plain_failure and served:
        verdict = Verdict.WAIVED
        reason = f"{_not_plain(runtime)}, nor with {BASIC}. {_decides(served)}"
    elif runtime.failure:
        verdict, reason = Verdict.FAIL, f"it failed: {runtime.failure}"
        remedy = CHAIN if chained else remedy
    elif runtime.absent_reason and runtime_policy.required == "when_present":
        verdict = Verdict.WAIVED
        reason = f"the policy asks for it only when present: {runtime.absent_reason}"
    elif runtime.absent_reason:
        reason = f"the policy always asks for it: {runtime.absent_reason}"
    else:
        reason = "it has neither outputs nor a reason"
    return CheckResult(
        name="runtime",
        runtime=name,
        verdict=verdict,
        explanation=f"{name} was not measured; {reason}",
        remedy=remedy,
    )


def served(policy: Policy, evidence: Evidence, name: RuntimeName) -> RuntimeName | None:
    """Return the optimized runtime beside one without optimizations; None if the policy does not
    judge it, or it was not measured."""
    other = f"{name}-optimized"
    wanted, runtime = policy.runtimes.get(other), evidence.runtime(other)
    if other not in RUNTIMES or wanted is None or wanted.required == "never":
        return None
    return other if runtime is not None and runtime.measured else None


def _not_plain(runtime: RuntimeEvidence) -> str:
    return f"the file does not open with optimizations off ({runtime.plain_failure})"


def _decides(served: RuntimeName) -> str:
    return f"{served} decides, because files are served with optimizations."


def session(policy: Policy, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    """The session options were the policy's and those that the runtime's name promises, but for a
    file that does not open with optimizations off."""
    want: dict[str, str] = {}
    setup = ort_setup(policy, runtime.runtime)
    if setup is not None:
        want["graph_optimization_level"] = setup.optimization
        threads = setup.settings.threads or policy.determinism.threads
        if threads is not None:
            want["intra_op_num_threads"] = str(threads)
        if policy.determinism.algorithms:
            want["use_deterministic_compute"] = "1"
        want |= dict(setup.reported())
    plain = setup is not None and setup.is_named_plain and runtime.plain_failure is not None
    if plain:
        want["graph_optimization_level"] = BASIC
        if evidence.subject.parts:  # some of which may open
            del want["graph_optimization_level"]
    differences = [*_another(policy, runtime)]
    differences += [
        f"{key} is {runtime.session_options.get(key, 'not recorded')}, asked for {value}"
        for key, value in want.items()
        if runtime.session_options.get(key) != value
    ]
    other = served(policy, evidence, runtime.runtime)
    if plain and other is None:
        differences.append(f"{_not_plain(runtime)}, and no optimized session was measured")
    result = check_statement(
        "session",
        problems=differences,
        place=(runtime.runtime, None),
        fine="The session options of the policy were in force.",
    )
    if not plain or other is None or differences:
        return result
    text = f"T{_not_plain(runtime)[1:]}, and was measured with {BASIC}. {_decides(other)}"
    return result.model_copy(update={"verdict": Verdict.WAIVED, "explanation": text})


def _another(policy: Policy, runtime: RuntimeEvidence) -> Iterator[str]:
    """In what it is another runtime than the policy's of this name."""
    wanted, identity = policy.runtimes[runtime.runtime], runtime.identity
    kind = runtime.runtime if runtime.runtime in OWN else wanted.kind or runtime.runtime
    if runtime.runtime in RUNTIMES:
        options = identity.options if identity else {}
    elif identity is None:
        yield f"it is not recorded which runtime measured, asked for {kind}"
        return
    else:
        options = identity.options
    if identity is not None and identity.kind != kind:
        yield f"{identity.kind} measured, asked for {kind}"
    if options != wanted.options:
        yield f"it measured with the options {options}, asked for {wanted.options}"


def provider(policy: Policy, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    """The provider is proven: active, first, and it ran the compute nodes, but for those that ONNX
    Runtime has no CUDA kernel for."""
    setup = ort_setup(policy, runtime.runtime)
    wanted = setup.provider if setup else _promised(policy, runtime)
    problems = []
    active = runtime.providers_active[0] if runtime.providers_active else "none"
    if not wanted:
        problems.append("it does not say what it promises to run on")
    elif active != wanted:
        problems.append(f"the active provider is {active}, not {wanted}")
    excused = () if setup is None else _without_kernel(setup, evidence, runtime)
    if setup is not None:
        problems += _misplaced(setup, runtime, excused)
    elif runtime.fallback_nodes:
        problems.append(f"{len(runtime.fallback_nodes)} compute nodes ran elsewhere")
    ran = runtime.runtime in RUNTIMES or setup is not None or runtime.nodes_per_provider
    result = check_statement(
        "provider",
        problems=problems,
        place=(runtime.runtime, None),
        fine=f"{wanted} is active{' and ran the nodes' if ran else ''}.{_on_cpu(runtime, excused)}",
    )
    if result.verdict is Verdict.PASS or setup is None or not runtime.fallback_nodes:
        return result
    if _optimized_for_cpu(evidence, runtime):
        made = sorted(filter(_CPU_FUSED.match, {node.operator for node in runtime.cpu_nodes}))
        text = "The file was optimized for the CPU before export: it has "
        text += f"{', '.join(made)}. {result.explanation}"
        remedy = REMEDIES["provider_cpu_optimized"]
        return result.model_copy(
            update={"code": "cpu_optimized", "explanation": text, "remedy": remedy}
        )
    providers = ", ".join(dict.fromkeys((*setup.providers, CPU_PROVIDER)))
    remedy = f"{REMEDIES['provider_cpu_nodes']} providers: [{providers}]"
    return result.model_copy(update={"remedy": remedy})


def _without_kernel(
    setup: OrtSetup, evidence: Evidence, runtime: RuntimeEvidence
) -> tuple[CpuNode, ...]:
    """The nodes on the CPU that this ONNX Runtime has no CUDA kernel for; none where a node on the
    CPU does the work of the model, such as a convolution."""
    if CUDA_PROVIDER not in setup.providers or any(map(HEAVY.search, _operators(runtime))):
        return ()
    version = evidence.environment.versions.get("onnxruntime")
    table = cuda_kernels()
    return tuple(node for node in runtime.cpu_nodes if table.lacks_kernel(node, version))


def _operators(runtime: RuntimeEvidence) -> Iterator[str]:
    """Of the nodes on the CPU. The name of a node says nothing: it is the user's."""
    described = {node.name: node.operator for node in runtime.cpu_nodes}
    for name in runtime.fallback_nodes:
        yield described.get(name, name)


def _on_cpu(runtime: RuntimeEvidence, excused: tuple[CpuNode, ...]) -> str:
    """What ran on the CPU and is no fallback."""
    shapes = runtime.nodes_per_provider.get(CPU_PROVIDER, 0) - len(runtime.fallback_nodes)
    if runtime.cpu_time_share is None or not (shapes > 0 or excused):
        return ""
    what = [f"{shapes} nodes that compute shapes or indices"] if shapes > 0 else []
    if excused:
        kinds = sorted({f"{node.operator}{_typed(node)}" for node in excused})
        what.append(f"{len(excused)} without a CUDA kernel ({', '.join(kinds[:_NAMED])})")
    share = f"{100.0 * runtime.cpu_time_share:.2g} % of the time of one run"
    return f" Warning: on the CPU ran {' and '.join(what)}, {share}."


def _typed(node: CpuNode) -> str:
    kinds = list(dict.fromkeys(kind for kind in node.inputs if kind))
    return f" on {', '.join(kinds)}" if kinds else ""


def _optimized_for_cpu(evidence: Evidence, runtime: RuntimeEvidence) -> bool:
    """Whether the file has operators that only ONNX Runtime's optimizations for the CPU make."""
    made = {node.operator for node in runtime.cpu_nodes if _CPU_FUSED.match(node.operator)}
    if evidence.graph is not None:
        return not made.isdisjoint(evidence.graph.operators)
    level = runtime.session_options.get("graph_optimization_level")
    return level == OPTIMISATIONS_OFF and bool(made)


_CPU_FUSED = re.compile(
    r"com\.microsoft\.nchwc::"
    r"|com\.microsoft::(FusedConv|FusedGemm|DynamicQuantize(MatMul|LSTM)|MatMulIntegerToFloat)$"
)
"""Layouts and fusions for the CPU. ONNX Runtime makes the same of nodes that fell back, so they
count only where the file has them."""


def _promised(policy: Policy, runtime: RuntimeEvidence) -> str:
    """By the gate's own tables where the kind is the gate's: no evidence changes what it means."""
    own = RUNTIMES.get(runtime.runtime)
    if own is not None:
        return own.provider
    if runtime.identity is None:
        return ""
    kind = policy.runtimes[runtime.runtime].kind or runtime.runtime
    return PROVIDERS.get(kind, runtime.identity.provider)


def _misplaced(
    setup: OrtSetup, runtime: RuntimeEvidence, excused: tuple[CpuNode, ...]
) -> Iterator[str]:
    """Nodes that ran where they were not to run."""
    ran = runtime.nodes_per_provider
    if not ran.get(setup.provider):
        yield f"no node is known to have run on {setup.provider}"
    names = {node.name for node in excused}
    stray = [name for name in runtime.fallback_nodes if name not in names]
    if stray:
        share = runtime.cpu_time_share
        time = "" if share is None else f", {100.0 * share:.2g} % of the time of one run"
        yield f"{len(stray)} compute nodes ran on the CPU ({', '.join(stray[:3])}){time}"
    # Shapes are computed on the CPU, wherever the rest is.
    allowed = {*setup.providers} if setup.on_cpu else {*setup.providers, CPU_PROVIDER}
    if (setup.several or setup.on_cpu) and set(ran) - allowed:
        yield f"nodes ran on {', '.join(sorted(ran))}"


def precision(policy: Policy, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """Of what has no name of the gate's: that it computed in float32, where the policy asks for
    exact numbers.

    The providers of ONNX Runtime that don't say it are judged by their numbers.
    """
    if runtime.runtime in RUNTIMES or policy.precision != "exact":
        return
    stated = runtime.identity.precision if runtime.identity else None
    right = ("float32", "tf32") if policy.determinism.tf32 else ("float32",)
    problems = []
    fine = f"It computed in {stated}, as it reports."
    if stated is None and ort_setup(policy, runtime.runtime) is not None:
        fine = "ONNX Runtime does not report in which precision this provider computes: the "
        fine += "numbers decide."
    elif stated not in right:
        problems.append(
            f"it reports {stated or 'no'} precision, and precision 'exact' asks for "
            f"{' or '.join(right)}"
        )
    yield check_statement("precision", problems=problems, place=(runtime.runtime, None), fine=fine)


def repeats(evidence: Evidence) -> Iterator[CheckResult]:
    """A reference that draws random numbers in eval mode has any answer, and a huge noise floor.
    One that computes with what an earlier call left in a buffer has another answer each time."""
    spread, state = evidence.reference_spread, evidence.state_spread
    if spread is None:
        return
    problems = []
    fine = "The reference gives the same answer twice."
    if state:
        fine += f" Its forward changes {_named(state)}, restored before each run."
    if not _is_small(spread):
        problems.append(
            f"two runs of the reference on the same samples differ by {spread:.3g} of its largest "
            "output"
        )
    counting = {name: moved for name, moved in state.items() if not _is_small(moved)}
    if counting and not problems:
        problems.append(
            f"the outputs depend on the number of the call: forward changes {_named(counting)} and "
            f"computes with it, so a second call differs by {max(counting.values()):.3g} of the "
            "largest output"
        )
    yield check_statement(
        "repeats",
        problems=problems,
        fine=fine,
        verdict=Verdict.ERROR,
    )


def _is_small(spread: float) -> bool:
    return math.isfinite(spread) and 0.0 <= spread <= _SPREAD


def _named(state: Iterable[str]) -> str:
    names = sorted(state)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(make_printable(name) for name in names[:_NAMED]) + more


def half_precision(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """Report an ERROR if the model itself computes in 16 bits: no file can match it exactly."""
    where = evidence.validity.half_precision if evidence.validity else None
    if where is not None and policy.precision == "exact":
        yield check_statement(
            "half_precision",
            problems=[f"the model computes in 16 bits in {where}, and precision is 'exact'"],
            fine="",
            verdict=Verdict.ERROR,
        )


def validity(evidence: Evidence) -> Iterator[CheckResult]:
    """State why float64 or random rounding was not used."""
    found = evidence.validity
    if found is None or not (found.float64_differs or found.rounding == "differs"):
        return
    names = [spec.name for spec in evidence.subject.outputs]
    texts = []
    if found.float64_differs:
        which = ", ".join(names[index] for index in found.float64_differs if index < len(names))
        first = f"; the first difference is in {found.differs_at}" if found.differs_at else ""
        texts.append(
            f"The float64 reference was not used for {which}: it computes a different function "
            f"than float32 (q = {found.largest:.3g}){first}"
        )
    if found.rounding == "differs":
        texts.append(
            "Random rounding was not used: without rounding, those runs do not reproduce the model"
        )
    yield check_statement("float64", problems=[], fine=f"{'. '.join(texts)}.")


def fast_path(evidence: Evidence, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """Name the fused path of PyTorch as the cause if it returns different numbers."""
    if evidence.validity is not None and evidence.validity.fast_path:
        yield check_statement(
            "fast_path",
            problems=[
                "in eval mode PyTorch takes the fast path of nn.TransformerEncoder, which returns "
                "different numbers than its layers (zeros at padded positions), and no exporter "
                "writes it to a file"
            ],
            place=(runtime.runtime, None),
            fine="",
        )


def inputs(evidence: Evidence) -> Iterator[CheckResult]:
    """The batch axes, and that the file does not take all that the model takes, which is right of
    what changes no output: numbers and probes decide."""
    if evidence.dataset.batch_axes is not None:
        yield check_statement(
            "batch_axes", problems=[], fine=f"Batch axes: {evidence.dataset.batch_axes.text}."
        )
    if evidence.dataset.model_only:
        yield check_statement(
            "inputs",
            problems=[],
            fine=f"The model takes {', '.join(evidence.dataset.model_only)}, the file does not; it "
            "was given to the model as the samples and the probes have it, so an input that "
            "changes the outputs shows.",
        )


def check_statement(
    name: str,
    problems: list[str],
    fine: str,
    *,
    verdict: Verdict = Verdict.FAIL,
    place: tuple[RuntimeName | None, str | None] = (None, None),
) -> CheckResult:
    """A check without a number: `problems` is empty or says what is wrong."""
    return CheckResult(
        name=name,
        runtime=place[0],
        output=place[1],
        verdict=verdict if problems else Verdict.PASS,
        explanation="; ".join(problems) + "." if problems else fine,
        remedy=REMEDIES[name],
    )


def recorded(policy: Policy, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """One check of a recording: that it says where it comes from, and that nothing is recorded of
    it that only a run could show."""
    if not is_recorded(policy, runtime.runtime):
        return
    options = runtime.session_options
    lacking = [key for key in ("recording", "runtime", "recorded_at") if not options.get(key)]
    problems = [f"it does not say its {', '.join(lacking)}"] if lacking else []
    if any(output.stability is not None for output in runtime.outputs) or _has_cost(runtime):
        problems.append("it has numbers of a run, and a recording does not run")
    device = runtime.identity.device if runtime.identity else None
    yield check_statement(
        "recording",
        problems=problems,
        place=(runtime.runtime, None),
        fine=f"Computed elsewhere: by {options.get('runtime')} on {device or 'an unnamed device'}, "
        f"recorded {options.get('recorded_at')}, by the word of whoever packed it "
        f"({options.get('recording')}). It was not run here: repeatability, batch invariance, "
        "latency and memory are unmeasured.",
    )


def _has_cost(runtime: RuntimeEvidence) -> bool:
    return bool(runtime.latency or runtime.cost or runtime.memory_bytes is not None)
