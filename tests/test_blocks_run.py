"""Run the shell blocks of the pages with bash, in a folder with the files that they name.

tests/test_readme.py runs the blocks of the README and of the first page. A page says why a block is
not run (tests/test_code_blocks.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML

from gate.export.export import export_model
from gate.model.checkpoint import save_checkpoint
from gate.model.loading import build_model
from gate.preprocess.implementations import pillow_preprocess
from gate.preprocess.pictures import read_picture
from gate.preprocess.spec import PreprocessSpec
from gate.records.export import ExportSettings
from gate.signing.keys import SigningKey
from tests.exhaustive import exhaustive
from tests.signing import signing
from tests.signing.released import release
from tests.test_code_blocks import ALL_BLOCKS, BY_BASH, ROOT, SHELLS, Block, runner

pytestmark = pytest.mark.proof
FACTORY = """\
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear({size}, 10))
"""
DATA = """\
import numpy as np


def eval_set():
    return list(np.load("samples.npy"))
"""
PICTURE_SHAPE = (3, 16, 16)
SAMPLES = 64


def shell_blocks() -> dict[str, list[Block]]:
    """Return the blocks that bash runs, by page and in order."""
    matches: dict[str, list[Block]] = {}
    for block in ALL_BLOCKS:
        page = block.page.relative_to(ROOT).as_posix()
        if block.reason is None and block.language in SHELLS and runner(block) == BY_BASH:
            matches.setdefault(page, []).append(block)
    return matches


def write_model(folder: Path, shape: tuple[int, ...] = PICTURE_SHAPE) -> None:
    """Write the model as `mymodel:build` and `mypackage.models:build`, with weights, file and
    samples."""
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("mymodel", "mypackage")
    ]:
        del sys.modules[name]  # imported from the folder of an earlier test
    source = FACTORY.format(size=np.prod(shape))
    for name in ("mymodel/__init__.py", "mypackage/__init__.py", "mypackage/models.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("" if name == "mypackage/__init__.py" else source)
    (folder / "mymodel" / "data.py").write_text(DATA)
    samples = np.random.default_rng(0).normal(size=(SAMPLES, *shape)).astype(np.float32)
    for name in ("samples", "train", "eval"):
        np.save(folder / f"{name}.npy", samples)
    model = build_model("mymodel:build").eval()
    save_checkpoint(model, folder / "weights.safetensors")
    export_model(
        model, {"input": samples[:4]}, settings=ExportSettings(), output=folder / "model.onnx"
    )


def run_gate(folder: Path, *words: str) -> None:
    """Run a command of gate that the page assumes to be done."""
    subprocess.run(
        [sys.executable, "-m", "gate", *words], cwd=folder, env=environment(folder), check=True
    )


def environment(folder: Path) -> dict[str, str]:
    custom = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "GATE_"))}
    path = f"{folder / 'bin'}{os.pathsep}{custom['PATH']}"
    return custom | {"PYTHONPATH": str(ROOT), "PATH": path, "SLURM_ARRAY_TASK_ID": "0"}


def prepare_attestation(folder: Path) -> None:
    release(folder)
    (folder / "ci.pub").write_text(signing.key().public.public)
    for name in ("ann", "bob"):
        SigningKey.make(folder / f"{name}.pem")


def prepare_data(folder: Path) -> None:
    spec = {"resize": {"size": [16, 16]}, "layout": "nchw"}
    YAML(typ="safe").dump({"preprocessing": spec}, folder / "preprocessing.yaml")
    rng = np.random.default_rng(1)
    with tarfile.open(folder / "photos.tar", "w") as shards:
        for number in range(SAMPLES):
            picture = Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8))
            picture.save(folder / "one.png")
            shards.add(folder / "one.png", f"{number:04}.png")


def prepare_preprocessing(folder: Path) -> None:
    write_model(folder, (3, 224, 224))
    spec = next(
        b for b in ALL_BLOCKS if b.page.name == "preprocessing.md" and "shortest_side" in b.code
    )
    (folder / "preprocessing.yaml").write_text(spec.code)
    (folder / "photos").mkdir()
    ramp = np.tile(np.arange(256, dtype=np.uint8), (280, 1))
    Image.fromarray(np.stack([ramp, ramp[:, ::-1], ramp], axis=-1)).save(folder / "photos/ramp.png")
    loaded_spec = PreprocessSpec.from_file(folder / "preprocessing.yaml")
    tensor = pillow_preprocess(read_picture(folder / "photos/ramp.png"), loaded_spec)
    np.save(folder / "phone.npy", np.asarray(tensor)[None])


def prepare_recorded(folder: Path) -> None:
    meta = next(b for b in ALL_BLOCKS if b.page.name == "recorded.md" and '"device"' in b.code)
    (folder / "meta.json").write_text(meta.code)


def prepare_rejection(folder: Path) -> None:
    run_gate(folder, "init")
    question = ("--reference", "mymodel:build", "--inputs", "samples.npy")
    run_gate(folder, "check", "model.onnx", *question, "--report", "report")


def prepare_lint(folder: Path) -> None:
    example = ("--example-input", "samples.npy", "--output", "model.onnx")
    run_gate(folder, "export", "mypackage.models:build", *example)


def prepare_scale(folder: Path) -> None:
    question = ("--reference", "mypackage.models:build", "--inputs", "samples.npy")
    run_gate(folder, "plan", "model.onnx", *question, "--units", "2", "-o", "plan.json")


def prepare_quantized(folder: Path) -> None:
    """Write samples close to their class, as of a trained model; write both policies; check the
    exact file."""
    weights = build_model("mymodel:build")[1].weight.detach().numpy()
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 10, 500)
    near = 30 * weights[classes] / np.linalg.norm(weights, axis=1)[classes, None]
    near = near + rng.normal(scale=0.05, size=near.shape)
    samples = near.reshape(-1, *PICTURE_SHAPE).astype(np.float32)
    np.save(folder / "train.npy", samples)
    np.save(folder / "eval.npy", samples)
    with torch.no_grad():
        answers = build_model("mymodel:build")(torch.from_numpy(samples)).argmax(1)
    np.save(folder / "labels.npy", answers.numpy())
    run_gate(folder, "init")
    (folder / "gate.yaml").rename(folder / "exact.yaml")
    (twin,) = (b.code for b in ALL_BLOCKS if b.page.name == "quantized.md" and "twin:" in b.code)
    yaml = YAML(typ="safe")
    exact, section = yaml.load(folder / "exact.yaml"), yaml.load(twin)["gate"]["twin"]
    yaml.dump({"gate": section}, folder / "twin.yaml")
    exact["gate"]["twin"] = section
    yaml.dump(exact, folder / "exact.yaml")
    question = ("--reference", "mymodel:build", "--inputs", "eval.npy", "--labels", "labels.npy")
    run_gate(
        folder, "check", "model.onnx", *question, "--policy", "exact.yaml", "--report", "report"
    )


PREPARE: dict[str, Callable[[Path], None]] = {
    "docs/attestation.md": prepare_attestation,
    "docs/data.md": prepare_data,  # the test below runs its Python block
    "docs/lint/README.md": prepare_lint,
    "docs/preprocessing.md": prepare_preprocessing,
    "docs/quantized.md": prepare_quantized,
    "docs/recorded.md": prepare_recorded,
    "docs/rejection.md": prepare_rejection,
    "docs/scale.md": prepare_scale,
}
SYSTEM_FOLDERS = re.compile(r"(?<![\w.])/(?=var/lib/|srv/)")
"""System folders, which are replaced by folders below the test's."""
CONSUMER = (
    "from tests.runtimes.consumer import run; from pathlib import Path as P; "
    'run(P("model.onnx"), P("for-the-phone"), P("from-the-phone"))'
)


