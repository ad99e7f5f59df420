"""Write and read a report folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gate.decision.decide import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, GateError
from gate.policy.policy import Policy
from gate.records.champion_comparison import ChampionComparison, TrendRow
from gate.records.evidence import Evidence
from gate.records.layout import (
    CHANGE,
    DECISION,
    DECISION_STATEMENT,
    EVIDENCE,
    EVIDENCE_STATEMENT,
    EXPLANATION,
    LOCALISATION,
    MARKDOWN,
    OF_REPORTS,
    PAGE,
    PICTURES,
    PLOTS,
    SAMPLES,
)
from gate.records.localization import Explanation, Localization
from gate.report import html_page, markdown
from gate.report.chart import Chart
from gate.report.html_page import LARGEST_PICTURE, Report, render_page
from gate.signing.keys import labels
from gate.signing.trust import Trust
from gate.signing.verification import StatementPair
from gate.storage import files
from gate.storage.safe_text import make_printable
from gate.storage.untrusted_files import RECORD_LIMIT
from gate.summary.summarize import summarize
from gate.summary.summary import Change, Summary

_PICTURE = re.compile(r"0*(\d{1,12})\.png")

_MOST_PICTURES = 64


def write_report(
    folder: Path,
    decision: Decision,
    evidence: Evidence,
    *,
    story: Summary,
    links: Mapping[str, str] | None = None,
    explanation: Explanation | None = None,
) -> tuple[Path, ...]:
    """Write `evidence.json`, `decision.json`, `report.md`, `report.html` and `plots/<name>.svg`,
    and where the file diverges also `localisation.json`, each atomically; returns their paths.
    `story`: what the page tells. Thumbnails that are in the
    folder go into the page. Raises StorageError."""
    explanation = explanation or Explanation()
    report = Report(story, evidence, decision, explanation=explanation, pictures=pictures(folder))
    texts = {
        EVIDENCE: evidence.to_json(indent=2) + "\n",
        DECISION: decision.to_json(indent=2) + "\n",
        MARKDOWN: markdown.summary_markdown(story, links or {}),
        PAGE: render_page(report),
    }
    if explanation.localisation is not None:
        texts[LOCALISATION] = explanation.localisation.to_json(indent=2) + "\n"
    for name, text in texts.items():
        files.write_text(folder / name, text)
    if explanation.localisation is None:
        (folder / LOCALISATION).unlink(missing_ok=True)
    return (*(folder / name for name in texts), *write_charts(folder / PLOTS, report.charts))


_SAMPLES_LIMIT = 1 << 30
"""Bytes of the table of samples at most."""


def refuse_links(folder: Path) -> None:
    """Raise EvidenceError if a part of the report in `folder` is a symbolic link: what it points
    to would be published as a part of the report."""
    for name in OF_REPORTS:
        path = folder / name
        inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
        for each in (path, *inside):
            if each.is_symlink():
                raise EvidenceError(
                    f"{each} is a symbolic link, expected a part of the report itself. Copy what "
                    "it points to in its place, or write the report anew: gate check --report."
                )


def write_again(
    target: Path,
    decision: Decision,
    evidence: Evidence,
    *,
    story: Summary,
    explanation: Explanation,
    report: Path,
) -> None:
    """Write the report of these records into the folder `target`. Only what no record holds is
    copied from the folder `report`: statements, thumbnails, and the table of samples. What is no
    plain file there is left out. Raises StorageError."""
    shown = [path.name for path in sorted((report / PICTURES).glob("*.png"))[:_MOST_PICTURES]]
    limits = {EVIDENCE_STATEMENT: RECORD_LIMIT, DECISION_STATEMENT: RECORD_LIMIT}
    limits |= {SAMPLES: _SAMPLES_LIMIT}
    limits |= {f"{PICTURES}/{name}": LARGEST_PICTURE for name in shown if _PICTURE.fullmatch(name)}
    for name, limit in limits.items():
        with suppress(OSError), files.open_inside(report, name) as stream:
            data = stream.read(limit + 1)
            if len(data) <= limit:
                files.write_bytes(target / name, data)
    change = change_beside(report, evidence)
    if change is not None:
        change.save(target / CHANGE)
    if explanation != Explanation():
        explanation.save(target / EXPLANATION)
    write_report(target, decision, evidence, story=story, explanation=explanation)


def write_charts(folder: Path, charts: tuple[Chart, ...]) -> tuple[Path, ...]:
    """Write `<name>.svg` of each chart; those of an earlier report in this folder go, so that
    nobody takes them for this one's. Raises StorageError."""
    names = {chart.name for chart in charts}
    for chart in charts:
        files.write_bytes(folder / f"{chart.name}.svg", chart.file())
    for stale in set(html_page.NAMES) - names:
        (folder / f"{stale}.svg").unlink(missing_ok=True)
    return tuple(folder / f"{chart.name}.svg" for chart in charts)


def pictures(folder: Path) -> dict[int, bytes]:
    """The thumbnails beside a report, by the index of their sample; those that can't be read or
    are too large are not among them: a page without a picture is a page."""
    found: dict[int, bytes] = {}
    for path in sorted((folder / PICTURES).glob("*.png"))[:_MOST_PICTURES]:
        name = _PICTURE.fullmatch(path.name)
        try:
            if name is not None and path.stat().st_size <= LARGEST_PICTURE:
                found[int(name[1])] = path.read_bytes()
        except OSError:
            continue
    return found


