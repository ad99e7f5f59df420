"""What the lint found as SARIF 2.1.0: annotations of GitHub's code scanning and of editors."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any
from urllib.parse import quote

from gate.lint import LintReport
from gate.lint.rulebook import RULES
from gate.records.lint import LintFinding
from gate.story.wording import printable

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_FINGERPRINT = "parityGate/v1"


def sarif(
    report: LintReport | None,
    *,
    exit_code: int,
    failure: str = "",
    file_of: Callable[[str], str] = str,
) -> str:
    """The JSON text: every rule with its help, every finding with file and line.

    `report`: None where nothing could be read, for the reason `failure`; whoever shows it must not
    take that for a model without findings. `file_of`: the path of a finding's file below the root
    of the repository, by its path below the import path. A silenced finding is there, as suppressed
    in its source.
    """
    run: dict[str, Any] = {
        "tool": {"driver": _driver()},
        "invocations": [_invocation(report, exit_code=exit_code, failure=failure)],
        "columnKind": "unicodeCodePoints",
        "results": [] if report is None else list(_results(report, file_of)),
    }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2) + "\n"


def _driver() -> dict[str, Any]:
    return {
        "name": "parity-gate",
        "semanticVersion": metadata.version("parity-gate"),
        "rules": [
            {
                "id": code,
                "shortDescription": {"text": f"{rule.title}."},
                "fullDescription": {"text": f"{rule.message}."},
                "help": {
                    "text": f"{rule.message}. Instead: {rule.rewrite}. docs/lint/{code}.md",
                    "markdown": f"{rule.message}.\n\n**Instead:** {rule.rewrite}.\n\n"
                    f"More: `docs/lint/{code}.md`. `# noqa: {code}` on the line silences it.",
                },
                "defaultConfiguration": {"level": rule.level},
                "properties": {"strategies": sorted(rule.strategies)},
            }
            for code, rule in RULES.items()
        ],
    }


def _invocation(report: LintReport | None, *, exit_code: int, failure: str) -> dict[str, Any]:
    unread = () if report is None else report.unread
    notices = [f"not read: {code.name}: {code.reason}" for code in unread]
    notes = [{"level": "warning", "message": {"text": printable(text)}} for text in notices]
    if report is None:
        notes.append({"level": "error", "message": {"text": printable(failure) or "it failed"}})
    return {
        "executionSuccessful": exit_code < 2,
        "exitCode": exit_code,
        "toolExecutionNotifications": notes,
    }


def _results(report: LintReport, file_of: Callable[[str], str]) -> Iterator[dict[str, Any]]:
    places = {code: place for place, code in enumerate(RULES)}
    alike: Counter[str] = Counter()
    for finding in report.findings:
        fingerprint = _fingerprint(finding)
        alike[fingerprint] += 1
        result = {
            "ruleId": finding.code,
            "ruleIndex": places[finding.code],
            "level": finding.level,
            "message": {"text": printable(_message(finding))},
            "locations": [_location(finding, file_of(finding.path))],
            "partialFingerprints": {_FINGERPRINT: f"{fingerprint}:{alike[fingerprint]}"},
        }
        if finding.suppressed:
            result["suppressions"] = [{"kind": "inSource"}]
        yield result


def _message(finding: LintFinding) -> str:
    module = f" (in {finding.module})" if finding.module else ""
    return f"{finding.expression}{module}: {finding.message}. Instead: {finding.rewrite}."


def _location(finding: LintFinding, file: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"},
            "region": {
                "startLine": finding.line,
                "snippet": {"text": printable(finding.expression)},
            },
        }
    }
    if finding.module:
        name = printable(finding.module)
        found["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "module"}]
    return found


def _fingerprint(finding: LintFinding) -> str:
    """The same when lines above it come and go."""
    text = "\0".join((finding.code, finding.path, finding.expression))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
