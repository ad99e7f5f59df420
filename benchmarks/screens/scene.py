"""Run the commands of `gate` before the screenshots: check, promote, review and revert files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate.errors import RegistryUnavailable
from gate.mlflow_client.connection import using_tracking_uri
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.interface import CHAMPION, Tag

ROOT = Path(__file__).resolve().parents[2]
MODEL = "digits"
_SAMPLES = ("--inputs", "samples.npy", "--labels", "labels.npy")
_CHAMPION = ("--against", MODEL)


@dataclass(frozen=True)
class CheckedFile:
    """A file, and the arguments and the expected result of its check."""

    name: str
    file: str
    code: int
    """Expected exit code of `gate check`."""
    checkpoint: str = "second.safetensors"
    factory: str = "digits:network"
    samples: Sequence[str] = _SAMPLES
    policy: str = "policy.yaml"
    extra_arguments: Sequence[str] = ()


@dataclass(frozen=True)
class ResultPages:
    """The pages that show the result of a check."""

    report: Path
    run: str
    """Address of the MLflow run."""


FIRST = CheckedFile("first release", "first.onnx", 0, checkpoint="first.safetensors")
SECOND = CheckedFile("passed", "second.onnx", 0, policy="reviewed.yaml", extra_arguments=_CHAMPION)
REJECTED = (
    CheckedFile("rejected by layer", "half.onnx", 1, policy="reviewed.yaml",
                extra_arguments=_CHAMPION),
    CheckedFile(
        "rejected by optimiser", "gelu.onnx", 1,
        checkpoint="gelu.safetensors", factory="digits:gelu_network",
    ),
    CheckedFile(
        "rejected by preprocessing", "second.onnx", 1,
        policy="consumers.yaml", extra_arguments=("--pictures", "scans"),
    ),
    CheckedFile(
        "could not judge", "second.onnx", 2,
        samples=("--inputs", "one-digit.npy", "--labels", "one-label.npy"),
    ),
)  # fmt: skip


class GateCommands:
    """The commands of `gate` in a folder with the files, for one MLflow server."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri

    def judge(self, checked: CheckedFile) -> ResultPages:
        """Run `gate check --track`."""
        report = checked.name.replace(" ", "-")
        result = self._gate(
            "check", checked.file, "--reference", checked.factory,
            "--checkpoint", checked.checkpoint,
            *checked.samples, "--preprocessing", "preprocessing.json", "--policy", checked.policy,
            *checked.extra_arguments, "--report", report, "--track", "--tracking-uri", self.uri,
            code=checked.code,
        )  # fmt: skip
        if result["run"]["error"] is not None:
            raise RegistryUnavailable(f"The run was not written: {result['run']['error']}")
        return ResultPages(self.folder / report / "report.html", result["run"]["address"])

    def promote(self, checked: CheckedFile) -> str:
        """Run `gate promote` and return the model version."""
        result = self._gate(
            "promote", checked.file, "--name", MODEL, "--report", checked.name.replace(" ", "-"),
            "--policy", checked.policy, "--preprocessing", "preprocessing.json",
            "--tracking-uri", self.uri,
        )  # fmt: skip
        return str(result["version"])

    def set_alias_manually(self, pages: ResultPages) -> str:
        """Create a version of a rejected run and set the alias, bypassing the gate."""
        with using_tracking_uri(self.uri):
            from mlflow import MlflowClient

            client = MlflowClient(self.uri, self.uri)
            run = pages.run.rpartition("/")[2]
            source = f"runs:/{run}/plots"
            created = client.create_model_version(MODEL, source=source, run_id=run)
        version = str(created.version)
        MlflowRegistry(self.uri).set_alias(MODEL, CHAMPION, version)
        return version

    def approve(self, version: str) -> None:
        """Approve a version with the tags that a reviewer sets."""
        registry = MlflowRegistry(self.uri)
        registry.set_tag(MODEL, version, key=Tag.REVIEW_COMMENT, value="looked at the sevens")
        registry.set_tag(MODEL, version, key=Tag.REVIEW, value="approved")

    def reconcile(self) -> None:
        """Run `gate reconcile`, as the service does after an event."""
        self._gate("reconcile", MODEL, "--policy", "reviewed.yaml", "--tracking-uri", self.uri)

    def _gate(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        process = subprocess.run(
            [sys.executable, "-m", "gate", *arguments, "--json"],
            cwd=self.folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        if process.returncode != code:
            raise RegistryUnavailable(
                f"gate {' '.join(arguments)} ended with {process.returncode}, expected {code}: "
                f"{(process.stderr or process.stdout)[-2000:]}"
            )
        result: dict[str, Any] = json.loads(process.stdout)
        return result
