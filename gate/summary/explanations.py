"""Explain a group in one sentence; name the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from gate.decision.catalog import LIMITS, OPTIMISER, TITLES, Cause
from gate.decision.check_result import CheckResult, Verdict
from gate.records.evidence import Evidence
from gate.records.localization import Explanation, Localization, OptimizerFault, listed
from gate.records.runtime import traits_of
from gate.storage.safe_text import make_printable
from gate.summary.grouping import CheckGroup, worst_of
from gate.summary.render import (
    broken,
    capital,
    clean,
    format_bound_usage,
    render_check,
    short,
)
from gate.summary.summary import Finding

_WHOLE = 1000
"""Characters of a sentence at most."""


@dataclass(frozen=True)
class GroupExplanation:
    """What one group of checks means."""

    blamed: str | None
    sentence: str
    remedy: str | None

    def printable(self) -> GroupExplanation:
        """The same, each on one line and not without end, whatever names are in it."""
        return GroupExplanation(
            self.blamed and short(self.blamed),
            clean(self.sentence)[:_WHOLE],
            self.remedy and make_printable(self.remedy),
        )


@dataclass(frozen=True)
class Scene:
    """What an account is made of."""

    group: CheckGroup
    evidence: Evidence
    explanation: Explanation

    @property
    def shown(self) -> CheckResult:
        """The check that shows the cause best."""
        return self.group.ordered[0]

    @property
    def number(self) -> str:
        """The number of the group's headline check, named where its unit does not say what it
        is."""
        best = self.group.headline_check
        text = format_bound_usage(best)
        return text if not text or best.name.startswith("noise_") else f"{best.name} {text}"

    @property
    def where(self) -> str:
        """The runtimes on which it shows."""
        return ", ".join(dict.fromkeys(c.runtime for c in self.group.ordered if c.runtime))


def with_number(text: str, number: str) -> str:
    """The sentence with its number at the end, where there is one."""
    return clean(f"{text.rstrip('.')}: {number}" if number else text)


def explain_fault(scene: Scene, found: Localization) -> GroupExplanation:
    """Which layer is to blame, or the optimiser."""
    if scene.group.cause == "optimiser" and found.blame is not None and found.blame.names:
        return _located_optimiser(scene, found.blame)
    if found.fault is None:
        return GroupExplanation(
            found.first_divergence or None, with_number(found.cause, scene.number), found.remedy
        )
    blamed, text = _fault(found, found.fault)
    if found.probe is not None:
        # Code that is right on the samples: what only shows beyond them is a limit of it.
        remedy = LIMITS if found.fault_code == "code" else found.remedy
        return GroupExplanation(blamed, _on_probe(scene, text, found.probe), remedy)
    if scene.group.cause == "optimiser":
        text = f"{blamed or 'The file'}: ONNX Runtime's optimiser changes what it computes"
        text = f"{with_number(text, scene.number)}; with optimisations off the file agrees"
        if found.blame is None:
            return GroupExplanation(blamed, text, OPTIMISER)
        return GroupExplanation(blamed, clean(f"{text}. {found.blame.text}"), found.remedy)
    return GroupExplanation(blamed, with_number(text, scene.number), found.remedy)


def _on_probe(scene: Scene, text: str, probe: str) -> str:
    """What no sample shows, with the number of the input that does."""
    text = f"{text}; the samples agree, and the input '{probe}' shows it"
    return with_number(text, format_bound_usage(scene.group.headline_check))


def _located_optimiser(scene: Scene, blame: OptimizerFault) -> GroupExplanation:
    """Which optimiser it is, what it made of which nodes, and what comes of it."""
    text = f"ONNX Runtime's {blame.text}; with optimisations off the file agrees"
    shows = short(broken(blame.raises)) if blame.raises else scene.number
    return GroupExplanation(listed(blame.names), with_number(text, shows), blame.remedy)


def _fault(found: Localization, fault: str) -> tuple[str | None, str]:
    """What is to blame by its name, and what is wrong with it."""
    named = re.match(r"`([^`]+)`", fault)
    blamed = make_printable(named[1] if named else found.first_divergence or "") or None
    text = make_printable(fault).replace("`", "")
    if blamed is None:
        text = capital(text)
    elif not text.startswith(blamed):
        text = f"{blamed}: {text}"
    places = {row.title for row in found.layers if row.verdict == "source" and row.module}
    if len(places) > 1:
        text += f" ({len(places)} layers affected; this is the first)"
    return blamed, text


def nonfinite(scene: Scene) -> GroupExplanation:
    """How much is NaN or infinite, and where that begins."""
    check = scene.group.headline_check
    text, found = render_check(check, "headline"), scene.group.localisation
    if found is None:
        return _of(check, check.output, text)
    if found.fault is None:
        return GroupExplanation(check.output, clean(f"{text}. {found.cause}"), found.remedy)
    blamed, fault = _fault(found, found.fault)
    return _of(check, blamed or check.output, f"{text}. It begins here: {fault}")


def _of(check: CheckResult, blamed: str | None, text: str | None = None) -> GroupExplanation:
    """Return the account of one check: its sentence, or `text`, and its remedy."""
    sentence = render_check(check, "headline") if text is None else text
    return GroupExplanation(blamed, clean(sentence), render_check(check, "remedy"))


# Its numbers are those of the check that shows it best.


def account_of(group: CheckGroup, evidence: Evidence, explanation: Explanation) -> GroupExplanation:
    """The account of a group. What is to blame in a part of a release is named with that part."""
    named = () if group.verdict is Verdict.WAIVED else group.ordered
    parts = tuple(dict.fromkeys(check.part for check in named if check.part))
    of_part = evidence.parts.get(parts[0]) if parts else None
    scene = Scene(group, of_part or evidence, explanation)
    found = group.localisation
    if group.cause == "nonfinite":
        account = nonfinite(scene)
    elif found is not None:
        account = explain_fault(scene, found)
    else:
        account = _BY_CAUSE.get(group.cause, _as_explained)(scene)
    return _in_parts(account, parts).printable()


def _in_parts(account: GroupExplanation, parts: tuple[str, ...]) -> GroupExplanation:
    if not parts:
        return account
    where = ", ".join(parts)
    sentence = f"In the part {where}: {account.sentence}"
    blamed = f"{where}: {account.blamed}" if account.blamed else where
    return replace(account, blamed=blamed, sentence=sentence)


def finding_of(group: CheckGroup, account: GroupExplanation) -> Finding:
    """The same as a record, its checks in order."""
    return Finding(
        cause=group.cause,
        verdict=group.verdict,
        title=TITLES[group.cause],
        sentence=account.sentence,
        remedy=account.remedy,
        checks=group.ordered,
    )


def _weights(scene: Scene) -> GroupExplanation:
    check = worst_of(scene.group.checks, "graph_") or scene.shown
    findings = check.params.get("findings")
    first = str(findings[0]) if isinstance(findings, list) else render_check(check)
    blamed = first.partition(": ")[0]
    more = f" (the first of {len(findings)})" if isinstance(findings, list) and findings[1:] else ""
    return _of(check, make_printable(blamed), with_number(f"{first}{more}", _numbers_only(scene)))


def _numbers_only(scene: Scene) -> str:
    noisy = worst_of([c for c in scene.group.checks if c.runtime], "noise_ratio")
    return format_bound_usage(noisy) if noisy else ""


def _batch(scene: Scene) -> GroupExplanation:
    check = scene.group.headline_check
    if not check.name.startswith("probe_batch"):
        return _of(check, None if check.name == "runtime" else check.output)
    size = "one sample" if check.samples == 1 else f"{check.samples} samples"
    text = f"A batch size was baked in: with {size} in a batch "
    return _of(check, None, text + _off_by(check))


def _off_by(check: CheckResult) -> str:
    """Return how far the file is off on a probe, or why it has no number."""
    usage = format_bound_usage(check)
    return f"the file is off by {usage}" if usage else f"the runtime fails: {_shortly(check)}"


def _shortly(check: CheckResult) -> str:
    return short(broken(render_check(check)))


def _baked_in(scene: Scene) -> GroupExplanation:
    check = scene.shown
    probe = check.name.removeprefix("probe_")
    text = f"The trace baked in a value: the samples agree, and on the input '{probe}' "
    text += _off_by(check)
    found = scene.explanation.localisation
    if found is not None and found.probe is not None and found.fault is not None:
        text += (
            f". On '{found.probe}' it begins here: {make_printable(found.fault).replace('`', '')}"
        )
    return _of(check, None, f"{text}{_warning(scene.evidence)}")


def _beyond(scene: Scene) -> GroupExplanation:
    check = scene.shown
    probe = check.name.removeprefix("probe_")
    if check.code == "beyond_range":
        return _of(check, None, f"The samples agree. On the input '{probe}': {_shortly(check)}")
    text = f"The samples agree. On the input '{probe}', which is outside of their range, "
    text += f"{_off_by(check)}. A trace of the model agrees with the model on every input that was "
    text += "tried: the file has other code than the model"
    return GroupExplanation(None, clean(text), LIMITS)


def _warning(evidence: Evidence) -> str:
    """What the exporter or the lint said beforehand, where it did."""
    export = evidence.export
    if export is None:
        return ""
    lint = [f for f in export.lint if f.level == "error" and not f.suppressed]
    if lint:
        return f". The lint says {lint[0].code} at {lint[0].place} ({lint[0].expression})"
    return (
        f". The tracer warned: {short(export.tracer_warnings[0])}" if export.tracer_warnings else ""
    )


def _outputs(scene: Scene) -> GroupExplanation:
    check = worst_of(scene.group.checks, "runtime") or scene.shown
    return _of(check, check.output)


def _accounts_optimiser(scene: Scene) -> GroupExplanation:
    text = f"ONNX Runtime's optimiser changes the answer: {scene.number} on {scene.where}"
    text += "; with optimisations off the file agrees"
    return GroupExplanation(scene.shown.runtime, text, OPTIMISER)


def _runtime(scene: Scene) -> GroupExplanation:
    check = worst_of(scene.group.checks, "runtime") or scene.shown
    return _of(check, check.runtime)


def _device(scene: Scene) -> GroupExplanation:
    check = worst_of(scene.group.checks, "precision") or scene.shown
    if check.name == "runtime":
        return _of(check, check.runtime)
    if check.name in ("provider", "device", "precision"):
        return _of(check, check.runtime, f"{check.runtime}: {short(render_check(check))}")
    alone = " alone" if scene.group.cpu_agrees else ""
    text = f"Off on CUDA{alone}: {scene.number} on {scene.where}"
    if check.runtime is not None and not traits_of(check.runtime).cuda:
        text = f"Off on {scene.where}{alone}: {scene.number}"
    if alone:
        text += "; on the CPU the file agrees"
    device = next((c for c in scene.group.checks if c.name == "device"), check)
    return _of(device, check.runtime, text)


def _preprocessing(scene: Scene) -> GroupExplanation:
    check = scene.shown
    consumer = check.params.get("consumer")
    if not isinstance(consumer, str):
        return _of(check, None)
    text = render_check(check, "headline")
    return _of(check, consumer, text if consumer in text else f"{consumer}: {text}")


def _numbers(scene: Scene) -> GroupExplanation:
    check, found = scene.shown, scene.explanation.localisation
    usage = format_bound_usage(check)
    text = f"{check.output or 'An output'} differs: {check.name} {usage} on {scene.where}"
    if scene.explanation.failure is not None:
        text += f". The layer is not known: {short(scene.explanation.failure)}"
    elif found is not None:
        text += f". {found.cause}"
    seam = found.remedy if found is not None and found.seam else None
    account = _of(check, check.output, text)
    return replace(account, remedy=seam) if seam else account


def _export(scene: Scene) -> GroupExplanation:
    check = scene.shown
    who = _WARNED.get(check.name, "the export")
    text = f"{capital(who)} warned, and the policy refuses that: {short(render_check(check))}"
    return _of(check, who, text)


def _champion(scene: Scene) -> GroupExplanation:
    return _of(scene.shown, "the champion")


def _cost(scene: Scene) -> GroupExplanation:
    return _of(scene.shown, scene.shown.runtime)


def _waived(scene: Scene) -> GroupExplanation:
    """What was not measured, and what does not refuse the file: one sentence for the checks that
    say the same, and one for the probes with the same code."""
    groups: dict[tuple[str | None, str], tuple[str, dict[str | None, None]]] = {}
    for check in scene.group.checks:
        text = short(render_check(check, "headline"))
        is_probe = check.name.startswith("probe_")
        _, named = groups.setdefault((check.code, "" if is_probe else text), (text, {}))
        named[check.runtime if check.name == "runtime" else check.name] = None
    texts = []
    for (_, of_all), (text, named) in groups.items():
        names = ", ".join(filter(None, named))
        example = "for example, " if len(named) > 1 and not of_all else ""
        texts.append(text if text.startswith(names) else f"{names}: {example}{text}")
    return GroupExplanation(None, clean("; ".join(texts)), None)


def _model(scene: Scene) -> GroupExplanation:
    checks = scene.group.checks
    check = worst_of(checks, "repeats") or worst_of(checks, "fast_path") or scene.shown
    return _of(check, "the model")


def _samples(scene: Scene) -> GroupExplanation:
    return _of(scene.shown, "samples")


def _as_explained(scene: Scene) -> GroupExplanation:
    """Return what the check itself says."""
    check = scene.shown
    return _of(check, check.output or (check.name if check.runtime is None else None))


_WARNED = {
    "export_tracer_warnings": "the tracer",
    "export_hazards": "the exporter",
    "export_lint": "the lint",
}

_BY_CAUSE: dict[Cause, Callable[[Scene], GroupExplanation]] = {
    "weights": _weights,
    "batch": _batch,
    "baked_in": _baked_in,
    "beyond": _beyond,
    "outputs": _outputs,
    "optimiser": _accounts_optimiser,
    "runtime": _runtime,
    "device": _device,
    "cpu_optimized": _device,
    "preprocessing": _preprocessing,
    "export": _export,
    "champion": _champion,
    "cost": _cost,
    "model": _model,
    "samples": _samples,
    "numbers": _numbers,
    "waived": _waived,
}
