"""`gate export`, `gate quantize`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gate.commands import click_types as types
from gate.commands import options
from gate.commands.loaders import load_export_settings, open_reference
from gate.commands.progress import loading, progress_bar, spinner
from gate.commands.result import (
    CommandResult,
    Dispatch,
    ExitCode,
    Parsed,
    machine_options,
    text_result,
)
from gate.errors import ExportRefused, PolicyError
from gate.storage.safe_text import make_printable

if TYPE_CHECKING:
    from gate.export.export import Exported
    from gate.export.quantize import QuantizeSettings
    from gate.records.evidence import ExportRecord, Subject, TensorSpec
    from gate.records.export import ExportSettings


_AXIS = re.compile(r"(?P<name>\S+):(?P<axis>\d+)=(?P<label>[^\s=]+)")


def _parse_opset(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"{text!r} is neither auto nor a number")
    return text if text == "auto" else int(text)


def _split_axis(text: str) -> tuple[str, tuple[int, str]]:
    parsed = _AXIS.fullmatch(text)
    if parsed is None:
        raise ValueError
    return parsed["name"], (int(parsed["axis"]), parsed["label"])


_OPTIONS = (
    click.option(
        "--strategy", type=click.Choice(["ladder", *options.STRATEGIES]),
        help="ladder (default): try all and use the first whose file matches the model.",
    ),
    click.option(
        "--opset", type=Parsed("opset", _parse_opset), metavar="13|auto",
        help="auto (default without --settings): the lowest from 13 on that works.",
    ),
    click.option(
        "--dynamic", multiple=True, metavar="NAME:AXIS=LABEL",
        type=types.Named("axis", "NAME:AXIS=LABEL, such as image:2=height", _split_axis),
        help="A dynamic axis in addition to the batch axis. Output axes follow from the inputs; "
        "naming one requires it to be dynamic. Repeatable.",
    ),
    click.option(
        "--batch-axis", "batch_axes", multiple=True, metavar="NAME=AXIS|none",
        type=types.NAMED_AXIS,
        help="The batch axis of an input, or none if it has no batch axis. Default: axis 0; a "
        "scalar has none. Repeatable.",
    ),
    click.option(
        "--output-names", metavar="A,B",
        help="In the order of the returned tensors. Default: the keys and fields of what forward "
        "returns, in their order, else output_0, output_1, or output.",
    ),
    click.option(
        "--settings", type=types.SETTINGS_FILE, metavar="FILE.yaml",
        help="YAML with an 'export:' section, such as params.yaml, for these and further settings "
        "(docs/export.md); options override it.",
    ),
    click.option(
        "--lint/--no-lint", default=True, show_default=True,
        help="Skip strategies for which gate lint finds errors in the model's source.",
    ),
)  # fmt: skip


def settings_of(options: Mapping[str, Any]) -> ExportSettings:
    """Return the export settings. Raises PolicyError and BadParameter."""
    from pydantic import ValidationError

    from gate.records.export import ExportSettings
    from gate.storage.yaml_section import first_problem

    base = load_export_settings(options["settings"])
    try:
        return ExportSettings(**{**dict(base), **dict(_changes(options, base))})
    except ValidationError as error:
        raise PolicyError(first_problem(error)) from error


def _changes(options: Mapping[str, Any], base: ExportSettings) -> Iterator[tuple[str, Any]]:
    yield from ((name, options[name]) for name in ("strategy", "opset") if options[name])
    if not options["lint"]:
        yield "lint", "off"
    if (names := options["output_names"]) is not None:
        yield "output_names", tuple(names.split(","))
    if options["dynamic"]:
        axes = {name: dict(labels) for name, labels in base.dynamic_axes.items()}
        for name, (axis, label) in options["dynamic"]:
            axes.setdefault(name, {})[axis] = label
        yield "dynamic_axes", axes
    if options["batch_axes"]:
        yield "batch_axes", {**base.batch_axes, **dict(options["batch_axes"])}


SUBCOMMANDS = {"compare": "gate.commands.export_compare:command"}
"""Name to module and function."""


@click.command(
    "export", cls=Dispatch, subcommands=SUBCOMMANDS,
    short_help="Export a PyTorch model to an ONNX file.",
)  # fmt: skip
@click.argument("factory", type=types.Factory(), metavar="PKG.MODULE:FACTORY", required=False)
@click.option(
    "--example-input", type=types.SAMPLES, metavar="FILE",
    help="Samples on axis 0: FILE.npy, or FILE.npz with one array per input. Arrays are matched to "
    "arguments of forward by name (batch.image for a dict or tuple), else by position. Required "
    "without --recipe.",
)  # fmt: skip
@click.option(
    "--output", type=types.NEW_FILE, required=True, metavar="MODEL.onnx", help="Output file."
)
@click.option(
    "--recipe", type=types.RECIPE_FILE, metavar="recipe.yaml",
    help="Write the file that gate mend found, byte for byte. The recipe names the model, the "
    "samples and all settings, so only --output goes with it.",
)  # fmt: skip
@options.WEIGHTS
@click.option(
    "--submodule", metavar="PATH",
    help="Export only this submodule, for example model.bbox_head, for a release of several files. "
    "--example-input has its inputs.",
)  # fmt: skip
@options.with_options(_OPTIONS)
@options.spec_option("Preprocessing spec (gate preprocess); its digest is stored in the file.")
@machine_options
def command(**request: Any) -> CommandResult:
    """Export the model of FACTORY to an ONNX file, and record every setting.

    FACTORY is a callable without arguments that returns the nn.Module. The strategy ladder tries
    all strategies in order and uses the first whose file is valid and matches the model at every
    dynamic size. It prints why the earlier ones failed. MODEL.onnx.export.json records the export
    for gate check --export-record. Use gate check to judge the file.

    docs/export.md describes every setting.

    Exit code 0: exported; 1: refused by gate lint; 2: failed, with the exporters' output in
    MODEL.onnx.export.log.

    \b
    Subcommand, with its own --help:
      gate export compare                   every strategy and opset, measured

    \b
    Examples:
      gate export mypackage.models:build --example-input samples.npy --output model.onnx
      gate export mypackage.models:build --checkpoint model.safetensors --opset 13 \\
          --example-input samples.npz --output model.onnx --dynamic image:2=height
      gate export mypackage.models:build --submodule encoder --example-input samples.npy \\
          --output encoder.onnx
      gate export mypackage.models:build --example-input samples.npy --output model.onnx \\
          --strategy dynamo --json
      gate export --recipe mended/recipe.yaml --output model.onnx
    """
    if request["recipe"] is not None:
        return _export_recipe(request["recipe"], request["output"])
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in ("factory", "example_input") and not context.params[parameter.name]:
            raise click.MissingParameter(ctx=context, param=parameter)

    try:
        with spinner("exporting"):
            return _export(request)
    except ExportRefused as refused:
        lines = [make_printable(line) for line in str(refused).splitlines()]
        status = ExitCode.REJECTED
        return text_result({"refused": lines}, *lines, status=status, style="bold red")


_WITH_RECIPE = ("recipe", "output")


def _export_recipe(path: Path, output: Path) -> CommandResult:
    """Write the file of a recipe. Raises UsageError for options that the recipe states."""
    from gate.mend.recipe import Recipe, rebuild
    from gate.onnx_file.tested_file import note_path

    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        stated = source is ParameterSource.COMMANDLINE and parameter.expose_value
        if stated and parameter.name not in _WITH_RECIPE:
            name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.metavar
            raise click.UsageError(
                f"{name} can't be combined with --recipe, which already sets it. Remove it."
            )
    recipe = Recipe.read(path)
    with spinner("exporting"):
        note = rebuild(recipe, output)
    record = None if note is None else str(note_path(output))
    plain = {
        "file": str(output),
        "record": record,
        "recipe": recipe.to_plain(),
        "export": None if note is None else note.record.to_plain(),
    }

    lines = [f"file    {output} {recipe.sha256}, as {path} states"]
    return text_result(plain, *lines, *([] if record is None else [f"record  {record}"]))


def _export(request: Mapping[str, Any]) -> CommandResult:
    import warnings

    from gate.data.samples import SampleSet
    from gate.export.export import log_of, self_check, staged
    from gate.measure.job import Reference
    from gate.multi_file.chain_model import module_of
    from gate.onnx_file.tested_file import ExportNote, note_path

    settings = settings_of(request)
    reference = Reference.from_factory(
        request["factory"],
        checkpoint=request["checkpoint"],
        preprocessing=request["preprocessing"],
        untrained=True,
    )
    model, path = reference.module, request["submodule"]
    if path is not None:
        model = module_of(model, path, part=path)
    samples = SampleSet.open(request["example_input"])
    named = any("batch" in labels.values() for labels in settings.dynamic_axes.values())
    if samples.count and not settings.batch_axes and not named:
        example = next(samples.batches(min(len(samples), 2 * settings.batch_size + 2)))
    else:  # all samples, in the layout of the model
        example = samples.whole()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the model's code; exporter warnings are recorded
        with staged(
            model,
            example,
            settings=settings,
            output=request["output"],
            source=reference.source,
        ) as exported:
            checked = self_check(model, exported, example)
    note = note_path(request["output"])
    ExportNote.from_record(exported.subject, exported.record).save(note)
    plain = {
        "file": str(request["output"]),
        "record": str(note),
        "subject": exported.subject.to_plain(),
        "export": exported.record.to_plain(),
        "source": reference.source.to_plain(),
        "self_check": checked,
        "log": str(log_of(request["output"])) if settings.verbose else None,
    }
    rows = [*_rows(plain, exported), ("next", _next_command(request, note))]
    return text_result(plain, *(f"{label:<12}{text}" for label, text in rows))


def _rows(plain: Mapping[str, Any], exported: Exported) -> list[tuple[str, str]]:
    subject, record, output = exported.subject, exported.record, Path(plain["file"])
    return [
        ("file", f"{output} {subject.sha256}, {subject.size_bytes} bytes"),
        *(("data", str(output.with_name(name))) for name in subject.external_data),
        ("record", plain["record"]),
        *([("log", plain["log"])] if plain["log"] else []),
        ("strategy", f"{record.strategy}, opset {subject.opset}"),
        *(("  failed", line) for line in record.rungs),
        *(("input", _spec(spec)) for spec in subject.inputs),
        *(("output", _spec(spec)) for spec in subject.outputs),
        ("self-check", ", ".join(f"{name} {v:.3g}" for name, v in plain["self_check"].items())
         or "not possible: no runtime of the gate runs this file"),
        *(("see", f"{f.code} {f.level} at {f.location}: {f.message}")
          for f in record.lint if not f.suppressed),
        *(("see", line)
          for line in (*record.tracer_warnings, *record.hazards, *record.notices)),
    ]  # fmt: skip


def _next_command(request: Mapping[str, Any], note: Path) -> str:
    output, path = request["output"], request["submodule"]
    reference = f"--reference {request['factory']}"
    if request["checkpoint"]:
        reference += f" --checkpoint {request['checkpoint']}"
    if path is not None:
        part = f"{{file: {output.name}, reference: {path}}}"
        return f"write {part} into release.yaml, gate check release.yaml {reference} --inputs FILE"
    return (
        f"gate check {output} {reference} --inputs {request['example_input']} "
        f"--export-record {note}"
    )


def _spec(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} ({', '.join(map(str, spec.shape))})"


@click.command("quantize", short_help="Quantize an ONNX file to int8.")
@options.MODEL
@click.option(
    "--calibration", type=types.SAMPLES, required=True,
    help="Representative samples, different from those of gate check: FILE.npy, FILE.npz with one "
    "array per input, or a folder of such files. For a release: the inputs of its chain.",
)  # fmt: skip
@options.BATCH_AXIS
@click.option(
    "--output", type=types.NEW_FILE, required=True,
    help="Output file; for a release, a release file in a new folder.",
)  # fmt: skip
@click.option(
    "--reference", type=types.Factory(), metavar="PKG.MODULE:FACTORY",
    help="For a release: a callable without arguments that returns the nn.Module; its chain "
    "provides the inputs of each part.",
)  # fmt: skip
@options.CHECKPOINT
@click.option(
    "--part", "parts", multiple=True, metavar="NAME",
    help="For a release: quantize only this part. Repeatable. Default: all that can be quantized.",
)  # fmt: skip
@click.option(
    "--samples", type=click.IntRange(min=1), default=128, show_default=True,
    help="Calibrate on the first N samples.",
)  # fmt: skip
@click.option(
    "--settings", type=types.QUANTIZE_SETTINGS_FILE,
    help="Read all settings from YAML with a 'quantize:' section, for example params.yaml or "
    "settings.yaml of gate mend: method, per_channel, reduce_range, layers to exclude.",
)  # fmt: skip
@machine_options
def quantize_command(
    model: Path,
    calibration: Path,
    batch_axes: tuple[tuple[str, int | None], ...],
    output: Path,
    reference: str | None,
    checkpoint: Path | None,
    parts: tuple[str, ...],
    samples: int,
    settings: Path | None,
) -> CommandResult:
    """Quantize MODEL.onnx to int8 with ONNX Runtime's static quantizer. For a release of several
    files (release.yaml), quantize each part on its inputs in the chain.

    The quantized file gives different outputs. Judge it by a policy with precision: quantized; it
    is promoted together with the exact file, never instead of it.

    \b
    Examples:
      gate quantize model.onnx --calibration train.npy --output twin/model.onnx
      gate quantize release.yaml --reference mypackage.models:build --calibration train.npy \\
          --output twin/release.yaml --part encoder
      gate check twin/model.onnx --reference mypackage.models:build --inputs eval.npy \\
          --policy twin.yaml --report twin/report
    """
    from gate.export.quantize import QuantizeSettings
    from gate.onnx_file.release_file import is_release_file

    release_options = {"--reference": reference, "--checkpoint": checkpoint, "--part": parts}
    named = [name for name, value in release_options.items() if value]
    if is_release_file(model) != is_release_file(output):
        raise click.UsageError(
            f"{model} and {output} must both be ONNX files or both release files: use --output "
            "twin/model.onnx for a file, --output twin/release.yaml for a release."
        )
    if named and not is_release_file(model):
        raise click.UsageError(
            f"{', '.join(named)} is for a release (release.yaml), but {model} is a single file. "
            "Remove it."
        )
    source = click.get_current_context().get_parameter_source("samples")
    if settings is not None and source is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            f"--samples and --settings {settings} both set the quantizer. Write all settings into "
            "the file."
        )
    chosen = QuantizeSettings.load(settings) if settings else QuantizeSettings(samples=samples)
    axes = dict(batch_axes)
    if not is_release_file(model):
        return _quantize_file(model, calibration, axes, output, chosen)
    if reference is None:
        raise click.UsageError(
            f"{model} is a release: its parts are calibrated on intermediate values of the model. "
            "Name the model: --reference PKG.MODULE:FACTORY."
        )
    with loading():
        from gate.data.samples import SampleSet
        from gate.multi_file.quantize import ReleaseQuantization

        release = ReleaseQuantization(
            samples=SampleSet.open(calibration).with_batch_axes(axes),
            model=open_reference(reference, checkpoint=checkpoint).module,
            settings=chosen,
            only=parts,
        )
    with progress_bar("calibrating") as progress:
        quantized = replace(release, progress=progress).write(model, output)
    lines, records = [], {}
    for name in quantized.subject.parts:
        record = quantized.records.get(name)
        records[name] = None if record is None else record.to_plain()
        how = "a copy of the exact file" if record is None else f"quantized, {_calibration(record)}"
        lines.append(f"  {name}: {how}")
    files = (quantized.path, quantized.subject, quantized.of)
    return _quantized_result(*files, *lines, kind="release", plain={"parts": records})


def _calibration(record: ExportRecord) -> str:
    return f"calibrated on {record.settings['calibration_samples']} samples"


def _quantized_result(
    path: Path,
    subject: Subject,
    exact: Subject,
    *lines: str,
    kind: str,
    plain: Mapping[str, Any],
    detail: str = "",
) -> CommandResult:
    size, share = subject.size_bytes, subject.size_bytes / exact.size_bytes
    return text_result(
        {"path": str(path), "subject": subject.to_plain(), **plain, "of": exact.to_plain()},
        f"{path}: {subject.sha256}",
        f"{size} bytes, {share:.0%} of the exact {kind}{detail}",
        *lines,
        f"Check it with a policy with precision: quantized, next to the exact {kind}.",
    )


def _quantize_file(
    model: Path,
    calibration: Path,
    axes: dict[str, int | None],
    output: Path,
    settings: QuantizeSettings,
) -> CommandResult:
    from gate.data.batch_axes import arrange, bind_samples
    from gate.data.samples import SampleSet
    from gate.export.quantize import Batches, quantize
    from gate.onnx_file.reading import read_subject

    subject = read_subject(model)
    samples = SampleSet.open(calibration).with_batch_axes(axes)
    samples = arrange(samples, subject.inputs, subject.outputs)
    binding = bind_samples(subject.inputs, samples, batch_size=settings.batch_size)
    with progress_bar("calibrating") as progress:

        def batches() -> Batches:
            calibrated, total = 0, min(settings.samples, len(samples))
            for batch in samples.batches(binding.batch_size):
                calibrated = min(calibrated + binding.batch_size, total)
                progress(calibrated, total)  # before the yield: a consumer may stop early
                yield binding.by_input(batch)

        quantized = quantize(model, batches(), output, settings=settings, axes=samples.layout)
    record, files = quantized.record, (quantized.path, quantized.subject, subject)
    plain, detail = {"export": record.to_plain()}, f"; {_calibration(record)}"
    return _quantized_result(*files, kind="file", plain=plain, detail=detail)
