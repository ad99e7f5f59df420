"""Export comparison and preprocessing comparison."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.preprocess.comparison import WorstPicture
from gate.preprocess.spec import PreprocessSpec, to_pixels
from gate.records.export import ExportTrialRecord, TrialParity, Trials
from gate.records.preprocessing import ConsumerParity, PreprocessingParity, TensorSummary
from gate.report.chart import SERIES, SMALL, TEXT, Chart, chart, clamped, literal, logarithmic
from gate.report.terminal import add_row, print_sentences, print_table
from gate.storage.safe_text import make_printable
from gate.summary.render import beginning, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console


_ROWS = 12

_ZOOM = 24
"""Side in pixels of the enlarged part around the largest difference."""

_PREPROCESSING_HEADINGS = ("consumer", "max", "mean", "> 1 step", "channels max", "flips",
             "confidence", "verdict")  # fmt: skip


def print_comparison(parity: PreprocessingParity, console: Console, *, bound: float) -> None:
    """Yield the table of consumers in steps, then causes, then the values of both sides."""
    about = (
        f"{parity.images} pictures, against {parity.reference}; differences in 1/255 of the "
        f"value range before normalization, {bound:g} allowed"
    )
    print_sentences(console, [about])
    shown = print_table(_PREPROCESSING_HEADINGS, right=_PREPROCESSING_HEADINGS[1:-1])
    for consumer in parity.consumers:
        good = consumer.within(bound)
        style = "" if good else "dim" if consumer.not_measured else "red"
        add_row(shown, _cells(consumer, good=good), style=style)
    console.print(shown)
    print_sentences(console, [*preprocessing_sentences(parity), *_sides(parity)])


def preprocessing_sentences(parity: PreprocessingParity) -> Iterator[str]:
    """Yield one line for each consumer with a cause, a wrong shape or a failure, or that is
    missing."""
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
        yield make_printable(f"{consumer.consumer}: {reason}")


def side_by_side(worst_pictures: Mapping[str, WorstPicture], spec: PreprocessSpec) -> bytes:
    """Return a PNG: for each consumer its worst picture by the reference and by the consumer, their
    amplified difference, and details of both around the largest difference."""
    from matplotlib.figure import Figure

    shown = list(worst_pictures.items())[:_ROWS]
    drawn = Figure(figsize=(13, 2.9 * len(shown) + 0.3), dpi=90, layout="constrained")
    grid: NDArray[Any] = np.atleast_2d(drawn.subplots(len(shown), 5))
    for axes, (name, worst_picture) in zip(grid, shown, strict=True):
        _row(axes, _literal(make_printable(name)), worst_picture, spec)
    return _png(drawn)


def _literal(text: str) -> str:
    """Return `text` truncated to what fits, without dollar signs, which would start a formula."""
    fits = text if len(text) <= 72 else f"{text[:40]}…{text[-31:]}"
    return fits.replace("$", r"\$")


def _png(drawn: Figure) -> bytes:
    """Return a figure as PNG; the same figure gives the same bytes.

    PNG instead of SVG as for charts, because these are pictures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    stream = io.BytesIO()
    FigureCanvasAgg(drawn)
    with warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes; the tables show the full names.
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font", category=UserWarning
        )
        drawn.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _row(axes: NDArray[Any], name: str, worst: WorstPicture, spec: PreprocessSpec) -> None:
    reference, got = to_pixels(worst.reference, spec), to_pixels(worst.tensor, spec)
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
    axes[0].set_ylabel(_literal(make_printable(worst.picture.rpartition("/")[2])), fontsize=8)
    axes[2].set_xlabel(f"largest {format_number(float(off.max()))} of 255", fontsize=8)


