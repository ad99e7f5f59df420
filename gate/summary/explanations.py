"""Explain a group in one sentence; name the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from gate.decision.catalog import OPTIMISER, REMEDIES, TITLES, Cause
from gate.decision.check_result import CheckResult, Verdict
from gate.records.evidence import ONLY_BATCHES, Evidence
from gate.records.localization import Explanation, Localization, OptimizerFault, listed
from gate.records.runtime import traits_of
from gate.storage.safe_text import make_printable
from gate.summary.grouping import CheckGroup, worst_of
from gate.summary.render import broken, capital, clean, format_bound_usage, short
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
        """The farthest noise ratio beyond its bound, else the number of the first check, named
        where its unit does not say what it is."""
        failed = [c for c in self.group.checks if c.verdict is Verdict.FAIL]
        best = worst_of(failed, "noise_ratio") or worst_of(failed, "noise_") or self.shown
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
        limits = found.fault.startswith("code in")
        remedy = REMEDIES["probe_beyond"] if limits else found.remedy
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
    check = next((c for c in scene.group.ordered if c.name == f"probe_{probe}"), scene.shown)
    text = f"{text}; the samples agree, and the input '{probe}' shows it"
    return with_number(text, format_bound_usage(check))


def _located_optimiser(scene: Scene, blame: OptimizerFault) -> GroupExplanation:
    """Which optimiser it is, what it made of which nodes, and what comes of it."""
    text = f"ONNX Runtime's {blame.text}; with optimisations off the file agrees"
    shows = short(broken(blame.raises)) if blame.raises else scene.number
    return GroupExplanation(listed(blame.names), with_number(text, shows), blame.remedy)


def _fault(found: Localization, fault: str) -> tuple[str | None, str]:
    """What is to blame by its name, and what is wrong with it."""
    named = re.match(r"`([^`]+)`", fault)
    blamed = make_printable(named[1] if named else found.first_divergence or "") or None
    text = make_printable(fault).replace("`", "").replace(" of the file", "", 1)
    if blamed is None:
        text = capital(text)
    elif not text.startswith(blamed):
        text = f"{blamed}: {text}"
    places = {row.title for row in found.layers if row.verdict == "source" and row.module}
    if len(places) > 1:
        text += f" (the first of {len(places)} places)"
    return blamed, text


def nonfinite(scene: Scene) -> GroupExplanation:
    """How much is NaN or infinite, and where that begins."""
    check = worst_of(scene.group.checks, "finite") or scene.shown
    text, found = (
        capital(check.explanation.partition(";")[0].rstrip(".")),
        scene.group.localisation,
    )
    if found is None:
        return GroupExplanation(check.output, clean(text), check.remedy)
    if found.fault is None:
        return GroupExplanation(check.output, clean(f"{text}. {found.cause}"), found.remedy)
    blamed, fault = _fault(found, found.fault)
    return GroupExplanation(
        blamed or check.output, clean(f"{text}. It begins here: {fault}"), check.remedy
    )


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
    blamed, _, rest = check.explanation.partition(": ")
    text = f"{blamed} {rest.replace('`', '')}".rstrip(".")
    return GroupExplanation(
        make_printable(blamed), with_number(text, _numbers_only(scene)), check.remedy
    )


def _numbers_only(scene: Scene) -> str:
    noisy = worst_of([c for c in scene.group.checks if c.runtime], "noise_ratio")
    return format_bound_usage(noisy) if noisy else ""


def _batch(scene: Scene) -> GroupExplanation:
    check = worst_of(scene.group.checks, "probe_batch") or scene.shown
    if check.name == "runtime":
        text = f"A batch size was baked in: {_breaks(check)}"
        return GroupExplanation(None, clean(text), REMEDIES["probe_batch"])
    if not check.name.startswith("probe_batch"):
        return _as_explained(scene)
    size = "one sample" if check.samples == 1 else f"{check.samples} samples"
    text = f"A batch size was baked in: with {size} in a batch "
    text += format_bound_usage(check) or short(check.explanation)
    return GroupExplanation(None, clean(text), check.remedy)


def _breaks(check: CheckResult) -> str:
    """What a runtime says that does not compute batches of every size."""
    why, _, sizes = check.explanation.partition(ONLY_BATCHES)
    shapes = why.find("Input shape:")
    if shapes >= 0:
        why = f"can't reshape. {why[shapes:]}"
    else:
        why = f"breaks: {broken(why.partition('it failed: ')[2])}"
    only = f"computes batches of {sizes.rstrip('. ')} only, and else " if sizes else ""
    return f"{check.runtime} {only}{short(why.rstrip('. '))}"


def _baked_in(scene: Scene) -> GroupExplanation:
    check = scene.shown
    place = check.name.removeprefix("probe_")
    text = f"Something was baked in by the trace: the samples agree, and on the input '{place}' "
    text += (
        f"the file is off by {format_bound_usage(check)}"
        if format_bound_usage(check)
        else short(check.explanation)
    )
    found = scene.explanation.localisation
    if found is not None and found.probe is not None and found.fault is not None:
        text += (
            f". On '{found.probe}' it begins here: {make_printable(found.fault).replace('`', '')}"
        )
    warning = _warning(scene.evidence)
    return GroupExplanation(None, clean(f"{text}{warning}"), check.remedy)


def _beyond(scene: Scene) -> GroupExplanation:
    check = scene.shown
    if check.code == "beyond_range":
        place = check.name.removeprefix("probe_")
        text = f"The samples agree. On the input '{place}': {check.explanation}"
        return GroupExplanation(None, clean(text), check.remedy)
    place = check.name.removeprefix("probe_")
    text = f"The samples agree, and on the input '{place}', where none of them is, the file is off "
    text += (
        f"by {format_bound_usage(check)}"
        if format_bound_usage(check)
        else f"({short(check.explanation)})"
    )
    text += ". A trace of the model agrees with it on every input that was tried: the file is of "
    text += "other code than the model's"
    return GroupExplanation(None, clean(text), REMEDIES["probe_beyond"])


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
    check = worst_of(scene.group.checks, "runtime")
    if check is None:
        return _as_explained(scene)
    why = check.explanation.partition("it failed: ")[2] or check.explanation
    text, _, remedy = why.rstrip(". ").rpartition(". ")
    return GroupExplanation(
        check.output, clean(text or why), f"{remedy}." if text else check.remedy
    )


def _accounts_optimiser(scene: Scene) -> GroupExplanation:
    text = f"ONNX Runtime's optimiser changes the answer: {scene.number} on {scene.where}"
    text += "; with optimisations off the file agrees"
    return GroupExplanation(scene.shown.runtime, text, OPTIMISER)


def _runtime(scene: Scene) -> GroupExplanation:
    check = worst_of(scene.group.checks, "runtime") or scene.shown
    why = check.explanation.partition("it failed: ")[2] or check.explanation
    text = f"{check.runtime} can't run the file: {short(broken(why))}"
    lacks = "not a registered" in why
    return GroupExplanation(
        check.runtime, clean(text), REMEDIES["graph_domain"] if lacks else check.remedy
    )


def _device(scene: Scene) -> GroupExplanation:
    check = worst_of(scene.group.checks, "precision") or scene.shown
    if check.name == "runtime":
        why = check.explanation.rpartition("always asks for it: ")[2].partition(": ")[0]
        text = f"{capital(why)}, and the policy always asks for {scene.where}"
        return GroupExplanation(check.runtime, clean(text), check.remedy)
    if check.name in ("provider", "device", "precision"):
        text = f"{check.runtime}: {short(check.explanation)}"
        return GroupExplanation(check.runtime, clean(text), check.remedy)
    alone = " alone" if scene.group.cpu_agrees else ""
    text = f"Off on CUDA{alone}: {scene.number} on {scene.where}"
    if check.runtime is not None and not traits_of(check.runtime).cuda:
        text = f"Off on {scene.where}{alone}: {scene.number}"
    if alone:
        text += "; on the CPU the file agrees"
    device = next((c for c in scene.group.checks if c.name == "device"), check)
    return GroupExplanation(check.runtime, clean(text), device.remedy)


def _preprocessing(scene: Scene) -> GroupExplanation:
    check = scene.shown
    blamed = check.name.removeprefix("preprocessing_").removeprefix("flips_")
    blamed = "" if blamed == "preprocessing" else blamed
    text = f"{blamed}: {check.explanation}" if blamed else check.explanation
    if blamed and check.observed is not None and not check.name.startswith("preprocessing_flips_"):
        values = (v for v in (check.observed, check.bound) if isinstance(v, float))
        steps = ", allowed ".join(f"{value:.4g}/255" for value in values)
        cause = check.explanation.partition("Cause: ")[2].rstrip(".")
        text = f"{blamed} makes other pixels than in training: {steps}"
        text += f" ({cause})" if cause else ""
    return GroupExplanation(blamed or None, clean(text), check.remedy)


def _numbers(scene: Scene) -> GroupExplanation:
    check, found = scene.shown, scene.explanation.localisation
    usage = format_bound_usage(check)
    text = f"{check.output or 'An output'} differs: {check.name} {usage} on {scene.where}"
    if scene.explanation.failure is not None:
        text += f". The layer is not known: {short(scene.explanation.failure)}"
    elif found is not None:
        text += f". {found.cause}"
    seam = found.remedy if found is not None and found.seam else None
    return GroupExplanation(check.output, clean(text), seam or check.remedy)


def _export(scene: Scene) -> GroupExplanation:
    check = scene.shown
    who = _WARNED.get(check.name, "the export")
    text = f"{capital(who)} warned, and the policy refuses that: {short(check.explanation)}"
    return GroupExplanation(who, clean(text), check.remedy)


def _champion(scene: Scene) -> GroupExplanation:
    check = scene.shown
    beside = _BESIDE.get(check.name)
    text = check.explanation if beside is None else beside.format(format_bound_usage(check))
    return GroupExplanation("the champion", clean(capital(text)), check.remedy)


def _cost(scene: Scene) -> GroupExplanation:
    check = scene.shown
    what = "is slower than the policy allows" if check.name == "latency_ratio" else (
        "takes more memory than the policy allows"
    )  # fmt: skip
    text = f"{check.runtime} {what}: {check.name} {format_bound_usage(check)}"
    return GroupExplanation(check.runtime, clean(text), check.remedy)


def _waived(scene: Scene) -> GroupExplanation:
    """What was not measured, and what was measured where nobody can judge it."""
    checks = scene.group.checks
    beyond = [c for c in checks if c.code is not None]
    judged = [c for c in checks if c.name.startswith("probe_") and c.observed is not None]
    judged = [check for check in judged if check not in beyond]
    lacking = [check for check in checks if check not in judged and check not in beyond]
    texts = [_shown(beyond, code) for code in dict.fromkeys(c.code for c in beyond)]
    if lacking:
        why = lacking[0].explanation.rpartition("only when present: ")[2].partition(": ")[0]
        names = ", ".join(dict.fromkeys(c.runtime or c.name for c in lacking))
        texts.append(f"{names}: not measured, as the policy allows ({short(why)})")
    if judged:
        names = ", ".join(dict.fromkeys(c.name for c in judged))
        texts.append(f"{names}: measured, and not judged ({short(judged[0].explanation)})")
    return GroupExplanation(None, clean("; ".join(texts)), None)


def _shown(checks: list[CheckResult], code: str | None) -> str:
    """The checks of one code, and what the first of them says."""
    of_code = [check for check in checks if check.code == code]
    names = ", ".join(dict.fromkeys(check.name for check in of_code))
    return f"{names}: {short(of_code[0].explanation.rstrip('.'))}"


def _model(scene: Scene) -> GroupExplanation:
    checks = scene.group.checks
    check = worst_of(checks, "repeats") or worst_of(checks, "fast_path") or scene.shown
    text = check.explanation.rstrip(".")
    if check.name == "near_ties":
        text = f"The model leaves answers to rounding: {text.partition(':')[0]}"
    if check.name == "repeats" and not scene.evidence.state_spread:
        text += ": the model draws random numbers, or changes itself, in eval mode"
    return GroupExplanation("the model", clean(capital(text)), check.remedy)


def _samples(scene: Scene) -> GroupExplanation:
    check = scene.shown
    return GroupExplanation("samples", clean(capital(check.explanation)), check.remedy)


def _as_explained(scene: Scene) -> GroupExplanation:
    """What the check itself says, with its number."""
    check = scene.shown
    blamed = check.output or (check.name if check.runtime is None else None)
    text = capital(check.explanation)
    return GroupExplanation(blamed, clean(text), check.remedy)


_WARNED = {
    "export_tracer_warnings": "the tracer",
    "export_hazards": "the exporter",
    "export_lint": "the lint",
}

_BESIDE = {
    "incumbent_agreement": "Other answers than the champion's; the same on {}",
    "incumbent_accuracy_drop": "Right less often than the champion, by {}",
    "incumbent_latency_ratio": "Slower than the champion, by a factor of {}",
}
"""Of a check, what its number means."""

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
