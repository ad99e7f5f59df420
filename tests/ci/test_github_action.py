"""action.yml, its script and the pre-commit hooks run as on GitHub."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from ci import github_action
from gate import Digest
from gate.commands.check import command as check
from tests.report.ci_results import RESULTS
from tests.small_project import create_project
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


def read_outputs(file: Path) -> dict[str, str]:
    """Parse an outputs file as GitHub does: NAME<<END, lines, END."""
    result = re.findall(r"^(\w+)<<(\w+)\n(.*?)\n\2$", file.read_text(), re.MULTILINE | re.DOTALL)
    return {name: value for name, _, value in result}


def test_action_passes_inputs_to_the_script_and_returns_outputs() -> None:
    step, upload = ACTION["runs"]["steps"]
    assert upload["if"].startswith("always()")
    assert step["run"].endswith('ci/github_action.py"')
    for name in ACTION["inputs"]:
        assert step["env"][f"GATE_ACTION_{name.upper()}"] == f"${{{{ inputs.{name} }}}}"
    for name, output in ACTION["outputs"].items():
        assert output["value"] == f"${{{{ steps.{step['id']}.outputs.{name} }}}}"
    assert "${{" not in step["run"]  # a file name must not be interpreted as a command
    read = {*github_action.OPTIONS, *github_action.REPEATED, "args", "model", "token", "version"}
    assert read == set(ACTION["inputs"])


def test_action_matches_the_github_schema() -> None:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.github-actions",
    ]
    completed = subprocess.run(
        [*command, str(ROOT / "action.yml")], capture_output=True, check=False
    )
    assert completed.returncode == 0, completed.stdout


def test_inputs_match_the_options_of_gate_check() -> None:
    options = {option for param in check.params for option in param.opts}
    arguments = {*github_action.OPTIONS.values(), *github_action.REPEATED.values()}
    assert arguments | {"--summary", "--json"} <= options
    every = {f"GATE_ACTION_{name.upper()}": "x" for name in ACTION["inputs"]}
    every |= {
        "GATE_ACTION_ARGS": "--batch-size 8 --role 'a b=logits'",
        "GATE_ACTION_RUNTIMES": "openvino, tract\n",
        "GATE_ACTION_RECORDED": "phone=recordings/my phone\npad=recordings/pad",
    }
    words = github_action.check_command({**every, "GITHUB_STEP_SUMMARY": "s.md"})
    assert [b for a, b in pairwise(words) if a == "--runtime"] == ["openvino", "tract"]
    recorded = [b for a, b in pairwise(words) if a == "--recorded"]
    assert recorded == ["phone=recordings/my phone", "pad=recordings/pad"]
    assert words[words.index("--role") + 1] == "a b=logits"
    parse_gate(words[words.index("gate") + 1 :])


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("", f"{ROOT}[cpu,charts]"), ("1.2.3", "parity-gate[cpu,charts]==1.2.3"), ("installed", None)],
)
def test_installed_requirement(version: str, wanted: str | None) -> None:
    command = github_action.install_command({**GITHUB, "GATE_ACTION_VERSION": version})
    assert (command[-1] if command else None) == wanted


@pytest.mark.parametrize(
    ("result", "code", "first"),
    [
        ("passed", 0, "::notice title=parity-gate::"),
        ("rejected", 1, "::error title=parity-gate::head.weight"),
        ("unjudged", 2, "::error title=parity-gate::"),
    ],
)
def test_first_annotation_is_the_cause(
    tmp_path: Path, capsys, result: str, code: int, first: str
) -> None:
    summary = RESULTS[result]().summary
    file = tmp_path / "output"
    file.write_text("before=1\n")
    github_action.tell({"GITHUB_OUTPUT": str(file)}, {"story": summary.to_plain()}, code)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert len(lines) <= 10
    assert file.read_text().startswith("before=1\n")
    assert read_outputs(file) == {
        "verdict": ["PASS", "FAIL", "ERROR"][code], "digest": str(summary.subject.sha256), "report": "",
    }  # fmt: skip


class Comments(BaseHTTPRequestHandler):
    """GitHub's API for the comments of one pull request."""

    server: Comments.Server  # type: ignore[assignment]

    class Server(ThreadingHTTPServer):
        comments: list[dict]

    def answer(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200 if self.headers["Authorization"] == "Bearer t" else 403)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> str:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]

    def do_GET(self) -> None:
        self.answer(self.server.comments if "page=1" in self.path else [])

    def do_POST(self) -> None:
        created = {"id": len(self.server.comments), "body": self.body(), "user": {"type": "Bot"}}
        self.server.comments.append(created)
        self.answer(created)

    def do_PATCH(self) -> None:
        result = self.server.comments[int(self.path.rpartition("/")[2])]
        result["body"] = self.body()
        self.answer(result)

    def log_message(self, *_: object) -> None:
        pass


