"""The steps before the screenshots: files are checked, promoted, reviewed and reverted by the
commands of `gate`."""

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
class Judged:
    """One file, and how it is judged."""

    name: str
    file: str
    code: int
    """What `gate check` must end with."""
    checkpoint: str = "second.safetensors"
    factory: str = "digits:network"
    samples: Sequence[str] = _SAMPLES
    policy: str = "policy.yaml"
    more: Sequence[str] = ()


@dataclass(frozen=True)
class Pages:
    """Where a judgment can be seen."""

    report: Path
    run: str
    """Its address."""


FIRST = Judged("first release", "first.onnx", 0, checkpoint="first.safetensors")
SECOND = Judged("passed", "second.onnx", 0, policy="reviewed.yaml", more=_CHAMPION)
REJECTED = (
    Judged("rejected by layer", "half.onnx", 1, policy="reviewed.yaml", more=_CHAMPION),
    Judged(
        "rejected by optimiser", "gelu.onnx", 1,
        checkpoint="gelu.safetensors", factory="digits:gelu_network",
    ),
    Judged(
        "rejected by preprocessing", "second.onnx", 1,
        policy="consumers.yaml", more=("--pictures", "scans"),
    ),
    Judged(
        "could not judge", "second.onnx", 2,
        samples=("--inputs", "one-digit.npy", "--labels", "one-label.npy"),
    ),
)  # fmt: skip


class ExplanationInputs:
    """A folder with the files, and the server."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri

    def judge(self, judged: Judged) -> Pages:
        """Run `gate check --track`."""
        report = judged.name.replace(" ", "-")
        told = self._gate(
            "check", judged.file, "--reference", judged.factory, "--checkpoint", judged.checkpoint,
            *judged.samples, "--preprocessing", "preprocessing.json", "--policy", judged.policy,
            *judged.more, "--report", report, "--track", "--tracking-uri", self.uri,
            code=judged.code,
        )  # fmt: skip
        if told["run"]["error"] is not None:
            raise RegistryUnavailable(f"The run was not written: {told['run']['error']}")
        return Pages(self.folder / report / "report.html", told["run"]["address"])

    def promote(self, judged: Judged) -> str:
        """Run `gate promote`; gives the number of the version."""
        told = self._gate(
            "promote", judged.file, "--name", MODEL, "--report", judged.name.replace(" ", "-"),
            "--policy", judged.policy, "--preprocessing", "preprocessing.json",
            "--tracking-uri", self.uri,
        )  # fmt: skip
        return str(told["version"])

    def serve_by_hand(self, pages: Pages) -> str:
        """As somebody does who goes around the gate: a version of a run that was rejected."""
        with using_tracking_uri(self.uri):
            from mlflow import MlflowClient

            client = MlflowClient(self.uri, self.uri)
            run = pages.run.rpartition("/")[2]
            source = f"runs:/{run}/plots"
            made = client.create_model_version(MODEL, source=source, run_id=run)
        version = str(made.version)
        MlflowRegistry(self.uri).set_alias(MODEL, CHAMPION, version)
        return version

    def approve(self, version: str) -> None:
        """As a reviewer does."""
        registry = MlflowRegistry(self.uri)
        registry.set_tag(MODEL, version, key=Tag.REVIEW_COMMENT, value="looked at the sevens")
        registry.set_tag(MODEL, version, key=Tag.REVIEW, value="approved")

    def reconcile(self) -> None:
        """What the service does after an event."""
        self._gate("reconcile", MODEL, "--policy", "reviewed.yaml", "--tracking-uri", self.uri)

    def _gate(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "gate", *arguments, "--json"],
            cwd=self.folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode != code:
            raise RegistryUnavailable(
                f"gate {' '.join(arguments)} ended with {done.returncode}, expected {code}: "
                f"{(done.stderr or done.stdout)[-2000:]}"
            )
        told: dict[str, Any] = json.loads(done.stdout)
        return told
