"""Light modules import no heavy packages. `make lint` checks the import contracts
(pyproject.toml)."""

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
