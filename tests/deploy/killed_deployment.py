"""Run in a separate process: a deployment that is killed before its n-th change of the disk."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported once by the server that forks the dying processes.
import onnx
import onnxruntime

from gate.deploy.deploy import deploy, rollback_deployment
from gate.deploy.store import ModelStore
from tests.deploy import models
from tests.deploy.models import NAME
from tests.sandbox.in_process import always_read_here

__all__ = ["deploy_and_die", "onnx", "onnxruntime"]

CHANGES = (
    (os, "rename"), (os, "replace"), (os, "symlink"), (os, "fsync"), (shutil, "rmtree"),
)  # fmt: skip
"""Through these everything goes that lasts, or that somebody else sees: the rest is made in a folder
that the next one empties."""


def deploy_and_die(
    root: Path, files: Path, seeds: tuple[int, ...], survived: int, answers: Any
) -> None:
    """Deploy the models of these seeds as slots (none: roll back); killed after so many changes.

    What was changed goes into `answers`, each before the next: `rename store`, `replace live`, ...
    """
    labels = ("exact", "quantized")
    slots = {label: models.source(files, seed) for label, seed in zip(labels, seeds, strict=False)}
    left = [survived]

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            location = _changed_part(root, name, arguments)
            if location is None:
                return call(*arguments, **options)
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            result = call(*arguments, **options)
            answers.send(f"{name} {location}")
            return result

        return change

    for owner, name in CHANGES:
        setattr(owner, name, wrapped(name, getattr(owner, name)))
    always_read_here()
    store = ModelStore(root, keep=1)
    if slots:
        deploy(store, NAME, slots)
    else:
        rollback_deployment(store, NAME)


def _changed_part(root: Path, name: str, arguments: tuple[Any, ...]) -> str | None:
    """The part of the store that is changed; None: it is elsewhere, or a part of what rmtree does.

    Of two paths it is the one that is made.
    """
    target = arguments[1 if name in ("rename", "replace", "symlink") else 0]
    if isinstance(target, int):
        target = Path(f"/proc/self/fd/{target}").readlink()
    path = Path(target)
    if not path.is_absolute() or not path.is_relative_to(root):
        return None
    return (*path.relative_to(root).parts, "root")[0]
