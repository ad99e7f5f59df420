"""`gate verify-release`, `gate verify-verdict`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands import click_types as types
from gate.commands.options import (
    MODEL,
    address,
    golden_option,
    parse_digest,
    policy_option,
    spec_option,
)
from gate.commands.progress import spinner
from gate.commands.result import (
    CommandResult,
    ExitCode,
    limit_options,
    machine_options,
    print_lines,
)
from gate.errors import DigestMismatch, EvidenceError, StorageError, Untrusted
from gate.sandbox.limits import FILE_S, SandboxLimits
from gate.storage.files import open_plain
from gate.storage.safe_text import make_printable
from gate.storage.untrusted_files import RECORD_LIMIT
from gate.storage.workspace import current_workspace, in_workspace, split_identity

if TYPE_CHECKING:
    from rich.console import Console

    from gate.golden.manifest import GoldenResult, OutputResult
    from gate.records.evidence import Evidence
    from gate.signing.statement import SignedStatement
    from gate.signing.trust import Trust
    from gate.signing.verification import ComparedArtifacts, VerdictVerification


def verify_statement(
    statement: Path, load_artifacts: Callable[[], ComparedArtifacts], *, trust: Trust
) -> VerdictVerification:
    """Verify a statement with its records.

    An invalid record gives an untrusted result. Raises PolicyError, StorageError if the statement
    can't be verified.
    """
    from datetime import UTC, datetime

    from gate.signing.verification import VerdictVerification, verify_verdict

    try:
        signed, artifacts = read_statement(statement), load_artifacts()
    except (Untrusted, DigestMismatch, EvidenceError) as error:
        return VerdictVerification(trusted=False, summary=None, problems=(str(error),))
    return verify_verdict(signed, artifacts, trust=trust, now=datetime.now(UTC))


def read_statement(path: Path) -> SignedStatement:
    """Open the envelope in a file. Raises Untrusted, StorageError."""
    from gate.signing.statement import ENVELOPE_LIMIT, SignedStatement

    return SignedStatement.from_bytes(content(path, limit=ENVELOPE_LIMIT), label=path.name)


def content(path: Path, *, limit: int) -> bytes:
    """Return at most `limit` + 1 bytes of a file named by the user. Raises StorageError."""
    try:
        with open_plain(path) as stream:
            return stream.read(limit + 1)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"cannot read {path}: {reason}. Check the path.") from error


def show(verification: VerdictVerification, console: Console, headline: str | None = None) -> None:
    """Print the result for users: the outcome first, then the content of the statement."""
    style = "bold green" if verification.trusted else "bold red"
    print_lines(console, headline or outcome(verification), style=style)
    show_statement(verification, console)


def outcome(verification: VerdictVerification) -> str:
    """Return the result of the verification in a few words."""
    if verification.trusted:
        assert verification.summary is not None
        return f"TRUSTED {verification.summary.verification_result}"
    if _is_proven(verification):
        assert verification.summary is not None
        return f"NOT TRUSTED: a trusted key signed {verification.summary.verification_result}"
    count = len(verification.problems)
    return f"NOT TRUSTED ({count} problem{'' if count == 1 else 's'})"


def _is_proven(verification: VerdictVerification) -> bool:
    """Return whether the statement is verified; then only its verdict can be a problem."""
    not_passed = "result" not in verification.checked
    return bool(verification.signers) and len(verification.problems) == not_passed


def show_statement(verification: VerdictVerification, console: Console) -> None:
    """Print the problems of a statement and its content, marked as a claim unless verified."""
    print_lines(console, *(f"- {problem}" for problem in verification.problems), style="red")
    summary = verification.summary
    if summary is not None:
        levels = (summary.verification_result, *summary.verified_levels)
        facts = {
            "verdict": ", ".join(dict.fromkeys(levels)),
            "model": str(summary.model),
            "for": summary.resource_uri,
            "made": summary.time_verified,
        }
        if not _is_proven(verification):
            console.print("The statement claims, without proof:")
        for name, fact in facts.items():
            console.print(f"{name:<10}{make_printable(fact)}")
    if verification.signers:
        names = ", ".join(key.label for key in verification.signers)
        console.print(f"signed by {make_printable(names)}")
    console.print(f"{'verified':<10}{', '.join(verification.checked) or 'nothing'}")
    if verification.unchecked:
        names = ", ".join(verification.unchecked)
        console.print(make_printable(f"not verified, because no file was given: {names}"))


@click.command("verify-release", short_help="Recompute the golden vectors of a release here.")
@MODEL
@golden_option("Golden vectors of the file: golden.json and its arrays.", required=True)
@click.option("--sha256", metavar="HEX", help="Expected digest of the file.")
@click.option("--golden-sha256", metavar="HEX", help="Expected digest of golden.json.")
@click.option(
    "--verdict", type=types.STATEMENT_FILE, metavar="decision.dsse.json",
    help="The signed verdict of the release: a trusted key must have signed the digests of file "
    "and vectors, which are verified first. With --trust.",
)  # fmt: skip
@click.option(
    "--trust", type=types.TRUST_FILE, metavar="FILE",
    help="The keys that you trust (gate keys trust).",
)  # fmt: skip
@machine_options
@limit_options(FILE_S)
def verify_release_command(
    model: Path,
    golden: Path,
    sha256: str | None,
    golden_sha256: str | None,
    verdict: Path | None,
    trust: Path | None,
    limits: SandboxLimits,
) -> CommandResult:
    """Recompute the golden vectors of a release with MODEL.onnx on this machine.

    Needs ONNX Runtime, but neither PyTorch nor the model's code. Of a release of several files
    (release.yaml) each part is computed, but its chain is not run. Exit code 0: these are the
    released bytes, and every output is within its tolerance; 1: they are not, or one is not; 2: the
    golden vectors could not be computed within the limits of time and memory.

    Golden vectors do not prove where a file comes from. For that, give the signed verdict and your
    trusted keys, or the digests of the ledger or the deployed manifest.

    \b
    Examples:
      gate verify-release model.onnx --golden golden
      gate verify-release model.onnx --golden golden --json
      gate verify-release model.onnx --golden golden --sha256 9f86d0... --golden-sha256 60303a...
      gate verify-release model.onnx --golden golden --verdict decision.dsse.json --trust trust.yaml
    """
    from gate.golden.verify import verify_golden_in_sandbox
    from gate.signing.trust import Trust
    from gate.signing.verification import ComparedArtifacts

    digests = {"sha256": parse_digest(sha256), "golden_sha256": parse_digest(golden_sha256)}
    if (verdict is None) != (trust is None):
        raise click.UsageError("--verdict and --trust go together: the trust file verifies it.")
    verification = None
    if verdict is not None and trust is not None:
        artifacts = ComparedArtifacts(model, golden=golden)
        verification = verify_statement(verdict, lambda: artifacts, trust=Trust.from_file(trust))
    if verification is not None and not verification.trusted:
        # A file without a trusted signature is never run.
        plain = {
            "verdict": "FAIL",
            "trusted": False,
            "statement": verification.to_plain(),
            "problems": verification.problems,
        }
        headline = f"FAIL, {outcome(verification)}: nothing was run"
        return CommandResult(
            ExitCode.REJECTED, plain, lambda console: show(verification, console, headline)
        )
    with spinner("computing the golden vectors"):
        result = verify_golden_in_sandbox(model, golden, limits, **digests)
    plain = {
        "verdict": _verdict(result),
        "trusted": None if verification is None else verification.trusted,
        **result.to_plain(),
        **({} if verification is None else {"statement": verification.to_plain()}),
    }
    return CommandResult(
        ExitCode.DONE if result.passed else ExitCode.REJECTED,
        plain,
        lambda console: _show(result, verification, console),
    )


def _verdict(result: GoldenResult) -> str:
    return "PASS" if result.passed else "FAIL"


def _show(result: GoldenResult, verification: VerdictVerification | None, console: Console) -> None:
    from gate.report.terminal import build_table

    verdict = _verdict(result) + (f", {outcome(verification)}" if verification is not None else "")
    print_lines(console, verdict, style="bold green" if result.passed else "bold red")
    if verification is not None:
        show_statement(verification, console)
    console.print(f"file      {result.model_sha256}")
    console.print(f"golden    {result.golden_sha256}, {result.samples} samples")
    runs = make_printable(", ".join(result.providers) or "not run")
    console.print(f"computed  ONNX Runtime {make_printable(result.onnxruntime)}: {runs}")
    if result.outputs:
        headings = ("output", "max_abs_diff", "tolerance", "top-1 agreement")
        console.print(build_table(headings, map(_cells, result.outputs)))
    if any(output.part for output in result.outputs):
        console.print("chain     not run: it is user code; compare its golden vectors there")
    print_lines(console, *result.problems, style="red")


def _cells(output: OutputResult) -> tuple[str, ...]:
    return (
        output.name if output.part is None else f"{output.part}: {output.name}",
        "" if output.max_abs_diff is None else f"{output.max_abs_diff:.3g}",
        f"{output.tolerance:.3g}",
        "" if output.top1_agreement is None else f"{output.top1_agreement:.4g}",
    )


@click.command("verify-verdict", short_help="Verify a signed verdict about a file.")
@click.argument("statement", type=types.STATEMENT_FILE, metavar="decision.dsse.json")
@click.option(
    "--model", type=types.ONNX_FILE, required=True, metavar="MODEL.onnx",
    help="The file, with its external data in the same folder.",
)  # fmt: skip
@click.option(
    "--trust", type=types.TRUST_FILE, required=True, metavar="FILE",
    help="The keys that you trust (gate keys trust). Do not take this file from the sender.",
)  # fmt: skip
@click.option(
    "--evidence", type=types.EVIDENCE_FILE, metavar="evidence.json",
    help="The evidence of the verdict; evidence.dsse.json in its folder is verified too.",
)  # fmt: skip
@click.option(
    "--evidence-statement", type=types.STATEMENT_FILE, metavar="FILE",
    help="The signed measurement. Default: evidence.dsse.json beside the evidence, if there.",
)  # fmt: skip
@policy_option("The applied policy. With --evidence, the decision is repeated.", metavar="FILE")
@click.option(
    "--name", type=types.ModelName(),
    help="The registered model that the verdict must name. Requires --registry.",
)  # fmt: skip
@click.option(
    "--registry",
    metavar="URI",
    help="The MLflow registry that it must be for. It is not contacted.",
)
@golden_option("Golden vectors of the file.")
@spec_option("Preprocessing spec of the file.")
@machine_options
def verify_verdict_command(
    statement: Path,
    model: Path,
    trust: Path,
    evidence: Path | None,
    evidence_statement: Path | None,
    policy: Path | None,
    name: str | None,
    registry: str | None,
    golden: Path | None,
    preprocessing: Path | None,
) -> CommandResult:
    """Verify that a trusted key signed a recent verdict for exactly this file, and that it PASSED.

    Needs files only: no PyTorch, MLflow, ONNX Runtime or network. The model is not run. Exit code
    0: trusted and PASSED; 1: not, with every problem; 2: could not be verified.

    \b
    Examples:
      gate verify-verdict decision.dsse.json --model model.onnx --trust trust.yaml
      gate verify-verdict gate/decision.dsse.json --model model.onnx --trust trust.yaml \\
          --name digits --registry https://mlflow.example.org --golden golden
      gate verify-verdict report/decision.dsse.json --model model.onnx --trust trust.yaml \\
          --evidence report/evidence.json --policy params.yaml --json
    """
    from gate.policy.policy import Policy
    from gate.preprocess.spec import PreprocessSpec
    from gate.signing.trust import Trust
    from gate.signing.verification import ComparedArtifacts

    def load_artifacts() -> ComparedArtifacts:
        measured, measurement = _evidence(evidence, evidence_statement)
        return ComparedArtifacts(
            model,
            registered=_registry_and_name(registry, name),
            evidence=measured,
            measurement=measurement,
            policy=Policy.from_file(policy) if policy else None,
            golden=golden,
            preprocessing=PreprocessSpec.from_file(preprocessing).digest()
            if preprocessing
            else None,
        )

    verification = verify_statement(statement, load_artifacts, trust=Trust.from_file(trust))
    return CommandResult(
        ExitCode.DONE if verification.trusted else ExitCode.REJECTED,
        verification.to_plain(),
        lambda console: show(verification, console),
    )


def _evidence(
    path: Path | None, statement: Path | None
) -> tuple[Evidence | None, SignedStatement | None]:
    from gate.records.evidence import Evidence
    from gate.records.layout import EVIDENCE_STATEMENT

    if path is None:
        if statement is not None:
            raise click.UsageError("--evidence-statement requires --evidence.")
        return None, None
    default = path.with_name(EVIDENCE_STATEMENT)
    if statement is None and default.exists():
        statement = default
    evidence = Evidence.from_untrusted(content(path, limit=RECORD_LIMIT), label=str(path))
    return evidence, None if statement is None else read_statement(statement)


def _registry_and_name(registry: str | None, name: str | None) -> tuple[frozenset[str], str] | None:
    if (registry is None) != (name is None):
        raise click.UsageError("--name and --registry go together.")
    if registry is None or name is None:
        return None
    from gate.ledger.entry import plain

    identity = plain(address(registry) or registry)
    if split_identity(identity)[1] is None:
        identity = in_workspace(identity, current_workspace())
    return frozenset({identity}), name
