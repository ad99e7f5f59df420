"""Exporters side by side: as a table for the terminal, as Markdown, and as a chart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.records.trials import Trial, TrialParity, Trials
from gate.report.charts.drawing import SERIES, SMALL, TEXT, Chart, chart, literal, logarithmic
from gate.report.table import add_row, table
from gate.story.wording import number, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

_HEADINGS = ("strategy", "opset", "folding", "seconds", "nodes", "MB", "runtime", "max_abs_diff",
             "l2_logits", "l2_probabilities", "noise_ratio", "top-1", "ms", "verdict")  # fmt: skip
_SHORT = ("strategy", "opset", "fold", "s", "nodes", "MB", "runtime", "max diff", "L2", "L2 prob",
          "noise", "top-1", "ms", "verdict")  # fmt: skip
"""The same for a terminal, which is narrow."""
_LEFT = ("strategy", "folding", "runtime", "verdict")
_STYLES = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold red", "not exported": "yellow"}
_FROM = 0.1
"""Where the axis begins, unless something is smaller."""
_LEAST, _MOST = 1e-3, 1e12
_PITCH, _REST = 14, 70


def print_trials(found: Trials, console: Console) -> None:
    """The table, then what it means."""
    from rich.text import Text

    shown = table(_SHORT, right=set(_SHORT) - {"fold", *_LEFT})
    shown.columns[_SHORT.index("runtime")].no_wrap = True
    for verdict, cells in _rows(found):
        add_row(shown, cells, style=_STYLES[verdict])
    console.print(shown)
    for sentence in sentences(found):
        console.print(Text(sentence))


def sentences(found: Trials) -> Iterator[str]:
    """Which exports are wrong, which are best, and why some gave no file."""
    good = [trial for trial in found.trials if trial.verdict == "PASS"]
    bad = [trial for trial in found.trials if trial.verdict in ("FAIL", "ERROR")]
    yield (
        f"{len(good)} of {len(found.trials)} exports compute what the model computes, on "
        f"{found.samples} samples (noise_ratio at most {found.bound:g}, widened for few elements)."
    )
    for trial in bad:
        failed = [
            f"{parity.runtime} {parity.failure or 'noise_ratio ' + _number(parity.noise_ratio)}"
            for parity in trial.parities
            if parity.verdict != "PASS"
        ]
        yield printable(f"{trial.verdict}: {trial.title}: {'; '.join(failed)}")
    for trial in found.trials:
        if trial.failure is not None:
            yield printable(f"not exported: {trial.title}: {trial.failure}")
    for warning in dict.fromkeys(text for trial in found.trials for text in trial.warnings):
        yield printable(f"warned: {warning}")


def markdown(found: Trials) -> str:
    """The same as a Markdown text."""
    lines = [f"# Exports of {found.factory}", ""]
    lines += [f"| {' | '.join(_HEADINGS)} |"]
    lines += ["|" + "|".join("---" if h in _LEFT else "---:" for h in _HEADINGS) + "|"]
    lines += [f"| {' | '.join(cells)} |" for _, cells in _rows(found)]
    lines += ["", *(f"- {_escape(sentence)}" for sentence in sentences(found))]
    return "\n".join(lines) + "\n"


def trials_chart(found: Trials) -> Chart | None:
    """Noise ratio of every export in every runtime, with the bound; None: there was no export."""
    exported = [trial for trial in found.trials if trial.parities]
    if not exported:
        return None
    runtimes = [parity.runtime for parity in exported[0].parities]

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        height = 1.0 / (len(runtimes) + 1)
        heights = [_place(parity.noise_ratio) for t in exported for parity in t.parities]
        # Not from the smallest value on, which would make a tenth look like a multiple.
        logarithmic(axes, min([_FROM, *heights]), 2.0 * max([found.bound, *heights]))
        for place, (runtime, look) in enumerate(zip(runtimes, SERIES, strict=False)):
            rows = [row + height * (place + 0.5) for row in range(len(exported))]
            values = [_place(_of(trial, runtime)) for trial in exported]
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
        alternative="; ".join(sentences(found)),
        height=_REST + _PITCH * len(exported) * (len(runtimes) + 1),
    )


def _place(ratio: float | None) -> float:
    """Where a logarithmic axis shows it: what is not there at its lower, NaN at its upper end."""
    if ratio is None:
        return _LEAST
    return _MOST if math.isnan(ratio) else min(max(ratio, _LEAST), _MOST)


def _of(trial: Trial, runtime: str) -> float | None:
    return next((p.noise_ratio for p in trial.parities if p.runtime == runtime), None)


def _rows(found: Trials) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Verdict and cells: one row for each runtime of each export."""
    for trial in found.trials:
        about = _about(trial)
        if not trial.parities:
            rest = ("",) * (len(_HEADINGS) - len(about) - 1)
            yield trial.verdict, (*about, *rest, trial.verdict)
        for place, parity in enumerate(trial.parities):
            first = about if place == 0 else ("",) * len(about)
            yield parity.verdict, (*first, *_measured(parity))


def _about(trial: Trial) -> tuple[str, ...]:
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
        _number(parity.max_abs_diff),
        _number(parity.l2_logits),
        _number(parity.l2_probabilities),
        _number(parity.noise_ratio),
        _number(parity.top1_agreement),
        "" if parity.latency_ms is None else f"{parity.latency_ms:.1f}",
        parity.verdict,
    )


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _escape(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")
