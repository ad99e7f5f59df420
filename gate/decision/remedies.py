"""What to try when a check says no: one sentence or two a check, in the field's words."""

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
    "samples": "Give more evaluation samples, or lower gate.min_samples knowingly.",
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
    "precision": "Set the option by which the runtime computes in float32 (openvino: "
    "precision_hint: f32), or judge the file by --precision reduced.",
    "device": "Run gate locate on this runtime to see the first layer that diverges; set "
    "determinism.tf32: false, and measure torch-cuda beside it.",
    "outputs": "Export again with export.output_names as the model returns them, in its order.",
    "inputs": "An exporter drops an input that changes no output; export again if this one should.",
    "repeats": "Take random numbers out of eval mode (F.dropout(x, p, self.training), gate lint: "
    "TRC013), and state that forward changes itself.",
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
    "finite": "Look for fp16 overflow, log or division of zero, or a mask of -inf; run with "
    "optimisations off to see whether fusion makes it.",
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
