"""Run command lines in a Python process in which some packages can't be imported.

No environment is created: a finder raises ModuleNotFoundError in that process and its children.
tests/test_install.py creates real environments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HIDER_CODE = """
import os
import sys

HIDDEN = set(os.environ["PYTHON_HIDDEN"].split())


class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hider())
"""
CALLER_CODE = """
import contextlib, io, json, sys
from gate import cli

answers = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(line)
    answers.append((code, out.getvalue(), err.getvalue()))
print(json.dumps([answers, sorted(name for name in sys.modules if "." not in name)]))
"""


class CommandOutput(NamedTuple):
    code: int
    out: str
    err: str


def run_without(
    modules: Iterable[str], lines: Sequence[Sequence[str]], *, folder: Path
) -> list[CommandOutput]:
    """Run the command lines in `folder`, one after another in one process; return their outputs."""
    hider = folder / "hider"
    hider.mkdir(exist_ok=True)
    (hider / "sitecustomize.py").write_text(HIDER_CODE)
    custom = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "GATE_", "COV_"))}
    custom |= {"PYTHON_HIDDEN": " ".join(modules), "PYTHONPATH": f"{hider}{os.pathsep}{ROOT}"}
    completed = subprocess.run(
        [sys.executable, "-c", CALLER_CODE, json.dumps([list(line) for line in lines])],
        cwd=folder, env=custom, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    answers, loaded = json.loads(completed.stdout.splitlines()[-1])
    assert not set(modules) & set(loaded)
    return [CommandOutput(*answer) for answer in answers]
