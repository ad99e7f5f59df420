"""The only table of checks: meaning, unit, bound, cause, remedy, one text per code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gate.decision.check_result import CheckResult, Verdict

# A text is a format string. Its fields are those of the check, its params and `allowed` ("at most
# 1.67"). `gate.summary.render` formats it. docs/checks.md shows all of them.

Cause = Literal[
    "passed",
    "layer",
    "weights",
    "graph",
    "training_mode",
    "batch",
    "baked_in",
    "beyond",
    "outputs",
    "nonfinite",
    "optimiser",
    "runtime",
    "device",
    "server",
    "cpu_optimized",
    "unstable",
    "export",
    "preprocessing",
    "champion",
    "cost",
    "threshold",
    "labels",
    "metric",
    "samples",
    "model",
    "policy",
    "evidence",
    "numbers",
    "waived",
]
"""The root cause of failed checks."""

TITLES: dict[Cause, str] = {
    "passed": "Within every bound",
    "layer": "A layer differs",
    "weights": "Weights differ from the model's",
    "graph": "The graph has something that the policy forbids",
    "training_mode": "The file runs in training mode",
    "batch": "The batch size changes the result",
    "baked_in": "The trace baked in a value",
    "beyond": "The file differs outside of the samples' range",
    "outputs": "The outputs are not the model's",
    "nonfinite": "NaN or infinity that the model does not return",
    "optimiser": "An optimizer of ONNX Runtime changes the result",
    "runtime": "A runtime cannot run the file",
    "device": "The device is missing, was not used, or gives other results",
    "server": "The model server differs from the file",
    "cpu_optimized": "Optimized for the CPU before export",
    "unstable": "The same input gives different outputs",
    "export": "The export reported a problem",
    "preprocessing": "The preprocessing differs from training",
    "champion": "Compared with the champion",
    "cost": "Slower or larger than the policy allows",
    "threshold": "Decisions at an operating point change",
    "labels": "Less accurate on the labels",
    "metric": "A metric of the task is outside its bound",
    "samples": "The samples cannot prove anything",
    "model": "The model's own output is not determined",
    "policy": "The policy does not fit the file",
    "evidence": "The evidence is incomplete",
    "numbers": "The numbers differ; the cause is not known",
    "waived": "Skipped, as the policy allows",
}
"""The title of a finding."""

SYMPTOMS: frozenset[Cause] = frozenset(
    {
        "numbers",
        "labels",
        "metric",
        "threshold",
        "unstable",
        "nonfinite",
        "batch",
        "baked_in",
        "beyond",
    }
)
"""Causes that a fault of the file or of the model explains."""


@dataclass(frozen=True)
class CodeSpec:
    """The texts of one code of a check, and its cause."""

    text: str
    headline: str | None = None
    """The sentence of the finding. None: the text."""
    remedy: str | None = None
    """None: the check's."""
    cause: Cause | None = None
    """None: the check's."""
    observed: str | None = None
    """Text for the column of the number, if there is no number."""


Code = CodeSpec | str
"""A text alone is a `CodeSpec` with that text."""


@dataclass(frozen=True)
class CheckSpec:
    """One check, or a family of checks whose names begin with it."""

    meaning: str
    """The question that it answers."""
    cause: Cause
    """Its title is in `TITLES`. A remedy about an export takes a cause such as `graph`, of which
    another remedy is shown if the reference is an ONNX file (`gate.summary.render`)."""
    remedy: str
    codes: Mapping[str, Code] = field(default_factory=dict)
    formula: str | None = None
    unit: str | None = None
    why: str = "It holds or not; there is no number."
    """The reason for the bound."""

    def code(self, name: str) -> CodeSpec | None:
        """Return the text of a code; None: the code is of a newer version."""
        name = name if name in self.codes else name.removesuffix("_waived")  # of version 0.2.0
        spec = self.codes.get(name, COMMON.get(name))
        return CodeSpec(spec) if isinstance(spec, str) else spec


ROUNDING = "× rounding"

_SHARE = "share of samples"

_AS_ROUNDING = "Rounding alone gives about 1. The policy allows this much more."

_ANSWERS = "The policy sets how many answers may change."

_NUMBER_TEXT = "{label} is {observed:.6g}, allowed {allowed} (n = {samples})."

_AMPLIFIES = (
    "The file may be correct. The model amplifies rounding (are its weights trained?), or its "
    "function depends on the dtype: keep torch.finfo and branches on the dtype out of forward, or "
    "raise instruments.max_floor."
)

COMMON: dict[str, CodeSpec] = {
    "within": CodeSpec(_NUMBER_TEXT),
    "beyond": CodeSpec(_NUMBER_TEXT),
    "unmeasured": CodeSpec(
        "{label} was not measured; {allowed} is allowed (n = {samples}).", cause="evidence"
    ),
    "unexamined": CodeSpec(
        f"{_NUMBER_TEXT} Rounding was not measured on the samples in question, because another "
        "policy refused the file without it. Measure again."
    ),
    "left_to_rounding": CodeSpec(
        "{label} is {observed:.6g}, allowed {allowed}. Rounding changes what the model selects "
        "(top-k, argmax), so this number proves nothing about the file.",
        remedy=_AMPLIFIES,
        cause="model",
    ),
    "violated": CodeSpec("{problems}."),
}
"""Codes of all checks: `violated` of those without a number, the others of those with one."""

_UNSURE = CodeSpec(
    f"{_NUMBER_TEXT} This cannot be judged: PyTorch's own float32 answers differ from its float64 "
    "answers on {unsure} of {judged} samples.",
    remedy="The file may be correct. The model amplifies rounding until its answers change: train "
    "it, normalize its inputs, evaluate on samples with a larger margin, or judge numbers only "
    "(task: tensors).",
    cause="model",
)


def _metric_drop(meaning: str, formula: str, why: str, remedy: str, **codes: Code) -> CheckSpec:
    return _number(
        meaning,
        formula,
        remedy,
        unit="the unit of the metric",
        why=why,
        cause="metric",
        proven="{label} is at most {observed:.6g}, allowed {allowed} (drop {drop:.6g}, n = "
        "{samples}, changed: {changed}, by {method}).{notes}",
        no_worse=f"{_NUMBER_TEXT}{{notes}}",
        worse=CodeSpec(
            f"{_NUMBER_TEXT}{{notes}}", headline="The metric is worse: {label} is {usage}"
        ),
        dropped=CodeSpec(
            "{label}: the drop is {drop:.6g}, allowed {allowed} (n = {samples}).{notes}",
            headline="{point} is worse by {drop:.6g}, allowed {allowed}",
        ),
        too_few=CodeSpec(
            "{label} may be {observed:.6g}, allowed {allowed}: the drop is {drop:.6g} on {samples} "
            "samples, which are too few to prove the bound. About {needed} samples like these "
            "are needed.{notes}",
            remedy="Evaluate on more samples, or raise the allowed drop.",
            cause="samples",
        ),
        at_limit=CodeSpec(
            "{label} may be {observed:.6g}, allowed {allowed}: the drop itself is {drop:.6g}, so "
            "that no number of samples like these proves the bound.{notes}",
            cause="samples",
        ),
        no_number=CodeSpec("{label} has no finite drop or bound.", cause="evidence"),
        violated=CodeSpec("{problems}.", cause="evidence"),
        **codes,
    )


def _check(meaning: str, cause: Cause, remedy: str, **codes: Code) -> CheckSpec:
    return CheckSpec(meaning, cause, remedy, codes)


def _number(
    meaning: str,
    formula: str,
    remedy: str,
    *,
    unit: str | None = None,
    why: str = "The policy sets it.",
    cause: Cause = "numbers",
    **codes: Code,
) -> CheckSpec:
    return CheckSpec(meaning, cause, remedy, codes, formula=formula, unit=unit, why=why)


_NOISE_TEXT = "{label} is {observed:.6g} × rounding, allowed {allowed} (n = {samples}).{notes}"

_NOISE: Any = {
    "unit": ROUNDING,
    **dict.fromkeys(("within", "beyond"), _NOISE_TEXT),
    "no_floor": CodeSpec(
        "{label} was not measured: {problems}.",
        cause="evidence",
        remedy="Bound max_abs_diff instead, and set waive: [noise_ratio, noise_peak, noise_diff].",
    ),
}

_OF_DIFFERENCES: Any = {
    "unit": "the unit of the output",
    "why": "The policy sets it, in the unit of this output.",
}

