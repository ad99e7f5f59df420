"""Print the corpus as a table: one row per class, a description of faults, then the rates."""

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
_SHOWN = 4
"""Families of checks named in a row."""


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print everything that a reader needs; the last line is the verdict."""
    console.print(_by_class(outcomes))
    console.print(_by_exporter(outcomes))
    _refusals(outcomes, console)
    for one in outcomes:
        _wrong(one, console)
    rates = Rates.from_outcomes(outcomes)
    console.print(Text(sentence(rates), "bold green" if rates.green else "bold red"))


def sentence(rates: Rates) -> str:
    """The rates in words, each with its n."""
    parts = [
        f"Escaped: {_share(rates.escaped, rates.faults)} faulty files",
        f"blocked: {_share(rates.blocked, rates.correct)} correct files",
        f"agreement of the winning class alone lets {_share(rates.top1_passes, rates.faults)} pass",
    ]
    if rates.layers:
        parts.append(f"the right layer was named for {_share(rates.located, rates.layers)}")
    return "; ".join(parts) + "."


def _by_class(outcomes: Iterable[Outcome]) -> Table:
    table = Table(title="Faulty files", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("class", "n", "escaped", "top-1 passes", "layer", "caught by (files)"):
        right = heading in ("n", "escaped", "top-1 passes", "layer")
        table.add_column(heading, justify="right" if right else "left")
    kinds: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.faulty:
            kinds.setdefault(one.kind, []).append(one)
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
        for one in group
        if one.ruling is not None
        for family in dict.fromkeys(map(family_of, one.ruling.caught_by))
    )
    return [
        Text(kind),
        Text(str(rates.faults)),
        Text(str(rates.escaped or ""), "bold red"),
        Text(str(rates.top1_passes or "")),
        Text(layer, "" if rates.located == rates.layers else "bold red"),
        Text(", ".join(f"{name} {count}" for name, count in caught.most_common(_SHOWN))),
    ]


def family_of(check: str) -> str:
    """`probe_zeros` is one of the probes, `noise_peak` of the noise floor."""
    return next((family for start, family in _FAMILIES if check.startswith(start)), check)


def _by_exporter(outcomes: Iterable[Outcome]) -> Table:
    table = Table(title="Correct files", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("recipe", "n", "blocked", "not exported"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    recipes: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if not one.faulty:
            recipes.setdefault(one.recipe, []).append(one)
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


def _refusals(outcomes: Iterable[Outcome], console: Console) -> None:
    reasons: dict[str, list[str]] = {}
    for one in outcomes:
        if one.refused is not None:
            reasons.setdefault(one.refused, []).append(one.name)
    for reason, names in reasons.items():
        console.print(Text(f"not exported  {', '.join(names)}: {reason}", "dim"))


def _wrong(one: Outcome, console: Console) -> None:
    ruling = one.ruling
    if one.refused is not None and one.faulty:
        console.print(Text(f"fault without a file  {one.name}", "bold red"))
    if ruling is None:
        return
    if one.escaped:
        effect = "" if one.effect is None else f" It moves the outputs by {one.effect:.3g} units "
        effect += "of rounding." if effect else ""
        console.print(Text(f"escaped  {one.name}: {one.summary}{effect}", "bold red"))
    if one.blocked:
        checks = ", ".join(ruling.caught_by)
        console.print(Text(f"blocked  {one.name}: {checks}: {ruling.told}", "bold red"))
    if one.located_right is False:
        named = f"named {ruling.located}" if ruling.located else "named nothing"
        told = f"the fault is in {one.layer}, localisation {named}: {ruling.explained}"
        console.print(Text(f"layer  {one.name}: {told}", "red"))


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({part / whole:.1%})" if whole and part else "")
