"""`gate lint`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from gate.commands.ci_files import CiFile, CiFilesCommand, Ending
from gate.commands.options import FACTORY, STRATEGIES
from gate.commands.progress import spinner
from gate.commands.result import CommandResult, ExitCode, machine_options

if TYPE_CHECKING:
    from gate.records.export import LintLevel, Strategy


def _sarif(ending: Ending) -> str:
    from gate.lint.lint import LintReport
    from gate.model.source_code import file_below
    from gate.report.ci_formats import sarif_log

    outcome = ending.outcome
    if outcome is None or not isinstance(outcome.record, LintReport):
        return sarif_log(None, exit_code=ExitCode.NOT_JUDGED, failure=ending.failure)
    root = Path.cwd()
    return sarif_log(
        outcome.record, exit_code=outcome.status, file_of=lambda path: file_below(root, path)
    )


class _LintCommand(CiFilesCommand):
    """A command that can also write SARIF, for GitHub code scanning."""

    files: ClassVar[tuple[CiFile, ...]] = (
        CiFile(
            "--sarif",
            "Also write the findings as SARIF 2.1.0, for GitHub code scanning and editors. Paths "
            "are relative to the current folder.",
            _sarif,
        ),
    )


@click.command(
    "lint", cls=_LintCommand, short_help="Find source lines that an ONNX export gets wrong."
)
@FACTORY
@click.option(
    "--level", type=click.Choice(["error", "warning", "note"]), default="error",
    show_default=True, help="Exit with 1 for findings of this level or worse.",
)  # fmt: skip
@click.option(
    "--strategy", type=click.Choice(STRATEGIES), default="traced", show_default=True,
    help="Export strategy; the rules depend on it.",
)  # fmt: skip
@machine_options
def command(factory: str, level: LintLevel, strategy: Strategy) -> CommandResult:
    """Check the source of every forward method in the model of FACTORY, and of its callees.

    FACTORY is a callable without arguments that returns the nn.Module. The model is built, but not
    run. docs/lint lists the rules; `# noqa: TRC001` silences one on its line.

    Exit code 0: no finding of that level; 1: at least one; 2: the source could not be checked.

    \b
    Examples:
      gate lint mypackage.models:build
      gate lint mypackage.models:build --level warning
      gate lint mypackage.models:build --strategy scripted --json
      gate lint mypackage.models:build --sarif lint.sarif
    """
    with spinner("reading the model"):
        from gate.lint.lint import lint_model
        from gate.model.loading import build_model
        from gate.report.terminal import print_findings

        report = lint_model(build_model(factory), strategy=strategy)
    pages = {finding.code: finding.page for finding in report.findings}
    refused = report.refused(level)
    # If no source could be read, the absence of findings proves nothing.
    is_read = report.functions or not report.unread
    return CommandResult(
        ExitCode.REJECTED if refused else ExitCode.DONE if is_read else ExitCode.NOT_JUDGED,
        {**report.to_plain(), "pages": pages, "refused": len(refused)},
        lambda console: print_findings(report, console),
        record=report,
    )