_OF_ANSWERS: Any = {"unit": _SHARE, "why": _ANSWERS, "unsure": _UNSURE}

_EXPORT_AGAIN_OR_PRECISION = (
    "Export in eval mode, try export.do_constant_folding: false, compare ort-cpu with "
    "ort-cpu-optimized (fusion), turn TF32 off, and check that the checkpoint is the same."
)

_PRECISION_OR_STATISTICS = "Check precision (TF32, float16, int8) and normalization statistics."

_NOT_REPEATABLE = (
    "Look for dropout or random operators that are still active (export in eval mode), or for "
    "atomic additions on CUDA."
)

_DEPENDS_ON_BATCH = (
    "Look for BatchNorm in training mode (export in eval mode), or for a batch size that was "
    "fixed at export (set dynamic_batch: true)."
)

_NOT_TRACED = (
    "Replace Python conditions on tensor values by torch.where, or export by strategy scripted or "
    "dynamo."
)

_BAKED_BATCH = (
    "Use x.shape[0] as it is instead of len(x) or int(x.shape[0]), and export with dynamic_batch: "
    "true."
)

CONVERT_AGAIN = (
    "Convert or optimize the reference file again, without the step that causes this difference."
)
"""The remedy that replaces those for an export if the reference is an ONNX file."""

CHANGE_REFERENCE = (
    "The cause is in the reference file, and the new file may be correct. Remove random operators "
    "and casts to 16 bits from the reference, or give samples whose outputs do not depend on "
    "rounding."
)
"""The remedy that replaces those about the code of a model if the reference is an ONNX file."""

LIMITS = (
    "Compare limits and thresholds (ReLU6, hardtanh, clamp, torch.where) and activations of the "
    "file with those in the model's code, and export again from that code."
)
"""Remedy for a file that differs outside of the samples' range."""

_QUANTIZED_TENSORS = (
    "A quantized file that is no classifier needs a policy with precision: quantized, task: "
    "tensors, and a numeric bound or a metric (docs/quantized.md)."
)

_UNBOUNDED = "No bound of the policy applies to this output, so any value in it would pass."

_MEASURE_AGAIN = "Measure again with this policy."

OPTIMISER = (
    "Serve with a lower graph_optimization_level, such as ORT_ENABLE_BASIC; update ONNX Runtime; "
    "or export with another opset, so that the pattern is not fused."
)
"""Remedy for a file that agrees with optimizations off."""

SERVER = (
    "Compare the server's SHA-256 and version (on all workers) with this file, and look at its "
    "configuration: order and datatypes of inputs and outputs, largest batch, preprocessing."
)
"""Remedy for a server that computes something else than its file."""

CHAIN = (
    "Run gate locate on the release. It names the part that diverges first, and whether the "
    "connection before it is the cause."
)
"""Remedy for several files that do not run one after the other."""

_CUSTOM_OPERATOR = "Use standard operators only, or ship the runtime that has them."

_CLAMP = (
    "If such values can occur, clamp them in forward to the range of the integer type before the "
    "conversion."
)

_FAILED = CodeSpec(
    "{runtime} was not measured; it failed: {failure}",
    headline="{runtime} cannot run the file: {failure:short}",
)

_PROBE_TEXT = "{metric} is {observed:.6g} on this input, allowed {allowed}."


def _probe(remedy: str, cause: Cause) -> CheckSpec:
    return _number(
        "Does the file compute what the model computes on an input that is not among the samples?",
        "noise_ratio, or max|c - r| / max|r|",
        remedy,
        unit=ROUNDING,
        why="Twice the worst correct file: probes look for a different function, not for lost "
        "bits. In reduced precision, one of the two numbers is enough.",
        cause=cause,
        within=_PROBE_TEXT,
        beyond=_PROBE_TEXT,
        beyond_untraced=CodeSpec(_PROBE_TEXT, cause="beyond", remedy=LIMITS),
        failed="{failure}",
        failed_untraced=CodeSpec("{failure}", cause="beyond", remedy=LIMITS),
        fails_like_samples=CodeSpec(
            _PROBE_TEXT,
            remedy="The samples themselves disagree. Fix that first, then see whether this input "
            "still differs.",
            cause="numbers",
        ),
        contradictory=CodeSpec(
            "The evidence about this input contradicts itself: it has numbers, and a reason why "
            "there are none.",
            cause="evidence",
        ),
        inapplicable="The model does not accept this input: {reason}",
        not_judged="This input is not judged: {reason:reason}.",
        no_numbers=CodeSpec(
            "The evidence has no result for this input: neither numbers nor a reason.",
            cause="evidence",
        ),
        unexamined=f"{_PROBE_TEXT} Rounding was not measured on this input. Measure again.",
        out_of_calibration=f"{_PROBE_TEXT} This input may lie outside of the calibrated range, "
        "where a quantized file saturates. It does not refuse the file.",
        checked_by_metric=f"{_PROBE_TEXT} The metrics of the policy judge the outputs, and this "
        "input has no label.",
        checked_in_chain=f"{_PROBE_TEXT} The rounding of a part of a quantized release is judged "
        "in the run of the whole release.",
        beyond_range=CodeSpec(
            "{notes:alone}",
            cause="beyond",
            remedy="If such values can occur, export the operator as the model computes it "
            "(softplus with its threshold, logsumexp with its maximum subtracted), and handle an "
            "output without elements in forward. instruments.probe_beyond_range decides whether "
            "this refuses the file.",
        ),
        undefined=CodeSpec(
            "On this input, the model converts floats that do not fit the integer type: "
            "{conversions:list}. The result is undefined in ONNX and in PyTorch. What depends on "
            "it was not compared.",
            remedy=_CLAMP,
        ),
    )


def _graph(meaning: str, remedy: str, cause: Cause = "graph") -> CheckSpec:
    return _number(
        meaning,
        "count",
        remedy,
        unit="findings",
        why="The policy forbids it (graph_forbid).",
        cause=cause,
        findings="{findings:list}.",
        no_findings="Nothing of this kind was found in the graph.",
        weights_equal="{weights}",
        not_compared=CodeSpec(
            "The weights of the file were not compared with the model's: the evidence is from an "
            "older version.",
            remedy="Measure again with this version.",
            cause="evidence",
        ),
    )


def _export(remedy: str, cause: Cause = "export") -> CheckSpec:
    return _number(
        "Did the export finish without a warning that the policy refuses?",
        "count",
        remedy,
        unit="findings",
        why="The policy refuses it (export_findings).",
        cause=cause,
        findings="{lines:list}.{notes}",
        no_findings="The export reported nothing that the policy refuses.{notes}",
        no_record=CodeSpec(
            "The evidence does not say how the file was exported.", cause="evidence"
        ),
    )


_CROSSING = (
    "{label} is {observed:.6g}, allowed {allowed}: {crossed} of {samples} samples are at or above "
    "it on one side only, or with another class{crossing:samples}. The model is above it on "
    "{reference_above}, the file on {candidate_above}."
)

_LEFT_TO_PROBES = CodeSpec(
    "One sample has no other batch. The probes of other batch sizes decide.",
    observed="left to the probes",
)

_UNDEFINED_IN_BATCH = CodeSpec(
    "{label} cannot be judged: the model itself returns NaN or infinity only in batches of "
    "{sizes:or}.",
    remedy="The value is undefined for such a batch (0/0). Guard the division in forward "
    "(clamp(min=1)), or set this bound to null.",
    cause="model",
)

_UNNOTICED = "{problems}. A value that tracing fixed in the file would go unnoticed."

_NEAR_TIES = (
    "{count} of {total} {what} differ by rounding alone, allowed {allowed}: the float64 reference, "
    "or PyTorch under random rounding, gives the runtime's value. The other checks leave them out."
)

_FLIPS = (
    "{flips} of {samples} answers change, and the confidence moves by at most {confidence:.3g}."
)


def _crossing(meaning: str, formula: str, remedy: str) -> CheckSpec:
    return _number(
        meaning,
        formula,
        remedy,
        unit=_SHARE,
        why=_ANSWERS,
        cause="threshold",
        within=_CROSSING,
        beyond=_CROSSING,
        unmeasured=CodeSpec(
            "{label} cannot be judged: {problems}.",
            cause="evidence",
            remedy="Measure again with this policy, whose operating points are measured "
            "(gate.operating_points). A point for one class needs samples of that class.",
        ),
    )


