"""The judging itself: what `gate check` does with its options, and `gate merge` with a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from gate.commands.against import Against
from gate.commands.check_question import CheckQuestion
from gate.commands.checked import Checked
from gate.commands.cluster import SharedOut
from gate.commands.loading import loading
from gate.commands.next_steps import addressed
from gate.commands.options import tracking_uri
from gate.commands.outcome import Outcome
from gate.commands.progress import bar
from gate.commands.reported import write_for_others
from gate.commands.signing import Signing
from gate.commands.status import Status
from gate.commands.tracked import runs_of_check

if TYPE_CHECKING:
    from pathlib import Path

    from gate.policy.policy import Policy


def judged(
    question: CheckQuestion,
    policy: Policy,
    measured_by: AbstractContextManager[SharedOut],
) -> Outcome:
    """Measure, decide, and write what is asked for. `measured_by`: who measures.

    Raises GateError where nothing can be judged.
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
    labels = question["labels"]
    dumped = read_dumped(question["tensors"])

    with measured_by as shared_out:
        with loading():  # after what is wrong without them
            from gate.front_door import Reference, check
            from gate.parity.workload import Workload
            from gate.scale.crew import CheckedFile
            from gate.storage.temporary import temporary_folder
            from gate.story.judgement import Judgement

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
            checked_file = CheckedFile(question["model"], reference, workload, policy)
            with shared_out(checked_file) as shared, bar("measuring") as progress:
                verdicted = check(
                    question["model"],
                    reference=reference,
                    workload=shared,
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
    addressed_story = addressed(judgement.story, question, policy=verdicted.policy)
    judgement = replace(judgement, steps=addressed_story.steps)
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
        record=story,
    )


def _recordings(question: CheckQuestion) -> dict[str, Path]:
    """By name, each once."""
    recordings = dict(question["recorded"])
    if len(recordings) < len(question["recorded"]):
        raise click.BadParameter("--recorded: a name is there twice. Give each recording its own.")
    return recordings
