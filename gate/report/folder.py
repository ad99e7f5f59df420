"""The report as a folder: the two records, the page, the Markdown and the figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gate import atomic
from gate.decision import Decision
from gate.evidence import Evidence
from gate.report import html, markdown, plots


def write(
    folder: Path,
    decision: Decision,
    evidence: Evidence,
    *,
    links: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Write `evidence.json`, `decision.json`, `report.md`, `report.html` and `plots/<name>.png`,
    each atomically; returns their paths. Raises StorageError."""
    drawn = plots.draw(evidence, decision)
    texts = {
        "evidence.json": evidence.to_json(indent=2) + "\n",
        "decision.json": decision.to_json(indent=2) + "\n",
        "report.md": markdown.describe(decision, evidence, links or {}),
        "report.html": html.page(decision, evidence, drawn),
    }
    contents = {name: text.encode() for name, text in texts.items()}
    contents |= {f"plots/{name}.png": png for name, png in drawn.items()}
    for name, content in contents.items():
        atomic.write_bytes(folder / name, content)
    for name in plots.NAMES:
        if name not in drawn:
            # Of an earlier report in this folder: nobody should take it for this one's.
            (folder / "plots" / f"{name}.png").unlink(missing_ok=True)
    return tuple(folder / name for name in contents)