_COST_UNMEASURED = CodeSpec(
    "{label} was not measured: {problems}.",
    cause="evidence",
    remedy="Measure again with this version. A recording has neither times nor memory, and some "
    "systems do not report the memory of a process: bound another runtime, or leave the bound out.",
)

_COST = "{label} is {observed:.6g}, allowed {allowed}."

_SLOWER = "{runtime} is slower than the policy allows: {label} {usage}"

_TIMES_VARY = "The policy sets it. Times are from one machine at one moment."


def _cost(text: str, headline: str) -> Any:
    beyond = CodeSpec(text, headline=headline)
    return {"cause": "cost", "within": text, "beyond": beyond, "unmeasured": _COST_UNMEASURED}


def _champion(field: str, headline: str) -> Any:
    return {
        "cause": "champion",
        "why": f"The policy's incumbent.{field}.",
        "beyond": CodeSpec(_NUMBER_TEXT, headline=headline),
        "unmeasured": COMMON["unmeasured"].text,
    }


def _no_numbers(name: str, element: str, values: str) -> CheckSpec:
    text = (
        f"The output '{{output}}' has no {element} in any of {{samples}} samples, so nothing was "
        "compared."
    )
    return _check(
        f"Does the output have any {element} in a sample?",
        "samples",
        f"Add samples for which the model returns {values}, leave the output out of the export, or "
        f"set waive: {{{{NAME: [{name}]}}}} in the policy.",
        no_numbers=text,
        no_numbers_waived=f"{text} The policy waives this.",
    )


