"""Measure size and time of each installation from the wheel in an empty environment.

    python -m benchmarks.install_size              # the rows of docs/install.md
    python -m benchmarks.install_size cpu,service  # one installation

MB are millions of bytes of files including compiled Python, without pip and setuptools. Seconds are
those of `pip install` without a cache. They include downloads, so they also depend on the package
index. The row with torch uses the build on PyPI with CUDA libraries; the index of CPU builds is not
used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTALLATIONS = (
    "", "cpu", "cpu,charts", "cpu,export", "cpu,data", "cpu,preprocess", "cpu,registry",
    "cpu,service",
)  # fmt: skip
"""Extras that are installed together. cuda and pipeline need gigabytes and run only by name."""
_PIP_PACKAGES = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")


@dataclass(frozen=True)
class Installation:
    """A virtual environment in which parity-gate is installed."""

    folder: Path
    name: str
    """The installed packages, such as `parity-gate[cpu] torch`."""
    seconds: float

    @property
    def python(self) -> Path:
        """Return the path of the Python interpreter."""
        return self.folder / "bin" / "python"

    @property
    def gate(self) -> Path:
        """Return the path of the `gate` command."""
        return self.folder / "bin" / "gate"

    @property
    def packages(self) -> dict[str, str]:
        """Return the versions of installed packages by name, without pip and setuptools."""
        command = [str(self.python), "-m", "pip", "list", "--format", "freeze"]
        process = subprocess.run(
            command, env=_clean_environment(), capture_output=True, text=True, check=True
        )
        lines = (line.replace(" @ ", "==").partition("==") for line in process.stdout.splitlines())
        return {n.lower(): v for n, _, v in lines if n not in ("pip", "setuptools")}

    @property
    def size_bytes(self) -> int:
        """Return the total size of all files except those of pip and setuptools."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        return sum(
            path.stat().st_size
            for path in site.rglob("*")
            if path.is_file() and not path.relative_to(site).parts[0].startswith(_PIP_PACKAGES)
        )

    @property
    def row(self) -> str:
        """Return a Markdown table row: name, MB, packages, seconds."""
        megabytes = self.size_bytes / 1e6
        return f"| `{self.name}` | {megabytes:.0f} | {len(self.packages)} | {self.seconds:.0f} |"


def build_wheel(folder: Path, source: Path = ROOT) -> Path:
    """Build the wheel of a checkout into `folder` and return its path."""
    options = ("-qq", "--no-deps", "--no-build-isolation")  # no download: 6 s less
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), "."]
    subprocess.run(command, cwd=source, check=True)
    (wheel_path,) = folder.glob("parity_gate-*.whl")
    return wheel_path


def install(folder: Path, wheel_path: Path, extras: str, *requirements: str) -> Installation:
    """Create an environment in `folder`, and install the wheel with its extras and `requirements`.

    Uses one pip command and the pins of constraints.txt. Raises CalledProcessError if pip fails.
    """
    venv.create(folder, with_pip=True)
    extras_suffix = f"[{extras}]" if extras else ""
    start = time.perf_counter()
    subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-cache-dir",
         "--disable-pip-version-check", "-c", ROOT / "constraints.txt",
         f"{wheel_path}{extras_suffix}", *requirements],
        check=True, env=_clean_environment(),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    return Installation(folder, " ".join((f"parity-gate{extras_suffix}", *requirements)), seconds)


def _clean_environment() -> dict[str, str]:
    """Return the environment variables without those that point pip at another Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def main(arguments: Sequence[str]) -> int:
    """Measure each installation and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", default=INSTALLATIONS, help="such as cpu,service")
    parser.add_argument("--torch", action="store_true", help="and cpu with PyPI's torch")
    options = parser.parse_args(arguments)
    print("| pip install | MB | packages | seconds |\n|---|---:|---:|---:|", flush=True)
    rows = [(extras, ()) for extras in options.extras] + [("cpu", ("torch",))] * options.torch
    for extras, requirements in rows:
        with tempfile.TemporaryDirectory() as folder:
            installation = install(
                Path(folder, "env"), build_wheel(Path(folder)), extras, *requirements
            )
            print(installation.row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
