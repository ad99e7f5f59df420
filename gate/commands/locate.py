"""`gate locate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands import options
from gate.commands.click_types import NEW_FILE
from gate.commands.loaders import open_reference, open_samples
from gate.commands.progress import loading, spinner
from gate.commands.result import CommandResult, ExitCode, within_limits
from gate.storage import files

if TYPE_CHECKING:
    from rich.console import Console

    from gate.policy.policy import Precision
    from gate.records.runtime import RuntimeName


@click.command("locate", short_help="Find the layer of an ONNX file that diverges first.")
@options.MODEL
@options.REFERENCE
@options.CHECKPOINT
@options.INPUTS
@options.BATCH_AXIS
@options.PICTURE_SPEC
@click.option(
    "--samples", type=click.IntRange(min=1), default=8, show_default=True,
    help="Compute on the first N samples.",
)  # fmt: skip
@click.option(
    "--runtime", default="ort-cpu", show_default=True, metavar="NAME",
    help="The runtime whose layers are compared: ort-cpu, ort-cpu-optimized, ort-cuda, "
    "ort-cuda-optimized, or one of kind ort of the policy.",
)  # fmt: skip
@options.PRECISION
@options.policy_option("YAML policy; its determinism and CUDA settings are used.")
@options.report_option("Write localisation.json and a chart here.")
@click.option(
    "--save", type=NEW_FILE, metavar="MARKED.onnx",
    help="Write a copy of the file with the tensor of each mapped layer as an output.",
)  # fmt: skip
@within_limits
def command(
    model: Path,
    reference: str,
    checkpoint: Path | None,
    inputs: str,
    batch_axes: tuple[tuple[str, int | None], ...],
    preprocessing: Path | None,
    samples: int,
    runtime: RuntimeName,
    precision: Precision | None,
    policy: Path | None,
    report: Path | None,
    save: Path | None,
) -> CommandResult:
    """Compare every layer of MODEL.onnx with the PyTorch model, in one pass. For a release of
    several files (release.yaml), compare the layers of the first part that diverges, and report
    whether the connection between two parts is the cause.

    A layer with correct inputs and a wrong output is a source. Later differences are propagated.

    Exit code 0: no layer diverges; 1: at least one does; 2: not compared.

    \b
    Examples:
      gate locate model.onnx --reference mypackage.models:build --inputs samples.npy
      gate locate model.onnx --reference mypackage.models:build --checkpoint model.safetensors \\
          --inputs samples.npy --runtime ort-cpu-optimized --report report --save marked.onnx
      gate locate model.onnx --reference mypackage.models:build --inputs samples.npy --json
    """
    from gate.commands.evaluate import load_policy

    judging_policy = load_policy(policy, precision, task="tensors")
    with loading():
        from gate.api import build_job
        from gate.localize.locate import locate
        from gate.localize.locate_part import locate_part
        from gate.localize.marked_file import write_marked_file
        from gate.measure.job import EvaluationData
        from gate.multi_file.release import MultiFileRelease
        from gate.records.layout import LOCALISATION, PLOTS
        from gate.report.model_charts import depth_chart
        from gate.report.terminal import print_layers
        from gate.summary.render import remedy_for

        data = open_samples(inputs, preprocessing=preprocessing, batch_axes=batch_axes)
        loaded = open_reference(reference, checkpoint=checkpoint)
    with spinner("comparing layers"):
        job = build_job(model, reference=loaded, data=EvaluationData(data), policy=judging_policy)
        release = job.chained
        if isinstance(release, MultiFileRelease):
            localization = locate_part(job, release, runtime=runtime, limit=samples)
            job = job if localization.part is None else release.jobs(job)[localization.part]
        else:
            localization = locate(job, runtime=runtime, limit=samples)
        is_onnx, fault = loaded.source.is_onnx, localization.fault_code
        remedy = remedy_for(localization.remedy, onnx_reference=is_onnx, fault=fault)
        localization = localization.model_copy(update={"remedy": remedy})
    if save is not None and localization.layers:
        write_marked_file(job, localization, save)
    chart = None if report is None else report / PLOTS / "localisation.svg"
    if report is not None and chart is not None:
        localization.save(report / LOCALISATION)
        depth = depth_chart(localization)
        if depth is not None:
            files.write_bytes(chart, depth.file())

    def show(console: Console) -> None:
        print_layers(localization, console)
        if chart is not None:
            console.print(f"report  {chart}")
        if save is not None:
            nothing = "not written: no part diverges, so there are no layers to mark"
            console.print(f"marked  {save if localization.layers else nothing}")

    return CommandResult(
        ExitCode.REJECTED if localization.diverges else ExitCode.DONE, localization.to_plain(), show
    )
