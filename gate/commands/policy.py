"""`gate policy show`, `check`, `explain`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.click_types import POLICY_FILE, SETTINGS
from gate.commands.options import PRECISION, RUNTIMES, TASK, policy_option
from gate.commands.result import CommandResult, machine_options, table_result, text_result
from gate.errors import PolicyError

if TYPE_CHECKING:
    from gate.decision.catalog import CheckSpec
    from gate.policy.overrides import EffectiveValue
    from gate.policy.policy import Precision, Task
    from gate.summary.policy_docs import PolicyField


@click.command("explain", short_help="Explain a policy field, a bound or a check.")
@click.argument("name")
@policy_option("Also print its value in this policy. Default: the built-in policy.")
@machine_options
def explain(name: str, policy: Path | None) -> CommandResult:
    """Explain NAME: a policy field (by name or full path), or a check of a report.

    In formulas, c is the file's output, r the model's output in float32, r64 the model's output in
    float64 (docs/metrics.md).

    \b
    Examples:
      gate policy explain noise_ratio
      gate policy explain runtimes.ort-cpu.bounds.top1_agreement --policy params.yaml
      gate policy explain review --json
    """
    from gate.decision.catalog import row_of, spec_texts
    from gate.policy.overrides import effective_values
    from gate.policy.policy import Policy
    from gate.summary.policy_docs import fields_named, policy_fields

    all_fields = policy_fields()
    fields = fields_named(name, all_fields)
    check = None if fields else row_of(name)
    if not fields and check is None:
        names = {each.name for each in all_fields}
        near = difflib.get_close_matches(name.rpartition(".")[2], names, n=1)
        raise PolicyError(
            f"'{name}' is neither a policy field nor a check. "
            + (_elsewhere(name) or (f"Did you mean {near[0]}? " if near else ""))
            + "gate policy show lists all fields."
        )
    read = Policy.from_file(policy) if policy else Policy.default()
    values = [
        each
        for each in effective_values(read, file=policy, options={})
        if each.is_set and any(field in fields_named(each.dotted, all_fields) for field in fields)
    ]
    plain = {
        "name": name,
        "fields": [field.to_plain() for field in fields],
        "check": spec_texts(check) if check else None,
        "values": [_value(each) for each in values],
    }
    lines = [*_lines(fields, values)] if check is None else [name, *_check_lines(check)]
    return text_result(plain, *lines)


def _value(value: EffectiveValue) -> dict[str, Any]:
    return {"place": value.dotted, "value": value.value, "origin": value.origin}


def _elsewhere(name: str) -> str:
    """Return where a setting that is not in the policy belongs; empty if unknown."""
    from gate.records.export import ExportSettings

    setting = name.removeprefix("export.")
    if setting in ExportSettings.model_fields:
        return f"{setting} is a setting of the section 'export:': see docs/export.md. "
    if setting in ("parts", "chain"):
        return f"{setting} belongs in a release file or the section 'release:': docs/releases.md. "
    return ""


def _lines(fields: tuple[PolicyField, ...], values: list[EffectiveValue]) -> Iterator[str]:
    for number, field in enumerate(fields):
        if number:
            yield ""
        yield field.path
        yield f"  {field.sentence}"
        yield f"  takes     {field.takes}"
        if field.required:
            yield "  default   none: required"
        elif field.default is not None:
            yield f"  default   {json.dumps(field.default)}"
        if field.check is not None:
            yield from _check_lines(field.check, sentence=False)
        if field.built_in:
            listed = ", ".join(f"{value:g} on {where}" for where, value in field.built_in.items())
            yield f"  built in  {listed}"
    for each in values:
        yield f"  here      {each.dotted} = {json.dumps(each.value)} ({each.origin})"


def _check_lines(check: CheckSpec, *, sentence: bool = True) -> Iterator[str]:
    if sentence:
        yield f"  {check.meaning}"
    if check.formula:
        yield f"  formula   {check.formula}"
    if check.unit:
        yield f"  unit      {check.unit}"
    yield f"  bound     {check.why}"


@click.group("policy", short_help="Show, check and explain policies.")
def command() -> None:
    """Show the effective policy, check a policy file, or explain a bound.

    \b
    Examples:
      gate policy show
      gate policy show --policy params.yaml --json
      gate policy check params.yaml
      gate policy explain noise_ratio
    """


@command.command("show", short_help="Print every effective value with its origin.")
@policy_option("YAML policy, or YAML with a 'gate:' section. Default: the built-in policy.")
@PRECISION
@TASK
@RUNTIMES
@SETTINGS
@machine_options
def _show(
    policy: Path | None,
    precision: Precision | None,
    task: Task | None,
    runtimes: tuple[str, ...],
    settings: tuple[tuple[str, str], ...],
) -> CommandResult:
    """Print the policy that gate check would use with these options, with the origin of each value:
    a file and line, an option, or the default.

    Bounds that are not set are left out; --json lists them as null.

    \b
    Examples:
      gate policy show
      gate policy show --precision reduced
      gate policy show --policy gate.yaml --set runtimes.ort-cpu.bounds.noise_ratio=2
      gate policy show --policy params.yaml --json
    """
    from gate.commands.evaluate import policy_from_options
    from gate.policy.overrides import effective_values

    effective = policy_from_options(
        policy=policy, precision=precision, task=task, runtimes=runtimes, settings=settings
    )
    options = {f"runtimes.{name}": "--runtime" for name in runtimes}
    stated = {"precision": precision, "task": task}
    options |= {name: f"--{name}" for name, value in stated.items() if value}
    values = effective_values(effective, file=policy, options=options)
    plain = {
        "policy": None if policy is None else str(policy),
        "digest": str(effective.digest()),
        "values": [_value(each) for each in values],
    }
    return table_result(
        plain,
        ("what", "from", "value"),
        [(each.dotted, each.origin, json.dumps(each.value)) for each in values if each.is_set],
        f"digest {effective.digest()}",
        "Explain one: gate policy explain NAME",
    )


@command.command("check", short_help="Validate a policy file.")
@click.argument("policy", type=POLICY_FILE, metavar="FILE")
@machine_options
def _check(policy: Path) -> CommandResult:
    """Validate the policy in FILE and list its runtimes and bounds.

    Exit code 0: valid; 2: invalid (unknown field, wrong type, negative or infinite bound, no check
    that could fail), with the line of each problem. gate runtimes --policy FILE shows whether its
    runtimes are available.

    \b
    Examples:
      gate policy check gate.yaml
      gate policy check params.yaml --json
    """
    from gate.policy.policy import Policy

    valid, not_read = Policy.from_file(policy), _settings_without_effect(policy)
    digest, lines, runtimes = str(valid.digest()), [], []
    for name, runtime in valid.runtimes.items():
        bounds = [bound for bound, value in runtime.bounds if value is not None]
        runtimes.append({"name": name, "required": runtime.required, "bounds": bounds})
        lines.append(f"{name} ({runtime.required}): {', '.join(bounds) or 'no bound'}")
    if not_read:
        names = ", ".join(not_read)
        lines.append(f"ignored because they are outside the section 'gate:': {names}")
    plain = {
        "policy": str(policy), "digest": digest, "runtimes": runtimes, "not_read": not_read
    }  # fmt: skip
    return text_result(plain, f"valid policy: {policy}, {digest}", *lines)


def _settings_without_effect(path: Path) -> list[str]:
    """Return policy settings outside the section 'gate:', where they have no effect."""
    from gate.policy.policy import Policy
    from gate.storage.yaml_section import has_section, lines_of

    top = {names[0] for names in lines_of(path, None) if len(names) == 1}
    return sorted(top & set(Policy.model_fields)) if has_section(path, "gate") else []


command.add_command(explain)
