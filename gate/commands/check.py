"""`gate check`: one file against its model, without DVC and MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import click

from gate.bounded.limits import CHECK_S
from gate.commands.check_question import CheckQuestion, with_question
from gate.commands.child import in_child, limit_options
from gate.commands.cluster import measured_by
from gate.commands.judged import judged
from gate.commands.outcome import Outcome, machine_options
from gate.commands.parts import release_file
from gate.commands.verdict_files import VerdictCommand
from gate.errors import PolicyError

if TYPE_CHECKING:
    from pathlib import Path

    from gate.policy.policy import Policy, Task
    from gate.policy.scope import Precision


@click.command(
    "check", cls=VerdictCommand, short_help="Judge an ONNX file against its PyTorch model."
)
@with_question
@machine_options
@limit_options(CHECK_S)
@in_child
def command(**question: Unpack[CheckQuestion]) -> Outcome:
    """Judge MODEL.onnx against the PyTorch model that it was exported from.

    Exit code 0: within every bound; 1: rejected; 2: could not judge. gate init writes a policy to
    begin with, gate policy explain NAME says what a bound means, gate locate where a file differs.

    \b
    Examples:
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy
      gate check model.onnx --reference mypackage.models:build --checkpoint model.safetensors \\
          --inputs samples.npz --labels labels.npy --policy params.yaml --report report
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --set runtimes.ort-cpu.bounds.noise_ratio=2
      gate check fp16.onnx --reference mypackage.models:build --inputs samples.npy \\
          --precision reduced
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
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --engine ray --address auto --workers 16
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --summary summary.md --junit junit.xml --metrics-file metrics.txt
      gate check --part encoder=encoder.onnx --part head=head.onnx --chain mypackage.detector:run \\
          --reference mypackage.models:build --inputs samples.npy
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy --json
    """
    question["model"] = release_file(question["model"], question["parts"], question["chain"])
    return judged(question, policy_of(question), measured_by(question))


def policy_of(question: Mapping[str, Any]) -> Policy:
    """The policy of the file or the built-in one, with the roles and the task of the options."""
    task = question["task"]
    policy = own_or_built_in(question["policy"], question["precision"], task=task)
    stated = dict(question["roles"])
    if stated or task:
        policy = policy.with_answers(outputs=stated, task=task)
    if question["runtimes"]:
        from gate.runtimes.chosen import with_runtime

        for name in question["runtimes"]:
            policy = with_runtime(policy, name)
    if question["settings"]:
        from gate.policy.tried import with_tried

        policy = with_tried(policy, dict(question["settings"]))
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
    return Policy.of_file(path) if path else Policy.built_in(precision or "exact", task=task)
