"""`gate export compare`: exporters side by side on one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.commands.given import NEW_FOLDER, SAMPLES, SETTINGS_FILE
from gate.commands.options import FACTORY, STRATEGIES, WEIGHTS
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import bar
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.records.trials import Trials

_MOST = 16
"""Samples that are compared on at most: more tell nothing new about an exporter."""


class _Question(TypedDict):
    """The options, as parsed."""

    factory: str
    example_input: Path
    checkpoint: Path | None
    strategy: tuple[str, ...]
    opset: tuple[int, ...]
    folding: str
    settings: Path | None
    report: Path | None


@click.command("compare", short_help="Put exporters side by side on one model.")
@FACTORY
@click.option(
    "--example-input", type=SAMPLES, required=True,
    help="Samples on axis 0: X.npy, or X.npz with one array per input. They are exported with and "
    "compared on; fewer than 8 are filled up with noise around them.",
)  # fmt: skip
@WEIGHTS
@click.option(
    "--strategy", type=click.Choice(STRATEGIES), multiple=True, default=STRATEGIES,
    help="Try this one; may be repeated. Default: all four.",
)  # fmt: skip
@click.option(
    "--opset", type=int, multiple=True, default=(13, 18), show_default=True,
    help="Try this opset; may be repeated.",
)  # fmt: skip
@click.option(
    "--folding", type=click.Choice(["both", "on", "off"]), default="both", show_default=True,
    help="Constant folding of the exporter.",
)  # fmt: skip
@click.option(
    "--settings", type=SETTINGS_FILE,
    help="YAML with an export: section: names, axes, batch size.",
)  # fmt: skip
@click.option(
    "--report", type=NEW_FOLDER, metavar="DIR",
    help="Write trials.json, trials.md and a chart here.",
)  # fmt: skip
@machine_options
def command(**question: Unpack[_Question]) -> Outcome:
    """Export a model in every way and measure each file in every runtime.

    The table says which exports compute what the model computes. Exit code 0: all files do; 1: at
    least one does not; 2: could not tell.

    \b
    Examples:
      gate export compare mypackage.models:build --example-input x.npy
      gate export compare mypackage.models:build --example-input x.npy --opset 13 --opset 17 \\
          --strategy traced --strategy dynamo --report report
      gate export compare mypackage.models:build --example-input x.npz --json
    """
    from gate.export_trials import Plan, compare
    from gate.front_door import Reference
    from gate.parity.arrays.samples import Samples
    from gate.records.strategy import ExportSettings
    from gate.report.trials import markdown, trials_chart
    from gate.storage import atomic
    from gate.storage.yaml_section import load_section

    foldings = {"both": (True, False), "on": (True,), "off": (False,)}[question["folding"]]
    path, report = question["settings"], question["report"]
    settings = load_section(ExportSettings, path, "export") if path else None
    reference = Reference.load(question["factory"], checkpoint=question["checkpoint"])
    samples = Samples.open(question["example_input"])
    example = next(samples.batches(min(len(samples), _MOST)))
    plan = Plan(
        tuple(dict.fromkeys(question["strategy"])),
        tuple(dict.fromkeys(question["opset"])),
        foldings,
    )
    with bar("exporting") as progress:

        def advance(done: int, total: int, _title: str) -> None:
            progress(done, total)

        found = compare(reference, example, plan=plan, settings=settings, progress=advance)
    if report is not None:
        found.save(report / "trials.json")
        atomic.write_text(report / "trials.md", markdown(found))
        drawn = trials_chart(found)
        if drawn is not None:
            atomic.write_bytes(report / "plots" / "trials.svg", drawn.file())
    bad = any(trial.verdict in ("FAIL", "ERROR") for trial in found.trials)
    return Outcome(
        Status.REJECTED if bad else Status.DONE,
        found.to_plain(),
        lambda console: _show(found, report, console),
    )


def _show(found: Trials, report: Path | None, console: Console) -> None:
    from gate.report.trials import print_trials

    print_trials(found, console)
    if report is not None:
        console.print(f"report  {report / 'trials.md'}, {report / 'plots' / 'trials.svg'}")
