"""Each extra in an empty environment of its own, where the commands that it is for run.

By `make exhaustive`: each environment is downloaded anew, and takes minutes. `[cpu]`, `[service]` and
the README's row are in tests/test_install.py. PyTorch is the user's: it is this Python's, by links.
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
from tests.installed import TORCHVISION, all_done, lend_torch, run
from tests.pipelines.conftest import clone
from tests.service.postgres import run_postgres
from tests.signing.released import release
from tests.small_project import made as small_project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.proof,
    pytest.mark.timeout(3600),
    exhaustive,
    # SQLAlchemy, about MLflow's own tables.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
CHECK = ("gate", "check", "good.onnx", "--reference", "small_models:build", "--inputs")
PEERS = ("python", "-m", "benchmarks.peers")
WORLD = ("python", "-m", "benchmarks.world")
EXPORT = ("small_models:build", "--example-input", "images.npy")


@dataclass(frozen=True)
class Row:
    """What is installed together, and the command lines that end with 0 there."""

    extras: str
    lines: tuple[tuple[str, ...], ...]
    torch: bool = False
    program: str | None = None
    """Of the system, without which it can't be tried."""
    here: bool = False
    """The lines run in this repository, of which they need more than the package."""


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
        ((*PEERS, "--rounds", "0", "--corpus", "--only", "correct/resnet/traced-13"),),
        torch=True,
        here=True,
    ),
    "world": Row(
        "cpu,world",
        ((*WORLD, "--only", "correct/timm-vit-tiny-patch16-224/direct-17"),),
        torch=True,
        here=True,
    ),
    "docs": Row(
        "docs", (("python", "-m", "mkdocs", "build", "--strict", "-q", "-d", "{site}"),), here=True
    ),
}
BY_THEMSELVES = {"registry", "postgresql", "pipeline", "all"}
ELSEWHERE = {"cpu", "service", "server-grpc", "dev"}
"""In tests/test_install.py and tests/runtimes/test_mlserver.py; the last is where these tests run."""


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with all that the command lines name."""
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


def installed(place: Path, built: Path, extras: str, *, torch: bool = False) -> Installation:
    created = install_size.install(place, built, extras)
    print(created.row)
    if torch:
        lend_torch(created)
    return created


def run_lines(made: Installation, row: Row, given: Path) -> None:
    for program, *rest in row.lines:
        words = [word.format(site=given / "site") for word in rest]
        folder = ROOT if row.here else given
        environment = {"NO_MKDOCS_2_WARNING": "1"}
        result = run(folder, made.folder / "bin" / program, *words, **environment)
        assert result.returncode == 0, (words, result.stdout, result.stderr)


def test_each_extra_has_an_environment() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*ROWS, *BY_THEMSELVES, *ELSEWHERE} == set(project["optional-dependencies"])


@pytest.mark.parametrize("extra", ROWS)
def test_commands_of_an_extra_run_with_it_alone(
    extra: str, built: Path, place: Path, given: Path
) -> None:
    row = ROWS[extra]
    if row.program is not None and shutil.which(row.program) is None:
        pytest.skip(f"no {row.program} here: make packages")
    created = installed(place, built, row.extras, torch=row.torch)
    if row.here and row.torch:
        lend_torch(created, *TORCHVISION)  # the corpora have architectures of it
    runtimes = {name for name in created.packages if name.startswith("onnxruntime")}
    expected = {"cpu": {"onnxruntime"}, "cuda": {"onnxruntime-gpu"}}
    assert runtimes == expected.get(row.extras.split(",")[0], set())
    run_lines(created, row, given)
    if extra == "charts":
        assert "Drawn with matplotlib" not in (given / "released" / "report.html").read_text()


def test_two_onnx_runtime_packages_are_detected(built: Path, place: Path, given: Path) -> None:
    """pip can be asked for both; no single extra does it, and `gate doctor` says what it is."""
    created = installed(place, built, "cpu", torch=True)
    all_done(created, given, [("doctor",)])
    pip = [created.python, "-m", "pip", "install", "-qq", "--no-deps", "onnxruntime-gpu"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt"], check=True)
    result = run(given, created.gate, "doctor")
    assert "overwrite each other" in result.stdout
    assert "onnxruntime-gpu" in result.stdout


def test_registry_extra_promotes_reviews_and_rolls_back(
    built: Path, place: Path, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a server of the tests' own Python; what was judged, was judged there, too."""
    monkeypatch.chdir(given)
    for name in ("good", "coloured"):
        factory, inputs = ("build", "images") if name == "good" else ("coloured", "coloured")
        question = ["--reference", f"small_models:{factory}", "--inputs", f"{inputs}.npy"]
        assert cli.main(["check", f"{name}.onnx", *question, "--report", f"of-{name}"]) == 0
    created = installed(place, built, "cpu,registry")
    (tmp_path / "registry").mkdir()
    with run_mlflow_server_with_webhooks(tmp_path / "registry") as server:
        all_done(created, given, [
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


def test_ledger_in_postgresql(built: Path, place: Path, given: Path) -> None:
    created = installed(place, built, "cpu,service,postgresql")
    SigningKey.make(given / "key.pem")
    with run_postgres() as server:
        all_done(
            created,
            given,
            [("accept-ledger", "--reason", "new"), ("history",)],
            GATE_STATE=server.url,
        )


def test_pipeline_promotes_its_model(built: Path, place: Path, tmp_path: Path) -> None:
    created = installed(place, built, "cpu,pipeline")
    folder = clone(tmp_path / "clone")
    path = f"{created.folder}/bin{os.pathsep}{os.environ['PATH']}"
    result = run(folder, created.python, "-m", "pipelines.repro", PATH=path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Promoted: champion is version 1 of tiny" in result.stdout


def test_extra_all_contains_every_other_extra(
    built: Path, place: Path, given: Path, tmp_path: Path
) -> None:
    created = installed(place, built, "cpu,all")
    assert {name for name in created.packages if name.startswith("onnxruntime")} == {"onnxruntime"}
    vectors.write_model_and_vectors(tmp_path)
    for extra, row in ROWS.items():
        if extra not in ("cuda", "docs") and (row.program is None or shutil.which(row.program)):
            run_lines(created, row, given)
