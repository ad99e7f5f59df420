"""Real installations in empty environments. `make exhaustive` runs them: each downloads for
minutes.

tests/package/test_extras.py tests the same in seconds, with hidden packages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import install_size
from gate import installation
from gate.installation import COMMIT_FILE
from tests.end_to_end.stack import (
    deploy_approved_version,
    run_mlflow_server_with_webhooks,
    run_stack,
    wait_for,
)
from tests.exhaustive import exhaustive
from tests.golden_vectors import vectors
from tests.hidden import ROOT
from tests.installed import assert_all_succeed, run
from tests.package.test_extras import LINES
from tests.signing.released import release
from tests.test_readme import README, _blocks, _lines, write_modules

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(3600)]
CORE_MB = 400
"""Size limit of the core with ONNX Runtime, in MB."""
CORE_LACKS = {"onnxruntime", "onnxruntime-gpu", "torch", "mlflow-skinny", "mlflow", "matplotlib"}
SERVICE_LACKS = {"torch", "dvc", "scikit-learn", "matplotlib", "mlflow", "pandas"}
NOT_SHIPPED = ("tests", "data", "benchmarks", "pipelines", "docs", "models", "reports", "params")


@exhaustive
def test_wheel_contains_nothing_of_an_earlier_build(tmp_path: Path) -> None:
    files = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "gate/__init__.py",
             "gate/py.typed", "gate/installation.py")  # fmt: skip
    for name in files:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    deleted_module = tmp_path / "source" / "build" / "lib" / "gate" / "gone.py"
    deleted_module.parent.mkdir(parents=True)
    deleted_module.touch()
    built = install_size.build_wheel(tmp_path / "built", tmp_path / "source")
    names = zipfile.ZipFile(built).namelist()
    assert "gate/installation.py" in names
    assert "gate/gone.py" not in names


@exhaustive
def test_sdist_contains_the_wheel_sources(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "-o", str(tmp_path), str(ROOT)], check=True)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as opened:
        parts = {name.split("/")[1] for name in opened.getnames() if "/" in name}
    assert not [part for part in parts if part.startswith(NOT_SHIPPED)]
    (wheel,) = tmp_path.glob("*.whl")  # build creates the wheel from the sdist
    assert f"gate/{COMMIT_FILE}" in zipfile.ZipFile(wheel).namelist()


@exhaustive
def test_core_verifies_verdicts_and_names_missing_extras(
    tmp_path: Path, built: Path, environment_path: Path
) -> None:
    created = install_size.install(environment_path, built, "")
    assert not CORE_LACKS & created.packages.keys()
    arguments = release(tmp_path / "released")
    statement = (
        str(arguments.statement),
        "--model",
        str(arguments.model),
        "--trust",
        str(arguments.trust),
    )
    policy = str(arguments.folder / "policy.json")
    assert_all_succeed(created, tmp_path, [
        ("--help",), ("--version",), ("verify-verdict", *statement),
        ("report", str(arguments.folder), "--policy", policy), ("deployed", "--store", "store"),
    ])  # fmt: skip
    for name in ("model.onnx", "samples.npy", "plan.json", "part.json", "ci.pem", "mine.py"):
        (tmp_path / name).write_text("build = dict\n")
    for name in ("folder", "golden", "photos"):
        (tmp_path / name).mkdir()
    for command, rest in LINES.items():
        result = run(tmp_path, created.gate, *command.split(), *rest)
        lacks = installation.remedy(installation.COMMANDS[command][0])
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: gate {command} {lacks}"), result.stderr
        assert result.stderr.count("\n") == 1


@exhaustive
def test_onnx_runtime_extra_verifies_releases_and_is_small(
    tmp_path: Path, built: Path, environment_path: Path
) -> None:
    created = install_size.install(environment_path, built, "cpu")
    assert created.size_bytes < CORE_MB * 1e6
    assert CORE_LACKS & created.packages.keys() == {"onnxruntime"}
    assert re.fullmatch(r"\| `parity-gate\[cpu\]` \| \d{3} \| \d\d \| \d+ \|", created.row)
    vectors.write_model_and_vectors(tmp_path)
    assert_all_succeed(created, tmp_path, [("verify-release", "model.onnx", "--golden", "golden")])


@exhaustive
def test_service_deploys_without_unneeded_packages(
    tmp_path: Path, built: Path, environment_path: Path
) -> None:
    created = install_size.install(environment_path, built, "cpu,service")
    assert not SERVICE_LACKS & created.packages.keys()
    vectors.write_model_and_vectors(tmp_path)
    assert_all_succeed(created, tmp_path, [
        ("deploy", "m", "--store", "store", "--file", "model.onnx", "--golden", "golden"),
        ("deployed", "--store", "store"),
        ("verify-release", "model.onnx", "--golden", "golden"),
    ])  # fmt: skip
    # The registry runs in the Python of the tests; the service runs from the wheel.
    gate = ("env", "-u", "PYTHONPATH", str(created.gate))
    folder, registry = tmp_path / "service", tmp_path / "registry"
    folder.mkdir()
    registry.mkdir()
    with (
        run_mlflow_server_with_webhooks(registry) as server,
        run_stack(folder, server, "m", gate=gate) as complete,
    ):
        good = deploy_approved_version(complete)
        refused = complete.promote_release(2).version
        assert refused is not None
        complete.registry.set_tag("m", refused, key="gate.review", value="rejected")
        complete.move_champion(refused)
        assert wait_for(lambda: ("reverted", good) in complete.lines())
        assert complete.deployed() == complete.digest(good)
        assert complete.service is not None
        loaded = Path(f"/proc/{complete.service.pid}/maps").read_text()
        assert str(environment_path) in loaded
        assert_all_succeed(created, folder, [
            ("webhooks", "list", "--tracking-uri", server.uri),
            ("history", "--state", "state.db"),
        ])  # fmt: skip
        assert complete.stop() == 0


@exhaustive
def test_readme_works_from_the_wheel(tmp_path: Path, built: Path, environment_path: Path) -> None:
    ((*_, expected, torch, torchvision, mlflow),) = _lines(README, "pip")
    chosen = expected.removeprefix("parity-gate[").removesuffix("]")
    created = install_size.install(environment_path, built, chosen, torch, torchvision, mlflow)
    write_modules(tmp_path, README)
    result = run(tmp_path, created.python, "standins.py")
    assert result.returncode == 0, result.stderr
    shutil.copy(tmp_path / "samples.npy", tmp_path / "train.npy")
    (tmp_path / "photos").mkdir()
    ramp = np.tile(np.arange(256, dtype=np.uint8), (280, 1))
    Image.fromarray(ramp).save(tmp_path / "photos" / "ramp.png")
    assert_all_succeed(created, tmp_path, [words[1:] for words in _lines(README, "gate")])
    (example,) = [block for block in _blocks("python") if "from gate import" in block]
    (tmp_path / "example.py").write_text(example)
    result = run(tmp_path, created.python, "example.py")
    assert result.stdout == "PASS\n", result.stderr
