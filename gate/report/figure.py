"""What all figures have in common: size, colours, names of rows, and PNG bytes.

Drawn without matplotlib's global state. Colours are those of Okabe and Ito, which colour-blind
readers can tell apart.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"

FLOOR = 1e-12
"""Smallest difference on a logarithmic axis; zero is drawn here."""
MOST_ROWS = 60
"""A figure with more rows can't be read; the rest is in the records."""
_LEAST_RATIO, _MOST_RATIO = 1e-3, 1e12


def ratio_height(value: float | None) -> float:
    """Where a logarithmic axis shows an error in units of rounding: what is not there and zero at
    its lower, NaN and infinity at its upper end."""
    if value is None:
        return _LEAST_RATIO
    return _MOST_RATIO if math.isnan(value) else min(max(value, _LEAST_RATIO), _MOST_RATIO)


def finite(value: float | str | None) -> float:
    """`value` as far as an axis can show it, or 0.0 where it is no finite number."""
    return min(value, 1e200) if isinstance(value, float) and math.isfinite(value) else 0.0


def figure(*, rows: int, pitch: float = 0.26) -> tuple[Figure, Axes]:
    """A figure for so many rows, `pitch` inches each, and its axes."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 1.6 + pitch * rows), dpi=110, layout="constrained")
    axes: Axes = drawn.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def name_rows(axes: Axes, labels: list[str]) -> None:
    """Name the rows from the top downwards."""
    axes.set_yticks(range(len(labels)), [literal(label) for label in labels])
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def legend(drawn: Figure) -> None:
    """A legend under the axes."""
    drawn.legend(loc="outside lower center", ncols=4, frameon=False)


def literal(text: str) -> str:
    """`text`, cut to what fits, without the dollar signs that would make it a formula."""
    fits = text if len(text) <= 72 else f"{text[:40]}…{text[-31:]}"
    return fits.replace("$", r"\$")


def png(drawn: Figure) -> bytes:
    """The same figure gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    stream = io.BytesIO()
    FigureCanvasAgg(drawn)
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; the tables have it in full.
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font", category=UserWarning
        )
        drawn.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
