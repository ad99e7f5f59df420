"""`gate samples`: what others need in order to run the file on their machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.commands.given import NEW_FOLDER, POLICY_FILE, Factory
from gate.commands.options import CHECKPOINT, INPUTS, MODEL, PICTURE_SPEC
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import bar
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.parity.elsewhere.headers import SamplesHeader


class _Request(TypedDict):
    """The options, as parsed."""

    model: Path
    inputs: str
    preprocessing: Path | None
    output: Path
    reference: str | None
    checkpoint: Path | None
    policy: Path | None
    batch_size: int


@click.group("samples", short_help="Write samples and probes for another machine.")
def command() -> None:
    """Write what has to be computed on a phone, in a service, by TensorRT.

    \b
    Examples:
      gate samples export model.onnx --inputs samples.npy -o for-the-phone
      gate samples export model.onnx --inputs samples.npy -o for-the-phone --json
    """


@command.command("export", short_help="Write samples and probes for another machine.")
@MODEL
@INPUTS
@PICTURE_SPEC
@click.option("-o", "--output", type=NEW_FOLDER, required=True, metavar="DIR", help="A new folder.")
@click.option(
    "--reference", type=Factory(), metavar="PKG.MODULE:FACTORY",
    help="The model of the file: then the probes that it has to be asked about are written, too.",
)  # fmt: skip
@CHECKPOINT
@click.option(
    "--policy", type=POLICY_FILE,
    help="The one that gate check will get: it says which probes there are. Default: the built-in.",
)  # fmt: skip
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=32, show_default=True,
    help="Samples that are computed at once, at most.",
)  # fmt: skip
@machine_options
def _export(**request: Unpack[_Request]) -> Outcome:
    """Write the samples and the probes of MODEL.onnx: as .npy, as raw little-endian numbers, and
    samples.json, which says what is where.

    Run all of it elsewhere, write outputs.json with the outputs beside it, and pack that: gate
    record pack. docs/recorded.md has programs in Rust and C++.

    \b
    Examples:
      gate samples export model.onnx --inputs samples.npy -o for-the-phone
      gate samples export model.onnx --inputs samples.npz --policy params.yaml \\
          --reference mypackage.models:build --checkpoint model.safetensors -o for-the-phone
    """
    from gate.onnxfile.candidate import Candidate
    from gate.onnxfile.subject import read_subject
    from gate.parity.arrays.samples import Samples
    from gate.parity.elsewhere.sending import Sending
    from gate.policy.policy import Policy
    from gate.preprocess.spec import PreprocessSpec

    spec = PreprocessSpec.of_file(request["preprocessing"]) if request["preprocessing"] else None
    policy = Policy.of_file(request["policy"]) if request["policy"] else Policy.default()
    model = None
    if request["reference"] is not None:
        from gate.model.loading import build_model, load_checkpoint

        model = build_model(request["reference"])
        if request["checkpoint"]:
            load_checkpoint(model, request["checkpoint"])
    path = request["model"]
    sending = Sending(
        Candidate(path, read_subject(path)),
        Samples.open(request["inputs"], preprocessing=spec),
        policy,
        model,
        request["batch_size"],
    )
    with bar("writing") as progress:
        header = sending.write(request["output"], progress=progress)
    output, with_model = request["output"], request["reference"] is not None
    return Outcome(
        Status.DONE,
        {"path": str(output), "header": header.to_plain()},
        lambda console: _show(output, header, console, with_model=with_model),
    )


def _show(output: Path, header: SamplesHeader, console: Console, *, with_model: bool) -> None:
    console.print(f"{output}: {header.parts[0].size} samples, {len(header.parts) - 1} probes")
    if not with_model:
        console.print("Probes that the model has to be asked about are not among them: --reference")
    console.print(
        f"Run them elsewhere, then: gate record pack MODEL.onnx --inputs {output} --outputs DIR "
        "--meta meta.json -o RECORDING"
    )
