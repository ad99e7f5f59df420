"""An account of a cause: what is to blame, what is wrong with it, and what to do, in one sentence.

Its numbers are those of the check that shows it best.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gate.decision.checks import CheckResult, Verdict
from gate.decision.remedies import REMEDIES
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation, Localisation
from gate.story.causes import TITLES
from gate.story.findings import Group, worst_of
from gate.story.story import CauseKind, Finding
from gate.story.wording import printable
from gate.story.words import measure

_LONGEST = 240
"""Characters of a sentence: what libraries say of a failure has no end."""

OPTIMISER = (
    "Serve with a lower graph_optimization_level, such as ORT_ENABLE_BASIC; update ONNX Runtime; "
    "or export with another opset, so that the pattern is not fused."
)


@dataclass(frozen=True)
class Account:
    """What one group of checks means."""

    blamed: str | None
    sentence: str
    remedy: str | None


@dataclass(frozen=True)
class _Scene:
    """What an account is made of."""

    group: Group
    evidence: Evidence
    explanation: Explanation

    @property
    def shown(self) -> CheckResult:
        """The check that shows the cause best."""
        return self.group.ordered[0]

    @property
    def number(self) -> str:
        """The farthest noise ratio beyond its bound, else the number of the first check."""
        failed = [c for c in self.group.checks if c.verdict is Verdict.FAIL]
        best = worst_of(failed, "noise_ratio") or worst_of(failed, "noise_") or self.shown
        return measure(best)

    @property
    def where(self) -> str:
        """The runtimes on which it shows."""
        return ", ".join(dict.fromkeys(c.runtime for c in self.group.ordered if c.runtime))


def account_of(group: Group, evidence: Evidence, explanation: Explanation) -> Account:
    """The account of a group."""
    scene = _Scene(group, evidence, explanation)
    found = group.localisation
    if group.cause == "nonfinite":
        return _nonfinite(scene)
    if found is not None:
        return _located(scene, found)
    return _BY_CAUSE.get(group.cause, _as_explained)(scene)


def finding_of(group: Group, account: Account) -> Finding:
    """The same as a record, its checks in order."""
    return Finding(
        cause=group.cause,
        verdict=group.verdict,
        title=TITLES[group.cause],
        sentence=account.sentence,
        remedy=account.remedy,
        checks=group.ordered,
    )


def _located(scene: _Scene, found: Localisation) -> Account:
    if found.fault is None:
        return Account(
            found.first_divergence or None, _with(found.cause, scene.number), found.remedy
        )
    blamed, text = _fault(found, found.fault)
    if scene.group.cause == "optimiser":
        text += ": with optimisations off the file agrees"
        return Account(blamed, _with(text, scene.number), OPTIMISER)
    return Account(blamed, _with(text, scene.number), found.remedy)


def _fault(found: Localisation, fault: str) -> tuple[str | None, str]:
    """What is to blame by its name, and what is wrong with it."""
    named = re.match(r"`([^`]+)`", fault)
    blamed = printable(named[1] if named else found.first_divergence or "") or None
    text = printable(fault).replace("`", "").replace(" of the file", "", 1)
    if blamed is None:
        text = _capital(text)
    elif not text.startswith(blamed):
        text = f"{blamed}: {text}"
    places = {row.title for row in found.layers if row.verdict == "source" and row.module}
    if len(places) > 1:
        text += f" (the first of {len(places)} places)"
    return blamed, text


def _nonfinite(scene: _Scene) -> Account:
    """How much is NaN or infinite, and where that begins."""
    check = worst_of(scene.group.checks, "finite") or scene.shown
    text, found = (
        _capital(check.explanation.partition(";")[0].rstrip(".")),
        scene.group.localisation,
    )
    if found is None:
        return Account(check.output, _clean(text), check.remedy)
    if found.fault is None:
        return Account(check.output, _clean(f"{text}. {found.cause}"), found.remedy)
    blamed, fault = _fault(found, found.fault)
    return Account(blamed or check.output, _clean(f"{text}. It begins here: {fault}"), check.remedy)


def _weights(scene: _Scene) -> Account:
    check = worst_of(scene.group.checks, "graph_") or scene.shown
    blamed, _, rest = check.explanation.partition(": ")
    text = f"{blamed} {rest.replace('`', '')}".rstrip(".")
    return Account(printable(blamed), _with(text, _numbers_only(scene)), check.remedy)


def _numbers_only(scene: _Scene) -> str:
    noisy = worst_of([c for c in scene.group.checks if c.runtime], "noise_ratio")
    return measure(noisy) if noisy else ""


def _batch(scene: _Scene) -> Account:
    check = worst_of(scene.group.checks, "probe_batch") or scene.shown
    if check.name == "runtime":
        shapes = _short(check.explanation[check.explanation.find("Input shape:") :])
        text = f"A batch size was baked in: {check.runtime} can't reshape. {shapes}"
        return Account(None, _clean(text), REMEDIES["probe_batch"])
    if not check.name.startswith("probe_batch"):
        return _as_explained(scene)
    size = "one sample" if check.samples == 1 else f"{check.samples} samples"
    text = f"A batch size was baked in: with {size} in a batch "
    text += measure(check) or _short(check.explanation)
    return Account(None, _clean(text), check.remedy)


def _baked_in(scene: _Scene) -> Account:
    check = scene.shown
    place = check.name.removeprefix("probe_")
    text = f"Something was baked in by the trace: the samples agree, and on the input '{place}' "
    text += f"the file is off by {measure(check)}" if measure(check) else _short(check.explanation)
    warning = _warning(scene.evidence)
    return Account(None, _clean(f"{text}{warning}"), check.remedy)


def _warning(evidence: Evidence) -> str:
    """What the exporter or the lint said beforehand, where it did."""
    export = evidence.export
    if export is None:
        return ""
    lint = [f for f in export.lint if f.level == "error" and not f.suppressed]
    if lint:
        return f". The lint says {lint[0].code} at {lint[0].place} ({lint[0].expression})"
    return (
        f". The tracer warned: {_short(export.tracer_warnings[0])}"
        if export.tracer_warnings
        else ""
    )


def _optimiser(scene: _Scene) -> Account:
    text = f"ONNX Runtime's optimiser changes the answer: {scene.number} on {scene.where}"
    text += "; with optimisations off the file agrees"
    return Account(scene.shown.runtime, text, OPTIMISER)


def _runtime(scene: _Scene) -> Account:
    check = worst_of(scene.group.checks, "runtime") or scene.shown
    why = check.explanation.partition("it failed: ")[2] or check.explanation
    why = re.sub(r"^Fail: \[ONNXRuntimeError\] : \d+ : \w+ : (?:Fatal error: )?", "", why)
    text = f"{check.runtime} can't run the file: {_short(why)}"
    lacks = "not a registered" in why
    return Account(check.runtime, _clean(text), REMEDIES["graph_domain"] if lacks else check.remedy)


def _device(scene: _Scene) -> Account:
    check = scene.shown
    if check.name == "runtime":
        why = check.explanation.rpartition("always asks for it: ")[2].partition(": ")[0]
        text = f"{_capital(why)}, and the policy always asks for {scene.where}"
        return Account(check.runtime, _clean(text), check.remedy)
    if check.name in ("provider", "device"):
        text = f"{check.runtime}: {_short(check.explanation)}"
        return Account(check.runtime, _clean(text), check.remedy)
    text = f"Off on CUDA: {scene.number} on {scene.where}"
    if scene.group.cpu_agrees:
        text = f"Off on CUDA alone: {scene.number} on {scene.where}; on the CPU the file agrees"
    device = next((c for c in scene.group.checks if c.name == "device"), check)
    return Account(check.runtime, _clean(text), device.remedy)


def _preprocessing(scene: _Scene) -> Account:
    check = scene.shown
    blamed = check.name.removeprefix("preprocessing_").removeprefix("flips_")
    blamed = "" if blamed == "preprocessing" else blamed
    text = f"{blamed}: {check.explanation}" if blamed else check.explanation
    return Account(blamed or None, _clean(text), check.remedy)


def _numbers(scene: _Scene) -> Account:
    check = scene.shown
    text = f"{check.output or 'An output'} differs: {check.name} {measure(check)} on {scene.where}"
    if scene.explanation.failure is not None:
        text += f". The layer is not known: {_short(scene.explanation.failure)}"
    elif scene.explanation.localisation is not None:
        text += f". {scene.explanation.localisation.cause}"
    return Account(check.output, _clean(text), check.remedy)


def _waived(scene: _Scene) -> Account:
    check = scene.shown
    why = check.explanation.rpartition("only when present: ")[2].partition(": ")[0]
    names = ", ".join(dict.fromkeys(c.runtime or c.name for c in scene.group.checks))
    return Account(None, _clean(f"{names}: not measured, as the policy allows ({why})"), None)


def _model(scene: _Scene) -> Account:
    check = worst_of(scene.group.checks, "repeats") or scene.shown
    text = check.explanation.rstrip(".")
    if check.name == "near_ties":
        text = text.partition(":")[0]
    if check.name == "repeats":
        text += ": the model draws random numbers, or changes itself, in eval mode"
    return Account("the model", _clean(_capital(text)), check.remedy)


def _samples(scene: _Scene) -> Account:
    check = scene.shown
    return Account("samples", _clean(_capital(check.explanation)), check.remedy)


def _as_explained(scene: _Scene) -> Account:
    """What the check itself says, with its number."""
    check = scene.shown
    blamed = check.output or (check.name if check.runtime is None else None)
    text = _capital(check.explanation)
    return Account(blamed, _clean(text), check.remedy)


_BY_CAUSE: dict[CauseKind, Callable[[_Scene], Account]] = {
    "weights": _weights,
    "batch": _batch,
    "baked_in": _baked_in,
    "optimiser": _optimiser,
    "runtime": _runtime,
    "device": _device,
    "preprocessing": _preprocessing,
    "model": _model,
    "samples": _samples,
    "numbers": _numbers,
    "waived": _waived,
}


def _with(text: str, number: str) -> str:
    return _clean(f"{text.rstrip('.')}: {number}" if number else text)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _clean(text: str) -> str:
    """One line without control characters or a full stop at its end."""
    return printable(text).rstrip(". ")


def _short(text: str) -> str:
    line = printable(text).rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
