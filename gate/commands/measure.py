"""`gate measure`: one unit of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.bounded.limits import CHECK_S
from gate.commands import record_file
from gate.commands.child import in_child, limit_options
from gate.commands.given import PART_FILE, PLAN_FILE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status
from gate.errors import EvidenceError, StorageError

if TYPE_CHECKING:
    from gate.scale.plan import MeasuringPlan


@click.command("measure", short_help="Measure one unit of a plan.")
@click.argument("plan", type=PLAN_FILE)
@click.option("--unit", type=click.IntRange(min=0), required=True, metavar="K")
@click.option(
    "--lead", type=PART_FILE, metavar="PART",
    help="The part of unit 0. Default: unit 0 is measured first, again: some seconds.",
)  # fmt: skip
@click.option("-o", "--output", type=record_file.PART, required=True, metavar="PART")
@machine_options
@limit_options(CHECK_S)
@in_child
def command(plan: Path, unit: int, lead: Path | None, output: Path) -> Outcome:
    """Measure unit K, and write what it gave; a part that is whole already is left as it is, and
    that of another unit is never overwritten.

    \b
    Examples:
      gate measure plan.json --unit 0 -o part-0.json
      gate measure plan.json --unit 17 --lead part-0.json -o part-17.json
      gate measure plan.json --unit $SLURM_ARRAY_TASK_ID -o part-$SLURM_ARRAY_TASK_ID.json
    """
    from gate.scale.plan import MeasuringPlan

    planned = MeasuringPlan.open(plan)
    done = _is_there(output, planned, unit)
    if not done:
        with spinner(f"measuring unit {unit} of {len(planned.units)}"):
            from gate.scale.measuring import measure_unit

            measure_unit(planned, unit, lead=lead).save(output)
    outcome = "was there already" if done else "measured"
    return Outcome(
        Status.DONE,
        {"unit": unit, "part": str(output), "measured": not done},
        lambda console: console.print(f"unit {unit}  {outcome}: {output}"),
    )


def _is_there(output: Path, plan: MeasuringPlan, unit: int) -> bool:
    """Whether the file holds this unit, whole; what is torn or foreign is measured again. Raises
    StorageError where it is another unit's."""
    from gate.scale.part_file import PartFile, named_unit

    other = named_unit(record_file.head_of(output))
    if other not in (None, unit):
        raise StorageError(
            f"{output} is the part of unit {other}. Name a file of its own for unit {unit}."
        )
    try:
        return output.exists() and PartFile.open(output, plan=plan).unit == unit
    except EvidenceError:
        return False
