"""Models from a few lines of source, in a file of their own, as users have them."""

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
    """One for all that this process writes, which it removes as it ends: the rules read the source
    again."""
    folder = tempfile.mkdtemp(prefix="lint-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def module(text: str) -> ModuleType:
    """Import this source."""
    name = f"written_{next(_numbers)}"
    path = _folder() / f"{name}.py"
    path.write_text(_PRELUDE + textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def forward(body: str, *, arguments: str = "x", init: str = "pass") -> nn.Module:
    """A module with this forward."""
    text = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + textwrap.indent(textwrap.dedent(init), " " * 8)
        + f"\n\n    def forward(self, {arguments}):\n"
        + textwrap.indent(textwrap.dedent(body), " " * 8)
        + "\n"
    )
    return module(text).Net().eval()


def lint(body: str, *, strategy: str = "traced", **how: str) -> LintReport:
    """What the rules say of a module with this forward."""
    return lint_model(forward(body, **how), strategy=strategy)


def told(report: LintReport) -> list[str]:
    """`TRC008 error` of each active finding, in the order of lines."""
    assert not report.unread
    return [f"{finding.code} {finding.level}" for finding in report.active]
