"""Example inputs of an export: arrays bound by name, arrays without a common axis, float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gate.cli import main
from gate.errors import ExportError
from gate.export.request import Example

FIRST = np.arange(6, dtype=np.float32).reshape(3, 2)
SECOND = FIRST + 10


def test_arrays_are_bound_by_name():
    bound = Example.bind({"b": SECOND, "a": FIRST}, ("a", "b"))
    assert list(bound.arrays) == ["a", "b"]
    np.testing.assert_array_equal(bound.arrays["a"], FIRST)


def test_arrays_are_bound_by_position_when_names_differ():
    bound = Example.bind({"x": FIRST, "a": SECOND}, ("a", "b"))
    np.testing.assert_array_equal(bound.arrays["a"], FIRST)
    np.testing.assert_array_equal(bound.arrays["b"], SECOND)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_batch_repeats_the_samples(size):
    array = Example.bind({"x": FIRST}, ("x",)).batch(size).arrays["x"]
    np.testing.assert_array_equal(array, np.concatenate([FIRST, FIRST, FIRST])[:size])


@pytest.mark.parametrize(("arrays", "names", "says"), [
    ({}, ("a",), "has 0 array"),
    ({"a": FIRST, "b": SECOND}, ("a",), "has 2 array"),
    ({"a": FIRST, "b": SECOND[:2]}, ("a", "b"), "unequal numbers of samples"),
    ({"a": FIRST[:0]}, ("a",), "at least one sample"),
    ({"a": np.float32(1)}, ("a",), "at least one sample"),
    ({"a": np.array(["cat"])}, ("a",), "dtype <U3"),
    ({"a": np.array([None])}, ("a",), "dtype object"),
    ({"a": np.array([np.nan])}, ("a",), "NaN or infinity"),
    ({"a": np.array([1, np.inf], np.float16)}, ("a",), "NaN or infinity"),
])  # fmt: skip
def test_invalid_example_is_refused(arrays, names, says):
    with pytest.raises(ExportError, match=says):
        Example.bind(arrays, names)


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
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "wide.npy", x.astype(np.float64))
    graph = {"x": x[:9], "edge_index": rng.integers(0, 9, (2, 14))}
    np.savez(tmp_path / "graph.npz", **graph)
    return tmp_path


def write_module(folder: Path, name: str, *, before: str = "") -> str:
    (folder / f"{name}.py").write_text(FOLDER.format(before=before))
    return name


@pytest.mark.parametrize("inputs", ["x.npy", "wide.npy"])
def test_module_with_float64_default_dtype(folder, inputs):
    wide = inputs == "wide.npy"
    module = write_module(
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
