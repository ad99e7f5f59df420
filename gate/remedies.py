"""What to try when a check says no: one sentence or two a check, in the field's words."""

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
    "outputs": "Export again with export.output_names as the model returns them, in its order.",
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
    "accuracy_drop": "The file is worse on the labels than the model: check preprocessing, class "
    "order and precision; without labels, give --labels.",
}
