"""The only table of faults: what localization finds, one text and one remedy per code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gate.decision.catalog import OPTIMISER

# A text is a format string, as in `gate.decision.catalog`; its fields are the parameters of the
# code. `{details}` are the texts of `params["details"]`.


class FaultSpec(NamedTuple):
    """The text of a code, without a full stop where it is part of a sentence, and what to do."""

    text: str
    remedy: str | None = None


_CHECKPOINT = (
    "Export again from the checkpoint of the reference. If that does not help, try "
    "export.do_constant_folding: false."
)

_FLOAT32 = (
    "Export in float32 and do not convert the file afterwards. If the file is meant to be in "
    "16 bits, check it with --precision reduced."
)

_FLOAT16 = (
    "Convert to float16, which --precision reduced allows: it keeps 11 bits where bfloat16 keeps "
    "8. Or write a policy whose bounds allow bfloat16."
)

_WRONG_MODEL = (
    "Export again from the code and checkpoint of the reference: the file is of another model."
)

_EXPORTER = (
    "If that does not help, use another opset or exporter (torch.onnx.export(..., dynamo=True))"
)

_AGAIN = f"Export again from the code and checkpoint of the reference. {_EXPORTER}."

_OPERATOR = f"Export again from the code of the reference. {_EXPORTER}, or update ONNX Runtime."

_OUTPUTS = "Set export.output_names in the order in which the model returns its outputs."

_CALIBRATION = (
    "Calibrate on samples like these, quantize weights per channel, or leave this layer in "
    "float32. If the loss is acceptable, raise the bound of the policy."
)

_QUANTIZED = (
    "If the file is quantized on purpose, use --precision quantized for a classifier; for any "
    "other model use a policy with precision: quantized, task: tensors and a numeric bound "
    "(docs/quantized.md). Otherwise export in float32 and do not quantize."
)

_EIGHT = "the file is quantized and computes this layer from {bits} bits ({nodes})"

FAULTS: dict[str, FaultSpec] = {
    "training_mode": FaultSpec(
        "it runs in training mode",
        "Export in eval mode: model.eval(), training=TrainingMode.EVAL.",
    ),
    "weights": FaultSpec("{details}", _CHECKPOINT),
    "weights_rounded": FaultSpec("{details}", _FLOAT32),
    "weights_rounded_reduced": FaultSpec("{details}", _FLOAT16),
    "weights_by_code": FaultSpec("{details}", _AGAIN),
    "settings": FaultSpec("{details}", _WRONG_MODEL),
    "settings_trial": FaultSpec("{details}", _AGAIN),
    "shape": FaultSpec(
        "its shape is {got} in the file, {want} in PyTorch; it comes from {nodes}", _WRONG_MODEL
    ),
    "shape_unrun": FaultSpec(
        "ONNX Runtime cannot compute its tensor, which comes from {nodes}", _WRONG_MODEL
    ),
    "precision_cast": FaultSpec("the file casts to {format} in it ({nodes})", _FLOAT32),
    "precision_cast_reduced": FaultSpec("the file casts to {format} in it ({nodes})", _FLOAT16),
    "tf32": FaultSpec(
        "its relative error is {error:.2g}, as large as that of TF32",
        "Set determinism.tf32: false, which sets use_tf32 of the CUDA provider.",
    ),
    "int8": FaultSpec(_EIGHT, _QUANTIZED),
    "int8_allowed": FaultSpec(_EIGHT, _CALIBRATION),
    "int8_lossy": FaultSpec(
        f"{_EIGHT}; its relative error is {{error:.2g}}, more than this quantization explains",
        _CALIBRATION,
    ),
    "in_place": FaultSpec(
        "the file reads {tensor} as it was before {writer} overwrote it in place; the model reads "
        "the new values",
        "Export again with PyTorch's own exporter, which follows operations in place. Or avoid "
        "them: nn.ReLU(inplace=False), x = x + y instead of x += y, or clone() before.",
    ),
    "code": FaultSpec(
        "the code in {code_of:forward}{before:before} differs in the file: {nodes}, between "
        "{inputs:between} and {tensor}",
        "Export again if the file was exported from other code than the reference. If that does "
        "not help, look at the functions that forward calls there (F.interpolate, indexing, "
        "integer arithmetic, changes in place): use operators that the exporter supports, or "
        "another opset or exporter.",
    ),
    "input_order": FaultSpec(
        "the inputs {inputs:and} are in another order in the file: it reads {pairs:pairs}",
        "Export again with export.input_names in the order of the arguments of forward, or rename "
        "the inputs of the file.",
    ),
    "output_order": FaultSpec(
        "the outputs are in another order: the values of output {name} are in {right}", _OUTPUTS
    ),
    "output_order_followed": FaultSpec(
        "output {name} is not what the model returns; the tensor {right} is, and {nodes} follows "
        "it",
        "Export again without this last step, or add it to forward.",
    ),
    "output_order_tensor": FaultSpec(
        "output {name} is not what the model returns; the tensor {right} is", _OUTPUTS
    ),
    "not_returned": FaultSpec("the file lacks outputs that the model returns", _OUTPUTS),
    "not_returned_places": FaultSpec(
        "the file lacks output {places:and} of the model, counted from 1", _OUTPUTS
    ),
    "constant_output": FaultSpec(
        "output {name} is a constant in the file, with other values than the model returns",
        "Export again from the code and the settings of the reference. Compute values that depend "
        "on an input from tensors: tracing stores Python's numbers as constants.",
    ),
    "unread_input": FaultSpec(
        "the model computes it from the input {inputs:and}, which the file does not read there",
        "Export again with this input in use. If an optimizer dropped it, switch that fusion off, "
        "or look for code that uses it only under a condition.",
    ),
    "unread_input_mask": FaultSpec(
        "{nodes} reads how many elements of the mask are set, and not which ones: that is right "
        "only if padding follows the tokens",
        "Optimize again with the whole mask (use_raw_attention_mask of onnxruntime.transformers), "
        "or pad on the right.",
    ),
    "missing_value": FaultSpec(
        "no node of the file computes it; later nodes read {tensor} instead", _WRONG_MODEL
    ),
    "missing_value_unmatched": FaultSpec(
        "no tensor of the file has its values, and the next tensor, {tensor}, is wrong",
        _WRONG_MODEL,
    ),
    "missing_value_output": FaultSpec(
        "output {name} has the values of {layer}; no node of the file computes what the model's "
        "code makes of them",
        _WRONG_MODEL,
    ),
    "operators": FaultSpec(
        "it computes something other than {kind}: {nodes}{details:after}; cause not found, "
        "excluded: {excluded:and}",
        _OPERATOR,
    ),
    "operators_uncompared": FaultSpec(
        "it computes something other than {kind}: {nodes}{details:after}; cause not found, "
        "excluded: {excluded:and}",
        _AGAIN,
    ),
    "operators_of": FaultSpec(
        "it computes {function} instead of {kind}: {nodes}",
        _WRONG_MODEL,
    ),
}
"""Texts of faults by `fault_code`, plus `_` and `params["variant"]` if there is a variant."""

CALL = "{text} (in call {call} of {calls} of the module)"
"""The text of a fault that is in some calls of a module only."""

DETAILS: dict[str, str] = {
    # of weights
    "differs": "{name} differs from the model's in {changed} of {total} elements, by at most "
    "{largest:.3g}",
    "differs_in": "{name} differs from the model's in {changed} of {total} elements",
    "rounded": "{name} is rounded to {format} in the file",
    "rounded_folded": "{name} is rounded to {format} in the file, after folding",
    "transposed": "{name} is transposed in the file",
    "reordered": "{name} has its {axis} in another order in the file: {order}",
    "directions": "the two directions are swapped in {names:and}",
    "gates": "the gates are in another order in {names:and}",
    "not_computed": "the file has neither {name} there nor what the model's code computes from it",
    "folded_offset": "the folded offset of {norm} (bias, running_mean) differs from the model's",
    "folded_scale": "the folded scale of {norm} (weight, running_var, eps) differs from the "
    "model's",
    "folded_eps": "the folded eps of {norm} is {epsilon:.3g}; the model has {want:.3g}",
    "scale": "the scale of {norm} (weight, running_var, eps) differs from the model's",
    "offset": "the offset of {norm} (bias, running_mean) differs from the model's",
    # of settings
    "setting": "{setting} is {got} in the file, {attribute} is {want} in the model",
    "computed_with": "the file computes it with {setting} = {got}; the model has {want}",
    "right_with": "{setting} is {got} in the file, which is right with {want}",
    "transposed_input": "a transposition of {setting} is missing or superfluous: with its axes in "
    "the order {order}, the file computes the right value",
    "reordered_input": "the file reads {setting} {how} along axis {axis}",
    "exchanged_outputs": "the file reads output {got} of {setting} where the model reads output "
    "{want}, counted from 1",
    "transposed_values": "its axes are in another order in the file: {order}",
    "reordered_values": "its values along {setting} are in another order in the file: {order}",
    "lost_input": "the file computes it with zeros in place of {setting}",
    "reads_instead": "the file computes it from {setting}, and would be right with {want} instead",
    "exchanged": "the file exchanges {setting} and {want}",
    "reset_gate": "linear_before_reset is 0 in the file; PyTorch's GRU computes with 1",
    # of operators
    "same": "these are the model's: {names:and}",
    "precedes": "without a counterpart in the file, and a possible cause: {names:and}",
    "replaces": "in the place of {count} nodes of the reference, from {first} to {last}",
    "no_tensors": "the file has none of its tensors: {names:and}",
    "not_compared": "not compared: {names:and}",
    # of other layers
    "mismatch": "shape {got} in the file, {want} in PyTorch",
    "unrun": "no tensor: the runtime fails",
    "not_finite": "no finite number in the file, nor in PyTorch",
    "with_folded": "with {norm} folded in",
}
"""Items of `params["details"]`, and what the row of a layer says."""

OUTCOMES: dict[str, FaultSpec] = {
    "source": FaultSpec("{module} is wrong although its inputs are right: {fault}."),
    "inputs": FaultSpec("{fault:capital}."),
    "also": FaultSpec("Also wrong: {modules:and}."),
    "other_checkpoint": FaultSpec(
        "The weights of {count} other modules differ too: the file is of another checkpoint."
    ),
    "not_found": FaultSpec(
        "Cause not found: the outputs differ, and every layer that was compared is right when its "
        "inputs are."
    ),
    "unmapped": FaultSpec("No tensor of the file was found for {names:and}."),
    "grown": FaultSpec(
        "No layer differs by more than rounding. The errors grow to a noise ratio of {ratio:.4g} "
        "in the outputs.",
        "The model amplifies rounding: look for differences of large numbers, a sharp softmax or "
        "division by small numbers. If that is intended, raise the bound of noise_ratio.",
    ),
    "grown_at": FaultSpec("They grow most at {module} (by a factor of {factor:.3g})."),
    "session_fails": FaultSpec(
        "ONNX Runtime cannot compute the file with optimizations on: {failure:short}.", OPTIMISER
    ),
    "fused": FaultSpec(
        "Every layer agrees while its tensor is an output, but the unmodified file does not "
        "(noise ratio {ratio:.4g}): an optimizer of ONNX Runtime changes the result.",
        OPTIMISER,
    ),
    "unoptimized_agrees": FaultSpec("With optimizations off, the file agrees.", OPTIMISER),
    "unoptimized_differs": FaultSpec("With optimizations off, the file differs too.", OPTIMISER),
    "only_unoptimized": FaultSpec(
        "Every layer agrees, but the file differs with optimizations off (noise ratio "
        "{ratio:.4g}).",
        "Serve with optimizations on, as in ort-cpu-optimized, or update ONNX Runtime.",
    ),
    "agrees": FaultSpec("No layer diverges on {samples} samples."),
    "unit": FaultSpec("The unit is one float32 rounding, because {reason}."),
    "no_part": FaultSpec("No layer diverges in {parts:and}."),
    "no_part_compared": FaultSpec("No part could be compared."),
    "chain": FaultSpec("Each part is right by itself. {seam:capital}."),
    "parts_fit": FaultSpec("Every part accepts what the chain passes to it."),
    "seam": FaultSpec("The fault is between the parts: {seam}."),
}
"""Items of `Localization.outcome`: sentences."""

SEAMS: dict[str, FaultSpec] = {
    "misfit": FaultSpec("{reason}"),
    "unopened": FaultSpec("the files cannot be opened together: {failure}"),
    "breaks": FaultSpec(
        "the chain fails on the outputs of the files: {failure}. With the modules it runs",
        "Compare dtypes, layouts, names and sizes between the parts.",
    ),
    "in_place": FaultSpec(
        "in PyTorch the part {parts:and} writes into its input (an operation in place), and the "
        "chain continues with the new values; a file leaves its input unchanged",
        "Give the part a copy, parts['name'](x.clone()), or build it with inplace=False.",
    ),
    "differs": FaultSpec(
        "the chain itself computes something else with the files: its output {output} differs by "
        "{error:.3g} of its largest value",
        "Look for code in the chain that distinguishes a module from a file, or that chooses by a "
        "number (argmax, a threshold), which rounding can change: use samples without such ties, "
        "or move that code out of the chain.",
    ),
}
"""Texts for parts of a release that do not fit together, keyed by `seam_code`."""

OPTIMIZERS: dict[str, str] = {
    "changes": "with {names:and} enabled, ONNX Runtime computes a different result",
    "fails": "with {names:and} enabled, ONNX Runtime fails",
    "level": " from level {level} on",
    "nodes": "; {before:nodes} became {after:nodes}",
    "reason": " ({reason})",
    "none": "no optimizer is identified: {reason}",
    "disable": "Serve with disabled_optimizers=[{names:quoted}] (in the policy an option of the "
    "runtime), or update ONNX Runtime.",
    "lower": "Serve with graph_optimization_level {below}, or update ONNX Runtime.",
    # reasons
    "unoptimized_fails": "with optimizations off too: {failure}",
    "unoptimized_off": "with optimizations off, the file differs by more than rounding too",
    "served_agrees": "the file as it is served agrees with optimizations on",
    "not_additive": "with fewer of them off the result is not always right",
    "sessions_spent": "{count} sessions were not enough to find it",
    "time_spent": "{seconds:.0f} s of processor time were not enough to find it",
    "sessions_spent_maybe": "fewer may be enough; {count} sessions were not enough to find out",
    "time_spent_maybe": "fewer may be enough; {seconds:.0f} s of processor time were not enough to "
    "find out",
    "unlogged": "ONNX Runtime logs no optimizer that changes the graph from {level} on",
    "still_wrong": "the result is still wrong with all {count} optimizers off that change the "
    "graph and have a name; something else at level {level} is the cause",
    "stopped": "{failure}",
    "too_large": "the file is larger than {limit} MiB",
}
"""Texts about optimizers of ONNX Runtime, the reasons why none is named (`reason_code`), and why
their nodes are not known (`nodes_unread_code`)."""

FINDINGS: dict[str, str] = {
    "stored": "{text}",  # of evidence without codes
    # external data
    "wrong_length": "states {stated} bytes in {file}; its shape needs {needed}",
    "overlap": "reads {count} bytes of {tensor} in {file}",
    "checksum": "its SHA-1 is {actual}; the model states {stated:or}",
    # training mode
    "batch_statistics": "normalizes by the statistics of the batch",
    "random": "draws random numbers",
    "dropout": "drops values at random",
    "dropout_flag": "drops values at random unless a computed flag is false",
    "dropout_mask": "an output depends on its dropout mask",
    # precision
    "float16_nodes": "{count} nodes compute in {format} or round to it: {operators:some}",
    "float16_stored": "is stored in {format}; the model's weights need more bits",
    "quantized_nodes": "{count} nodes compute in quantized integers or unpack them: "
    "{operators:some}",
    "quantized_stored": "is stored in integers of at most 8 bits and cast to floats",
    "float64_nodes": "{count} nodes compute in float64: {operators:some}",
    # weights
    "differs": "{wrong} of {size} elements differ from {name:of_model}, the first at {first}, by "
    "at most {largest:.3g}",
    "rounded": "is {name:of_model}, rounded to {format}",
    "moved": "all elements differ from {name:of_model}, by {share:.2g} of its RMS",
    "other_checkpoint": "{count} of {total} weights differ from the model's ({names:list}): the "
    "file is of another checkpoint",
    "zeros": "all {size} elements are zero (shape {shape})",
    "nonfinite": "{nans} of {size} elements are NaN, {infinities} are infinite",
    # graph
    "fixed_input": "this input accepts batches of exactly {rows} samples",
    "fixed_output": "this output has {rows} rows; the model returns one for each sample",
    "unused": "no output depends on this {kind}",
    "domain": "{count} nodes are in this domain: {operators:some}",
    "several_opsets": "the file names several versions: {versions:some}",
    "old_opset": "version {version} is older than {oldest}",
    "new_opset": "ONNX Runtime {installed} does not support version {version}",
    "checker": "{reason}",
    "more": "{text}; and {more} more",
}
"""Texts of `GraphFinding.detail_code`, about a node or tensor of the graph."""

WEIGHTS: dict[str, str] = {
    "none": "The file has no weights to compare",
    "all": "All {same} weights match",
    "some": "{same} of {constants} weights match",
    "ways": " ({ways})",
    "differ": "; {differ} differ",
    "unmatched": "; {unmatched} could not be matched: {unmatched_names:some}",
    "absent": ". {absent} tensors of the model have no counterpart in the file: "
    "{absent_names:some}",
}
"""Parts of the sentence about a `WeightsReport`."""

ACCOUNTS: dict[str, str] = {
    # of a layer
    "several_layers": "{text} ({count} layers affected; this is the first)",
    "on_probe": "{text}; the samples agree, and the input '{probe}' shows it",
    "begins": "{text}. It begins here: {fault}",
    "begins_on_probe": "{text}. On '{probe}' it begins here: {fault}",
    "explained": "{text}. {cause}",
    "layer_unknown": "{text}. The layer is not known: {failure:short}",
    "in_part": "In the part {parts}: {text}",
    # of optimizers
    "optimizer": "An optimizer of ONNX Runtime changes the result on {where}: {number}",
    "optimized_layer": "{layer}: an optimizer of ONNX Runtime changes what it computes",
    "unoptimized_agrees": "{text}; with optimizations off the file agrees",
    # of numbers
    "differs": "{output} differs on {where}: {name} {usage}",
    "differs_on": "The file differs on {where}: {number}",
    "differs_only_on": "The file differs only on {where}: {number}; on the CPU the file agrees",
    "server": "{where} returns other outputs than the file: {shows}",
    "server_only": "{where} returns other outputs than the file, which is right here: {shows}",
    "first_of": "{text} (the first of {count})",
    # of probes
    "off_by": "the file is off by {usage}",
    "fails": "the runtime fails: {failure}",
    "batch": "A batch size was baked in: with {size} in a batch {off}",
    "baked_in": "The trace baked in a value: the samples agree, and on the input '{probe}' {off}",
    "lint": "{text}. The lint reports {code} at {place} ({expression})",
    "tracer": "{text}. The tracer warned: {warning:short}",
    "overflows": "The samples agree. On the input '{probe}': {failure}",
    "beyond": "The samples agree. On the input '{probe}', which was derived from them, {off}. "
    "The model's own trace agrees with the model on every input that was tried, so the file was "
    "made from other code, or its exporter changed operators",
    # of others
    "about": "{who}: {text}",
    "warned": "{who:capital} warned, and the policy does not allow that: {text}",
}
"""Sentences of findings that several checks make: parts of `Finding.sentence`."""


def fault_spec(code: str, params: Mapping[str, Any]) -> FaultSpec | None:
    """Return the texts of a fault; None: its code is of a newer version."""
    variant = params.get("variant")
    return FAULTS.get(f"{code}_{variant}" if variant else code)
