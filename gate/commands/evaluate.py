"""Shared by `check` and `merge`: measure, decide, write the report."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.loaders import Against, Signing
from gate.commands.options import _OF_CLUSTER, CheckRequest, tracking_uri
from gate.commands.progress import loading, progress_bar
from gate.commands.result import CommandResult, ExitCode
from gate.errors import GateError, PolicyError, StorageError
from gate.installation import is_installed

if TYPE_CHECKING:
    from rich.console import Console

    from gate.api import EvaluationResult
    from gate.distributed.worker_pool import CheckedFile
    from gate.measure.job import EvaluationData, Reference
    from gate.mlflow_client.runs import RunLogger, Runs
    from gate.policy.policy import Policy, Precision, Task
    from gate.preprocess.spec import PreprocessSpec
    from gate.storage.digest import Digest
    from gate.summary.summarize import SummaryInputs
    from gate.summary.summary import Summary


def policy_from_request(question: Mapping[str, Any]) -> Policy:
    """The policy of the file or the built-in one, with the roles and the task of the options."""
    task = question["task"]
    policy = own_or_built_in(question["policy"], question["precision"], task=task)
    stated = dict(question["roles"])
    if stated or task:
        policy = policy.with_answers(outputs=stated, task=task)
    if question["runtimes"]:
        from gate.runtimes.selection import with_runtime

        for name in question["runtimes"]:
            policy = with_runtime(policy, name)
    if question["settings"]:
        from gate.policy.overrides import with_overrides

        policy = with_overrides(policy, dict(question["settings"]))
    return policy


def own_or_built_in(
    path: Path | None, precision: Precision | None, *, task: Task | None = None
) -> Policy:
    """The policy of a file, or the built-in one of a precision. Raises PolicyError for both."""
    from gate.policy.policy import Policy

    if path and precision:
        raise PolicyError(
            f"--precision chooses a built-in policy, and {path} is one of your own: say precision "
            "there, with bounds that fit it. gate init --precision writes one to begin with."
        )
    return Policy.from_file(path) if path else Policy.built_in(precision or "exact", task=task)


_UNPROVEN = (
    "note: not compared: whether the factory gives the same weights each time (the model has more "
    "than 2 GB, or its factory can be called once). If it draws them, pass --checkpoint FILE."
)

SharedOut = Callable[["CheckedFile"], AbstractContextManager["EvaluationData"]]
"""Gives the data of a check with those who measure it."""


def measured_by(question: CheckRequest) -> AbstractContextManager[SharedOut]:
    """How `gate.commands.evaluate.evaluate` shares out the samples. Those who measure them start on
    entering, as far as their number was asked for. Raises UsageError for options of the other
    engine."""
    if question["engine"] == "processes":
        _refuse_cluster(question)
        return _by_processes(question["jobs"])
    if question["jobs"] is not None:
        raise click.UsageError("--jobs is for processes. With --engine ray say --workers N.")
    from gate.distributed.cluster_early import set_switches

    set_switches()
    return _by_cluster(question)


@contextlib.contextmanager
def _by_processes(jobs: int | None) -> Iterator[SharedOut]:
    from gate.distributed.early import early_processes, most_processes

    if jobs not in (None, 1):
        given = jobs
        jobs, reason = most_processes(given)
        if jobs < given:
            click.echo(f"--jobs {given}: measuring in {jobs} processes, {reason}.", err=True)
    with early_processes(0 if jobs in (None, 1) else jobs) as early:
        yield lambda checked: checked.by_processes(jobs, early=early)


@contextlib.contextmanager
def _by_cluster(question: CheckRequest) -> Iterator[SharedOut]:
    from gate.distributed.cluster_early import Cluster, EarlyActors

    cluster = Cluster(
        address=question["address"],
        workers=question["workers"],
        cpus=question["cpus_per_worker"],
        gpus=question["gpus_per_worker"],
    )
    with EarlyActors.started(cluster) as early:
        yield lambda checked: checked.by_cluster(early)


def _refuse_cluster(question: CheckRequest) -> None:
    given: dict[str, Any] = dict(question)
    for name, default in _OF_CLUSTER.items():
        if given[name] != default:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for a cluster. Say --engine ray, too.")


def addressed(story: Summary, options: Mapping[str, Any], *, policy: Policy) -> Summary:
    """With the names of the files in its commands; what judges again is this command line. No
    password stands in them: reports are kept and sent. `policy`: by which it was judged."""
    from gate.storage.safe_text import without_passwords
    from gate.storage.workspace import ModelKey, current_workspace

    name = options["name"] or options["against"]
    named = {
        "MODEL.onnx": options["model"],
        "SAMPLES": without_passwords(options["inputs"]),
        "CHECKPOINT": options["checkpoint"],
        "DIR": options["report"],
        "SPEC": options["preprocessing"],
        "PICTURES": next(iter(options["pictures"]), None),
        "NAME": name and ModelKey(current_workspace(), name),
    }
    story = story.with_files({word: str(name) for word, name in named.items() if name is not None})
    line, first = click.get_current_context().obj, story.steps[0].command or ""
    if first.startswith("gate promote "):
        story = story.with_command("gate promote ", " ".join([first, *_of_promote(options)]))
    commands = [step.command for step in story.steps if step.command]
    looking = [command for command in commands if command.startswith("gate locate ")]
    if looking:
        whole = " ".join([looking[0], *_of_locate(options, policy)])
        story = story.with_command("gate locate ", whole)
    again = [without_passwords(word) for word in line.arguments if word != "--json"] if line else []
    if story.headline.verdict == "PASS":  # only what was tried out is to be judged again
        again = _untried(again)
    return story.with_command("gate check ", shlex.join(["gate", *again])) if again else story


def _untried(words: list[str]) -> list[str]:
    """The command line without --set, by the policy into which the values are to be written."""
    pairs = zip(["", *words], words, strict=False)
    kept = [word for before, word in pairs if before != "--set" and word.split("=")[0] != "--set"]
    return kept if "--policy" in kept else [*kept, "--policy", "POLICY"]


def _of_locate(options: Mapping[str, Any], policy: Policy) -> list[str]:
    """The options by which gate locate sees the same numbers, quoted for a shell."""
    built_in = options["policy"] is None and policy.precision != "exact"
    given = {
        "--preprocessing": options["preprocessing"],
        "--policy": options["policy"],
        "--precision": policy.precision if built_in else None,
    }
    return [f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value]


def _of_promote(options: Mapping[str, Any]) -> list[str]:
    """The options without which gate promote would look elsewhere, quoted for a shell."""
    from click.core import ParameterSource

    from gate.storage.safe_text import without_passwords

    source = click.get_current_context().get_parameter_source("state")
    given = {
        "--policy": options["policy"],
        "--preprocessing": options["preprocessing"],
        "--tracking-uri": options["tracking_uri"],
        "--key": options["key"],
        "--state": options["state"] if source is ParameterSource.COMMANDLINE else None,
    }
    return [
        f"{name} {shlex.quote(without_passwords(str(value)))}"
        for name, value in given.items()
        if value is not None
    ]


def write_report(
    report: Path, verdicted: EvaluationResult, *, story: Summary, spec: PreprocessSpec | None
) -> None:
    """Write the records, the page, the table of samples, and the worst of them as pictures.

    Raises StorageError.
    """
    from gate.measure import artifacts
    from gate.records.layout import PICTURES, SAMPLES
    from gate.report import folder

    verdicted.samples.save(report / SAMPLES)
    samples = verdicted.job.samples
    if artifacts.picture_layout(samples.specs) is not None and not is_installed("PIL"):
        click.echo(
            "note: the report has no pictures of the worst samples: they need Pillow, pip install "
            "'parity-gate[data]'",
            err=True,
        )
    worst = artifacts.thumbnails(samples, verdicted.evidence, spec)
    artifacts.save(report / PICTURES, worst)
    # Last, because the page shows the pictures that are there.
    folder.write_report(
        report,
        verdicted.decision,
        verdicted.evidence,
        story=story,
        explanation=verdicted.explanation,
    )


def write_for_others(
    report: Path, verdicted: EvaluationResult, *, compared: bool, signing: Signing
) -> None:
    """Sign what was measured and decided, as it is in memory, before any of it is written; then
    write what `gate promote` and consumers read: both statements, the policy as it was applied, the
    change, where the file was `compared` with the champion, and of what passed the golden vectors.

    Raises KeyUnusable; DigestMismatch where the file is another by now; StorageError.
    """
    from gate.records.layout import CHANGE, GOLDEN, POLICY
    from gate.signing.subjects import statement_subjects

    golden = _write_golden(report / GOLDEN, verdicted)
    evidence, onnx_path = verdicted.evidence, verdicted.job.candidate.path
    signing.statements(
        evidence,
        verdicted.decision,
        policy=verdicted.policy,
        subjects=statement_subjects(onnx_path, evidence, golden=golden),
    ).write(report)
    verdicted.policy.save(report / POLICY)
    if compared:
        verdicted.change.save(report / CHANGE)


@contextlib.contextmanager
def report_folder(report: Path | None) -> Iterator[Path]:
    """An empty folder. What is written there replaces an earlier report in the folder that was
    asked for, once all of it is written. Raises StorageError."""
    from gate.storage.files import scratch, temporary_folder

    if report is None:
        with temporary_folder() as folder:
            yield folder
        return
    try:
        # Inside of the folder, which may be a mounted one, or the current one.
        with scratch(report / "report") as folder:
            yield folder
            _take_place(folder, report)
    except OSError as error:
        raise StorageError(
            f"cannot write {report}: {error.strerror or error}. Free space or fix permissions, "
            "then repeat."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            report.rmdir()


def _take_place(folder: Path, report: Path) -> None:
    """Move all of a folder into that of the report; nothing of an earlier report stays."""
    import shutil

    from gate.records.layout import OF_REPORTS

    for name in {*OF_REPORTS, *(entry.name for entry in folder.iterdir())}:
        there = report / name
        if there.is_dir() and not there.is_symlink():
            shutil.rmtree(there)
        else:
            there.unlink(missing_ok=True)
    for entry in sorted(folder.iterdir()):
        entry.rename(report / entry.name)


def _write_golden(folder: Path, verdicted: EvaluationResult) -> Digest | None:
    """Write the golden vectors of a file that passed, if they can hold its inputs. Return the
    digest of golden.json, from memory."""
    from gate.measure.artifacts import has_golden, write_golden_of
    from gate.storage.digest import Digest

    if not verdicted.decision.passed or not has_golden(verdicted.job):
        return None
    golden = write_golden_of(folder, verdicted.job, evidence=verdicted.evidence)
    return Digest.of_bytes(golden.file_bytes())


def open_runs(uri: str, experiment: str | None) -> Runs:
    """The experiment's runs. Raises the RegistryErrors within seconds if nothing answers."""
    from gate.mlflow_client.runs import EXPERIMENT, Runs

    return Runs(uri, experiment=experiment or EXPERIMENT)


