"""Print how far correct files are below each bound and faulty ones above; bounds are set by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.corpus.outcome import Outcome
from gate.policy.policy import Policy

_NEAREST = 3
_INSTRUMENTS = {
    "probe_noise_ratio": "probe_noise_ratio",
    "probe_relative_diff": "probe_relative_diff",
}


def bounds() -> dict[str, float | None]:
    """The default policy's bound on each metric, on the CPU."""
    policy = Policy.default()
    on_cpu = policy.runtimes["ort-cpu"].bounds
    names = ("noise_ratio", "noise_peak", "noise_diff", "scaled_diff",
             "repeatability_ratio", "batch_invariance_ratio")  # fmt: skip
    found = {name: getattr(on_cpu, name) for name in names}
    return found | {name: getattr(policy.instruments, of) for name, of in _INSTRUMENTS.items()}


def print_distribution(outcomes: Sequence[Outcome], console: Console) -> None:
    """For each metric: quantiles of both sides, and the files that are nearest to the bound."""
    table = Table(title="Worst value of each file", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("metric", "bound", "side", "n", "least", "median", "95 %", "most", "beyond"):
        table.add_column(heading, justify="left" if heading in ("metric", "side") else "right")
    for metric, bound in bounds().items():
        for side, faulty in (("correct", False), ("faulty", True)):
            found = sorted(value for value, _ in _values(outcomes, metric, faulty=faulty))
            if found:
                beyond = sum(bound is not None and value > bound for value in found)
                cells = (found[0], _at(found, 0.5), _at(found, 0.95), found[-1])
                shown = "" if bound is None else f"{bound:g}"
                numbers = [f"{value:.3g}" for value in cells]
                table.add_row(metric, shown, side, str(len(found)), *numbers, str(beyond))
        table.add_section()
    console.print(table)
    for metric, bound in bounds().items():
        _print_nearest(outcomes, metric, bound, console)


def _print_nearest(
    outcomes: Sequence[Outcome], metric: str, bound: float | None, console: Console
) -> None:
    correct = sorted(_values(outcomes, metric, faulty=False), reverse=True)[:_NEAREST]
    limit = bound if bound is not None else max((value for value, _ in correct), default=math.inf)
    above = sorted(
        (value, name) for value, name in _values(outcomes, metric, faulty=True) if value > limit
    )[:_NEAREST]
    for side, nearest in (("correct", correct), ("faulty beyond", above)):
        named = ", ".join(f"{value:.3g} {name}" for value, name in nearest)
        console.print(f"{metric}, {side}: {named or 'none'}", style="dim", highlight=False)


def _values(outcomes: Sequence[Outcome], metric: str, *, faulty: bool) -> list[tuple[float, str]]:
    return [
        (one.ruling.numbers[metric], one.name)
        for one in outcomes
        if one.faulty is faulty and one.ruling is not None and metric in one.ruling.numbers
    ]


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
