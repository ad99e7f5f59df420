"""`gate plan`: cut a check into units that anybody measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.bounded.limits import CHECK_S
from gate.commands import record_file
from gate.commands.check import policy_of
from gate.commands.check_question import with_measuring
from gate.commands.child import in_child, limit_options
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.scale.plan import MeasuringPlan


@click.command("plan", short_help="Cut a check into units that many machines can measure.")
@with_measuring
@click.option(
    "--units", type=click.IntRange(min=2), metavar="N",
    help="At most so many, the lead included; each is a range of whole batches. Default: as gate "
    "check cuts the samples.",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True,
    help="Of each worker, and of gate merge: another number sums in another order.",
)  # fmt: skip
@click.option("-o", "--output", type=record_file.PLAN, required=True, metavar="PLAN")
@machine_options
@limit_options(CHECK_S)
@in_child
def command(output: Path, units: int | None, threads: int, **question: Any) -> Outcome:
    """Write the plan of a check: digests of model, file and samples, the policy, and the units.

    Unit 0, the lead, carries the noise floor by which the others are judged; gate merge measures
    stability, probes and the search.

    \b
    Examples:
      gate plan model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --units 64 -o plan.json
      gate measure plan.json --unit 17 -o part-17.json
      gate merge plan.json part-*.json -o evidence.json
    """
    policy = policy_of(question)
    with spinner("reading model and samples"):
        from gate.front_door import Reference, case_of
        from gate.parity.units.unit import MOST
        from gate.parity.workload import Workload
        from gate.scale.plan import MeasuringPlan

        reference = Reference.load(question["reference"], checkpoint=question["checkpoint"])
        workload = Workload.open(
            question["inputs"],
            labels=question["labels"],
            batch_size=question["batch_size"],
            preprocessing=question["preprocessing"],
            decode_workers=question["decode_workers"],
        )
        case = case_of(question["model"], reference=reference, workload=workload, policy=policy)
        case = replace(case, units=MOST if units is None else units - 1)
        plan = MeasuringPlan.of(case, reference, workload, threads=threads)
    plan.save(output)
    return Outcome(
        Status.DONE,
        {"plan": str(output), "units": len(plan.units), "sha256": str(plan.digest())},
        lambda console: _show(plan, output, console),
    )


def _show(plan: MeasuringPlan, output: Path, console: Console) -> None:
    last = len(plan.units) - 1
    console.print(f"plan    {output}, {plan.digest().short}: {last + 1} units, 0 to {last}")
    console.print(f"next    gate measure {output} --unit 0 -o part-0.json")
    if last:
        console.print(
            f"        gate measure {output} --unit 1 --lead part-0.json -o part-1.json, …"
        )
