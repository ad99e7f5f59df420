"""`gate mend`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate import __version__
from gate.commands.click_types import NEW_FOLDER, ONNX_FILE, SETTINGS_FILE
from gate.commands.loaders import load_export_settings
from gate.commands.options import MEASURING, MeasuringRequest, quoted_options, with_options
from gate.commands.progress import loading
from gate.commands.result import TIME, CommandResult, ExitCode, machine_options, table_result
from gate.errors import GateError
from gate.installation import is_installed
from gate.storage.digest import Digest
from gate.storage.files import scratch, temporary_folder
from gate.storage.safe_text import make_printable

if TYPE_CHECKING:
    from gate.measure.job import EvaluationData, Reference
    from gate.mend.plan import MendPlan, Outcome, Winner
    from gate.mend.recipe import Inputs, Recipe
    from gate.mend.search import MendRecord, Search, Trial
    from gate.policy.policy import Policy
    from gate.records.export import ExportSettings

_TRIALS, _LOG, _POLICY = "trials.json", "trials.jsonl", "policy.json"

_SETTINGS, _EXACT = "settings.yaml", "exact.onnx"
"""The settings and the float32 file of an int8 result, the inputs of gate quantize."""

_MODEL, _RECIPE = "model.onnx", "recipe.yaml"

_WRITTEN = (_MODEL, f"{_MODEL}.export.json", _POLICY, _SETTINGS, _EXACT)
"""The files that a search writes in addition to its trials and the recipe."""

_NOT_SEARCHED = ("incumbent", "preprocessing")
"""Policy sections that do not depend on how the model is exported; the search ignores them."""

_CANDIDATES, _CONVERTED = 60, 600
"""Number of candidates that the default budget covers, for precision exact and for others."""

_SHOWN = 3
"""How many reasons of failed trials are printed."""


@dataclass(frozen=True, kw_only=True)
class _Request(MeasuringRequest):
    """The options, as parsed."""

    file: Path | None
    export_settings: Path | None
    budget: int | None
    time_s: float | None
    output: Path


@click.command("mend", short_help="Search for an export that passes, and verify it.")
@with_options(MEASURING)
@click.option(
    "--file", type=ONNX_FILE, metavar="MODEL.onnx",
    help="The rejected file. It is tried first, and the names of its inputs and outputs are kept.",
)  # fmt: skip
@click.option(
    "--settings", "export_settings", type=SETTINGS_FILE, metavar="FILE.yaml",
    help="YAML with an 'export:' section, such as params.yaml. A strategy or opset that is set "
    "there is not searched.",
)  # fmt: skip
@click.option(
    "--budget", type=click.IntRange(min=1), metavar="N",
    help="Maximum number of forward passes (one sample on one candidate), for example --budget "
    f"2000. Default: enough for {_CANDIDATES} candidates, for float16 and int8 {_CONVERTED}.",
)  # fmt: skip
@click.option(
    "--time", "time_s", type=TIME, metavar="30m",
    help="End the search after this time. Without this option the result is deterministic.",
)  # fmt: skip
@click.option(
    "--output", type=NEW_FOLDER, required=True, metavar="DIR",
    help="Write the file, recipe.yaml and the trials here. A search that was interrupted continues "
    "from the trials in it.",
)  # fmt: skip
@machine_options
def command(**options: Any) -> CommandResult:
    """Search for an export of the PyTorch model that passes the policy at the least cost.

    Tries exporter strategies and opsets, then disables the ONNX Runtime optimizers that cause the
    difference, then replaces operators by equivalent ones. With precision reduced or quantized, it
    then converts the file and keeps as few layers as possible in float32. The search uses one half
    of the samples; the result is verified on the other half. gate export --recipe DIR/recipe.yaml
    reproduces the file.

    Exit code 0: a file passes; 1: none does; 2: no candidate could be measured.

    \b
    Examples:
      gate mend --reference mypackage.models:build --inputs samples.npy --output mended
      gate mend --reference mypackage.models:build --checkpoint model.safetensors \\
          --inputs samples.npy --policy params.yaml --file model.onnx --output mended
      gate mend --reference mypackage.models:build --inputs samples.npy --output mended \\
          --budget 2000 --time 30m --json
      gate mend --reference mypackage.models:build --inputs samples.npy --output mended \\
          --precision reduced
    """
    from gate.commands.evaluate import policy_from_options

    return _mend(_Request(**options), policy_from_options(**options))


def _mend(request: _Request, policy: Policy) -> CommandResult:
    """Run the search and write the folder. Raises GateError if the search can't start."""
    started = time.monotonic()
    _check_output_folder(request)
    _refuse_external_runtimes(policy)
    with loading():
        from gate.measure.job import Reference
        from gate.mend.plan import MendPlan, names_of
        from gate.mend.recipe import Builder, calibration_of, example_of, halves
        from gate.mend.search import Search, TrialLog

        data = request.open_data(policy)
        samples = halves(data, min_samples=policy.min_samples)
        reference = Reference.from_factory(
            request.reference, checkpoint=request.checkpoint, preprocessing=request.preprocessing
        )
    if reference.source.is_onnx and request.file is None:
        raise click.UsageError(
            f"--reference {request.reference} is an ONNX file, which can't be exported again. "
            "Name the file to fix: --file MODEL.onnx."
        )
    settings = load_export_settings(request.export_settings)
    batch_axes = {**settings.batch_axes, **dict(request.batch_axes)}
    settings = settings.model_copy(update={"batch_axes": batch_axes})
    searched = policy.model_copy(update=dict.fromkeys(_NOT_SEARCHED))
    inputs = _inputs(request, reference, data)
    identity = _identity(request, reference, data, inputs, searched, settings)
    count = _CANDIDATES if policy.precision == "exact" else _CONVERTED
    budget = request.budget or count * len(samples[0].samples) + len(samples[1].samples)
    search = Search(
        reference,
        searched,
        budget,
        deadline=started + request.time_s if request.time_s else float("inf"),
        progress=_print_progress,
        note=lambda text: click.echo(f"  {text}", err=True),
        log=TrialLog.open(request.output / _LOG, identity),
    )
    example, file = example_of(data.samples, settings), request.file
    plan = MendPlan(
        search,
        Builder(reference, example, file, calibration_of(samples[0])),
        settings,
        names_of(file, settings) if file is not None and request.export_settings is None else None,
    )
    with scratch(request.output / "model.onnx") as folder:
        outcome = plan.run(samples, folder)
        recipe = _write(request, plan, outcome, inputs, policy)
    record = _record(search, outcome)
    record.save(request.output / _TRIALS)
    return _result(request, record, recipe, policy)


