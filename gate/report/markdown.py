"""The decision as Markdown, for the description of a registered model version and for reviews.

The first line is one plain sentence: MLflow shows it raw in its list of models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from gate.decision.checks import Verdict
from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.report import localisation
from gate.story import wording

_HEADER = (
    "| runtime | check | observed | allowed | n | verdict |",
    "|---|---|---:|---|---:|---|",
)
_MARKUP = re.compile(r"[\\|`*\[\]<>#!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""What Markdown could take for markup; an underscore within a word is none."""


def describe(
    decision: Decision,
    evidence: Evidence,
    links: Mapping[str, str],
    explanation: Explanation | None = None,
) -> str:
    """Markdown text: the verdict, the problems, the table of checks, what it is bound to, `links`
    (label to address)."""
    lines = [_plain(wording.verdict_sentence(decision, evidence)), ""]
    lines += _problems(decision)
    items = [*_items(localisation.sentences(explanation or Explanation()))]
    lines += [*items, ""] if items else []
    lines += [*_HEADER, *_rows(decision), ""]
    lines += _items(wording.agreement_sentences(decision, evidence, confidence=0.95))
    lines += _items(wording.input_sentences(decision))
    lines += _items(wording.weight_sentences(evidence))
    lines += _items(wording.code_sentences(evidence))
    lines += ["", *_bound_to(decision, evidence), ""]
    lines += [f"- [{_escape(label)}](<{_address(target)}>)" for label, target in links.items()]
    return "\n".join(lines).rstrip() + "\n"


def describe_twin(decision: Decision, evidence: Evidence) -> str:
    """Markdown text about the quantized twin, to stand below that of its exact file."""
    subject = evidence.subject
    lines = ["", f"**Quantized twin.** {_plain(wording.verdict_sentence(decision, evidence))}", ""]
    lines += _problems(decision)
    lines += _items(wording.agreement_sentences(decision, evidence, confidence=0.95))
    lines += [f"- file: `{decision.subject_sha256}`, {subject.size_bytes} bytes"]
    lines += [f"- policy: `{decision.policy_sha256}`, evidence: `{decision.evidence_sha256}`"]
    return "\n".join(lines) + "\n"


def _items(sentences: Iterable[str]) -> Iterator[str]:
    return (f"- {_escape(sentence)}" for sentence in sentences)


def _problems(decision: Decision) -> Iterator[str]:
    for check in decision.problems:
        yield f"- **{check.verdict}** {_escape(check.title)}: {_escape(check.explanation)}"
        if check.remedy:
            yield f"  Try: {_escape(check.remedy)}"
    for reason, titles in wording.waivers(decision).items():
        yield f"- **{Verdict.WAIVED}** {_escape(', '.join(titles))}: {_escape(reason)}"
    if decision.problems or decision.waived:
        yield ""


def _rows(decision: Decision) -> Iterator[str]:
    for runtime, checks in wording.folded_groups(decision):
        for check in checks:
            cells = (runtime, *wording.cells(check), check.verdict.value)
            yield "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _bound_to(decision: Decision, evidence: Evidence) -> Iterator[str]:
    subject, source = evidence.subject, evidence.source
    yield f"- file: `{decision.subject_sha256}`, {subject.size_bytes} bytes, opset {subject.opset}"
    yield f"- reference: {_escape(source.factory)}, checkpoint `{source.checkpoint_sha256}`"
    if source.code is not None:
        yield f"- model's code: `{source.code.digest()}`, {len(source.code.files)} files"
    yield f"- samples: {evidence.dataset.samples}, data `{evidence.dataset.sha256}`"
    yield f"- policy: `{decision.policy_sha256}`"
    yield f"- evidence: `{decision.evidence_sha256}`, measured {_escape(evidence.measured_at)}"
    yield f"- decided {_escape(decision.decided_at)}"


def _plain(sentence: str) -> str:
    """`sentence` without any Markdown in it, still readable raw."""
    for relation, symbol in (("<=", "≤"), (">=", "≥")):
        sentence = sentence.replace(relation, symbol)
    return _MARKUP.sub("'", wording.printable(sentence))


def _escape(text: str) -> str:
    """`text` as literal Markdown within a table cell or a list item."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", wording.printable(text))


def _address(target: str) -> str:
    return wording.printable(target).translate({ord("<"): "%3C", ord(">"): "%3E", ord(" "): "%20"})
