"""Run a deployment that is killed before its n-th change of the disk."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported once by the fork server whose children are killed.
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
"""The calls that change the store. The next deployment empties the staging folder."""


def deploy_and_die(
    root: Path, files: Path, seeds: tuple[int, ...], survived: int, answers: Any
) -> None:
    """Deploy the models of these seeds as slots (none: roll back), and kill the process after
    `survived` changes.

    Send the name of each change to `answers` before the next one: `rename store`, `replace live`,
    ...
    """
    labels = ("exact", "quantized")
    slots = {label: models.source(files, seed) for label, seed in zip(labels, seeds, strict=False)}
    remaining = [survived]

    def count_changes(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            part = _changed_part(root, name, arguments)
            if part is None:
                return call(*arguments, **options)
            if not remaining[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining[0] -= 1
            result = call(*arguments, **options)
            answers.send(f"{name} {part}")
            return result

        return change

    for owner, name in CHANGES:
        setattr(owner, name, count_changes(name, getattr(owner, name)))
    always_read_here()
    store = ModelStore(root, keep=1)
    if slots:
        deploy(store, NAME, slots)
    else:
        rollback_deployment(store, NAME)


def _changed_part(root: Path, name: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the part of the store that a call changes, or None for paths outside the store.

    Of two paths it is the target. Calls within rmtree use relative paths and count as None.
    """
    target = arguments[1 if name in ("rename", "replace", "symlink") else 0]
    if isinstance(target, int):
        target = Path(f"/proc/self/fd/{target}").readlink()
    path = Path(target)
    if not path.is_absolute() or not path.is_relative_to(root):
        return None
    return (*path.relative_to(root).parts, "root")[0]
