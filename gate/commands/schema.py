"""`gate schema`."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

import click

from gate.commands.result import CommandResult, ExitCode, machine_options

if TYPE_CHECKING:
    from rich.console import Console

_FILES = {
    "gate.yaml": ("gate.policy.policy:Policy", "parity-gate policy"),
    "release.yaml": (
        "gate.onnx_file.release_file:ReleaseFile",
        "parity-gate release of several files",
    ),
    "evidence": ("gate.records.evidence:Evidence", "parity-gate evidence"),
    "decision": ("gate.decision.decide:Decision", "parity-gate decision"),
    "summary": ("gate.summary.summary:Summary", "parity-gate summary"),
    "statement": (
        "gate.signing.statement:Statement",
        "in-toto statement: the payload of parity-gate's envelopes",
    ),
}
"""Name of a file to the model of its content, and the title of its schema."""

NAMES = tuple(_FILES)


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a file of this name (one of `NAMES`)."""
    from gate.records.schemas import record_schema, settings_schema

    path, title = _FILES[name]
    module, _, class_name = path.partition(":")
    model = getattr(importlib.import_module(module), class_name)
    if not name.endswith(".yaml"):
        return record_schema(model, title=title)
    section = "gate" if name == "gate.yaml" else None
    return settings_schema(model, title=title, section=section)


def schema_text(name: str) -> str:
    """Return the schema as the text of a JSON file."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


@click.command("schema", short_help="Print the JSON Schema of a file.")
@click.argument("name", type=click.Choice(NAMES), metavar=f"[{'|'.join(NAMES)}]")
@machine_options
def command(name: str) -> CommandResult:
    """Print the JSON Schema (2020-12) of gate.yaml, of release.yaml, or of a record.

    Editors use it to complete and check a YAML file, and check-jsonschema to validate files in CI
    (docs/schemas.md).

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
