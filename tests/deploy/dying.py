"""Run in a process of its own: a deployment that dies at its n-th step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

# Imported once by the server that forks the dying processes.
import onnx
import onnxruntime

from gate.deploy import steps
from gate.deploy.deploy import deploy, rollback
from gate.deploy.store import Store
from tests.deploy import models
from tests.deploy.models import NAME

__all__ = ["die", "onnx", "onnxruntime"]


def die(root: Path, files: Path, seeds: tuple[int, ...], survived: int, answers: Any) -> None:
    """Deploy the models of these seeds as slots (none: roll back); killed after so many steps.

    The names of the steps that were passed go into `answers`, before death.
    """
    left = [survived]

    def step(name: str) -> None:
        answers.send(name)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    steps.step = step
    store = Store(root, keep=1)
    if seeds:
        labels = ("exact", "quantized")
        slots = {
            label: models.source(files, seed) for label, seed in zip(labels, seeds, strict=False)
        }
        deploy(store, NAME, slots)
    else:
        rollback(store, NAME)
