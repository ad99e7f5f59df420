"""`gate export`: a model to an ONNX file, by the first strategy that carries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from gate.commands.dispatch import Dispatch
from gate.commands.export_settings import SettingOptions, setting_options, settings_of
from gate.commands.given import NEW_FILE, SAMPLES, SPEC_FILE
from gate.commands.options import FACTORY, WEIGHTS
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.export.export import Exported
    from gate.records.evidence import TensorSpec

SUBCOMMANDS = {"compare": "gate.commands.export_compare"}
"""Name to module."""


class _Question(SettingOptions):
    """The options, as parsed."""

    factory: str
    example_input: Path
    output: Path
    checkpoint: Path | None
    preprocessing: Path | None
    submodule: str | None


@click.command(
    "export", cls=Dispatch, subcommands=SUBCOMMANDS,
    short_help="Export a PyTorch model to an ONNX file.",
)  # fmt: skip
@FACTORY
@click.option(
    "--example-input", type=SAMPLES, required=True, metavar="FILE",
    help="Samples on axis 0: FILE.npy, or FILE.npz with one array per input. Arrays that are named "
    "as arguments of forward go there, batch.image into a dict or tuple; others by position.",
)  # fmt: skip
@click.option(
    "--output", type=NEW_FILE, required=True, metavar="MODEL.onnx", help="The file to write."
)
@WEIGHTS
@click.option(
    "--submodule", metavar="PATH",
    help="Export this module of the model, model.bbox_head, as a part of a release of several "
    "files. --example-input has its inputs.",
)  # fmt: skip
@setting_options
@click.option(
    "--preprocessing", type=SPEC_FILE, metavar="SPEC",
    help="How pictures become the input (gate preprocess): its digest goes into the file.",
)  # fmt: skip
@machine_options
def command(**question: Unpack[_Question]) -> Outcome:
    """Export the model of FACTORY to one ONNX file that says how it was made.

    FACTORY is a callable without arguments that returns the nn.Module; found from this folder too.
    Of a ladder, the first strategy carries whose file is valid and computes what the model
    computes, at every size that is dynamic; why the earlier ones did not is told, and stands in
    the file's metadata. MODEL.onnx.export.json holds all that is known of the export, for
    gate check --export-record. Whether the file is exact, gate check judges.

    Every setting, and what becomes of it in the file: docs/export.md.

    Exit code 0: done; 1: refused by the rules of gate lint; 2: could not. What the exporters
    printed is then in MODEL.onnx.export.log.

    \b
    Examples:
      gate export mypackage.models:build --example-input samples.npy --output model.onnx
      gate export mypackage.models:build --checkpoint model.safetensors --opset 13 \\
          --example-input samples.npz --output model.onnx --dynamic image:2=height
      gate export mypackage.models:build --submodule encoder --example-input samples.npy \\
          --output encoder.onnx
      gate export mypackage.models:build --example-input samples.npy --output model.onnx \\
          --strategy dynamo --json
    """
    from gate.errors import ExportRefused

    try:
        with spinner("exporting"):
            return _export(question)
    except ExportRefused as refused:
        return _refused(str(refused))


def _refused(why: str) -> Outcome:
    from gate.story.wording import printable

    lines = [printable(line) for line in why.splitlines()]
    return Outcome(
        Status.REJECTED,
        {"refused": lines},
        lambda console: console.print("\n".join(lines), style="bold red", markup=False),
    )


def _export(question: _Question) -> Outcome:
    import warnings

    from gate.export.export import log_of, staged
    from gate.export.self_check import self_check
    from gate.front_door import Reference
    from gate.onnxfile.export_note import ExportNote, note_path
    from gate.parity.arrays.samples import Samples
    from gate.parts.chain import module_of

    settings = settings_of(question)
    reference = Reference.load(
        question["factory"],
        checkpoint=question["checkpoint"],
        preprocessing=question["preprocessing"],
    )
    model, path = reference.model, question["submodule"]
    if path is not None:
        model = module_of(model, path, part=path)
    samples = Samples.open(question["example_input"])
    example = next(samples.batches(min(len(samples), 2 * settings.batch_size + 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model's own code; the exporters' are recorded
        with staged(
            model,
            example,
            settings=settings,
            output=question["output"],
            source=reference.source,
        ) as exported:
            checked = self_check(model, exported, example)
    note = note_path(question["output"])
    ExportNote.of(exported.subject, exported.record).save(note)
    plain = {
        "file": str(question["output"]),
        "record": str(note),
        "subject": exported.subject.to_plain(),
        "export": exported.record.to_plain(),
        "source": reference.source.to_plain(),
        "self_check": checked,
        "log": str(log_of(question["output"])) if settings.verbose else None,
    }
    return Outcome(Status.DONE, plain, lambda out: _show(question, exported, checked, out))


def _show(
    question: _Question, exported: Exported, checked: dict[str, float], console: Console
) -> None:
    from gate.export.export import log_of
    from gate.onnxfile.export_note import note_path
    from gate.story.wording import printable

    subject, record, output = exported.subject, exported.record, question["output"]
    weights = f" --checkpoint {question['checkpoint']}" if question["checkpoint"] else ""
    rows = [
        ("file", f"{output} {subject.sha256}, {subject.size_bytes} bytes"),
        *(("data", str(output.with_name(name))) for name in subject.external_data),
        ("record", str(note_path(output))),
        *(("log", str(log_of(output))) for _ in range(exported.settings.verbose)),
        ("strategy", f"{record.strategy}, opset {subject.opset}"),
        *(("  not by", line) for line in record.rungs),
        *(("input", _spec(spec)) for spec in subject.inputs),
        *(("output", _spec(spec)) for spec in subject.outputs),
        ("self-check", ", ".join(f"{name} {value:.3g}" for name, value in checked.items())
         or "not possible: no runtime of the gate runs this file"),
        *(("look at", f"{f.code} {f.level} at {f.place}: {f.message}")
          for f in record.lint if not f.suppressed),
        *(("look at", line)
          for line in (*record.tracer_warnings, *record.hazards, *record.notices)),
        ("next", _next(question, weights)),
    ]  # fmt: skip
    for label, text in rows:
        console.print(f"{label:<12}{printable(text)}")


def _next(question: _Question, weights: str) -> str:
    from gate.onnxfile.export_note import note_path

    output, path = question["output"], question["submodule"]
    reference = f"--reference {question['factory']}{weights}"
    if path is not None:
        part = f"{{file: {output.name}, reference: {path}}}"
        return f"write {part} into release.yaml, gate check release.yaml {reference} --inputs FILE"
    return (
        f"gate check {output} {reference} --inputs {question['example_input']} "
        f"--export-record {note_path(output)}"
    )


def _spec(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} ({', '.join(map(str, spec.shape))})"
