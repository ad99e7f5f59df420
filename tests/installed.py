"""Helpers that run commands in virtual environments with the installed wheel."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.install_size import Installation

TORCH_PATTERNS = (
    "torch", "torch-*.dist-info", "torchgen", "functorch", "nvidia", "triton", "sympy", "mpmath",
    "networkx",
)  # fmt: skip
"""Packages that `import torch` loads, except those that the core or an extra of the gate also
installs: a missing one must make the test fail."""
TORCHVISION_PATTERNS = (
    "torchvision", "torchvision-*.dist-info", "torchvision.libs", "PIL", "pillow-*.dist-info",
    "pillow.libs",
)  # fmt: skip
"""torchvision, and Pillow, which it requires."""


def run(folder: Path, *line: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder` without the environment variables of this Python."""
    custom = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MLFLOW_", "GATE_"))
    }
    return subprocess.run(
        line, cwd=folder, env=custom | environment, capture_output=True, text=True, check=False
    )


def assert_all_succeed(
    installation: Installation, folder: Path, lines: Iterable[Sequence[str]], **environment: str
) -> None:
    """Assert that each command line of the installed `gate` exits with 0."""
    for line in lines:
        package = run(folder, installation.gate, *line, **environment)
        assert package.returncode == 0, (line, package.stdout, package.stderr)


def link_torch(installation: Installation, *more_patterns: str) -> None:
    """Link this Python's PyTorch, as a user's own installation, instead of copying gigabytes.

    others: patterns of further packages to link.
    """
    (site,) = installation.folder.glob("lib/python*/site-packages")
    site_packages = Path(sysconfig.get_path("purelib"))
    for pattern in (*TORCH_PATTERNS, *more_patterns):
        for package in site_packages.glob(pattern):
            if not (site / package.name).exists():
                (site / package.name).symlink_to(package)
