"""`gate check`: one file against its model, without DVC and MLflow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.bounded.limits import CHECK_S
from gate.commands.against import AGAINST, champion_against
from gate.commands.child import in_child, limit_options
from gate.commands.options import (
    CHECKPOINT,
    FILE,
    INPUTS,
    LEDGER,
    MODEL,
    REFERENCE,
    TRACKING_URI,
    tracking_uri,
)
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import bar
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.decision.champion import Champion
    from gate.front_door import Verdicted
    from gate.policy.policy import Policy, Role, Task

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
    roles: tuple[str, ...]
    report: Path | None
    batch_size: int
    preprocessing: Path | None
    pictures: tuple[Path, ...]
    tensors: tuple[str, ...]
    export_record: Path | None
    against: str | None
    ledger: Path
    tracking_uri: str | None


@click.command("check", short_help="Judge an ONNX file against its PyTorch model.")
@MODEL
@REFERENCE
@CHECKPOINT
@INPUTS
@click.option("--labels", type=FILE, help="FILE.npy with one class index per sample.")
@click.option(
    "--policy", type=FILE,
    help="YAML with a 'gate:' section, or the policy itself. Default: exact float32, CPU always, "
    "CUDA when present.",
)  # fmt: skip
@click.option(
    "--task", type=click.Choice(_TASKS),
    help="classification: an output of classes must be there, and is judged as one; tensors: "
    "numbers only; auto: agreement where the samples prove it. Default: the policy's, or auto.",
)  # fmt: skip
@click.option(
    "--role", "roles", multiple=True, metavar="NAME=ROLE",
    help=f"What the output NAME is: {', '.join(_ROLES)} (docs/roles.md). Goes before the policy's "
    "outputs:. Repeatable.",
)  # fmt: skip
@click.option("--report", type=FILE, metavar="DIR", help="Write records, page and figures here.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True)
@click.option(
    "--preprocessing", type=FILE, metavar="SPEC",
    help="How pictures became the samples (gate preprocess): its digest goes into the evidence.",
)  # fmt: skip
@click.option(
    "--pictures", type=FILE, multiple=True,
    help="Files or folders for the parity of preprocessing, if the policy demands it. Repeatable.",
)  # fmt: skip
@click.option(
    "--tensors", multiple=True, metavar="NAME=FILE.npy",
    help="What a consumer of your own in that policy made of the pictures, on axis 0, in their "
    "order (folders: by name). Repeatable.",
)  # fmt: skip
@click.option(
    "--export-record", type=FILE, metavar="MODEL.onnx.export.json",
    help="What gate export wrote beside the file: what the lint found then, and the exporter's "
    "warnings, for export_findings of the policy.",
)  # fmt: skip
@AGAINST
@LEDGER
@TRACKING_URI
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
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy --json
    """
    from gate.front_door import Reference, Workload, check
    from gate.preprocess.dumped import read_dumped
    from gate.records.names import CHANGE, GOLDEN
    from gate.report import folder
    from gate.storage.temporary import temporary_folder
    from gate.story.making import story_of

    policy, labels = _policy(question), question["labels"]
    workload = replace(
        Workload.open(question["inputs"], labels=labels, batch_size=question["batch_size"]),
        pictures=question["pictures"],
        dumped=read_dumped(question["tensors"]),
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
    if question["report"] is not None:
        folder.write(question["report"], decision, evidence, explanation=verdicted.explanation)
        if question["against"] is None:  # of an earlier report in this folder
            (question["report"] / CHANGE).unlink(missing_ok=True)
        else:
            verdicted.change.save(question["report"] / CHANGE)
        _write_golden(question["report"] / GOLDEN, verdicted)
    return Outcome(
        Status.of_verdict(decision.verdict.value),
        {
            "verdict": decision.verdict.value,
            "task": verdicted.policy.task,
            "decision": decision.to_plain(),
            "evidence": evidence.to_plain(),
            "explanation": verdicted.explanation.to_plain(),
            "story": story_of(
                decision, evidence, explanation=verdicted.explanation, change=verdicted.change
            ).to_plain(),
        },
        lambda console: _show(question, verdicted, console),
    )


def _policy(question: _Question) -> Policy:
    """The policy of the file or the built-in one, with the roles and the task of the options."""
    from gate.policy.policy import Policy

    path, task = question["policy"], question["task"]
    policy = Policy.of_file(path) if path else Policy.default(task=task or "auto")
    stated = dict(map(_role, question["roles"]))
    return policy.with_answers(outputs=stated, task=task) if stated or task else policy


def _champion(question: _Question, policy: Policy, folder: Path) -> Champion | None:
    places = tracking_uri(question["tracking_uri"]), question["ledger"]
    return champion_against(question["against"], policy=policy, places=places, into=folder)


def _role(text: str) -> tuple[str, Role]:
    name, _, role = text.rpartition("=")
    if not name or role not in _ROLES:
        raise click.BadParameter(
            f"{text!r}: expected NAME=ROLE, with one of {', '.join(_ROLES)}.",
            param_hint="'--role'",
        )
    return name, role  # type: ignore[return-value]


def _write_golden(folder: Path, verdicted: Verdicted) -> None:
    """What a consumer of a file that passed will compare with; else nothing of an earlier one."""
    from gate.golden.folder import GOLDEN_JSON
    from gate.parity.golden import write_golden_of

    if verdicted.decision.passed:
        write_golden_of(folder, verdicted.case, evidence=verdicted.evidence)
    else:
        (folder / GOLDEN_JSON).unlink(missing_ok=True)


def _show(question: _Question, verdicted: Verdicted, console: Console) -> None:
    from gate.report.terminal import print_decision
    from gate.story.wording import printable

    policy = verdicted.policy
    given = question["policy"]
    origin = f"of {given}" if given else "built in"
    subject = verdicted.evidence.subject
    console.print(
        f"file    {printable(str(question['model']))}  {subject.sha256}  opset {subject.opset}"
    )
    stated = "".join(f", {name} is {role}" for name, role in policy.outputs.items())
    policy_line = f"policy  {origin}; task {policy.task}, precision {policy.precision}{stated}"
    console.print(printable(policy_line))
    print_decision(
        verdicted.decision,
        verdicted.evidence,
        console,
        confidence=policy.confidence,
        explanation=verdicted.explanation,
    )
    if question["report"] is not None:
        console.print(f"report  {question['report'] / 'report.html'}")
