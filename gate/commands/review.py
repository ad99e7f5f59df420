"""`gate approve`, `gate reject`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.click_types import TRUST_FILE, ModelName
from gate.commands.loaders import local_keys
from gate.commands.options import TRACKING_URI, parse_digest, with_options
from gate.commands.options import tracking_uri as uri_of
from gate.commands.progress import spinner
from gate.commands.promote import version_page
from gate.commands.result import CommandResult, ExitCode, machine_options
from gate.errors import PolicyError
from gate.storage.safe_text import make_printable

if TYPE_CHECKING:
    from rich.console import Console

    from gate.registry.reviews import ReviewSubmission
    from gate.signing.keys import PublicKey
    from gate.signing.predicates import Word
    from gate.signing.trust import Trust

_LABEL_WIDTH = 10
"""Width of the labels in characters."""

_OPTIONS = (
    click.argument("name", type=ModelName()),
    click.argument("version"),
    click.option(
        "--key", required=True, metavar="URI", envvar="GATE_SIGNING_KEY", show_envvar=True,
        help="Key of the reviewer: a file of mode 0600, or awskms:, gcpkms:, azurekms:, hsm:.",
    ),
    click.option("--comment", metavar="TEXT", help="A comment, signed and written to the ledger."),
    click.option(
        "--sha256", metavar="HEX",
        help="Sign only if the file has this digest.",
    ),
    click.option(
        "--trust", type=TRUST_FILE, metavar="FILE", envvar="GATE_TRUST", show_envvar=True,
        help="Print whether the key is a reviewer of this trust file, such as the service's. "
        "Default: .gate/trust.yaml, if there.",
    ),
    click.option("--yes", is_flag=True, help="Do not ask for confirmation on a terminal."),
    TRACKING_URI,
)  # fmt: skip


def _signed_review(
    word: Word,
    *,
    name: str,
    version: str,
    key: str,
    comment: str | None,
    sha256: str | None,
    trust: Path | None,
    yes: bool,
    tracking_uri: str | None,
) -> CommandResult:
    """Read the version, show the statement, sign it and store it in a tag."""
    from gate.mlflow_client.connection import check_server
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.registry.reviews import ReviewSubmission
    from gate.signing.keys import SigningKey

    expected, uri = parse_digest(sha256), uri_of(tracking_uri)
    signing_key, local_trust = SigningKey.load(key), _local_trust(trust)
    with spinner("reading the version"):
        check_server(uri)
        registry = MlflowRegistry(uri)
        submission = ReviewSubmission.read(registry, name, version)
    if expected is not None:
        expected.verify(submission.subject.sha256, label=f"the file of version {version}")
    if word == "approved":
        submission.check()
    signing = _Signing(word, submission, signing_key.public, local_trust)
    if not yes and sys.stdin.isatty():
        for line in signing.lines():
            click.echo(line, err=True)
        click.confirm("Sign this?", abort=True, err=True)
    with spinner("signing"):
        size = submission.review(registry, word, signing_key, comment=comment)
    of = submission.subject
    plain = {
        "name": of.model,
        "version": of.version,
        "word": word,
        "digest": str(of.sha256),
        "decision": str(of.decision),
        "key_id": signing_key.public.key_id,
        "characters": size,
        "tag": signing.tag,
        "refused_before": signing.refused_before,
        "trust": signing.by_trust(),
        "url": version_page(uri, of.model, of.version),
    }
    return CommandResult(ExitCode.DONE, plain, signing.show)


def _local_trust(named: Path | None) -> tuple[Path, Trust] | None:
    """Return the named trust, else the folder's if it is valid, with its path.

    The service may use another trust. Raises PolicyError if the named file is invalid.
    """
    from gate.signing.trust import Trust

    if named is not None:
        return named, Trust.from_file(named)
    path = local_keys().trust_path
    with contextlib.suppress(PolicyError):
        # Signing needs no trust, so an invalid default file must not block a reviewer.
        return (path, Trust.from_file(path)) if path.exists() else None
    return None


@dataclass(frozen=True)
class _Signing:
    """A reviewer's approval or rejection for display: only facts that are available locally."""

    word: Word
    submission: ReviewSubmission
    key: PublicKey
    trust: tuple[Path, Trust] | None
    """The trust and the file that it was read from."""

    @property
    def tag(self) -> str:
        """Return the name of the tag that holds the signed review."""
        from gate.registry.reviews import STATEMENT_TAG

        return f"{STATEMENT_TAG}{self.key.short}"

    @property
    def refused_before(self) -> str | None:
        """Return the tag that already refuses the version, or None."""
        from gate.policy.sections import ReviewTag
        from gate.registry.interface import Tag
        from gate.registry.reviews import rejects

        tags = self.submission.version.tags
        if Tag.REFUSED in tags:
            return Tag.REFUSED
        return Tag.REVIEW if rejects(tags, ReviewTag()) else None

    def by_trust(self) -> dict[str, Any] | None:
        """Return whether the trust accepts the key, and the reason if not, as JSON values."""
        from datetime import UTC, datetime

        if self.trust is None:
            return None
        path, trust = self.trust
        signed, key = self.submission.statements, self.key
        measured_by = (*signed.evidence.key_ids, *signed.decision.key_ids) if signed else ()
        is_measurer = self.word == "approved" and key.key_id in measured_by
        if is_measurer and not trust.measurer_may_approve:
            refusal: str | None = f"{key.label} signed the verdict, so it can't approve it"
        else:
            refusal = trust.refusal_of(key, "reviewers", at=datetime.now(UTC))
        return {"path": str(path), "counts": not refusal, "why_not": refusal or None}

    def lines(self) -> list[str]:
        """Return lines that show the statement and the signer of the verdict.

        Everything except the key comes from the registry and is not trusted.
        """
        of, decision = self.submission.subject, self.submission.decision
        statements = self.submission.statements
        signer = "not signed: neither evidence nor decision"
        if statements is not None:
            ids = ", ".join(each[:12] for each in statements.decision.key_ids)
            signer = f"key {ids}, which the service will verify"
        facts = {
            "version": f"{of.version} of {of.model} in {of.registry}",
            "file": str(of.sha256),
            "verdict": f"{decision.verdict} on {', '.join(decision.runtimes) or 'nothing'}, "
            f"decided at {decision.decided_at}",
            "decision": str(of.decision),
            "signer": signer,
            "you": f"{self.word}, as {self.key.label}",
        }
        if self.refused_before is not None:
            facts["before"] = (
                f"already refused according to the tag {self.refused_before}; a review has no "
                "effect on a refused version"
            )
        trust = self.by_trust()
        if trust is not None:
            counts = "counts" if trust["counts"] else "does not count"
            why = "" if trust["counts"] else f": {trust['why_not']}"
            facts["trust"] = f"{trust['path']} {counts} this key as a reviewer's{why}"
        return [f"{name:<{_LABEL_WIDTH}}{make_printable(text)}" for name, text in facts.items()]

    def show(self, console: Console) -> None:
        """Print the signed statement and where the service reports its effect."""
        from rich.text import Text

        for line in self.lines():
            console.print(Text(line))
        style = "green" if self.word == "approved" else "bold red"
        console.print(Text(f"signed and stored: {self.word}", style=style))
        also = "; the tag gate.review is set to rejected" if self.word == "rejected" else ""
        console.print(f"The review is stored in the tag {self.tag} of the version{also}.")
        console.print(
            "The service decides whether it trusts the key and writes the result to the tag "
            "gate.review_result."
        )


