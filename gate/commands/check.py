"""`gate check`: one file against its model, without DVC and MLflow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from gate.bounded.limits import CHECK_S
from gate.commands.against import AGAINST, champion_against
from gate.commands.child import in_child, limit_options
from gate.commands.given import (
    LABELS_FILE,
    NEW_FOLDER,
    PICTURES,
    POLICY_FILE,
    RECORD_FILE,
    SPEC_FILE,
    ConsumerTensors,
    NamedRole,
)
from gate.commands.next_steps import addressed
from gate.commands.options import (
    CHECKPOINT,
    EXPERIMENT,
    INPUTS,
    LEDGER,
    MODEL,
    REFERENCE,
    TRACKING_URI,
    tracking_uri,
)
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import bar, spinner
from gate.commands.reported import report_folder, write_for_others, write_report
from gate.commands.status import Status
from gate.commands.tracked import runs_of_check, tracked

if TYPE_CHECKING:
    from rich.console import Console

    from gate.decision.champion import Champion
    from gate.front_door import Reference, Verdicted
    from gate.policy.policy import Policy, Role, Task
    from gate.story.story import Story
    from gate.tracking.record import Judgement
    from gate.tracking.runs import Runs

_TASKS = ("auto", "classification", "tensors")
_ROLES = ("logits", "probabilities", "scores", "embedding", "boxes", "indices", "mask", "tensor")


class _Question(TypedDict):
    """The options, as parsed."""

    model: Path
    reference: str
    checkpoint: Path | None
    inputs: Path
    labels: Path | None
    policy: Path | None
    task: Task | None
    roles: tuple[tuple[str, Role], ...]
    report: Path | None
    batch_size: int
    preprocessing: Path | None
    pictures: tuple[Path, ...]
    tensors: tuple[str, ...]
    export_record: Path | None
    verbose: bool
    against: str | None
    ledger: Path
    track: bool
    tracking_uri: str | None
    experiment: str | None


@click.command("check", short_help="Judge an ONNX file against its PyTorch model.")
@MODEL
@REFERENCE
@CHECKPOINT
@INPUTS
@click.option("--labels", type=LABELS_FILE, help="FILE.npy with one class index per sample.")
@click.option(
    "--policy", type=POLICY_FILE,
    help="YAML with a 'gate:' section, or the policy itself. Default: exact float32, CPU always, "
    "CUDA when present.",
)  # fmt: skip
@click.option(
    "--task", type=click.Choice(_TASKS),
    help="classification: an output of classes must be there, and is judged as one; tensors: "
    "numbers only; auto: agreement where the samples prove it. Default: the policy's, or auto.",
)  # fmt: skip
@click.option(
    "--role", "roles", type=NamedRole(_ROLES), multiple=True, metavar="NAME=ROLE",
    help=f"What the output NAME is: {', '.join(_ROLES)} (docs/roles.md). Goes before the policy's "
    "outputs:. Repeatable.",
)  # fmt: skip
@click.option(
    "--report",
    type=NEW_FOLDER,
    metavar="DIR",
    help="Write records, page, figures and samples.csv here.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True)
@click.option(
    "--preprocessing", type=SPEC_FILE, metavar="SPEC",
    help="How pictures became the samples (gate preprocess): its digest goes into the evidence.",
)  # fmt: skip
@click.option(
    "--pictures", type=PICTURES, multiple=True,
    help="Files or folders for the parity of preprocessing, if the policy demands it. Repeatable.",
)  # fmt: skip
@click.option(
    "--tensors", type=ConsumerTensors(), multiple=True, metavar="NAME=FILE.npy",
    help="What a consumer of your own in that policy made of the pictures, on axis 0, in their "
    "order (folders: by name). Repeatable.",
)  # fmt: skip
@click.option(
    "--export-record", type=RECORD_FILE, metavar="MODEL.onnx.export.json",
    help="What gate export wrote beside the file: what the lint found then, and the exporter's "
    "warnings, for export_findings of the policy.",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Print every check, and what it asks.")
@AGAINST
@LEDGER
@click.option("--track", is_flag=True, help="Write the whole record on a run of MLflow.")
@TRACKING_URI
@EXPERIMENT
@machine_options
@limit_options(CHECK_S)
@in_child
def command(**question: Unpack[_Question]) -> Outcome:
    """Judge MODEL.onnx against the PyTorch model that it was exported from.

    Exit code 0: within every bound; 1: rejected; 2: could not judge.

    \b
    Examples:
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy
      gate check model.onnx --reference mypackage.models:build --checkpoint model.safetensors \\
          --inputs samples.npz --labels labels.npy --policy params.yaml --report report
      gate check clip.onnx --reference mypackage.models:clip --inputs pairs.npz \\
          --role image_embeds=embedding --role logits_per_image=scores
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --labels labels.npy --policy params.yaml --against digits --report report
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --report report --track --tracking-uri http://127.0.0.1:5000
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy --json
    """
    from gate.preprocess.dumped import read_dumped

    runs = runs_of_check(
        track=question["track"],
        uri=question["tracking_uri"],
        experiment=question["experiment"],
        against=question["against"],
    )
    policy, labels = _policy(question), question["labels"]
    dumped = read_dumped(question["tensors"])

    with spinner("loading PyTorch and the model"):  # after what is wrong without them
        from gate.front_door import Reference, Workload, check
        from gate.storage.temporary import temporary_folder
        from gate.tracking.record import Judgement

        workload = replace(
            Workload.open(question["inputs"], labels=labels, batch_size=question["batch_size"]),
            pictures=question["pictures"],
            dumped=dumped,
        )
        reference = Reference.load(
            question["reference"],
            checkpoint=question["checkpoint"],
            preprocessing=question["preprocessing"],
            export_record=question["export_record"],
        )
    with temporary_folder() as served:
        workload = replace(workload, against=_champion(question, policy, served))
        with bar("measuring") as progress:
            verdicted = check(
                question["model"],
                reference=reference,
                workload=workload,
                policy=policy,
                progress=progress,
            )
    decision, evidence = verdicted.decision, verdicted.evidence
    judgement = Judgement(
        decision=decision,
        evidence=evidence,
        policy=verdicted.policy,
        explanation=verdicted.explanation,
        change=verdicted.change,
    )
    judgement = replace(judgement, steps=addressed(judgement.story, question).steps)
    run = _write(question, verdicted, judgement, reference=reference, runs=runs)
    story = judgement.story
    return Outcome(
        Status.of_verdict(decision.verdict.value),
        {
            "verdict": decision.verdict.value,
            "task": verdicted.policy.task,
            "decision": decision.to_plain(),
            "evidence": evidence.to_plain(),
            "explanation": verdicted.explanation.to_plain(),
            "story": story.to_plain(),
            **({"run": run} if run is not None else {}),
        },
        lambda console: _show(question, verdicted, story, console, run=run),
    )


def _policy(question: _Question) -> Policy:
    """The policy of the file or the built-in one, with the roles and the task of the options."""
    from gate.policy.policy import Policy

    path, task = question["policy"], question["task"]
    policy = Policy.of_file(path) if path else Policy.default(task=task or "auto")
    stated = dict(question["roles"])
    return policy.with_answers(outputs=stated, task=task) if stated or task else policy


def _champion(question: _Question, policy: Policy, folder: Path) -> Champion | None:
    places = tracking_uri(question["tracking_uri"]), question["ledger"]
    return champion_against(question["against"], policy=policy, places=places, into=folder)


def _write(
    question: _Question,
    verdicted: Verdicted,
    judgement: Judgement,
    *,
    reference: Reference,
    runs: Runs | None,
) -> dict[str, Any] | None:
    """The report where one is asked for, and the run; gives what there is to say of the run."""
    wanted = question["report"] is not None
    if not wanted and runs is None:
        return None
    with report_folder(question["report"]) as report:
        write_report(report, verdicted, story=judgement.story, spec=reference.spec)
        if wanted:
            write_for_others(report, verdicted, compared=question["against"] is not None)
        if runs is None:
            return None
        return tracked(runs, judgement, folder=report, inputs=question["inputs"], remember=wanted)


def _show(
    question: _Question,
    verdicted: Verdicted,
    story: Story,
    console: Console,
    *,
    run: dict[str, Any] | None,
) -> None:
    from gate.report.terminal import print_story
    from gate.story.wording import printable

    print_story(story, console, verbose=question["verbose"])
    policy, subject = verdicted.policy, story.subject
    origin = f"of {question['policy']}" if question["policy"] else "built in"
    stated = "".join(f", {name} is {role}" for name, role in policy.outputs.items())
    console.print(
        printable(f"file  {question['model']}  {subject.sha256.short}  opset {subject.opset}; "
                  f"policy {origin}, task {policy.task}, precision {policy.precision}{stated}")
    )  # fmt: skip
    if question["report"] is not None:
        console.print(f"report  {question['report'] / 'report.html'}")
    if run is not None:
        shown = run["address"] or f"not written, the verdict stands: {run['error']}"
        console.print(f"run     {printable(shown)}")
