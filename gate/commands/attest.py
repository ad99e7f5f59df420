"""`gate attest`: a verdict for those who read other forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from gate.commands.given import NEW_FILE, STATEMENT_FILE, TRUST_FILE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status
from gate.commands.vouched import read_statement

if TYPE_CHECKING:
    from gate.attestation.envelope import SignedStatement
    from gate.attestation.keys import PublicKey
    from gate.attestation.summary import Summary


class _Request(TypedDict):
    """The options, as parsed."""

    statement: Path
    form: str
    output: Path | None
    trust: Path | None
    key: str | None


@click.group("attest", short_help="Give a verdict to policy engines and other verifiers.")
def command() -> None:
    """Give a signed verdict to policy engines and other verifiers.

    \b
    Examples:
      gate attest export decision.dsse.json --format slsa
      gate attest export decision.dsse.json --format json --trust trust.yaml -o facts.json --json
    """


@command.command("export", short_help="Write a verdict in another form.")
@click.argument("statement", type=STATEMENT_FILE, metavar="decision.dsse.json")
@click.option(
    "--format", "form", type=click.Choice(("slsa", "json", "oms")), required=True,
    help="slsa: the statement, unwrapped; json: flat facts; oms: what model-signing verifies.",
)  # fmt: skip
@click.option("-o", "--output", type=NEW_FILE, metavar="FILE", help="Default: stdout.")
@click.option(
    "--trust", type=TRUST_FILE, metavar="FILE",
    help="Check the signatures first. Without it whoever reads the result believes its bearer.",
)  # fmt: skip
@click.option(
    "--key", metavar="URI|PATH",
    help="With oms: sign the manifest by this key, of ECDSA. With --trust only.",
)  # fmt: skip
@machine_options
def _export(**request: Unpack[_Request]) -> Outcome:
    """Write a verdict in another form. Exit code 1: not trusted, or oms of a rejected file; then
    nothing is written.

    slsa and json leave the envelope behind, and with it the signature: check it before, by --trust,
    in the same place that reads the result.

    \b
    Examples:
      gate attest export decision.dsse.json --format slsa | opa eval -I -d policy.rego data.allow
      gate attest export decision.dsse.json --format json --trust trust.yaml -o facts.json
      gate attest export decision.dsse.json --format oms --trust trust.yaml \\
          --key release.pem -o model.sig
    """
    from gate.attestation.statements import summary_in
    from gate.errors import Untrusted

    if request["key"] and (request["form"] != "oms" or request["trust"] is None):
        raise click.UsageError(
            "--key signs the manifest of --format oms, and only of a verdict that is checked "
            "before: give --trust, too."
        )
    try:
        signed = read_statement(request["statement"])
        summary = summary_in(signed)
        text = _text(_made(request, signed, summary))
    except Untrusted as error:
        return _refused(str(error))
    return _written(request["output"], text)


def _made(request: _Request, signed: SignedStatement, summary: Summary) -> dict[str, Any]:
    from gate.attestation.facts import bundle_of, facts_of, manifest_of
    from gate.attestation.keys import SigningKey

    trusted = _trusted(request["trust"], signed, summary)
    if request["form"] == "slsa":
        return signed.statement.to_plain()
    if request["form"] == "json":
        return facts_of(signed, summary, trusted=trusted)
    manifest = manifest_of(signed, summary)
    return (
        bundle_of(manifest, SigningKey.load(request["key"]))
        if request["key"]
        else manifest.to_plain()
    )


def _trusted(
    path: Path | None, signed: SignedStatement, summary: Summary
) -> tuple[PublicKey, ...] | None:
    from datetime import UTC, datetime

    from gate.attestation.trust import Trust

    if path is None:
        return None
    return Trust.of_file(path).signers(
        signed,
        role="measurers",
        made_at=summary.time_verified,
        now=datetime.now(UTC),
        what="the statement on the decision",
    )


def _text(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=2, allow_nan=False) + "\n"


def _refused(problem: str) -> Outcome:
    return Outcome(
        Status.REJECTED,
        {"written": None, "problem": problem},
        lambda console: console.print(problem, style="red"),
    )


def _written(output: Path | None, text: str) -> Outcome:
    from gate.storage.atomic import write_text

    if output is None:
        plain = {"written": None, "statement": json.loads(text)}
        return Outcome(
            Status.DONE, plain, lambda console: console.print(text, end="", soft_wrap=True)
        )
    write_text(output, text)
    plain = {"written": str(output), "statement": json.loads(text)}
    return Outcome(Status.DONE, plain, lambda console: console.print(f"written   {output}"))
