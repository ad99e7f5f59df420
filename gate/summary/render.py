"""Render a check, a number or a table cell as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, Literal

from gate.decision.bound_rules import agreement_lower_bound
from gate.decision.catalog import NOTES, PROBLEMS, ROUNDING, code_for, meaning_of, row_for
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import Decision
from gate.records.evidence import Evidence
from gate.storage.safe_text import make_printable

_LONGEST = 240
"""Characters of a part of a sentence: what libraries say of a failure has no end."""


def broken(failure: str) -> str:
    """What ONNX Runtime raised, without how it counts and where in its source that was."""
    text = re.sub(r"\b\w+: \[ONNXRuntimeError\] : \d+ : \w+ : (?:Fatal error: )?", "", failure)
    return re.sub(r"/\S+/core/\S+:\d+ .*?\) (?:const )?(?=\S)", "", text)


def capital(text: str) -> str:
    """The text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def clean(text: str) -> str:
    """One line without control characters or a full stop at its end."""
    return make_printable(text).replace("<=", "≤").replace(">=", "≥").rstrip(". ")


def short(text: str) -> str:
    """One line, cut where it is too long."""
    line = make_printable(text).rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


# Names of inputs and outputs come from the judged file: every text goes through `make_printable`.


_LISTED = 3
"""Items of a list in a sentence."""


_SAMPLES = 5
"""Numbers of samples in a sentence."""


class _Template(Formatter):
    """Formats a text of the catalog. Beyond Python's format specifications it has `FORMATS`."""

    def get_value(self, key: int | str, _: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key), "unknown")  # of a record that was edited

    def format_field(self, value: Any, spec: str) -> str:
        if value is None or (spec in FORMATS and isinstance(value, str) != (spec in _OF_TEXTS)):
            return "unknown"
        if spec in FORMATS:
            return FORMATS[spec](value)
        return str(value) if isinstance(value, str) else format(value, spec)  # NaN is a word


def _list(items: Sequence[Any]) -> str:
    more = len(items) - _LISTED
    shown = ", ".join(map(str, items[:_LISTED]))
    return f"{shown} and {more} more" if more > 0 else shown


def _sample_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SAMPLES]))
    return f", samples {shown}{', ...' if len(numbers) > _SAMPLES else ''}" if numbers else ""


FORMATS: dict[str, Callable[[Any], str]] = {
    "list": _list,
    "or": lambda items: " or ".join(map(str, items)),
    "short": lambda text: short(broken(str(text))),
    "brief": lambda text: short(str(text).partition(": ")[0]),
    "samples": _sample_numbers,
    "alone": str.strip,
}
"""`short` cuts what a library says, `brief` leaves out its details, `samples` lists the numbers of
samples after a comma, `alone` is for notes that are the whole text."""

_OF_TEXTS = ("short", "brief", "alone")

_TEMPLATE = _Template()