CHECKS: dict[str, CheckSpec] = {
    "part": _check(
        "Was this part of the release measured?",
        "evidence",
        "Measure the release again.",
        measured="{file} was measured.",
        unmeasured="The part {part} ({file}, {sha256}) was not measured.",
        wrong_file="The part {part} is {file} ({sha256}), but the evidence is about {measured}.",
    ),
    "samples": _number(
        "Are there enough samples to prove anything?",
        "n",
        "Give more evaluation samples, or lower gate.min_samples. One sample is enough only with "
        "probes (gate.instruments.probes).",
        unit="samples",
        why="The policy's min_samples.",
        cause="samples",
        **dict.fromkeys(
            ("enough", "too_few"), "{samples} samples were measured, {allowed} are required."
        ),
        unprobed="One sample was measured, and {runtimes:list} computed no probe with other "
        "values. Give a second sample, or set instruments.probes: true.",
    ),
    "determinism": _check(
        "Were the determinism switches set as the policy asks?",
        "evidence",
        _MEASURE_AGAIN,
        holds="The determinism switches were set as the policy asks.",
    ),
    "measured": _check(
        "Is each runtime recorded once, and was any measured?",
        "evidence",
        "Measure at least one runtime: run the stage 'parity', or run gate doctor to see why none "
        "could run.",
        holds="Each runtime is recorded once, and at least one was measured.",
    ),
    "repeats": _number(
        "Does the model return the same output twice?",
        "max|a - b| / max|a|",
        "Remove random numbers from eval mode, for example F.dropout(x, p, self.training), and "
        "state that forward changes. gate lint names the lines (TRC013).",
        unit="of the largest output",
        why="1e-4, far above what two runs differ by in rounding.",
        cause="model",
        holds="Two runs of the model on the same samples agree.",
        holds_with_state="Two runs of the model on the same samples agree. Its forward "
        "changes {names:list}; the gate restores them before each run.",
    ),
    "half_precision": _check(
        "Does the model compute in float32 throughout?",
        "model",
        "Remove autocast and .half() from forward, or use --precision reduced.",
        holds="The model computes in float32.",
    ),
    "float64": _check(
        "Does the model compute the same function in float64 and under random rounding?",
        "model",
        "Write constants as numbers instead of torch.finfo(x.dtype), and do not branch on the "
        "dtype, so that float64 computes the same function.",
        not_used="{problems}.",
    ),
    "undefined_casts": _check(
        "Do all floats that the model converts to integers fit the integer type?",
        "model",
        _CLAMP,
        undefined="On the first samples, the model converts floats that do not fit the "
        "integer type: {conversions:list}. The result is undefined in ONNX and in PyTorch, and "
        "may differ on another device.",
    ),
    "fast_path": _check(
        "Does PyTorch's fused path return what the layers compute?",
        "model",
        "Call torch.backends.mha.set_fastpath_enabled(False) in the factory of the model, and zero "
        "padded positions in forward where that is wanted.",
        violated="In eval mode PyTorch takes the fast path of nn.TransformerEncoder, which "
        "returns different numbers than its layers (zeros at padded positions). No exporter "
        "writes it to a file.",
    ),
    "not_measurable": _number(
        "Is the noise floor small enough to show a fault?",
        "floor / std(r)",
        _AMPLIFIES,
        unit="of the standard deviation",
        why="The policy's instruments.max_floor.",
        cause="model",
        no_reference="{output} cannot be judged: neither float64 nor random rounding "
        "computes the model's function, so its rounding error was not measured.",
        hidden="{output} cannot be judged: rounding alone changes it by {observed:.3g} of its "
        "standard deviation, allowed at most {bound:.3g}. A fault of that size would be hidden.",
        differs_in_float64="{output} cannot be judged: rounding alone changes it by "
        "{observed:.3g} of its standard deviation, allowed at most {bound:.3g}. In float64, "
        "the file differs from the model by {differs:.3g} of the standard deviation, allowed "
        "{allowed:.3g}: it is probably wrong.",
    ),
    "batch_axes": _check(
        "Which axis of each input and output is the batch?",
        "evidence",
        "If an axis is wrong, state it: --batch-axis NAME=AXIS, or NAME=none.",
        holds="Batch axes: {axes:list}.",
        one_call="No input has a batch axis: one sample is one call.",
    ),
    "inputs": _check(
        "Does the file take the model's inputs?",
        "outputs",
        "An exporter drops an input that changes no output. Export again if this one should.",
        model_only="The model has the inputs {names:list}, the file does not. The model "
        "received values for them from the samples and the probes. If one of them changed an "
        "output, another check would fail.",
    ),
    "role": _check(
        "Can the output have the role that the policy states?",
        "policy",
        "State what the output is: outputs: {{NAME: ROLE}} in the policy, or --role NAME=ROLE. "
        "docs/roles.md lists the roles and their checks.",
        matches="The output can have the role '{role}'.",
        unknown_outputs="The policy names the outputs {names:list}, but the file has "
        "{outputs:list}.",
        wrong_shape="The role '{role}' is for floats of shape (batch, classes >= 2); this "
        "{dtype} output has another shape or dtype. Use indices for classes that the model has "
        "chosen, scores for independent numbers, tensor for anything else.",
        wrong_sums="The role is 'probabilities', but the model's rows do not sum to 1 (off "
        "by up to {sum_error:.3g}). Use logits if a softmax follows, scores if each column "
        "stands for itself.",
        not_float="The role '{role}' is for floats, but the output is {dtype}. Use indices, "
        "mask or tensor.",
        no_vectors="The role is 'embedding', but no vectors of 2 to 65 536 numbers per "
        "sample were measured. Use tensor, or measure again.",
        not_integer="The role 'indices' is for integers, but the output is {dtype}. Use "
        "scores or tensor.",
    ),
    "agreement": _check(
        "Can the agreement of answers be judged for this output?",
        "policy",
        "Give samples of several classes, or name the output (--role NAME=logits) if it is a "
        "classifier.",
        not_claimed=CodeSpec(
            "Agreement of answers is not judged: {reason}. The numbers decide. Pass "
            "--role {output}=logits if the model is a classifier.",
            observed="not claimed",
        ),
    ),
    "runtime": _check(
        "Did the runtime measure the file?",
        "runtime",
        "Run gate doctor on the machine that measures. It says which provider or library is "
        "missing and how to install it.",
        no_record=CodeSpec(
            "{runtime} was not measured, and there is no record of the reason.",
            cause="evidence",
        ),
        empty=CodeSpec(
            "{runtime} was not measured; its record has neither outputs nor a reason.",
            cause="evidence",
        ),
        unusable=CodeSpec(
            "{runtime} was not measured; it cannot run any file here: {failure}",
            headline="{runtime} cannot run any file here: {failure:short}",
            cause="device",
        ),
        unusable_server=CodeSpec(
            "{runtime} was not measured, because the server cannot be used: {failure}",
            headline="The runtime {runtime} cannot be used: {failure:short}",
            remedy="Ask the server by hand: curl URL, the URL of the runtime's options. Its "
            "log shows the requests that it got.",
            cause="evidence",
        ),
        absent=CodeSpec(
            "{runtime} was not measured, but the policy requires it: {reason}",
            headline="{runtime} is required by the policy and was not measured: {reason:brief}",
            cause="device",
        ),
        absent_waived=CodeSpec(
            "{runtime} was not measured. The policy requires it only where it is present: {reason}",
            headline="not measured ({reason:brief})",
        ),
        not_plain="{runtime} was not measured: the file does not open with optimizations "
        "off ({plain_failure}), nor with ORT_ENABLE_BASIC. {served} decides, because files are "
        "served with optimizations.",
        failed=_FAILED,
        failed_server=CodeSpec(
            "{runtime} was not measured; its server has another file or refuses it: {failure}",
            headline="The server has another file or refuses its inputs: {failure:short}",
            remedy=SERVER,
            cause="server",
        ),
        chain_failed=replace(_FAILED, remedy=CHAIN),
        unregistered_operator=replace(_FAILED, remedy=_CUSTOM_OPERATOR),
        invalid_graph=replace(
            _FAILED,
            remedy="The graph is invalid: correct the node that the message names, or what "
            "wrote it (onnx.checker.check_model with full_check=True).",
        ),
        only_batches=CodeSpec(
            "{runtime} was not measured; it computes batches of {batch_sizes:list} only, and "
            "fails on others: {failure}",
            headline="A batch size was baked in: {runtime} computes batches of "
            "{batch_sizes:list} only, and otherwise {detail:short}",
            remedy=_BAKED_BATCH,
            cause="batch",
        ),
        reshape=CodeSpec(
            "{runtime} was not measured; a Reshape has a fixed shape that does not fit the "
            "input: {failure}",
            headline="A batch size was baked in: {runtime} {detail:short}",
            remedy=_BAKED_BATCH,
            cause="batch",
        ),
        wrong_outputs=CodeSpec(
            "{runtime} was not measured; its outputs do not match the model's: {failure}",
            headline="{mismatch}",
            remedy="{advice}",
            cause="outputs",
        ),
        out_of_memory=CodeSpec(
            "{runtime} was not measured; it ran out of memory: {failure}",
            headline="{runtime} ran out of memory: {failure:short}",
            remedy="Use a smaller --batch-size, or a machine with more memory.",
        ),
    ),
    "recording": _check(
        "Does the recording say what computed its outputs, and when?",
        "evidence",
        "Measure again from what gate record pack wrote.",
        holds="The recording ({recording}) states that {recorded_runtime} computed it on "
        "{device} at {recorded_at}. It did not run here: repeatability, batch invariance, "
        "latency and memory were not measured.",
    ),
    "session": _check(
        "Were the session options those that the policy asks for?",
        "evidence",
        _MEASURE_AGAIN,
        holds="The session options were set as the policy asks.",
        basic="The file does not open with optimizations off ({plain_failure}), and was measured "
        "with ORT_ENABLE_BASIC. {served} decides, because files are served with optimizations.",
    ),
    "provider": _check(
        "Did the provider that the runtime is named after run the nodes?",
        "device",
        "ONNX Runtime fell back to another provider. Run gate doctor, install the CUDA and cuDNN "
        "libraries of onnxruntime-gpu[cuda,cudnn], and keep compute nodes off the CPU.",
        holds="{wanted} is active.{notes}",
        ran="{wanted} is active and ran the nodes.{notes}",
        cpu_nodes=CodeSpec(
            "{problems}.",
            remedy="Run gate doctor, and avoid operators that ONNX Runtime has no CUDA kernel "
            "for. If these nodes may run on the CPU, set this runtime to required: never, and "
            "add one of kind: ort with the options providers: [{providers:list}]",
        ),
        cpu_optimized=CodeSpec(
            "The file was optimized for the CPU before export: it has {operators:list}. "
            "{problems}.",
            remedy="ONNX Runtime or Optimum wrote this file with optimizations for the CPU. Use "
            "the file that the exporter wrote, and let each session optimize it for its device.",
            cause="cpu_optimized",
        ),
    ),
    "precision": _check(
        "Did the runtime compute in float32?",
        "device",
        "Set the option by which the runtime computes in float32 (openvino: precision_hint: f32), "
        "or judge the file by --precision reduced.",
        holds="It computed in {precision}, as it reports.",
        unreported="ONNX Runtime does not report the precision of this provider. The "
        "numbers decide.",
    ),
    "server_file": _check(
        "Does the server state the digest of the file that it serves?",
        "evidence",
        "Add the parameter sha256 to the model's metadata, or name a digest_url in the runtime's "
        "options.",
        proven="{server} has the file as {model}, version {model_version}: {proof}.",
        unproven="{server} does not state which file {model}, version {model_version}, is. "
        "Another file with the same outputs would pass.",
    ),
    "server_input": _check(
        "Does the server refuse an input that the model does not accept?",
        "server",
        "Configure the server to check the shapes and datatypes of its inputs.",
        holds="The server refuses an input of a wrong shape.",
    ),
    "device": _check(
        "Did PyTorch and ONNX Runtime compute on the device in the runtime's name?",
        "device",
        "Run gate locate on this runtime to see the first layer that diverges; set "
        "determinism.tf32: false, and measure torch-cuda too.",
        **dict.fromkeys(("same", "misplaced", "large"), "{notes:alone}"),
    ),
    "outputs": _check(
        "Was every output of the file measured on every sample?",
        "outputs",
        "Export again with export.output_names as the model returns them, in its order.",
        holds="Every output of the file was measured on every sample.",
        violated_quantized=CodeSpec("{problems}.", remedy=_QUANTIZED_TENSORS),
    ),
    "reference": _check(
        "Do the model's outputs vary over the samples?",
        "samples",
        "Evaluate on real, varied samples with trained weights: inputs that all give the same "
        "answer prove nothing.",
        holds="The model's output is finite and varies over the samples.",
        constant="The model's output is constant. The numbers decide.",
        proven_constant=CodeSpec(
            "The output is constant and equal bit for bit.",
            observed="constant, equal bit for bit",
        ),
    ),
    "empty": _no_numbers(
        "empty",
        "element",
        "at least one element (an object to detect, a value above the threshold)",
    ),
    "nonfinite": _no_numbers("nonfinite", "finite element", "finite values"),
    "finite": _check(
        "Is the output free of NaN, and of infinity on one side only?",
        "nonfinite",
        "Run gate locate to see where it begins: float16 overflow, a log or division of zero, a "
        "mask of -inf. If ort-cpu passes and ort-cpu-optimized fails, a fusion causes it.",
        holds="No NaN, and no infinity on one side only.",
        violated=CodeSpec("{problems}.", headline="{problem}"),
        same_places="{count} elements are NaN on both sides, at the same positions.",
    ),
    "bounds": _check(
        "Does any bound of the policy apply to this output?",
        "policy",
        "Set a numeric bound, such as gate.runtimes.<runtime>.bounds.max_abs_diff. It applies to "
        "every output; bounds on classes apply only to logits.",
        no_bound=_UNBOUNDED,
        no_bound_quantized=CodeSpec(_UNBOUNDED, remedy=_QUANTIZED_TENSORS),
        checked_by_metric=CodeSpec(
            "This output is judged by the metric {names}.", observed="judged by a metric"
        ),
        checked_in_chain=CodeSpec(
            "This output is judged in the run of the whole release. To bound it here too, "
            "name it in the policy (outputs).",
            observed="judged in the chain",
        ),
    ),
    "near_ties": _number(
        "Does rounding alone decide only a few answers?",
        "count",
        "Look for equal scores and for rounding to integers in the model; or return the numbers "
        "before that step, and judge those.",
        unit="answers",
        why="1 % of them, or one.",
        cause="model",
        few=_NEAR_TIES,
        too_many=CodeSpec(
            _NEAR_TIES,
            headline="Rounding alone changes {count} of {total} {what} of the model, allowed "
            "{allowed}",
        ),
    ),
    "max_abs_diff": _number(
        "How large is the largest error of an element?",
        "max|c - r|",
        _EXPORT_AGAIN_OR_PRECISION,
        **_OF_DIFFERENCES,
    ),
    "mean_abs_diff": _number(
        "How large is the mean error?",
        "mean|c - r|",
        "A drift of all outputs points at precision (TF32, float16, bfloat16) or at other "
        "normalization statistics: export in eval mode from the same checkpoint.",
        **_OF_DIFFERENCES,
    ),
    "scaled_diff": _number(
        "How large is the largest error, relative to the standard deviation of the output?",
        "max|c - r| / std(r)",
        _EXPORT_AGAIN_OR_PRECISION,
    ),
    "l2_logits": _number(
        "How large is the error of the worst sample as a vector?",
        "max ‖c - r‖₂",
        _EXPORT_AGAIN_OR_PRECISION,
        **_OF_DIFFERENCES,
    ),
    "l2_probabilities": _number(
        "How far do the probabilities of the worst sample move?",
        "max ‖softmax(c) - softmax(r)‖₂",
        "Check the output (logits or softmax), eval mode, and precision.",
        unit="probability",
    ),
    "confidence_diff": _number(
        "How far does the confidence of the worst sample move?",
        "max|max softmax(c) - max softmax(r)|",
        _PRECISION_OR_STATISTICS,
        unit="probability",
    ),
    "confidence_over_": _number(
        "In how many samples does the confidence move by more than this?",
        "share of |max softmax(c) - max softmax(r)| above it",
        _PRECISION_OR_STATISTICS,
        **_OF_ANSWERS,
    ),
    "confidence_over_10_percent": _number(
        "In how many samples does the confidence move by more than 0.1?",
        "share of |max softmax(c) - max softmax(r)| above 0.1",
        "Check eval mode, the checkpoint and the order of classes.",
        **_OF_ANSWERS,
    ),
    "top1_agreement": _number(
        "How many samples get the same answer?",
        "share of argmax c = argmax r",
        "Look at the disagreeing samples and their margins in the evidence. Small margins point at "
        "precision, large ones at a wrong layer, checkpoint or class order.",
        unit=_SHARE,
        why="An exact file gives the same answers; a reduced one may not always.",
        unsure=_UNSURE,
    ),
    "top1_lower_bound": _number(
        "What agreement do this many samples prove?",
        "one-sided Clopper-Pearson bound",
        "Too few samples, or too many disagreements, for this bound. Without a disagreement, 0.99 "
        "needs 299 samples and 0.999 needs 2 995 at 95 % confidence.",
        unit=_SHARE,
        why="0.99 needs 299 samples without a disagreement, at 95 % confidence.",
        unsure=_UNSURE,
        too_few_samples=CodeSpec(
            f"{_NUMBER_TEXT} No answer differs, but the samples are too few to prove the bound: "
            "{needed} samples without a disagreement are needed at a confidence of "
            "{confidence:.4g}.",
            cause="samples",
        ),
        never_enough_samples=CodeSpec(
            f"{_NUMBER_TEXT} No answer differs, but no number of samples proves a bound of 1. "
            "Choose a bound below 1.",
            cause="samples",
        ),
    ),
    "top5_agreement": _number(
        "How many samples get the same five best answers?",
        "share of equal top-5 sets",
        "Look at the ranks after the first: check precision and class order.",
        **_OF_ANSWERS,
    ),
    "accuracy_drop": _number(
        "Is the file less accurate on the labels than the model?",
        "accuracy(r) - accuracy(c)",
        "Check preprocessing, class order and precision. Without labels, pass --labels.",
        unit="share of labels",
        cause="labels",
    ),
    "noise_ratio": _number(
        "Is the error larger than rounding explains?",
        "rms(c - r64) / floor / scatter",
        "Run gate locate to see the first layer that diverges. Check that file and model have the "
        "same weights, that the export ran in eval mode, and that TF32 and float16 are off.",
        why=_AS_ROUNDING,
        **_NOISE,
    ),
    "noise_peak": _number(
        "Is the worst element off by more than rounding explains?",
        "max|c - r64| / floor / scatter",
        "Run gate locate on the sample of max_abs_diff: a single weight or class may be wrong.",
        why="Correct files reach 2.6. A single element may be further off than the whole output.",
        **_NOISE,
    ),
    "noise_diff": _number(
        "Is any sample off by more than rounding, including samples without a float64 reference?",
        "max|c - r32| / floor",
        "Run gate locate on the sample of max_abs_diff: tracing may have fixed a branch of the "
        "model.",
        why="Correct files reach 7. It judges a single element.",
        **_NOISE,
    ),
    "repeatability": _number(
        "Does the runtime return the same output twice?",
        "max|a - b|",
        _NOT_REPEATABLE,
        **_OF_DIFFERENCES,
        cause="unstable",
    ),
    "repeatability_ratio": _number(
        "Does the runtime return the same output twice, apart from rounding?",
        "max|a - b| / rounding",
        _NOT_REPEATABLE,
        unit=ROUNDING,
        why=_AS_ROUNDING,
        cause="unstable",
    ),
    "batch_invariance": _number(
        "Does the output of a sample stay the same in another batch?",
        "max|a - b|",
        _DEPENDS_ON_BATCH,
        **_OF_DIFFERENCES,
        cause="batch",
        left_to_probes=_LEFT_TO_PROBES,
        undefined=_UNDEFINED_IN_BATCH,
    ),
    "batch_invariance_ratio": _number(
        "Does the output of a sample stay the same in another batch, apart from rounding?",
        "max|a - b| / rounding",
        _DEPENDS_ON_BATCH,
        unit=ROUNDING,
        why="Other batches are summed in another order.",
        cause="batch",
        left_to_probes=_LEFT_TO_PROBES,
        undefined=_UNDEFINED_IN_BATCH,
    ),
    "concurrency": _number(
        "Does each sample keep its answer when several clients ask at once?",
        "max|a - b| / rounding",
        "Look at the server's dynamic batching, at state that requests share, and whether all "
        "workers have the same weights.",
        unit=ROUNDING,
        why="The bound is batch_invariance_ratio: dynamic batching sums in another order.",
        cause="server",
        within="Under {label}, {requests} answers stay within {observed:.6g} × rounding of "
        "the answers without load, allowed {allowed}.",
        beyond="Under {label}, an answer differs from the one without load by "
        "{observed:.6g} × rounding, allowed {allowed} ({requests} requests).",
        crossed="Under {label}, {crossed} samples got an answer that is closer to the "
        "model's answer to another sample ({requests} requests).",
        unmeasured=CodeSpec("{label} was not measured: {problems}.", cause="evidence"),
    ),
    "cosine_distance": _number(
        "Does the embedding point in another direction?",
        "max(1 - cos(r, c))",
        "Check precision (TF32, float16, int8), eval mode, and the normalization of its length.",
        why="1e-4 unless the policy says otherwise.",
    ),
    "row_sum_diff": _number(
        "Do the probabilities sum to what the model's do?",
        "max|sum(c) - sum(r)|",
        "Look at the axis of the softmax, and whether it is in the file at all.",
        unit="probability",
        why="1e-3 unless the policy says otherwise.",
    ),
    "unequal_share": _number(
        "How many integers differ?",
        "share of c ≠ r",
        "Look at argmax, top-k and rounding in the model, and at the numbers that they decide on.",
        unit="share of elements",
        why="The next class or token is wrong, however near it is.",
    ),
    "mask_diff": _number(
        "Is the mask equal?",
        "max|c - r|",
        "A mask must be equal. Look at the comparison or the padding that makes it.",
        why="A mask is equal or wrong.",
    ),
    "probes": _check(
        "Did the runtime compute the probes, which are inputs that are not among the samples?",
        "evidence",
        "Give samples that the model can compute: the probes are derived from them.",
        missing=_UNNOTICED,
        missing_waived=f"{_UNNOTICED} The policy allows this recording to lack probes.",
        missing_recorded=CodeSpec(
            _UNNOTICED,
            remedy="Record what gate samples export --reference wrote, including the probes, "
            "and pack it again; or set options: {{probes: when_recorded}} in the policy.",
        ),
    ),
    "probe_": _probe(_NOT_TRACED, "baked_in"),
    "probe_value": _probe(_NOT_TRACED, "baked_in"),
    "probe_search": _probe(_NOT_TRACED, "baked_in"),
    "probe_batch": _probe(_BAKED_BATCH, "batch"),
    "probe_size": _probe(
        "Compute sizes from x.shape in forward and name the axis dynamic, or fix it in the file's "
        "inputs.",
        "baked_in",
    ),
    "graph": _check(
        "Was the graph of the file read?",
        "evidence",
        "Measure again with this version. It reads the graph of the file.",
        unread="The graph of the file was not read: {reason}.",
        unread_count="The graph of the file was not read: the report counts {nodes} nodes "
        "and names {operators} operators.",
        unread_files="The graph of the file was not read: the report is about the data "
        "files {reported:list}, the file has {files:list}.",
    ),
    "graph_training_mode": _graph(
        "Does every node compute as in eval mode?",
        "Export in eval mode (model.eval(), training=TrainingMode.EVAL).",
        "training_mode",
    ),
    "graph_fixed_batch": _graph(
        "Does the file accept batches of any size?",
        "Export with dynamic_batch: true, or ask for a fixed batch.",
        "batch",
    ),
    "graph_zero_initializer": _graph(
        "Are all weights loaded, and none left at zero?",
        "Load the checkpoint before the export: a weight of the file is all zero, the model's is "
        "not.",
        "weights",
    ),
    "graph_nonfinite_initializer": _graph(
        "Are all weights of the file finite?",
        "Export again from a checkpoint whose weights are finite.",
        "nonfinite",
    ),
    "graph_other_weights": _graph(
        "Are the weights of the file those of the model?",
        "Export again from the checkpoint that --checkpoint names, or pass the checkpoint that the "
        "file was made from.",
        "weights",
    ),
    "graph_rounded_weights": _graph(
        "Does the file keep the weights in float32?",
        "Export the float32 model, or judge a file that is rounded on purpose by --precision "
        "reduced.",
        "weights",
    ),
    "graph_float64": _graph(
        "Does the file compute without float64?",
        "Keep numpy scalars and Python floats out of forward, or cast to float32.",
    ),
    "graph_float16": _graph(
        "Does the file compute without float16 and bfloat16?",
        "Export the float32 model, or judge a file that is float16 on purpose by --precision "
        "reduced.",
    ),
    "graph_quantized": _graph(
        "Is the file free of quantized operators?",
        "Promote the float32 file, and pass the quantized one with --twin. A policy with "
        "precision: quantized judges the twin.",
    ),
    "graph_external_data": _graph(
        "Are the external data files complete and as recorded?",
        "Copy the external data again together with its model file.",
    ),
    "graph_unused_output": _graph(
        "Does an output depend on every input, weight and node?",
        "Remove the unused input, weight or node from the model, and export again.",
    ),
    "graph_domain": _graph("Is every operator in a standard domain of ONNX?", _CUSTOM_OPERATOR),
    "graph_opset": _graph(
        "Does ONNX Runtime support the opset of the file?",
        "Export with an opset that the deployed runtime supports.",
    ),
    "graph_checker": _graph(
        "Does the file pass the checker of onnx?",
        "Export again with a newer exporter. Other runtimes may refuse the file.",
    ),
    "graph_": _graph(
        "Is the graph free of what the policy forbids?",
        "Export again without it, or allow it in the policy (graph_forbid).",
    ),
    "export_record": _export(
        "Let the gate export the file (gate export, or the stage 'export'), or set "
        "gate.export_findings.record: optional.",
        "evidence",
    ),
    "export_lint": _export(
        "Run gate lint on the model's factory and rewrite what it shows; docs/lint has a page per "
        "rule. A `# noqa: TRC…` on the line silences it."
    ),
    "export_tracer_warnings": _export(
        "Rewrite the lines that the tracer warns about (gate lint shows how), or export by "
        "strategy: scripted."
    ),
    "export_hazards": _export(
        "Look at what the exporter warns about: operators in training mode, outputs without a "
        "batch axis."
    ),
    "preprocessing": _check(
        "Was the preprocessing compared with that of training, for this model and on enough "
        "pictures?",
        "preprocessing",
        "Measure it with gate.preprocess.measure or the stage 'parity', on enough pictures, with "
        "the spec that the model was trained with.",
        holds="Measured for the model's spec on {images} distinct pictures.",
    ),
    "preprocessing_flips_": _number(
        "How many pictures get another answer with this implementation of the preprocessing?",
        "flips / pictures",
        "Run gate preprocess compare --model to see which pictures change their answer, and "
        "correct that implementation.",
        unit="share of pictures",
        why="The policy's max_flips.",
        cause="preprocessing",
        within=_FLIPS,
        beyond=_FLIPS,
        unmeasured=CodeSpec("The answers on these pictures were not compared.", cause="evidence"),
    ),
    "preprocessing_": _number(
        "Does this implementation compute the same tensor from a picture as training does?",
        "max|tensor - reference|",
        "Run gate preprocess compare on the pictures. It names known causes (no antialias, "
        "half-pixel shift, channel order, mean/std). Or ship the preprocessing in the file: gate "
        "preprocess prepend.",
        unit="1/255 of the value range",
        why="One gray level, unless the policy says otherwise.",
        cause="preprocessing",
        within="The largest difference is {observed:.6g}/255, allowed at most "
        "{bound:.6g}/255 (n = {samples}).{notes}",
        beyond=CodeSpec(
            "The largest difference is {observed:.6g}/255, allowed at most {bound:.6g}/255 "
            "(n = {samples}).{notes}",
            headline="{consumer} computes other pixels than in training: {observed:.4g}/255, "
            "allowed {bound:.4g}/255.{notes}",
        ),
        failed="It failed: {failure}",
        wrong_shape="The tensor has another shape or dtype: {detail}",
        incomplete="{samples} of {images} pictures were compared.",
        nonfinite="{count} values are NaN or infinite.",
        unsupported="{consumer} cannot follow the spec on any machine: {reason}",
        unavailable="{consumer} was not measured: {reason}",
        recorded_times=CodeSpec(
            "{consumer} is recorded {count} times, expected once.", cause="evidence"
        ),
    ),
    "incumbent": _check(
        "Is there a champion to compare with?",
        "champion",
        "Run the check where the registry and its ledger can be read: gate check --against NAME, "
        "or the stage 'promote'; without the ledger, pass --trust with the keys that sign "
        "verdicts. To promote a file that cannot be compared with the champion, use a policy "
        "without the section incumbent once.",
        compared="Compared with version {version}, the champion.",
        same_file="Version {version}, the champion, is this file.",
        first_release_allowed="There is no champion. The policy allows a first release.",
        first_release_refused="There is no champion, and the policy refuses a first release.",
        left_to_service="The file was not compared with the champion here. The service "
        "compares it by its own policy and ledger before it serves (promotion: by_service).",
        not_read="The champion was not looked up, so nothing was compared.",
        not_compared="The champion (version {version}) was not compared: {reason}.",
        other_file="The champion (version {version}) was compared with another file: {sha256}.",
        no_digests="The comparison with the champion (version {version}) lacks the digests "
        "of its file and evidence.",
        other_samples="The champion (version {version}) was measured on other samples: "
        "{champion_samples} of {champion_data}, and this file on {file_samples} of {file_data}.",
    ),
    "incumbent_accuracy_drop": _number(
        "Is the file less accurate on the labels than the champion?",
        "accuracy(champion) - accuracy(new)",
        "Train longer or on more data, and look at the labels; or allow more "
        "(incumbent.max_accuracy_drop).",
        unit="share of labels",
        **_champion("max_accuracy_drop", "Less accurate than the champion by {usage}"),
    ),
    "incumbent_agreement": _number(
        "How often does the file give the champion's answer?",
        "share of equal answers",
        "Look at the order of the classes and at the preprocessing first. A better model changes "
        "answers too: then allow fewer equal ones (incumbent.min_agreement).",
        unit=_SHARE,
        **_champion("min_agreement", "The answers differ from the champion's: the same on {usage}"),
    ),
    "incumbent_latency_ratio": _number(
        "Is the file slower than the champion?",
        "median(new) / median(champion)",
        "Compare the operators and the opset of the two files, export with constant folding, "
        "measure on a quiet machine; or allow more (incumbent.max_latency_ratio).",
        unit="times",
        **_champion("max_latency_ratio", "Slower than the champion by a factor of {usage}"),
    ),
    "metric": _check(
        "Was the metric of the task measured as the policy defines it?",
        "evidence",
        "Correct the function or the labels, and measure again with this policy.",
        holds="The metric was measured.",
    ),
    "metric_drop": _metric_drop(
        "Is the metric of the file worse than that of the model, on the same samples?",
        "upper confidence bound of metric(model) - metric(file)",
        "The policy's max_drop of the metric.",
        "Run gate locate to see the first layer that diverges; or allow more (max_drop).",
        no_direction=CodeSpec(
            "{point} of the file is larger than the model's by {gain:.6g}, more than it may drop, "
            "and the policy does not state whether larger is better.",
            remedy="Set higher_is_better: false for a loss or a count of errors, else true.",
            cause="policy",
        ),
    ),
    "metric_limit": _number(
        "Is the metric of the file as good as the policy demands?",
        "metric(file)",
        "Train longer or on more data, and look at the labels; or change min or max of the metric.",
        unit="the unit of the metric",
        why="The policy's min or max of the metric.",
        cause="metric",
    ),
    "metric_champion_drop": _metric_drop(
        "Is the metric of the file worse than that of the champion?",
        "upper confidence bound of metric(champion) - metric(new)",
        "The policy's max_drop_from_champion of the metric.",
        "Train longer or on more data; or allow more (max_drop_from_champion).",
    ),
    "latency_ratio": _number(
        "Is the runtime slower than PyTorch on the CPU in the same run?",
        "median(runtime) / median(PyTorch)",
        "Measure on a quiet machine, give the runtime its optimizations (ort-cpu-optimized) and as "
        "many threads as PyTorch; or allow more (latency_ratio).",
        unit="times",
        why=_TIMES_VARY,
        **_cost(f"{_COST} By batch: {{ratios:list}}.{{notes}}", _SLOWER),
    ),
    "memory_mb": _number(
        "How much memory do opening and running the file take?",
        "growth of the process at its peak",
        "Use a smaller batch size or a smaller model, and look at the peak in the table of costs; "
        "or allow more (memory_mb).",
        unit="MB",
        **_cost(
            f"{_COST} The memory of its process grew by this much while it opened and ran the file "
            "(at its peak; of a browser at the end).",
            "{runtime} takes more memory than the policy allows: {label} {usage}",
        ),
    ),
    "p95_ms": _number(
        "How long do 95 % of the requests to the server take?",
        "95th percentile of the slowest load",
        "Give the server more workers or smaller batches, look at its queue; or allow more "
        "(p95_ms).",
        unit="ms",
        why=_TIMES_VARY,
        **_cost(_COST, _SLOWER),
    ),
    "throughput_min": _number(
        "How many requests per second does the server answer?",
        "requests / second of the load with the most connections",
        "Give the server more workers or dynamic batching; or allow less (throughput_min).",
        unit="requests/s",
        why=_TIMES_VARY,
        **_cost(
            _COST, "{runtime} answers fewer requests than the policy asks for: {label} {usage}"
        ),
    ),
    "threshold_crossing_bound": _crossing(
        "How many decisions at this operating point may change, as far as this many samples prove?",
        "one-sided Clopper-Pearson bound",
        "Too few samples, or too many that cross. Without any crossing, a bound of 0.01 needs 299 "
        "samples and 0.001 needs 2995; for a point of one class, samples of that class.",
    ),
    "threshold_crossing": _crossing(
        "How many samples are above the operating point on one side only?",
        "crossed / n",
        "Look at the crossing samples in samples.csv. Confidences near the operating point cross "
        "by rounding alone: move the point or allow a share. Far from it, check precision (TF32, "
        "float16, int8).",
    ),
}
"""By the name of the check, or the longest beginning of it."""

