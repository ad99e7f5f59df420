"""Print how far correct files are below each bound and faulty files above it, to set the bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.corpus.outcome import Outcome
from gate.policy.policy import Policy

_NEAREST = 3


def default_bounds() -> dict[str, float | None]:
    """Return the default policy's bound on each metric on the CPU."""
    policy = Policy.default()
    on_cpu = policy.runtimes["ort-cpu"].bounds
    names = ("noise_ratio", "noise_peak", "noise_diff", "scaled_diff",
             "repeatability_ratio", "batch_invariance_ratio")  # fmt: skip
    probes = ("probe_noise_ratio", "probe_relative_diff")
    return {name: getattr(on_cpu, name) for name in names} | {
        name: getattr(policy.instruments, name) for name in probes
    }


def print_distribution(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the quantiles of each metric for both sides and the files nearest to the bound."""
    table = Table(title="Worst value of each file", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("metric", "bound", "side", "n", "least", "median", "95 %", "most", "beyond"):
        table.add_column(heading, justify="left" if heading in ("metric", "side") else "right")
    for metric, bound in default_bounds().items():
        for side, faulty in (("correct", False), ("faulty", True)):
            values = sorted(value for value, _ in _metric_values(outcomes, metric, faulty=faulty))
            if values:
                beyond = sum(bound is not None and value > bound for value in values)
                cells = (values[0], _quantile(values, 0.5), _quantile(values, 0.95), values[-1])
                bound_text = "" if bound is None else f"{bound:g}"
                numbers = [f"{value:.3g}" for value in cells]
                table.add_row(metric, bound_text, side, str(len(values)), *numbers, str(beyond))
        table.add_section()
    console.print(table)
    for metric, bound in default_bounds().items():
        _print_nearest(outcomes, metric, bound, console)


def _print_nearest(
    outcomes: Sequence[Outcome], metric: str, bound: float | None, console: Console
) -> None:
    correct = sorted(_metric_values(outcomes, metric, faulty=False), reverse=True)[:_NEAREST]
    limit = bound if bound is not None else max((value for value, _ in correct), default=math.inf)
    above = sorted(
        (value, name)
        for value, name in _metric_values(outcomes, metric, faulty=True)
        if value > limit
    )[:_NEAREST]
    for side, nearest in (("correct", correct), ("faulty beyond", above)):
        nearest_text = ", ".join(f"{value:.3g} {name}" for value, name in nearest)
        console.print(f"{metric}, {side}: {nearest_text or 'none'}", style="dim", highlight=False)


def _metric_values(
    outcomes: Sequence[Outcome], metric: str, *, faulty: bool
) -> list[tuple[float, str]]:
    return [
        (outcome.ruling.numbers[metric], outcome.name)
        for outcome in outcomes
        if outcome.faulty is faulty
        and outcome.ruling is not None
        and metric in outcome.ruling.numbers
    ]


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
