"""Explain a group in one sentence; name the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gate.decision.catalog import LIMITS, OPTIMISER, TITLES, Cause
from gate.decision.check_result import CheckResult, Verdict
from gate.records.evidence import Evidence
from gate.records.localization import Explanation, Localization, OptimizerFault, listed
from gate.storage.safe_text import make_printable
from gate.summary.grouping import CheckGroup, worst_of
from gate.summary.render import (
    broken,
    capital,
    clean,
    format_bound_usage,
    led_by,
    location_of,
    remedy_for,
    render_account,
    render_check,
    render_optimizer,
    short,
)
from gate.summary.summary import Finding

_WHOLE = 1000
"""Longest sentence, in characters."""


@dataclass(frozen=True)
class GroupExplanation:
    """The meaning of one group of checks."""

    blamed: str | None
    sentence: str
    remedy: str | None

    def printable(self) -> GroupExplanation:
        """Return a copy with each text on one line and with a limited length."""
        return GroupExplanation(
            self.blamed and short(self.blamed),
            clean(self.sentence)[:_WHOLE],
            self.remedy and make_printable(self.remedy),
        )


@dataclass(frozen=True)
class ExplanationInputs:
    """The group and the records for its explanation."""

    group: CheckGroup
    evidence: Evidence
    explanation: Explanation

    @property
    def shown(self) -> CheckResult:
        """The check that represents the cause."""
        return self.group.ordered[0]

    @property
    def number(self) -> str:
        """The number of the headline check, with its name if the unit does not identify it."""
        best = self.group.headline_check
        text = format_bound_usage(best)
        return text if not text or best.name.startswith("noise_") else f"{best.name} {text}"

    @property
    def where(self) -> str:
        """The affected runtimes."""
        return ", ".join(dict.fromkeys(c.runtime for c in self.group.ordered if c.runtime))


def with_number(text: str, number: str) -> str:
    """Return the sentence with the number at its end, if there is one."""
    return clean(f"{text.rstrip('.')}: {number}" if number else text)


def explain_fault(inputs: ExplanationInputs, found: Localization) -> GroupExplanation:
    """Explain which layer or which optimizer is at fault."""
    if inputs.group.cause == "optimiser" and found.blame is not None and found.blame.names:
        return _located_optimiser(inputs, found.blame)
    if found.fault is None:
        return GroupExplanation(
            found.first_divergence or None, with_number(found.cause, inputs.number), found.remedy
        )
    blamed, text = _fault(found, found.fault)
    if found.probe is not None:
        # The code is right on the samples: a difference beyond them is a limit of the code.
        remedy = LIMITS if found.fault_code == "code" else found.remedy
        text = render_account("on_probe", text=text, probe=found.probe)
        usage = format_bound_usage(inputs.group.headline_check)
        return GroupExplanation(blamed, with_number(text, usage), remedy)
    if inputs.group.cause == "optimiser":
        text = render_account("optimized_layer", layer=blamed or "The file")
        text = render_account("unoptimized_agrees", text=with_number(text, inputs.number))
        if found.blame is None:
            return GroupExplanation(blamed, text, OPTIMISER)
        cause = capital(render_optimizer(found.blame).text)
        text = render_account("explained", text=text, cause=cause)
        return GroupExplanation(blamed, clean(text), found.remedy)
    return GroupExplanation(blamed, with_number(text, inputs.number), found.remedy)


def _located_optimiser(inputs: ExplanationInputs, blame: OptimizerFault) -> GroupExplanation:
    """Explain which optimizer is at fault, its effect on which nodes, and the consequence."""
    text, remedy = render_optimizer(blame)
    text = render_account("unoptimized_agrees", text=capital(text))
    shows = short(broken(blame.raises)) if blame.raises else inputs.number
    return GroupExplanation(listed(blame.names), with_number(text, shows), remedy)


def _fault(found: Localization, fault: str) -> tuple[str | None, str]:
    """Return the name of the faulty part, or None, and the description of the fault."""
    blamed = make_printable(found.blamed or "") or None
    text = make_printable(fault).replace("`", "")  # of version 1.0
    text = capital(text) if blamed is None else led_by(blamed, text)
    places = {row.title for row in found.layers if row.verdict == "source" and row.module}
    if len(places) > 1:
        text = render_account("several_layers", text=text, count=len(places))
    return blamed, text


def nonfinite(inputs: ExplanationInputs) -> GroupExplanation:
    """Explain how much is NaN or infinite, and where that begins."""
    check = inputs.group.headline_check
    text, found = render_check(check, "headline"), inputs.group.localisation
    if found is None:
        return _account(check, check.output, text)
    if found.fault is None:
        text = render_account("explained", text=text, cause=found.cause)
        return GroupExplanation(check.output, clean(text), found.remedy)
    blamed, fault = _fault(found, found.fault)
    return _account(check, blamed or check.output, render_account("begins", text=text, fault=fault))


def _account(check: CheckResult, blamed: str | None, text: str | None = None) -> GroupExplanation:
    """Return the explanation of one check: its sentence, or `text`, and its remedy."""
    sentence = render_check(check, "headline") if text is None else text
    return GroupExplanation(blamed, clean(sentence), render_check(check, "remedy"))


# The numbers are those of the representative check.


def account_of(group: CheckGroup, evidence: Evidence, explanation: Explanation) -> GroupExplanation:
    """Explain a group of checks. A fault in a part of a release includes the name of the part."""
    named = () if group.verdict is Verdict.WAIVED else group.ordered
    parts = tuple(dict.fromkeys(check.part for check in named if check.part))
    for_part = evidence.parts.get(parts[0]) if parts else None
    inputs = ExplanationInputs(group, for_part or evidence, explanation)
    found = group.localisation
    if group.cause == "nonfinite":
        account = nonfinite(inputs)
    elif found is not None:
        account = explain_fault(inputs, found)
    else:
        account = _BY_CAUSE.get(group.cause, _AS_EXPLAINED)(inputs)
    fault = None if found is None else found.fault_code
    remedy = remedy_for(
        account.remedy, group.cause, onnx_reference=evidence.source.is_onnx, fault=fault
    )
    account = replace(account, remedy=remedy)
    return _in_parts(account, parts).printable()


def _in_parts(account: GroupExplanation, parts: tuple[str, ...]) -> GroupExplanation:
    if not parts:
        return account
    where = ", ".join(parts)
    sentence = render_account("in_part", parts=where, text=account.sentence)
    blamed = f"{where}: {account.blamed}" if account.blamed else where
    return replace(account, blamed=blamed, sentence=sentence)


def finding_of(group: CheckGroup, account: GroupExplanation) -> Finding:
    """Return a group and its explanation as a record, with its checks in order."""
    return Finding(
        cause=group.cause,
        verdict=group.verdict,
        title=TITLES[group.cause],
        sentence=account.sentence,
        remedy=account.remedy,
        checks=group.ordered,
    )


def _weights(inputs: ExplanationInputs) -> GroupExplanation:
    check = worst_of(inputs.group.checks, "graph_") or inputs.shown
    findings = check.params.get("findings")
    if not findings:
        return _account(check, None)
    first = findings[0]
    text = render_check(check.model_copy(update={"params": {"findings": [first]}}), "headline")
    if findings[1:]:
        text = render_account("first_of", text=text, count=len(findings))
    noisy = worst_of([c for c in inputs.group.checks if c.runtime], "noise_ratio")
    usage = format_bound_usage(noisy) if noisy else ""
    return _account(check, make_printable(location_of(first)), with_number(text, usage))


def _batch(inputs: ExplanationInputs) -> GroupExplanation:
    check = inputs.group.headline_check
    if not check.name.startswith("probe_batch"):
        return _account(check, None if check.name == "runtime" else check.output)
    size = "one sample" if check.samples == 1 else f"{check.samples} samples"
    return _account(check, None, render_account("batch", size=size, off=_off_by(check)))


def _off_by(check: CheckResult) -> str:
    """Return the error of the file on a probe, or why there is no number."""
    usage = format_bound_usage(check)
    if usage:
        return render_account("off_by", usage=usage)
    return render_account("fails", failure=_shortly(check))


def _shortly(check: CheckResult) -> str:
    return short(broken(render_check(check)))


def _baked_in(inputs: ExplanationInputs) -> GroupExplanation:
    check = inputs.shown
    probe = check.name.removeprefix("probe_")
    text = render_account("baked_in", probe=probe, off=_off_by(check))
    found = inputs.explanation.localisation
    if found is not None and found.probe is not None and found.fault is not None:
        fault = make_printable(found.fault).replace("`", "")
        text = render_account("begins_on_probe", text=text, probe=found.probe, fault=fault)
    return _account(check, None, _with_warning(text, inputs.evidence))


def _beyond(inputs: ExplanationInputs) -> GroupExplanation:
    check = inputs.shown
    probe = check.name.removeprefix("probe_")
    if check.code == "beyond_range":
        text = render_account("overflows", probe=probe, failure=_shortly(check))
        return _account(check, None, text)
    text = render_account("beyond", probe=probe, off=_off_by(check))
    return GroupExplanation(None, clean(text), LIMITS)


def _with_warning(text: str, evidence: Evidence) -> str:
    """Return the text with an earlier warning of the exporter or the lint, if there was one."""
    export = evidence.export
    lint = [f for f in export.lint if f.level == "error" and not f.suppressed] if export else []
    if lint:
        first = {
            "code": lint[0].code,
            "place": lint[0].location,
            "expression": lint[0].expression,
        }
        return render_account("lint", text=text, **first)
    if export is not None and export.tracer_warnings:
        return render_account("tracer", text=text, warning=export.tracer_warnings[0])
    return text


def _explained_by(
    *names: str, blames: Callable[[CheckResult], str | None]
) -> Callable[[ExplanationInputs], GroupExplanation]:
    """Return the explanation of the worst check of these names, else of the first check."""

    def account(inputs: ExplanationInputs) -> GroupExplanation:
        worst = (worst_of(inputs.group.checks, name) for name in names)
        check = next(filter(None, worst), inputs.shown)
        return _account(check, blames(check))

    return account


def _accounts_optimiser(inputs: ExplanationInputs) -> GroupExplanation:
    text = render_account("optimizer", number=inputs.number, where=inputs.where)
    text = render_account("unoptimized_agrees", text=text)
    return GroupExplanation(inputs.shown.runtime, text, OPTIMISER)


def _device(inputs: ExplanationInputs) -> GroupExplanation:
    check = worst_of(inputs.group.checks, "precision") or inputs.shown
    if check.name == "runtime":
        return _account(check, check.runtime)
    if check.name in ("provider", "device", "precision"):
        text = render_account("about", who=check.runtime, text=short(render_check(check)))
        return _account(check, check.runtime, text)
    code = "differs_only_on" if inputs.group.cpu_agrees else "differs_on"
    text = render_account(code, where=inputs.where, number=inputs.number)
    device = next((c for c in inputs.group.checks if c.name == "device"), check)
    return _account(device, check.runtime, text)


def _preprocessing(inputs: ExplanationInputs) -> GroupExplanation:
    check = inputs.shown
    consumer = check.params.get("consumer")
    if not isinstance(consumer, str):
        return _account(check, None)
    return _account(check, consumer, led_by(consumer, render_check(check, "headline")))


def _numbers(inputs: ExplanationInputs) -> GroupExplanation:
    check, found = inputs.shown, inputs.explanation.localisation
    usage = format_bound_usage(check)
    where, output = inputs.where, check.output or "An output"
    text = render_account("differs", output=output, name=check.name, usage=usage, where=where)
    failure = inputs.explanation.failure
    if failure is not None:
        text = render_account("layer_unknown", text=text, failure=failure)
    elif found is not None:
        text = render_account("explained", text=text, cause=found.cause)
    seam = found.remedy if found is not None and found.has_seam else None
    account = _account(check, check.output, text)
    return replace(account, remedy=seam) if seam else account


def _export(inputs: ExplanationInputs) -> GroupExplanation:
    check = inputs.shown
    who = _WARNED.get(check.name, "the export")
    text = render_account("warned", who=who, text=short(render_check(check)))
    return _account(check, who, text)


def _waived(inputs: ExplanationInputs) -> GroupExplanation:
    """Explain what was not measured and does not reject the file.

    Checks with the same text share one sentence, and so do probes with the same code.
    """
    groups: dict[tuple[str | None, str], tuple[str, dict[str | None, None]]] = {}
    for check in inputs.group.checks:
        text = short(render_check(check, "headline"))
        is_probe = check.name.startswith("probe_")
        _, named = groups.setdefault((check.code, "" if is_probe else text), (text, {}))
        named[check.runtime if check.name == "runtime" else check.name] = None
    texts = []
    for (_, for_all), (text, named) in groups.items():
        names = ", ".join(filter(None, named))
        example = "for example, " if len(named) > 1 and not for_all else ""
        texts.append(led_by(names, text) if not example else f"{names}: {example}{text}")
    return GroupExplanation(None, clean("; ".join(texts)), None)


_WARNED = {
    "export_tracer_warnings": "the tracer",
    "export_hazards": "the exporter",
    "export_lint": "the lint",
}

_AS_EXPLAINED = _explained_by(
    blames=lambda check: check.output or (check.name if check.runtime is None else None)
)

_BY_CAUSE: dict[Cause, Callable[[ExplanationInputs], GroupExplanation]] = {
    "weights": _weights,
    "batch": _batch,
    "baked_in": _baked_in,
    "beyond": _beyond,
    "outputs": _explained_by("runtime", blames=lambda check: check.output),
    "optimiser": _accounts_optimiser,
    "runtime": _explained_by("runtime", blames=lambda check: check.runtime),
    "device": _device,
    "cpu_optimized": _device,
    "preprocessing": _preprocessing,
    "export": _export,
    "champion": _explained_by(blames=lambda _: "the champion"),
    "cost": _explained_by(blames=lambda check: check.runtime),
    "model": _explained_by("repeats", "fast_path", blames=lambda _: "the model"),
    "samples": _explained_by(blames=lambda _: "samples"),
    "numbers": _numbers,
    "waived": _waived,
}
