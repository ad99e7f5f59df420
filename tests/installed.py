"""Installations of the wheel in environments of their own, and what runs in them."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.install_size import Installation

TORCH = (
    "torch", "torch-*.dist-info", "torchgen", "functorch", "nvidia", "triton", "sympy", "mpmath",
    "networkx",
)  # fmt: skip
"""What `import torch` loads, and nothing that the gate takes from an extra. Of PyTorch's own
dependencies those are left out that the core or an extra brings, too: who misses one has to fail."""
TORCHVISION = (
    "torchvision", "torchvision-*.dist-info", "torchvision.libs", "PIL", "pillow-*.dist-info",
    "pillow.libs",
)  # fmt: skip
"""With Pillow, which it brings."""


def run(folder: Path, *line: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in `folder`, with nothing of this Python's environment."""
    custom = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MLFLOW_", "GATE_"))
    }
    return subprocess.run(
        line, cwd=folder, env=custom | environment, capture_output=True, text=True, check=False
    )


def all_done(
    made: Installation, folder: Path, lines: Iterable[Sequence[str]], **environment: str
) -> None:
    """Each command line of its `gate` ends with 0."""
    for line in lines:
        result = run(folder, made.gate, *line, **environment)
        assert result.returncode == 0, (line, result.stdout, result.stderr)


def lend_torch(made: Installation, *others: str) -> None:
    """Put this Python's PyTorch there, as the user's own: links, not gigabytes. `others`: what is
    lent beside it."""
    (site,) = made.folder.glob("lib/python*/site-packages")
    ours = Path(sysconfig.get_path("purelib"))
    for pattern in (*TORCH, *others):
        for result in ours.glob(pattern):
            if not (site / result.name).exists():
                (site / result.name).symlink_to(result)
