"""The report as a folder: the records, the page, the Markdown and the charts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.records.names import DECISION, EVIDENCE, LOCALISATION, MARKDOWN, PAGE, PICTURES, PLOTS
from gate.report import markdown
from gate.report.charts import gallery
from gate.report.charts.drawing import Chart
from gate.report.page import page
from gate.report.report import Report
from gate.report.rows import LARGEST_PICTURE
from gate.storage import atomic
from gate.story.story import Story

_PICTURE = re.compile(r"0*(\d{1,12})\.png")
_MOST_PICTURES = 64


def write(
    folder: Path,
    decision: Decision,
    evidence: Evidence,
    *,
    story: Story,
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
        MARKDOWN: markdown.describe(story, links or {}),
        PAGE: page(report),
    }
    if explanation.localisation is not None:
        texts[LOCALISATION] = explanation.localisation.to_json(indent=2) + "\n"
    for name, text in texts.items():
        atomic.write_text(folder / name, text)
    if explanation.localisation is None:
        (folder / LOCALISATION).unlink(missing_ok=True)
    return (*(folder / name for name in texts), *write_charts(folder / PLOTS, report.charts))


def write_charts(folder: Path, charts: tuple[Chart, ...]) -> tuple[Path, ...]:
    """Write `<name>.svg` of each chart; those of an earlier report in this folder go, so that
    nobody takes them for this one's. Raises StorageError."""
    names = {chart.name for chart in charts}
    for chart in charts:
        atomic.write_bytes(folder / f"{chart.name}.svg", chart.file())
    for stale in set(gallery.NAMES) - names:
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