PROBLEMS: dict[str, str] = {
    # determinism, session
    "switch_differs": "{switch} is {actual}, the policy asks for {wanted}",
    "other_kind": "the evidence is from {kind}, the policy asks for {wanted}",
    "other_options": "its options were {options}, the policy asks for {wanted}",
    "unknown_kind": "the evidence does not state the kind of the runtime, the policy asks for "
    "{wanted}",
    "not_plain": "the file does not open with optimizations off ({plain_failure}), and no "
    "optimized session was measured",
    # measured
    "recorded_twice": "{runtime} is recorded twice",
    "none_measured": "no runtime was measured",
    # repeats, half_precision, float64
    "outputs_vary": "two runs of the model on the same samples differ by {spread:.3g} of its "
    "largest output: the model draws random numbers, or changes itself, in eval mode",
    "depends_on_calls": "the outputs depend on the number of the call: forward changes "
    "{names:list} and computes with it, so a second call differs by {spread:.3g} of the largest "
    "output",
    "sixteen_bits": "the model computes in 16 bits in {where}, and the policy's precision is "
    "'exact'",
    "float64_differs": "the float64 reference was not used for {outputs:list}, because it computes "
    "a different function than float32 (q = {largest:.3g})",
    "float64_differs_at": "the float64 reference was not used for {outputs:list}, because it "
    "computes a different function than float32 (q = {largest:.3g}); the first difference is in "
    "{where}",
    "rounding_differs": "random rounding was not used, because without rounding those runs do not "
    "reproduce the model",
    # provider, precision, recording
    "unstated": "the runtime does not state its provider",
    "inactive": "the active provider is {active}, not {wanted}",
    "elsewhere": "{count} compute nodes ran on another provider",
    "nothing_on": "no node is recorded to have run on {provider}",
    "on_cpu": "{count} compute nodes ran on the CPU ({names:list})",
    "on_cpu_share": "{count} compute nodes ran on the CPU ({names:list}), {share:.2g} % of the "
    "time of one run",
    "other_providers": "nodes ran on {providers:list}",
    "other_precision": "it reports {precision} precision, and the policy's precision 'exact' asks "
    "for {wanted:or}",
    "recording_lacks": "the recording does not state its {keys:list}",
    "recording_ran": "the recording has times or repeated runs, which only a run here can measure",
    # outputs, reference, finite
    "other_outputs": "the outputs {measured:list} were measured, the file has {outputs:list}",
    "other_lengths": "outputs have another length than the reference's",
    "other_samples": "'{output}' was measured on {count} samples, the data set has {samples}",
    "no_logits": "no output of shape (batch, classes) for the logits {names:list}",
    "no_classes": "no output of shape (batch, classes) to judge as logits",
    "no_output_varies": "no output varies over the samples: the model returns the same for all",
    "no_scale": "the largest absolute value of the model's output is {largest}, so an error has "
    "no scale",
    "single_class": "the model predicts one class for every sample, so agreement proves nothing. "
    "Give samples of several classes, or state the role: outputs: {{{output}: tensor}} in the "
    "policy, or --role {output}=tensor",
    "one_side_only": "{count} elements are NaN or infinite on one side only",
    "nan_both": "{count} elements are NaN on both sides, which proves nothing unless the policy "
    "says nonfinite: same_places",
    "nan_statistics": "the measured {names:list} is NaN",
    # noise
    "no_function": "neither float64 nor random rounding computes the model's function",
    "noise_unmeasured": "{reason}",
    "nothing_compared": "no element could be compared with the float64 reference",
    "few_in_float64": "only {count} of {required} samples were computed in float64: {reason}",
    # operating points
    "no_class": "no output has a class {label}; this one has {classes} classes",
    "records": "the evidence has {count} records of this point",
    "with_softmax": "it was measured with a softmax, which its role in the policy excludes",
    "without_softmax": "it was measured without a softmax, which its role in the policy needs",
    "no_sample": "no sample was compared at this point",
    "contradiction": "its counts contradict each other: {count} samples were compared, of {most} "
    "with an answer; {reference_above} and {candidate_above} are above, {crossed} cross"
    "{crossing:samples}",
    # probes
    "no_probe": "no probe was computed",
    "no_batch_probe": "there is no probe of the batch sizes {sizes:list}",
    "unprobed": "the recording has no outputs for the probes {names:list}",
    "unsearched": "the search for inputs on which the traced model differs did not run",
    # preprocessing
    "preprocessing_unmeasured": "the policy asks for parity of the preprocessing, and it was not "
    "measured",
    "no_preprocessing": "the evidence does not say which preprocessing the model has",
    "other_spec": "the preprocessing that was compared is not the model's",
    "other_reference": "{measured} was the reference, not {wanted}",
    "no_tensor": "the evidence does not state dtype and shape of the preprocessed tensor",
    "misfit": "{detail}",
    "other_model": "the answers are from another file than the one that is judged",
    "few_pictures": "{count} distinct pictures were measured, at least {required} are required",
    # metrics
    "metric_absent": "it was not measured",
    "metric_other": "it was measured by another definition (function, options, output, slices or "
    "confidence)",
    "metric_failed": "{reason}",
    "metric_groups": "the evidence has other slices than the policy",
    "metric_slices": "the digest of the file with the columns of its slices is not recorded",
    "metric_source": "the digest of the function's source is not recorded",
    "metric_values": "the digest of its values per sample is not recorded",
    "metric_samples": "its slices do not contain each sample of the data set exactly once",
    "metric_numbers": "its recorded drops are not the differences of its values",
    "metric_no_side": "it was not evaluated on {runtime}",
    # costs
    "not_timed": "it was not timed together with PyTorch; recordings and evidence of older "
    "versions have no times",
    "one_side_timed": "batches, or single samples, were not timed on both sides",
    "other_batches": "the runtime was timed on batches of {size}, PyTorch on batches of "
    "{reference_size}",
    "only_first": "only the first batch of {size} samples was timed, which includes the warm-up",
    "memory_unread": "its memory was not measured, or could not be read",
    "memory_older": "the evidence is from an older version, which measured memory differently",
    "no_load": "not every load of options.connections was measured, which needs a runtime of "
    "kind: server",
    "unstable_reference": "the reference itself has no stable answer to compare with",
    "answers_wrong_shape": "the server accepted an input with two extra axes",
}
"""Items of `params["problems"]`."""

