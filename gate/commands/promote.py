"""`gate promote` (direct or `--submit`), `gate rollback`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack
from urllib.parse import quote

import click

from gate.commands import click_types as types
from gate.commands import loaders, options
from gate.commands.ci_files import VerdictCommand
from gate.commands.evaluate import open_runs
from gate.commands.options import tracking_uri as uri_of
from gate.commands.progress import spinner
from gate.commands.result import CommandResult, ExitCode, machine_options, print_lines
from gate.errors import DigestMismatch, EvidenceError, GateError, Untrusted
from gate.storage.files import temporary_folder
from gate.storage.safe_text import redacted
from gate.storage.workspace import ModelKey, current_workspace, key_in, page_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from gate.mlflow_client.runs import RunLogger, Runs
    from gate.policy.policy import Policy
    from gate.registry.registered_model import RegisteredModel
    from gate.registry.release import EvaluatedFile, PromotionResult, Release
    from gate.registry.verdict_signing import VerdictSigning
    from gate.registry.verify_release import VerifiedRelease
    from gate.signing.keys import PublicKey
    from gate.storage.digest import Digest
    from gate.summary.summarize import SummaryInputs
    from gate.summary.summary import Step


_SUBMIT = click.option(
    "--hand-in/--direct", "hand_in", default=None,
    help="Only create a candidate, without a ledger, which gate serve judges and promotes; or move "
    "champion from here. Default: promotion of the policy.",
)  # fmt: skip


def uses_submission(policy: Policy, option: bool | None) -> bool:
    """Return the option `--hand-in` if set, else the policy's setting."""
    return policy.promotion == "by_service" if option is None else option


def submit_or_promote(
    model: RegisteredModel, verified: VerifiedRelease, *, submits: bool
) -> PromotionResult:
    """Submit the release, or promote it. Raises the exceptions of `submit` and `promote`."""
    from gate.registry.promotion import promote, submit

    return submit(model, verified) if submits else promote(model, verified)


def refuse_release(
    model: RegisteredModel, release: Release, reason: str, *, submits: bool
) -> PromotionResult:
    """Refuse a release without a trusted signature; record it in the ledger unless handing in.

    Raises EvidenceError, StorageError.
    """
    from gate.registry.promotion import refuse
    from gate.registry.release import PromotionResult

    if submits:
        return PromotionResult("refused", None, None, reason)
    return refuse(model, release, reason)


def promotion_result(
    promotion: PromotionResult,
    *,
    name: str,
    digest: Digest | None,
    uri: str,
    verdict: str | None = None,
    signed_by: Sequence[str] = (),
) -> CommandResult:
    """Return the command's result for a promotion.

    `digest`: SHA-256 of the file. `verdict`: of its decision. `signed_by`: signers, for display.
    """
    status = ExitCode.from_promotion(promotion.outcome, verdict)
    url = version_page(uri, name, promotion.version)
    plain = {
        "name": name,
        **asdict(promotion),
        "digest": None if digest is None else str(digest),
        "url": url,
    }
    return CommandResult(
        status,
        plain,
        lambda console: _show(promotion, url, signed_by, console),
        sentence=f"{promotion.outcome.replace('_', ' ')}: {promotion.reason}",
    )


def version_page(uri: str, name: str, version: str | None) -> str | None:
    """Return the URL of the version's page in MLflow's UI; None without a version or a server.

    The URL names the page itself, because newer MLflow releases hide the list of models in a menu.
    """
    if version is None or not uri.startswith(("http://", "https://")):
        return None
    page = page_address(f"models/{quote(name, safe='')}/versions/{version}")
    return f"{redacted(uri).rstrip('/')}/{page}"


def _show(
    promotion: PromotionResult, url: str | None, signed_by: Sequence[str], console: Console
) -> None:
    facts = [promotion.outcome.replace("_", " ")]
    facts += [f"version {promotion.version}"] if promotion.version else []
    previous = promotion.previous_version
    facts += [f"previous champion: version {previous}"] if previous else []
    style = "bold red" if promotion.outcome == "refused" else "green"
    print_lines(console, ", ".join(facts), style=style)
    print_lines(console, promotion.reason, *signed_by, *([f"see {url}"] if url else []))


