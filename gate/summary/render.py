"""Render a check, a number or a table cell as text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, Literal, TypeVar

from gate.decision import catalog, faults
from gate.decision.catalog import Cause
from gate.decision.check_result import CheckResult
from gate.decision.faults import FaultSpec
from gate.records.evidence import Evidence
from gate.records.instruments import GraphFinding
from gate.records.localization import (
    Explanation,
    FaultCode,
    LayerFault,
    LayerRow,
    Localization,
    OptimizerFault,
    join_names,
)
from gate.records.outputs import OutputParity
from gate.records.preprocessing import ConsumerParity
from gate.records.runtime import RuntimeName
from gate.storage.record import Record
from gate.storage.safe_text import list_first, make_printable, shorten

_MAX_LENGTH = 240
"""Longest part of a sentence, in characters: messages of libraries can be very long."""


def without_ort_prefix(failure: str) -> str:
    """Return an error of ONNX Runtime without its prefix, number and source location."""
    text = re.sub(r"\b\w+: \[ONNXRuntimeError\] : \d+ : \w+ : (?:Fatal error: )?", "", failure)
    return re.sub(r"/\S+/core/\S+:\d+ .*?\) (?:const )?(?=\S)", "", text)


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def clean(text: str) -> str:
    """Return one line without control characters and without a final full stop."""
    return make_printable(text).replace("<=", "≤").replace(">=", "≥").rstrip(". ")


def short(text: str) -> str:
    """Return one line, truncated if it is too long."""
    return shorten(make_printable(text).rstrip("."), _MAX_LENGTH)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 check, 2 checks."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def beginning(text: str, mark: str = ": ") -> str:
    """Return a text without the details after the mark."""
    return text.partition(mark)[0]


# Names of inputs and outputs come from the judged file: every text goes through `make_printable`.


_ITEMS = 4
"""Most names of weights, operators or versions in a sentence about the graph."""

_MAX_NAMES = 6
"""Most modules, tensors or operators in a sentence about a fault."""

_MAX_SAMPLES = 5
"""Most sample numbers in a sentence."""


class _Template(Formatter):
    """Formats a text of the catalog. Supports Python's format specifications and `FORMATS`."""

    def get_value(self, key: int | str, _: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key), "unknown")  # of a record that was edited

    def format_field(self, value: Any, spec: str) -> str:
        if value is None or (spec in FORMATS and isinstance(value, str) != (spec in _FOR_STRINGS)):
            return "unknown"
        if spec in FORMATS:
            return FORMATS[spec](value)
        return str(value) if isinstance(value, str) else format(value, spec)  # NaN is text


def _sample_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_SAMPLES]))
    return f", samples {shown}{', ...' if len(numbers) > _MAX_SAMPLES else ''}" if numbers else ""


def _nodes(nodes: Sequence[str]) -> str:
    """Return the operator types of nodes, with their number if there are several of a type."""
    counted = Counter(node.partition(" ")[0] for node in nodes)
    names = [name if count == 1 else f"{count} {name}" for name, count in counted.items()]
    return join_names(names, limit=_MAX_NAMES) or "nothing"


FORMATS: dict[str, Callable[[Any], str]] = {
    "list": list_first,
    "and": lambda names: join_names(names, limit=_MAX_NAMES),
    "nodes": _nodes,
    "between": lambda names: join_names(names) or "the inputs",
    "pairs": lambda pairs: join_names([f"{name} instead of {by}" for name, by in pairs]),
    "quoted": lambda names: ", ".join(f'"{name}"' for name in names),
    "capital": capital,
    "forward": lambda path: f"the forward of {path}" if path else "the model's own forward",
    "before": lambda path: f" before {path}" if path else "",
    "after": lambda details: f" ({details})" if details else "",
    "some": lambda items: ", ".join(map(str, items[:_ITEMS])) + (", …" if items[_ITEMS:] else ""),
    "of_model": lambda name: f"the model's {name}" if name else "the model's",
    "reason": lambda text: catalog.REASONS.get(text, text),
    "or": lambda items: " or ".join(map(str, items)),
    "short": lambda text: short(without_ort_prefix(str(text))),
    "brief": lambda text: short(beginning(text)),
    "samples": _sample_numbers,
    "alone": str.strip,
}
"""`short` truncates the message of a library, `brief` drops its details, `samples` lists sample
numbers after a comma, `alone` is for notes that are the whole text."""

