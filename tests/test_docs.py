"""The pages of docs/ mention every field, setting and metric of the code."""

import re
import shlex
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from cryptography.exceptions import InvalidSignature
from pydantic import BaseModel
from ruamel.yaml import YAML

from gate import cli
from gate.policy.sections import Bounds
from gate.records.export import ExportSettings
from gate.report.ci_formats import openmetrics_text
from gate.signing.keys import VAULTS
from gate.signing.predicates import (
    Approval,
    CodeVersion,
    MeasuredRuntime,
    MeasurementPredicate,
    VerificationSummary,
)
from gate.signing.trust import Trust, TrustedKey
from gate.signing.verification import Check
from tests.report.ci_results import RESULTS
from tests.signing import signing
from tests.signing.released import release

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def first_cells(page: str) -> list[str]:
    """Return the first cell of each table row of the page."""
    return re.findall(r"^\| ([^|]+) \|", (DOCS / page).read_text(), re.MULTILINE)


def test_each_bound_has_a_row_in_the_metrics() -> None:
    rows = first_cells("metrics.md")
    assert [name for name in Bounds.model_fields if rows.count(f"`{name}`") != 1] == []


def test_each_export_setting_is_listed() -> None:
    page = (DOCS / "export.md").read_text()
    named = re.findall(r"^- `(\w+)`", page, re.MULTILINE)
    assert sorted(named) == sorted(ExportSettings.model_fields)


def test_glossary_has_one_line_per_term() -> None:
    words = [word for word in first_cells("glossary.md") if word != "word"]
    assert len(words) == len(set(words))


def _json_names(record: type[BaseModel]) -> set[str]:
    """Return the JSON names of a record's fields."""
    return {str(field.alias or name) for name, field in record.model_fields.items()}


@pytest.mark.parametrize(
    ("heading", "records"),
    [
        ("### Verdict", [VerificationSummary]),
        ("### Measurement", [MeasurementPredicate, MeasuredRuntime, CodeVersion]),
        ("### Review", [Approval]),
        ("## Trust", [Trust, TrustedKey]),
    ],
)
def test_each_statement_field_is_documented(heading: str, records: list[type[BaseModel]]) -> None:
    page = (DOCS / "attestation.md").read_text()
    section = re.split(r"^#+ ", page.partition(f"\n{heading}\n")[2], flags=re.MULTILINE)[0]
    named = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", section, flags=re.DOTALL)))
    assert sorted(set().union(*map(_json_names, records)) - named) == []


def test_each_check_and_key_service_is_documented() -> None:
    checks, _, rest = (DOCS / "attestation.md").read_text().partition("\n## Statements\n")
    keys = rest.partition("\n## Keys\n")[2].partition("\n## ")[0]
    assert set(get_args(Check)) == set(re.findall(r"^- `([^`]+)`", checks, re.MULTILINE))
    assert set(VAULTS) <= set(re.findall(r"^- `(\w+):", keys, re.MULTILINE))


def test_documented_verification_code_works(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "attestation.md").read_text(), re.DOTALL)
    assert len(code.strip().splitlines()) <= 22
    created = release(tmp_path)
    (tmp_path / "ci.pub").write_text(signing.key().public.public)
    (tmp_path / "other.pub").write_text(signing.key(1).public.public)
    arguments = {name: str(tmp_path / name) for name in ("ci.pub", "other.pub", "evidence.json")}
    page: dict[str, Any] = {}
    exec(code, page)
    stated = page["verdict"](str(created.statement), arguments["ci.pub"], str(created.model))
    assert stated == created.statements.decision.statement.predicate
    with pytest.raises(InvalidSignature):
        page["verdict"](str(created.statement), arguments["other.pub"], str(created.model))
    with pytest.raises(AssertionError, match="another file"):
        page["verdict"](str(created.statement), arguments["ci.pub"], arguments["evidence.json"])


@pytest.mark.parametrize("page", ["attestation.md", "ci.md", "data.md", "metrics.md"])
def test_links_of_each_page_are_valid(page: str) -> None:
    assert f"docs/{page}" in (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (DOCS / page).read_text())
    assert [link for link in links if not (DOCS / link).exists()] == []


def test_each_metric_series_is_documented_once() -> None:
    families = re.findall(
        r"^# TYPE (\S+) gauge$", openmetrics_text(RESULTS["passed"]()), re.MULTILINE
    )
    named = re.findall(r"`(parity_gate_\w+)", (DOCS / "ci.md").read_text())
    assert sorted(families) == sorted(named)


def test_ci_page_commands_are_valid() -> None:
    page = (DOCS / "github.md").read_text() + (DOCS / "ci.md").read_text()
    github, promote, _hook, gitlab, alerts = (
        YAML(typ="safe").load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    )
    steps = [step.get("run", "") for step in github]
    steps += [step.get("run", "") for step in promote["promote"]["steps"]]
    series = re.findall(r"parity_gate_\w+", str(alerts))
    assert set(series) <= set(re.findall(r"`(parity_gate_\w+)", page))
    lines = [*"\n".join([*steps, *gitlab["parity"]["script"]]).splitlines(), *page.splitlines()]
    commands = [
        re.search(r"(?:^|')(gate (?:check|lint|promote) [^'|>]+)", line.strip()) for line in lines
    ]
    matches = [shlex.split(command[1])[1:] for command in commands if command]
    assert len(matches) >= 5
    for name, *arguments in matches:
        options = {opt for param in command_of(name).params for opt in param.opts}
        used = {word for word in arguments if word.startswith("--")}
        assert used <= options, (name, used - options)


def command_of(name: str) -> click.Command:
    result = cli.gate.get_command(click.Context(cli.gate), name)
    assert result is not None
    return result
