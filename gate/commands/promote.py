"""`gate promote`: put a judged file into service, for those who don't use the DVC pipeline.

The report of such a file is held by an MLflow run of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.commands.given import (
    GOLDEN_FOLDER,
    ONNX_FILE,
    POLICY_FILE,
    REPORT_FOLDER,
    SPEC_FILE,
)
from gate.commands.options import LEDGER, MODEL, TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.promoted import promoted
from gate.errors import EvidenceError, PolicyError
from gate.records.names import CHANGE, DECISION, EVIDENCE, GOLDEN

if TYPE_CHECKING:
    from gate.decision.decision import Decision
    from gate.policy.policy import Policy
    from gate.records.trend import Trend
    from gate.registry.judged import GoldenFolder, Judged

_EXPERIMENT = "gate-promote"


class _Request(TypedDict):
    """The options, as parsed."""

    model: Path
    name: str
    report: Path
    policy: Path | None
    golden: Path | None
    preprocessing: Path | None
    twin: Path | None
    twin_report: Path | None
    run_id: str | None
    ledger: Path
    tracking_uri: str | None


@click.command("promote", short_help="Put a judged file into service.")
@MODEL
@click.option("--name", required=True, help="The registered model.")
@click.option(
    "--report", type=REPORT_FOLDER, required=True, metavar="DIR",
    help="What gate check --report wrote: evidence.json and decision.json.",
)  # fmt: skip
@click.option(
    "--policy", type=POLICY_FILE,
    help="The policy that was applied. Default: the built-in one.",
)  # fmt: skip
@click.option(
    "--golden", type=GOLDEN_FOLDER, metavar="FOLDER",
    help="Golden vectors for consumers. Default: DIR/golden of --report, where it is.",
)  # fmt: skip
@click.option(
    "--preprocessing", type=SPEC_FILE, metavar="SPEC",
    help="The spec that gate check got, to go with the file.",
)  # fmt: skip
@click.option("--twin", type=ONNX_FILE, help="The quantized twin that the policy names.")
@click.option(
    "--twin-report", type=REPORT_FOLDER, metavar="DIR",
    help="What gate check --report wrote about the twin.",
)  # fmt: skip
@click.option("--run-id", help="The MLflow run that the version belongs to. Default: a new one.")
@LEDGER
@TRACKING_URI
@machine_options
def command(**request: Unpack[_Request]) -> Outcome:
    """Make the judged MODEL.onnx the champion in the registry, if its decision is a PASS.

    File, evidence and policy are hashed and decided on again first. Exit code 0: promoted, or
    unchanged because it serves already; 1: refused; 2: could not be done, or the decision is an
    ERROR; the old one serves.

    \b
    Examples:
      gate promote model.onnx --name digits --report report
      gate promote model.onnx --name digits --report report --policy params.yaml --json
      gate promote model.onnx --name digits --report report --policy params.yaml \\
          --twin twin/model.onnx --twin-report twin/report
    """
    if (request["twin"] is None) != (request["twin_report"] is None):
        raise click.UsageError("--twin and --twin-report go together.")

    from gate.decision.decision import Decision
    from gate.records.evidence import Evidence
    from gate.registry.ledger import Ledger
    from gate.registry.mlflow.registry import MlflowRegistry, preflight
    from gate.registry.promotion import Release, promote
    from gate.report.markdown import describe
    from gate.story.making import story_of

    uri = tracking_uri(request["tracking_uri"])
    evidence = Evidence.load(request["report"] / EVIDENCE)
    decision = Decision.load(request["report"] / DECISION)
    policy = _policy(request["policy"], decision)
    if evidence.source.preprocess_sha256 is not None and request["preprocessing"] is None:
        raise click.UsageError(
            "the evidence names a preprocessing spec: give it with --preprocessing, so that it "
            "goes with the file."
        )
    release = Release(
        model_name=request["name"],
        onnx_path=request["model"],
        evidence=evidence,
        decision=decision,
        run_id=request["run_id"] or "",
        description=describe(story_of(decision, evidence).about(name=request["name"]), {}),
        golden=_golden(request["golden"], request["report"]),
        preprocessing=request["preprocessing"],
        twin=_twin(request["twin"], request["twin_report"]),
    )
    preflight(uri)
    given = contextlib.nullcontext(release.run_id)
    ledger = Ledger(request["ledger"])
    release = replace(release, trend=_trend(request, uri))
    with (
        spinner("promoting"),
        given if release.run_id else _release_run(uri, request["report"]) as run_id,
    ):
        release = replace(release, run_id=run_id)
        promotion = promote(MlflowRegistry(uri), release, policy=policy, ledger=ledger)
    return promoted(
        promotion,
        name=release.model_name,
        digest=decision.subject_sha256,
        uri=uri,
        verdict=decision.verdict.value,
    )


def _golden(named: Path | None, report: Path) -> GoldenFolder | None:
    """Those that were named, else those of the report; older reports have none."""
    from gate.golden.folder import GOLDEN_JSON
    from gate.registry.judged import GoldenFolder

    beside = report / GOLDEN
    if named is None and not (beside / GOLDEN_JSON).exists():
        return None
    return GoldenFolder.open(named or beside)


def _trend(request: _Request, uri: str) -> Trend:
    """The numbers of the versions before, as gate check --against found them; else those of what
    serves now. They are only shown: what goes wrong leaves them out."""
    from gate.commands.against import champion_shown
    from gate.records.trend import Trend
    from gate.story.story import Change

    with contextlib.suppress(EvidenceError):
        change = Change.load(request["report"] / CHANGE)
        if change.trend:
            return Trend(rows=change.trend)
    return champion_shown(request["name"], uri=uri, ledger=request["ledger"]).trend


def _twin(path: Path | None, report: Path | None) -> Judged | None:
    from gate.decision.decision import Decision
    from gate.records.evidence import Evidence
    from gate.registry.judged import Judged

    if path is None or report is None:
        return None
    return Judged(
        onnx_path=path,
        evidence=Evidence.load(report / EVIDENCE),
        decision=Decision.load(report / DECISION),
        golden=_golden(None, report),
    )


def _policy(path: Path | None, decision: Decision) -> Policy:
    """The policy of the file, else the built-in one that the decision was made by, if it was."""
    from gate.policy.policy import Policy

    if path is not None:
        return Policy.of_file(path)
    built_in = [Policy.default(task=task) for task in ("auto", "classification", "tensors")]
    fitting = [policy for policy in built_in if policy.digest() == decision.policy_sha256]
    if not fitting:
        raise PolicyError(
            f"the decision was made by a policy with digest {decision.policy_sha256.short}, which "
            "is none of the built-in ones. Name its file with --policy."
        )
    return fitting[0]


@contextlib.contextmanager
def _release_run(uri: str, report: Path) -> Iterator[str]:
    """Open a run at `uri` with the files of `report`; yield its id; end it, whatever happens.

    Raises the RegistryErrors.
    """
    from mlflow import MlflowClient

    from gate.registry.mlflow.errors import translated
    from gate.registry.mlflow.experiment import experiment_id

    with translated(uri, "open a run for the release"):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = experiment_id(client, _EXPERIMENT, artifacts=_artifacts(uri))
        run = client.create_run(experiment, run_name=report.resolve().name).info
    status = "FAILED"
    try:
        with translated(uri, "log the report"):
            client.log_artifacts(run.run_id, str(report), "report")
        yield str(run.run_id)
        status = "FINISHED"
    finally:
        with translated(uri, "end the run of the release"):
            client.set_terminated(run.run_id, status)


def _artifacts(uri: str) -> Path | None:
    """Beside a local database; a server has its own place."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts"