def _result(
    request: _Request, record: MendRecord, recipe: Recipe | None, policy: Policy
) -> CommandResult:
    unsearched = [name for name in _NOT_SEARCHED if getattr(policy, name) is not None]
    plain = {
        **record.to_plain(),
        "recipe": None if recipe is None else recipe.to_plain(),
        "file": None if recipe is None else str(request.output / "model.onnx"),
    }
    is_interrupted = record.ended_by == "interrupt" and record.winner is None
    return table_result(
        plain,
        _HEADINGS,
        [_cells(trial) for trial in record.trials],
        *(_failed_lines(record) if recipe is None else _passed_lines(request, recipe, unsearched)),
        status=ExitCode.INTERRUPTED if is_interrupted else ExitCode.from_verdict(record.verdict),
        right=_HEADINGS[4:],
        styles=_STYLES,
    )


def _inputs(request: _Request, reference: Reference, data: EvaluationData) -> Inputs:
    from gate.mend.recipe import Inputs
    from gate.onnx_file.reading import read_subject

    file = request.file
    return Inputs(
        factory=request.reference,
        checkpoint=None if request.checkpoint is None else str(request.checkpoint),
        checkpoint_sha256=reference.source.checkpoint_sha256,
        preprocessing=None if request.preprocessing is None else str(request.preprocessing),
        samples=request.inputs,
        samples_sha256=data.samples.digest(),
        batch_axes=dict(request.batch_axes),
        file=None if file is None else str(file),
        file_sha256=None if file is None else read_subject(file).sha256,
    )


