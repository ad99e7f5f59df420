"""Export comparison and preprocessing comparison."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gate.preprocess.comparison import WorstPicture
from gate.preprocess.spec import PreprocessSpec, to_pixels
from gate.records.export import Trials
from gate.records.preprocessing import ConsumerParity, PreprocessingParity
from gate.report.chart import literal
from gate.report.terminal import add_row, build_table, print_sentences
from gate.storage.safe_text import make_printable
from gate.summary.render import CONSUMER_HEADINGS, beginning, consumer_cells, format_number

if TYPE_CHECKING:
    from rich.console import Console


_ROWS = 12

_ZOOM = 24
"""Side in pixels of the enlarged part around the largest difference."""


def print_comparison(parity: PreprocessingParity, console: Console, *, bound: float) -> None:
    """Print the table of consumers in steps, then causes, then the values of both sides."""
    about = (
        f"{parity.images} pictures, against {parity.reference}; differences in 1/255 of the "
        f"value range before normalization, {bound:g} allowed"
    )
    print_sentences(console, [about])
    table = build_table(CONSUMER_HEADINGS, right=CONSUMER_HEADINGS[1:-1])
    for consumer in parity.consumers:
        good = consumer.within(bound)
        style = "" if good else "dim" if consumer.not_measured else "red"
        verdict = "same" if good else f"differs: {consumer.failure or _reason(consumer)}"
        if consumer.max_diff is None:
            why = consumer.not_measured or consumer.failure or "another shape or dtype"
            verdict = f"{'not measured' if consumer.not_measured else 'differs'}: {why}"
        add_row(table, consumer_cells(consumer, verdict), style=style)
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
    stream = io.BytesIO()
    with warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes; the tables show the full names.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        # PNG, because these are pictures; without metadata, the same figure gives the same bytes.
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


def _reason(consumer: ConsumerParity) -> str:
    if consumer.nonfinite:
        return f"{consumer.nonfinite} values are not finite"
    return "; ".join(beginning(cause, " (") for cause in consumer.causes) or "cause not known"


def _value_lines(parity: PreprocessingParity) -> Iterator[str]:
    """Yield shape, minimum, maximum, mean and first values of each side."""
    sides = [(parity.reference, "", parity.reference_values)]
    sides += [
        (consumer.consumer, f"shape {list(consumer.shape)}, ", consumer.values)
        for consumer in parity.consumers
        if consumer.values is not None
    ]
    for name, shape, values in sides:
        first = " ".join(f"{value:.4g}" for value in values.first)
        yield (
            f"{name}: {shape}min {values.min:.4g}, max {values.max:.4g}, "
            f"mean {values.mean:.4g}; first {first}"
        )


_TRIAL_HEADINGS = ("strategy", "opset", "fold", "s", "nodes", "MB", "runtime", "max diff", "L2",
             "L2 prob", "noise", "top-1", "ms", "verdict")  # fmt: skip

_LEFT = ("strategy", "fold", "runtime", "verdict")

_STYLES = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold red", "not exported": "yellow"}


def print_trials(trials: Trials, console: Console) -> None:
    """Print the table of trials, then its interpretation."""
    table = build_table(_TRIAL_HEADINGS, right={*_TRIAL_HEADINGS} - {*_LEFT})
    table.columns[_TRIAL_HEADINGS.index("runtime")].no_wrap = True
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


def _rows(trials: Trials) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield verdict and cells, one row for each runtime of each export."""
    for trial in trials.trials:
        changed = trial.opset not in (None, trial.opset_asked)
        about: tuple[str, ...] = (
            trial.strategy,
            f"{trial.opset_asked}, got {trial.opset}" if changed else str(trial.opset_asked),
            "on" if trial.constant_folding else "off",
            f"{trial.seconds:.1f}",
            "" if trial.nodes is None else str(trial.nodes),
            "" if trial.size_bytes is None else f"{trial.size_bytes / 1e6:.1f}",
        )
        if not trial.parities:
            yield trial.verdict, (*about, *[""] * 7, trial.verdict)
        for parity in trial.parities:
            numbers = (parity.max_abs_diff, parity.l2_logits, parity.l2_probabilities,
                       parity.noise_ratio, parity.top1_agreement)  # fmt: skip
            latency = "" if parity.latency_ms is None else f"{parity.latency_ms:.1f}"
            measured = (parity.runtime, *map(format_number, numbers), latency, parity.verdict)
            yield parity.verdict, (*about, *measured)
            about = ("",) * len(about)
