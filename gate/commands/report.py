"""`gate report`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.click_types import POLICY_FILE, RECORDS
from gate.commands.loaders import local_keys
from gate.commands.options import FILE, SIGNING_TRUST
from gate.commands.result import CommandResult, ExitCode, machine_options
from gate.storage import files

if TYPE_CHECKING:
    from rich.console import Console

    from gate.summary.summary import Summary


_COMPARED = "comparison.html"


@click.command("report", short_help="Render a report again, or compare two.")
@click.argument("records", type=RECORDS)
@click.argument("other", type=RECORDS, required=False)
@click.option(
    "--policy", type=POLICY_FILE,
    help="Repeat the decision with this policy instead of reading it (for both of two records).",
)  # fmt: skip
@click.option(
    "--output", type=FILE, metavar="FILE.html",
    help=f"Default: report.html next to the evidence, or {_COMPARED} next to OTHER.",
)  # fmt: skip
@SIGNING_TRUST
@machine_options
def command(
    records: Path,
    other: Path | None,
    policy: Path | None,
    output: Path | None,
    trust: Path | None,
) -> CommandResult:
    """Write the HTML report of RECORDS, an evidence.json or a folder with one.

    The report names the signing key, if it is trusted. With OTHER, write the report of OTHER with
    its changes since RECORDS; the options apply to both.

    Exit code 0: written, whatever the verdict; 2: not written.

    \b
    Examples:
      gate report report
      gate report reports/evidence.json --policy params.yaml --output stricter.html
      gate report report-of-monday report-of-today
      gate report report --json
    """
    from gate.ledger.entry import now
    from gate.policy.policy import Policy
    from gate.records.layout import PAGE
    from gate.report.folder import read_report
    from gate.report.html_page import render_page
    from gate.summary.render import with_texts

    new_policy = Policy.from_file(policy) if policy is not None else None
    trusted_keys = local_keys().trust_if_any(trust)
    read = partial(read_report, policy=new_policy, now=now())
    if other is None:
        source, name, report = records, PAGE, read(records, trust=trusted_keys)
    else:
        source, name = other, _COMPARED
        report = read(other, trust=trusted_keys, before=read(records))
    path = output or (source if source.is_dir() else source.parent) / name
    files.write_text(path, render_page(report))
    return CommandResult(
        ExitCode.DONE,
        {
            "verdict": report.decision.verdict.value,
            "output": str(path),
            "story": with_texts(
                report.summary, onnx_reference=report.summary.subject.is_onnx_reference
            ),
        },
        lambda console: _show(report.summary, path, console, compared=other is not None),
    )


def _show(summary: Summary, output: Path, console: Console, *, compared: bool) -> None:
    from rich.text import Text

    from gate.report.terminal import build_table

    console.print(Text(f"{summary.headline.verdict}  {summary.headline.sentence}"))
    if compared:
        rows, changed = summary.change.rows, summary.change.changed_rows
        if changed:
            cells = [(row.name, row.before, row.now, row.sense or "") for row in changed]
            console.print(build_table(("what changed", "before", "now", ""), cells))
        console.print(f"{len(rows) - len(changed)} of {len(rows)} did not change")
    console.print(f"report  {output}")
