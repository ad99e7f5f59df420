"""Reports of committed measurements: passed, rejected, ERROR, and with malicious names."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from PIL import Image

from gate import Evidence, Policy, decide
from gate.records.localization import Explanation
from gate.records.runtime import RUNTIMES
from gate.report.html_page import Report
from gate.summary.summarize import summarize
from gate.summary.summary import Change, ChangeRow, Step
from tests.builders import digest
from tests.frozen.test_decisions import DECIDED_AT, Records

LAYER = "source: head"
"""In the title of the chart of the rejected file's layers."""
HOSTILE = 'x"><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{$ `{{ 7*7 }}` &amp;</style>\x1b[31m'


def passed() -> Report:
    """Return a report within every bound; CUDA is waived."""
    return _report(Records.read("story-no-CUDA"), Policy.default())


def unjudged() -> Report:
    """Return a report of the same measurement whose policy requires CUDA."""
    return _report(Records.read("story-no-CUDA"))


def rejected() -> Report:
    """Return a report of a file with another weight in one layer."""
    return _report(Records.read("story-another-weight"))


def waiting() -> Report:
    """Return a passed report that waits for a reviewer."""
    case = passed()
    step = Step(label="Approve", address="#/models/digits/versions/12")
    return replace(case, summary=case.summary.model_copy(update={"steps": (step,)}))


def rejected_on_all_runtimes() -> Report:
    """Return a rejected report with all five runtimes and the longest headline."""
    records = Records.read("story-another-weight")
    runtimes = tuple(
        records.evidence.runtimes[1].model_copy(update={"runtime": name}) for name in RUNTIMES
    )
    evidence = records.evidence.model_copy(update={"runtimes": runtimes})
    case = _report(records._replace(evidence=evidence))
    sentence = (
        "backbone.encoder.layers.11.attention.output.dense.weight has other values in 4 096 of "
        "589 824 elements than the checkpoint: 1.2e+04 × rounding, allowed 1.5"
    )
    headline = case.summary.headline.model_copy(update={"sentence": sentence})
    return replace(case, summary=case.summary.model_copy(update={"headline": headline}))


def hostile() -> Report:
    """Return a rejected report in which every external text is malicious."""
    records, pixels = Records.read("story-another-weight"), Records.read("story-other-pixels")
    evidence = records.evidence
    texts = ("logits", evidence.source.factory, evidence.subject.producer, evidence.environment.cpu,
             *(runtime.absent_reason for runtime in evidence.runtimes if runtime.absent_reason),
             "no antialias", "head", "head.weight")  # fmt: skip
    preprocessing = pixels.evidence.preprocessing
    plain = evidence.model_copy(update={"preprocessing": preprocessing}).to_json()
    located = records.explanation.to_json()
    for text in texts:
        plain = plain.replace(_quoted(text), _quoted(HOSTILE))
        located = located.replace(_quoted(text), _quoted(HOSTILE))
    case = _report(
        records._replace(
            evidence=Evidence.from_json(plain), explanation=Explanation.from_json(located)
        )
    )
    row = ChangeRow(name=HOSTILE, before=HOSTILE, now=HOSTILE, changed=True)
    step = Step(label=HOSTILE, command=HOSTILE, address=f"javascript:alert('{HOSTILE}')")
    update = {
        "change": Change(version=HOSTILE, rows=(row,)),
        "notes": (HOSTILE,),
        "steps": (step, *case.summary.steps),
    }
    summary = case.summary.about(name=HOSTILE, signed_by=HOSTILE).model_copy(update=update)
    return replace(case, summary=summary)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def pictures() -> dict[int, bytes]:
    """Return thumbnails of all samples."""
    stream = io.BytesIO()
    Image.linear_gradient("L").resize((64, 64)).save(stream, "PNG")
    return dict.fromkeys(range(48), stream.getvalue())


def _report(records: Records, policy: Policy | None = None) -> Report:
    rows = (
        ChangeRow(name="accuracy", before="0.9712", now="0.9711", changed=True, sense="worse"),
        ChangeRow(name="latency", before="21.2 ms", now="20.0 ms", changed=True, sense="better"),
        ChangeRow(name="versions", before="torch 2.14.0", now="torch 2.15.0", changed=True),
        ChangeRow(name="opset", before="13", now="13", changed=False),
    )
    decision = decide(policy or records.policy, records.evidence, decided_at=DECIDED_AT)
    summary = summarize(
        decision, records.evidence, explanation=records.explanation,
        change=Change(version="11", sha256=digest("before"), rows=rows),
    ).about(name="digits", signed_by="release-2026 (ed25519 4f1c…)")  # fmt: skip
    return Report(summary, records.evidence, decision, records.explanation, pictures())
