"""`gate reproduce`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands import click_types as types
from gate.commands.loaders import ReportLocation, open_reference, open_samples
from gate.commands.options import BATCH_AXIS, CHECKPOINT, PICTURE_SPEC, policy_option
from gate.commands.progress import loading, spinner
from gate.commands.result import CommandResult, ExitCode, text_result, within_limits
from gate.errors import DigestMismatch, EvidenceError

if TYPE_CHECKING:
    from gate.localize.reproducer import Reproducer
    from gate.measure.job import MeasurementJob, Reference
    from gate.records.evidence import Evidence
    from gate.records.layout import CheckArguments


@click.command("reproduce", short_help="Write a minimal reproducer of a rejection.")
@click.argument("report", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--model", type=types.ONNX_FILE, metavar="MODEL.onnx",
    help="The file of the report. Default: the path that gate check used.",
)  # fmt: skip
@click.option(
    "--reference", type=types.ReferenceType(), metavar="PKG.MODULE:FACTORY|FILE.onnx",
    help="As gate check --reference. Default: that of the report.",
)  # fmt: skip
@CHECKPOINT
@click.option(
    "--inputs", type=types.SampleLocationType(), metavar="SOURCE",
    help="The samples of the check. Default: the location that gate check used.",
)  # fmt: skip
@BATCH_AXIS
@PICTURE_SPEC
@policy_option("Policy of the check. Default: that of the report.")
@click.option(
    "--output", type=types.NEW_FILE, required=True, metavar="BUG.zip", help="Output file."
)
@click.option(
    "--strip", is_flag=True,
    help="Replace weights by random ones of the same distribution. Exit code 1 if the difference "
    "disappears.",
)  # fmt: skip
@click.option(
    "--include-confidential", is_flag=True,
    help="Include weights and samples although the policy says confidential: true.",
)  # fmt: skip
@click.option(
    "--venv/--no-venv", default=True, show_default=True,
    help="Run the script in a new virtual environment, where pip installs numpy and onnxruntime. "
    "--no-venv: run it with this Python, isolated.",
)  # fmt: skip
@within_limits
def command(**request: Any) -> CommandResult:
    """Write the smallest part of a rejected file that shows the difference, for a bug report.

    REPORT is the folder of gate check --report. The zip has the graph, its inputs, the expected
    values, a script that has been tested, and the text of an issue.

    Exit code 0: written; 1: this part alone does not show the difference; 2: an error.

    \b
    Examples:
      gate reproduce report --output bug.zip
      gate reproduce report --model model.onnx --inputs samples.npy --output bug.zip
      gate reproduce report --strip --output bug.zip --json
    """
    with loading():
        from gate.localize.reduce import NotReproduced
    try:
        reproducer = _reproducer(request)
        with spinner("running reproduce.py"):
            reproducer.write(request["output"], venv=request["venv"])
    except NotReproduced as error:
        reason = str(error)
        empty = {"schema_version": 1, "output": None, "reason": reason}
        return text_result(empty, f"not reproduced: {reason}", status=ExitCode.REJECTED)
    failure, output = reproducer.failure, str(request["output"])
    located = reproducer.localization
    plain: dict[str, Any] = {
        "schema_version": 1,
        "output": output,
        "kind": failure.kind,
        "nodes": failure.nodes,
        "operators": [node.op_type for node in failure.model.graph.node],
        "module": None if located is None else located.first_divergence,
        "random_weights": failure.random_weights,
        "random_inputs": failure.random_inputs,
    }
    nodes = "1 node" if failure.nodes == 1 else f"{failure.nodes} nodes"
    return text_result(
        plain, f"{output}: {nodes}, {failure.kind}. reproduce.py shows the difference."
    )


def _reproducer(request: Mapping[str, Any]) -> Reproducer:
    """Find the smallest graph. Raises NotReproduced, DigestMismatch and what gate check raises."""
    from gate.api import build_job
    from gate.decision.decide import Decision
    from gate.localize.reduce import NotReproduced
    from gate.localize.reproducer import Reproducer
    from gate.measure.job import EvaluationData
    from gate.policy.policy import Policy
    from gate.records.evidence import Evidence
    from gate.records.layout import DECISION, EVIDENCE
    from gate.summary.render import render_check

    folder, files = request["report"], _checked_files(request)
    evidence = Evidence.load(folder / EVIDENCE)
    decision = Decision.load(folder / DECISION)
    policy = (
        Policy.from_file(request["policy"])
        if request["policy"]
        else ReportLocation(Path(files.model), folder).policy(decision)
    )
    if policy.digest() != decision.policy_sha256:
        raise DigestMismatch(
            f"--policy has the digest {policy.digest()}, but the decision was made by "
            f"{decision.policy_sha256}. Name the policy of the check or omit --policy."
        )
    samples = open_samples(
        files.inputs, preprocessing=files.preprocessing, batch_axes=files.batch_axes.items()
    )
    weights = Path(files.checkpoint) if files.checkpoint else None
    reference = open_reference(request["reference"] or evidence.source.factory, checkpoint=weights)
    data = EvaluationData(samples)
    job = build_job(Path(files.model), reference=reference, data=data, policy=policy)
    _verify(job, reference, evidence)
    with spinner("comparing the layers"):
        reproducer = Reproducer.from_rejection(job, evidence, decision)
        if reproducer is None:
            reasons = {
                f"{check.label}: {render_check(check, 'headline')}."
                for check in decision.problems
                if check.verdict is decision.verdict
            }
            raise NotReproduced(
                f"the verdict is {decision.verdict.value}, and no output of a single file differs "
                f"on these samples, so no graph shows a difference. {' '.join(sorted(reasons))}"
            )
    hidden = policy.confidential and not request["include_confidential"]
    return reproducer.stripped(weights=request["strip"] or hidden, inputs=hidden)


def _checked_files(request: Mapping[str, Any]) -> CheckArguments:
    """Return the checked files, named by the options or by the report.

    Raises EvidenceError if neither names them.
    """
    from gate.records.layout import ARGUMENTS, CheckArguments

    options = {name: request[name] for name in ("model", "inputs", "checkpoint", "preprocessing")}
    named: dict[str, Any] = {name: str(value) for name, value in options.items() if value}
    if request["batch_axes"]:
        named["batch_axes"] = dict(request["batch_axes"])
    path = request["report"] / ARGUMENTS
    if path.is_file():
        plain = CheckArguments.load(path).to_plain()
    elif {"model", "inputs"} <= named.keys():
        plain = {}
    else:
        raise EvidenceError(
            f"{path}, which names the files of the check, is missing. Add --model and --inputs."
        )
    files = CheckArguments.from_json(json.dumps({**plain, **named}))
    if not Path(files.model).is_file():
        raise EvidenceError(
            f"{files.model} of the report does not exist. Run this in the folder of gate check, or "
            "add --model, --inputs and --checkpoint."
        )
    return files


def _verify(job: MeasurementJob, reference: Reference, evidence: Evidence) -> None:
    """Raise DigestMismatch unless file, weights, code and samples are those of the evidence."""
    if evidence.subject.parts:
        raise EvidenceError(
            "the report is about a release of several files. Run gate check on the part that gate "
            "locate names, and reproduce that report."
        )
    now, then = reference.source, evidence.source
    files = then.code.files if then.code is not None else {}
    read = now.code.files if now.code is not None else {}
    pairs = {
        "--model": (job.candidate.subject.sha256, evidence.subject.sha256),
        "--checkpoint": (now.checkpoint_sha256, then.checkpoint_sha256),
        "--reference": (now.onnx_sha256, then.onnx_sha256),
        "--inputs": (job.samples.digest(), evidence.dataset.sha256),
    }
    for option, (actual, expected) in pairs.items():
        if actual != expected:
            raise DigestMismatch(
                f"{option} has the digest {actual}, but the report is about {expected}. Name the "
                "one that was checked."
            )
    changed = [name for name in files if read.get(name) != files[name]]
    if changed:
        raise DigestMismatch(
            f"the source of {changed[0]} changed since the check. Check the file again."
        )
