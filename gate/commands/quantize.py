"""`gate quantize`: the static int8 twin of an exported file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import click

from gate.commands.given import NEW_FILE, SAMPLES
from gate.commands.options import MODEL
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import bar
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.export.quantized import Quantized


class _Request(TypedDict):
    """The options, as parsed."""

    model: Path
    calibration: Path
    output: Path
    samples: int
    method: Literal["minmax", "entropy", "percentile"]
    per_channel: bool
    reduce_range: bool


@click.command("quantize", short_help="Make the int8 twin of an ONNX file.")
@MODEL
@click.option(
    "--calibration", type=SAMPLES, required=True,
    help="Samples like those that will be served, not those it is judged on: FILE.npy, FILE.npz "
    "with one array per input, or a folder of such.",
)  # fmt: skip
@click.option("--output", type=NEW_FILE, required=True, help="The file to write.")
@click.option(
    "--samples", type=click.IntRange(min=1), default=128, show_default=True,
    help="Calibrate on the first N samples.",
)  # fmt: skip
@click.option(
    "--method", type=click.Choice(["minmax", "entropy", "percentile"]), default="minmax",
    show_default=True, help="How a range is taken from the values that were seen.",
)  # fmt: skip
@click.option(
    "--per-channel/--per-tensor", default=True, show_default=True,
    help="A scale for each output channel of a weight, or one for all.",
)  # fmt: skip
@click.option(
    "--reduce-range/--full-range", default=True, show_default=True,
    help="Seven bits for weights: the same answers on processors with and without VNNI.",
)  # fmt: skip
@machine_options
def command(**request: Unpack[_Request]) -> Outcome:
    """Quantize MODEL.onnx to int8 with ONNX Runtime's static quantizer.

    The twin answers otherwise than the exact file, so it is judged by a policy of its own
    (precision: quantized) and promoted beside the exact file, never in its place.

    \b
    Examples:
      gate quantize model.onnx --calibration train.npy --output twin/model.onnx
      gate check twin/model.onnx --reference mypackage.models:build --inputs eval.npy \\
          --policy twin.yaml --report twin/report
    """
    from gate.errors import OnnxFileError
    from gate.export.quantize_settings import QuantizeSettings
    from gate.export.quantized import Batches, quantize
    from gate.onnxfile.release_file import is_release
    from gate.onnxfile.subject import read_subject
    from gate.parity.arrays.binding import bind
    from gate.parity.arrays.samples import Samples

    settings = QuantizeSettings(
        samples=request["samples"],
        method=request["method"],
        per_channel=request["per_channel"],
        reduce_range=request["reduce_range"],
    )
    if is_release(request["model"]):
        raise OnnxFileError(
            f"{request['model']} is a release of several files, which has no quantized twin yet. "
            "Quantize single files only."
        )
    subject = read_subject(request["model"])
    samples = Samples.open(request["calibration"])
    binding = bind(
        subject.inputs, samples.specs, count=len(samples), batch_size=settings.batch_size
    )
    with bar("calibrating") as progress:

        def batches() -> Batches:
            done, total = 0, min(settings.samples, len(samples))
            for batch in samples.batches(binding.batch_size):
                done = min(done + binding.batch_size, total)
                progress(done, total)  # before it is taken: nobody asks for more than enough
                yield binding.by_input(batch)

        made = quantize(request["model"], batches(), request["output"], settings=settings)
    plain = {
        "path": str(made.path),
        "subject": made.subject.to_plain(),
        "export": made.record.to_plain(),
        "of": subject.to_plain(),
    }
    return Outcome(Status.DONE, plain, lambda console: _show(made, subject.size_bytes, console))


def _show(made: Quantized, before: int, console: Console) -> None:
    size = made.subject.size_bytes
    console.print(f"{made.path}: {made.subject.sha256}")
    console.print(
        f"{size} bytes, {size / before:.0%} of the exact file; calibrated on "
        f"{made.record.settings['calibration_samples']} samples"
    )
    console.print("Judge it by a policy with precision: quantized, beside the exact file.")