def _window(place: int, size: int) -> slice:
    start = min(max(place - _ZOOM // 2, 0), max(size - _ZOOM, 0))
    return slice(start, start + _ZOOM)


def _cells(consumer: ConsumerParity, *, good: bool) -> tuple[str, ...]:
    if consumer.max_diff is None:
        why = consumer.not_measured or consumer.failure or "another shape or dtype"
        state = "not measured" if consumer.not_measured else "differs"
        return (consumer.consumer, "", "", "", "", "", "", f"{state}: {make_printable(why)}")
    decisions = consumer.decisions
    share = 100 * (consumer.over_one_step or 0.0)
    return (
        consumer.consumer,
        format_number(consumer.max_diff),
        format_number(consumer.mean_diff or 0.0),
        f"{share:.3g} %",
        " ".join(format_number(channel.max) for channel in consumer.channels),
        f"{decisions.flips}/{decisions.images}" if decisions else "",
        format_number(decisions.confidence_diff_max) if decisions else "",
        "same" if good else f"differs: {make_printable(consumer.failure or _short(consumer))}",
    )


def _short(consumer: ConsumerParity) -> str:
    if consumer.nonfinite:
        return f"{consumer.nonfinite} values are not finite"
    return "; ".join(beginning(cause, " (") for cause in consumer.causes) or "cause not known"


def _sides(parity: PreprocessingParity) -> Iterator[str]:
    """Yield shape, minimum, maximum, mean and first values of each side."""
    yield f"{parity.reference}: {_described(parity.reference_values)}"
    for consumer in parity.consumers:
        if consumer.values is not None:
            shape = list(consumer.shape)
            yield f"{consumer.consumer}: shape {shape}, {_described(consumer.values)}"


def _described(values: TensorSummary) -> str:
    first = " ".join(f"{value:.4g}" for value in values.first)
    return f"min {values.min:.4g}, max {values.max:.4g}, mean {values.mean:.4g}; first {first}"


_TRIALS_HEADINGS = ("strategy", "opset", "folding", "seconds", "nodes", "MB", "runtime",
             "max_abs_diff", "l2_logits", "l2_probabilities", "noise_ratio", "top-1", "ms",
             "verdict")  # fmt: skip

_SHORT = ("strategy", "opset", "fold", "s", "nodes", "MB", "runtime", "max diff", "L2", "L2 prob",
          "noise", "top-1", "ms", "verdict")  # fmt: skip
"""Headings for a narrow terminal."""

_LEFT = ("strategy", "folding", "runtime", "verdict")

_STYLES = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold red", "not exported": "yellow"}

_FROM = 0.1
"""Start of the axis, unless a value is smaller."""

_LEAST, _MOST = 1e-3, 1e12

_PITCH, _REST = 14, 70


def print_trials(found: Trials, console: Console) -> None:
    """Yield the table, then its meaning."""
    shown = print_table(_SHORT, right=set(_SHORT) - {"fold", *_LEFT})
    shown.columns[_SHORT.index("runtime")].no_wrap = True
    for verdict, cells in _rows(found):
        add_row(shown, cells, style=_STYLES[verdict])
    console.print(shown)
    print_sentences(console, trials_sentences(found))


def trials_sentences(found: Trials) -> Iterator[str]:
    """Yield which exports are wrong, which are best, and why some failed."""
    good = [trial for trial in found.trials if trial.verdict == "PASS"]
    bad = [trial for trial in found.trials if trial.verdict in ("FAIL", "ERROR")]
    yield (
        f"{len(good)} of {len(found.trials)} exports compute what the model computes, on "
        f"{found.samples} samples (noise_ratio at most {found.bound:g}, widened for few elements)."
    )
    for trial in bad:
        failed = "; ".join(
            f"{each.runtime} {each.failure or f'noise_ratio {format_number(each.noise_ratio)}'}"
            for each in trial.parities
            if each.verdict != "PASS"
        )
        yield make_printable(f"{trial.verdict}: {trial.title}: {failed}")
    for trial in found.trials:
        if trial.failure is not None:
            yield make_printable(f"not exported: {trial.title}: {trial.failure}")
    for warning in dict.fromkeys(text for trial in found.trials for text in trial.warnings):
        yield make_printable(f"warned: {warning}")


def markdown(found: Trials) -> str:
    """Return the trials as a Markdown text."""
    lines = [f"# Exports of {found.factory}", ""]
    lines += [f"| {' | '.join(_TRIALS_HEADINGS)} |"]
    lines += ["|" + "|".join("---" if h in _LEFT else "---:" for h in _TRIALS_HEADINGS) + "|"]
    lines += [f"| {' | '.join(cells)} |" for _, cells in _rows(found)]
    sentences = "\n".join(f"- {sentence}" for sentence in trials_sentences(found))
    lines += ["", sentences.replace("|", r"\|").replace("<", "&lt;")]
    return "\n".join(lines) + "\n"


def trials_chart(found: Trials) -> Chart | None:
    """Draw the noise ratio of every export in every runtime, with the bound. None without
    exports."""
    exported = [trial for trial in found.trials if trial.parities]
    if not exported:
        return None
    runtimes = [parity.runtime for parity in exported[0].parities]

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        height = 1.0 / (len(runtimes) + 1)
        measured = [parity for trial in exported for parity in trial.parities]
        heights = [clamped(parity.noise_ratio, _LEAST, _MOST) for parity in measured]
        # Starting at the smallest value would make small differences look large.
        logarithmic(axes, min([_FROM, *heights]), 2.0 * max([found.bound, *heights]))
        for place, (runtime, look) in enumerate(zip(runtimes, SERIES, strict=False)):
            rows = [row + height * (place + 0.5) for row in range(len(exported))]
            ratios = [{p.runtime: p.noise_ratio for p in trial.parities} for trial in exported]
            values = [clamped(each.get(runtime), _LEAST, _MOST) for each in ratios]
            axes.barh(rows, values, 0.8 * height, color=look[0], label=runtime)
        across = axes.get_yaxis_transform()
        for row, trial in enumerate(exported):
            axes.text(0.0, row - 0.5 * height, literal(trial.title), va="center",
                      transform=across, fontsize=SMALL)  # fmt: skip
        axes.axvline(found.bound, color=TEXT, linewidth=1.2, linestyle=":", label="bound")
        axes.set_ylim(len(exported), -height)
        axes.set_yticks([])
        axes.set_xlabel("error ÷ rounding of PyTorch")
        drawn.legend(loc="outside lower center", ncols=3)

    return chart(
        "trials",
        paint,
        title=f"Exports of {found.factory}, n = {found.samples}",
        alternative="; ".join(trials_sentences(found)),
        height=_REST + _PITCH * len(exported) * (len(runtimes) + 1),
    )


class CostPoint(NamedTuple):
    """A measured file with its error and costs."""

    title: str
    ratio: float
    """The largest ratio of a deviation to its bound."""
    latency_ms: float
    size_bytes: int
    passed: bool


_WORST_SHOWN = 1e6


def cost_chart(points: Sequence[CostPoint]) -> Chart | None:
    """Draw error against latency and size, with the bound. None if no file was measured."""
    if not points:
        return None

    def paint(drawn: Figure) -> None:
        left, right = drawn.subplots(1, 2, sharey=True)
        heights = [clamped(point.ratio, _LEAST, _WORST_SHOWN) for point in points]
        for axes, name, values in (
            (left, "ms of one batch", [point.latency_ms for point in points]),
            (right, "MB", [point.size_bytes / 1e6 for point in points]),
        ):
            for passed, look, word in ((True, SERIES[0], "passed"), (False, SERIES[1], "rejected")):
                rows = [row for row, point in enumerate(points) if point.passed is passed]
                axes.scatter([values[row] for row in rows], [heights[row] for row in rows],
                             color=look[0], s=18, label=word if axes is left else None)  # fmt: skip
            axes.axhline(1.0, color=TEXT, linewidth=1.2, linestyle=":")
            axes.set_yscale("log")
            axes.set_xlim(left=0.0)
            axes.set_xlabel(name)
        left.set_ylabel("deviation ÷ bound")
        drawn.legend(loc="outside lower center", ncols=2)

    described = "; ".join(
        f"{point.title}: {format_number(point.ratio)} of the bound, "
        f"{format_number(point.latency_ms)} ms, {point.size_bytes} bytes"
        for point in points
    )
    title = "Error against latency and size"
    return chart("cost", paint, title=title, alternative=described, height=300)


def _rows(found: Trials) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield verdict and cells, one row for each runtime of each export."""
    for trial in found.trials:
        about = _about(trial)
        if not trial.parities:
            rest = ("",) * (len(_TRIALS_HEADINGS) - len(about) - 1)
            yield trial.verdict, (*about, *rest, trial.verdict)
        for place, parity in enumerate(trial.parities):
            first = about if place == 0 else ("",) * len(about)
            yield parity.verdict, (*first, *_measured(parity))


def _about(trial: ExportTrialRecord) -> tuple[str, ...]:
    opset = f"{trial.opset_asked}"
    if trial.opset is not None and trial.opset != trial.opset_asked:
        opset += f", got {trial.opset}"
    return (
        trial.strategy,
        opset,
        "on" if trial.constant_folding else "off",
        f"{trial.seconds:.1f}",
        "" if trial.nodes is None else str(trial.nodes),
        "" if trial.size_bytes is None else f"{trial.size_bytes / 1e6:.1f}",
    )


def _measured(parity: TrialParity) -> tuple[str, ...]:
    return (
        parity.runtime,
        format_number(parity.max_abs_diff),
        format_number(parity.l2_logits),
        format_number(parity.l2_probabilities),
        format_number(parity.noise_ratio),
        format_number(parity.top1_agreement),
        "" if parity.latency_ms is None else f"{parity.latency_ms:.1f}",
        parity.verdict,
    )
