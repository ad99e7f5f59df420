"""An account of a cause: what is to blame, what is wrong with it, and what to do, in one sentence.

Its numbers are those of the check that shows it best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gate.decision.checks import CheckResult, Verdict
from gate.decision.remedies import OPTIMISER, REMEDIES
from gate.records.evidence import ONLY_BATCHES, Evidence
from gate.records.localisation import Explanation
from gate.records.runtime import traits_of
from gate.story.causes import TITLES
from gate.story.group import Group, worst_of
from gate.story.located import located, nonfinite
from gate.story.scene import Account, Scene, broken, capital, clean, short, with_number
from gate.story.story import CauseKind, Finding
from gate.story.wording import printable
from gate.story.words import measure


def account_of(group: Group, evidence: Evidence, explanation: Explanation) -> Account:
    """The account of a group. What is to blame in a part of a release is named with that part."""
    named = () if group.verdict is Verdict.WAIVED else group.ordered
    parts = tuple(dict.fromkeys(check.part for check in named if check.part))
    of_part = evidence.parts.get(parts[0]) if parts else None
    scene = Scene(group, of_part or evidence, explanation)
    found = group.localisation
    if group.cause == "nonfinite":
        account = nonfinite(scene)
    elif found is not None:
        account = located(scene, found)
    else:
        account = _BY_CAUSE.get(group.cause, _as_explained)(scene)
    return _in_parts(account, parts).printable()


def _in_parts(account: Account, parts: tuple[str, ...]) -> Account:
    if not parts:
        return account
    where = ", ".join(parts)
    sentence = f"In the part {where}: {account.sentence}"
    blamed = f"{where}: {account.blamed}" if account.blamed else where
    return replace(account, blamed=blamed, sentence=sentence)


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


def _weights(scene: Scene) -> Account:
    check = worst_of(scene.group.checks, "graph_") or scene.shown
    blamed, _, rest = check.explanation.partition(": ")
    text = f"{blamed} {rest.replace('`', '')}".rstrip(".")
    return Account(printable(blamed), with_number(text, _numbers_only(scene)), check.remedy)


def _numbers_only(scene: Scene) -> str:
    noisy = worst_of([c for c in scene.group.checks if c.runtime], "noise_ratio")
    return measure(noisy) if noisy else ""


def _batch(scene: Scene) -> Account:
    check = worst_of(scene.group.checks, "probe_batch") or scene.shown
    if check.name == "runtime":
        text = f"A batch size was baked in: {_breaks(check)}"
        return Account(None, clean(text), REMEDIES["probe_batch"])
    if not check.name.startswith("probe_batch"):
        return _as_explained(scene)
    size = "one sample" if check.samples == 1 else f"{check.samples} samples"
    text = f"A batch size was baked in: with {size} in a batch "
    text += measure(check) or short(check.explanation)
    return Account(None, clean(text), check.remedy)


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


def _baked_in(scene: Scene) -> Account:
    check = scene.shown
    place = check.name.removeprefix("probe_")
    text = f"Something was baked in by the trace: the samples agree, and on the input '{place}' "
    text += f"the file is off by {measure(check)}" if measure(check) else short(check.explanation)
    found = scene.explanation.localisation
    if found is not None and found.probe is not None and found.fault is not None:
        text += f". On '{found.probe}' it begins here: {printable(found.fault).replace('`', '')}"
    warning = _warning(scene.evidence)
    return Account(None, clean(f"{text}{warning}"), check.remedy)


def _beyond(scene: Scene) -> Account:
    check = scene.shown
    place = check.name.removeprefix("probe_")
    text = f"The samples agree, and on the input '{place}', where none of them is, the file is off "
    text += f"by {measure(check)}" if measure(check) else f"({short(check.explanation)})"
    text += ". A trace of the model agrees with it on every input that was tried: the file is of "
    text += "other code than the model's"
    return Account(None, clean(text), REMEDIES["probe_beyond"])


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


def _outputs(scene: Scene) -> Account:
    check = worst_of(scene.group.checks, "runtime")
    if check is None:
        return _as_explained(scene)
    why = check.explanation.partition("it failed: ")[2] or check.explanation
    text, _, remedy = why.rstrip(". ").rpartition(". ")
    return Account(check.output, clean(text or why), f"{remedy}." if text else check.remedy)


def _optimiser(scene: Scene) -> Account:
    text = f"ONNX Runtime's optimiser changes the answer: {scene.number} on {scene.where}"
    text += "; with optimisations off the file agrees"
    return Account(scene.shown.runtime, text, OPTIMISER)


def _runtime(scene: Scene) -> Account:
    check = worst_of(scene.group.checks, "runtime") or scene.shown
    why = check.explanation.partition("it failed: ")[2] or check.explanation
    text = f"{check.runtime} can't run the file: {short(broken(why))}"
    lacks = "not a registered" in why
    return Account(check.runtime, clean(text), REMEDIES["graph_domain"] if lacks else check.remedy)


def _device(scene: Scene) -> Account:
    check = worst_of(scene.group.checks, "precision") or scene.shown
    if check.name == "runtime":
        why = check.explanation.rpartition("always asks for it: ")[2].partition(": ")[0]
        text = f"{capital(why)}, and the policy always asks for {scene.where}"
        return Account(check.runtime, clean(text), check.remedy)
    if check.name in ("provider", "device", "precision"):
        text = f"{check.runtime}: {short(check.explanation)}"
        return Account(check.runtime, clean(text), check.remedy)
    alone = " alone" if scene.group.cpu_agrees else ""
    text = f"Off on CUDA{alone}: {scene.number} on {scene.where}"
    if check.runtime is not None and not traits_of(check.runtime).cuda:
        text = f"Off on {scene.where}{alone}: {scene.number}"
    if alone:
        text += "; on the CPU the file agrees"
    device = next((c for c in scene.group.checks if c.name == "device"), check)
    return Account(check.runtime, clean(text), device.remedy)


def _preprocessing(scene: Scene) -> Account:
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
    return Account(blamed or None, clean(text), check.remedy)


def _numbers(scene: Scene) -> Account:
    check, found = scene.shown, scene.explanation.localisation
    text = f"{check.output or 'An output'} differs: {check.name} {measure(check)} on {scene.where}"
    if scene.explanation.failure is not None:
        text += f". The layer is not known: {short(scene.explanation.failure)}"
    elif found is not None:
        text += f". {found.cause}"
    seam = found.remedy if found is not None and found.seam else None
    return Account(check.output, clean(text), seam or check.remedy)


def _export(scene: Scene) -> Account:
    check = scene.shown
    who = _WARNED.get(check.name, "the export")
    text = f"{capital(who)} warned, and the policy refuses that: {short(check.explanation)}"
    return Account(who, clean(text), check.remedy)


def _champion(scene: Scene) -> Account:
    check = scene.shown
    beside = _BESIDE.get(check.name)
    text = check.explanation if beside is None else beside.format(measure(check))
    return Account("the champion", clean(capital(text)), check.remedy)


def _cost(scene: Scene) -> Account:
    check = scene.shown
    what = "is slower than the policy allows" if check.name == "latency_ratio" else (
        "takes more memory than the policy allows"
    )  # fmt: skip
    text = f"{check.runtime} {what}: {check.name} {measure(check)}"
    return Account(check.runtime, clean(text), check.remedy)


def _waived(scene: Scene) -> Account:
    """What was not measured, and what was measured where nobody can judge it."""
    checks = scene.group.checks
    judged = [c for c in checks if c.name.startswith("probe_") and c.observed is not None]
    lacking = [check for check in checks if check not in judged]
    texts = []
    if lacking:
        why = lacking[0].explanation.rpartition("only when present: ")[2].partition(": ")[0]
        names = ", ".join(dict.fromkeys(c.runtime or c.name for c in lacking))
        texts.append(f"{names}: not measured, as the policy allows ({short(why)})")
    if judged:
        names = ", ".join(dict.fromkeys(c.name for c in judged))
        texts.append(f"{names}: measured, and not judged ({short(judged[0].explanation)})")
    return Account(None, clean("; ".join(texts)), None)


def _model(scene: Scene) -> Account:
    check = worst_of(scene.group.checks, "repeats") or scene.shown
    text = check.explanation.rstrip(".")
    if check.name == "near_ties":
        text = f"The model leaves answers to rounding: {text.partition(':')[0]}"
    if check.name == "repeats":
        text += ": the model draws random numbers, or changes itself, in eval mode"
    return Account("the model", clean(capital(text)), check.remedy)


def _samples(scene: Scene) -> Account:
    check = scene.shown
    return Account("samples", clean(capital(check.explanation)), check.remedy)


def _as_explained(scene: Scene) -> Account:
    """What the check itself says, with its number."""
    check = scene.shown
    blamed = check.output or (check.name if check.runtime is None else None)
    text = capital(check.explanation)
    return Account(blamed, clean(text), check.remedy)


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
_BY_CAUSE: dict[CauseKind, Callable[[Scene], Account]] = {
    "weights": _weights,
    "batch": _batch,
    "baked_in": _baked_in,
    "beyond": _beyond,
    "outputs": _outputs,
    "optimiser": _optimiser,
    "runtime": _runtime,
    "device": _device,
    "preprocessing": _preprocessing,
    "export": _export,
    "champion": _champion,
    "cost": _cost,
    "model": _model,
    "samples": _samples,
    "numbers": _numbers,
    "waived": _waived,
}