@contextmanager
def _open_page(
    runs: Runs, report: Path, judgment: SummaryInputs, twin: EvaluatedFile | None
) -> Iterator[RunLogger]:
    """Open the MLflow run of a release: that of `gate check --track`, or a new one whose pages are
    rendered again from all records. Raises RegistryError, StorageError."""
    from gate.mlflow_client.log_evaluation import log_evaluation, write_twin
    from gate.report.folder import rewrite_report
    from gate.summary.summarize import SummaryInputs

    decision, policy = judgment.decision, judgment.policy.twin
    tracked = runs.recorded(report, decision)
    with runs.new("gate promote") if tracked is None else runs.again(tracked) as page:
        if tracked is None:
            with temporary_folder() as folder:
                rewrite_report(folder, judgment, source=report)
                log_evaluation(page, judgment, folder=folder)
        if twin is not None and policy is not None:
            judged = SummaryInputs(decision=twin.decision, evidence=twin.evidence, policy=policy)
            write_twin(page, judged, exact=decision)
        yield page


def _description(
    judgment: SummaryInputs, page: RunLogger, *, version: tuple[str, str] | None = None
) -> str:
    """Return Markdown with links to the run, its report and the version."""
    from gate.mlflow_client.log_evaluation import links
    from gate.mlflow_client.runs import cut
    from gate.registry.version_page import BODY_LIMIT
    from gate.report.markdown import summary_markdown

    return cut(summary_markdown(judgment.summary, links(page, version=version)), BODY_LIMIT)


def _write_outcome(
    page: RunLogger, promotion: PromotionResult, judgment: SummaryInputs, name: str
) -> None:
    from gate.mlflow_client.log_evaluation import write_promotion

    version = None if promotion.version is None else (name, promotion.version)
    note = _description(judgment, page, version=version)
    note += f"\n{promotion.outcome}: {promotion.reason}\n"
    write_promotion(page, promotion, model_name=name, note=note)


@click.command(
    "promote",
    cls=VerdictCommand,
    short_help="Register a file that passed, and make it the champion.",
)
@options.MODEL
@click.option("--name", type=types.ModelName(), required=True, help="The registered model.")
@click.option(
    "--report", type=types.REPORT_FOLDER, required=True, metavar="DIR",
    help="The folder of gate check --report.",
)  # fmt: skip
@options.policy_option(
    "The policy that was applied. Default: policy.json of --report, else the built-in one."
)
@options.golden_option("Golden vectors for consumers. Default: DIR/golden of --report, if there.")
@options.spec_option("The preprocessing spec that gate check used, stored with the file.")
@click.option("--twin", type=types.ONNX_FILE, help="The quantized twin that the policy names.")
@click.option(
    "--twin-report", type=types.REPORT_FOLDER, metavar="DIR",
    help="The folder of gate check --report about the twin.",
)  # fmt: skip
@options.KEY
@options.SIGNING_TRUST
@_SUBMIT
@options.STATE_URL
@options.TRACKING_URI
@options.EXPERIMENT
@machine_options
def command(
    model: Path,
    name: str,
    report: Path,
    policy: Path | None,
    golden: Path | None,
    preprocessing: Path | None,
    twin: Path | None,
    twin_report: Path | None,
    hand_in: bool | None,
    tracking_uri: str | None,
    experiment: str | None,
    **ledger_options: Unpack[loaders.LedgerOptions],
) -> CommandResult:
    """Make the judged MODEL.onnx the champion in the registry, if its decision is a PASS.

    Verifies the signatures, hashes file, evidence and policy, and decides again first. A verdict
    without a model name is signed again for this model if a trusted key is available. Exit code 0:
    promoted, handed in, or promoted before; 1: refused; 2: failed, or the decision is an ERROR.
    After 1 and 2 the champion is unchanged.

    \b
    Examples:
      gate promote model.onnx --name digits --report report
      gate promote model.onnx --name digits --report report --policy params.yaml --json
      gate promote model.onnx --name digits --report report --policy params.yaml \\
          --twin twin/model.onnx --twin-report twin/report
      gate promote model.onnx --name digits --report report --hand-in
    """
    if (twin is None) != (twin_report is None):
        raise click.UsageError("--twin and --twin-report go together.")

    from gate.ledger.ledger import Ledger
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.policy.policy import Policy
    from gate.registry.registered_model import RegisteredModel
    from gate.report.folder import refuse_links

    uri, keys = uri_of(tracking_uri), loaders.local_keys()
    location, twin_location = loaders.ReportLocation(model, report, golden), None
    if twin is not None and twin_report is not None:
        twin_location = loaders.ReportLocation(twin, twin_report)
    for folder in (report, twin_report):
        if folder is not None:
            refuse_links(folder)
    trust = keys.trust(ledger_options["trust"], key=ledger_options["key"])
    evaluated = location.evaluated_file()
    decision = evaluated.decision
    applied_policy = Policy.from_file(policy) if policy is not None else location.policy(decision)
    submits, registry = uses_submission(applied_policy, hand_in), MlflowRegistry(uri)
    # A submission does not write to the ledger, so it needs no write access.
    ledger = (
        Ledger(loaders.parse_state(ledger_options["state"]))
        if submits
        else loaders.open_writable_ledger(ledger_options, is_new_allowed=True)
    )
    verifier = loaders.ReleaseVerifier(
        RegisteredModel(registry, ledger, name), trust, location, twin_location
    )
    release = _release(name, evaluated, preprocessing=preprocessing, twin=twin_location)
    signing = _signing(ledger_options["key"], verifier)
    verified = _verify(verifier, release, applied_policy, signing=signing, submits=submits)
    judgment = _judgment(verifier, verified, applied_policy, submits=submits)
    runs = open_runs(uri, experiment)
    promotion = _promote(runs, verifier, verified, judgment, submits=submits)
    outcome = promotion_result(
        promotion,
        name=name,
        digest=decision.subject_sha256,
        uri=uri,
        verdict=decision.verdict.value,
        signed_by=list(map(keys.describe_signer, verified.signers)),
    )
    return replace(outcome, record=judgment.summary)


