"""Measure size and time of each installation from the wheel in an empty environment.

    python -m benchmarks.install_size              # the rows of docs/install.md
    python -m benchmarks.install_size cpu,service  # one installation

MB are millions of bytes of files including compiled Python, without pip and setuptools. Seconds are
those of `pip install` without a cache. They include downloads, so they depend on the package index
too. The row with torch uses the build on PyPI with CUDA libraries; the index of CPU builds is not
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
"""Extras that go together; cuda and pipeline bring gigabytes, and are asked for by name."""
_NOT_OURS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")


@dataclass(frozen=True)
class Installation:
    """An environment with the gate in it."""

    folder: Path
    name: str
    """Of what was installed: `parity-gate[cpu] torch`."""
    seconds: float

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def gate(self) -> Path:
        """The command."""
        return self.folder / "bin" / "gate"

    @property
    def packages(self) -> dict[str, str]:
        """Versions by name, as pip lists them, but for pip's own."""
        command = [str(self.python), "-m", "pip", "list", "--format", "freeze"]
        done = subprocess.run(command, env=_clean(), capture_output=True, text=True, check=True)
        lines = (line.replace(" @ ", "==").partition("==") for line in done.stdout.splitlines())
        return {n.lower(): v for n, _, v in lines if n not in ("pip", "setuptools")}

    @property
    def size_bytes(self) -> int:
        """Of all files but pip's own."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        return sum(
            path.stat().st_size
            for path in site.rglob("*")
            if path.is_file() and not path.relative_to(site).parts[0].startswith(_NOT_OURS)
        )

    @property
    def row(self) -> str:
        """Of a table in Markdown: name, MB, packages, seconds."""
        megabytes = self.size_bytes / 1e6
        return f"| `{self.name}` | {megabytes:.0f} | {len(self.packages)} | {self.seconds:.0f} |"


def wheel(folder: Path, source: Path = ROOT) -> Path:
    """The wheel of a checkout, by default this one, built into `folder`."""
    options = ("-qq", "--no-deps", "--no-build-isolation")  # no download: 6 s less
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), "."]
    subprocess.run(command, cwd=source, check=True)
    (built,) = folder.glob("parity_gate-*.whl")
    return built


def install(folder: Path, built: Path, extras: str, *others: str) -> Installation:
    """Make an environment in `folder`, and install the wheel with its extras and `others` there,
    in one command, by the pins of constraints.txt. Raises CalledProcessError; pip says why."""
    venv.create(folder, with_pip=True)
    chosen = f"[{extras}]" if extras else ""
    start = time.perf_counter()
    subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-cache-dir",
         "--disable-pip-version-check", "-c", ROOT / "constraints.txt",
         f"{built}{chosen}", *others],
        check=True, env=_clean(),
    )  # fmt: skip
    took = time.perf_counter() - start
    return Installation(folder, " ".join((f"parity-gate{chosen}", *others)), took)


def _clean() -> dict[str, str]:
    """This environment without what would show pip the packages of another Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def main(arguments: Sequence[str]) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", default=INSTALLATIONS, help="such as cpu,service")
    parser.add_argument("--torch", action="store_true", help="and cpu with PyPI's torch")
    asked = parser.parse_args(arguments)
    print("| pip install | MB | packages | seconds |\n|---|---:|---:|---:|", flush=True)
    rows = [(extras, ()) for extras in asked.extras] + [("cpu", ("torch",))] * asked.torch
    for extras, others in rows:
        with tempfile.TemporaryDirectory() as folder:
            made = install(Path(folder, "env"), wheel(Path(folder)), extras, *others)
            print(made.row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
