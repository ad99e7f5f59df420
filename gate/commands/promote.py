"""`gate promote`: put a judged file into service, for those who don't use the DVC pipeline.

Its record is on a run of MLflow: that of `gate check --track`, else one of its own.
"""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
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
from gate.commands.options import EXPERIMENT, LEDGER, MODEL, TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.promoted import promoted
from gate.commands.tracked import open_runs, page_of_release
from gate.errors import GateError, PolicyError
from gate.records.names import DECISION, EVIDENCE, GOLDEN

if TYPE_CHECKING:
    from gate.decision.decision import Decision
    from gate.policy.policy import Policy
    from gate.records.evidence import Evidence
    from gate.registry.judged import GoldenFolder, Judged
    from gate.registry.release import Promotion
    from gate.story.story import Change, Step
    from gate.tracking.page import RunPage
    from gate.tracking.record import Judgement


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
    experiment: str | None


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
@click.option("--run-id", help="The MLflow run that the version belongs to. Default: "
              "that of gate check --track, else a new one with the whole record.")  # fmt: skip
@LEDGER
@TRACKING_URI
@EXPERIMENT
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

    from gate.decision.decision import Decision, decide
    from gate.records.evidence import Evidence
    from gate.records.trend import MOST_ROWS, Trend
    from gate.registry.ledger import Ledger
    from gate.registry.mlflow.registry import MlflowRegistry
    from gate.registry.promotion import Release, promote
    from gate.report.records import change_beside, explanation_beside
    from gate.tracking.record import Judgement

    uri, report = tracking_uri(request["tracking_uri"]), request["report"]
    evidence = Evidence.load(report / EVIDENCE)
    decision = Decision.load(report / DECISION)
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
        run_id="",
        description="",
        golden=_golden(request["golden"], report),
        preprocessing=request["preprocessing"],
        twin=_twin(request["twin"], request["twin_report"]),
    )
    # Anew: a decision that somebody edited is refused, and must not stand in the list of runs.
    again = decide(policy, evidence, incumbent=decision.incumbent, decided_at=decision.decided_at)
    change = change_beside(report, evidence) or _change(request, uri, again, evidence)
    release = replace(release, trend=Trend(rows=change.trend[-MOST_ROWS:]))
    judgement = Judgement(
        decision=again,
        evidence=evidence,
        policy=policy,
        explanation=explanation_beside(report, evidence),
        change=change,
        model_name=release.model_name,
        steps=_steps(release.model_name, policy) if again.passed else (),
    )
    promotion: Promotion | None = None
    try:
        with spinner("promoting"), _page(request, uri, judgement, release.twin) as page:
            description = _description(judgement, page, own=request["run_id"] is None)
            release = replace(release, run_id=page.run_id, description=description)
            ledger = Ledger(request["ledger"])
            promotion = promote(MlflowRegistry(uri), release, policy=policy, ledger=ledger)
            _write_outcome(page, promotion, judgement, request)
    except GateError as error:
        if promotion is None:
            raise
        # It stands, whatever becomes of the page that shows it.
        click.echo(f"warning: the run's page lacks the outcome: {error}", err=True)
    return promoted(
        promotion,
        name=release.model_name,
        digest=decision.subject_sha256,
        uri=uri,
        verdict=decision.verdict.value,
    )


def _steps(name: str, policy: Policy) -> tuple[Step, ...]:
    """What to do with a version; what waits for its review can't be taken back."""
    from gate.story.story import Step

    shown = shlex.quote(name)
    look = Step(label="See what became of it", command=f"gate history --model {shown}")
    if policy.review == "required":
        return (look,)
    return (look, Step(label="Take it back", command=f"gate rollback {shown}"))


def _page(
    request: _Request, uri: str, judgement: Judgement, twin: Judged | None
) -> AbstractContextManager[RunPage]:
    """Of the run that was named, else of one with the whole record."""
    from gate.decision.decision import decide
    from gate.tracking.record import Judgement

    runs = open_runs(uri, request["experiment"])
    if request["run_id"] is not None:
        return nullcontext(runs.page(request["run_id"]))
    policy = judgement.policy.twin
    judged_twin = None
    if twin is not None and policy is not None:
        decision = decide(policy, twin.evidence, decided_at=twin.decision.decided_at)
        judged_twin = Judgement(decision=decision, evidence=twin.evidence, policy=policy)
    return page_of_release(runs, judgement, report=request["report"], twin=judged_twin)


def _description(
    judgement: Judgement, page: RunPage, *, own: bool, version: tuple[str, str] | None = None
) -> str:
    """Markdown with links to the run, to its report where we wrote it (`own`), to the version."""
    from gate.registry.page.status_line import BODY_LIMIT
    from gate.report.markdown import describe
    from gate.tracking.page import cut
    from gate.tracking.record import links

    there = links(page, version=version) if own else {"MLflow run": page.address}
    return cut(describe(judgement.story, there), BODY_LIMIT)


def _write_outcome(
    page: RunPage, promotion: Promotion, judgement: Judgement, request: _Request
) -> None:
    """Write on the run's page what became of it."""
    from gate.tracking.record import write_promotion

    name, own = request["name"], request["run_id"] is None
    version = None if promotion.version is None else (name, promotion.version)
    note = _description(judgement, page, own=own, version=version)
    closing = f"{note}\n{promotion.outcome}: {promotion.reason}\n" if own else None
    write_promotion(page, promotion, model_name=name, note=closing)


def _golden(named: Path | None, report: Path) -> GoldenFolder | None:
    """Those that were named, else those of the report; older reports have none."""
    from gate.golden.folder import GOLDEN_JSON
    from gate.registry.judged import GoldenFolder

    beside = report / GOLDEN
    if named is None and not (beside / GOLDEN_JSON).exists():
        return None
    return GoldenFolder.open(named or beside)


def _change(request: _Request, uri: str, decision: Decision, evidence: Evidence) -> Change:
    """Against what serves now, where gate check did not compare: by the records of both. What goes
    wrong is said there."""
    from gate.commands.against import champion_shown
    from gate.story.change import change_of

    champion = champion_shown(request["name"], uri=uri, ledger=request["ledger"])
    return change_of(decision, evidence, champion)


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