NOTES: dict[str, str] = {
    "in_group": "The largest ratio is in {group}.",
    "closer_reference": "PyTorch is closer to the float64 reference.",
    "closer_candidate": "The runtime is closer to the float64 reference than PyTorch.",
    "closer_neither": "Both are equally far from the float64 reference.",
    "by_rounding": "Measured against float32, in units of random rounding.",
    "shape_nodes": "Warning: {count} nodes that compute shapes or indices ran on the CPU, "
    "{share:.2g} % of the time of one run.",
    "no_kernel": "Warning: {count} nodes without a CUDA kernel ran on the CPU "
    "({operators:list}), {share:.2g} % of the time of one run.",
    "silenced": "{count} silenced by noqa.",
    "overflow": "The file overflows at {factor:.3g} times the samples: {elements} elements are NaN "
    "or infinite where the model's are finite. It agrees everywhere else on this input.",
    "no_rows": "The runtime fails at {factor:.3g} times the samples, where the model returns an "
    "output without elements (no box, no row): {failure}",
    "causes": "Cause: {causes:list}.",
    "metric_unpaired": "The champion was measured on other samples, so the two are not compared "
    "sample by sample.",
    "other_threads": "The runtime had {threads} threads, PyTorch {reference_threads}.",
    "no_single": "Single samples were not timed: {reason:reason}.",
    # device
    "torch_on": "PyTorch computed on {providers:list} (device {device}).",
    "torch_on_cpu": "PyTorch computed on the CPU only ({reason}).",
    "torch_not_measured": "PyTorch computed on the CPU only (torch-cuda was not asked for).",
    "runtime_on": "ONNX Runtime computed on {provider} (nodes: {nodes:list}).",
    "not_on_cuda": "{runtime} is not on CUDA, see its check 'provider'.",
    "factor": "{worst} is {factor:.3g} times its bound.",
    "factor_no_fallback": "{worst} is {factor:.3g} times its bound although both ran on CUDA, so "
    "this is no fallback.",
    "moved_file": "The file is far off on the CPU too, so the device is not the cause.",
    "moved_both": "PyTorch on CUDA is far from its own output on the CPU too, so both sides moved "
    "with the device: look at TF32, the cuDNN algorithms and the driver.",
    "moved_unknown": "PyTorch ran on the CPU only, so it is open whether the device or the file "
    "is the cause.",
    "moved_runtime": "PyTorch on CUDA agrees with its output on the CPU, so ONNX Runtime moved: "
    "look at TF32, the cuDNN algorithm and fusions.",
    "level_no_fusion": "{other} is far off as well, so a fusion is not the cause.",
    "level_fusion": "{other} is not, which points at a fusion.",
    "level_kernel": "{other} is not, which points at a single kernel.",
    "switches": "In force: PyTorch with TF32 {tf32_matmul} for matmul and {tf32_cudnn} for cuDNN, "
    "cudnn_deterministic {cudnn_deterministic}; ONNX Runtime with use_tf32 {use_tf32}, "
    "cudnn_conv_algo_search {algorithm}.",
    "locate": "Next: gate locate MODEL.onnx --reference {factory} --inputs SAMPLES --runtime "
    "{runtime}.",
}
"""Items of `params["notes"]`: sentences that follow the text."""

