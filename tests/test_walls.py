"""The import contracts (pyproject.toml, import-linter) hold, and light modules stay light."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "mlflow", "onnxruntime", "onnx", "matplotlib", "dvc", "sklearn", "torchvision"}


@pytest.mark.parametrize(
    "module",
    ["gate", "gate.cli", "gate.errors", "gate.storage.digest", "gate.policy.policy", "gate.records.evidence", "gate.decision.decide"],
)  # fmt: skip
def test_light_modules_import_nothing_heavy(module):
    program = f"import json, sys, {module}; print(json.dumps([m for m in sys.modules]))"
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert not HEAVY & set(json.loads(answer.stdout))


def test_the_import_contracts_hold():
    # In a process of its own: import-linter switches the loggers of this one off.
    program = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
