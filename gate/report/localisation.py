"""The layers of a localisation: as a table on a terminal, and as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.records.localisation import Explanation, LayerRow, Localisation
from gate.report.table import add_row, table
from gate.story.wording import number, printable

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = ("layer", "type", "max diff", "mean diff", "noise ratio", "alone", "growth", "verdict")
_STYLES = {"source": "bold red", "propagated": "yellow", "unmapped": "dim", "ok": ""}


def sentences(explanation: Explanation) -> Iterator[str]:
    """What to tell of an explanation: nothing where none was needed."""
    if explanation.failure is not None:
        yield f"The first diverging layer is not known: {printable(explanation.failure)}"
    found = explanation.localisation
    if found is None:
        return
    if found.first_divergence is not None:
        place = printable(found.first_divergence) or "the model itself"
        of = f" of the part {found.part}" if found.part else ""
        of += f" on the input '{found.probe}'" if found.probe else ""
        yield f"First diverging layer{of}: {place} ({found.runtime})."
    elif found.part:
        yield f"First diverging part: {found.part} ({found.runtime})."
    yield printable(found.cause)
    if found.seam and found.part:
        yield f"And the seam: {printable(found.seam)}"
    if found.remedy:
        yield f"Try: {printable(found.remedy)}"


def print_layers(found: Localisation, console: Console) -> None:
    """The table of layers, then what it means."""
    from rich.text import Text

    shown = table(_HEADINGS, right=_HEADINGS[2:-1])
    for row in found.layers:
        add_row(shown, _cells(row), style=_STYLES[row.verdict])
    if found.layers:
        console.print(shown)
    for sentence in sentences(Explanation(localisation=found)):
        console.print(Text(sentence))


def _cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (row.max_abs_diff, row.mean_abs_diff, row.noise_ratio, row.local_ratio,
               row.amplification)  # fmt: skip
    verdict = row.verdict if row.detail is None else f"{row.verdict}: {printable(row.detail)}"
    shown = ("" if value is None else number(value) for value in numbers)
    return (printable(row.title), printable(row.kind), *shown, verdict)
