"""Shared by `check` and `merge`: measure, decide, write the report."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gate.commands.loaders import Against, Signing, open_reference
from gate.commands.options import CheckRequest, quoted_options, tracking_uri, with_unique_names
from gate.commands.progress import loading, progress_bar
from gate.commands.result import CommandResult, ExitCode
from gate.errors import GateError, PolicyError, StorageError
from gate.installation import is_installed
from gate.storage.digest import Digest
from gate.storage.files import scratch, temporary_folder, write_bytes
from gate.storage.safe_text import make_printable, without_passwords
from gate.storage.workspace import ModelKey, current_workspace, working_in

if TYPE_CHECKING:
    from rich.console import Console

    from gate.api import EvaluationResult
    from gate.distributed.worker_pool import CheckedFile
    from gate.measure.job import EvaluationData
    from gate.mlflow_client.runs import RunLogger, Runs
    from gate.policy.policy import Policy, Precision, Task
    from gate.policy.sections import Role
    from gate.preprocess.spec import PreprocessSpec
    from gate.summary.summarize import SummaryInputs
    from gate.summary.summary import Summary


def policy_from_options(
    *,
    policy: Path | None,
    precision: Precision | None,
    task: Task | None,
    roles: Iterable[tuple[str, Role]] = (),
    runtimes: Iterable[str],
    server: str | None = None,
    settings: Iterable[tuple[str, str]],
    **_other: object,
) -> Policy:
    """Return the policy of the file or the built-in one, with the overrides of other options.

    Raises PolicyError.
    """
    result, outputs = load_policy(policy, precision, task=task), dict(roles)
    if outputs or task:
        result = result.with_answers(outputs=outputs, task=task)
    if runtimes:
        from gate.runtimes.selection import with_runtime

        for name in runtimes:
            result = with_runtime(result, name)
    if server:
        from gate.runtimes.server import with_server

        result = with_server(result, server)
    if values := dict(settings):
        from gate.policy.overrides import with_overrides

        result = with_overrides(result, values)
    return result


def load_policy(
    path: Path | None, precision: Precision | None, *, task: Task | None = None
) -> Policy:
    """Return the policy of a file, or the built-in one of a precision.

    Raises PolicyError if both are set.
    """
    from gate.policy.policy import Policy

    if path and precision:
        raise PolicyError(
            f"--precision selects a built-in policy; it can't be combined with {path}. Set "
            "precision in that file, with bounds that fit. gate init --precision writes an example."
        )
    return Policy.from_file(path) if path else Policy.built_in(precision or "exact", task=task)


_UNVERIFIED_WEIGHTS = (
    "note: not checked: whether the factory returns the same weights on each call (the model is "
    "over 2 GB, or the factory works only once). If weights are random, pass --checkpoint FILE."
)

PrepareData = Callable[["CheckedFile"], AbstractContextManager["EvaluationData"]]
"""Returns the data of a check with the workers that measure it."""


def select_workers(request: CheckRequest) -> AbstractContextManager[PrepareData]:
    """Return how `evaluate` distributes the samples.

    The workers start on entering, up to the requested number. Raises UsageError for options of the
    other engine.
    """
    if request.engine == "processes":
        for name in ("address", "workers", "cpus_per_worker", "gpus_per_worker"):
            if getattr(request, name) != getattr(CheckRequest, name):  # the default
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{option} requires --engine ray.")
        return _process_workers(request.jobs)
    if request.jobs is not None:
        raise click.UsageError("--jobs is for processes. With --engine ray use --workers N.")
    return _cluster_workers(request)


@contextlib.contextmanager
def _process_workers(jobs: int | None) -> Iterator[PrepareData]:
    if jobs in (None, 1):
        yield lambda checked: checked.by_processes(jobs)
        return
    from gate.distributed.worker_pool import ProcessPool, most_processes

    count, reason = most_processes(jobs)
    if count < jobs:
        click.echo(f"--jobs {jobs}: measuring in {count} processes, {reason}.", err=True)
    with ProcessPool(count) as pool:
        yield lambda checked: checked.by_processes(count, pool=pool)


@contextlib.contextmanager
def _cluster_workers(request: CheckRequest) -> Iterator[PrepareData]:
    from gate.distributed.worker_pool import Cluster, RayPool

    cluster = Cluster(
        address=request.address,
        workers=request.workers,
        cpus=request.cpus_per_worker,
        gpus=request.gpus_per_worker,
    )
    with RayPool.open(cluster) as pool:
        yield lambda checked: checked.by_cluster(pool)


NEW_REPORT = "report"
"""The folder in the next commands after a check without --report."""


def fill_commands(summary: Summary, request: CheckRequest, *, policy: Policy) -> Summary:
    """Return the summary with the file names of this request filled into its commands.

    The `gate check` command of the summary becomes this command line. Passwords are removed,
    because reports are stored and shared. `policy`: the policy that was applied.
    """
    name = request.name or request.against
    samples = without_passwords(request.inputs)
    is_array_file = samples.endswith((".npy", ".npz")) and "://" not in samples
    named = {
        "MODEL.onnx": request.model,
        "SAMPLES": samples,
        "X.npy": samples if is_array_file else None,
        "CHECKPOINT": request.checkpoint,
        "DIR": request.report or NEW_REPORT,
        "SPEC": request.preprocessing,
        "PICTURES": next(iter(request.pictures), None),
        "NAME": name and ModelKey(current_workspace(), name),
    }
    summary = summary.with_files(
        {word: str(name) for word, name in named.items() if name is not None}
    )
    context = click.get_current_context()
    line, first = context.obj, summary.steps[0].command or ""
    is_promotion = first.startswith("gate promote ")
    if is_promotion and "--twin" not in first:  # with --twin it has --policy
        is_stated = context.get_parameter_source("state") is ParameterSource.COMMANDLINE
        promote_options = {
            "--policy": request.policy,
            "--preprocessing": request.preprocessing,
            "--tracking-uri": request.tracking_uri,
            "--key": request.key,
            "--state": request.state if is_stated else None,
        }
        promote = " ".join([first, *quoted_options(promote_options.items())])
        summary = summary.with_command("gate promote ", promote)
    commands = [step.command for step in summary.steps if step.command]
    locate = [command for command in commands if command.startswith("gate locate ")]
    if locate:  # with the options for the same numbers
        built_in = request.policy is None and policy.precision != "exact"
        locate_options = {
            "--preprocessing": request.preprocessing,
            "--policy": request.policy,
            "--precision": policy.precision if built_in else None,
        }
        extended = " ".join([locate[0], *quoted_options(locate_options.items())])
        summary = summary.with_command("gate locate ", extended)
    again = [without_passwords(word) for word in line.arguments if word != "--json"] if line else []
    if summary.headline.verdict == "PASS" and not is_promotion:  # then it had trial settings
        again = _without_settings(again)
    if not again:
        return summary
    check = shlex.join(["gate", *again])
    summary = summary.with_command("gate check ", check)
    if not is_promotion or request.report is not None:
        return summary
    from gate.summary.summary import Step

    report = Step(label="Write the report", command=f"{check} --report {NEW_REPORT}")
    return summary.model_copy(update={"steps": (report, *summary.steps)})


def _without_settings(words: list[str]) -> list[str]:
    """Return the command line without --set, and with --policy for a file that has the values."""
    pairs = zip(["", *words], words, strict=False)
    rest = [word for before, word in pairs if before != "--set" and word.split("=")[0] != "--set"]
    return rest if "--policy" in rest else [*rest, "--policy", "POLICY"]


def _write_report(
    report: Path,
    request: CheckRequest,
    evaluation: EvaluationResult,
    summary: Summary,
    spec: PreprocessSpec | None,
    signing: Signing | None,
) -> None:
    """Write the records, the page, the table of samples, pictures of the worst samples, and the
    command's arguments; sign them with `signing`.

    Raises StorageError and the exceptions of `_write_signed`.
    """
    from gate.measure import artifacts
    from gate.records.layout import ARGUMENTS, METRICS, PICTURES, SAMPLES, CheckArguments
    from gate.report.folder import write_report

    arguments = CheckArguments(
        model=str(request.model),
        inputs=without_passwords(request.inputs),
        checkpoint=str(request.checkpoint) if request.checkpoint else None,
        preprocessing=str(request.preprocessing) if request.preprocessing else None,
        batch_axes=dict(request.batch_axes),
    )
    samples = evaluation.job.samples
    if artifacts.picture_layout(samples.specs) is not None and not is_installed("PIL"):
        click.echo(
            "note: the report has no pictures of the worst samples, which need Pillow: pip install "
            "'parity-gate[data]'",
            err=True,
        )
    with report_folder(report) as folder:
        if signing is not None:
            _write_signed(folder, evaluation, signing, compared=request.against is not None)
        arguments.save(folder / ARGUMENTS)
        evaluation.samples.save(folder / SAMPLES)
        if evaluation.metric_values:
            write_bytes(folder / METRICS, evaluation.metric_values)
        worst = artifacts.thumbnails(samples, evaluation.evidence, spec)
        artifacts.save(folder / PICTURES, worst)
        # Last, because the page includes the pictures in the folder.
        write_report(
            folder,
            evaluation.decision,
            evaluation.evidence,
            summary=summary,
            explanation=evaluation.explanation,
        )


def _write_signed(
    folder: Path, evaluation: EvaluationResult, signing: Signing, *, compared: bool
) -> None:
    """Sign evidence and decision as they are in memory, then write the files for `gate promote`.

    The files are both statements, the effective policy, the change if the file was `compared` with
    the champion, and the golden vectors after a PASS. Raises KeyUnusable, StorageError, and
    DigestMismatch if the file has changed since it was measured.
    """
    from gate.measure.artifacts import has_golden, write_golden_of
    from gate.records.layout import CHANGE, GOLDEN, POLICY
    from gate.signing.subjects import statement_subjects

    evidence, job, golden = evaluation.evidence, evaluation.job, None
    if evaluation.decision.passed and has_golden(job):
        vectors = write_golden_of(folder / GOLDEN, job, evidence=evidence)
        golden = Digest.from_bytes(vectors.file_bytes())
    signing.statements(
        evidence,
        evaluation.decision,
        policy=evaluation.policy,
        subjects=statement_subjects(job.candidate.path, evidence, golden=golden),
    ).write(folder)
    evaluation.policy.save(folder / POLICY)
    if compared:
        evaluation.change.save(folder / CHANGE)


@contextlib.contextmanager
def report_folder(report: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files replace an earlier report when the context ends.

    Raises StorageError.
    """
    try:
        # Inside `report`, which may be a mount point or the current folder: a rename would fail.
        with scratch(report / "report") as folder:
            yield folder
            _replace_report(folder, report)
    except OSError as error:
        raise StorageError(
            f"cannot write {report}: {error.strerror or error}. Free space or fix permissions, "
            "then retry."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # not empty
            report.rmdir()


def _replace_report(folder: Path, report: Path) -> None:
    """Move all files of a folder into `report`, and remove those of an earlier report."""
    from gate.records.layout import REPORT_FILES

    for name in {*REPORT_FILES, *(entry.name for entry in folder.iterdir())}:
        old = report / name
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
    for entry in sorted(folder.iterdir()):
        entry.rename(report / entry.name)


def open_runs(uri: str, experiment: str | None) -> Runs:
    """Return the runs of the experiment. Raises RegistryError soon if no server answers."""
    from gate.mlflow_client.runs import EXPERIMENT, Runs

    return Runs(uri, experiment=experiment or EXPERIMENT)


def _runs_of_check(request: CheckRequest) -> Runs | None:
    """Open the runs that `gate check --track` writes to, before anything is measured; None without
    `--track`. Raises UsageError for options that require `--track` or `--against`, and the
    RegistryErrors."""
    uri = request.tracking_uri
    if request.track:
        return open_runs(tracking_uri(uri), request.experiment)
    if uri is not None and (request.against or request.name) is None:
        raise click.UsageError(
            "--tracking-uri has no effect without --track, --against or --name. Add one of them or "
            "remove it."
        )
    return None


@dataclass
class TrackedRun:
    """The run of `gate check --track`.

    The numbers are written before the verdict is printed, the files after it. A failure to write
    is reported but does not change the verdict; `gate promote` then writes the record again.
    """

    runs: Runs
    page: RunLogger
    judgment: SummaryInputs
    folder: Path
    """The folder of the report."""
    workspace: str | None
    """The command's workspace; MLFLOW_WORKSPACE is already restored when the run is finished."""
    remember: bool
    """True if the run ID is written into the folder."""
    stack: ExitStack = field(default_factory=ExitStack)
    """Ends the run; removes the folder if no report was requested."""
    failure: GateError | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    """The fields of the run in `--json`."""

    def write_numbers(self, *, inputs: str) -> None:
        """Log params, tags and metrics."""
        from gate.mlflow_client.log_evaluation import log_numbers

        try:
            log_numbers(self.page, self.judgment, inputs=inputs)
        except GateError as error:
            self.failure = error
        self._describe()

    def finish(self) -> str:
        """Upload the files and end the run; return a line about a new failure, or an empty text."""
        from gate.mlflow_client.log_evaluation import log_files

        was_shown = self.failure is not None
        with working_in(self.workspace):
            try:
                with self.stack:
                    if self.failure is not None:
                        raise self.failure
                    log_files(self.page, self.judgment, folder=self.folder)
                if self.remember:
                    self.runs.save_reference(self.page, self.folder)
            except GateError as error:
                self.failure = error
            self._describe()
        return "" if was_shown or self.failure is None else f"run     {self.text}"

    @property
    def text(self) -> str:
        """Return the address of the run, or the reason for a failure."""
        if self.failure is None:
            with working_in(self.workspace):
                return make_printable(self.page.location)
        return make_printable(f"not written; the verdict is not affected: {self.failure}")

    def _describe(self) -> None:
        page, failed = self.page, self.failure is not None
        self.plain |= {
            "run_id": None if failed else page.run_id,
            "experiment_id": None if failed else page.experiment_id,
            "address": None if failed else page.location,
            "error": str(self.failure) if failed else None,
        }


def _show(
    console: Console,
    request: CheckRequest,
    policy: Policy,
    summary: Summary,
    run: TrackedRun | None,
) -> None:
    from gate.report.terminal import print_summary

    print_summary(summary, console, verbose=request.verbose)
    subject, named, folder = summary.subject, request.policy, request.report
    origin = f"of {named}" if named else "built in"
    stated = "".join(f", {name} is {role}" for name, role in policy.outputs.items())
    console.print(
        "file    " + make_printable(
            f"{request.model}, {subject.sha256.short}, opset {subject.opset}; "
            f"policy {origin}, task {policy.task}, precision {policy.precision}{stated}"
        )
    )  # fmt: skip
    if folder is not None:
        console.print(f"report  {folder / 'report.html'}")
        console.print(
            f"signed  {make_printable(f'by {subject.signed_by}' if subject.signed_by else 'no')}"
        )
    if run is not None:
        console.print(f"run     {run.text}")


def evaluate(
    request: CheckRequest,
    policy: Policy,
    workers: AbstractContextManager[PrepareData],
) -> CommandResult:
    """Measure, decide, and write the requested files.

    `workers`: prepares the data for measuring. Raises GateError if the file can't be judged.
    """
    _refuse_existing(request)
    signing = Signing.from_options(
        request.report,
        key=request.key,
        model=request.name,
        registry=tracking_uri(request.tracking_uri),
    )
    runs = _runs_of_check(request)
    against = None
    if request.against is not None:
        against = Against.from_request(request.against, request)
        if policy.incumbent is None:  # a policy with this section lets the first version pass
            against.require_model()

    with ExitStack() as stack:  # ends the run after an exception; else the result ends it
        evaluation, spec, page = _check(request, policy, workers, against, runs, stack)
        judgment = replace(
            evaluation.summary_inputs,
            model_name=request.name,
            signed_by=None if signing is None else signing.label,
        )
        summary = fill_commands(judgment.summary, request, policy=evaluation.policy)
        judgment = replace(judgment, steps=summary.steps)
        folder, run = request.report, None
        if folder is None and runs is not None:
            folder = stack.enter_context(temporary_folder())
        if folder is not None:
            _write_report(folder, request, evaluation, judgment.summary, spec, signing)
        if runs is not None and page is not None and folder is not None:
            workspace, is_requested = current_workspace(), request.report is not None
            run = TrackedRun(runs, page, judgment, folder, workspace, is_requested)
            run.write_numbers(inputs=request.inputs)
        result = _result(request, evaluation, judgment.summary, run)
        if run is not None:
            run.stack = stack.pop_all()
    return result


def _check(
    request: CheckRequest,
    policy: Policy,
    workers: AbstractContextManager[PrepareData],
    against: Against | None,
    runs: Runs | None,
    stack: ExitStack,
) -> tuple[EvaluationResult, PreprocessSpec | None, RunLogger | None]:
    """Open the files and check them. Return the result, the spec of the samples, and the new run.

    The run starts once all files are open; `stack` ends it.
    """
    from gate.preprocess.pictures import read_dumped_tensors

    dumped = read_dumped_tensors(request.tensors)
    with workers as prepare_data:
        with loading():  # after all checks that do not need PyTorch
            from gate.api import check
            from gate.distributed.worker_pool import CheckedFile

            data = replace(
                request.open_data(policy),
                pictures=request.pictures,
                dumped=dumped,
                recordings=with_unique_names(request.recorded, "--recorded"),
            )
            reference = open_reference(
                request.reference,
                uri=request.tracking_uri,
                checkpoint=request.checkpoint,
                preprocessing=request.preprocessing,
                export_record=request.export_record,
            )
            if not reference.is_reproducible:
                click.echo(_UNVERIFIED_WEIGHTS, err=True)
        with temporary_folder() as champion_folder:
            if against is not None:
                champion = against.champion(policy=policy, into=champion_folder)
                data = replace(data, against=champion)
            checked_file = CheckedFile(request.model, reference, data, policy)
            with prepare_data(checked_file) as prepared, progress_bar("measuring") as progress:
                page = None
                if runs is not None:
                    page = stack.enter_context(runs.new("gate check", ends_process=True))
                evaluation = check(
                    request.model,
                    reference=reference,
                    data=prepared,
                    policy=policy,
                    progress=progress,
                )
    return evaluation, reference.spec, page


def _result(
    request: CheckRequest, evaluation: EvaluationResult, summary: Summary, run: TrackedRun | None
) -> CommandResult:
    from gate.summary.render import with_texts

    verdict, is_onnx = evaluation.decision.verdict.value, evaluation.evidence.source.is_onnx
    return CommandResult(
        ExitCode.from_verdict(verdict),
        {
            "verdict": verdict,
            "task": evaluation.policy.task,
            "decision": with_texts(evaluation.decision, onnx_reference=is_onnx),
            "evidence": with_texts(evaluation.evidence),
            "explanation": evaluation.explanation.to_plain(),
            "story": with_texts(summary, onnx_reference=is_onnx),
            **_source_of(evaluation),
            **({"run": run.plain} if run is not None else {}),
        },
        lambda console: _show(console, request, evaluation.policy, summary, run),
        record=summary,
        finish=run.finish if run is not None else str,
    )


def _source_of(evaluation: EvaluationResult) -> dict[str, Any]:
    """Return the source line that creates the module that diverges first, for --json and --sarif;
    empty if unknown."""
    location = evaluation.explanation.localisation
    if location is None or location.first_divergence is None or location.part:
        return {}
    from gate.model.source_code import module_source

    source = module_source(evaluation.job.reference.module, location.first_divergence)
    if source is None:
        return {}
    return {"source": {"file": source[0].as_posix(), "line": source[1]}}


def _refuse_existing(request: CheckRequest) -> None:
    from gate.records.layout import DECISION, EVIDENCE

    report = None if request.overwrite else request.report
    if report is not None and any((report / name).exists() for name in (EVIDENCE, DECISION)):
        raise StorageError(
            f"--report: {report} already has a report. Name another folder or add --overwrite."
        )
