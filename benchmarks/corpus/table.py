"""Print the corpus as a table with one row per class, then the undetected faults and the rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.corpus.outcome import Outcome, Rates

_FAMILIES = (
    ("noise_", "noise floor"),
    ("probe", "probes"),
    ("graph", "graph"),
    ("repeatability", "stability"),
    ("batch_invariance", "stability"),
    ("top1", "top-1"),
)
_MAX_FAMILIES = 4
"""Number of check families listed in a row."""


def print_report(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the tables and all wrong outcomes. The last line is the verdict."""
    console.print(_class_table(outcomes))
    console.print(_exporter_table(outcomes))
    _print_refusals(outcomes, console)
    for outcome in outcomes:
        _print_wrong_outcome(outcome, console)
    rates = Rates.from_outcomes(outcomes)
    console.print(Text(format_rates(rates), "bold green" if rates.green else "bold red"))


def format_rates(rates: Rates) -> str:
    """Return the rates as a sentence, each with its count."""
    parts = [
        f"Escaped: {_share(rates.escaped, rates.faults)} faulty files",
        f"blocked: {_share(rates.blocked, rates.correct)} correct files",
        f"agreement of the winning class alone lets {_share(rates.top1_passes, rates.faults)} pass",
    ]
    if rates.layers:
        parts.append(f"the right layer was named for {_share(rates.located, rates.layers)}")
    return "; ".join(parts) + "."


def _class_table(outcomes: Iterable[Outcome]) -> Table:
    table = Table(title="Faulty files", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("class", "n", "escaped", "top-1 passes", "layer", "caught by (files)"):
        is_numeric = heading in ("n", "escaped", "top-1 passes", "layer")
        table.add_column(heading, justify="right" if is_numeric else "left")
    kinds: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.faulty:
            kinds.setdefault(outcome.kind, []).append(outcome)
    for kind, group in [*kinds.items(), ("all", [o for g in kinds.values() for o in g])]:
        if kind == "all":
            table.add_section()
        table.add_row(*_row(kind, group))
    return table


def _row(kind: str, group: list[Outcome]) -> list[Text]:
    rates = Rates.from_outcomes(group)
    layer = f"{rates.located}/{rates.layers}" if rates.layers else ""
    caught = Counter(
        family
        for outcome in group
        if outcome.ruling is not None
        for family in dict.fromkeys(map(family_of, outcome.ruling.failed_checks))
    )
    return [
        Text(kind),
        Text(str(rates.faults)),
        Text(str(rates.escaped or ""), "bold red"),
        Text(str(rates.top1_passes or "")),
        Text(layer, "" if rates.located == rates.layers else "bold red"),
        Text(", ".join(f"{name} {count}" for name, count in caught.most_common(_MAX_FAMILIES))),
    ]


def family_of(check: str) -> str:
    """Return the family of a check, such as probes for `probe_zeros`."""
    return next((family for start, family in _FAMILIES if check.startswith(start)), check)


def _exporter_table(outcomes: Iterable[Outcome]) -> Table:
    table = Table(title="Correct files", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("recipe", "n", "blocked", "not exported"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    recipes: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if not outcome.faulty:
            recipes.setdefault(outcome.recipe, []).append(outcome)
    for recipe, group in [*recipes.items(), ("all", [o for g in recipes.values() for o in g])]:
        if recipe == "all":
            table.add_section()
        rates = Rates.from_outcomes(group)
        table.add_row(
            recipe,
            str(rates.correct),
            Text(str(rates.blocked or ""), "bold red"),
            str(rates.refused or ""),
        )
    return table


def _print_refusals(outcomes: Iterable[Outcome], console: Console) -> None:
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.refused is not None:
            reasons.setdefault(outcome.refused, []).append(outcome.name)
    for reason, names in reasons.items():
        console.print(Text(f"not exported  {', '.join(names)}: {reason}", "dim"))


def _print_wrong_outcome(outcome: Outcome, console: Console) -> None:
    ruling = outcome.ruling
    if outcome.refused is not None and outcome.faulty:
        console.print(Text(f"fault without a file  {outcome.name}", "bold red"))
    if ruling is None:
        return
    if outcome.escaped:
        effect = (
            ""
            if outcome.effect is None
            else f" It moves the outputs by {outcome.effect:.3g} units "
        )
        effect += "of rounding." if effect else ""
        console.print(Text(f"escaped  {outcome.name}: {outcome.summary}{effect}", "bold red"))
    if outcome.blocked:
        checks = ", ".join(ruling.failed_checks)
        console.print(Text(f"blocked  {outcome.name}: {checks}: {ruling.explanation}", "bold red"))
    if outcome.located_right is False:
        located = f"named {ruling.located}" if ruling.located else "named nothing"
        message = f"the fault is in {outcome.layer}, localisation {located}: {ruling.explained}"
        console.print(Text(f"layer  {outcome.name}: {message}", "red"))


def _share(part: int, total: int) -> str:
    return f"{part} of {total}" + (f" ({part / total:.1%})" if total and part else "")