@dataclass(frozen=True)
class RecordFiles:
    """Files that are to be read in the place of those beside the evidence, and another policy."""

    decision: Path | None = None
    explanation: Path | None = None
    policy: Policy | None = None
    """Judge anew by it, at `now`."""
    now: str = ""
    """UTC, ISO 8601."""
    trust: Trust | None = None
    """Whose signatures count; None: nobody's."""


@dataclass(frozen=True)
class JudgedRecords:
    """Evidence and decision, and what lies beside them."""

    folder: Path
    evidence: Evidence
    decision: Decision
    explanation: Explanation
    change: Change | None = None
    """Against the version that served when it was measured; None: it was not compared."""
    confidence: float = 0.95
    """Of what agreement proves."""
    signed_by: str | None = None
    """Name and short id of the key by which both are vouched for; None: no trusted one's."""

    @classmethod
    def read(cls, place: Path, given: RecordFiles | None = None) -> JudgedRecords:
        """Of an evidence file or of the folder that has one. Raises EvidenceError where a record is
        missing or not whole, DigestMismatch where the decision is of other evidence."""
        given = given or RecordFiles()
        file = place / EVIDENCE if place.is_dir() else place
        evidence = Evidence.load(file)
        path, policy = given.decision or file.parent / DECISION, given.policy
        if policy is not None:
            compared = _compared(path, evidence)
            decision = decide(policy, evidence, incumbent=compared, decided_at=given.now)
        else:
            decision = _decision(path, evidence)
        return cls(
            file.parent,
            evidence,
            decision,
            _explanation(file.parent, given.explanation, evidence),
            change_beside(file.parent, evidence),
            cls.confidence if policy is None else policy.confidence,
            None
            if given.trust is None
            else _signed_by(file.parent, evidence, decision, given.trust),
        )

    def report(self, change: Change | None = None) -> Report:
        """What the page is made of. `change`: against other records."""
        story = summarize(
            self.decision,
            self.evidence,
            explanation=self.explanation,
            change=change or self.change,
            confidence=self.confidence,
        ).signed(self.signed_by and make_printable(self.signed_by))
        return Report(
            story,
            self.evidence,
            self.decision,
            explanation=self.explanation,
            pictures=pictures(self.folder),
        )


def change_beside(folder: Path, evidence: Evidence) -> Change | None:
    """Against the champion, as it lies beside the evidence; None where there is none, and where it
    can't be read or tells of another measurement: it is there to be looked at."""
    try:
        change = Change.load(folder / CHANGE)
    except GateError:
        return None
    measured = [(row.sha256, row.measured_at) for row in change.trend[-1:]]
    this = TrendRow.of(evidence)
    return change if measured == [(this.sha256, this.measured_at)] else None


def explanation_beside(folder: Path, evidence: Evidence) -> Explanation:
    """What localisation found of this very file, as it lies beside the evidence; nothing where
    there is none, or where it can't be read."""
    for name in (EXPLANATION, LOCALISATION):
        with suppress(GateError):
            found = _read(folder / name)
            if _is_of(found, evidence):
                return found
    return Explanation()


def _signed_by(folder: Path, evidence: Evidence, decision: Decision, trust: Trust) -> str | None:
    """Who signed exactly these, when they were made; None where nobody did who counts."""
    with suppress(GateError):
        statements = StatementPair.beside(folder)
        return labels(statements.verify(evidence, decision, trust=trust, now=statements.made_at))
    return None


def _compared(path: Path, evidence: Evidence) -> ChampionComparison | None:
    """What the decision before says of the champion, which another policy judges, too."""
    with suppress(GateError):
        return _decision(path, evidence).incumbent
    return None


def _decision(path: Path, evidence: Evidence) -> Decision:
    if not path.is_file():
        raise EvidenceError(
            f"{path} is not there, so nobody knows the verdict on this evidence. Give the decision "
            "(--decision), or judge anew by a policy (--policy)."
        )
    decision = Decision.load(path)
    if decision.evidence_sha256 != evidence.digest():
        raise DigestMismatch(
            f"{path} decides on the evidence {decision.evidence_sha256}, this one is "
            f"{evidence.digest()}. Give the decision that belongs to it (--decision), or judge "
            "anew by a policy (--policy)."
        )
    return decision


def _explanation(folder: Path, given: Path | None, evidence: Evidence) -> Explanation:
    """What localisation found of this very file: as given, else beside the evidence, where one of
    another file, or one that can't be read, says nothing."""
    if given is not None:
        found = _read(given)
        if not _is_of(found, evidence):
            raise DigestMismatch(
                f"{given} explains another file than {evidence.subject.sha256}. Give that of this "
                "one, or leave --explanation away."
            )
        return found
    return explanation_beside(folder, evidence)


def _read(path: Path) -> Explanation:
    """`gate locate` writes the layers alone, the pipeline the explanation around them."""
    if path.name == EXPLANATION:
        return Explanation.load(path)
    try:
        return Explanation(localisation=Localization.load(path))
    except EvidenceError:
        return Explanation.load(path)


def _is_of(found: Explanation, evidence: Evidence) -> bool:
    layers = found.localisation
    return layers is None or layers.subject_sha256 == evidence.subject.sha256
