"""The words that all reports share: the verdict in one sentence, numbers, checks in groups.

Names of inputs and outputs come from the judged file, so every text goes through `printable`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.decision.remedies import REMEDIES
from gate.decision.rules.comparisons import top1_lower_bound
from gate.records.evidence import Evidence

_KINDS: tuple[tuple[str, Callable[[CheckResult], bool]], ...] = (
    ("passed", lambda check: check.verdict is Verdict.PASS),
    ("fail as the samples do", lambda check: check.remedy == REMEDIES["probe_as_samples"]),
)
"""Checks of a family that are told in one line."""
_SYMBOLS = {"<=": "≤", ">=": "≥", "==": "="}


def printable(text: str) -> str:
    """`text` on one line, without anything that could steer a terminal."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "�" for char in line)


def number(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def observed(check: CheckResult) -> str:
    """What the check saw. A number that only rounds to its bound is written in full."""
    if not isinstance(check.observed, float):
        return printable(check.observed or "")
    short = number(check.observed)
    rounds_to_bound = isinstance(check.bound, float) and short == number(check.bound)
    if rounds_to_bound and check.observed != check.bound:
        return repr(check.observed)
    return short


def allowed(check: CheckResult) -> str:
    """The bound with its direction, or nothing for a check without a bound."""
    if check.bound is None:
        return ""
    bound = number(check.bound) if isinstance(check.bound, float) else printable(check.bound)
    return f"{_SYMBOLS.get(check.relation or '', '')} {bound}".strip()


def cells(check: CheckResult) -> tuple[str, str, str, str]:
    """Name with the output, observed, allowed, number of samples."""
    name = f"{check.output} / {check.label}" if check.output else check.label
    samples = "" if check.samples is None else str(check.samples)
    return printable(name), observed(check), allowed(check), samples


def groups(decision: Decision) -> Iterator[tuple[str, tuple[CheckResult, ...]]]:
    """The checks by runtime, in their order; first those of the measurement as a whole."""
    for runtime in dict.fromkeys(check.runtime for check in decision.checks):
        checks = tuple(check for check in decision.checks if check.runtime == runtime)
        yield runtime or "measurement", checks


def folded_groups(decision: Decision) -> Iterator[tuple[str, tuple[CheckResult, ...]]]:
    """The same with one line for all probes that passed, and one for the graph: the worst of them.

    Of what is not PASS only probes that fail as the samples do are folded.
    """
    for runtime, checks in groups(decision):
        shown = []
        for family, run in itertools.groupby(checks, key=_family):
            together = list(run)
            for summary, kind in _KINDS if family is not None else ():
                members = [check for check in together if kind(check)]
                if len(members) > 1:
                    shown.append(_folded(f"{family}: {len(members)} {summary}", members))
                    together = [check for check in together if not kind(check)]
            shown += together
        yield runtime, tuple(shown)


def _family(check: CheckResult) -> str | None:
    """What the check is folded with."""
    return next((name for name in ("probe", "graph") if check.name.startswith(f"{name}_")), None)


def _folded(summary: str, checks: list[CheckResult]) -> CheckResult:
    """One line for these checks: the one that is closest to its bound, or farthest beyond it."""
    worst = max(checks, key=_strain)
    name = f"{summary}, the worst {worst.name.partition('_')[2]}"
    return worst.model_copy(update={"name": name, "samples": None})


def _strain(check: CheckResult) -> float:
    """How much of its bound a check has used; infinite where it fails without a number."""
    is_number = isinstance(check.observed, float) and not math.isnan(check.observed)
    if check.verdict is Verdict.FAIL and not is_number:
        return math.inf
    if not (isinstance(check.observed, float) and isinstance(check.bound, float) and check.bound):
        return 0.0
    return check.observed / check.bound


def waivers(decision: Decision) -> dict[str, list[str]]:
    """Reason to what is waived for it: a machine without CUDA has one reason for all of CUDA."""
    reasons: dict[str, list[str]] = {}
    for check in decision.waived:
        reason = check.explanation.removeprefix(f"{check.runtime} ")
        reasons.setdefault(printable(reason), []).append(check.runtime or check.name)
    return reasons


def verdict_sentence(decision: Decision, evidence: Evidence) -> str:
    """One plain sentence without markup: what was decided, on how many samples, and why."""
    samples = f"{evidence.dataset.samples} samples"
    total = len(decision.checks)
    if decision.passed:
        waived = sorted({check.runtime or check.name for check in decision.waived})
        tail = f"; waived: {', '.join(waived)}" if waived else ""
        runtimes = ", ".join(decision.runtimes)
        return f"Passed: within every bound of the policy on {samples} with {runtimes}{tail}."
    first = _first_problem(decision)
    if decision.verdict is Verdict.FAIL:
        failed = sum(check.verdict is Verdict.FAIL for check in decision.checks)
        unjudged = len(decision.problems) - failed
        more = f", {unjudged} could not be judged" if unjudged else ""
        return f"Rejected: {failed} of {total} checks failed on {samples}{more}; the first: {first}"
    return f"Could not judge: what was measured on {samples} proves nothing; the first: {first}"


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
            lower = top1_lower_bound(parity.top1_disagreements, n, confidence=confidence)
            yield (
                f"{runtime.runtime} / {printable(output.name)}: top-1 agrees on "
                f"{n - parity.top1_disagreements} of {n} samples; "
                f"with {100 * confidence:.4g} % confidence the agreement is at least {lower:.4f}."
            )
    notices = {c.output: c.explanation for c in decision.checks if c.name == "agreement"}
    for name, explanation in notices.items():
        yield f"{printable(name or '')}: {printable(explanation)}"


def input_sentences(decision: Decision) -> Iterator[str]:
    """What the model takes and the file does not."""
    for check in decision.checks:
        if check.name == "inputs":
            yield printable(check.explanation)


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
            f"{printable(', '.join(changes))}."
        )
    for name, reason in code.unread.items():
        yield f"model code not read, so not in the evidence: {printable(f'{name}: {reason}')}"


def weight_sentences(evidence: Evidence) -> Iterator[str]:
    """How many weights of the file are the model's; nothing where they were not compared."""
    if evidence.graph is not None and evidence.graph.weights is not None:
        yield printable(evidence.graph.weights.sentence)


def _first_problem(decision: Decision) -> str:
    wanted = Verdict.FAIL if decision.verdict is Verdict.FAIL else Verdict.ERROR
    for check in decision.checks:
        if check.verdict is wanted:
            return f"{printable(check.title)}: {printable(check.explanation)}"
    return "no measured runtime passed all its checks."
