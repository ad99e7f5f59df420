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
from gate.report.terminal import add_row, build_table, print_sentences
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
    """Print the table of consumers in steps, then causes, then the values of both sides."""
    about = (
        f"{parity.images} pictures, against {parity.reference}; differences in 1/255 of the "
        f"value range before normalization, {bound:g} allowed"
    )
    print_sentences(console, [about])
    table = build_table(_PREPROCESSING_HEADINGS, right=_PREPROCESSING_HEADINGS[1:-1])
    for consumer in parity.consumers:
        good = consumer.within(bound)
        style = "" if good else "dim" if consumer.not_measured else "red"
        add_row(table, _cells(consumer, good=good), style=style)
    console.print(table)
    print_sentences(console, [*preprocessing_sentences(parity), *_value_lines(parity)])


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
    figure = Figure(figsize=(13, 2.9 * len(shown) + 0.3), dpi=90, layout="constrained")
    grid: NDArray[Any] = np.atleast_2d(figure.subplots(len(shown), 5))
    for axes, (name, worst_picture) in zip(grid, shown, strict=True):
        _draw_row(axes, literal(name, 72), worst_picture, spec)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    """Return a figure as PNG; the same figure gives the same bytes.

    PNG instead of SVG as for charts, because these are pictures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    stream = io.BytesIO()
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes; the tables show the full names.
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font", category=UserWarning
        )
        figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _draw_row(axes: NDArray[Any], name: str, worst: WorstPicture, spec: PreprocessSpec) -> None:
    reference, candidate = to_pixels(worst.reference, spec), to_pixels(worst.tensor, spec)
    difference = np.nan_to_num(np.abs(candidate - reference), nan=255.0, posinf=255.0)
    scale = 255.0 / max(float(np.quantile(difference, 0.999)), 1.0)
    row, column = np.unravel_index(int(difference.max(axis=2).argmax()), difference.shape[:2])
    window = _window(int(row), difference.shape[0]), _window(int(column), difference.shape[1])
    titles = ("reference", name, f"difference x {scale:.3g}", "reference, zoomed",
              f"{name}, zoomed")  # fmt: skip
    pictures = (reference, candidate, difference * scale, reference[window], candidate[window])
    for panel, title, picture in zip(axes, titles, pictures, strict=True):
        clipped = np.clip(np.nan_to_num(picture), 0.0, 255.0)
        panel.imshow(np.rint(clipped).astype(np.uint8), interpolation="nearest")
        panel.set_title(title, fontsize=9, parse_math=False)
        panel.set_xticks([])
        panel.set_yticks([])
    label = literal(worst.picture.rpartition("/")[2], 72)
    axes[0].set_ylabel(label, fontsize=8, parse_math=False)
    axes[2].set_xlabel(f"largest {format_number(float(difference.max()))} of 255", fontsize=8)


def _window(center: int, size: int) -> slice:
    start = min(max(center - _ZOOM // 2, 0), max(size - _ZOOM, 0))
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
        "same" if good else f"differs: {make_printable(consumer.failure or _reason(consumer))}",
    )


def _reason(consumer: ConsumerParity) -> str:
    if consumer.nonfinite:
        return f"{consumer.nonfinite} values are not finite"
    return "; ".join(beginning(cause, " (") for cause in consumer.causes) or "cause not known"


def _value_lines(parity: PreprocessingParity) -> Iterator[str]:
    """Yield shape, minimum, maximum, mean and first values of each side."""
    yield f"{parity.reference}: {_format_values(parity.reference_values)}"
    for consumer in parity.consumers:
        if consumer.values is not None:
            shape = list(consumer.shape)
            yield f"{consumer.consumer}: shape {shape}, {_format_values(consumer.values)}"


def _format_values(values: TensorSummary) -> str:
    first = " ".join(f"{value:.4g}" for value in values.first)
    return f"min {values.min:.4g}, max {values.max:.4g}, mean {values.mean:.4g}; first {first}"


_TRIAL_HEADINGS = ("strategy", "opset", "folding", "seconds", "nodes", "MB", "runtime",
             "max_abs_diff", "l2_logits", "l2_probabilities", "noise_ratio", "top-1", "ms",
             "verdict")  # fmt: skip

_SHORT = ("strategy", "opset", "fold", "s", "nodes", "MB", "runtime", "max diff", "L2", "L2 prob",
          "noise", "top-1", "ms", "verdict")  # fmt: skip
"""Headings for a narrow terminal."""

_LEFT = ("strategy", "folding", "runtime", "verdict")

_STYLES = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold red", "not exported": "yellow"}

_FROM = 0.1
"""Start of the axis, unless a value is smaller."""

_AXIS_MIN, _AXIS_MAX = 1e-3, 1e12

_PITCH, _REST = 14, 70


def print_trials(trials: Trials, console: Console) -> None:
    """Print the table of trials, then its interpretation."""
    table = build_table(_SHORT, right=set(_SHORT) - {"fold", *_LEFT})
    table.columns[_SHORT.index("runtime")].no_wrap = True
    for verdict, cells in _rows(trials):
        add_row(table, cells, style=_STYLES[verdict])
    console.print(table)
    print_sentences(console, trials_sentences(trials))


def trials_sentences(trials: Trials) -> Iterator[str]:
    """Yield which exports are wrong, which are best, and why some failed."""
    good = [trial for trial in trials.trials if trial.verdict == "PASS"]
    bad = [trial for trial in trials.trials if trial.verdict in ("FAIL", "ERROR")]
    yield (
        f"{len(good)} of {len(trials.trials)} exports compute what the model computes, on "
        f"{trials.samples} samples (noise_ratio at most {trials.bound:g}, widened for few "
        "elements)."
    )
    for trial in bad:
        failed = "; ".join(
            f"{each.runtime} {each.failure or f'noise_ratio {format_number(each.noise_ratio)}'}"
            for each in trial.parities
            if each.verdict != "PASS"
        )
        yield make_printable(f"{trial.verdict}: {trial.title}: {failed}")
    for trial in trials.trials:
        if trial.failure is not None:
            yield make_printable(f"not exported: {trial.title}: {trial.failure}")
    for warning in dict.fromkeys(text for trial in trials.trials for text in trial.warnings):
        yield make_printable(f"warned: {warning}")


def markdown(trials: Trials) -> str:
    """Return the trials as a Markdown text."""
    lines = [f"# Exports of {trials.factory}", ""]
    lines += [f"| {' | '.join(_TRIAL_HEADINGS)} |"]
    lines += ["|" + "|".join("---" if h in _LEFT else "---:" for h in _TRIAL_HEADINGS) + "|"]
    lines += [f"| {' | '.join(cells)} |" for _, cells in _rows(trials)]
    sentences = "\n".join(f"- {sentence}" for sentence in trials_sentences(trials))
    lines += ["", sentences.replace("|", r"\|").replace("<", "&lt;")]
    return "\n".join(lines) + "\n"


def trials_chart(trials: Trials) -> Chart | None:
    """Draw the noise ratio of every export in every runtime, with the bound. None without
    exports."""
    exported = [trial for trial in trials.trials if trial.parities]
    if not exported:
        return None
    runtimes = [parity.runtime for parity in exported[0].parities]

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        height = 1.0 / (len(runtimes) + 1)
        measured = [parity for trial in exported for parity in trial.parities]
        heights = [clamped(parity.noise_ratio, _AXIS_MIN, _AXIS_MAX) for parity in measured]
        # Starting at the smallest value would make small differences look large.
        logarithmic(axes, min([_FROM, *heights]), 2.0 * max([trials.bound, *heights]))
        for number, (runtime, style) in enumerate(zip(runtimes, SERIES, strict=False)):
            rows = [row + height * (number + 0.5) for row in range(len(exported))]
            ratios = [{p.runtime: p.noise_ratio for p in trial.parities} for trial in exported]
            values = [clamped(each.get(runtime), _AXIS_MIN, _AXIS_MAX) for each in ratios]
            axes.barh(rows, values, 0.8 * height, color=style[0], label=runtime)
        across = axes.get_yaxis_transform()
        for row, trial in enumerate(exported):
            axes.text(0.0, row - 0.5 * height, literal(trial.title), va="center",
                      transform=across, fontsize=SMALL)  # fmt: skip
        axes.axvline(trials.bound, color=TEXT, linewidth=1.2, linestyle=":", label="bound")
        axes.set_ylim(len(exported), -height)
        axes.set_yticks([])
        axes.set_xlabel("error ÷ rounding of PyTorch")
        figure.legend(loc="outside lower center", ncols=3)

    return chart(
        "trials",
        paint,
        title=f"Exports of {trials.factory}, n = {trials.samples}",
        alternative="; ".join(trials_sentences(trials)),
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

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        heights = [clamped(point.ratio, _AXIS_MIN, _WORST_SHOWN) for point in points]
        for axes, name, values in (
            (left, "ms of one batch", [point.latency_ms for point in points]),
            (right, "MB", [point.size_bytes / 1e6 for point in points]),
        ):
            for series, word in zip(SERIES, ("passed", "rejected"), strict=False):
                passed = word == "passed"
                rows = [row for row, point in enumerate(points) if point.passed is passed]
                axes.scatter([values[row] for row in rows], [heights[row] for row in rows],
                             color=series[0], s=18,
                             label=word if axes is left else None)  # fmt: skip
            axes.axhline(1.0, color=TEXT, linewidth=1.2, linestyle=":")
            axes.set_yscale("log")
            axes.set_xlim(left=0.0)
            axes.set_xlabel(name)
        left.set_ylabel("deviation ÷ bound")
        figure.legend(loc="outside lower center", ncols=2)

    described = "; ".join(
        f"{point.title}: {format_number(point.ratio)} of the bound, "
        f"{format_number(point.latency_ms)} ms, {point.size_bytes} bytes"
        for point in points
    )
    title = "Error against latency and size"
    return chart("cost", paint, title=title, alternative=described, height=300)


def _rows(trials: Trials) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield verdict and cells, one row for each runtime of each export."""
    for trial in trials.trials:
        about = _export_cells(trial)
        if not trial.parities:
            rest = ("",) * (len(_TRIAL_HEADINGS) - len(about) - 1)
            yield trial.verdict, (*about, *rest, trial.verdict)
        for number, parity in enumerate(trial.parities):
            first = about if number == 0 else ("",) * len(about)
            yield parity.verdict, (*first, *_parity_cells(parity))


def _export_cells(trial: ExportTrialRecord) -> tuple[str, ...]:
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


def _parity_cells(parity: TrialParity) -> tuple[str, ...]:
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
