"""The script of action.yml: install the gate, judge, and say it where GitHub shows it.

Needs Python's own library only. Inputs come as variables of the environment (`GATE_ACTION_…`),
never as text within a script, so that no name of a file is a command. The exit code is that of
`gate check`; outputs and annotations are written whatever it is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

OPTIONS = {
    "reference": "--reference",
    "checkpoint": "--checkpoint",
    "inputs": "--inputs",
    "labels": "--labels",
    "policy": "--policy",
    "report": "--report",
    "junit": "--junit",
    "sarif": "--sarif",
}
"""Inputs that are options of `gate check`, where they are not empty."""
REPEATED = {"runtimes": "--runtime", "recorded": "--recorded"}
"""Inputs with one value in each line, or separated by commas: an option for each value."""
INSTALLED = "installed"
"""As the input `version`: the environment has the gate already."""
_EXTRAS = "cpu,charts"
_PYTHON = (sys.executable, "-P", "-m")
"""-P: else a gate.py in the workspace would be run in the place of the gate."""
NOT_JUDGED = 2
_MOST_ANNOTATIONS = 10
"""GitHub shows so many of one step."""
_MOST_PAGES = 30
_VERDICTS = {0: "PASS", 1: "FAIL"}


def main(environment: Mapping[str, str]) -> int:
    """Install, check, tell GitHub; the exit code of `gate check`."""
    command = install_command(environment)
    if command is not None:
        installed = subprocess.run(command, check=False)
        if installed.returncode != 0:
            result = _error(f"the gate could not be installed: {' '.join(command)}")
            tell(environment, result, NOT_JUDGED)
            return NOT_JUDGED
    try:
        command = check_command(environment)
    except ValueError as error:
        tell(
            environment, _error(f"the input args is not quoted as in a shell: {error}"), NOT_JUDGED
        )
        return NOT_JUDGED
    summary = Path(environment.get("GITHUB_STEP_SUMMARY") or os.devnull)
    before = summary.stat().st_size if summary.is_file() else 0
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    code = done.returncode
    try:
        result = json.loads(done.stdout)
        if result.get("exit_code", NOT_JUDGED) != code:
            code = NOT_JUDGED
    except ValueError:
        result = _error("gate check ended without a result: see the log of this step.")
        code = NOT_JUDGED
    tell(environment, result, code)
    if summary.is_file():
        comment(environment, summary.read_bytes()[before:].decode(errors="replace"))
    return code


def install_command(environment: Mapping[str, str]) -> list[str] | None:
    """What installs the gate; None: it is there. Without a version it is the action's own."""
    version = _input(environment, "version")
    if version == INSTALLED:
        return None
    own = f"{environment['GITHUB_ACTION_PATH']}[{_EXTRAS}]"
    wanted = f"parity-gate[{_EXTRAS}]=={version}" if version else own
    return [*_PYTHON, "pip", "install", "--disable-pip-version-check", "-q", wanted]


def check_command(environment: Mapping[str, str]) -> list[str]:
    """The command line of `gate check`. Raises ValueError where `args` has an open quote."""
    words = [*_PYTHON, "gate", "check", _input(environment, "model")]
    for name, option in OPTIONS.items():
        if value := _input(environment, name):
            words += [option, value]
    for name, option in REPEATED.items():
        for value in re.split(r"[,\n]", _input(environment, name)):
            if value.strip():
                words += [option, value.strip()]
    words += shlex.split(_input(environment, "args"))
    if summary := environment.get("GITHUB_STEP_SUMMARY"):
        words += ["--summary", summary]
    return [*words, "--json"]


def comment(environment: Mapping[str, str], summary: str) -> None:
    """Write the summary into the action's one comment on the pull request, for each model.

    Nothing without a token or outside of a pull request. A failure is a warning: a token of a fork
    may not write, and the verdict stands.
    """
    token, number = _input(environment, "token"), _pull_request(environment)
    if not token or number is None or not summary.strip():
        return
    name = re.sub(r"[^\w./-]", "_", _input(environment, "model"))
    mark = f"<!-- parity-gate {name} -->"
    base = f"{environment['GITHUB_API_URL']}/repos/{environment['GITHUB_REPOSITORY']}/issues"
    try:
        found = _earlier(f"{base}/{number}/comments", token, mark)
        place = f"{base}/comments/{found}" if found else f"{base}/{number}/comments"
        body = {"body": f"{mark}\n{summary.strip()}"}
        _call("PATCH" if found else "POST", place, token, body)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"no comment was written: {error}. It needs the permission pull-requests: write."
        print(_annotation("warning", "parity-gate", text), flush=True)


def _pull_request(environment: Mapping[str, str]) -> int | None:
    try:
        event = json.loads(Path(environment["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
        return int(event["pull_request"]["number"])
    except (KeyError, OSError, ValueError, TypeError):
        return None


def _earlier(place: str, token: str, mark: str) -> int | None:
    """Return the id of the comment that begins with the mark; None: there is none yet."""
    for page in range(1, _MOST_PAGES + 1):
        comments = _call("GET", f"{place}?per_page=100&page={page}", token)
        for each in comments:
            if str(each["body"]).startswith(mark) and each["user"]["type"] == "Bot":
                return int(each["id"])
        if len(comments) < 100:
            break
    return None


def _call(method: str, place: str, token: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"}
    request = urllib.request.Request(place, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def tell(environment: Mapping[str, str], result: Mapping[str, Any], code: int) -> None:
    """Print annotations, and write the outputs `verdict`, `digest` and `report`."""
    for line in annotations(result, code):
        print(line, flush=True)
    report = _input(environment, "report")
    outputs = {
        "verdict": _VERDICTS.get(code, "ERROR"),
        "digest": str(_story(result).get("subject", {}).get("sha256") or ""),
        "report": report if report and Path(report).is_dir() else "",
    }
    if file := environment.get("GITHUB_OUTPUT"):
        with Path(file).open("a", encoding="utf-8") as stream:
            for name, value in outputs.items():
                end = uuid.uuid4().hex  # a value may hold any line, but not this one
                stream.write(f"{name}<<{end}\n{value}\n{end}\n")


def annotations(result: Mapping[str, Any], code: int) -> Iterator[str]:
    """Commands of a workflow: the cause first, then the other findings."""
    summary = _story(result)
    sentence = summary.get("headline", {}).get("sentence")
    if sentence is None:
        sentence = result.get("error", {}).get("message", "could not judge")
    if code == 0:
        yield _annotation("notice", "parity-gate", sentence)
        return
    yield _annotation("error", "parity-gate", sentence)
    others = [each for each in summary.get("findings", ()) if each["sentence"] != sentence]
    for finding in others[: _MOST_ANNOTATIONS - 1]:
        level = "notice" if finding["verdict"] == "WAIVED" else "warning"
        yield _annotation(level, finding["title"], finding["sentence"])


def _annotation(level: str, title: str, message: str) -> str:
    return f"::{level} title={_escaped(title, ':,')}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    """Without what would end the command, or begin another one."""
    return "".join(f"%{ord(c):02X}" if c in f"%\r\n{more}" else c for c in text)


def _story(result: Mapping[str, Any]) -> Mapping[str, Any]:
    summary: Mapping[str, Any] = result.get("story") or {}
    return summary


def _input(environment: Mapping[str, str], name: str) -> str:
    return environment.get(f"GATE_ACTION_{name.upper()}", "").strip()


def _error(message: str) -> dict[str, Any]:
    return {"error": {"type": "Action", "message": message}}


if __name__ == "__main__":
    sys.exit(main(os.environ))
