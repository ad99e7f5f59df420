"""`gate samples export`, `gate record pack`."""

from __future__ import annotations

from pathlib import Path

import click

from gate.commands import click_types as types
from gate.commands import options
from gate.commands.loaders import open_reference, open_samples
from gate.commands.progress import progress_bar
from gate.commands.result import CommandResult, machine_options, text_result


@click.group("record", short_help="Pack outputs of another machine.")
def record_command() -> None:
    """Pack outputs of another machine for gate check --recorded.

    \b
    Examples:
      gate record pack model.onnx --inputs samples.npy --outputs logits.npy \\
          --meta meta.json -o recordings/phone
      gate record pack model.onnx --inputs samples.npy --outputs logits.npy \\
          --meta meta.json -o phone.zip --json
    """


@record_command.command("pack", short_help="Pack outputs of another machine.")
@options.MODEL
@click.option(
    "--inputs", type=types.SENT, required=True,
    help="The samples, or the folder that gate samples export wrote.",
)  # fmt: skip
@click.option(
    "--outputs", type=types.OUTPUTS, required=True,
    help="Outputs, samples on axis 0: FILE.npy, FILE.npz with one array per output, a folder of "
    "such files, or a folder with outputs.json, which includes the probes.",
)  # fmt: skip
@click.option(
    "--meta", type=types.META_FILE, required=True,
    help="JSON: runtime, version, device, precision, recorded_at; model_sha256 if the machine "
    "computed it.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=options.FILE, required=True, metavar="DIR|FILE.zip",
    help="A new folder or zip file.",
)  # fmt: skip
@machine_options
def _pack(model: Path, inputs: Path, outputs: Path, meta: Path, output: Path) -> CommandResult:
    """Pack outputs into a recording of MODEL.onnx, bound to the file and to each sample.

    \b
    Examples:
      gate record pack model.onnx --inputs samples.npy --outputs logits.npy \\
          --meta meta.json -o recordings/phone
      gate record pack model.onnx --inputs for-the-phone --outputs from-the-phone \\
          --meta meta.json -o phone.zip
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --recorded phone=phone.zip
    """
    from gate.distributed.external_runtime import Packing, read_recording_source
    from gate.onnx_file.reading import read_subject

    packing = Packing(read_subject(model), inputs, outputs, read_recording_source(meta))
    manifest = packing.write(output)
    whence, probes = manifest.whence, len(manifest.parts) - 1
    missing = "No probes, although gate check requires them: use gate samples export"
    return text_result(
        {"path": str(output), "manifest": manifest.to_plain()},
        f"{output}: {manifest.samples.size} samples, {probes} probes",
        f"by {whence.runtime} {whence.version} on {whence.device}, {whence.precision}",
        *([] if probes else [missing]),
        f"Next: gate check MODEL.onnx … --recorded NAME={output}",
    )


@click.group("samples", short_help="Write samples for another machine.")
def samples_command() -> None:
    """Write samples and probes to run on a phone, in a service or with TensorRT.

    \b
    Examples:
      gate samples export model.onnx --inputs samples.npy -o for-the-phone
      gate samples export model.onnx --inputs samples.npy -o for-the-phone --json
    """


@samples_command.command("export", short_help="Write samples and probes for another machine.")
@options.MODEL
@options.INPUTS
@options.BATCH_AXIS
@options.PICTURE_SPEC
@click.option(
    "-o", "--output", type=types.NEW_FOLDER, required=True, metavar="DIR", help="A new folder."
)
@click.option(
    "--reference", type=types.Factory(), metavar="PKG.MODULE:FACTORY",
    help="The PyTorch model, which is needed for some probes.",
)  # fmt: skip
@options.CHECKPOINT
@options.policy_option("Policy of the later gate check; it selects the probes. Default: built-in.")
@options.BATCH_SIZE
@machine_options
def _export(
    model: Path,
    inputs: str,
    batch_axes: tuple[tuple[str, int | None], ...],
    preprocessing: Path | None,
    output: Path,
    reference: str | None,
    checkpoint: Path | None,
    policy: Path | None,
    batch_size: int,
) -> CommandResult:
    """Write the samples and probes of MODEL.onnx as .npy and as raw little-endian numbers, and a
    list of them, samples.json.

    Run them on the other machine, write the outputs and outputs.json into one folder, and use gate
    record pack. docs/recorded.md has programs in Rust and C++.

    \b
    Examples:
      gate samples export model.onnx --inputs samples.npy -o for-the-phone
      gate samples export model.onnx --inputs samples.npz --policy params.yaml \\
          --reference mypackage.models:build --checkpoint model.safetensors -o for-the-phone
    """
    from gate.distributed.external_runtime import Sending
    from gate.onnx_file.reading import read_subject
    from gate.onnx_file.tested_file import TestedFile
    from gate.policy.policy import Policy

    torch_model = None
    if reference is not None:
        torch_model = open_reference(reference, checkpoint=checkpoint).module
    sending = Sending(
        TestedFile(model, read_subject(model)),
        open_samples(inputs, preprocessing=preprocessing, batch_axes=batch_axes),
        Policy.from_file(policy) if policy else Policy.default(),
        torch_model,
        batch_size,
    )
    with progress_bar("writing") as progress:
        header = sending.write(output, progress=progress)
    missing = "Probes that depend on the model are not included: add --reference"
    return text_result(
        {"path": str(output), "header": header.to_plain()},
        f"{output}: {header.parts[0].size} samples, {len(header.parts) - 1} probes",
        *([missing] if torch_model is None else []),
        f"Run them on the other machine, then: gate record pack MODEL.onnx --inputs {output} "
        "--outputs DIR --meta meta.json -o RECORDING",
    )