def runs_of_check(
    *, track: bool, uri: str | None, experiment: str | None, model: str | None
) -> Runs | None:
    """Where `gate check --track` writes, looked for before anything is measured; None without
    `--track`. `model`: the registered model that the check is about, if it is about one.

    Raises UsageError for options that go with it, and the RegistryErrors.
    """
    if track:
        return open_runs(tracking_uri(uri), experiment)
    if uri is not None and model is None:
        raise click.UsageError(
            "--tracking-uri says where --track writes, --against looks and the model of --name "
            "is: give one of them, too."
        )
    return None


@dataclass
class TrackedRun:
    """The run of `gate check --track`: the numbers are written before the verdict is printed, the
    files after it.

    The judgement stands whatever becomes of its record: a server that fails is told, and `gate
    promote` writes the record anew.
    """

    runs: Runs
    page: RunLogger
    judgement: SummaryInputs
    folder: Path
    """The folder of the report."""
    opened: ExitStack
    """Ends the run; removes the folder where nobody asked for a report."""
    workspace: str | None
    """The command's workspace: MLFLOW_WORKSPACE no longer names it when the run is finished."""
    remember: bool
    """Name the run in the folder."""
    failure: GateError | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    """The fields of the run in `--json`."""

    def write_numbers(self, *, inputs: str) -> None:
        """Log params, tags and metrics."""
        from gate.mlflow_client.log_evaluation import log_numbers

        try:
            log_numbers(self.page, self.judgement, inputs=inputs)
        except GateError as error:
            self.failure = error
        self._describe()

    def finish(self) -> str:
        """Upload the files and end the run; gives what there is to say of a failure."""
        from gate.mlflow_client.log_evaluation import log_files
        from gate.storage.workspace import working_in

        was_shown = self.failure is not None
        with working_in(self.workspace):
            try:
                with self.opened:
                    if self.failure is not None:
                        raise self.failure
                    log_files(self.page, self.judgement, folder=self.folder)
                if self.remember:
                    self.runs.remember(self.page, self.folder)
            except GateError as error:
                self.failure = error
            self._describe()
        return "" if was_shown or self.failure is None else f"run     {self.text}"

    @property
    def text(self) -> str:
        """The address, or why it is of no use."""
        from gate.storage.safe_text import make_printable
        from gate.storage.workspace import working_in

        if self.failure is None:
            with working_in(self.workspace):
                return make_printable(self.page.location)
        return make_printable(f"not written, the verdict stands: {self.failure}")

    def _describe(self) -> None:
        page, failed = self.page, self.failure is not None
        self.plain |= {
            "run_id": None if failed else page.run_id,
            "experiment_id": None if failed else page.experiment_id,
            "address": None if failed else page.location,
            "error": str(self.failure) if failed else None,
        }


