"""Exports of models whose example has no common axis of samples, and of modules in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gate.cli import main

FOLDER = """
import numpy as np, torch
from torch import nn

{before}

class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(4, 3)

    def forward(self, x, edge_index):
        reached = edge_index[1][None] == torch.arange(x.shape[0])[:, None]
        return self.second(x + reached.to(x.dtype) @ x[edge_index[0]])

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x) * torch.tensor(0.1) + torch.full((3,), 0.3)

def graph():
    torch.manual_seed(0)
    return Graph().eval()

def scaled():
    torch.manual_seed(0)
    return Scaled().eval()

def single():
    return scaled().float()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "wide.npy", x.astype(np.float64))
    graph = {"x": x[:9], "edge_index": rng.integers(0, 9, (2, 14))}
    np.savez(tmp_path / "graph.npz", **graph)
    return tmp_path


def written(folder: Path, name: str, *, before: str = "") -> str:
    (folder / f"{name}.py").write_text(FOLDER.format(before=before))
    return name


def test_arrays_without_a_common_length_are_one_call(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = written(folder, "layouts_of_one_call")
    assert main(["export", f"{module}:graph", "--example-input", "graph.npz",
                 "--output", "graph.onnx"]) == 0  # fmt: skip
    assert "one call is one sample" in capsys.readouterr().out
    inputs = onnx.load(folder / "graph.onnx").graph.input
    sizes = [[dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in inputs]
    assert sizes == [[9, 4], [2, 14]]
    assert main(["check", "graph.onnx", "--reference", f"{module}:graph",
                 "--inputs", "graph.npz"]) == 0  # fmt: skip


def test_lengths_that_agree_on_other_axes_are_asked_for(folder: Path) -> None:
    module = written(folder, "layouts_of_a_batch")
    np.savez(folder / "odd.npz", x=np.zeros((9, 4), np.float32), edge_index=np.zeros((2, 9), int))
    assert main(["export", f"{module}:graph", "--example-input", "odd.npz",
                 "--output", "odd.onnx"]) == 2  # fmt: skip


@pytest.mark.parametrize("inputs", ["x.npy", "wide.npy"])
def test_module_with_float64_as_the_default(folder: Path, inputs: str) -> None:
    wide = inputs == "wide.npy"
    module = written(
        folder, f"layouts_in_{'double' if wide else 'single'}",
        before="torch.set_default_dtype(torch.float64)",
    )  # fmt: skip
    build = f"{module}:{'scaled' if wide else 'single'}"
    try:
        assert main(["export", build, "--example-input", inputs,
                     "--output", "scaled.onnx"]) == 0  # fmt: skip
        assert main(["check", "scaled.onnx", "--reference", build,
                     "--inputs", inputs]) == 0  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
