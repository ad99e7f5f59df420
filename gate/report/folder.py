"""The report as a folder: the two records, the page, the Markdown and the figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.records.names import DECISION, EVIDENCE, LOCALISATION, MARKDOWN, PAGE, PLOTS
from gate.report import html, localisation, markdown, plots
from gate.storage import atomic
from gate.story.story import Story


def write(
    folder: Path,
    decision: Decision,
    evidence: Evidence,
    *,
    story: Story,
    links: Mapping[str, str] | None = None,
    explanation: Explanation | None = None,
) -> tuple[Path, ...]:
    """Write `evidence.json`, `decision.json`, `report.md`, `report.html` and `plots/<name>.png`,
    and where the file diverges also `localisation.json`, each atomically; returns their paths.
    Raises StorageError."""
    explanation = explanation or Explanation()
    drawn = plots.draw(evidence, decision)
    if explanation.localisation is not None:
        drawn["localisation"] = localisation.chart(explanation.localisation)
    texts = {
        EVIDENCE: evidence.to_json(indent=2) + "\n",
        DECISION: decision.to_json(indent=2) + "\n",
        MARKDOWN: markdown.describe(story, links or {}),
        PAGE: html.page(decision, evidence, drawn, explanation),
    }
    if explanation.localisation is not None:
        texts[LOCALISATION] = explanation.localisation.to_json(indent=2) + "\n"
    contents = {name: text.encode() for name, text in texts.items()}
    contents |= {f"{PLOTS}/{name}.png": png for name, png in drawn.items()}
    for name, content in contents.items():
        atomic.write_bytes(folder / name, content)
    if explanation.localisation is None:
        (folder / LOCALISATION).unlink(missing_ok=True)
    for name in (*plots.NAMES, "localisation"):
        if name not in drawn:
            # Of an earlier report in this folder: nobody should take it for this one's.
            (folder / PLOTS / f"{name}.png").unlink(missing_ok=True)
    return tuple(folder / name for name in contents)