def _release(
    name: str,
    evaluated: EvaluatedFile,
    *,
    preprocessing: Path | None,
    twin: loaders.ReportLocation | None,
) -> Release:
    """Return the release of a file and its twin, not verified. Raises UsageError without the
    preprocessing spec of the evidence, and the exceptions of `ReportLocation.evaluated_file`."""
    from gate.registry.release import Release

    if evaluated.evidence.source.preprocess_sha256 is not None and preprocessing is None:
        raise click.UsageError(
            "the evidence names a preprocessing spec, which is stored with the file: name it with "
            "--preprocessing."
        )
    return Release(
        model_name=name,
        onnx_path=evaluated.onnx_path,
        evidence=evaluated.evidence,
        decision=evaluated.decision,
        golden=evaluated.golden,
        preprocessing=preprocessing,
        twin=None if twin is None else twin.evaluated_file(),
    )


@dataclass(frozen=True)
class _UntrustedRelease:
    """A release that trusted keys did not sign, or not completely."""

    submitted: Release
    release: Release
    """The release with repeated decisions, because those that were submitted may be edited."""
    reason: str
    signers: tuple[PublicKey, ...] = ()
    """Always empty."""


def _verify(
    verifier: loaders.ReleaseVerifier,
    release: Release,
    policy: Policy,
    *,
    signing: VerdictSigning | None,
    submits: bool,
) -> VerifiedRelease | _UntrustedRelease:
    """Verify the release.

    Raises the exceptions of `ReleaseVerifier.verify` except Untrusted; they are recorded in the
    ledger as a refusal unless handing in.
    """
    try:
        return verifier.verify(release, policy, signing=signing)
    except Untrusted as error:
        return _UntrustedRelease(release, _repeat_decisions(release, policy), str(error))
    except (DigestMismatch, EvidenceError) as error:
        if not submits:
            verifier.model.write("refused", str(error), about=release)
        raise


def _repeat_decisions(release: Release, policy: Policy) -> Release:
    """Return the release with repeated decisions."""
    from gate.decision.decide import decide

    at, incumbent = release.decision.decided_at, release.decision.incumbent
    decision = decide(policy, release.evidence, incumbent=incumbent, decided_at=at)
    twin = release.twin
    if twin is not None and policy.twin is not None:
        at = twin.decision.decided_at
        twin = replace(twin, decision=decide(policy.twin, twin.evidence, decided_at=at))
    return replace(release, decision=decision, twin=twin)


def _judgment(
    verifier: loaders.ReleaseVerifier,
    verified: VerifiedRelease | _UntrustedRelease,
    policy: Policy,
    *,
    submits: bool,
) -> SummaryInputs:
    """Return the repeated decision with what the report folder and the champion add to it."""
    from gate.report.folder import load_change, load_explanation
    from gate.signing.keys import labels
    from gate.summary.champion_changes import compare_with_champion
    from gate.summary.summarize import SummaryInputs

    model, report = verifier.model, verifier.report.folder
    decision, evidence = verified.release.decision, verified.release.evidence
    # If gate check did not compare the files, their records are compared.
    change = load_change(report, evidence) or compare_with_champion(
        decision, evidence, loaders.load_champion_records(model, verifier.trust)
    )
    return SummaryInputs(
        decision=decision,
        evidence=evidence,
        policy=policy,
        explanation=load_explanation(report, evidence),
        change=change,
        model_name=model.name,
        steps=() if submits or not decision.passed else _steps(model.name, policy),
        signed_by=labels(verified.signers),
    )


