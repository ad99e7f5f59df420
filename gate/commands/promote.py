"""`gate promote`: put a judged file into service, for those who don't use the DVC pipeline.

Its record is on a run of MLflow: that of `gate check --track`, else one of its own.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.commands.against import change_against
from gate.commands.given import (
    GOLDEN_FOLDER,
    ONNX_FILE,
    POLICY_FILE,
    REPORT_FOLDER,
    SPEC_FILE,
)
from gate.commands.given_release import ReportOf, Vouched
from gate.commands.handing_in import HAND_IN, hand_over, is_handed_in, refused
from gate.commands.options import EXPERIMENT, MODEL, TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.promoted import promoted
from gate.commands.release_page import ReleasePage
from gate.commands.signing import KEY, TRUST, local_keys, signatory, words_of
from gate.commands.state import named_state, place_of, with_state, written_ledger
from gate.commands.tracked import open_runs
from gate.commands.verdict_files import VerdictCommand
from gate.errors import GateError, Untrusted

if TYPE_CHECKING:
    from gate.attestation.keys import PublicKey
    from gate.ledger.ledger import Ledger
    from gate.policy.policy import Policy
    from gate.registry.release import Promotion
    from gate.registry.signatures import VerdictSigning
    from gate.story.story import Step


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
    key: str | None
    trust: Path | None
    handing_in: bool | None
    run_id: str | None
    state: str
    tracking_uri: str | None
    experiment: str | None


@click.command("promote", cls=VerdictCommand, short_help="Put a judged file into service.")
@MODEL
@click.option("--name", required=True, help="The registered model.")
@click.option(
    "--report", type=REPORT_FOLDER, required=True, metavar="DIR",
    help="What gate check --report wrote: evidence.json and decision.json, and their statements.",
)  # fmt: skip
@click.option(
    "--policy", type=POLICY_FILE,
    help="The policy that was applied. Default: policy.json of --report, else the built-in one.",
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
@KEY
@TRUST
@HAND_IN
@click.option("--run-id", help="The MLflow run that the version belongs to. Default: "
              "that of gate check --track, else a new one with the whole record.")  # fmt: skip
@with_state
@TRACKING_URI
@EXPERIMENT
@machine_options
def command(**request: Unpack[_Request]) -> Outcome:
    """Make the judged MODEL.onnx the champion in the registry, if its decision is a PASS.

    Statements are verified, file, evidence and policy hashed and decided on again first. A verdict
    that was signed for no model is signed for this one, where a trusted key is at hand. Exit code
    0: promoted, or handed in, or unchanged because it serves already; 1: refused; 2: could not be
    done, or the decision is an ERROR; the old one serves.

    \b
    Examples:
      gate promote model.onnx --name digits --report report
      gate promote model.onnx --name digits --report report --policy params.yaml --json
      gate promote model.onnx --name digits --report report --policy params.yaml \\
          --twin twin/model.onnx --twin-report twin/report
      gate promote model.onnx --name digits --report report --hand-in
    """
    if (request["twin"] is None) != (request["twin_report"] is None):
        raise click.UsageError("--twin and --twin-report go together.")

    from gate.attestation.keys import labels
    from gate.decision.decision import decide
    from gate.policy.policy import Policy
    from gate.records.trend import MOST_ROWS, Trend
    from gate.registry.mlflow.registry import MlflowRegistry
    from gate.registry.promotion import Release
    from gate.registry.registered_model import RegisteredModel
    from gate.report.records import change_beside, explanation_beside
    from gate.story.judgement import Judgement

    uri, report = tracking_uri(request["tracking_uri"]), request["report"]
    trust = local_keys().trust(request["trust"], key=request["key"])
    about = ReportOf(request["model"], report, request["golden"])
    judged = about.judged()
    evidence, decision = judged.evidence, judged.decision
    path = request["policy"]
    policy = Policy.of_file(path) if path is not None else about.policy(decision)
    handing_in = is_handed_in(policy, request["handing_in"])
    vouched = Vouched(
        RegisteredModel(MlflowRegistry(uri), _ledger(request, handing_in), request["name"]),
        trust,
        about,
        ReportOf(request["twin"], request["twin_report"])
        if request["twin"] is not None and request["twin_report"] is not None
        else None,
    )
    if evidence.source.preprocess_sha256 is not None and request["preprocessing"] is None:
        raise click.UsageError(
            "the evidence names a preprocessing spec: give it with --preprocessing, so that it "
            "goes with the file."
        )
    release = Release(
        model_name=request["name"],
        onnx_path=judged.onnx_path,
        evidence=evidence,
        decision=decision,
        run_id="",
        description="",
        golden=judged.golden,
        preprocessing=request["preprocessing"],
        twin=None if vouched.twin is None else vouched.twin.judged(),
    )
    refusal: str | None = None
    signers: tuple[PublicKey, ...] = ()
    try:
        release, signers = vouched.release(
            release, policy, signing=_signing(request["key"], vouched)
        )
    except Untrusted as error:
        refusal = str(error)
    # Anew: a decision that somebody edited is refused, and must not stand in the list of runs.
    again = decide(policy, evidence, incumbent=decision.incumbent, decided_at=decision.decided_at)
    change = change_beside(report, evidence) or change_against(
        vouched.model, again, evidence, trust=trust
    )
    release = replace(release, trend=Trend(rows=change.trend[-MOST_ROWS:]))
    judgement = Judgement(
        decision=again,
        evidence=evidence,
        policy=policy,
        explanation=explanation_beside(report, evidence),
        change=change,
        model_name=release.model_name,
        steps=_steps(request, policy) if again.passed else (),
        signed_by=labels(signers),
    )
    pages = ReleasePage(
        runs=open_runs(uri, request["experiment"]),
        run_id=request["run_id"],
        model=release.model_name,
        report=report,
    )
    promotion: Promotion | None = None
    try:
        with spinner("promoting"), pages.open(judgement, release.twin) as page:
            description = pages.description(judgement, page)
            release = replace(release, run_id=page.run_id, description=description)
            promotion = (
                hand_over(vouched.model, release, policy=policy, trust=trust, handing_in=handing_in)
                if refusal is None
                else refused(vouched.model, release, refusal, handing_in=handing_in)
            )
            pages.write_outcome(page, promotion, judgement)
    except GateError as error:
        if promotion is None:
            raise
        # It stands, whatever becomes of the page that shows it.
        click.echo(f"warning: the run's page lacks the outcome: {error}", err=True)
    outcome = promoted(
        promotion,
        name=release.model_name,
        digest=decision.subject_sha256,
        uri=uri,
        verdict=decision.verdict.value,
        signed_by=words_of(signers),
    )
    return replace(outcome, record=judgement.story)


def _ledger(request: _Request, handing_in: bool) -> Ledger:
    """To write into; whoever hands in needs none, and is not kept out by what he may not write."""
    from gate.ledger.ledger import Ledger

    if handing_in:
        return Ledger(named_state(request["state"]))
    return written_ledger(place_of(request))


def _signing(key: str | None, vouched: Vouched) -> VerdictSigning | None:
    """Who can sign the verdict for this model: nobody is made for that."""
    from gate.attestation.resource import resource_of
    from gate.ledger.addresses import plain
    from gate.registry.signatures import VerdictSigning

    signing_key = local_keys().signing_key_if_any(key)
    if signing_key is None:
        return None
    resource = resource_of(plain(vouched.model.registry.identity), vouched.model.name)
    return VerdictSigning(signatory(signing_key), vouched.trust, resource)


def _steps(request: _Request, policy: Policy) -> tuple[Step, ...]:
    """What to do with a version; what waits can't be taken back, and what was handed in is for the
    service, which has the ledger."""
    from gate.story.story import Step

    if is_handed_in(policy, request["handing_in"]):
        return ()
    shown = shlex.quote(request["name"])
    look = Step(label="See what became of it", command=f"gate history --model {shown}")
    if policy.review != "automatic":
        return (look,)
    return (look, Step(label="Take it back", command=f"gate rollback {shown}"))
