"""Each extra in an empty environment, in which its commands run.

`make exhaustive` runs these tests: each environment is downloaded for minutes.
tests/test_install.py covers `[cpu]`, `[service]` and the README's command. PyTorch is linked from
this Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from benchmarks import install_size
from benchmarks.install_size import Installation
from gate import cli
from gate.signing.keys import SigningKey
from tests.end_to_end.stack import run_mlflow_server_with_webhooks
from tests.exhaustive import exhaustive
from tests.golden_vectors import vectors
from tests.hidden import ROOT
from tests.installed import TORCHVISION_PATTERNS, assert_all_succeed, link_torch, run
from tests.pipelines.conftest import clone
from tests.service.postgres import run_postgres
from tests.signing.released import release
from tests.small_project import create_project as small_project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.proof,
    pytest.mark.timeout(3600),
    exhaustive,
]
CHECK = ("gate", "check", "good.onnx", "--reference", "small_models:build", "--inputs")
PEERS_COMMAND = ("python", "-m", "benchmarks.peers")
WORLD_COMMAND = ("python", "-m", "benchmarks.world")
EXPORT = ("small_models:build", "--example-input", "images.npy")


@dataclass(frozen=True)
class Row:
    """Extras that are installed together, and command lines that must exit with 0."""

    extras: str
    lines: tuple[tuple[str, ...], ...]
    torch: bool = False
    program: str | None = None
    """A system program that the test requires."""
    here: bool = False
    """Whether the lines run in this repository, because they need files that are not in the
    package."""


ROWS = {
    "charts": Row("charts", (("gate", "report", "released", "--policy", "released/policy.json"),)),
    "cuda": Row(
        "cuda",
        (
            ("gate", "verify-release", "released/model.onnx", "--golden", "released/golden"),
            (*CHECK, "images.npy"),
            ("gate", "doctor"),
        ),
        torch=True,
    ),
    "export": Row(
        "cpu,export",
        (
            ("gate", "export", *EXPORT, "--strategy", "dynamo", "--output", "dynamo.onnx"),
            ("gate", "export", "compare", *EXPORT),
        ),
        torch=True,
    ),
    "data": Row("cpu,data", ((*CHECK, "images.parquet"),), torch=True),
    "preprocess": Row(
        "cpu,preprocess",
        (("gate", "preprocess", "compare", "photos", "--implementations", "onnx,rust-image"),),
    ),
    "browser": Row(
        "cpu,browser",
        (
            ("gate", "runtimes", "install", "browser-wasm"),
            (*CHECK, "images.npy", "--runtime", "browser-wasm"),
        ),
        torch=True,
        program="chromium",
    ),
    "metrics": Row("cpu,metrics", (("python", "-c", "import jiwer"),)),
    "server": Row("cpu,server", (("python", "-c", "import gate.runtimes.v2_http, httpx"),)),
    "openvino": Row("cpu,openvino", ((*CHECK, "images.npy", "--runtime", "openvino"),), torch=True),
    "tract": Row("cpu,tract", ((*CHECK, "images.npy", "--runtime", "tract"),), torch=True),
    "ray": Row(
        "cpu,ray",
        ((*CHECK, "images.npy", "--engine", "ray", "--workers", "2"),),
        torch=True,
    ),
    "peers": Row(
        "cpu,peers",
        ((*PEERS_COMMAND, "--rounds", "0", "--corpus", "--only", "correct/resnet/traced-13"),),
        torch=True,
        here=True,
    ),
    "world": Row(
        "cpu,world",
        ((*WORLD_COMMAND, "--only", "correct/timm-vit-tiny-patch16-224/direct-17"),),
        torch=True,
        here=True,
    ),
    "docs": Row(
        "docs", (("python", "-m", "mkdocs", "build", "--strict", "-q", "-d", "{site}"),), here=True
    ),
}
TESTED_SEPARATELY = {"registry", "postgresql", "pipeline", "all"}
TESTED_ELSEWHERE = {"cpu", "service", "server-grpc", "dev"}
"""These extras are tested in tests/test_install.py and tests/runtimes/test_mlserver.py. `dev` is
the environment of these tests."""


@pytest.fixture
def inputs_folder(tmp_path: Path) -> Path:
    """A folder with all files that the command lines name."""
    folder = tmp_path / "given"
    shutil.copytree(small_project(), folder)
    release(folder / "released")
    images = np.load(folder / "images.npy")
    rows = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    pq.write_table(pa.table({"input": rows}), folder / "images.parquet")
    (folder / "photos").mkdir()
    ramp = np.tile(np.arange(256, dtype=np.uint8), (280, 1))
    Image.fromarray(ramp).save(folder / "photos" / "ramp.png")
    return folder


def install_extras(
    environment_path: Path, built: Path, extras: str, *, torch: bool = False
) -> Installation:
    created = install_size.install(environment_path, built, extras)
    print(created.row)
    if torch:
        link_torch(created)
    return created


def run_lines(installation: Installation, row: Row, inputs_folder: Path) -> None:
    for program, *rest in row.lines:
        words = [word.format(site=inputs_folder / "site") for word in rest]
        folder = ROOT if row.here else inputs_folder
        environment = {"NO_MKDOCS_2_WARNING": "1"}
        result = run(folder, installation.folder / "bin" / program, *words, **environment)
        assert result.returncode == 0, (words, result.stdout, result.stderr)


def test_each_extra_has_an_environment() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*ROWS, *TESTED_SEPARATELY, *TESTED_ELSEWHERE} == set(project["optional-dependencies"])


@pytest.mark.parametrize("extra", ROWS)
def test_commands_of_an_extra_run_with_it_alone(
    extra: str, built: Path, environment_path: Path, inputs_folder: Path
) -> None:
    row = ROWS[extra]
    if row.program is not None and shutil.which(row.program) is None:
        pytest.skip(f"no {row.program} here: make packages")
    created = install_extras(environment_path, built, row.extras, torch=row.torch)
    if row.here and row.torch:
        link_torch(created, *TORCHVISION_PATTERNS)  # the corpora use its architectures
    runtimes = {name for name in created.packages if name.startswith("onnxruntime")}
    expected = {"cpu": {"onnxruntime"}, "cuda": {"onnxruntime-gpu"}}
    assert runtimes == expected.get(row.extras.split(",")[0], set())
    run_lines(created, row, inputs_folder)
    if extra == "charts":
        assert (
            "Drawn with matplotlib" not in (inputs_folder / "released" / "report.html").read_text()
        )


def test_two_onnx_runtime_packages_are_detected(
    built: Path, environment_path: Path, inputs_folder: Path
) -> None:
    """No single extra installs both packages, but pip can. `gate doctor` must report the
    conflict."""
    created = install_extras(environment_path, built, "cpu", torch=True)
    assert_all_succeed(created, inputs_folder, [("doctor",)])
    pip = [created.python, "-m", "pip", "install", "-qq", "--no-deps", "onnxruntime-gpu"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt"], check=True)
    result = run(inputs_folder, created.gate, "doctor")
    assert "overwrite each other" in result.stdout
    assert "onnxruntime-gpu" in result.stdout


def test_registry_extra_promotes_reviews_and_rolls_back(
    built: Path,
    environment_path: Path,
    inputs_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Promote to a server in the tests' Python. The checks also run in the tests' Python."""
    monkeypatch.chdir(inputs_folder)
    for name in ("good", "coloured"):
        factory, inputs = ("build", "images") if name == "good" else ("coloured", "coloured")
        question = ["--reference", f"small_models:{factory}", "--inputs", f"{inputs}.npy"]
        assert cli.main(["check", f"{name}.onnx", *question, "--report", f"of-{name}"]) == 0
    created = install_extras(environment_path, built, "cpu,registry")
    (tmp_path / "registry").mkdir()
    with run_mlflow_server_with_webhooks(tmp_path / "registry") as server:
        assert_all_succeed(created, inputs_folder, [
            ("promote", "good.onnx", "--name", "m", "--report", "of-good"),
            ("promote", "coloured.onnx", "--name", "m", "--report", "of-coloured"),
            ("history",),
            ("history", "--verify"),
            ("history", "checkpoint", "-o", "checkpoint.json"),
            ("history", "export", "-o", "ledger.jsonl"),
            ("rollback", "m", "--yes"),
            ("reconcile", "m"),
            ("webhooks", "list"),
        ], MLFLOW_TRACKING_URI=server.uri)  # fmt: skip


