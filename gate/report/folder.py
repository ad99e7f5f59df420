"""Write and read a report folder."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from gate.decision.decide import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, GateError
from gate.policy.policy import Policy
from gate.records import layout
from gate.records.champion_comparison import TrendRow
from gate.records.evidence import Evidence
from gate.records.localization import Explanation, Localization
from gate.report import markdown
from gate.report.chart import Chart
from gate.report.html_page import MAX_PICTURE_BYTES, Report, render_page
from gate.signing.keys import labels
from gate.signing.trust import Trust
from gate.signing.verification import StatementPair
from gate.storage import files
from gate.storage.safe_text import make_printable
from gate.storage.untrusted_files import RECORD_LIMIT
from gate.summary.champion_changes import change_between
from gate.summary.summarize import SummaryInputs, summarize
from gate.summary.summary import Change, Summary

_PICTURE = re.compile(r"0*(\d{1,12})\.png")

_CHART = re.compile(
    "bound_usage|localisation|differences|confidence|metric-.*|agreement|latency|memory"
)
"""Names of charts, including those of earlier versions."""

_MAX_PICTURES = 64


def write_report(
    folder: Path,
    decision: Decision,
    evidence: Evidence,
    *,
    summary: Summary,
    explanation: Explanation | None = None,
) -> None:
    """Write `evidence.json`, `decision.json`, `report.md`, `report.html`, `plots/<name>.svg`, and
    for a diverging file `localisation.json`, each atomically.

    `summary`: the content of the page. Includes thumbnails in the folder. Raises StorageError.
    """
    explanation = explanation or Explanation()
    report = Report(summary, evidence, decision, explanation=explanation, pictures=pictures(folder))
    texts = {
        layout.EVIDENCE: evidence.to_json(indent=2) + "\n",
        layout.DECISION: decision.to_json(indent=2) + "\n",
        layout.MARKDOWN: markdown.summary_markdown(summary, {}),
        layout.PAGE: render_page(report),
    }
    if explanation.localisation is not None:
        texts[layout.LOCALISATION] = explanation.localisation.to_json(indent=2) + "\n"
    for name, text in texts.items():
        files.write_text(folder / name, text)
    if explanation.localisation is None:
        (folder / layout.LOCALISATION).unlink(missing_ok=True)
    write_charts(folder / layout.PLOTS, report.charts)


_SAMPLES_LIMIT = 1 << 30
"""Largest table of samples, in bytes."""


def refuse_links(folder: Path) -> None:
    """Raise EvidenceError if a part of the report in `folder` is a symbolic link: its target would
    be published as a part of the report."""
    for name in layout.REPORT_FILES:
        path = folder / name
        inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
        for each in (path, *inside):
            if each.is_symlink():
                raise EvidenceError(
                    f"{each} is a symbolic link, expected a part of the report itself. Copy what "
                    "it points to in its place, or write the report again: gate check --report."
                )


def rewrite_report(target: Path, judgment: SummaryInputs, *, source: Path) -> None:
    """Write the report of these records into the folder `target`.

    Copies statements, thumbnails and the table of samples from the report `source`, because no
    record holds them, and skips anything that is not a regular file. Raises StorageError.
    """
    shown = sorted((source / layout.PICTURES).glob("*.png"))[:_MAX_PICTURES]
    limits = {layout.EVIDENCE_STATEMENT: RECORD_LIMIT, layout.DECISION_STATEMENT: RECORD_LIMIT}
    limits |= {layout.SAMPLES: _SAMPLES_LIMIT, layout.METRICS: _SAMPLES_LIMIT}
    limits |= {
        f"{layout.PICTURES}/{path.name}": MAX_PICTURE_BYTES
        for path in shown
        if _PICTURE.fullmatch(path.name)
    }
    for name, limit in limits.items():
        with suppress(OSError), files.open_inside(source, name) as stream:
            data = stream.read(limit + 1)
            if len(data) <= limit:
                files.write_bytes(target / name, data)
    evidence, explanation = judgment.evidence, judgment.explanation
    change = load_change(source, evidence)
    if change is not None:
        change.save(target / layout.CHANGE)
    if explanation != Explanation():
        explanation.save(target / layout.EXPLANATION)
    write_report(
        target, judgment.decision, evidence, summary=judgment.summary, explanation=explanation
    )


def write_charts(folder: Path, charts: tuple[Chart, ...]) -> None:
    """Write `<name>.svg` for each chart. Raises StorageError.

    Deletes the charts of an earlier report in this folder.
    """
    names = {chart.name for chart in charts}
    for chart in charts:
        files.write_bytes(folder / f"{chart.name}.svg", chart.file())
    for path in folder.glob("*.svg"):
        if _CHART.fullmatch(path.stem) and path.stem not in names:
            path.unlink(missing_ok=True)


def pictures(folder: Path) -> dict[int, bytes]:
    """Return the thumbnails of a report, by the index of their sample.

    Skips unreadable and too large files: a page without a picture is still useful.
    """
    thumbnails: dict[int, bytes] = {}
    for path in sorted((folder / layout.PICTURES).glob("*.png"))[:_MAX_PICTURES]:
        name = _PICTURE.fullmatch(path.name)
        try:
            if name is not None and path.stat().st_size <= MAX_PICTURE_BYTES:
                thumbnails[int(name[1])] = path.read_bytes()
        except OSError:
            continue
    return thumbnails


def read_report(
    path: Path,
    *,
    policy: Policy | None = None,
    now: str = "",
    trust: Trust | None = None,
    before: Report | None = None,
) -> Report:
    """Read an evidence file, or the folder that contains one, with the records next to it.

    `policy`: judge again by it at `now` (UTC, ISO 8601). `trust`: the trusted keys; None: no
    signature is trusted. `before`: an earlier report to compare with. Otherwise the changes are
    those from the champion, if it was compared. Raises EvidenceError if a record is missing or
    incomplete, DigestMismatch if the decision belongs to other evidence.
    """
    file = path / layout.EVIDENCE if path.is_dir() else path
    folder, evidence = file.parent, Evidence.load(file)
    decision_path = folder / layout.DECISION
    if policy is not None:
        compared = None
        with suppress(GateError):  # a replacement policy judges the same comparison
            compared = _decision(decision_path, evidence).incumbent
        decision = decide(policy, evidence, incumbent=compared, decided_at=now)
    else:
        decision = _decision(decision_path, evidence)
    explanation = load_explanation(folder, evidence)
    if before is None:
        change = load_change(folder, evidence)
    else:
        change = change_between((before.decision, before.evidence), decision, evidence)
    confidence = 0.95 if policy is None else policy.confidence
    summary = summarize(
        decision, evidence, explanation=explanation, change=change, confidence=confidence
    )
    with suppress(GateError):
        names = layout.CheckArguments.load(folder / layout.ARGUMENTS).names | {"DIR": str(folder)}
        summary = summary.with_files({word: make_printable(name) for word, name in names.items()})
    if trust is not None:
        summary = summary.about(signed_by=_signed_by(folder, evidence, decision, trust))
    return Report(summary, evidence, decision, explanation, pictures(folder))


def load_change(folder: Path, evidence: Evidence) -> Change | None:
    """Return the changes from the champion, read from the folder of the evidence.

    None if the file is missing, unreadable or from another measurement: it is only displayed.
    """
    try:
        change = Change.load(folder / layout.CHANGE)
    except GateError:
        return None
    measured = [(row.sha256, row.measured_at) for row in change.trend[-1:]]
    this = TrendRow.from_evidence(evidence)
    return change if measured == [(this.sha256, this.measured_at)] else None


def load_explanation(folder: Path, evidence: Evidence) -> Explanation:
    """Return the localization of this file next to the evidence; empty if missing or unreadable.

    `localisation.json` holds the localization of `gate locate`, or the explanation of a pipeline.
    """
    for name, kind in (
        (layout.EXPLANATION, Explanation),
        (layout.LOCALISATION, Localization),
        (layout.LOCALISATION, Explanation),
    ):
        with suppress(GateError):
            record = kind.load(folder / name)
            explanation = (
                Explanation(localisation=record) if isinstance(record, Localization) else record
            )
            layers = explanation.localisation
            if layers is None or layers.subject_sha256 == evidence.subject.sha256:
                return explanation
    return Explanation()


def _signed_by(folder: Path, evidence: Evidence, decision: Decision, trust: Trust) -> str | None:
    """Return the labels of the trusted keys that signed exactly these records, or None.

    The keys must be valid at the time that the verdict states.
    """
    with suppress(GateError):
        statements = StatementPair.from_folder(folder)
        keys = statements.verify(evidence, decision, trust=trust, now=statements.decided_at)
        return make_printable(labels(keys) or "") or None
    return None


def _decision(path: Path, evidence: Evidence) -> Decision:
    if not path.is_file():
        raise EvidenceError(
            f"{path} does not exist, so there is no verdict on this evidence. Judge "
            "again by a policy (--policy)."
        )
    decision = Decision.load(path)
    if decision.evidence_sha256 != evidence.digest():
        raise DigestMismatch(
            f"{path} decides on the evidence {decision.evidence_sha256}, this one is "
            f"{evidence.digest()}. Judge again by a policy (--policy)."
        )
    return decision
