"""Explain a group in one sentence; name the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gate.decision.catalog import LIMITS, OPTIMISER, SERVER, Cause, cause_for, meaning_of
from gate.decision.check_result import CheckResult, Verdict
from gate.records.evidence import Evidence
from gate.records.localization import Explanation, Localization, join_names
from gate.storage.safe_text import make_printable
from gate.summary.grouping import CheckGroup, worst_of
from gate.summary.render import (
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
    without_ort_prefix,
)

_MAX_LENGTH = 1000
"""Longest sentence, in characters."""


class GroupExplanation(NamedTuple):
    """The meaning of one group of checks."""

    blamed: str | None
    sentence: str
    remedy: str | None


def with_number(text: str, number: str) -> str:
    """Return the sentence with the number at its end, if there is one."""
    return clean(f"{text.rstrip('.')}: {number}" if number else text)


def explain_fault(group: CheckGroup, localization: Localization) -> GroupExplanation:
    """Explain which layer or which optimizer is at fault."""
    blame = localization.blame
    if group.cause == "optimiser" and blame is not None and blame.names:
        text, remedy = render_optimizer(blame)
        text = render_account("unoptimized_agrees", text=capital(text))
        shows = short(without_ort_prefix(blame.raises)) if blame.raises else group.number
        return GroupExplanation(join_names(blame.names), with_number(text, shows), remedy)
    if localization.fault is None:
        text = with_number(localization.cause, group.number)
        module = localization.first_divergence or None
        return GroupExplanation(module, text, localization.remedy)
    blamed, text = _fault(localization, localization.fault)
    if localization.probe is not None:
        # The code is right on the samples: a difference beyond them is a limit of the code.
        remedy = LIMITS if localization.fault_code == "code" else localization.remedy
        text = render_account("on_probe", text=text, probe=localization.probe)
        usage = format_bound_usage(group.headline_check)
        return GroupExplanation(blamed, with_number(text, usage), remedy)
    if group.cause == "optimiser":
        text = render_account("optimized_layer", layer=blamed or "The file")
        text = render_account("unoptimized_agrees", text=with_number(text, group.number))
        if blame is None:
            return GroupExplanation(blamed, text, OPTIMISER)
        cause = capital(render_optimizer(blame).text)
        text = render_account("explained", text=text, cause=cause)
        return GroupExplanation(blamed, clean(text), localization.remedy)
    return GroupExplanation(blamed, with_number(text, group.number), localization.remedy)


def _fault(localization: Localization, fault: str) -> tuple[str | None, str]:
    """Return the name of the faulty part, or None, and the description of the fault."""
    blamed = make_printable(localization.blamed or "") or None
    text = make_printable(fault).replace("`", "")  # of version 1.0
    text = capital(text) if blamed is None else led_by(blamed, text)
    layers = {row.title for row in localization.layers if row.verdict == "source" and row.module}
    if len(layers) > 1:
        text = render_account("several_layers", text=text, count=len(layers))
    return blamed, text


def _nonfinite(group: CheckGroup) -> GroupExplanation:
    """Explain how much is NaN or infinite, and where that begins."""
    check = group.headline_check
    text, localization = render_check(check, "headline"), group.localisation
    if localization is None:
        return _explained(check, check.output, text)
    if localization.fault is None:
        text = render_account("explained", text=text, cause=localization.cause)
        return GroupExplanation(check.output, clean(text), localization.remedy)
    blamed, fault = _fault(localization, localization.fault)
    return _explained(
        check, blamed or check.output, render_account("begins", text=text, fault=fault)
    )


def _explained(check: CheckResult, blamed: str | None, text: str | None = None) -> GroupExplanation:
    """Return the explanation of one check: its sentence, or `text`, and its remedy."""
    sentence = render_check(check, "headline") if text is None else text
    return GroupExplanation(blamed, clean(sentence), render_check(check, "remedy"))


# The numbers are those of the representative check.


def explain_group(
    group: CheckGroup, evidence: Evidence, explanation: Explanation
) -> GroupExplanation:
    """Explain a group of checks. A fault in a part of a release includes the name of the part."""
    named = () if group.verdict is Verdict.WAIVED else group.ordered
    parts = tuple(dict.fromkeys(check.part for check in named if check.part))
    localization = group.localisation
    if group.cause == "nonfinite":
        result = _nonfinite(group)
    elif localization is not None:
        result = explain_fault(group, localization)
    else:
        measured = (evidence.parts.get(parts[0]) if parts else None) or evidence
        result = _BY_CAUSE.get(group.cause, _AS_EXPLAINED)(group, measured, explanation)
    blamed, sentence, remedy = result
    if parts:
        where = ", ".join(parts)
        sentence = render_account("in_part", parts=where, text=sentence)
        blamed = f"{where}: {blamed}" if blamed else where
    fault = None if localization is None else localization.fault_code
    onnx = evidence.source.is_onnx
    remedy = remedy_for(remedy, group.cause, onnx_reference=onnx, fault=fault)
    sentence = clean(sentence)[:_MAX_LENGTH]
    return GroupExplanation(blamed and short(blamed), sentence, remedy and make_printable(remedy))


def _weights(group: CheckGroup, *_: object) -> GroupExplanation:
    check = worst_of(group.checks, "graph_") or group.ordered[0]
    findings = check.params.get("findings")
    if not findings:
        return _explained(check, None)
    first = findings[0]
    text = render_check(check.model_copy(update={"params": {"findings": [first]}}), "headline")
    if findings[1:]:
        text = render_account("first_of", text=text, count=len(findings))
    noisy = worst_of([c for c in group.checks if c.runtime], "noise_ratio")
    usage = format_bound_usage(noisy) if noisy else ""
    return _explained(check, make_printable(location_of(first)), with_number(text, usage))


def _batch(group: CheckGroup, *_: object) -> GroupExplanation:
    check = group.headline_check
    if not check.name.startswith("probe_batch"):
        return _explained(check, None if check.name == "runtime" else check.output)
    size = "one sample" if check.samples == 1 else f"{check.samples} samples"
    return _explained(check, None, render_account("batch", size=size, off=_off_by(check)))


def _off_by(check: CheckResult) -> str:
    """Return the error of the file on a probe, or why there is no number."""
    usage = format_bound_usage(check)
    if usage:
        return render_account("off_by", usage=usage)
    return render_account("fails", failure=_shortly(check))


def _shortly(check: CheckResult) -> str:
    return short(without_ort_prefix(render_check(check)))


def _baked_in(group: CheckGroup, evidence: Evidence, explanation: Explanation) -> GroupExplanation:
    check = group.ordered[0]
    probe = check.name.removeprefix("probe_")
    text = render_account("baked_in", probe=probe, off=_off_by(check))
    located = explanation.localisation
    if located is not None and located.probe is not None and located.fault is not None:
        fault = make_printable(located.fault).replace("`", "")
        text = render_account("begins_on_probe", text=text, probe=located.probe, fault=fault)
    return _explained(check, None, _with_warning(text, evidence))


def _beyond(group: CheckGroup, *_: object) -> GroupExplanation:
    check = group.ordered[0]
    probe = check.name.removeprefix("probe_")
    if check.code == "beyond_range":
        text = render_account("overflows", probe=probe, failure=_shortly(check))
        return _explained(check, None, text)
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


def _by_worst(
    *names: str, blames: Callable[[CheckResult], str | None]
) -> Callable[..., GroupExplanation]:
    """Return the explanation of the worst check of these names, else of the first check."""

    def explain(group: CheckGroup, *_: object) -> GroupExplanation:
        worst = (worst_of(group.checks, name) for name in names)
        check = next(filter(None, worst), group.ordered[0])
        return _explained(check, blames(check))

    return explain


def _optimizer(group: CheckGroup, *_: object) -> GroupExplanation:
    text = render_account("optimizer", number=group.number, where=group.where)
    text = render_account("unoptimized_agrees", text=text)
    return GroupExplanation(group.ordered[0].runtime, text, OPTIMISER)


def _device(group: CheckGroup, *_: object) -> GroupExplanation:
    check = worst_of(group.checks, "precision") or group.ordered[0]
    if check.name == "runtime":
        return _explained(check, check.runtime)
    if check.name in ("provider", "device", "precision"):
        text = render_account("about", who=check.runtime, text=short(render_check(check)))
        return _explained(check, check.runtime, text)
    code = "differs_only_on" if group.cpu_agrees else "differs_on"
    text = render_account(code, where=group.where, number=group.number)
    device = next((c for c in group.checks if c.name == "device"), check)
    return _explained(device, check.runtime, text)


def _server(group: CheckGroup, *_: object) -> GroupExplanation:
    check = group.headline_check
    if cause_for(check) == "server":
        return _explained(check, check.runtime)
    failure = check.params.get("failure")
    shows = short(without_ort_prefix(str(failure))) if failure else group.number
    code = "server_only" if group.cpu_agrees else "server"
    text = render_account(code, where=group.where, shows=shows)
    varies = check.name.startswith(("batch_", "probe_batch", "repeatability"))
    remedy = meaning_of("concurrency").remedy if varies else SERVER
    return GroupExplanation(check.runtime, clean(text), remedy)


def _preprocessing(group: CheckGroup, *_: object) -> GroupExplanation:
    check = group.ordered[0]
    consumer = check.params.get("consumer")
    if not isinstance(consumer, str):
        return _explained(check, None)
    return _explained(check, consumer, led_by(consumer, render_check(check, "headline")))


def _numbers(group: CheckGroup, _: Evidence, explanation: Explanation) -> GroupExplanation:
    check, localization = group.ordered[0], explanation.localisation
    usage = format_bound_usage(check)
    where, output = group.where, check.output or "An output"
    text = render_account("differs", output=output, name=check.name, usage=usage, where=where)
    failure = explanation.failure
    if failure is not None:
        text = render_account("layer_unknown", text=text, failure=failure)
    elif localization is not None:
        text = render_account("explained", text=text, cause=localization.cause)
    seam = localization.remedy if localization is not None and localization.has_seam else None
    explained = _explained(check, check.output, text)
    return explained._replace(remedy=seam) if seam else explained


def _export(group: CheckGroup, *_: object) -> GroupExplanation:
    check = group.ordered[0]
    warned = {
        "export_tracer_warnings": "the tracer",
        "export_hazards": "the exporter",
        "export_lint": "the lint",
    }
    who = warned.get(check.name, "the export")
    text = render_account("warned", who=who, text=short(render_check(check)))
    return _explained(check, who, text)


def _waived(group: CheckGroup, *_: object) -> GroupExplanation:
    """Explain what was not measured and does not reject the file.

    Checks with the same text share one sentence, and so do probes with the same code.
    """
    groups: dict[tuple[str | None, str], tuple[str, dict[str | None, None]]] = {}
    for check in group.checks:
        text = short(render_check(check, "headline"))
        is_probe = check.name.startswith("probe_")
        named = groups.setdefault((check.code, "" if is_probe else text), (text, {}))[1]
        named[check.runtime if check.name == "runtime" else check.name] = None
    texts = []
    for (_code, shared), (text, named) in groups.items():
        names = ", ".join(filter(None, named))
        is_example = len(named) > 1 and not shared
        texts.append(f"{names}: for example, {text}" if is_example else led_by(names, text))
    return GroupExplanation(None, clean("; ".join(texts)), None)


_AS_EXPLAINED = _by_worst(
    blames=lambda check: check.output or (check.name if check.runtime is None else None)
)

_BY_CAUSE: dict[Cause, Callable[..., GroupExplanation]] = {
    "weights": _weights,
    "batch": _batch,
    "baked_in": _baked_in,
    "beyond": _beyond,
    "outputs": _by_worst("runtime", blames=lambda check: check.output),
    "optimiser": _optimizer,
    "runtime": _by_worst("runtime", blames=lambda check: check.runtime),
    "device": _device,
    "server": _server,
    "cpu_optimized": _device,
    "preprocessing": _preprocessing,
    "export": _export,
    "champion": _by_worst(blames=lambda _: "the champion"),
    "cost": _by_worst(blames=lambda check: check.runtime),
    "model": _by_worst("repeats", "fast_path", blames=lambda _: "the model"),
    "samples": _by_worst(blames=lambda _: "samples"),
    "numbers": _numbers,
    "waived": _waived,
}
