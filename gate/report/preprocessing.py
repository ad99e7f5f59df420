"""A comparison of preprocessing: as a table, as sentences, and as pictures side by side."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gate.preprocess.consumer import Exhibit
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import to_pixels
from gate.records.preprocessing import ConsumerParity, PreprocessingParity, TensorSummary
from gate.report.table import add_row, table
from gate.story.wording import number, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_ROWS = 12
_ZOOM = 24
"""Pixels of a side that are shown enlarged, around the largest difference."""
_HEADINGS = ("consumer", "max", "mean", "> 1 step", "channels max", "flips", "confidence",
             "verdict")  # fmt: skip


def print_comparison(parity: PreprocessingParity, console: Console, *, bound: float) -> None:
    """The table of consumers in steps, then causes, then the values of both sides."""
    from rich.text import Text

    console.print(
        Text(
            f"{parity.images} pictures, against {parity.reference}; differences in 1/255 of the "
            f"value range before normalisation, {bound:g} allowed"
        )
    )
    shown = table(_HEADINGS, right=_HEADINGS[1:-1])
    for consumer in parity.consumers:
        good = consumer.within(bound)
        style = "" if good else "dim" if consumer.not_measured else "red"
        add_row(shown, _cells(consumer, good=good), style=style)
    console.print(shown)
    for sentence in sentences(parity):
        console.print(Text(sentence))
    for line in _sides(parity):
        console.print(Text(line))


def sentences(parity: PreprocessingParity) -> Iterator[str]:
    """One line for each consumer that has a cause, a wrong shape, a failure or is not here."""
    for consumer in parity.consumers:
        if consumer.causes:
            share = f"{100 * (consumer.explained or 0.0):.3g} %"
            reason = f"{'; '.join(consumer.causes)} (explains {share} of {consumer.worst})"
        elif consumer.mismatched:
            reason = f"{len(consumer.mismatched)} of another shape: {consumer.mismatched[0]}"
        elif consumer.max_diff is not None and consumer.max_diff > 1.0:
            reason = f"no known cause explains the difference on {consumer.worst}"
        else:
            continue
        yield printable(f"{consumer.consumer}: {reason}")


def side_by_side(exhibits: Mapping[str, Exhibit], spec: PreprocessSpec) -> bytes:
    """PNG: for each consumer its worst picture, as the reference and as the consumer made it, their
    difference enlarged, and both once more around the largest difference."""
    from matplotlib.figure import Figure

    shown = list(exhibits.items())[:_ROWS]
    drawn = Figure(figsize=(13, 2.9 * len(shown) + 0.3), dpi=90, layout="constrained")
    grid: NDArray[Any] = np.atleast_2d(drawn.subplots(len(shown), 5))
    for axes, (name, exhibit) in zip(grid, shown, strict=True):
        _row(axes, _literal(printable(name)), exhibit, spec)
    return _png(drawn)


def _literal(text: str) -> str:
    """`text`, cut to what fits, without the dollar signs that would make it a formula."""
    fits = text if len(text) <= 72 else f"{text[:40]}…{text[-31:]}"
    return fits.replace("$", r"\$")


def _png(drawn: Figure) -> bytes:
    """The same figure gives the same bytes. Not SVG, as charts are: these are pictures."""
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


def _row(axes: NDArray[Any], name: str, exhibit: Exhibit, spec: PreprocessSpec) -> None:
    reference, got = to_pixels(exhibit.reference, spec), to_pixels(exhibit.tensor, spec)
    off = np.nan_to_num(np.abs(got - reference), nan=255.0, posinf=255.0)
    enlarged = 255.0 / max(float(np.quantile(off, 0.999)), 1.0)
    row, column = np.unravel_index(int(off.max(axis=2).argmax()), off.shape[:2])
    window = _window(int(row), off.shape[0]), _window(int(column), off.shape[1])
    titles = ("reference", name, f"difference x {enlarged:.3g}", "reference, zoomed",
              f"{name}, zoomed")  # fmt: skip
    pictures = (reference, got, off * enlarged, reference[window], got[window])
    for place, title, picture in zip(axes, titles, pictures, strict=True):
        clipped = np.clip(np.nan_to_num(picture), 0.0, 255.0)
        place.imshow(np.rint(clipped).astype(np.uint8), interpolation="nearest")
        place.set_title(title, fontsize=9)
        place.set_xticks([])
        place.set_yticks([])
    axes[0].set_ylabel(_literal(printable(exhibit.picture.rpartition("/")[2])), fontsize=8)
    axes[2].set_xlabel(f"largest {number(float(off.max()))} of 255", fontsize=8)


def _window(place: int, size: int) -> slice:
    start = min(max(place - _ZOOM // 2, 0), max(size - _ZOOM, 0))
    return slice(start, start + _ZOOM)


def _cells(consumer: ConsumerParity, *, good: bool) -> tuple[str, ...]:
    if consumer.max_diff is None:
        why = consumer.not_measured or consumer.failure or "another shape or dtype"
        state = "not measured" if consumer.not_measured else "differs"
        return (consumer.consumer, "", "", "", "", "", "", f"{state}: {printable(why)}")
    decisions = consumer.decisions
    share = 100 * (consumer.over_one_step or 0.0)
    return (
        consumer.consumer,
        number(consumer.max_diff),
        number(consumer.mean_diff or 0.0),
        f"{share:.3g} %",
        " ".join(number(channel.max) for channel in consumer.channels),
        f"{decisions.flips}/{decisions.images}" if decisions else "",
        number(decisions.confidence_diff_max) if decisions else "",
        "same" if good else f"differs: {printable(consumer.failure or _short(consumer))}",
    )


def _short(consumer: ConsumerParity) -> str:
    if consumer.nonfinite:
        return f"{consumer.nonfinite} values are not finite"
    return "; ".join(cause.split(" (")[0] for cause in consumer.causes) or "cause not known"


def _sides(parity: PreprocessingParity) -> Iterator[str]:
    """Shape, smallest, largest, mean and first values of each side."""
    yield f"{parity.reference}: {_described(parity.reference_values)}"
    for consumer in parity.consumers:
        if consumer.values is not None:
            shape = list(consumer.shape)
            yield f"{consumer.consumer}: shape {shape}, {_described(consumer.values)}"


def _described(values: TensorSummary) -> str:
    first = " ".join(f"{value:.4g}" for value in values.first)
    return f"min {values.min:.4g}, max {values.max:.4g}, mean {values.mean:.4g}; first {first}"
