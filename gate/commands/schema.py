"""`gate schema`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from gate.commands.result import CommandResult, ExitCode, machine_options

if TYPE_CHECKING:
    from rich.console import Console

NAMES = ("gate.yaml", "release.yaml", "evidence", "decision", "summary", "statement")


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a file of this name (one of `NAMES`)."""
    from gate.records.schemas import record_schema, settings_schema

    if name == "gate.yaml":
        from gate.policy.policy import Policy

        return settings_schema(Policy, title="parity-gate policy", section="gate")
    if name == "release.yaml":
        from gate.onnx_file.release_file import ReleaseFile

        return settings_schema(ReleaseFile, title="parity-gate release of several files")
    if name == "evidence":
        from gate.records.evidence import Evidence

        return record_schema(Evidence, title="parity-gate evidence")
    if name == "decision":
        from gate.decision.decide import Decision

        return record_schema(Decision, title="parity-gate decision")
    if name == "summary":
        from gate.summary.summary import Summary

        return record_schema(Summary, title="parity-gate summary")
    from gate.signing.statement import Statement

    return record_schema(
        Statement, title="in-toto statement: the payload of parity-gate's envelopes"
    )


def schema_text(name: str) -> str:
    """Return the schema as a file has it."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


@click.command("schema", short_help="Print the JSON Schema of a file.")
@click.argument("name", type=click.Choice(NAMES), metavar=f"[{'|'.join(NAMES)}]")
@machine_options
def command(name: str) -> CommandResult:
    """Print the JSON Schema (2020-12) of gate.yaml, of release.yaml, or of a record.

    Editors complete and check a YAML file by it, and check-jsonschema validates files in CI.
    docs/schemas.md says how.

    \b
    Examples:
      gate schema gate.yaml > gate.schema.json
      gate schema evidence | check-jsonschema --schemafile /dev/stdin report/evidence.json
    """
    return CommandResult(
        ExitCode.DONE, schema_of(name), lambda console: _write(console, schema_text(name))
    )


def _write(console: Console, text: str) -> None:
    console.file.write(text)
