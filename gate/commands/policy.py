"""`gate policy`: what is demanded, where it is said, and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from gate.commands.given import POLICY_FILE
from gate.commands.options import PRECISION
from gate.commands.outcome import Outcome, machine_options
from gate.commands.policy_explain import explain
from gate.commands.settings import SETTINGS
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.policy.effective import EffectiveValue
    from gate.policy.policy import Policy, Task
    from gate.policy.scope import Precision


class _PolicyQuestion(TypedDict):
    """The options of `gate policy show`, as parsed."""

    policy: Path | None
    precision: Precision | None
    task: Task | None
    settings: tuple[tuple[str, str], ...]
    runtimes: tuple[str, ...]


@click.group("policy", short_help="Show, check and explain what is demanded of a file.")
def command() -> None:
    """Show the policy that is in force, check one, or explain a bound.

    \b
    Examples:
      gate policy show
      gate policy show --policy params.yaml --json
      gate policy check params.yaml
      gate policy explain noise_ratio
    """


@command.command("show", short_help="Every value that is in force, and where it is said.")
@click.option(
    "--policy", type=POLICY_FILE,
    help="YAML with a 'gate:' section, or the policy itself. Default: the built-in one.",
)  # fmt: skip
@PRECISION
@click.option(
    "--task", type=click.Choice(("auto", "classification", "tensors")),
    help="As gate check --task: it goes before the policy's.",
)  # fmt: skip
@click.option(
    "--runtime", "runtimes", multiple=True, metavar="NAME",
    help="As gate check --runtime: measured too, always, within built-in bounds. Repeatable.",
)  # fmt: skip
@SETTINGS
@machine_options
def _show(**question: Unpack[_PolicyQuestion]) -> Outcome:
    """Print the policy that gate check would judge by, with these options: each value with where it
    comes from, which is the file and line, an option, or the default.

    Bounds that nobody sets are left out; --json has them, too, as null.

    \b
    Examples:
      gate policy show
      gate policy show --precision reduced
      gate policy show --policy gate.yaml --set runtimes.ort-cpu.bounds.noise_ratio=2
      gate policy show --policy params.yaml --json
    """
    from gate.commands.check import policy_of
    from gate.policy.effective import effective_values

    policy = policy_of({**question, "roles": ()})
    file = question["policy"]
    options = {f"runtimes.{name}": "--runtime" for name in question["runtimes"]}
    for name in ("precision", "task"):
        if question[name]:
            options[name] = f"--{name}"
    values = effective_values(policy, file=file, options=options)
    plain = {
        "policy": None if file is None else str(file),
        "digest": str(policy.digest()),
        "values": [
            {"place": each.dotted, "value": each.value, "origin": each.origin} for each in values
        ],
    }
    return Outcome(Status.DONE, plain, lambda console: _print(values, policy, console))


@command.command("check", short_help="Whether a file holds a policy that can refuse something.")
@click.argument("policy", type=POLICY_FILE, metavar="FILE")
@machine_options
def _check(policy: Path) -> Outcome:
    """Read FILE as gate check would, and say what it demands.

    Exit code 0 if it is a policy; 2 if not: an unknown field, a text for a number, a bound that is
    negative or not finite, nothing that could be refused. Each is named with its line. Whether its
    runtimes are on this machine, gate runtimes --policy FILE says.

    \b
    Examples:
      gate policy check gate.yaml
      gate policy check params.yaml --json
    """
    from gate.policy.policy import Policy

    found = Policy.of_file(policy)
    plain = {
        "policy": str(policy),
        "digest": str(found.digest()),
        "runtimes": [
            {"name": name, "required": runtime.required, "bounds": _bounds(found, name)}
            for name, runtime in found.runtimes.items()
        ],
    }
    return Outcome(Status.DONE, plain, lambda console: _print_demands(plain, console))


def _bounds(policy: Policy, runtime: str) -> list[str]:
    return [name for name, value in policy.runtimes[runtime].bounds if value is not None]


def _print(values: tuple[EffectiveValue, ...], policy: Policy, console: Console) -> None:
    import json

    from gate.report.table import table

    shown = [each for each in values if each.is_asked]
    rows = ((each.dotted, each.origin, json.dumps(each.value)) for each in shown)
    console.print(table(("what", "from", "value"), rows))
    console.print(f"digest {policy.digest()}")
    console.print("What one means: gate policy explain NAME")


def _print_demands(plain: dict[str, Any], console: Console) -> None:
    console.print(f"a policy: {plain['policy']}, {plain['digest']}")
    for runtime in plain["runtimes"]:
        names = ", ".join(runtime["bounds"]) or "no bound"
        console.print(f"{runtime['name']} ({runtime['required']}): {names}")


command.add_command(explain)