_UNEQUAL = "{runtime} returned {got} for output '{tensor}', the model returns {want}"

_COUNTED = "{runtime} returned {got} outputs, the file names {names}, the model returns {want}"

_IN_ITS_ORDER = "Export again with export.output_names as the model returns them, in its order."

MISMATCHES: dict[str, CodeSpec] = {
    "number": CodeSpec(_COUNTED, remedy=_IN_ITS_ORDER),
    "left_out": CodeSpec(
        f"{_COUNTED}: the file lacks output {{left:list}} of the model", remedy=_IN_ITS_ORDER
    ),
    "maps": CodeSpec(
        f"{_COUNTED}: {{maps:list}} of the file is a list of maps (ZipMap), which is compared as "
        "two outputs, values and keys",
        remedy="Convert the file with the option zipmap: False, or let the model return the "
        "keys behind the values.",
    ),
    "order": CodeSpec(
        "{runtime} returned the outputs {names}, the model returns {keys}: the same "
        "names in another order, so code that reads outputs by position gets the wrong ones",
        remedy="Export again with export.output_names in the model's order.",
    ),
    "partly_renamed": CodeSpec(
        "{runtime} returned the outputs {names}, some of which have other names in the model: "
        "{renamed:list}",
        remedy="Export again with export.output_names: null, or with other names for all.",
    ),
    "first_axis": CodeSpec(
        _UNEQUAL,
        remedy="If axis 0 is the batch, it was fixed at export: set export.dynamic_batch: true; "
        "if another axis is, state it: --batch-axis NAME=AXIS. If its size depends on values, the "
        "file selects other elements (a threshold, a limit).",
    ),
    "shape": CodeSpec(
        _UNEQUAL, remedy="Export the same model again, with an example of the samples' shape."
    ),
    "float64": CodeSpec(
        _UNEQUAL,
        remedy="The model's forward makes it float64 (a buffer or NumPy scalar of float64, "
        ".double()): cast it in forward, or keep float64 in the file.",
    ),
    "float16": CodeSpec(
        _UNEQUAL, remedy="Judge a file that is float16 on purpose by --precision reduced."
    ),
    "dtype": CodeSpec(
        _UNEQUAL, remedy="Export the model in float32, with the outputs that its forward returns."
    ),
}
"""Text and remedy by `params["mismatch"]` of the code `wrong_outputs`."""

