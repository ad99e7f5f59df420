"""`gate record`: what a runtime elsewhere answered becomes a recording."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.commands.given import META_FILE, NEW_RECORDING, OUTPUTS, SENT
from gate.commands.options import MODEL
from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.runtimes.recording.manifest import RecordingManifest


class _Request(TypedDict):
    """The options, as parsed."""

    model: Path
    inputs: Path
    outputs: Path
    meta: Path
    output: Path


@click.group("record", short_help="Pack outputs that were computed elsewhere.")
def command() -> None:
    """Pack outputs that were computed elsewhere, for gate check --recorded.

    \b
    Examples:
      gate record pack model.onnx --inputs samples.npy --outputs logits.npy \\
          --meta meta.json -o recordings/phone
      gate record pack model.onnx --inputs samples.npy --outputs logits.npy \\
          --meta meta.json -o phone.zip --json
    """


@command.command("pack", short_help="Pack outputs that were computed elsewhere.")
@MODEL
@click.option(
    "--inputs", type=SENT, required=True,
    help="The samples that were computed, or the folder that gate samples export wrote.",
)  # fmt: skip
@click.option(
    "--outputs", type=OUTPUTS, required=True,
    help="What came out, samples on axis 0: FILE.npy, FILE.npz with one array per output, a folder "
    "of such; or a folder with outputs.json, which has the probes, too.",
)  # fmt: skip
@click.option(
    "--meta", type=META_FILE, required=True,
    help="JSON: runtime, version, device, precision, recorded_at; model_sha256 if it was computed "
    "where the file ran.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=NEW_RECORDING, required=True, metavar="DIR|FILE.zip",
    help="A new folder, or a new zip.",
)  # fmt: skip
@machine_options
def _pack(**request: Unpack[_Request]) -> Outcome:
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
    from gate.onnxfile.subject import read_subject
    from gate.parity.elsewhere.packing import Packing, read_whence

    packing = Packing(
        read_subject(request["model"]),
        request["inputs"],
        request["outputs"],
        read_whence(request["meta"]),
    )
    output = request["output"]
    manifest = packing.write(output)
    return Outcome(
        Status.DONE,
        {"path": str(output), "manifest": manifest.to_plain()},
        lambda console: _show(output, manifest, console),
    )


def _show(output: Path, manifest: RecordingManifest, console: Console) -> None:
    from gate.story.wording import printable

    whence, probes = manifest.whence, len(manifest.parts) - 1
    console.print(f"{output}: {manifest.samples.size} samples, {probes} probes")
    console.print(
        printable(f"by {whence.runtime} {whence.version} on {whence.device}, {whence.precision}")
    )
    if not probes:
        console.print("Without probes: gate samples export writes them, and they will be asked for")
    console.print(f"Judge it: gate check MODEL.onnx … --recorded NAME={output}")