_FOR_STRINGS = (
    "short", "brief", "alone", "capital", "forward", "before", "after", "of_model", "reason"
)  # fmt: skip

_TEMPLATE = _Template()


def _fill(template: str, values: Mapping[str, Any]) -> str:
    """Return a template of the catalog with its values, without control characters."""
    return make_printable(_TEMPLATE.vformat(template, (), values))


def _problems(
    problems: Sequence[Mapping[str, Any]], table: Mapping[str, str] = catalog.PROBLEMS
) -> str:
    return "; ".join(_fill(table.get(each["code"], "{code}"), each) for each in problems)


def _beginning(text: str, problems: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of problems as the beginning of a sentence. A leading name stays
    unchanged."""
    is_name = not problems or catalog.PROBLEMS.get(problems[0]["code"], "{").startswith("{")
    return text if is_name else capital(text)


def render_check(
    check: CheckResult,
    part: Literal["text", "headline", "remedy"] = "text",
    *,
    onnx_reference: bool = False,
) -> str:
    """Return the text of a check from `gate.decision.catalog`, without control characters.

    One line. `headline`: the sentence of a finding, without a final full stop. `onnx_reference`:
    the remedy is for a file whose reference is an ONNX file.
    """
    code = catalog.code_for(check)
    if code is None:  # of a record before codes, or of a newer version
        stored = check.remedy if part == "remedy" else check.explanation
        if stored is None and part != "remedy":
            stored = f"The result is {check.code}."
        template, values = "{stored}", {"stored": stored or ""}
    else:
        values = _values(check)
        template = code.text
        if part == "headline" and code.headline is not None:
            template = code.headline
        elif part == "remedy":
            spec = catalog.row_for(check)
            cause = (code.cause if code.remedy else None) or spec.cause
            template = remedy_for(code.remedy or spec.remedy, cause, onnx_reference=onnx_reference)
        if template.startswith("{problems}") or ". {problems}" in template:
            values["problems"] = _beginning(values["problems"], check.params.get("problems", []))
    text = _fill(template, values)
    if part != "remedy" and check.params.get("warns"):
        text = f"Warning (exceeded: warn): {text}"
    return clean(text) if part == "headline" else text


def _values(check: CheckResult) -> dict[str, Any]:
    """Return the fields that a text may use."""
    relation = "at least" if check.relation == ">=" else "at most"
    bound = f"{check.bound:.6g}" if isinstance(check.bound, float) else str(check.bound)
    notes, problems = check.params.get("notes", []), check.params.get("problems", [])
    mismatch: dict[str, str] = {}
    if check.params.get("mismatch") in catalog.MISMATCHES:  # a sentence in a record without codes
        texts = render_mismatch(check.params["mismatch"], check.params)
        mismatch = dict(zip(("mismatch", "advice"), texts, strict=True))
    values = {name: getattr(check, name) for name in CheckResult.model_fields}
    return {
        **values,
        "label": check.label,
        "allowed": f"{relation} {bound}",
        "usage": format_bound_usage(check),
        **check.params,
        "findings": [_finding(each) for each in check.params.get("findings", ())],
        "weights": render_weights(check.params.get("weights", "")),
        **mismatch,
        "notes": "".join(f" {_fill(catalog.NOTES.get(n['code'], '{code}.'), n)}" for n in notes),
        "problems": _problems(problems),
        "problem": _beginning(_problems(problems[:1]), problems),
    }


def render_mismatch(code: str, params: Mapping[str, Any]) -> tuple[str, str]:
    """Return how the outputs of a file differ from the model's, without a full stop, and the
    remedy."""
    spec = catalog.MISMATCHES[code]
    return _fill(spec.text, params), str(spec.remedy)


def _finding(finding: str | Mapping[str, Any]) -> str:
    """Return the text of a finding in the graph, without a full stop."""
    if isinstance(finding, str):  # of a decision without codes
        return finding
    return f"{finding['place']}: {render_finding(finding)}"


def location_of(finding: str | Mapping[str, Any]) -> str:
    """Return the node or tensor of a finding in the graph."""
    return beginning(finding) if isinstance(finding, str) else str(finding["place"])


def render_finding(finding: Mapping[str, Any]) -> str:
    """Return the text of a finding in the graph, without its location and final full stop."""
    text = _problems([finding], faults.FINDINGS).rstrip(".")
    if "more" in finding:
        text = _fill(faults.FINDINGS["more"], {"text": text, "more": finding["more"]})
    return text


def render_weights(report: Any) -> str:
    """Return how many weights of the file match the model, from a `WeightsReport` as JSON."""
    if not isinstance(report, Mapping):  # of a decision without codes
        return str(report)
    matched = report.get("matched", {})
    constants, unmatched, absent = (report.get(n, 0) for n in ("constants", "unmatched", "absent"))
    same = sum(matched.values())
    ways = [f"{n} {'unchanged' if way == 'as it is' else way}" for way, n in matched.items()]
    differ = constants - same - unmatched
    shown = {
        "none": not constants,
        "all": same == constants > 0,
        "some": same != constants,
        "ways": ways,
        "differ": differ > 0,
        "unmatched": unmatched,
        "absent": absent,
    }
    template = "".join(faults.WEIGHTS[part] for part, is_shown in shown.items() if is_shown)
    values = {**report, "same": same, "ways": ", ".join(ways), "differ": differ}
    return f"{_fill(template, values)}."


def with_texts(record: Record, *, onnx_reference: bool = False) -> dict[str, Any]:
    """Return a record as JSON with the texts that are not stored: `explanation` and `remedy` of
    each check, `detail` of each finding in the graph."""
    plain = record.to_plain()
    _add_texts(record, plain, onnx_reference)
    return plain


def _add_texts(value: Any, plain: Any, onnx_reference: bool) -> None:
    if isinstance(value, CheckResult):
        remedy = render_check(value, "remedy", onnx_reference=onnx_reference)
        plain |= {"explanation": render_check(value), "remedy": remedy}
        if value.observed is None:
            plain["observed"] = observed(value) or None
    elif isinstance(value, GraphFinding):
        plain["detail"] = render_finding(value.to_params())
    elif isinstance(value, Record):
        for name, field in type(value).model_fields.items():
            key = field.serialization_alias or name
            if key in plain:  # a default may be left out
                _add_texts(getattr(value, name), plain[key], onnx_reference)
    elif isinstance(value, tuple):
        for each, item in zip(value, plain, strict=True):
            _add_texts(each, item, onnx_reference)


def render_fault(code: str, params: Mapping[str, Any]) -> FaultSpec:
    """Return the text of a fault, without a full stop, and its remedy."""
    spec = faults.fault_spec(code, params) or FaultSpec(f"the fault is {code}")
    values = {**params, "details": _problems(params.get("details", ()), faults.DETAILS)}
    text = _fill(spec.text, values)
    return spec._replace(
        text=_fill(faults.CALL, {**params, "text": text}) if "call" in params else text
    )


_OF_EXPORT: frozenset[Cause] = frozenset(
    {
        "layer", "weights", "graph", "training_mode", "batch", "baked_in", "beyond", "outputs",
        "nonfinite", "cpu_optimized", "export", "numbers",
    }
)  # fmt: skip
"""Causes with remedies that only apply to the export of a PyTorch model."""

_OF_PRECISION: frozenset[FaultCode] = frozenset({"precision_cast", "int8", "tf32"})
"""Faults with remedies for any reference."""

_Remedy = TypeVar("_Remedy", str, str | None)


def remedy_for(
    remedy: _Remedy,
    cause: Cause = "layer",
    *,
    onnx_reference: bool,
    fault: FaultCode | None = None,
) -> _Remedy:
    """Return the remedy. With an ONNX file as the reference it must not need a PyTorch model."""
    if not onnx_reference or not remedy or fault in _OF_PRECISION:
        return remedy
    if cause == "model":
        return catalog.CHANGE_REFERENCE
    return catalog.CONVERT_AGAIN if cause in _OF_EXPORT else remedy


def render_account(code: str, /, **values: Any) -> str:
    """Return a part of the sentence of a finding."""
    return _fill(faults.ACCOUNTS[code], values)


def led_by(name: str, text: str) -> str:
    """Return a sentence with the name in front, unless it begins with it."""
    return text if text.startswith(name) else render_account("about", who=name, text=text)


def render_optimizer(blame: OptimizerFault) -> FaultSpec:
    """Return which optimizers of ONNX Runtime change the result, without a full stop, and how to
    serve the file without them. The remedy is given only if it was tried."""
    values = blame.model_dump() | {"reason": _reason(blame)}
    codes = ["fails" if blame.raises else "changes"] if blame.names else ["none"]
    if blame.names:
        codes += ["level"] if blame.level else []
        codes += ["nodes"] if blame.before or blame.after else []
        codes += ["reason"] if values["reason"] else []
    how = "disable" if blame.names else "lower" if blame.below else None
    return FaultSpec(
        _fill("".join(faults.OPTIMIZERS[code] for code in codes), values),
        _fill(faults.OPTIMIZERS[how], values) if how else None,
    )


def _localization_sentences(localization: Localization) -> Iterator[FaultSpec]:
    """Yield the sentences of a localization, each with its remedy."""
    module = localization.first_divergence or "The model itself"
    values = {"module": module, "fault": localization.fault, "seam": localization.seam}
    for item in localization.outcome:
        spec = faults.OUTCOMES.get(item["code"], FaultSpec("{code}."))
        yield spec._replace(text=_fill(spec.text, values | item))
    if localization.blame is not None:
        blame = render_optimizer(localization.blame)
        yield blame._replace(text=f"{capital(blame.text)}.")


def with_fault_texts(localization: Localization) -> Localization:
    """Return a localization with rendered texts. Records of version 1.0 have no codes and keep
    their stored texts."""
    try:
        return _rendered(localization) if localization.outcome else localization
    except (AttributeError, KeyError, TypeError, ValueError):  # of a record that was edited
        return localization


def _rendered(localization: Localization) -> Localization:
    update: dict[str, Any] = {}
    remedies: list[str | None] = []
    blame = localization.blame
    if localization.seam_code is not None:
        spec = faults.SEAMS.get(localization.seam_code, FaultSpec(localization.seam_code))
        update["seam"] = _fill(spec.text, localization.seam_params)
        remedies.append(spec.remedy)
    if localization.fault_code is not None:
        update["fault"], remedy = render_fault(localization.fault_code, localization.fault_params)
        remedies.append(remedy)
    localization = localization.model_copy(update=update)
    sentences = list(_localization_sentences(localization))
    remedies += [sentence.remedy for sentence in sentences]
    return localization.model_copy(
        update={
            "cause": " ".join(sentence.text for sentence in sentences),
            "remedy": next((candidate for candidate in reversed(remedies) if candidate), None),
            "faults": tuple(map(_with_text, localization.faults)),
            "layers": tuple(map(_with_detail, localization.layers)),
            "blame": blame
            and blame.model_copy(
                update={name: _reason(blame, name) for name in ("reason", "nodes_unread")}
            ),
        }
    )


def _with_text(fault: LayerFault) -> LayerFault:
    text, remedy = render_fault(str(fault.code), fault.params)
    return fault.model_copy(update={"text": text, "remedy": remedy or ""})


def _with_detail(row: LayerRow) -> LayerRow:
    if row.code is None:
        return row
    if row.code in faults.DETAILS:
        text = _problems([{**row.params, "code": row.code}], faults.DETAILS)
    else:
        text = render_fault(row.code, row.params).text
    return row.model_copy(update={"detail": text})


def _reason(blame: OptimizerFault, name: str = "reason") -> str | None:
    """Return the text of a field with a code, or the stored text of a record without codes."""
    code, params = (getattr(blame, f"{name}_{part}") for part in ("code", "params"))
    if code is None:
        stored: str | None = getattr(blame, name)
        return stored
    return _fill(faults.OPTIMIZERS.get(code, code), params)


def render_explanation(explanation: Explanation) -> Explanation:
    """Return an explanation with the rendered texts of its localization."""
    record = explanation.localisation
    return explanation.model_copy(update={"localisation": record and with_fault_texts(record)})


_SYMBOLS = {"<=": "≤", ">=": "≥", "==": "="}


def format_number(value: float | None) -> str:
    """Return a number with four significant digits, an empty text for None."""
    return "" if value is None else f"{value:.4g}"


def nan_as_infinite(value: float | None) -> float:
    """Return a sort key for numbers: 0 for None, infinity for NaN."""
    return math.inf if value is not None and math.isnan(value) else value or 0.0


def observed(check: CheckResult) -> str:
    """Return the observed value as text, with all digits if rounding makes it equal to its
    bound."""
    if not isinstance(check.observed, float):
        code = catalog.code_for(check)
        return make_printable(check.observed or (code and code.observed) or "")
    short = format_number(check.observed)
    if not isinstance(check.bound, float) or check.observed == check.bound:
        return short
    return repr(check.observed) if short == format_number(check.bound) else short


def allowed(check: CheckResult) -> str:
    """Return the bound with its direction, or an empty text for a check without a bound."""
    if check.bound is None:
        return ""
    bound = check.bound
    shown = format_number(bound) if isinstance(bound, float) else make_printable(bound)
    return f"{_SYMBOLS.get(check.relation or '', '')} {shown}".strip()


def has_several_outputs(checks: Iterable[CheckResult]) -> bool:
    """Return whether the checks refer to more than one output."""
    return len({check.output for check in checks if check.output}) > 1


def outputs_of(evidence: Evidence) -> Iterator[tuple[RuntimeName, OutputParity]]:
    """Yield each output of each runtime."""
    for runtime in evidence.runtimes:
        for output in runtime.outputs:
            yield runtime.runtime, output


def short_name(check: CheckResult, *, several_outputs: bool) -> str:
    """Return the name of a check with the part of its release, and with its output if several."""
    names = (check.part, check.output if several_outputs else None, check.label)
    return make_printable(" / ".join(name for name in names if name))


LAYER_HEADINGS = (
    "layer", "type", "max diff", "mean diff", "noise ratio", "alone", "growth", "verdict"
)  # fmt: skip


def layer_cells(row: LayerRow, *, detail: str | None) -> tuple[str, ...]:
    """Return the cells below `LAYER_HEADINGS`. `detail`: follows the verdict."""
    numbers = (row.max_abs_diff, row.mean_abs_diff, row.noise_ratio, row.local_ratio,
               row.amplification)  # fmt: skip
    verdict = f"{row.verdict}: {detail}" if detail else row.verdict
    return (row.title, row.kind, *map(format_number, numbers), verdict)


CONSUMER_HEADINGS = (
    "consumer", "max", "mean", "> 1 step", "channels max", "flips", "confidence", "verdict"
)  # fmt: skip


def consumer_cells(consumer: ConsumerParity, verdict: str) -> tuple[str, ...]:
    """Return the cells below `CONSUMER_HEADINGS`: differences of a preprocessing in steps."""
    if consumer.max_diff is None:
        return (consumer.consumer, "", "", "", "", "", "", verdict)
    decisions = consumer.decisions
    return (
        consumer.consumer,
        format_number(consumer.max_diff),
        format_number(consumer.mean_diff or 0.0),
        f"{100 * (consumer.over_one_step or 0.0):.3g} %",
        " ".join(format_number(channel.max) for channel in consumer.channels),
        f"{decisions.flips}/{decisions.images}" if decisions else "",
        format_number(decisions.confidence_diff_max) if decisions else "",
        verdict,
    )


def bound_usage(check: CheckResult) -> float | None:
    """Return the used share of a check's bound: 1 at the bound, infinite for NaN.

    For a value with a lower bound, the shortfall relative to the allowed one. None if the check has
    no number or no bound.
    """
    used, allowed = check.observed, check.bound
    if not isinstance(used, float) or not isinstance(allowed, float):
        return None
    if not math.isfinite(used):
        return math.inf
    if check.relation == ">=":
        used, allowed = (1.0 - used, 1.0 - allowed) if allowed <= 1.0 else (allowed, used)
    if used <= 0.0:
        return 0.0
    return used / allowed if allowed > 0.0 else math.inf


def format_bound_usage(check: CheckResult, *, unit: bool = True) -> str:
    """Return the observed value and the bound with their unit: `33.7 × rounding, allowed 1.67`."""
    of = catalog.meaning_of(check.name).unit
    if not isinstance(check.observed, float) or not isinstance(check.bound, float):
        return ""
    least = "at least " if check.relation == ">=" else ""
    if of is not None and of.startswith("share of "):
        shown = [_percent(share) for share in (check.observed, check.bound)]
        if shown[0] == shown[1] and check.observed != check.bound:
            shown[0] = f"{100.0 * check.observed!r} %"
        return f"{shown[0]}, allowed {least}{shown[1]}"
    rounding = unit and of == catalog.ROUNDING and check.params.get("metric") != "relative_diff"
    suffix = f" {catalog.ROUNDING}" if rounding else ""
    return f"{observed(check)}{suffix}, allowed {least}{format_number(check.bound)}"


def result_of(check: CheckResult) -> str:
    """Return the result of a check in one line: observed value and bound, else its text."""
    return format_bound_usage(check) or render_check(check)


def _percent(share: float) -> str:
    return f"{100.0 * share:.4g} %" if math.isfinite(share) else format_number(share)
