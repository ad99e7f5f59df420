"""gate check exits with 2 and a one-paragraph error for unsuitable inputs."""

from __future__ import annotations

import io
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from tests.commands.running import create_runner

run, _ = create_runner("check")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

X = np.random.default_rng(0).normal(size=(12, 3, 8, 8)).astype(np.float32)
IDS = np.arange(12 * 5).reshape(12, 5) % 10

MODEL = '''"""Two inputs: a picture and identifiers."""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.table, self.out = nn.Conv2d(3, 4, 3), nn.Embedding(10, 4), nn.Linear(4, 5)

    def forward(self, x, ids):
        return self.out(self.conv(x).mean((2, 3)) + self.table(ids).mean(1))

def build():
    return Net().eval()
'''


def npz(**arrays: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


def npy(array: np.ndarray) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        with path.open("wb") as stream:
            np.save(stream, array)

    return save


def raw(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data)


def write_truncated_npz(path: Path) -> None:
    complete = io.BytesIO()
    np.savez(complete, x=X, ids=IDS)
    path.write_bytes(complete.getvalue()[:-200])


def write_npz_without_array(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.txt", "none")


SAMPLES: dict[str, Callable[[Path], object]] = {
    "floats for integers": npz(x=X, ids=IDS.astype(np.float32)),
    "text": npz(x=np.array(["a"] * 12), ids=IDS),
    "objects": npz(x=np.array([X[0], None] * 6, object), ids=IDS),
    "channels last": npz(x=X.transpose(0, 2, 3, 1), ids=IDS),
    "samples that differ in number": npz(x=X, ids=IDS[:7]),
    "a scalar": npz(x=np.float32(1), ids=IDS),
    "no samples": npz(x=X[:0], ids=IDS[:0]),
    "swapped names": npz(ids=X, x=IDS),
    "a missing input": npz(x=X),
    "one array for two": npy(X),
    "identifiers beyond the table": npz(x=X, ids=IDS + 10),
    "an empty file": raw(b""),
    "a zip that is cut": write_truncated_npz,
    "a zip without arrays": write_npz_without_array,
}
"""For each case a function that writes `inputs.npz`."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "nets.py").write_text(MODEL)
    torch.manual_seed(0)
    space: dict[str, Callable[[], nn.Module]] = {}
    exec(MODEL, space)
    torch.onnx.export(
        space["build"](), (torch.from_numpy(X[:2]), torch.from_numpy(IDS[:2])),
        str(folder / "model.onnx"), dynamo=False, opset_version=17, input_names=["x", "ids"],
        output_names=["y"], dynamic_axes={name: {0: "batch"} for name in ("x", "ids", "y")},
    )  # fmt: skip
    np.savez(folder / "inputs.npz", x=X, ids=IDS)
    return folder


@pytest.fixture
def in_project(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    shutil.copytree(project, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return folder


def check_error(capsys: pytest.CaptureFixture[str]) -> str:
    arguments = ("--reference", "nets:build", "--inputs", "inputs.npz")
    code, out, err = run(capsys, "model.onnx", *arguments)
    assert code == 2
    assert "Traceback" not in out + err
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "unexpected" not in error
    return error


@pytest.mark.parametrize("name", SAMPLES)
def test_bad_samples_are_refused(
    in_project: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    SAMPLES[name](in_project / "inputs.npz")
    check_error(capsys)


def test_text_samples_are_refused(in_project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(in_project / "model.onnx")
    model.graph.input.append(helper.make_tensor_value_info("words", TensorProto.STRING, ["batch"]))
    onnx.save(model, in_project / "model.onnx")
    np.savez(in_project / "inputs.npz", x=X, ids=IDS, words=np.array(["a"] * 12))
    assert check_error(capsys).startswith("error: the reference model can't compute ")
