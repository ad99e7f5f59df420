"""`gate merge`: the evidence of all units, and the verdict on it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.bounded.limits import CHECK_S
from gate.commands import record_file
from gate.commands.check_question import CheckQuestion
from gate.commands.child import in_child, limit_options
from gate.commands.given import NEW_FOLDER, PART_FILE, PLAN_FILE
from gate.commands.judged import judged
from gate.commands.options import TRACKING_URI
from gate.commands.outcome import Outcome, machine_options
from gate.commands.signing import KEY
from gate.commands.verdict_files import VerdictCommand

if TYPE_CHECKING:
    from gate.parity.workload import Workload
    from gate.scale.crew import CheckedFile
    from gate.scale.plan import MeasuringPlan


@click.command(
    "merge",
    cls=VerdictCommand,
    short_help="Merge the units of a plan into evidence, and judge.",
)
@click.argument("plan", type=PLAN_FILE)
@click.argument("parts", type=PART_FILE, nargs=-1, required=True)
@click.option(
    "-o", "--output", type=record_file.EVIDENCE, metavar="EVIDENCE",
    help="Write the evidence here, besides the report.",
)  # fmt: skip
@click.option(
    "--report", type=NEW_FOLDER, metavar="DIR",
    help="Write records, page, figures and samples.csv here, signed.",
)  # fmt: skip
@KEY
@click.option("--name", help="The registered model that the verdict is for. Default: none.")
@TRACKING_URI
@click.option("-v", "--verbose", is_flag=True, help="Print every check, and what it asks.")
@machine_options
@limit_options(CHECK_S)
@in_child
def command(plan: Path, parts: tuple[Path, ...], output: Path | None, **options: Any) -> Outcome:
    """Fold what all units gave, in their order, measure what belongs to the whole, and judge.

    Unit 0 is measured here too, and must give what it gave to the others; its part may be left out.
    Any other that is missing, doubled with other numbers, damaged, or of another plan or machine
    is an error that names it.
    Exit code 0: within every bound; 1: rejected; 2: could not judge.

    \b
    Examples:
      gate merge plan.json part-*.json -o evidence.json
      gate merge plan.json parts/*.json --report report --name digits
      gate merge plan.json parts/*.json --json
    """
    from gate.scale.merging import MergedParts
    from gate.scale.plan import MeasuringPlan

    planned = MeasuringPlan.open(plan)
    crew = MergedParts.of(planned, parts)

    @contextlib.contextmanager
    def merged(checked: CheckedFile) -> Iterator[Workload]:
        with checked.as_planned(planned):
            yield replace(checked.workload, crew=crew, units=planned.assignment.most_units)

    outcome = judged(
        _question(planned, options), planned.assignment.policy, contextlib.nullcontext(merged)
    )
    if output is not None:
        from gate.records.evidence import Evidence

        Evidence.from_json(json.dumps(outcome.plain["evidence"])).save(output)
    return outcome


def _question(plan: MeasuringPlan, options: dict[str, Any]) -> CheckQuestion:
    """As `gate check` was asked on the plan."""
    assignment = plan.assignment
    return CheckQuestion(
        model=Path(assignment.onnx),
        parts=(),
        chain=None,
        reference=assignment.factory,
        checkpoint=Path(assignment.checkpoint) if assignment.checkpoint else None,
        inputs=assignment.inputs,
        decode_workers=None,
        labels=Path(assignment.labels) if assignment.labels else None,
        policy=None,
        precision=None,
        task=None,
        roles=(),
        settings=(),
        runtimes=(),
        recorded=(),
        batch_size=assignment.batch_size,
        jobs=1,
        engine="processes",
        address=None,
        workers=None,
        cpus_per_worker=1,
        gpus_per_worker=0.0,
        preprocessing=Path(assignment.preprocessing) if assignment.preprocessing else None,
        pictures=(),
        tensors=(),
        export_record=None,
        against=None,
        trust=None,
        state="",
        track=False,
        experiment=None,
        report=options["report"],
        key=options["key"],
        name=options["name"],
        tracking_uri=options["tracking_uri"],
        verbose=options["verbose"],
    )
