"""`gate plan`, `gate measure`, `gate merge`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands import click_types, options
from gate.commands.ci_files import VerdictCommand
from gate.commands.click_types import PART_FILE, PLAN_FILE, ModelName
from gate.commands.evaluate import evaluate, policy_from_options
from gate.commands.options import CheckRequest
from gate.commands.progress import spinner
from gate.commands.result import CommandResult, text_result, within_limits
from gate.errors import EvidenceError, StorageError

if TYPE_CHECKING:
    from gate.distributed.plan import MeasurementPlan
    from gate.distributed.worker_pool import CheckedFile
    from gate.measure.job import EvaluationData


@click.command("measure", short_help="Measure one unit of a plan.")
@click.argument("plan", type=PLAN_FILE)
@click.option("--unit", type=click.IntRange(min=0), required=True, metavar="K")
@click.option(
    "--lead", type=PART_FILE, metavar="PART",
    help="The part of unit 0. Default: measure unit 0 again first, which takes some seconds.",
)  # fmt: skip
@click.option("-o", "--output", type=click_types.PART, required=True, metavar="PART")
@within_limits
def measure_command(plan: Path, unit: int, lead: Path | None, output: Path) -> CommandResult:
    """Measure unit K and write the part.

    A complete part of unit K is not measured again. A part of another unit is never overwritten.

    \b
    Examples:
      gate measure plan.json --unit 0 -o part-0.json
      gate measure plan.json --unit 17 --lead part-0.json -o part-17.json
      gate measure plan.json --unit $SLURM_ARRAY_TASK_ID -o part-$SLURM_ARRAY_TASK_ID.json
    """
    from gate.distributed.plan import MeasurementPlan

    planned = MeasurementPlan.open(plan)
    is_complete = _is_measured(output, planned, unit)
    if not is_complete:
        with spinner(f"measuring unit {unit} of {len(planned.units)}"):
            from gate.distributed.plan import measure_unit

            measure_unit(planned, unit, lead=lead).save(output)
    outcome = "already measured" if is_complete else "measured"
    plain = {"unit": unit, "part": str(output), "measured": not is_complete}
    return text_result(plain, f"unit {unit}  {outcome}: {output}")


def _is_measured(output: Path, plan: MeasurementPlan, unit: int) -> bool:
    """Return whether the file is a complete part of this unit; a truncated one is measured again.

    Raises StorageError if the file belongs to another unit.
    """
    from gate.distributed.plan import UnitFile, named_unit

    existing = named_unit(click_types.head_of(output))
    if existing not in (None, unit):
        raise StorageError(
            f"{output} is the part of unit {existing}. Name another file for unit {unit}."
        )
    try:
        return output.exists() and UnitFile.open(output, plan=plan).unit == unit
    except EvidenceError:
        return False


@click.command(
    "merge",
    cls=VerdictCommand,
    short_help="Merge the parts of a plan into evidence, and judge it.",
)
@click.argument("plan", type=PLAN_FILE)
@click.argument("parts", type=PART_FILE, nargs=-1, required=True)
@click.option(
    "-o", "--output", type=click_types.EVIDENCE, metavar="EVIDENCE",
    help="Write the evidence to this file, in addition to the report.",
)  # fmt: skip
@options.report_option("Write a signed report here: records, HTML page, charts, samples.csv.")
@options.OVERWRITE
@options.KEY
@click.option(
    "--name", type=ModelName(), help="The registered model that the verdict is for. Default: none."
)
@options.TRACKING_URI
@options.VERBOSE
@within_limits
def merge_command(
    plan: Path, parts: tuple[Path, ...], output: Path | None, **options: Any
) -> CommandResult:
    """Merge the parts of all units, measure what needs all samples, and judge the file.

    Unit 0 is measured here again, with the same result required; its part may be omitted. A part
    that is missing, damaged, or of another plan or machine is an error, and so are two parts of one
    unit with different numbers. Exit code 0: within every bound; 1: rejected; 2: not judged.

    \b
    Examples:
      gate merge plan.json part-*.json -o evidence.json
      gate merge plan.json parts/*.json --report report --name digits
      gate merge plan.json parts/*.json --json
    """
    from gate.distributed.plan import MeasurementPlan, MergedParts

    planned = MeasurementPlan.open(plan)
    assignment = planned.assignment
    workers = MergedParts.from_files(planned, parts)

    @contextlib.contextmanager
    def merged(checked: CheckedFile) -> Iterator[EvaluationData]:
        from gate.reference.environment import threads_set

        assignment.verify(checked.onnx, checked.reference)
        assignment.verify_annotations(checked.data.annotations)
        with threads_set(planned.threads):
            yield replace(checked.data, workers=workers, units=assignment.most_units)

    outcome = evaluate(
        _request(planned, options), assignment.policy, contextlib.nullcontext(merged)
    )
    if output is not None:
        from gate.records.evidence import Evidence

        Evidence.from_json(json.dumps(outcome.plain["evidence"])).save(output)
    return outcome


def _request(plan: MeasurementPlan, options: dict[str, Any]) -> CheckRequest:
    """Return the request of the `gate check` call that made the plan."""
    assignment = plan.assignment
    return CheckRequest(
        model=Path(assignment.onnx),
        reference=assignment.factory,
        checkpoint=Path(assignment.checkpoint) if assignment.checkpoint else None,
        inputs=assignment.inputs,
        batch_axes=tuple(assignment.batch_axes.items()),
        labels=Path(assignment.labels) if assignment.labels else None,
        slices=Path(assignment.slices) if assignment.slices else None,
        batch_size=assignment.batch_size,
        jobs=1,
        preprocessing=Path(assignment.preprocessing) if assignment.preprocessing else None,
        **options,
    )


@click.command("plan", short_help="Split a check into units that many machines can measure.")
@options.with_options((options.MODEL, *options.MEASURING))
@click.option(
    "--units", type=click.IntRange(min=2), metavar="N",
    help="Maximum number of units, including the lead; each is a range of whole batches. Default: "
    "as gate check splits the samples.",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True,
    help="Threads of each worker and of gate merge. The number affects the order of summation.",
)  # fmt: skip
@click.option("-o", "--output", type=click_types.PLAN, required=True, metavar="PLAN")
@within_limits
def plan_command(output: Path, units: int | None, threads: int, **options: Any) -> CommandResult:
    """Write the plan of a check: digests of model, file and samples, the policy, and the units.

    Unit 0, the lead, measures the noise floor for the other units. gate merge measures stability,
    probes and the input search.

    \b
    Examples:
      gate plan model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --units 64 -o plan.json
      gate measure plan.json --unit 17 -o part-17.json
      gate merge plan.json part-*.json -o evidence.json
    """
    request, policy = CheckRequest(**options), policy_from_options(**options)
    with spinner("reading model and samples"):
        from gate.api import build_job
        from gate.distributed.plan import MeasurementPlan
        from gate.measure.job import Reference
        from gate.measure.work_units import MAX_UNITS

        reference = Reference.from_factory(request.reference, checkpoint=request.checkpoint)
        data = request.open_data(policy)
        job = build_job(request.model, reference=reference, data=data, policy=policy)
        job = replace(job, units=MAX_UNITS if units is None else units - 1)
        plan = MeasurementPlan.from_job(job, reference, data, threads=threads)
    plan.save(output)
    last = len(plan.units) - 1
    lines = [
        f"plan    {output}, {plan.digest().short}: {last + 1} units, 0 to {last}",
        f"next    gate measure {output} --unit 0 -o part-0.json",
        f"        gate measure {output} --unit 1 --lead part-0.json -o part-1.json, …",
    ]
    plain = {"plan": str(output), "units": len(plan.units), "sha256": str(plan.digest())}
    return text_result(plain, *lines[: 3 if last else 2])
