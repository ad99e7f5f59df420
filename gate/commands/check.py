"""`gate check`: one file against its model, without DVC and MLflow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import click

from gate.bounded.limits import CHECK_S
from gate.commands.against import Against
from gate.commands.check_question import CheckQuestion, with_question
from gate.commands.checked import Checked
from gate.commands.child import in_child, limit_options
from gate.commands.next_steps import addressed
from gate.commands.options import tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import bar, spinner
from gate.commands.reported import write_for_others
from gate.commands.signing import Signing
from gate.commands.status import Status
from gate.commands.tracked import runs_of_check

if TYPE_CHECKING:
    from pathlib import Path

    from gate.policy.policy import Policy


@click.command("check", short_help="Judge an ONNX file against its PyTorch model.")
@with_question
@machine_options
@limit_options(CHECK_S)
@in_child
def command(**question: Unpack[CheckQuestion]) -> Outcome:
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
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --report report --name digits --key /etc/gate/ci.pem
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --recorded phone=recordings/phone
      gate check model.onnx --reference mypackage.models:build --inputs mypackage.data:eval_set \\
          --preprocessing preprocessing.yaml --decode-workers 2
      gate check model.onnx --reference mypackage.models:build \\
          --inputs 's3://bucket/eval.parquet#inputs=pixels&label=digit'
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy --json
    """
    from gate.preprocess.dumped import read_dumped

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
    policy, labels = _policy(question), question["labels"]
    dumped = read_dumped(question["tensors"])

    with spinner("loading PyTorch and the model"):  # after what is wrong without them
        from gate.front_door import Reference, Workload, check
        from gate.storage.temporary import temporary_folder
        from gate.tracking.record import Judgement

        workload = replace(
            Workload.open(
                question["inputs"],
                labels=labels,
                batch_size=question["batch_size"],
                preprocessing=question["preprocessing"],
                decode_workers=question["decode_workers"],
            ),
            pictures=question["pictures"],
            dumped=dumped,
            recordings=_recordings(question),
        )
        reference = Reference.load(
            question["reference"],
            checkpoint=question["checkpoint"],
            preprocessing=question["preprocessing"],
            export_record=question["export_record"],
        )
    with temporary_folder() as served:
        if question["against"] is not None:
            against = Against.of_options(question["against"], question)
            champion = against.champion(policy=policy, into=served)
            workload = replace(workload, against=champion)
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
        model_name=question["name"],
        signed_by=None if signing is None else signing.label,
    )
    judgement = replace(judgement, steps=addressed(judgement.story, question).steps)
    if signing is not None and question["report"] is not None:
        compared = question["against"] is not None
        write_for_others(question["report"], verdicted, compared=compared, signing=signing)
    checked = Checked(
        model=question["model"],
        policy=question["policy"],
        report=question["report"],
        verdicted=verdicted,
        judgement=judgement,
    )
    run = checked.write(reference, inputs=question["inputs"], runs=runs)
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
        lambda console: checked.show(console, run=run, verbose=question["verbose"]),
    )


def _policy(question: CheckQuestion) -> Policy:
    """The policy of the file or the built-in one, with the roles and the task of the options."""
    from gate.policy.policy import Policy

    path, task = question["policy"], question["task"]
    policy = Policy.of_file(path) if path else Policy.default(task=task or "auto")
    stated = dict(question["roles"])
    if stated or task:
        policy = policy.with_answers(outputs=stated, task=task)
    if question["runtimes"]:
        from gate.runtimes.chosen import with_runtime

        for name in question["runtimes"]:
            policy = with_runtime(policy, name)
    return policy


def _recordings(question: CheckQuestion) -> dict[str, Path]:
    """By name, each once."""
    recordings = dict(question["recorded"])
    if len(recordings) < len(question["recorded"]):
        raise click.BadParameter("--recorded: a name is there twice. Give each recording its own.")
    return recordings
