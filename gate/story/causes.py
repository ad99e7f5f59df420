"""What a check that fails points at, taken alone, and what each cause is called.

A cause of the file explains the numbers that it makes: `SYMPTOMS`.
"""

from __future__ import annotations

from gate.decision.checks import CheckResult, Verdict
from gate.decision.remedies import REMEDIES
from gate.records.evidence import ONLY_BATCHES, Evidence
from gate.story.meanings import by_beginning
from gate.story.story import CauseKind

TITLES: dict[CauseKind, str] = {
    "passed": "Within every bound",
    "layer": "A layer computes something else",
    "weights": "Weights differ from the model's",
    "graph": "Something in the graph that the policy forbids",
    "training_mode": "Computes as in training",
    "batch": "The batch size matters",
    "baked_in": "The trace baked something in",
    "beyond": "Something else where no sample is",
    "outputs": "The outputs are not the model's",
    "nonfinite": "NaN or infinite where the model is not",
    "optimiser": "The optimiser changes the answer",
    "runtime": "A runtime can't run the file",
    "device": "Not on the device that was asked for",
    "unstable": "The same input gives other answers",
    "export": "The export itself warned",
    "preprocessing": "Other pixels than in training",
    "champion": "Against the champion",
    "cost": "Slower or larger than the policy allows",
    "threshold": "Decisions at an operating point change",
    "labels": "Worse on the labels",
    "samples": "The samples prove nothing",
    "model": "The model has no answer of its own",
    "policy": "The policy does not fit the file",
    "evidence": "The evidence is not whole",
    "numbers": "The numbers differ, and no single cause is known",
    "waived": "Waived by the policy",
}

SYMPTOMS: frozenset[CauseKind] = frozenset(
    {"numbers", "labels", "threshold", "unstable", "nonfinite", "batch", "baked_in", "beyond"}
)
"""What a fault of the file or of the model shows itself by."""

_BY_NAME: dict[str, CauseKind] = {
    "samples": "samples",
    "determinism": "evidence",
    "measured": "evidence",
    "session": "evidence",
    "repeats": "model",
    "near_ties": "model",
    "role": "policy",
    "bounds": "policy",
    "reference": "samples",
    "finite": "nonfinite",
    "outputs": "outputs",
    "provider": "device",
    "precision": "device",
    "device": "device",
    "repeatability": "unstable",
    "batch_invariance": "batch",
    "accuracy_drop": "labels",
    "threshold_crossing": "threshold",
    "incumbent": "champion",
    "latency_ratio": "cost",
    "memory_mb": "cost",
    "probes": "evidence",
    "graph": "evidence",
    "graph_training_mode": "training_mode",
    "graph_fixed_batch": "batch",
    "graph_zero_initializer": "weights",
    "graph_other_weights": "weights",
    "graph_rounded_weights": "weights",
    "graph_nonfinite_initializer": "nonfinite",
    "graph_": "graph",
    "export_record": "evidence",
    "export_": "export",
    "preprocessing": "preprocessing",
}
"""By the whole name of a check, or its longest beginning that is here; the rest are numbers."""
_OTHER_OUTPUTS = (
    "the model returns ",
    "the model has names of its own",
    "the model is judged as it computes in float32",
)
"""In a failure: the runtime ran, and what it returned is not in the shape, dtype or order."""
_BY_REMEDY: dict[str, CauseKind] = {"unsure": "model", "threshold_unmeasured": "evidence",
                               "cost_unmeasured": "evidence"}  # fmt: skip
_PROBES: dict[str, CauseKind] = {
    "batch": "batch",
    "size": "baked_in",
    "value": "baked_in",
    "search": "baked_in",
}


def cause_of(check: CheckResult, evidence: Evidence) -> CauseKind:
    """What one check points at where nothing else is known."""
    if check.verdict is Verdict.WAIVED:
        return "waived"
    # A part of a release has runtimes, probes and a trace of its own.
    evidence = evidence.parts.get(check.part or "", evidence)
    by_remedy = next((c for name, c in _BY_REMEDY.items() if check.remedy == REMEDIES[name]), None)
    if by_remedy is not None:
        return by_remedy
    if check.name == "runtime":
        return _of_runtime(check, evidence)
    if check.name.startswith("probe_"):
        return _of_probe(check, evidence)
    cause = by_beginning(_BY_NAME, check.name) or "numbers"
    if check.verdict is not Verdict.ERROR or check.bound is None or cause not in SYMPTOMS:
        return cause
    # Nothing is off: it was not measured, or no answer differs and so few do not prove it.
    few = check.name == "top1_lower_bound"
    return "evidence" if check.observed is None else "samples" if few else cause


def _of_runtime(check: CheckResult, evidence: Evidence) -> CauseKind:
    """It broke, or its device is not there, or nobody measured it."""
    runtime = evidence.runtime(check.runtime) if check.runtime else None
    if runtime is not None and runtime.failure and runtime.unusable:
        return "device"
    if runtime is not None and runtime.failure:
        # A constant shape that has the batch of the export in it.
        nobody = not any(other.measured for other in evidence.runtimes)
        if nobody and any(words in runtime.failure for words in _OTHER_OUTPUTS):
            return "outputs"
        signs = ("requested shape", ONLY_BATCHES)
        return "batch" if any(sign in runtime.failure for sign in signs) else "runtime"
    return "device" if runtime is not None and runtime.absent_reason else "evidence"


def _of_probe(check: CheckResult, evidence: Evidence) -> CauseKind:
    if check.remedy == REMEDIES["probe_as_samples"]:
        return "numbers"
    runtime = evidence.runtime(check.runtime) if check.runtime else None
    probes = runtime.probes if runtime else ()
    name = check.name.removeprefix("probe_")
    kind = next((probe.kind for probe in probes if probe.name == name), "value")
    return "beyond" if kind == "value" and _trace_agrees(evidence) else _PROBES[kind]


def _trace_agrees(evidence: Evidence) -> bool:
    """Whether a trace of the model is the model, on all inputs that were tried, and nobody warned:
    then tracing is not what made the file another."""
    search, export = evidence.trace_search, evidence.export
    if search is None or search.reason or search.found or search.tried < 2:
        return False
    return export is None or not (
        export.tracer_warnings
        or any(finding.level == "error" and not finding.suppressed for finding in export.lint)
    )