def _identity(
    request: _Request,
    reference: Reference,
    data: EvaluationData,
    inputs: Inputs,
    policy: Policy,
    settings: ExportSettings,
) -> Digest:
    """Return the digest of all that determines the trials, which are reused only if it is equal."""
    from gate.mend.recipe import record_of

    export_record = None if request.file is None else record_of(request.file)
    slices = data.annotations.slices_sha256
    return Digest.from_json(
        {
            "gate": __version__,
            "source": reference.source.to_plain(),
            "slices": None if slices is None else str(slices),
            "export_record": None if export_record is None else export_record.to_plain(),
            "inputs": inputs.to_plain(),
            "policy": policy.to_plain(),
            "settings": settings.to_plain(),
            "labels": None if data.labels_sha256 is None else str(data.labels_sha256),
            "batch_size": request.batch_size,
            "versions": versions(),
        }
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages on which the bytes of an export depend."""
    names = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")
    return {name: import_module(name).__version__ for name in names if is_installed(name)}


def _print_progress(search: Search) -> None:
    """Print the last trial, and the best one so far, on stderr."""
    last, best = search.trials[-1], search.best
    line = f"trial {len(search.trials)}: {last.verdict} {last.title}"
    if best is not None and best is not last:
        line += f" (closest so far: {best.verdict} {best.title})"
    click.echo(make_printable(line), err=True)


def _write(
    request: _Request, plan: MendPlan, outcome: Outcome, inputs: Inputs, policy: Policy
) -> Recipe | None:
    """Write the file that passed and its recipe.

    If none passes and the search was complete, remove the files of an earlier search. Raises
    StorageError, OSError.
    """
    from gate.mend.recipe import copy_file, write_yaml
    from gate.mend.search import with_disabled

    output, winner = request.output, outcome.winner
    if winner is None and outcome.ended_by in ("interrupt", "time"):
        return None
    for name in (*_WRITTEN, _RECIPE):
        (output / name).unlink(missing_ok=True)
    if winner is None:
        return None
    recipe = _recipe(request, plan, winner, outcome.ended_by, inputs)
    # The recipe comes first: after a crash it identifies the other files as output of this command.
    recipe.write(output / _RECIPE)
    with_disabled(policy, winner.candidate.disabled_optimizers).save(output / _POLICY)
    if recipe.steps.quantize is not None:  # with the float32 file whose nodes the settings name
        with temporary_folder() as folder:
            exact = recipe.steps.model_copy(update={"quantize": None})
            copy_file(plan.builder.build(exact, Path(folder)), output / _EXACT)
        write_yaml(output / _SETTINGS, {"quantize": recipe.steps.quantize.to_plain()})
    copy_file(winner.path, output / _MODEL)
    return recipe


def _refuse_external_runtimes(policy: Policy) -> None:
    """Raise UsageError if the policy requires a runtime that can't run a new file."""
    from gate.policy.runtime_options import is_recorded, is_server

    for name, runtime in policy.runtimes.items():
        if is_server(policy, name):
            kind, required = "a model server", runtime.required != "never"
        else:
            kind = "a recording"
            required = is_recorded(policy, name) and runtime.required == "always"
        if required:
            raise click.UsageError(
                f"the policy requires '{name}', {kind}, which has no outputs of a new file. Search "
                f"without it (--set runtimes.{name}.required=never), deploy the result, then run "
                "gate check with this policy."
            )


def _check_output_folder(request: _Request) -> None:
    """Raise UsageError if the search would overwrite or remove files of another origin."""
    output = request.output.resolve()
    used = {
        "--file": request.file,
        "--policy": request.policy,
        "--inputs": Path(request.inputs.partition("#")[0]),
        "--checkpoint": request.checkpoint,
        "--labels": request.labels,
        "--slices": request.slices,
        "--preprocessing": request.preprocessing,
        "--settings": request.export_settings,
        "--reference": Path(request.reference),
    }
    for option, path in used.items():
        if path is not None and path.exists() and path.resolve().is_relative_to(output):
            raise click.UsageError(
                f"{option} {path} is in the folder of --output, where files are replaced. Use "
                "another folder for --output."
            )
    present = [name for name in (*_WRITTEN, _RECIPE) if (output / name).exists()]
    if not present:
        return
    with loading():
        from gate.mend.recipe import Recipe
        from gate.onnx_file.reading import read_subject
    try:
        sha256 = Recipe.read(output / _RECIPE).sha256
        is_from_mend = _MODEL not in present or read_subject(output / _MODEL).sha256 == sha256
    except (GateError, OSError):
        is_from_mend = False
    if not is_from_mend:
        raise click.UsageError(
            f"{request.output / present[0]} was not written by gate mend: the folder has no "
            f"{_RECIPE} with the SHA-256 of model.onnx. Move it or use another folder for --output."
        )


def _recipe(
    request: _Request, plan: MendPlan, winner: Winner, ended_by: Any, inputs: Inputs
) -> Recipe:
    from gate.mend.recipe import Recipe, SearchRecord, Verification
    from gate.mend.search import worst_ratio

    evidence, decision = winner.result.evidence, winner.result.decision
    return Recipe(
        stage=winner.candidate.stage,
        inputs=inputs,
        steps=winner.steps,
        session_options={
            name: {"disabled_optimizers": names}
            for name, names in winner.candidate.disabled_optimizers.items()
        },
        float32=winner.candidate.float32,
        sha256=evidence.subject.sha256,
        verified=Verification(
            samples=len(winner.result.job.samples),
            policy_sha256=winner.result.policy.digest(),
            runtimes=tuple(r.runtime for r in evidence.runtimes if r.absent_reason is None),
            worst_ratio=worst_ratio(decision.checks),
            rounded_ratio=winner.rounded_ratio,
            not_measured=tuple(r.runtime for r in evidence.runtimes if r.absent_reason is not None),
        ),
        search=SearchRecord(
            budget=plan.search.budget,
            forwards=plan.search.spent,
            time_limit_s=request.time_s,
            ended_by=ended_by,
        ),
        versions=versions(),
    )


def _record(search: Search, outcome: Outcome) -> MendRecord:
    from gate.mend.search import MendRecord

    best = search.best
    winner = outcome.winner
    is_measured = any(trial.verdict in ("PASS", "FAIL") for trial in search.trials)
    return MendRecord(
        verdict="PASS" if winner is not None else "FAIL" if is_measured else "ERROR",
        ended_by=outcome.ended_by,
        budget=search.budget,
        forwards=search.spent,
        winner=None if winner is None else winner.candidate.title,
        closest=best.title if winner is None and best is not None else None,
        trials=tuple(search.trials),
    )


_HEADINGS = ("stage", "settings", "half", "verdict", "worst ratio", "ms", "MB")

_STYLES = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold red", "not built": "yellow"}

_ENDS = {
    "budget": "The budget of forward passes is used up: use a larger --budget.",
    "time": "The time limit ended the search: the same command continues it.",
    "interrupt": "Interrupted: the same command continues the search.",
    "candidates": "All candidates were tried.",
}

_SHORTENED = {
    "budget": "the budget ended the search for fewer float32 layers: use a larger --budget",
    "time": "the time limit ended the search for fewer float32 layers: the same command continues",
    "interrupt": "Ctrl-C ended the search for fewer float32 layers: the same command continues",
}

_UNVERIFIED = "passes on the search half of the samples; not verified on the other half"


def _cells(trial: Trial) -> tuple[str, ...]:
    from gate.summary.render import format_number

    ratio, latency, size = trial.worst_ratio, trial.latency_ms, trial.size_bytes
    return (
        trial.stage,
        trial.title,
        trial.half,
        trial.verdict,
        format_number(ratio),
        "" if latency is None else f"{latency:.2f}",
        "" if size is None else f"{size / 1e6:.2f}",
    )


def _passed_lines(request: _Request, recipe: Recipe, unsearched: Sequence[str]) -> list[str]:
    output = request.output
    lines = [
        f"PASS    {output / 'model.onnx'}, verified on {recipe.verified.samples} samples that the "
        f"search did not use, in {', '.join(recipe.verified.runtimes)}",
        f"recipe  gate export --recipe {_quoted(output / 'recipe.yaml')} --output model.onnx",
    ]
    if recipe.float32 is not None:
        kind = "nodes" if recipe.steps.quantize is None else "layers"
        lines.append(
            f"float32 {recipe.float32.count} {kind} stay in float32, {recipe.float32.share:.1%}"
        )
    if recipe.search.ended_by != "passed":
        lines.append(f"early   {_SHORTENED[recipe.search.ended_by]}")
    if recipe.steps.quantize is not None:
        lines.append(
            f"int8    gate quantize {_quoted(output / _EXACT)} --calibration SAMPLES --settings "
            f"{_quoted(output / _SETTINGS)} --output twin.onnx"
        )
    if recipe.float32 is not None and recipe.verified.not_measured:
        absent = ", ".join(recipe.verified.not_measured)
        lines.append(f"not in  {absent}: not measured here; run gate check on such a machine")
    for runtime, options in recipe.session_options.items():
        names = ", ".join(options["disabled_optimizers"])
        lines.append(
            f"serve   open {runtime} with disabled_optimizers {names} (in {output / _POLICY})"
        )
    if unsearched:
        lines.append(f"not yet {', '.join(unsearched)}: sections of the policy for gate check")
    lines.append(f"next    {_check_command(request)}")
    return lines


def _check_command(request: _Request) -> str:
    """Return the gate check command for the file with the same options, for a shell."""
    note = request.output / f"{_MODEL}.export.json"
    options: list[tuple[str, object]] = [
        ("--reference", request.reference),
        ("--checkpoint", request.checkpoint),
        ("--inputs", request.inputs),
        *(
            ("--batch-axis", f"{name}={'none' if axis is None else axis}")
            for name, axis in request.batch_axes
        ),
        ("--labels", request.labels),
        ("--slices", request.slices),
        ("--preprocessing", request.preprocessing),
        ("--batch-size", request.batch_size),
        ("--policy", request.output / _POLICY),
        ("--export-record", note if note.is_file() else None),
    ]
    return " ".join([f"gate check {_quoted(request.output / _MODEL)}", *quoted_options(options)])


def _quoted(value: object) -> str:
    return shlex.quote(str(value))


def _failed_lines(record: MendRecord) -> list[str]:
    lines = [f"{record.verdict:<8}no candidate passes. {_ENDS.get(record.ended_by, '')}"]
    verified = {trial.key for trial in record.trials if trial.half == "verify"}
    reasons: list[str] = []
    for trial in sorted(record.trials, key=lambda trial: trial.distance):
        passed = "rejected on verification" if trial.key in verified else _UNVERIFIED
        reason = trial.failure or trial.headline or passed
        if reason in reasons or len(reasons) == _SHOWN:
            continue  # many exports fail for the same reason
        label = "then" if reasons else "closest"
        reasons.append(reason)
        layer = f", first in {trial.layer}" if trial.layer else ""
        lines.append(f"{label:<8}{trial.title} ({trial.half}): {reason.rstrip('.')}{layer}")
    return lines
