"""`gate verify-release`: a consumer proves that its file computes what was promoted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.bounded.limits import FILE_S, ChildLimits
from gate.commands.child import limit_options
from gate.commands.given import GOLDEN_FOLDER, STATEMENT_FILE, TRUST_FILE
from gate.commands.options import MODEL, given_digest
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status
from gate.commands.vouched import outcome, show_statement, verified

if TYPE_CHECKING:
    from rich.console import Console

    from gate.attestation.verdict import Verified
    from gate.golden.result import GoldenResult, OutputResult


class _Request(TypedDict):
    """The options, as parsed."""

    model: Path
    golden: Path
    sha256: str | None
    golden_sha256: str | None
    verdict: Path | None
    trust: Path | None
    limits: ChildLimits


@click.command("verify-release", short_help="Prove that a released file computes the same here.")
@MODEL
@click.option(
    "--golden", type=GOLDEN_FOLDER, required=True, metavar="FOLDER",
    help="The golden vectors that came with the file: golden.json and its arrays.",
)  # fmt: skip
@click.option("--sha256", metavar="HEX", help="The digest that the file must have.")
@click.option("--golden-sha256", metavar="HEX", help="The digest that golden.json must have.")
@click.option(
    "--verdict", type=STATEMENT_FILE, metavar="decision.dsse.json",
    help="The signed verdict that came with it: a trusted key must vouch for file and vectors, "
    "before either is read. With --trust.",
)  # fmt: skip
@click.option(
    "--trust", type=TRUST_FILE, metavar="FILE", help="Whose signatures count (gate keys trust)."
)
@machine_options
@limit_options(FILE_S)
def command(**request: Unpack[_Request]) -> Outcome:
    """Compute the golden vectors of a release again with MODEL.onnx, on this machine.

    Needs ONNX Runtime, neither PyTorch nor the model's code. Of a release of several files
    (release.yaml) each part is computed; its chain is code, and is not run. Exit code 0: these are
    the released bytes, and every output is within its tolerance; 1: not so; 2: could not look, or
    not within the limits of time and memory.

    File and vectors prove each other, not where they come from: give the signed verdict and whom
    you trust, or take the digests from the ledger or the deployed manifest.

    \b
    Examples:
      gate verify-release model.onnx --golden golden
      gate verify-release model.onnx --golden golden --json
      gate verify-release model.onnx --golden golden --sha256 9f86d0... --golden-sha256 60303a...
      gate verify-release model.onnx --golden golden --verdict decision.dsse.json --trust trust.yaml
    """
    from gate.golden.foreign import verify_within

    digests = {name: given_digest(request[name]) for name in ("sha256", "golden_sha256")}
    vouched = _vouched(request)
    if vouched is not None and not vouched.trusted:
        # Nothing of a file is run that nobody vouches for.
        plain = {
            "verdict": "FAIL",
            "trusted": False,
            "statement": vouched.to_plain(),
            "problems": vouched.problems,
        }
        return Outcome(Status.REJECTED, plain, lambda console: _show_unrun(vouched, console))
    with spinner("computing the golden vectors"):
        result = verify_within(request["model"], request["golden"], request["limits"], **digests)
    plain = {
        "verdict": _verdict(result),
        "trusted": None if vouched is None else vouched.trusted,
        **result.to_plain(),
    }
    if vouched is not None:
        plain["statement"] = vouched.to_plain()
    return Outcome(
        Status.DONE if result.passed else Status.REJECTED,
        plain,
        lambda console: _show(result, vouched, console),
    )


def _vouched(request: _Request) -> Verified | None:
    """Who vouches for the file and the vectors; None: nobody asks for it."""
    if (request["verdict"] is None) != (request["trust"] is None):
        raise click.UsageError("--verdict and --trust go together: whose signature would count?")
    if request["verdict"] is None or request["trust"] is None:
        return None
    from gate.attestation.trust import Trust
    from gate.attestation.verdict import Beside

    beside = Beside(request["model"], golden=request["golden"])
    return verified(request["verdict"], lambda: beside, trust=Trust.of_file(request["trust"]))


def _verdict(result: GoldenResult) -> str:
    return "PASS" if result.passed else "FAIL"


def _show_unrun(vouched: Verified, console: Console) -> None:
    from rich.text import Text

    console.print(Text(f"FAIL, {outcome(vouched)}: nothing was run", style="bold red"))
    show_statement(vouched, console)


def _show(result: GoldenResult, vouched: Verified | None, console: Console) -> None:
    from rich.text import Text

    from gate.report.table import table
    from gate.story.wording import printable

    verdict = _verdict(result) + (f", {outcome(vouched)}" if vouched is not None else "")
    console.print(Text(verdict, style="bold green" if result.passed else "bold red"))
    if vouched is not None:
        show_statement(vouched, console)
    console.print(f"file      {result.model_sha256}")
    console.print(f"golden    {result.golden_sha256}, {result.samples} samples")
    runs = printable(", ".join(result.providers) or "not run")
    console.print(f"computed  ONNX Runtime {printable(result.onnxruntime)}: {runs}")
    if result.outputs:
        headings = ("output", "max_abs_diff", "tolerance", "top-1 agreement")
        console.print(table(headings, map(_cells, result.outputs)))
    if any(output.part for output in result.outputs):
        console.print("chain     not run: the chain is your code, and its vectors are for that")
    for problem in result.problems:
        console.print(Text(printable(problem), style="red"))


def _cells(output: OutputResult) -> tuple[str, ...]:
    return (
        output.name if output.part is None else f"{output.part}: {output.name}",
        "" if output.max_abs_diff is None else f"{output.max_abs_diff:.3g}",
        f"{output.tolerance:.3g}",
        "" if output.top1_agreement is None else f"{output.top1_agreement:.4g}",
    )
