"""`gate policy explain`: what a field of the policy, or a check of a report, means."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.given import POLICY_FILE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status
from gate.errors import PolicyError

if TYPE_CHECKING:
    from gate.policy.effective import EffectiveValue
    from gate.story.meanings import Meaning
    from gate.story.policy_fields import PolicyField


@click.command("explain", short_help="What a field or a bound means, with its formula.")
@click.argument("name")
@click.option(
    "--policy",
    type=POLICY_FILE,
    help="Print the value that this policy has there, too. Default: the built-in one.",
)
@machine_options
def explain(name: str, policy: Path | None) -> Outcome:
    """Say what NAME means: a field of the policy by its name or its place, or a check of a report.

    c is an output of the file, r the model's in float32, r64 in float64; docs/metrics.md has the
    formulas in full.

    \b
    Examples:
      gate policy explain noise_ratio
      gate policy explain runtimes.ort-cpu.bounds.top1_agreement --policy params.yaml
      gate policy explain review --json
    """
    from gate.policy.effective import effective_values
    from gate.policy.policy import Policy
    from gate.story.meanings import row_of
    from gate.story.policy_fields import fields_named, policy_fields

    whole = policy_fields()
    fields = fields_named(name, whole)
    check = None if fields else row_of(name)
    if not fields and check is None:
        names = {each.name for each in whole}
        near = difflib.get_close_matches(name.rpartition(".")[2], names, n=1)
        raise PolicyError(
            f"'{name}' is no field of the policy and no check. "
            + (_elsewhere(name) or (f"Did you mean {near[0]}? " if near else ""))
            + "gate policy show lists what is in force."
        )
    read = Policy.of_file(policy) if policy else Policy.default()
    values = [
        each
        for each in effective_values(read, file=policy, options={})
        if each.is_asked and any(field in fields_named(each.dotted, whole) for field in fields)
    ]
    plain = {
        "name": name,
        "fields": [field.to_plain() for field in fields],
        "check": check._asdict() if check else None,
        "values": [
            {"place": each.dotted, "value": each.value, "origin": each.origin} for each in values
        ],
    }
    lines = [*_lines(fields, values)] if check is None else [name, *_of_check(check)]
    return Outcome(Status.DONE, plain, lambda console: console.print("\n".join(lines)))


def _elsewhere(name: str) -> str:
    """Where something is said that belongs to another section than the policy."""
    from gate.records.strategy import ExportSettings

    own = name.removeprefix("export.")
    if own in ExportSettings.model_fields:
        return f"It is a setting of the section 'export:': docs/export.md says what {own} does. "
    if own in ("parts", "chain"):
        return "A release file says it, or the section 'release:': docs/releases.md. "
    return ""


def _lines(fields: tuple[PolicyField, ...], values: list[EffectiveValue]) -> Iterator[str]:
    for number, field in enumerate(fields):
        if number:
            yield ""
        yield field.place
        yield f"  {field.sentence}"
        yield f"  takes     {field.takes}"
        if field.required:
            yield "  default   none: it has to be said"
        elif field.default is not None:
            yield f"  default   {json.dumps(field.default)}"
        if field.check is not None:
            yield from _of_check(field.check, sentence=False)
        if field.built_in:
            listed = ", ".join(f"{value:g} on {where}" for where, value in field.built_in.items())
            yield f"  built in  {listed}"
    for each in values:
        yield f"  here      {each.dotted} = {json.dumps(each.value)} ({each.origin})"


def _of_check(check: Meaning, *, sentence: bool = True) -> Iterator[str]:
    if sentence:
        yield f"  {check.meaning}"
    if check.formula:
        yield f"  formula   {check.formula}"
    if check.unit:
        yield f"  unit      {check.unit}"
    yield f"  bound     {check.why}"
