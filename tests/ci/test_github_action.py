"""action.yml and its script, as GitHub runs them; and the hook for pre-commit."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from ci import github_action
from gate.commands.check import command as check
from gate.storage.digest import Digest
from tests.report.ci_results import RESULTS
from tests.small_project import made
from tests.test_code_blocks import parse_gate

ROOT = Path(__file__).parents[2]
ACTION = YAML(typ="safe").load(ROOT / "action.yml")
GITHUB = {
    "GITHUB_ACTION_PATH": str(ROOT),
    "GATE_ACTION_MODEL": "good.onnx",
    "GATE_ACTION_REFERENCE": "small_models:build",
    "GATE_ACTION_INPUTS": "images.npy",
    "GATE_ACTION_REPORT": "",
    "GATE_ACTION_VERSION": "installed",
}


def outputs_of(file: Path) -> dict[str, str]:
    """As GitHub reads them: NAME<<END, lines, END."""
    found = re.findall(r"^(\w+)<<(\w+)\n(.*?)\n\2$", file.read_text(), re.MULTILINE | re.DOTALL)
    return {name: value for name, _, value in found}


def test_the_action_hands_its_inputs_to_the_script_and_its_outputs_out() -> None:
    (step,) = ACTION["runs"]["steps"]
    assert step["run"].endswith('ci/github_action.py"')
    for name in ACTION["inputs"]:
        assert step["env"][f"GATE_ACTION_{name.upper()}"] == f"${{{{ inputs.{name} }}}}"
    for name, output in ACTION["outputs"].items():
        assert output["value"] == f"${{{{ steps.{step['id']}.outputs.{name} }}}}"
    assert "${{" not in step["run"]  # a name of a file is no command
    read = {*github_action.OPTIONS, "model", "version"}
    assert read == set(ACTION["inputs"])


def test_the_options_are_those_of_gate_check() -> None:
    options = {option for param in check.params for option in param.opts}
    assert set(github_action.OPTIONS.values()) | {"--summary", "--json"} <= options
    every = {f"GATE_ACTION_{name.upper()}": "x" for name in ACTION["inputs"]}
    words = github_action.check_command({**every, "GITHUB_STEP_SUMMARY": "s.md"})
    parse_gate(words[words.index("gate") + 1 :])


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("", f"{ROOT}[cpu,charts]"), ("1.2.3", "parity-gate[cpu,charts]==1.2.3"), ("installed", None)],
)
def test_what_is_installed(version: str, wanted: str | None) -> None:
    command = github_action.install_command({**GITHUB, "GATE_ACTION_VERSION": version})
    assert (command[-1] if command else None) == wanted


@pytest.mark.parametrize(
    ("result", "code", "first"),
    [
        ("passed", 0, "::notice title=parity-gate::"),
        ("rejected", 1, "::error title=parity-gate::The weight of layer3.0.conv1"),
        ("unjudged", 2, "::error title=parity-gate::"),
    ],
)
def test_the_cause_is_the_first_annotation(
    tmp_path: Path, capsys, result: str, code: int, first: str
) -> None:
    story = RESULTS[result]().story
    file = tmp_path / "output"
    file.write_text("before=1\n")
    github_action.tell({"GITHUB_OUTPUT": str(file)}, {"story": story.to_plain()}, code)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert len(lines) <= 10
    assert file.read_text().startswith("before=1\n")
    assert outputs_of(file) == {
        "verdict": ["PASS", "FAIL", "ERROR"][code], "digest": str(story.subject.sha256), "report": "",
    }  # fmt: skip


def test_names_that_attack_are_text() -> None:
    attack = "a\n::set-output name=verdict::PASS\r%0A::error::x"
    finding = {"sentence": attack, "title": "t:,\n::add-mask::", "verdict": "FAIL"}
    story = {"headline": {"sentence": attack}, "findings": [{**finding, "sentence": f"{attack}!"}]}
    lines = list(github_action.annotations({"story": story}, 1))
    assert len(lines) == 2
    for line in lines:
        assert len(line.splitlines()) == 1
        assert line.startswith(("::error title=parity-gate::a%0A", "::warning title=t%3A%2C%0A"))
        assert "%25" in line


@pytest.mark.parametrize(
    ("stdout", "returncode"),
    [("", 0), ("{}", 0), ('{"exit_code": 1}', 0), ("no json", 1), ("{}", -9), ("{}", 130)],
)
def test_an_end_without_a_result_of_its_own_is_no_verdict(
    monkeypatch, tmp_path: Path, stdout: str, returncode: int
) -> None:
    done = subprocess.CompletedProcess([], returncode, stdout=stdout)
    monkeypatch.setattr(github_action.subprocess, "run", lambda *_, **__: done)
    file = tmp_path / "output"
    assert github_action.main({**GITHUB, "GITHUB_OUTPUT": str(file)}) == 2
    assert outputs_of(file)["verdict"] == "ERROR"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "code", "verdict"), [("good.onnx", 0, "PASS"), ("missing.onnx", 2, "ERROR")]
)
def test_the_script_runs_as_github_runs_it(
    tmp_path: Path, model: str, code: int, verdict: str
) -> None:
    folder = made()
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    step = ACTION["runs"]["steps"][0]["run"].replace("python", shlex.quote(sys.executable), 1)
    report = tmp_path / "a report"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **GITHUB, **files,
             "GATE_ACTION_MODEL": model, "GATE_ACTION_REPORT": str(report)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    outputs = outputs_of(tmp_path / "GITHUB_OUTPUT")
    assert outputs["verdict"] == verdict
    assert "::" in done.stdout.splitlines()[0]
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text().strip()
    if code == 0:
        assert outputs["report"] == str(report)
        assert outputs["digest"] == str(Digest.of_file(folder / model))
        assert json.loads((report / "decision.json").read_text())["verdict"] == "PASS"


def test_the_hook_calls_gate_lint_with_the_users_factory() -> None:
    (hook,) = YAML(typ="safe").load(ROOT / ".pre-commit-hooks.yaml")
    assert hook["pass_filenames"] is False
    parse_gate([*shlex.split(hook["entry"])[1:], "mymodel:build"])
    page = (ROOT / "docs/ci.md").read_text()
    assert f"id: {hook['id']}" in page


def test_a_gate_of_the_workspace_judges_nothing(tmp_path: Path) -> None:
    (tmp_path / "gate.py").write_text("print('mine')")
    words = github_action.check_command(GITHUB)
    asked = [*words[: words.index("gate") + 1], "--version"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gate ")