@click.command("approve", short_help="Sign the approval of a version.")
@with_options(_OPTIONS)
@machine_options
def approve_command(**options: Any) -> CommandResult:
    """Approve VERSION of the registered model NAME, for a policy with review: signed.

    Signs the digests of file and decision with the time, and stores the signature in a tag of the
    version. You need the right to edit the model, but no access to the ledger or the service. The
    service promotes the version when enough of its trusted reviewers have approved. Exit code 0:
    signed; 2: not signed, or the decision is not a PASS.

    \b
    Examples:
      gate approve digits 7 --key ~/.keys/alice.pem
      gate approve digits 7 --key awskms:alias/reviews --comment "looked at the sevens"
      gate approve digits 7 --key ~/.keys/alice.pem --sha256 9f86d0... --json
    """
    return _signed_review("approved", **options)


# The tag alone would suffice. The signature records the reviewer in the ledger.
@click.command("reject", short_help="Sign the final rejection of a version.")
@with_options(_OPTIONS)
@machine_options
def reject_command(**options: Any) -> CommandResult:
    """Reject VERSION of the registered model NAME. This is final for its bytes.

    Signs the rejection, and sets the tag gate.review to rejected. The service obeys the tag under
    every review setting, even if it does not trust the key. Exit code 0: signed; 2: not signed.

    \b
    Examples:
      gate reject digits 7 --key ~/.keys/alice.pem --comment "sevens read as ones"
      gate reject digits 7 --key awskms:alias/reviews --json
    """
    return _signed_review("rejected", **options)
