"""The layers of a localisation: as a table, as sentences, and as a chart along the depth."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.records.localisation import Explanation, LayerRow, Localisation
from gate.report.figure import BLUE, GREY, ORANGE, RED, legend, literal, png, ratio_height
from gate.report.table import add_row, table
from gate.story.wording import number, printable

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = ("layer", "type", "max diff", "mean diff", "noise ratio", "alone", "growth", "verdict")
_STYLES = {"source": "bold red", "propagated": "yellow", "unmapped": "dim", "ok": ""}
_COLORS = {"source": RED, "propagated": ORANGE, "ok": BLUE}
_NAMED = 40
"""More layers than this can't all be named below a chart."""


def sentences(explanation: Explanation) -> Iterator[str]:
    """What to tell of an explanation: nothing where none was needed."""
    if explanation.failure is not None:
        yield f"The first diverging layer is not known: {printable(explanation.failure)}"
    found = explanation.localisation
    if found is None:
        return
    if found.first_divergence is not None:
        place = printable(found.first_divergence) or "the model itself"
        yield f"First diverging layer: {place} ({found.runtime})."
    yield printable(found.cause)
    if found.remedy:
        yield f"Try: {printable(found.remedy)}"


def print_layers(found: Localisation, console: Console) -> None:
    """The table of layers, then what it means."""
    from rich.text import Text

    shown = table(_HEADINGS, right=_HEADINGS[2:-1])
    for row in found.layers:
        add_row(shown, _cells(row), style=_STYLES[row.verdict])
    console.print(shown)
    for sentence in sentences(Explanation(localisation=found)):
        console.print(Text(sentence))


def as_html(explanation: Explanation) -> Iterator[str]:
    """A section of the page; nothing where no explanation was needed."""
    lines = [html.escape(sentence) for sentence in sentences(explanation)]
    if not lines:
        return
    yield f"<h2>Where it diverges</h2><p>{'<br>'.join(lines)}</p>"
    found = explanation.localisation
    if found is None or not found.layers:
        return
    yield f"<details><summary>All {len(found.layers)} layers</summary><table><thead><tr>"
    yield "<th>" + "<th>".join(_HEADINGS)
    yield "</tr></thead><tbody>"
    for row in found.layers:
        yield "<tr><td>" + "<td>".join(html.escape(cell) for cell in _cells(row)) + "</tr>"
    yield "</tbody></table></details>"


def chart(found: Localisation) -> bytes:
    """PNG: noise ratio of each mapped layer in execution order; sources are marked and named."""
    from matplotlib.figure import Figure

    rows = [row for row in found.layers if row.noise_ratio is not None]
    drawn = Figure(figsize=(11, 4.8), dpi=110, layout="constrained")
    axes = drawn.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yscale("log")
    heights = [ratio_height(row.noise_ratio) for row in rows]
    axes.plot(range(len(rows)), heights, color=GREY, linewidth=0.8, zorder=1)
    for verdict, color in _COLORS.items():
        places = [place for place, row in enumerate(rows) if row.verdict == verdict]
        marker = "X" if verdict == "source" else "o"
        axes.scatter(
            places, [heights[p] for p in places], s=70 if verdict == "source" else 22,
            color=color, marker=marker, label=verdict, zorder=3,
        )  # fmt: skip
    for place, row in enumerate(rows):
        if row.verdict == "source":
            axes.annotate(
                literal(printable(row.title)),
                (place, heights[place]),
                textcoords="offset points",
                xytext=(-8, 6),
                ha="right",
                color=RED,
            )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label="PyTorch's own rounding")
    if len(rows) <= _NAMED:
        axes.set_xticks(range(len(rows)), [literal(printable(r.title)) for r in rows], rotation=60,
                        ha="right", fontsize=7)  # fmt: skip
    else:
        axes.set_xlabel("layers in execution order")
    axes.set_ylabel("error / rounding error of PyTorch")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.set_title(f"Where the file leaves the model ({found.runtime}, n = {found.samples})")
    legend(drawn)
    return png(drawn)


def _cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (row.max_abs_diff, row.mean_abs_diff, row.noise_ratio, row.local_ratio,
               row.amplification)  # fmt: skip
    verdict = row.verdict if row.detail is None else f"{row.verdict}: {printable(row.detail)}"
    shown = ("" if value is None else number(value) for value in numbers)
    return (printable(row.title), printable(row.kind), *shown, verdict)
