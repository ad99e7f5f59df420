"""The words that all reports share: numbers, cells of checks, sentences about the evidence.

Names of inputs and outputs come from the judged file, so every text goes through `printable`.
"""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision.checks import CheckResult
from gate.decision.decision import Decision
from gate.decision.rules.comparisons import top1_lower_bound
from gate.records.evidence import Evidence

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