@contextmanager
def page_of_release(
    runs: Runs, judgement: SummaryInputs, *, report: Path, twin: SummaryInputs | None
) -> Iterator[RunLogger]:
    """The page of the release's run: that which `gate check --track` wrote, else a new one with the
    whole record, which ends with the promotion. Its pages are rendered anew from the records.
    Raises the RegistryErrors, StorageError."""
    from gate.mlflow_client.log_evaluation import log_evaluation, write_twin
    from gate.report.folder import write_again
    from gate.storage.files import temporary_folder

    found = runs.recorded(report, judgement.decision)
    with runs.new("gate promote") if found is None else runs.again(found) as page:
        if found is None:
            with temporary_folder() as folder:
                write_again(
                    folder,
                    judgement.decision,
                    judgement.evidence,
                    story=judgement.story,
                    explanation=judgement.explanation,
                    report=report,
                )
                log_evaluation(page, judgement, folder=folder)
        if twin is not None:
            write_twin(page, twin, exact=judgement.decision)
        yield page


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The file that was judged, by which policy, and where its report goes."""

    model: Path
    policy: Path | None
    """None: the built-in one."""
    report: Path | None
    """None: nobody asked for one."""
    verdicted: EvaluationResult
    judgement: SummaryInputs

    def write(
        self,
        reference: Reference,
        *,
        opened: ExitStack | None,
        signing: Signing | None,
        compared: bool,
    ) -> Path | None:
        """Write the report where one is asked for, or where a run needs it; then into a folder that
        `opened` removes. Return its folder. `compared`: with the champion. Raises as
        `write_for_others`."""
        if self.report is None and opened is None:
            return None
        with contextlib.ExitStack() as stack:
            keeping = stack if self.report is not None or opened is None else opened
            report = keeping.enter_context(report_folder(self.report))
            if self.report is not None and signing is not None:
                write_for_others(report, self.verdicted, compared=compared, signing=signing)
            write_report(report, self.verdicted, story=self.judgement.story, spec=reference.spec)
        return self.report or report

    def show(self, console: Console, *, run: TrackedRun | None, verbose: bool) -> None:
        """Print it. `run`: what there is to say of the run."""
        from gate.report.terminal import print_summary
        from gate.storage.safe_text import make_printable

        story, policy = self.judgement.story, self.verdicted.policy
        print_summary(story, console, verbose=verbose)
        subject = story.subject
        origin = f"of {self.policy}" if self.policy else "built in"
        stated = "".join(f", {name} is {role}" for name, role in policy.outputs.items())
        console.print(
            "file    " + make_printable(
                f"{self.model}, {subject.sha256.short}, opset {subject.opset}; "
                f"policy {origin}, task {policy.task}, precision {policy.precision}{stated}"
            )
        )  # fmt: skip
        if self.report is not None:
            console.print(f"report  {self.report / 'report.html'}")
            console.print(f"signed  by {make_printable(subject.signed_by or 'nobody')}")
        if run is not None:
            console.print(f"run     {run.text}")


def evaluate(
    question: CheckRequest,
    policy: Policy,
    measured_by: AbstractContextManager[SharedOut],
) -> CommandResult:
    """Measure, decide, and write what is asked for. `measured_by`: who measures.

    Raises GateError where nothing can be judged.
    """
    with contextlib.ExitStack() as opened:
        return _evaluated(question, policy, measured_by, opened)


def _evaluated(
    question: CheckRequest,
    policy: Policy,
    measured_by: AbstractContextManager[SharedOut],
    opened: ExitStack,
) -> CommandResult:
    """Do what `evaluate` does. `opened` ends the run unless the outcome is left to do so."""
    from gate.preprocess.pictures import read_dumped_tensors

    if question["report"] is not None and not question["overwrite"]:
        _refuse_existing(question["report"])
    signing = Signing.of_report(
        question["report"],
        key=question["key"],
        model=question["name"],
        registry=tracking_uri(question["tracking_uri"]),
    )
    runs = runs_of_check(
        track=question["track"],
        uri=question["tracking_uri"],
        experiment=question["experiment"],
        model=question["against"] or question["name"],
    )
    against = None
    if question["against"] is not None:
        against = Against.of_options(question["against"], question)
        if policy.incumbent is None:  # a policy that asks for one lets the first version pass
            against.require_model()
    labels = question["labels"]
    dumped = read_dumped_tensors(question["tensors"])

    with measured_by as shared_out:
        with loading():  # after what is wrong without them
            from gate.api import check
            from gate.distributed.worker_pool import CheckedFile
            from gate.measure.job import EvaluationData, Reference
            from gate.storage.files import temporary_folder
            from gate.summary.summarize import SummaryInputs

            data = replace(
                EvaluationData.open(
                    question["inputs"],
                    labels=labels,
                    batch_size=question["batch_size"],
                    preprocessing=question["preprocessing"],
                    decode_workers=question["decode_workers"],
                    batch_axes=dict(question["batch_axes"]),
                ),
                pictures=question["pictures"],
                dumped=dumped,
                recordings=_recordings(question),
            )
            reference = Reference.from_factory(
                question["reference"],
                checkpoint=question["checkpoint"],
                preprocessing=question["preprocessing"],
                export_record=question["export_record"],
            )
            if not reference.is_reproducible:
                click.echo(_UNPROVEN, err=True)
        with temporary_folder() as served:
            if against is not None:
                champion = against.champion(policy=policy, into=served)
                data = replace(data, against=champion)
            checked_file = CheckedFile(question["model"], reference, data, policy)
            with shared_out(checked_file) as shared, progress_bar("measuring") as progress:
                page = None
                if runs is not None:
                    page = opened.enter_context(runs.new("gate check", ends_process=True))
                verdicted = check(
                    question["model"],
                    reference=reference,
                    data=shared,
                    policy=policy,
                    progress=progress,
                )
    decision, evidence = verdicted.decision, verdicted.evidence
    judgement = SummaryInputs(
        decision=decision,
        evidence=evidence,
        policy=verdicted.policy,
        explanation=verdicted.explanation,
        change=verdicted.change,
        model_name=question["name"],
        signed_by=None if signing is None else signing.label,
    )
    addressed_story = addressed(judgement.story, question, policy=verdicted.policy)
    judgement = replace(judgement, steps=addressed_story.steps)
    checked = Checked(
        model=question["model"],
        policy=question["policy"],
        report=question["report"],
        verdicted=verdicted,
        judgement=judgement,
    )
    folder = checked.write(
        reference,
        opened=opened if runs is not None else None,
        signing=signing,
        compared=question["against"] is not None,
    )
    run = None
    if runs is not None and page is not None and folder is not None:
        from gate.storage.workspace import current_workspace

        run = TrackedRun(
            runs,
            page,
            judgement,
            folder,
            opened,
            current_workspace(),
            question["report"] is not None,
        )
        run.write_numbers(inputs=question["inputs"])

    from gate.summary.render import with_texts

    story = judgement.story
    result = CommandResult(
        ExitCode.of_verdict(decision.verdict.value),
        {
            "verdict": decision.verdict.value,
            "task": verdicted.policy.task,
            "decision": with_texts(decision),
            "evidence": evidence.to_plain(),
            "explanation": verdicted.explanation.to_plain(),
            "story": story.to_plain(),
            **({"run": run.plain} if run is not None else {}),
        },
        lambda console: checked.show(console, run=run, verbose=question["verbose"]),
        record=story,
        finish=run.finish if run is not None else str,
    )
    if run is not None:
        run.opened = opened.pop_all()
    return result


def _refuse_existing(report: Path) -> None:
    from gate.records.layout import DECISION, EVIDENCE

    if any((report / name).exists() for name in (EVIDENCE, DECISION)):
        raise StorageError(
            f"--report: {report} holds a report already. Name another folder, or say --overwrite."
        )


def _recordings(question: CheckRequest) -> dict[str, Path]:
    """By name, each once."""
    recordings = dict(question["recorded"])
    if len(recordings) < len(question["recorded"]):
        raise click.BadParameter("--recorded: a name is there twice. Give each recording its own.")
    return recordings
