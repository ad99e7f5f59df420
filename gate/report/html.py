"""The decision as one self-contained HTML page: no script, no address outside, fit to print."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.report import localisation
from gate.story import wording

_CAPTIONS = {
    "differences": "Every bounded difference to the PyTorch model",
    "noise": "Errors in units of the rounding error that PyTorch itself makes",
    "confidence_bands": "By how much the confidence of the samples moved",
    "confidence_by_class": "Confidence difference per class",
    "latency": "Latency per batch",
    "localisation": "Where the file leaves the model",
}


def page(
    decision: Decision,
    evidence: Evidence,
    plots: Mapping[str, bytes],
    explanation: Explanation | None = None,
) -> str:
    """The whole page; `plots` are PNG bytes by name (`gate.report.plots.draw`)."""
    body = [
        f"<h1>{_verdict(decision.verdict)} {_subject(evidence)}</h1>",
        f"<p class=lead>{_text(wording.verdict_sentence(decision, evidence))}</p>",
        *_problems(decision),
        *localisation.as_html(explanation or Explanation()),
        *_waivers(decision),
        "<h2>Checks</h2>",
        *_checks(wording.folded_groups(decision)),
        *_all_checks(decision),
        "<ul>",
        *(
            f"<li>{_text(sentence)}"
            for sentence in (
                *wording.agreement_sentences(decision, evidence, confidence=0.95),
                *wording.input_sentences(decision),
                *wording.code_sentences(evidence),
                *wording.weight_sentences(evidence),
            )
        ),
        "</ul>",
        *_figures(plots),
        "<h2>What was judged, with what, where</h2>",
        *_facts(_provenance(decision, evidence)),
    ]
    return _PAGE.format(
        title=_text(f"{decision.verdict}: parity report"), css=_CSS, body=_join(body)
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_CSS = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --pass: #0a6b4a; --fail: #b3400a;
  --error: #8a2d86; --waived: #7a5a00; }
@media (prefers-color-scheme: dark) { :root { --pass: #4fc79d; --fail: #ff8a4d; --error: #e08bdc;
  --waived: #e3b94d; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
.lead { font-size: 1.1rem; }
dt { font-weight: 600; margin-top: .6rem; overflow-wrap: anywhere; }
dd { margin: 0 0 0 1rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; vertical-align: top; }
th[scope=rowgroup] { background: var(--soft); padding-top: .4rem; }
thead th { white-space: nowrap; }
.facts th { width: 8rem; font-weight: 600; }
.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.PASS { color: var(--pass); } .FAIL { color: var(--fail); } .ERROR { color: var(--error); }
.WAIVED { color: var(--waived); }
span.FAIL, span.ERROR { font-weight: 700; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
figcaption { font-size: .9rem; opacity: .8; }
@media print { main { max-width: none; padding: 0; } figure, tr, dt { break-inside: avoid; }
  thead { display: table-header-group; } h2 { break-after: avoid; } }
"""
"""The look: the reader's light or dark, and paper."""


def _problems(decision: Decision) -> Iterator[str]:
    if not decision.problems:
        return
    yield "<h2>What went wrong</h2><dl>"
    for check in decision.problems:
        yield f"<dt>{_verdict(check.verdict)} {_text(check.title)}</dt>"
        yield f"<dd>{_text(check.explanation)}"
        if check.remedy:
            yield f"<br><b>Try:</b> {_text(check.remedy)}"
        yield "</dd>"
    yield "</dl>"


def _waivers(decision: Decision) -> Iterator[str]:
    if not decision.waived:
        return
    yield "<h2>Waived by the policy</h2><dl>"
    for reason, titles in wording.waivers(decision).items():
        yield f"<dt>{_verdict(Verdict.WAIVED)} {_text(', '.join(titles))}</dt>"
        yield f"<dd>{_text(reason)}</dd>"
    yield "</dl>"


def _all_checks(decision: Decision) -> Iterator[str]:
    shown = sum(len(checks) for _, checks in wording.folded_groups(decision))
    if shown == len(decision.checks):
        return
    yield f"<details><summary>All {len(decision.checks)} checks</summary>"
    yield from _checks(wording.groups(decision))
    yield "</details>"


def _checks(groups: Iterator[tuple[str, tuple[CheckResult, ...]]]) -> Iterator[str]:
    yield "<table><thead><tr><th>check<th>observed<th>allowed<th>n<th>verdict</tr></thead>"
    for runtime, checks in groups:
        yield f"<tbody><tr><th colspan=5 scope=rowgroup>{_text(runtime)}</th></tr>"
        for check in checks:
            name, *numbers = map(_text, wording.cells(check))
            cells = "".join(f"<td class=n>{number}" for number in numbers)
            yield f"<tr><td>{name}{cells}<td>{_verdict(check.verdict)}</tr>"
        yield "</tbody>"
    yield "</table>"


def _figures(plots: Mapping[str, bytes]) -> Iterator[str]:
    for name, png in plots.items():
        caption = _text(_CAPTIONS.get(name, name))
        data = base64.b64encode(png).decode()
        yield (
            f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )


def _provenance(decision: Decision, evidence: Evidence) -> Iterator[tuple[str, str]]:
    subject, source, environment = evidence.subject, evidence.source, evidence.environment
    yield "file", f"{decision.subject_sha256}, {subject.size_bytes} bytes"
    yield "ONNX", f"opset {subject.opset}, by {subject.producer}"
    yield "inputs", "; ".join(f"{spec.name} {spec.dtype} {spec.shape}" for spec in subject.inputs)
    yield "outputs", "; ".join(f"{spec.name} {spec.dtype} {spec.shape}" for spec in subject.outputs)
    yield "reference", source.factory
    yield "checkpoint", str(source.checkpoint_sha256 or "none: built by code alone")
    if source.code is not None:
        names = ", ".join(source.code.files) or "packages only"
        yield "model's code", f"{source.code.digest()}, of {names}"
    yield "samples", f"{evidence.dataset.samples}, {evidence.dataset.sha256}"
    if evidence.export is not None:
        settings = ", ".join(f"{key}={value}" for key, value in evidence.export.settings.items())
        yield "export", f"{evidence.export.strategy}: {settings}"
    yield "versions", ", ".join(f"{key} {value}" for key, value in environment.versions.items())
    yield "processor", environment.cpu
    yield (
        "CUDA",
        ", ".join(
            str(part) for part in (environment.gpu, environment.driver, environment.cuda) if part
        )
        or "none",
    )
    yield "switches", environment.determinism.to_json()
    yield "policy", str(decision.policy_sha256)
    yield "evidence", f"{decision.evidence_sha256}, measured {evidence.measured_at}"
    yield "decided", decision.decided_at


def _facts(facts: Iterator[tuple[str, str]]) -> Iterator[str]:
    yield "<table class=facts>"
    for name, value in facts:
        yield f"<tr><th scope=row>{_text(name)}</th><td>{_text(value)}</td></tr>"
    yield "</table>"


def _subject(evidence: Evidence) -> str:
    return f"<code>{evidence.subject.sha256.short}</code>"


def _verdict(verdict: Verdict) -> str:
    return f'<span class="{verdict}">{verdict}</span>'


def _text(text: str) -> str:
    return html.escape(wording.printable(text), quote=True)


def _join(parts: list[str]) -> str:
    return "\n".join(parts)
