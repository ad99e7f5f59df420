"""`gate verify-verdict`: anybody checks a verdict by its statement, with files only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.commands.given import (
    EVIDENCE_FILE,
    GOLDEN_FOLDER,
    ONNX_FILE,
    POLICY_FILE,
    SPEC_FILE,
    STATEMENT_FILE,
    TRUST_FILE,
)
from gate.commands.options import address
from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status
from gate.commands.vouched import content, read_statement, show, verified

if TYPE_CHECKING:
    from gate.attestation.envelope import SignedStatement
    from gate.attestation.verdict import Beside
    from gate.records.evidence import Evidence


class _Question(TypedDict):
    """The options, as parsed."""

    statement: Path
    model: Path
    trust: Path
    evidence: Path | None
    evidence_statement: Path | None
    policy: Path | None
    name: str | None
    registry: str | None
    golden: Path | None
    preprocessing: Path | None


@click.command("verify-verdict", short_help="Check who vouches for a file, and that it passed.")
@click.argument("statement", type=STATEMENT_FILE, metavar="decision.dsse.json")
@click.option(
    "--model", type=ONNX_FILE, required=True, metavar="MODEL.onnx",
    help="The file. Its external data lies beside it.",
)  # fmt: skip
@click.option(
    "--trust", type=TRUST_FILE, required=True, metavar="FILE",
    help="Whose signatures count: yours, not the sender's (gate keys trust).",
)  # fmt: skip
@click.option(
    "--evidence", type=EVIDENCE_FILE, metavar="evidence.json",
    help="What the verdict was made on; evidence.dsse.json beside it is checked as well.",
)  # fmt: skip
@click.option(
    "--evidence-statement", type=STATEMENT_FILE, metavar="FILE",
    help="Who measured. Default: evidence.dsse.json beside the evidence, where it is there.",
)  # fmt: skip
@click.option(
    "--policy", type=POLICY_FILE, metavar="FILE",
    help="The policy that was applied. With --evidence the decision is made again.",
)  # fmt: skip
@click.option("--name", help="The registered model that the verdict must be for; with --registry.")
@click.option(
    "--registry", metavar="URI", help="The MLflow registry that it must be for. Nobody is asked."
)
@click.option(
    "--golden", type=GOLDEN_FOLDER, metavar="FOLDER", help="The golden vectors that came with it."
)
@click.option("--preprocessing", type=SPEC_FILE, metavar="SPEC", help="The spec that came with it.")
@machine_options
def command(**question: Unpack[_Question]) -> Outcome:
    """Check a verdict: a trusted key signed it, not too long ago, on exactly these bytes, and it
    PASSED.

    Needs files only: no PyTorch, MLflow, ONNX Runtime or network; nothing of the model is run. Exit
    code 0: trusted, and PASSED; 1: not so, and everything that is wrong is printed; 2: could not
    look.

    \b
    Examples:
      gate verify-verdict decision.dsse.json --model model.onnx --trust trust.yaml
      gate verify-verdict gate/decision.dsse.json --model model.onnx --trust trust.yaml \\
          --name digits --registry https://mlflow.example.org --golden golden
      gate verify-verdict report/decision.dsse.json --model model.onnx --trust trust.yaml \\
          --evidence report/evidence.json --policy params.yaml --json
    """
    from gate.attestation.trust import Trust

    trust = Trust.of_file(question["trust"])
    found = verified(question["statement"], lambda: _beside(question), trust=trust)
    return Outcome(
        Status.DONE if found.trusted else Status.REJECTED,
        found.to_plain(),
        lambda console: show(found, console),
    )


def _beside(question: _Question) -> Beside:
    """What was named, read. Raises Untrusted, EvidenceError and DigestMismatch where it is no such
    record, PolicyError, StorageError."""
    from gate.attestation.verdict import Beside
    from gate.policy.policy import Policy
    from gate.preprocess.spec import PreprocessSpec

    policy, spec = question["policy"], question["preprocessing"]
    evidence, measurement = _evidence(question)
    return Beside(
        question["model"],
        registered=_registered(question["registry"], question["name"]),
        evidence=evidence,
        measurement=measurement,
        policy=Policy.of_file(policy) if policy else None,
        golden=question["golden"],
        preprocessing=PreprocessSpec.of_file(spec).digest() if spec else None,
    )


def _evidence(question: _Question) -> tuple[Evidence | None, SignedStatement | None]:
    from gate.records.evidence import Evidence
    from gate.records.names import EVIDENCE_STATEMENT
    from gate.storage.foreign import RECORD_LIMIT

    path, statement = question["evidence"], question["evidence_statement"]
    if path is None:
        if statement is not None:
            raise click.UsageError("--evidence-statement is about evidence: give --evidence, too.")
        return None, None
    beside = path.with_name(EVIDENCE_STATEMENT)
    if statement is None and beside.exists():
        statement = beside
    evidence = Evidence.from_foreign(content(path, limit=RECORD_LIMIT), what=str(path))
    return evidence, None if statement is None else read_statement(statement)


def _registered(registry: str | None, name: str | None) -> tuple[frozenset[str], str] | None:
    if (registry is None) != (name is None):
        raise click.UsageError("--name and --registry go together: a name is one in a registry.")
    if registry is None or name is None:
        return None
    from gate.ledger.addresses import plain

    return frozenset({plain(address(registry) or registry)}), name
