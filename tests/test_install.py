"""Real installations in empty environments, by `make exhaustive`: each takes a minute, and downloads.

tests/package/test_extras.py proves the same with packages hidden, in seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import install_size
from benchmarks.install_size import Installation
from gate.package import extras
from gate.package.version import COMMIT_FILE
from tests.attestation.released import release
from tests.exhaustive import exhaustive
from tests.golden_vectors import vectors
from tests.hidden import ROOT
from tests.package.test_extras import LINES
from tests.test_readme import README, _blocks, _lines

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(3600)]
CORE_MB = 400
"""Of the core with ONNX Runtime."""
SERVICE_LACKS = {"torch", "dvc", "scikit-learn", "matplotlib", "mlflow", "pandas"}
NOT_SHIPPED = ("tests", "data", "benchmarks", "pipelines", "docs", "models", "reports", "params")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_size.wheel(tmp_path_factory.mktemp("wheel"))


def _gate(made: Installation, folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MLFLOW_", "GATE_"))}
    return subprocess.run(
        [made.gate, *line], cwd=folder, env=own, capture_output=True, text=True, check=False
    )


def _all_done(made: Installation, folder: Path, lines: Sequence[Sequence[str]]) -> None:
    for line in lines:
        done = _gate(made, folder, *line)
        assert done.returncode == 0, (line, done.stdout, done.stderr)


def test_a_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = zipfile.ZipFile(built).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"gate", "parity_gate"}
    assert {
        "gate/py.typed",
        "gate/report/templates/page.html",
        "gate/runtimes/browser/page.mjs",
    } <= set(names)
    assert (f"gate/package/{COMMIT_FILE}" in names) == (ROOT / ".git").exists()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gate").rglob("*.py")}
    assert modules <= set(names)


@exhaustive
def test_an_sdist_holds_what_a_wheel_is_made_of(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "-o", str(tmp_path), str(ROOT)], check=True)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as opened:
        parts = {name.split("/")[1] for name in opened.getnames() if "/" in name}
    assert not [part for part in parts if part.startswith(NOT_SHIPPED)]
    (wheel,) = tmp_path.glob("*.whl")  # which build makes from the sdist
    assert f"gate/package/{COMMIT_FILE}" in zipfile.ZipFile(wheel).namelist()


@exhaustive
def test_the_core_verifies_verdicts_and_says_what_else_needs(tmp_path: Path, built: Path) -> None:
    made = install_size.install(tmp_path / "env", built, "")
    given = release(tmp_path / "released")
    statement = (str(given.statement), "--model", str(given.model), "--trust", str(given.trust))
    policy = str(given.folder / "policy.json")
    _all_done(made, tmp_path, [
        ("--help",), ("--version",), ("verify-verdict", *statement),
        ("report", str(given.folder), "--policy", policy), ("deployed", "--store", "store"),
    ])  # fmt: skip
    for name in ("model.onnx", "samples.npy", "plan.json", "part.json", "ci.pem", "mine.py"):
        (tmp_path / name).write_text("build = dict\n")
    for name in ("folder", "golden", "photos"):
        (tmp_path / name).mkdir()
    for command, rest in LINES.items():
        done = _gate(made, tmp_path, *command.split(), *rest)
        lacks = extras.remedy(extras.COMMANDS[command][0])
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: gate {command} {lacks}"), done.stderr


@exhaustive
def test_with_onnx_runtime_it_proves_releases_and_is_small(tmp_path: Path, built: Path) -> None:
    made = install_size.install(tmp_path / "env", built, "cpu")
    assert made.size_bytes < CORE_MB * 1e6
    assert "onnxruntime-gpu" not in made.packages
    vectors.made(tmp_path)
    _all_done(made, tmp_path, [("verify-release", "model.onnx", "--golden", "golden")])


@exhaustive
def test_the_service_deploys_without_what_it_does_not_need(tmp_path: Path, built: Path) -> None:
    made = install_size.install(tmp_path / "env", built, "cpu,service")
    assert not SERVICE_LACKS & made.packages.keys()
    vectors.made(tmp_path)
    _all_done(made, tmp_path, [
        ("deploy", "m", "--store", "store", "--file", "model.onnx", "--golden", "golden"),
        ("deployed", "--store", "store"),
    ])  # fmt: skip
    (tmp_path / "secrets").write_text(f"{'a' * 64}\n")
    (tmp_path / "secrets").chmod(0o600)
    done = _gate(made, tmp_path, "serve", "--model", "m", "--secret-file", "secrets",
                 "--tracking-uri", "http://127.0.0.1:1")  # fmt: skip
    assert "no answer from http://127.0.0.1:1" in done.stderr


@exhaustive
def test_the_readme_works_from_the_wheel_with_the_users_torch(tmp_path: Path, built: Path) -> None:
    made = install_size.install(
        tmp_path / "env", built, "cpu,export,preprocess,registry", "torch", "torchvision", "mlflow"
    )
    (module,) = [block for block in _blocks("python") if block.startswith("# mymodel.py\n")]
    (tmp_path / "mymodel.py").write_text(module)
    samples = np.random.default_rng(0).normal(size=(64, 28, 28)).astype(np.float32)
    np.save(tmp_path / "samples.npy", samples)
    np.save(tmp_path / "train.npy", samples)
    draw = (
        "import pathlib, numpy as np; from PIL import Image; from safetensors.torch import save_file; "
        "import mymodel; save_file(mymodel.build().state_dict(), 'weights.safetensors'); "
        "pathlib.Path('photos').mkdir(); "
        "Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (280, 1))).save('photos/ramp.png')"
    )
    subprocess.run([made.python, "-c", draw], cwd=tmp_path, check=True)
    _all_done(made, tmp_path, [words[1:] for words in _lines(README, "gate")])