def _notes(notes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for note in notes:
        yield _TEMPLATE.vformat(NOTES.get(note["code"], "{code}."), (), note)


def _problems(problems: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(
        _TEMPLATE.vformat(PROBLEMS.get(problem["code"], "{code}"), (), problem)
        for problem in problems
    )


def _beginning(text: str, problems: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of problems as the beginning of a sentence, which a name is as it is."""
    is_name = not problems or PROBLEMS.get(problems[0]["code"], "{").startswith("{")
    return text if is_name else capital(text)


def render_check(check: CheckResult, part: Literal["text", "headline", "remedy"] = "text") -> str:
    """Return what a check says, from the texts of `gate.decision.catalog`: one line without control
    characters. `headline`: the sentence of a finding, without a full stop at its end."""
    code = code_for(check)
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
            template = code.remedy or row_for(check).remedy
        if template.startswith("{problems}") or ". {problems}" in template:
            values["problems"] = _beginning(values["problems"], check.params.get("problems", []))
    text = _TEMPLATE.vformat(template, (), values)
    if part != "remedy" and check.params.get("warns"):
        text = f"Warning (exceeded: warn): {text}"
    return clean(text) if part == "headline" else make_printable(text)


def _values(check: CheckResult) -> dict[str, Any]:
    """Return the fields that a text may have."""
    relation = "at least" if check.relation == ">=" else "at most"
    bound = f"{check.bound:.6g}" if isinstance(check.bound, float) else str(check.bound)
    notes, problems = check.params.get("notes", []), check.params.get("problems", [])
    values = {name: getattr(check, name) for name in CheckResult.model_fields}
    return {
        **values,
        "label": check.label,
        "allowed": f"{relation} {bound}",
        "usage": format_bound_usage(check),
        **check.params,
        "notes": "".join(f" {note}" for note in _notes(notes)),
        "problems": _problems(problems),
        "problem": _beginning(_problems(problems[:1]), problems),
    }


def with_texts(decision: Decision) -> dict[str, Any]:
    """Return a decision as JSON, each check with `explanation` and `remedy`, which are not
    stored."""
    plain = decision.to_plain()
    for check, row in zip(decision.checks, plain["checks"], strict=True):
        row |= {"explanation": render_check(check), "remedy": render_check(check, "remedy")}
        if check.observed is None:
            row["observed"] = observed(check) or None
    return plain


_SYMBOLS = {"<=": "≤", ">=": "≥", "==": "="}


def format_number(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def observed(check: CheckResult) -> str:
    """What the check saw. A number that only rounds to its bound is written in full."""
    if not isinstance(check.observed, float):
        code = code_for(check)
        return make_printable(check.observed or (code and code.observed) or "")
    short = format_number(check.observed)
    rounds_to_bound = isinstance(check.bound, float) and short == format_number(check.bound)
    if rounds_to_bound and check.observed != check.bound:
        return repr(check.observed)
    return short


def allowed(check: CheckResult) -> str:
    """The bound with its direction, or nothing for a check without a bound."""
    if check.bound is None:
        return ""
    bound = (
        format_number(check.bound)
        if isinstance(check.bound, float)
        else make_printable(check.bound)
    )
    return f"{_SYMBOLS.get(check.relation or '', '')} {bound}".strip()


def has_several_outputs(checks: Iterable[CheckResult]) -> bool:
    """Whether the checks are of more than one output."""
    return len({check.output for check in checks if check.output}) > 1


def short_name(check: CheckResult, *, several_outputs: bool) -> str:
    """The name of a check, with its part of a release, and its output where there are several."""
    places = (check.part, check.output if several_outputs else None, check.label)
    return make_printable(" / ".join(place for place in places if place))


def cells(check: CheckResult) -> tuple[str, str, str, str]:
    """Name with the output, observed, allowed, number of samples."""
    name = f"{check.output} / {check.label}" if check.output else check.label
    samples = "" if check.samples is None else str(check.samples)
    return make_printable(name), observed(check), allowed(check), samples


def agreement_sentences(
    decision: Decision, evidence: Evidence, *, confidence: float
) -> Iterator[str]:
    """What the top-1 agreement of each runtime proves, with the number of samples, where it was
    judged; once an output, that none is claimed where a guess would have to."""
    judged = {
        (c.runtime, c.output)
        for c in decision.checks
        if c.name in ("top1_agreement", "top1_lower_bound")
    }
    for runtime in evidence.runtimes:
        for output in runtime.outputs:
            parity = output.classification
            if parity is None or (runtime.runtime, output.name) not in judged:
                continue
            n = output.samples - parity.nan_rows
            if n <= 0:
                continue
            lower = agreement_lower_bound(parity.top1_disagreements, n, confidence=confidence)
            yield (
                f"{runtime.runtime} / {make_printable(output.name)}: top-1 agrees on "
                f"{n - parity.top1_disagreements} of {n} samples; "
                f"with {100 * confidence:.4g} % confidence the agreement is at least {lower:.4f}."
            )
    notices = {c.output: render_check(c) for c in decision.checks if c.name == "agreement"}
    for name, text in notices.items():
        yield f"{make_printable(name or '')}: {text}"


def check_sentences(decision: Decision, *names: str) -> Iterator[str]:
    """Yield the texts of the checks of these names."""
    for check in decision.checks:
        if check.name in names:
            yield render_check(check)


_IMPRECISE = 1e-5
"""Relative error of a runtime, within what its operators are allowed, that a user should know."""

_OWN_ROUNDING = 8.0
"""So many times PyTorch's own error: below it, the model itself is that sensitive."""

_EXACT_BOUND = 64.0
"""Bounds of noise_ratio for reduced precision lie above it."""


def imprecision_sentences(decision: Decision, evidence: Evidence) -> Iterator[str]:
    """Yield the outputs that pass although a runtime computes them with a large rounding error."""
    passed = {
        (check.runtime, check.output)
        for check in decision.checks
        if check.name == "noise_ratio"
        and check.verdict is Verdict.PASS
        and isinstance(check.bound, float)
        and check.bound <= _EXACT_BOUND
    }
    for runtime in evidence.runtimes:
        for output in runtime.outputs:
            noise = output.noise
            if noise is None or (runtime.runtime, output.name) not in passed:
                continue
            if noise.candidate_rms > max(
                _IMPRECISE * noise.truth_rms, _OWN_ROUNDING * noise.reference_rms
            ):
                yield (
                    f"{runtime.runtime} / {make_printable(output.name)}: the rounding error of "
                    f"this runtime is {noise.candidate_rms / noise.truth_rms:.1e} of the output "
                    f"(PyTorch: {noise.reference_rms / noise.truth_rms:.1e}). It comes from the "
                    "runtime's operators, usually from a sum of many terms that are added in order."
                )


def code_sentences(evidence: Evidence) -> Iterator[str]:
    """Where the model's code is another than the file was exported from, and what of it could not
    be read."""
    code, exported = evidence.source.code, evidence.export.code if evidence.export else None
    if code is None:
        return
    changes = () if exported is None else code.changes_since(exported)
    if changes:
        yield (
            f"exported from other code of the model than it was measured against: "
            f"{make_printable(', '.join(changes))}."
        )
    for name, reason in code.unread.items():
        yield f"model code not read, so not in the evidence: {make_printable(f'{name}: {reason}')}"


def weight_sentences(evidence: Evidence) -> Iterator[str]:
    """How many weights of the file are the model's; nothing where they were not compared."""
    if evidence.graph is not None and evidence.graph.weights is not None:
        yield make_printable(evidence.graph.weights.sentence)


def bound_usage(check: CheckResult) -> float | None:
    """How much of its bound a check has used: 1 at the bound, infinite for what is no number.

    Of a share that must be large enough, its shortfall beside the one that is allowed. None: it has
    no number, or no bound.
    """
    value, bound = check.observed, check.bound
    if not isinstance(value, float) or not isinstance(bound, float):
        return None
    if not math.isfinite(value):
        return math.inf
    used, allowed = (1.0 - value, 1.0 - bound) if check.relation == ">=" and bound <= 1.0 else (
        (bound, value) if check.relation == ">=" else (value, bound)
    )  # fmt: skip
    if used <= 0.0:
        return 0.0
    return used / allowed if allowed > 0.0 else math.inf


def is_about_samples(check: CheckResult) -> bool:
    """Whether a check that holds says how many samples there are, and nothing of the file."""
    return check.verdict is Verdict.PASS and check.name in ("samples", "top1_lower_bound")


def format_bound_usage(check: CheckResult, *, unit: bool = True) -> str:
    """What a check saw and what is allowed, with its unit: `33.7 × rounding, allowed 1.67`."""
    of = meaning_of(check.name).unit
    if not isinstance(check.observed, float) or not isinstance(check.bound, float):
        return ""
    least = "at least " if check.relation == ">=" else ""
    if of is not None and of.startswith("share of "):
        shown = [_percent(share) for share in (check.observed, check.bound)]
        if shown[0] == shown[1] and check.observed != check.bound:
            shown[0] = f"{100.0 * check.observed!r} %"
        return f"{shown[0]}, allowed {least}{shown[1]}"
    rounding = unit and of == ROUNDING and check.params.get("metric") != "relative_diff"
    suffix = f" {ROUNDING}" if rounding else ""
    return f"{observed(check)}{suffix}, allowed {least}{format_number(check.bound)}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.4g} %" if math.isfinite(share) else format_number(share)