REASONS: dict[str, str] = {
    "not_finite": "the model's output is not finite",
    "no_finite_number": "the model's output has no finite number",
    "nothing_attended": "its attention mask leaves nothing to attend to",
    "rounding_changes_shapes": "rounding alone changes the shapes of the model's outputs",
    "rounding_moves_output": "rounding alone moves the model's output as far",
    "fixed_batch": "the batch axis of the file is fixed",
    "no_single_sample": "the model does not accept a batch of one sample",
}
"""Reasons in evidence that are codes; other reasons there are messages of libraries."""


def row_of(name: str) -> CheckSpec | None:
    """Return the row of a check, or of the longest beginning of its name that has one.

    A beginning has whole words: `probe_`, not `pro`.
    """
    ends = [end for end in range(1, len(name)) if "_" in name[end - 1 : end + 1]]
    beginnings = (name[:end] for end in (len(name), *reversed(ends)))
    return next((CHECKS[start] for start in beginnings if start in CHECKS), None)


def meaning_of(name: str) -> CheckSpec:
    """Return the row of a check; of one that the table lacks, a row without a number."""
    return row_of(name) or CheckSpec(f"The check {name}.", "numbers", "")


def row_for(check: CheckResult) -> CheckSpec:
    """Return the row of a check; that of a probe is the row of its kind."""
    kind = check.params.get("kind")
    return meaning_of(f"probe_{kind}" if check.name.startswith("probe_") and kind else check.name)


def code_for(check: CheckResult) -> CodeSpec | None:
    """Return the text of the code of a check; None: it has none, or one of a newer version."""
    return row_for(check).code(check.code or "")


def spec_texts(spec: CheckSpec) -> dict[str, str | None]:
    """Return the text of `gate policy explain` on a check."""
    return {name: getattr(spec, name) for name in ("meaning", "formula", "unit", "why")}


def cause_for(check: CheckResult) -> Cause:
    """Return what one check points at where nothing else is known."""
    if check.verdict is Verdict.WAIVED:
        return "waived"
    code = code_for(check)
    return code.cause if code and code.cause else row_for(check).cause