def test_ledger_in_postgresql(built: Path, environment_path: Path, inputs_folder: Path) -> None:
    created = install_extras(environment_path, built, "cpu,service,postgresql")
    SigningKey.make(inputs_folder / "key.pem")
    with run_postgres() as server:
        assert_all_succeed(
            created,
            inputs_folder,
            [("accept-ledger", "--reason", "new"), ("history",)],
            GATE_STATE=server.url,
        )


def test_pipeline_promotes_its_model(built: Path, environment_path: Path, tmp_path: Path) -> None:
    created = install_extras(environment_path, built, "cpu,pipeline")
    folder = clone(tmp_path / "clone")
    path = f"{created.folder}/bin{os.pathsep}{os.environ['PATH']}"
    result = run(folder, created.python, "-m", "pipelines.repro", PATH=path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Promoted: champion is version 1 of tiny" in result.stdout


def test_extra_all_contains_every_other_extra(
    built: Path, environment_path: Path, inputs_folder: Path, tmp_path: Path
) -> None:
    created = install_extras(environment_path, built, "cpu,all")
    assert {name for name in created.packages if name.startswith("onnxruntime")} == {"onnxruntime"}
    vectors.write_model_and_vectors(tmp_path)
    for extra, row in ROWS.items():
        if extra not in ("cuda", "docs") and (row.program is None or shutil.which(row.program)):
            run_lines(created, row, inputs_folder)
