"""Run the README's commands in an environment with only the wheel, for four kinds of networks.

Nothing is downloaded: a path file adds the required packages of this Python.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.install_size import Installation
from gate.installation import COMMIT_FILE
from tests.exhaustive import select_rows
from tests.hidden import ROOT
from tests.installed import run
from tests.test_readme import README, _blocks, _lines

pytestmark = [pytest.mark.slow, pytest.mark.proof]
PYTHONS = ("3.11", "3.13")
NEEDED = "numpy, mlflow, onnx, onnxruntime, onnxscript, scipy, sqlalchemy, torch"


@dataclass(frozen=True)
class Net:
    """A network and samples that replace the README's mymodel.py."""

    model: str
    """The body of the function `build`."""
    samples: str
    commands: tuple[str, ...] = ("export", "check", "verify-release")
    """Commands of the README to run."""


NETS = {
    "picture classifier": Net(
        "nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4),"
        " nn.Flatten(), nn.Linear(128, 10))",
        "rng.normal(size=(64, 3, 32, 32)).astype('float32')",
        ("export", "check", "promote", "verify-release", "history", "init", "policy", "locate"),
    ),
    "token model": Net(
        "nn.Sequential(nn.Embedding(100, 16), nn.TransformerEncoderLayer(16, 2, 32,"
        " batch_first=True), nn.Linear(16, 100))",
        "rng.integers(0, 100, size=(64, 12))",
    ),
    "tabular net": Net(
        "nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 1))",
        "rng.normal(size=(64, 9)).astype('float32')",
    ),
    "one sample": Net(
        "nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2704, 10))",
        "rng.normal(size=(1, 1, 28, 28)).astype('float32')",
    ),
}


@pytest.fixture(scope="module", params=PYTHONS)
def installed(
    request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    python, packages = _python(request.param)
    path = tmp_path_factory.mktemp("env") / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", str(path)], check=True)
    created = Installation(path, "the wheel", 0.0)
    line = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(created.python),
    ]
    subprocess.run([*line, "install", "--quiet", "--no-deps", str(built)], check=True)
    (site,) = path.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return created


def _python(version: str) -> tuple[str, str]:
    """Return a Python of this version with the required packages, and the packages' folder."""
    custom = f"{sys.version_info.major}.{sys.version_info.minor}"
    result = sys.executable if version == custom else shutil.which(f"python{version}")
    code = f"import sysconfig, {NEEDED}; print(sysconfig.get_path('purelib'))"
    if result is not None:
        completed = subprocess.run(
            [result, "-c", code], capture_output=True, text=True, check=False
        )
        if completed.returncode == 0:
            return result, completed.stdout.splitlines()[-1]
    lacks = f"python{version} with {NEEDED} is not on this machine: its first hour is not tested"
    pytest.skip(lacks)


def test_wheel_contains_only_the_package(built: Path) -> None:
    names = zipfile.ZipFile(built).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"gate", "parity_gate"}
    assert {
        "gate/py.typed",
        "gate/report/templates/page.html",
        "gate/decision/cuda_kernels.txt",
        "gate/runtimes/page.mjs",
    } <= set(names)
    assert (f"gate/{COMMIT_FILE}" in names) == (ROOT / ".git").exists()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gate").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}


def test_the_wheel_is_what_runs(installed: Installation, tmp_path: Path) -> None:
    code = "import gate; print(gate.__file__)"
    result = run(tmp_path, installed.python, "-c", code)
    assert Path(result.stdout.strip()).is_relative_to(installed.folder), result.stderr


@pytest.mark.parametrize("name", select_rows(NETS, 4))
def test_the_commands_of_the_readme_run(installed: Installation, tmp_path: Path, name: str) -> None:
    net = NETS[name]
    blocks = _blocks("python")
    (model,) = [block for block in blocks if block.startswith("# mymodel.py")]
    (standins,) = [block for block in blocks if block.startswith("# standins.py")]
    model, replaced = re.subn(r"return .*", f"return {net.model}", model)
    standins, saved = re.subn(
        r'np\.save\(.*', f'rng = np.random.default_rng(0)\nnp.save("samples.npy", {net.samples})',
        standins,
    )  # fmt: skip
    assert (replaced, saved) == (1, 1)
    (tmp_path / "mymodel.py").write_text(model)
    (tmp_path / "standins.py").write_text(standins)
    created = run(tmp_path, installed.python, "standins.py")
    assert created.returncode == 0, created.stderr
    lines = [words for words in _lines(README, "gate") if words[1] in net.commands]
    lines = [words for words in lines if words[2:3] != ["compare"]]
    assert {words[1] for words in lines} == set(net.commands)
    printed = {}
    for words in lines:
        result = run(tmp_path, installed.gate, *words[1:])
        assert result.returncode == 0, (words, result.stdout, result.stderr)
        assert "Traceback" not in result.stderr
        printed[words[1]] = result.stdout
    assert printed["check"].startswith("PASS ")
    assert (tmp_path / "report" / "report.html").is_file()
    assert (tmp_path / "report" / "golden").is_dir()
    ignored = (tmp_path / ".gate" / ".gitignore").read_text()
    assert "*" in ignored.split()
