"""`gate verify-release`: a consumer proves that its file computes what was promoted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.bounded.limits import FILE_S, ChildLimits
from gate.commands.child import limit_options
from gate.commands.given import GOLDEN_FOLDER
from gate.commands.options import MODEL, given_digest
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.golden.record import GoldenResult, OutputResult


@click.command("verify-release", short_help="Prove that a released file computes the same here.")
@MODEL
@click.option(
    "--golden", type=GOLDEN_FOLDER, required=True, metavar="FOLDER",
    help="The golden vectors that came with the file: golden.json and its arrays.",
)  # fmt: skip
@click.option("--sha256", metavar="HEX", help="The digest that the file must have.")
@click.option("--golden-sha256", metavar="HEX", help="The digest that golden.json must have.")
@machine_options
@limit_options(FILE_S)
def command(model: Path, golden: Path, limits: ChildLimits, **digests: str | None) -> Outcome:
    """Compute the golden vectors of a release again with MODEL.onnx, on this machine.

    Needs ONNX Runtime, neither PyTorch nor the model's code. Exit code 0: these are the released
    bytes, and every output is within its tolerance; 1: not so; 2: could not look, or not within
    the limits of time and memory.

    File and vectors prove each other, not where they come from: take the digests from the ledger
    or the deployed manifest.

    \b
    Examples:
      gate verify-release model.onnx --golden golden
      gate verify-release model.onnx --golden golden --json
      gate verify-release model.onnx --golden golden --sha256 9f86d0... --golden-sha256 60303a...
    """
    from gate.golden.foreign import verify_within

    expected = {name: given_digest(digest) for name, digest in digests.items()}
    with spinner("computing the golden vectors"):
        result = verify_within(model, golden, limits, **expected)
    return Outcome(
        Status.DONE if result.passed else Status.REJECTED,
        {"verdict": _verdict(result), **result.to_plain()},
        lambda console: _show(result, console),
    )


def _verdict(result: GoldenResult) -> str:
    return "PASS" if result.passed else "FAIL"


def _show(result: GoldenResult, console: Console) -> None:
    from rich.text import Text

    from gate.report.table import table
    from gate.story.wording import printable

    console.print(f"file      {result.model_sha256}")
    console.print(f"golden    {result.golden_sha256}, {result.samples} samples")
    runs = printable(", ".join(result.providers) or "not run")
    console.print(f"computed  ONNX Runtime {printable(result.onnxruntime)}: {runs}")
    if result.outputs:
        headings = ("output", "max_abs_diff", "tolerance", "top-1 agreement")
        console.print(table(headings, map(_cells, result.outputs)))
    for problem in result.problems:
        console.print(Text(printable(problem), style="red"))
    style = "bold green" if result.passed else "bold red"
    console.print(Text(_verdict(result), style=style))


def _cells(output: OutputResult) -> tuple[str, ...]:
    return (
        output.name,
        "" if output.max_abs_diff is None else f"{output.max_abs_diff:.3g}",
        f"{output.tolerance:.3g}",
        "" if output.top1_agreement is None else f"{output.top1_agreement:.4g}",
    )