def _promote(
    runs: Runs,
    verifier: loaders.ReleaseVerifier,
    verified: VerifiedRelease | _UntrustedRelease,
    judgment: SummaryInputs,
    *,
    submits: bool,
) -> PromotionResult:
    """Promote, submit or refuse the release, and show it on the page of an MLflow run.

    Raises the exceptions of `submit_or_promote` and `refuse_release`. A failure to write the
    outcome on the page is only a warning.
    """
    from gate.records.champion_comparison import MAX_ROWS, Trend

    model, report = verifier.model, verifier.report.folder
    promotion: PromotionResult | None = None
    try:
        with (
            spinner("promoting"),
            _open_page(runs, report, judgment, verified.release.twin) as page,
        ):
            if isinstance(verified, _UntrustedRelease):
                promotion = refuse_release(
                    model, verified.submitted, verified.reason, submits=submits
                )
            else:
                described = verified.described(
                    run_id=page.run_id,
                    description=_description(judgment, page),
                    trend=Trend(rows=judgment.summary.change.trend[-MAX_ROWS:]),
                )
                promotion = submit_or_promote(model, described, submits=submits)
            _write_outcome(page, promotion, judgment, model.name)
    except GateError as error:
        if promotion is None:
            raise
        # A failure to write the page does not undo the promotion.
        click.echo(f"warning: the outcome is missing on the run's page: {error}", err=True)
    return promotion


def _signing(key: str | None, verifier: loaders.ReleaseVerifier) -> VerdictSigning | None:
    """Return the signing of verdicts for this model; None without a key (none is created)."""
    from gate.ledger.entry import plain
    from gate.registry.verdict_signing import VerdictSigning
    from gate.signing.subjects import resource_uri

    signing_key = loaders.local_keys().signing_key_if_any(key)
    if signing_key is None:
        return None
    resource = resource_uri(plain(verifier.model.registry.identity), verifier.model.name)
    return VerdictSigning(loaders.signatory(signing_key), verifier.trust, resource)


def _steps(name: str, policy: Policy) -> tuple[Step, ...]:
    """Return the next steps for a version. A version that waits for review has no rollback."""
    from gate.summary.summary import Step

    shown = shlex.quote(str(ModelKey(current_workspace(), name)))
    history = Step(label="See what became of it", command=f"gate history --model {shown}")
    if policy.review != "automatic":
        return (history,)
    return (history, Step(label="Take it back", command=f"gate rollback {shown}"))


@click.command("rollback", short_help="Make the previous version the champion again.")
@click.argument("model", type=types.ModelName())
@click.option("--reason", default="asked for on the command line", help="Written to the ledger.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.policy_option("The policy, if it names another review tag than gate.review.")
@loaders.with_writing
@options.TRACKING_URI
@machine_options
def rollback_command(
    model: str,
    reason: str,
    yes: bool,
    policy: Path | None,
    tracking_uri: str | None,
    **ledger_options: Unpack[loaders.LedgerOptions],
) -> CommandResult:
    """Set the alias 'champion' of the registered MODEL to the version of 'previous'.

    The file of that version is downloaded first and must have the digest in the ledger.

    \b
    Examples:
      gate rollback digits
      gate rollback digits --yes --reason "wrong class order in production"
    """
    from gate.mlflow_client.connection import check_server
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.policy.policy import Policy
    from gate.registry.promotion import rollback
    from gate.registry.reviews import ReviewSettings

    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "stdin is not a terminal, so the rollback can't be confirmed: add --yes."
            )
        click.confirm(f"Restore the previous champion of '{model}'?", abort=True, err=True)
    uri, ledger = uri_of(tracking_uri), loaders.open_writable_ledger(ledger_options)
    reviews = None if policy is None else ReviewSettings.from_policy(Policy.from_file(policy))
    check_server(uri)
    with spinner("rolling back"):
        registry = MlflowRegistry(uri)
        result = rollback(registry, model, ledger=ledger, reason=reason, reviews=reviews)
    key = key_in(registry.identity, model)
    entries = (e for e in reversed(ledger.entries()) if (e.key, e.version) == (key, result.version))
    digest = next((entry.sha256 for entry in entries if entry.sha256), None)
    return promotion_result(result, name=model, digest=digest, uri=uri)
