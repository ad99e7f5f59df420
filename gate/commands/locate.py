"""`gate locate`: the first layer in which an ONNX file diverges from its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.bounded.limits import CHECK_S
from gate.commands.child import in_child, limit_options
from gate.commands.given import NEW_FILE, NEW_FOLDER, POLICY_FILE
from gate.commands.loading import loading
from gate.commands.options import CHECKPOINT, INPUTS, MODEL, PICTURE_SPEC, PRECISION, REFERENCE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.policy.scope import Precision
    from gate.records.localisation import Localisation
    from gate.records.runtime import RuntimeName


class _Question(TypedDict):
    """The options, as parsed."""

    model: Path
    reference: str
    checkpoint: Path | None
    inputs: str
    preprocessing: Path | None
    samples: int
    runtime: RuntimeName
    precision: Precision | None
    policy: Path | None
    report: Path | None
    save: Path | None


@click.command("locate", short_help="Say which layer of an ONNX file diverges first.")
@MODEL
@REFERENCE
@CHECKPOINT
@INPUTS
@PICTURE_SPEC
@click.option(
    "--samples", type=click.IntRange(min=1), default=8, show_default=True,
    help="Compute on the first N samples.",
)  # fmt: skip
@click.option(
    "--runtime", default="ort-cpu", show_default=True, metavar="NAME",
    help="The runtime whose layers are compared: ort-cpu, ort-cpu-optimized, ort-cuda, "
    "ort-cuda-optimized, or one of kind ort of the policy.",
)  # fmt: skip
@PRECISION
@click.option(
    "--policy", type=POLICY_FILE, help="YAML whose determinism and CUDA settings are in force."
)
@click.option(
    "--report", type=NEW_FOLDER, metavar="DIR", help="Write localisation.json and a chart here."
)
@click.option(
    "--save", type=NEW_FILE, metavar="MARKED.onnx",
    help="Write the file with the tensor of each mapped layer as an output, for a viewer.",
)  # fmt: skip
@machine_options
@limit_options(CHECK_S)
@in_child
def command(**question: Unpack[_Question]) -> Outcome:
    """Compare every layer of MODEL.onnx with the PyTorch model, in one pass. Of a release of
    several files (release.yaml) the layers of the first part that diverges, and whether the seam
    between the parts is to blame.

    A layer that is wrong although its inputs are right is a source; what follows from it is
    propagated.

    Exit code 0: no layer diverges; 1: at least one does; 2: could not tell.

    \b
    Examples:
      gate locate model.onnx --reference mypackage.models:build --inputs samples.npy
      gate locate model.onnx --reference mypackage.models:build --checkpoint model.safetensors \\
          --inputs samples.npy --runtime ort-cpu-optimized --report report --save marked.onnx
      gate locate model.onnx --reference mypackage.models:build --inputs samples.npy --json
    """
    from gate.commands.check import own_or_built_in

    policy = own_or_built_in(question["policy"], question["precision"], task="tensors")
    with loading():
        from gate.front_door import Reference, case_of
        from gate.localisation.locate import locate
        from gate.localisation.releases.parts import locate_part
        from gate.parity.arrays.samples import Samples
        from gate.parity.workload import Workload
        from gate.parts.release import OpenRelease
        from gate.preprocess.spec import PreprocessSpec
        from gate.report.charts.depth import depth
        from gate.report.marked_file import save_marked
        from gate.storage import atomic

        spec = question["preprocessing"]
        samples = Samples.open(
            question["inputs"], preprocessing=PreprocessSpec.of_file(spec) if spec else None
        )
        reference = Reference.load(question["reference"], checkpoint=question["checkpoint"])
    with spinner("comparing layers"):
        case = case_of(
            question["model"], reference=reference, workload=Workload(samples), policy=policy
        )
        runtime, limit = question["runtime"], question["samples"]
        release = case.chained
        if isinstance(release, OpenRelease):
            found = locate_part(case, release, runtime=runtime, limit=limit)
            case = case if found.part is None else release.cases(case)[found.part]
        else:
            found = locate(case, runtime=runtime, limit=limit)
    if question["save"] is not None and found.layers:
        save_marked(case, found, question["save"])
    if question["report"] is not None:
        found.save(question["report"] / "localisation.json")
        drawn = depth(found)
        if drawn is not None:
            atomic.write_bytes(_chart_in(question["report"]), drawn.file())
    return Outcome(
        Status.REJECTED if found.diverges else Status.DONE,
        found.to_plain(),
        lambda console: _show(question, found, console),
    )


def _show(question: _Question, found: Localisation, console: Console) -> None:
    from gate.report.localisation import print_layers

    print_layers(found, console)
    if question["report"] is not None:
        console.print(f"report  {_chart_in(question['report'])}")
    if question["save"] is not None:
        nothing = "nothing was written: no part diverges, so there are no layers to mark"
        console.print(f"marked  {question['save'] if found.layers else nothing}")


def _chart_in(report: Path) -> Path:
    from gate.records.names import PLOTS

    return report / PLOTS / "localisation.svg"
