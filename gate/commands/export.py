"""`gate quantize`: the static int8 twin of an exported file, or of a release of several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import click

from gate.commands.given import NEW_FILE, SAMPLES, Factory
from gate.commands.loading import loading
from gate.commands.options import CHECKPOINT, MODEL
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import bar
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.export.quantize_settings import QuantizeSettings
    from gate.export.quantized import Quantized
    from gate.parts.quantized import QuantizedRelease


class _Request(TypedDict):
    """The options, as parsed."""

    model: Path
    calibration: Path
    output: Path
    reference: str | None
    checkpoint: Path | None
    parts: tuple[str, ...]
    samples: int
    method: Literal["minmax", "entropy", "percentile"]
    per_channel: bool
    reduce_range: bool


@click.command("quantize", short_help="Make the int8 twin of an ONNX file.")
@MODEL
@click.option(
    "--calibration", type=SAMPLES, required=True,
    help="Samples like those that will be served, not those it is judged on: FILE.npy, FILE.npz "
    "with one array per input, or a folder of such. For a release: the inputs of its chain.",
)  # fmt: skip
@click.option(
    "--output", type=NEW_FILE, required=True,
    help="The file to write; for a release its release file, in a folder of its own.",
)  # fmt: skip
@click.option(
    "--reference", type=Factory(), metavar="PKG.MODULE:FACTORY",
    help="For a release: a callable without arguments that returns the nn.Module, whose chain says "
    "what each part is given.",
)  # fmt: skip
@CHECKPOINT
@click.option(
    "--part", "parts", multiple=True, metavar="NAME",
    help="Of a release quantize this part only; the others stay as they are. Repeatable. Default: "
    "all that can be.",
)  # fmt: skip
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
    """Quantize MODEL.onnx to int8 with ONNX Runtime's static quantizer; of a release of several
    files (release.yaml) each part, on what the chain gives it.

    The twin answers otherwise than the exact file, so it is judged by a policy of its own
    (precision: quantized) and promoted beside the exact file, never in its place.

    \b
    Examples:
      gate quantize model.onnx --calibration train.npy --output twin/model.onnx
      gate quantize release.yaml --reference mypackage.models:build --calibration train.npy \\
          --output twin/release.yaml --part encoder
      gate check twin/model.onnx --reference mypackage.models:build --inputs eval.npy \\
          --policy twin.yaml --report twin/report
    """
    from gate.export.quantize_settings import QuantizeSettings
    from gate.onnxfile.release_file import is_release

    model, output = request["model"], request["output"]
    of_release = [f"--{name}" for name in ("reference", "checkpoint") if request[name]]
    of_release += ["--part"] if request["parts"] else []
    if is_release(model) != is_release(output):
        raise click.UsageError(
            f"{model} and {output} are not of one kind: the twin of a release is a release "
            "(--output twin/release.yaml), that of a file a file (--output twin/model.onnx)."
        )
    if of_release and not is_release(model):
        raise click.UsageError(
            f"{', '.join(of_release)} is for a release (release.yaml): the one file {model} is "
            "calibrated on the samples themselves."
        )
    settings = QuantizeSettings(
        samples=request["samples"],
        method=request["method"],
        per_channel=request["per_channel"],
        reduce_range=request["reduce_range"],
    )
    return _release(request, settings) if is_release(model) else _file(request, settings)


def _file(request: _Request, settings: QuantizeSettings) -> Outcome:
    from gate.export.quantized import Batches, quantize
    from gate.onnxfile.subject import read_subject
    from gate.parity.arrays.binding import bind
    from gate.parity.arrays.samples import Samples

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


def _release(request: _Request, settings: QuantizeSettings) -> Outcome:
    factory = request["reference"]
    if factory is None:
        raise click.UsageError(
            f"{request['model']} is a release: its parts are calibrated on what the model's chain "
            "gives them. Name the model: --reference PKG.MODULE:FACTORY."
        )
    with loading():
        from gate.model.loading import build_model, load_checkpoint
        from gate.parity.arrays.samples import Samples
        from gate.parts.quantized import ReleaseQuantization

        samples = Samples.open(request["calibration"])
        model = build_model(factory)
        if request["checkpoint"] is not None:
            load_checkpoint(model, request["checkpoint"])
    with bar("calibrating") as progress:
        made = ReleaseQuantization(
            model=model,
            samples=samples,
            settings=settings,
            only=request["parts"],
            progress=progress,
        ).write(request["model"], request["output"])
    plain = {
        "path": str(made.path),
        "subject": made.subject.to_plain(),
        "parts": {
            name: made.records[name].to_plain() if name in made.records else None
            for name in made.subject.parts
        },
        "of": made.of.to_plain(),
    }
    return Outcome(Status.DONE, plain, lambda console: _show_release(made, console))


def _show_release(made: QuantizedRelease, console: Console) -> None:
    size, before = made.subject.size_bytes, made.of.size_bytes
    console.print(f"{made.path}: {made.subject.sha256}")
    console.print(f"{size} bytes, {size / before:.0%} of the exact release")
    for name in made.subject.parts:
        record = made.records.get(name)
        how = (
            "the exact file, byte by byte"
            if record is None
            else f"quantized, calibrated on {record.settings['calibration_samples']} samples"
        )
        console.print(f"  {name}: {how}")
    console.print("Judge it by a policy with precision: quantized, beside the exact release.")


def _show(made: Quantized, before: int, console: Console) -> None:
    size = made.subject.size_bytes
    console.print(f"{made.path}: {made.subject.sha256}")
    console.print(
        f"{size} bytes, {size / before:.0%} of the exact file; calibrated on "
        f"{made.record.settings['calibration_samples']} samples"
    )
    console.print("Judge it by a policy with precision: quantized, beside the exact file.")
