"""Models from a few lines of source code, written to files as users would do."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from types import ModuleType

from torch import nn

from gate.lint.lint import LintReport, lint_model

_PRELUDE = """\
import math
from typing import Literal, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, Tensor

"""
_numbers = itertools.count()


@functools.cache
def _folder() -> Path:
    """Return a folder for all modules of this process, removed at its end. The rules read the
    files."""
    folder = tempfile.mkdtemp(prefix="lint-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def import_module(text: str) -> ModuleType:
    """Write this source to a file and import it."""
    name = f"written_{next(_numbers)}"
    path = _folder() / f"{name}.py"
    path.write_text(_PRELUDE + textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    sys.modules[name] = imported
    spec.loader.exec_module(imported)
    return imported


def create_module(body: str, *, arguments: str = "x", init: str = "pass") -> nn.Module:
    """Return a module with this forward."""
    text = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + textwrap.indent(textwrap.dedent(init), " " * 8)
        + f"\n\n    def forward(self, {arguments}):\n"
        + textwrap.indent(textwrap.dedent(body), " " * 8)
        + "\n"
    )
    return import_module(text).Net().eval()


def lint(body: str, *, strategy: str = "traced", **how: str) -> LintReport:
    """Return the lint report of a module with this forward."""
    return lint_model(create_module(body, **how), strategy=strategy)


def finding_titles(report: LintReport) -> list[str]:
    """Return `TRC008 error` for each active finding, in line order."""
    assert not report.unread
    return [f"{finding.code} {finding.level}" for finding in report.active]