def test_single_pull_request_comment_is_updated(tmp_path: Path, capsys) -> None:
    (tmp_path / "event.json").write_text('{"pull_request": {"number": 7}}')
    with Comments.Server(("127.0.0.1", 0), Comments) as server:
        server.comments = [{"id": 0, "body": "mine", "user": {"type": "User"}}]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        environment = {
            **GITHUB,
            "GITHUB_API_URL": f"http://127.0.0.1:{server.server_port}",
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
            "GATE_ACTION_TOKEN": "t",
        }
        github_action.comment(environment, "first")
        github_action.comment(environment, "second")
        github_action.comment({**environment, "GATE_ACTION_MODEL": "other.onnx"}, "another")
        github_action.comment(environment, "  ")
        github_action.comment({**environment, "GATE_ACTION_TOKEN": ""}, "no token")
        github_action.comment({**environment, "GITHUB_EVENT_PATH": "none"}, "no pull request")
        assert [each["body"].partition("\n")[2] for each in server.comments] == [
            "", "second", "another",
        ]  # fmt: skip
        assert capsys.readouterr().out == ""
        github_action.comment({**environment, "GATE_ACTION_TOKEN": "of a fork"}, "denied")
        assert capsys.readouterr().out.startswith("::warning title=parity-gate::")
        server.shutdown()


def test_malicious_names_are_escaped() -> None:
    attack = "a\n::set-output name=verdict::PASS\r%0A::error::x"
    finding = {"sentence": attack, "title": "t:,\n::add-mask::", "verdict": "FAIL"}
    summary = {
        "headline": {"sentence": attack},
        "findings": [{**finding, "sentence": f"{attack}!"}],
    }
    lines = list(github_action.annotations({"story": summary}, 1))
    assert len(lines) == 2
    for line in lines:
        assert len(line.splitlines()) == 1
        assert line.startswith(("::error title=parity-gate::a%0A", "::warning title=t%3A%2C%0A"))
        assert "%25" in line


@pytest.mark.parametrize(
    ("stdout", "returncode"),
    [("", 0), ("{}", 0), ('{"exit_code": 1}', 0), ("no json", 1), ("{}", -9), ("{}", 130)],
)
def test_exit_without_a_result_is_not_a_verdict(
    monkeypatch, tmp_path: Path, stdout: str, returncode: int
) -> None:
    completed = subprocess.CompletedProcess([], returncode, stdout=stdout)
    monkeypatch.setattr(github_action.subprocess, "run", lambda *_, **__: completed)
    file = tmp_path / "output"
    assert github_action.main({**GITHUB, "GITHUB_OUTPUT": str(file)}) == 2
    assert read_outputs(file)["verdict"] == "ERROR"


def test_unparsable_arguments_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "output"
    words = {"GITHUB_OUTPUT": str(file), "GATE_ACTION_VERSION": "installed"}
    assert github_action.main({**GITHUB, **words, "GATE_ACTION_ARGS": "--name 'it"}) == 2
    assert read_outputs(file)["verdict"] == "ERROR"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "code", "verdict"), [("good.onnx", 0, "PASS"), ("missing.onnx", 2, "ERROR")]
)
def test_script_runs_like_on_github(tmp_path: Path, model: str, code: int, verdict: str) -> None:
    folder = create_project()
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    step = ACTION["runs"]["steps"][0]["run"].replace("python", shlex.quote(sys.executable), 1)
    report = tmp_path / "a report"
    completed = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **GITHUB, **files,
             "GATE_ACTION_MODEL": model, "GATE_ACTION_REPORT": str(report),
             "GATE_ACTION_JUNIT": str(tmp_path / "junit.xml"),
             "GATE_ACTION_SARIF": str(tmp_path / "check.sarif"),
             "GATE_ACTION_ARGS": "--batch-size 4"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == code, completed.stderr
    outputs = read_outputs(tmp_path / "GITHUB_OUTPUT")
    assert outputs["verdict"] == verdict
    assert "::" in completed.stdout.splitlines()[0]
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text().strip()
    ElementTree.parse(tmp_path / "junit.xml")
    assert json.loads((tmp_path / "check.sarif").read_text())["version"] == "2.1.0"
    if code == 0:
        assert outputs["report"] == str(report)
        assert outputs["digest"] == str(Digest.from_file(folder / model))
        assert json.loads((report / "decision.json").read_text())["verdict"] == "PASS"


def test_lint_hook_calls_gate_lint() -> None:
    hook, policy = YAML(typ="safe").load(ROOT / ".pre-commit-hooks.yaml")
    assert hook["pass_filenames"] is False
    parse_gate([*shlex.split(hook["entry"])[1:], "mymodel:build"])
    page = (ROOT / "docs/ci.md").read_text()
    assert f"id: {hook['id']}" in page
    assert f"id: {policy['id']}" in page


@pytest.mark.further
def test_policy_hook(tmp_path: Path) -> None:
    """Run the hook as pre-commit does: the entry, then the file names."""
    _, hook = YAML(typ="safe").load(ROOT / ".pre-commit-hooks.yaml")
    assert re.search(hook["files"], "models/gate.yaml")
    assert not re.search(hook["files"], "models/investigate.yaml")
    (tmp_path / "good.yaml").write_text("task: tensors\n")
    (tmp_path / "bad.yaml").write_text("tsk: tensors\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(*names: str) -> int:
        command = [*shlex.split(hook["entry"]), *names]
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PATH": path}, check=False
        ).returncode

    assert run("good.yaml", "good.yaml") == 0
    assert run("bad.yaml", "good.yaml") == 2


def test_gate_package_in_the_workspace_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "gate.py").write_text("print('mine')")
    words = github_action.check_command(GITHUB)
    requests = [*words[: words.index("gate") + 1], "--version"]
    completed = subprocess.run(requests, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert completed.stdout.startswith("gate ")
