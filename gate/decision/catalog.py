"""What each check asks in plain words, with its formula, its unit and why its bound is what it is.

One row a check, or a family of checks by the beginning of its name. docs/metrics.md has the same in
full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

_DIFFERENCE = "the unit of the output"
ROUNDING = "× rounding"
_SHARE = "share of samples"
_NONE = "It holds or it does not: no number."
_BY_POLICY = "The policy sets it, in the units of this output."
_AS_ROUNDING = "Rounding alone gives about 1; the policy allows this much more."
_ANSWERS = "The policy says how many answers may change."


_Row = TypeVar("_Row")


class Meaning(NamedTuple):
    """One row of the table."""

    meaning: str
    formula: str | None = None
    unit: str | None = None
    why: str = _NONE


_ROWS: dict[str, Meaning] = {
    "samples": Meaning(
        "Are there enough samples to prove anything?", "n", "samples", "The policy's min_samples."
    ),
    "determinism": Meaning("Were the switches in force that the policy asks for?"),
    "measured": Meaning("Is each runtime recorded once, and was any measured?"),
    "repeats": Meaning(
        "Does the model give the same answer twice?",
        "max|a - b| / max|a|",
        "of the largest output",
        "1e-4, far above what two runs differ by in rounding.",
    ),
    "inputs": Meaning("Does the file take what the model takes?"),
    "role": Meaning("Can the output be what the policy says it is?"),
    "agreement": Meaning("Can agreement of answers be claimed of this output?"),
    "runtime": Meaning("Did the runtime measure the file?"),
    "recording": Meaning("Does the recording say by what, and when, its outputs were computed?"),
    "session": Meaning("Were the session options those that the policy asks for?"),
    "provider": Meaning("Did the provider that the runtime is named after run the nodes?"),
    "precision": Meaning("Did the runtime compute in float32, as it reports itself?"),
    "device": Meaning("Did both sides compute on the device of their names?"),
    "outputs": Meaning("Was every output of the file measured on every sample?"),
    "reference": Meaning(
        "Do the model's own answers vary, so that agreeing with them proves anything?"
    ),
    "finite": Meaning("Is nothing NaN, or infinite on one side only?"),
    "bounds": Meaning("Does any bound of the policy apply to this output?"),
    "near_ties": Meaning(
        "Are answers that rounding alone decides rare?", "count", "answers", "1 % of them, or one."
    ),
    "max_abs_diff": Meaning(
        "How far is the worst element off?", "max|c - r|", _DIFFERENCE, _BY_POLICY
    ),
    "mean_abs_diff": Meaning(
        "How far is the output off on average?", "mean|c - r|", _DIFFERENCE, _BY_POLICY
    ),
    "scaled_diff": Meaning(
        "How far is the worst element off, beside the spread of the output?",
        "max|c - r| / std(r)",
        None,
        "The policy sets it.",
    ),
    "l2_logits": Meaning(
        "How far is the worst sample off as a vector?", "max ‖c - r‖₂", _DIFFERENCE, _BY_POLICY
    ),
    "l2_probabilities": Meaning(
        "How far do the probabilities of the worst sample move?",
        "max ‖softmax(c) - softmax(r)‖₂",
        "probability",
        "The policy sets it.",
    ),
    "confidence_diff": Meaning(
        "How far does the confidence of the worst sample move?",
        "max|max softmax(c) - max softmax(r)|",
        "probability",
        "The policy sets it.",
    ),
    "confidence_over_": Meaning(
        "In how many samples does the confidence move by more than this?",
        "share of |max softmax(c) - max softmax(r)| above it",
        _SHARE,
        _ANSWERS,
    ),
    "top1_agreement": Meaning(
        "How many samples get the same answer?",
        "share of argmax c = argmax r",
        _SHARE,
        "An exact file answers alike; a reduced one may not always.",
    ),
    "top1_lower_bound": Meaning(
        "What agreement do so many samples prove?",
        "one-sided Clopper-Pearson bound",
        _SHARE,
        "0.99 needs 299 samples without a disagreement, at 95 % confidence.",
    ),
    "top5_agreement": Meaning(
        "How many samples get the same five best answers?",
        "share of equal top-5 sets",
        _SHARE,
        _ANSWERS,
    ),
    "accuracy_drop": Meaning(
        "Is the file worse on the labels than the model?",
        "accuracy(r) - accuracy(c)",
        "share of labels",
        "The policy sets it.",
    ),
    "noise_ratio": Meaning(
        "Is the error more than rounding?", "rms(c - r64) / floor", ROUNDING, _AS_ROUNDING
    ),
    "noise_peak": Meaning(
        "Is the worst element off by more than rounding?",
        "max|c - r64| / floor",
        ROUNDING,
        "Correct files reach 2.6; one element is judged more mildly.",
    ),
    "noise_diff": Meaning(
        "Is any sample off by more than rounding, those without a float64 truth too?",
        "max|c - r| / floor",
        ROUNDING,
        "Correct files reach 7; it judges a single element.",
    ),
    "repeatability": Meaning(
        "Does the runtime give the same answer twice?", "max|a - b|", _DIFFERENCE, _BY_POLICY
    ),
    "repeatability_ratio": Meaning(
        "Does the runtime give the same answer twice, but for rounding?",
        "max|a - b| / rounding",
        ROUNDING,
        _AS_ROUNDING,
    ),
    "batch_invariance": Meaning(
        "Does a sample's answer stay the same in another batch?",
        "max|a - b|",
        _DIFFERENCE,
        _BY_POLICY,
    ),
    "batch_invariance_ratio": Meaning(
        "Does a sample's answer stay the same in another batch, but for rounding?",
        "max|a - b| / rounding",
        ROUNDING,
        "Other batches are summed in another order.",
    ),
    "cosine_distance": Meaning(
        "Does the embedding point elsewhere?",
        "max(1 - cos(r, c))",
        None,
        "1e-4 unless the policy says otherwise.",
    ),
    "row_sum_diff": Meaning(
        "Do the probabilities sum to what the model's do?",
        "max|sum(c) - sum(r)|",
        "probability",
        "1e-3 unless the policy says otherwise.",
    ),
    "unequal_share": Meaning(
        "How many integers differ?",
        "share of c ≠ r",
        "share of elements",
        "A class or token beside the right one is wrong however near.",
    ),
    "mask_diff": Meaning(
        "Is the mask equal?", "max|c - r|", None, "A mask is equal, or another one."
    ),
    "probes": Meaning("Were the inputs computed that unmask what the trace baked in?"),
    "probe_": Meaning(
        "Does the file still compute what the model computes on an input that no sample is?",
        "noise_ratio, or max|c - r| / max|r|",
        ROUNDING,
        "Twice what the worst correct file shows: probes look for other answers, not "
        "for lost bits. Where the precision is reduced, one of the two is enough.",
    ),
    "graph": Meaning("Was the graph of the file read?"),
    "graph_": Meaning(
        "Is nothing of the kind in the graph?",
        "count",
        "findings",
        "The policy forbids it: graph_forbid.",
    ),
    "export_": Meaning(
        "Did the export itself warn of nothing that the policy refuses?",
        "count",
        "findings",
        "The policy refuses it: export_findings.",
    ),
    "preprocessing": Meaning(
        "Was parity of preprocessing measured, for this model, on enough pictures?"
    ),
    "preprocessing_flips_": Meaning(
        "How many pictures get another answer from this consumer's tensor?",
        "flips / pictures",
        "share of pictures",
        "The policy's max_flips.",
    ),
    "preprocessing_": Meaning(
        "Does this consumer make the same tensor of a picture?",
        "max|tensor - reference|",
        "1/255 of the value range",
        "One grey level, unless the policy says otherwise.",
    ),
    "incumbent_accuracy_drop": Meaning(
        "Is it worse on the labels than what serves now?",
        "accuracy(champion) - accuracy(new)",
        "share of labels",
        "The policy's incumbent.max_accuracy_drop.",
    ),
    "incumbent_agreement": Meaning(
        "How often does it answer as what serves now does?",
        "share of equal answers",
        _SHARE,
        "The policy's incumbent.min_agreement.",
    ),
    "incumbent_latency_ratio": Meaning(
        "Is it slower than what serves now?",
        "median(new) / median(champion)",
        "times",
        "The policy's incumbent.max_latency_ratio.",
    ),
    "incumbent": Meaning("Is there a champion to compare with?"),
    "latency_ratio": Meaning(
        "Is it slower than PyTorch on the CPU in the same run?",
        "median(runtime) / median(PyTorch)",
        "times",
        "The policy's latency_ratio. Times are of one machine at one moment.",
    ),
    "memory_mb": Meaning(
        "How much memory do opening and running the file take?",
        "growth of the process at its peak",
        "MB",
        "The policy's memory_mb.",
    ),
    "threshold_crossing_bound": Meaning(
        "How many decisions at this operating point may change, as far as so many samples prove?",
        "one-sided Clopper-Pearson bound",
        _SHARE,
        _ANSWERS,
    ),
    "threshold_crossing": Meaning(
        "How many samples are above the operating point on one side only?",
        "crossed / n",
        _SHARE,
        _ANSWERS,
    ),
}


def meaning_of(name: str) -> Meaning:
    """The row of a check, or of the longest beginning of its name that has one."""
    return row_of(name) or Meaning(f"The check {name}.")


def row_of(name: str) -> Meaning | None:
    """The same; None where the table has no such check."""
    return by_beginning(_ROWS, name)


def by_beginning(table: Mapping[str, _Row], name: str) -> _Row | None:
    """What a table has under a name, or under the longest beginning of it; None: nothing."""
    beginnings = (name[:end] for end in range(len(name), 0, -1))
    return next((table[start] for start in beginnings if start in table), None)