READER_COMMANDS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "docs/recorded.md": ("# run it there:", lambda _: f"{sys.executable} -c '{CONSUMER}' #"),
}
"""Actions that a page only describes in a comment, with the command to run instead."""
MAY_REJECT = ("docs/preprocessing.md",)
"""Pages whose command compares all installed implementations, some of which differ."""


SLOW_PAGES = (
    "docs/attestation.md", "docs/ci.md", "docs/data.md", "docs/github.md", "docs/lint/README.md",
    "docs/preprocessing.md", "docs/quantized.md", "docs/recorded.md", "docs/rejection.md",
    "docs/runtimes.md", "docs/scale.md",
)  # fmt: skip
"""Pages whose blocks take 10 s or more: `make exhaustive` runs them."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[exhaustive] if page in SLOW_PAGES else [])
        for page in shell_blocks()
    ],
)
def test_shell_blocks_of_each_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page not in ("docs/attestation.md", "docs/preprocessing.md"):
        write_model(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, does in {"gate": f'exec {sys.executable} -m gate "$@"', "gh": "exit 0"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    PREPARE.get(page, lambda _: None)(tmp_path)
    for block in shell_blocks()[page]:
        script = re.sub(r"^\$ ", "", block.code, flags=re.MULTILINE)
        script = SYSTEM_FOLDERS.sub(f"{tmp_path}/", script)
        if page in READER_COMMANDS:
            words, custom = READER_COMMANDS[page]
            script = script.replace(words, custom(tmp_path))
        completed = subprocess.run(
            ["bash", "-c", script if page in MAY_REJECT else f"set -e\n{script}"],
            cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False,
        )  # fmt: skip
        allowed = (0, 1) if page in MAY_REJECT else (0,)
        assert completed.returncode in allowed, (str(block), completed.stdout, completed.stderr)


def test_library_reads_the_documented_data_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    prepare_data(tmp_path)
    np.save(tmp_path / "samples.npy", np.zeros((1024, *PICTURE_SHAPE), np.float32))
    (code,) = (b.code for b in ALL_BLOCKS if b.page.name == "data.md" and b.language == "python")
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert completed.stdout.startswith("sha256:"), completed.stderr
