"""The only table of checks: meaning, unit, bound, cause, remedy, one text per code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

from gate.decision.check_result import CheckResult, Verdict
from gate.records.evidence import ONLY_BATCHES, Evidence

OPTIMISER = (
    "Serve with a lower graph_optimization_level, such as ORT_ENABLE_BASIC; update ONNX Runtime; "
    "or export with another opset, so that the pattern is not fused."
)
"""Of the file that agrees with optimisations off."""

CHAIN = (
    "Run gate locate on the release: it says which part diverges first, and whether the seam "
    "before it is to blame."
)
"""Of several files that do not run one after the other."""

REMEDIES: dict[str, str] = {
    "samples": "Give more evaluation samples, or lower gate.min_samples knowingly. One sample is "
    "enough only with probes (gate.instruments.probes).",
    "determinism": "Measure again with this policy: the switches of the evidence are not the "
    "ones that the policy asks for.",
    "measured": "Measure at least one runtime: run the stage 'parity', or gate doctor to see why "
    "none could run.",
    "runtime": "Run gate doctor on the machine that measures: it says which provider or library "
    "is missing and how to install it.",
    "session": "Measure again with this policy: the session options of the evidence are not the "
    "ones that the policy asks for.",
    "provider": "ONNX Runtime fell back to another provider. Run gate doctor; install the CUDA and "
    "cuDNN libraries of onnxruntime-gpu[cuda,cudnn], and keep compute nodes off the CPU.",
    "provider_cpu_nodes": "Run gate doctor, and avoid operators that ONNX Runtime has no CUDA "
    "kernel for. If these nodes may run on the CPU, set this runtime to required: never, and add "
    "one of kind: ort with the options",
    "provider_cpu_optimized": "ONNX Runtime or Optimum wrote this file with optimizations for the "
    "CPU. Give the file that the exporter wrote, and let each session optimize it for its device.",
    "precision": "Set the option by which the runtime computes in float32 (openvino: "
    "precision_hint: f32), or judge the file by --precision reduced.",
    "device": "Run gate locate on this runtime to see the first layer that diverges; set "
    "determinism.tf32: false, and measure torch-cuda beside it.",
    "outputs": "Export again with export.output_names as the model returns them, in its order.",
    "batch_axes": "If an axis is wrong, state it: --batch-axis NAME=AXIS, or NAME=none.",
    "inputs": "An exporter drops an input that changes no output; export again if this one should.",
    "repeats": "Take random numbers out of eval mode (F.dropout(x, p, self.training), gate lint: "
    "TRC013), and state that forward changes itself.",
    "half_precision": "Remove autocast and .half() from forward, or use --precision reduced.",
    "float64": "Write constants as numbers instead of torch.finfo(x.dtype), and do not branch on "
    "the dtype, so that float64 computes the same function.",
    "fast_path": "Call torch.backends.mha.set_fastpath_enabled(False) in the factory of the model, "
    "and zero padded positions in forward where that is wanted.",
    "not_measurable": "The file may be correct. The model amplifies rounding (are its weights "
    "trained?), or its function depends on the dtype: keep torch.finfo and branches on the dtype "
    "out of forward, or raise instruments.max_floor.",
    "role": "Say what the output is: outputs: {NAME: ROLE} in the policy, or --role NAME=ROLE; the "
    "roles and their checks are in docs/roles.md.",
    "agreement": "Give samples of several classes; name the output (--role NAME=logits) if it is a "
    "classifier.",
    "mask_diff": "A mask must be equal: look at the comparison or the padding that makes it.",
    "unequal_share": "Indices differ: look at argmax, top-k and rounding in the model, and at the "
    "numbers that they are made of.",
    "cosine_distance": "The direction of an embedding moved: check precision (TF32, fp16, int8), "
    "eval mode, and the normalisation of its length.",
    "row_sum_diff": "Probabilities do not sum to what the model's do: look at the axis of the "
    "softmax, and whether it is in the file at all.",
    "reference": "Evaluate on real, varied samples with trained weights: inputs that all give the "
    "same answer prove nothing.",
    "empty": "Add samples for which the model returns at least one element (an object to detect, a "
    "value above the threshold), leave the output out of the export, or say waive: {NAME: [empty]} "
    "in the policy.",
    "nonfinite": "Add samples for which the model returns finite values, leave the output out of "
    "the export, or say waive: {NAME: [nonfinite]} in the policy.",
    "finite": "Look for fp16 overflow, log or division of zero, or a mask of -inf; run with "
    "optimisations off to see whether fusion makes it.",
    "quantized_classifier": "This policy is for quantized classifiers. Judge the file by a policy "
    "with precision: quantized, task: tensors and a numeric bound (docs/quantized.md).",
    "bounds": "Set a numeric bound, such as gate.runtimes.<runtime>.bounds.max_abs_diff: it "
    "applies to every output, bounds on classes only to logits.",
    "max_abs_diff": "Export in eval mode, try export.do_constant_folding: false, compare ort-cpu "
    "with ort-cpu-optimized (fusion), turn TF32 off, check that the checkpoint is the same.",
    "mean_abs_diff": "A drift over all outputs points at precision (TF32, fp16, bf16) or at other "
    "normalisation statistics: export in eval mode from the same checkpoint.",
    "scaled_diff": "Export in eval mode, try export.do_constant_folding: false, compare ort-cpu "
    "with ort-cpu-optimized (fusion), turn TF32 off, check that the checkpoint is the same.",
    "l2_logits": "See max_abs_diff: eval mode, constant folding, fusion, TF32, same checkpoint.",
    "l2_probabilities": "The probabilities moved: check the output (logits or softmax), eval mode, "
    "and precision.",
    "confidence_diff": "The confidence moved although top-1 may agree: check precision (TF32, "
    "fp16, int8), eval mode, and the normalisation statistics.",
    "confidence_over_1_percent": "Check precision (TF32, fp16, int8) and normalisation.",
    "confidence_over_5_percent": "Check precision (TF32, fp16, int8) and normalisation.",
    "confidence_over_10_percent": "Check eval mode, the checkpoint and the order of classes.",
    "top1_agreement": "Look at the disagreeing samples and their margins in the evidence: small "
    "margins point at precision, large ones at a wrong layer, checkpoint or class order.",
    "top1_lower_bound": "Too few samples, or too many disagreements, for this bound: without any "
    "disagreement 0.99 needs 299 samples and 0.999 needs 2 995 at 95 % confidence.",
    "top5_agreement": "Look at the ranks behind the first: check precision and class order.",
    "near_ties": "Too many answers hang on the last bit: look at what the model decides there "
    "(equal scores, rounding to integers), or judge the numbers before that decision.",
    "unsure": "Nothing is known to be wrong with the file. The model amplifies rounding until its "
    "answers change: train it, normalise its inputs, evaluate on samples with a margin, or judge "
    "numbers only (task: tensors).",
    "noise_ratio": "The runtime's error is larger than float32 rounding: run gate locate to see "
    "the first layer that diverges; check that the weights are the same, eval mode, TF32, fp16.",
    "noise_peak": "A few elements are off by more than float32 rounding: look at the sample of "
    "max_abs_diff and run gate locate; a single weight or class may be wrong.",
    "noise_diff": "A sample is off by more than float32 rounding: look at the sample of "
    "max_abs_diff and run gate locate on it; a branch of the model may be baked in.",
    "repeatability": "Two identical runs differ: look for dropout or random operators that are "
    "still active (training mode), or atomics on CUDA.",
    "repeatability_ratio": "Two identical runs differ: look for dropout or random operators that "
    "are still active (training mode), or atomics on CUDA.",
    "batch_invariance": "A sample's answer depends on its batch: look for BatchNorm in training "
    "mode, or a batch size that was baked into the graph.",
    "batch_invariance_ratio": "A sample's answer depends on its batch: look for BatchNorm in "
    "training mode, or a batch size that was baked into the graph.",
    "probes": "Give samples that the model can compute; without any probe the file may have "
    "baked in what the samples do not show.",
    "probes_recorded": "Record what gate samples export --reference wrote, the probes too, and "
    "pack it again; or say options: {probes: when_recorded} in the policy.",
    "recording": "Measure again from what gate record pack made.",
    "probe_batch": "Use x.shape[0] as it is instead of len(x) or "
    "int(x.shape[0]), and export with dynamic_batch: true.",
    "probe_value": "Replace Python conditions on tensor values by torch.where, or export by "
    "torch.jit.script or dynamo.",
    "probe_beyond": "Compare limits and thresholds (ReLU6, hardtanh, clamp, torch.where) and "
    "activations of the file with those in the model's code, and export again from that code.",
    "probe_undefined": "If such values can occur, clamp them in forward to the range of the "
    "integer type before the conversion.",
    "probe_beyond_range": "If such values can occur, export the operator as the model computes it "
    "(softplus with its threshold, logsumexp with its maximum subtracted). "
    "instruments.probe_beyond_range says whether this refuses the file.",
    "probe_size": "Compute sizes from x.shape in forward, and "
    "name the axis dynamic; or fix it in the file's inputs.",
    "probe_search": "Replace Python conditions "
    "on tensor values by torch.where, or export by torch.jit.script or dynamo.",
    "probe_as_samples": "The samples themselves disagree: mend that first, then see whether this "
    "input still does.",
    "graph": "Measure again with this version: it reads the graph of the file.",
    "graph_training_mode": "Export in eval mode (model.eval(), training=TrainingMode.EVAL).",
    "graph_fixed_batch": "Export with dynamic_batch: true, or ask for a fixed batch.",
    "graph_zero_initializer": "Load the checkpoint before the export: a weight of the file is all "
    "zero, that of the model is not.",
    "graph_nonfinite_initializer": "Export again from a checkpoint whose weights are finite.",
    "graph_other_weights": "The file has other weights than the model: export again from the very "
    "checkpoint that --checkpoint names, or give the checkpoint that the file was made from.",
    "graph_rounded_weights": "The file keeps weights in fewer bits than the model: export the "
    "float32 model, or judge what is so on purpose by --precision reduced.",
    "graph_float64": "Keep numpy scalars and Python floats out of forward, or cast to float32.",
    "graph_float16": "Export the float32 model, or judge what is float16 on purpose by --precision "
    "reduced.",
    "graph_quantized": "Promote the float32 file; a quantized one goes beside it as its twin, "
    "judged by a policy with precision: quantized.",
    "graph_external_data": "Copy the external data again together with its model file.",
    "graph_unused_output": "Export only what is used.",
    "graph_domain": "Export with standard operators only, or ship the runtime that has them.",
    "graph_opset": "Export with an opset that the deployed runtime supports.",
    "graph_checker": "Export again with a newer exporter. Other runtimes may refuse the file.",
    "export_record": "Let this gate export the file (gate export, or the stage 'export'), or set "
    "gate.export_findings.record: optional.",
    "export_lint": "Run gate lint on the model's factory and rewrite what it shows; the page of "
    "the rule is in docs/lint. `# noqa: TRC…` on the line silences it knowingly.",
    "export_tracer_warnings": "Rewrite the lines that the tracer warns of (gate lint shows how), "
    "or export by strategy: scripted.",
    "export_hazards": "Look at what the exporter warns of: operators in training mode, outputs "
    "without a batch axis.",
    "preprocessing": "Measure it by the policy: gate.preprocess.measure, or the stage 'parity', on "
    "enough pictures, with the spec that the model was trained with.",
    "preprocessing_diff": "Run gate preprocess compare on the pictures: it names known causes (no "
    "antialias, half-pixel shift, channel order, mean/std); or ship the preprocessing in the file: "
    "gate preprocess prepend.",
    "preprocessing_flips": "Other pixels give other answers: run gate preprocess compare --model "
    "to see which pictures flip, and make the consumer follow the spec.",
    "threshold_crossing": "Look at the crossing samples in samples.csv: confidences near the "
    "operating point cross by rounding alone, so move the point or allow a share; far from it, "
    "check precision (TF32, fp16, int8) and eval mode.",
    "threshold_crossing_bound": "Too few samples, or too many that cross: without any crossing a "
    "bound of 0.01 needs 299 samples, 0.001 needs 2995; of a point for one class, samples of it.",
    "threshold_unmeasured": "Measure again with this policy: gate.operating_points decides what is "
    "measured. A point for one class needs samples that are put into it.",
    "incumbent": "Decide where the registry and its ledger are: gate check --against NAME, or the "
    "stage 'promote'; without the ledger where --trust believes who signed what serves. What can't "
    "be compared with the version that serves is promoted by a policy without the section "
    "incumbent, knowingly and once.",
    "incumbent_accuracy_drop": "The model is worse on these labels than the one that serves: train "
    "longer or on more data, look at the labels; or allow more (incumbent.max_accuracy_drop).",
    "incumbent_agreement": "The model answers otherwise than the one that serves: look at the "
    "order of the classes and at the preprocessing first; a better model changes answers, too: "
    "then allow fewer equal ones (incumbent.min_agreement).",
    "incumbent_latency_ratio": "The file is slower than the one that serves: compare the operators "
    "and the opset of the two, export with constant folding, measure on a quiet machine; or allow "
    "more (incumbent.max_latency_ratio).",
    "latency_ratio": "Beside PyTorch the runtime is slower than allowed: measure on a quiet "
    "machine, give it its optimisations (ort-cpu-optimized) and as many threads; or allow more "
    "(latency_ratio).",
    "memory_mb": "The runtime takes more memory than allowed: a smaller batch size, or a smaller "
    "model; look at the peak in the table of costs; or allow more (memory_mb).",
    "cost_unmeasured": "Measure again with this version. A recording has neither times nor memory, "
    "and some systems say of no process what it takes: bound another runtime, or leave the bound "
    "out.",
    "accuracy_drop": "The file is worse on the labels than the model: check preprocessing, class "
    "order and precision; without labels, give --labels.",
}


# One row a check, or a family of checks by the beginning of its name. docs/metrics.md has the same
# in full.


_DIFFERENCE = "the unit of the output"

ROUNDING = "× rounding"

_SHARE = "share of samples"

_NONE = "It holds or it does not: no number."

_BY_POLICY = "The policy sets it, in the units of this output."

_AS_ROUNDING = "Rounding alone gives about 1; the policy allows this much more."

_ANSWERS = "The policy says how many answers may change."


_Row = TypeVar("_Row")


class CheckSpec(NamedTuple):
    """One row of the table."""

    meaning: str
    formula: str | None = None
    unit: str | None = None
    why: str = _NONE


_ROWS: dict[str, CheckSpec] = {
    "samples": CheckSpec(
        "Are there enough samples to prove anything?", "n", "samples", "The policy's min_samples."
    ),
    "determinism": CheckSpec("Were the switches in force that the policy asks for?"),
    "measured": CheckSpec("Is each runtime recorded once, and was any measured?"),
    "repeats": CheckSpec(
        "Does the model give the same answer twice?",
        "max|a - b| / max|a|",
        "of the largest output",
        "1e-4, far above what two runs differ by in rounding.",
    ),
    "half_precision": CheckSpec("Does the model compute in float32 throughout?"),
    "float64": CheckSpec("Do float64 and random rounding compute the model's function?"),
    "fast_path": CheckSpec("Does the fused path of PyTorch return what the layers do?"),
    "not_measurable": CheckSpec(
        "Is the noise floor small enough to show a fault?",
        "floor / std(r)",
        "of the spread",
        "The policy's instruments.max_floor.",
    ),
    "batch_axes": CheckSpec("Which axis of each input and output is the batch?"),
    "inputs": CheckSpec("Does the file take what the model takes?"),
    "role": CheckSpec("Can the output be what the policy says it is?"),
    "agreement": CheckSpec("Can agreement of answers be claimed of this output?"),
    "runtime": CheckSpec("Did the runtime measure the file?"),
    "recording": CheckSpec("Does the recording say by what, and when, its outputs were computed?"),
    "session": CheckSpec("Were the session options those that the policy asks for?"),
    "provider": CheckSpec("Did the provider that the runtime is named after run the nodes?"),
    "precision": CheckSpec("Did the runtime compute in float32, as it reports itself?"),
    "device": CheckSpec("Did both sides compute on the device of their names?"),
    "outputs": CheckSpec("Was every output of the file measured on every sample?"),
    "reference": CheckSpec(
        "Do the model's own answers vary, so that agreeing with them proves anything?"
    ),
    "empty": CheckSpec("Has the output an element in any sample?"),
    "nonfinite": CheckSpec("Has the output a finite element in any sample?"),
    "finite": CheckSpec("Is nothing NaN, or infinite on one side only?"),
    "bounds": CheckSpec("Does any bound of the policy apply to this output?"),
    "near_ties": CheckSpec(
        "Are answers that rounding alone decides rare?", "count", "answers", "1 % of them, or one."
    ),
    "max_abs_diff": CheckSpec(
        "How far is the worst element off?", "max|c - r|", _DIFFERENCE, _BY_POLICY
    ),
    "mean_abs_diff": CheckSpec(
        "How far is the output off on average?", "mean|c - r|", _DIFFERENCE, _BY_POLICY
    ),
    "scaled_diff": CheckSpec(
        "How far is the worst element off, beside the spread of the output?",
        "max|c - r| / std(r)",
        None,
        "The policy sets it.",
    ),
    "l2_logits": CheckSpec(
        "How far is the worst sample off as a vector?", "max ‖c - r‖₂", _DIFFERENCE, _BY_POLICY
    ),
    "l2_probabilities": CheckSpec(
        "How far do the probabilities of the worst sample move?",
        "max ‖softmax(c) - softmax(r)‖₂",
        "probability",
        "The policy sets it.",
    ),
    "confidence_diff": CheckSpec(
        "How far does the confidence of the worst sample move?",
        "max|max softmax(c) - max softmax(r)|",
        "probability",
        "The policy sets it.",
    ),
    "confidence_over_": CheckSpec(
        "In how many samples does the confidence move by more than this?",
        "share of |max softmax(c) - max softmax(r)| above it",
        _SHARE,
        _ANSWERS,
    ),
    "top1_agreement": CheckSpec(
        "How many samples get the same answer?",
        "share of argmax c = argmax r",
        _SHARE,
        "An exact file answers alike; a reduced one may not always.",
    ),
    "top1_lower_bound": CheckSpec(
        "What agreement do so many samples prove?",
        "one-sided Clopper-Pearson bound",
        _SHARE,
        "0.99 needs 299 samples without a disagreement, at 95 % confidence.",
    ),
    "top5_agreement": CheckSpec(
        "How many samples get the same five best answers?",
        "share of equal top-5 sets",
        _SHARE,
        _ANSWERS,
    ),
    "accuracy_drop": CheckSpec(
        "Is the file worse on the labels than the model?",
        "accuracy(r) - accuracy(c)",
        "share of labels",
        "The policy sets it.",
    ),
    "noise_ratio": CheckSpec(
        "Is the error more than rounding?", "rms(c - r64) / floor", ROUNDING, _AS_ROUNDING
    ),
    "noise_peak": CheckSpec(
        "Is the worst element off by more than rounding?",
        "max|c - r64| / floor",
        ROUNDING,
        "Correct files reach 2.6; one element is judged more mildly.",
    ),
    "noise_diff": CheckSpec(
        "Is any sample off by more than rounding, those without a float64 truth too?",
        "max|c - r| / floor",
        ROUNDING,
        "Correct files reach 7; it judges a single element.",
    ),
    "repeatability": CheckSpec(
        "Does the runtime give the same answer twice?", "max|a - b|", _DIFFERENCE, _BY_POLICY
    ),
    "repeatability_ratio": CheckSpec(
        "Does the runtime give the same answer twice, but for rounding?",
        "max|a - b| / rounding",
        ROUNDING,
        _AS_ROUNDING,
    ),
    "batch_invariance": CheckSpec(
        "Does a sample's answer stay the same in another batch?",
        "max|a - b|",
        _DIFFERENCE,
        _BY_POLICY,
    ),
    "batch_invariance_ratio": CheckSpec(
        "Does a sample's answer stay the same in another batch, but for rounding?",
        "max|a - b| / rounding",
        ROUNDING,
        "Other batches are summed in another order.",
    ),
    "cosine_distance": CheckSpec(
        "Does the embedding point elsewhere?",
        "max(1 - cos(r, c))",
        None,
        "1e-4 unless the policy says otherwise.",
    ),
    "row_sum_diff": CheckSpec(
        "Do the probabilities sum to what the model's do?",
        "max|sum(c) - sum(r)|",
        "probability",
        "1e-3 unless the policy says otherwise.",
    ),
    "unequal_share": CheckSpec(
        "How many integers differ?",
        "share of c ≠ r",
        "share of elements",
        "A class or token beside the right one is wrong however near.",
    ),
    "mask_diff": CheckSpec(
        "Is the mask equal?", "max|c - r|", None, "A mask is equal, or another one."
    ),
    "probes": CheckSpec("Were the inputs computed that unmask what the trace baked in?"),
    "probe_": CheckSpec(
        "Does the file still compute what the model computes on an input that no sample is?",
        "noise_ratio, or max|c - r| / max|r|",
        ROUNDING,
        "Twice what the worst correct file shows: probes look for other answers, not "
        "for lost bits. Where the precision is reduced, one of the two is enough.",
    ),
    "graph": CheckSpec("Was the graph of the file read?"),
    "graph_": CheckSpec(
        "Is nothing of the kind in the graph?",
        "count",
        "findings",
        "The policy forbids it: graph_forbid.",
    ),
    "export_": CheckSpec(
        "Did the export itself warn of nothing that the policy refuses?",
        "count",
        "findings",
        "The policy refuses it: export_findings.",
    ),
    "preprocessing": CheckSpec(
        "Was parity of preprocessing measured, for this model, on enough pictures?"
    ),
    "preprocessing_flips_": CheckSpec(
        "How many pictures get another answer from this consumer's tensor?",
        "flips / pictures",
        "share of pictures",
        "The policy's max_flips.",
    ),
    "preprocessing_": CheckSpec(
        "Does this consumer make the same tensor of a picture?",
        "max|tensor - reference|",
        "1/255 of the value range",
        "One grey level, unless the policy says otherwise.",
    ),
    "incumbent_accuracy_drop": CheckSpec(
        "Is it worse on the labels than what serves now?",
        "accuracy(champion) - accuracy(new)",
        "share of labels",
        "The policy's incumbent.max_accuracy_drop.",
    ),
    "incumbent_agreement": CheckSpec(
        "How often does it answer as what serves now does?",
        "share of equal answers",
        _SHARE,
        "The policy's incumbent.min_agreement.",
    ),
    "incumbent_latency_ratio": CheckSpec(
        "Is it slower than what serves now?",
        "median(new) / median(champion)",
        "times",
        "The policy's incumbent.max_latency_ratio.",
    ),
    "incumbent": CheckSpec("Is there a champion to compare with?"),
    "latency_ratio": CheckSpec(
        "Is it slower than PyTorch on the CPU in the same run?",
        "median(runtime) / median(PyTorch)",
        "times",
        "The policy's latency_ratio. Times are of one machine at one moment.",
    ),
    "memory_mb": CheckSpec(
        "How much memory do opening and running the file take?",
        "growth of the process at its peak",
        "MB",
        "The policy's memory_mb.",
    ),
    "threshold_crossing_bound": CheckSpec(
        "How many decisions at this operating point may change, as far as so many samples prove?",
        "one-sided Clopper-Pearson bound",
        _SHARE,
        _ANSWERS,
    ),
    "threshold_crossing": CheckSpec(
        "How many samples are above the operating point on one side only?",
        "crossed / n",
        _SHARE,
        _ANSWERS,
    ),
}


def meaning_of(name: str) -> CheckSpec:
    """The row of a check, or of the longest beginning of its name that has one."""
    return row_of(name) or CheckSpec(f"The check {name}.")


def row_of(name: str) -> CheckSpec | None:
    """The same; None where the table has no such check."""
    return by_beginning(_ROWS, name)


def by_beginning(table: Mapping[str, _Row], name: str) -> _Row | None:
    """Look up a name, else its longest beginning of whole words, in a table."""
    ends = [end for end in range(1, len(name)) if "_" in name[end - 1 : end + 1]]
    beginnings = (name[:end] for end in (len(name), *reversed(ends)))
    return next((table[start] for start in beginnings if start in table), None)


# A `Story` is made by `gate.summary.summarize.summarize` of decision, evidence, explanation and
# champion; it holds plain texts only: names that come from a judged file went through `printable`.


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
    "cpu_optimized",
    "unstable",
    "export",
    "preprocessing",
    "champion",
    "cost",
    "threshold",
    "labels",
    "samples",
    "model",
    "policy",
    "evidence",
    "numbers",
    "waived",
]
"""What is to blame; `gate.decision.catalog` says in words what each means."""


# A cause of the file explains the numbers that it makes: `SYMPTOMS`.


TITLES: dict[Cause, str] = {
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
    "cpu_optimized": "Optimized for the CPU before export",
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


SYMPTOMS: frozenset[Cause] = frozenset(
    {"numbers", "labels", "threshold", "unstable", "nonfinite", "batch", "baked_in", "beyond"}
)
"""What a fault of the file or of the model shows itself by."""


_BY_NAME: dict[str, Cause] = {
    "samples": "samples",
    "determinism": "evidence",
    "measured": "evidence",
    "session": "evidence",
    "repeats": "model",
    "near_ties": "model",
    "half_precision": "model",
    "float64": "model",
    "fast_path": "model",
    "not_measurable": "model",
    "role": "policy",
    "bounds": "policy",
    "reference": "samples",
    "empty": "samples",
    "nonfinite": "samples",
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

_BY_REMEDY: dict[str, Cause] = {"unsure": "model", "threshold_unmeasured": "evidence",
                               "cost_unmeasured": "evidence"}  # fmt: skip

_PROBES: dict[str, Cause] = {
    "batch": "batch",
    "size": "baked_in",
    "value": "baked_in",
    "search": "baked_in",
}


def cause_for(check: CheckResult, evidence: Evidence) -> Cause:
    """What one check points at where nothing else is known."""
    if check.verdict is Verdict.WAIVED:
        return "waived"
    # A part of a release has runtimes, probes and a trace of its own.
    evidence = evidence.parts.get(check.part or "", evidence)
    by_remedy = next((c for name, c in _BY_REMEDY.items() if check.remedy == REMEDIES[name]), None)
    if check.code == "cpu_optimized" or by_remedy is not None:
        return by_remedy or "cpu_optimized"
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


def _of_runtime(check: CheckResult, evidence: Evidence) -> Cause:
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


def _of_probe(check: CheckResult, evidence: Evidence) -> Cause:
    if check.remedy == REMEDIES["probe_as_samples"]:
        return "numbers"
    if check.code == "beyond_range":
        return "beyond"
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
