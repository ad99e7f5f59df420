"""Node names are mapped to module paths."""

from __future__ import annotations

import pytest
from onnx import helper
from torch import nn

from gate.localize.module_paths import ModulePaths, ModuleScope


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.relu = nn.ReLU()
        self.relu_1 = nn.ReLU()


class Coder(nn.Module):
    """A module whose forward is never called; other methods use its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = Block(), Block()
        self.both = nn.ModuleList([Block(), Block()])


class Net(nn.Module):
    """A model with layer1.0, layer1.1, and one module under the names shared and alias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block())
        self.shared = nn.Linear(1, 1)
        self.alias = self.shared
        self.coder = Coder()


@pytest.fixture(scope="module")
def paths():
    return ModulePaths(Net())


@pytest.mark.parametrize(
    ("name", "path", "call"),
    [
        ("/layer1/layer1.0/conv/Conv", "layer1.0.conv", 0),
        ("/layer1/0/conv/Conv", "layer1.0.conv", 0),
        ("/layer1/layer1.1/relu/Relu", "layer1.1.relu", 0),
        ("/layer1/layer1.1/relu_2/Relu", "layer1.1.relu", 2),
        ("/layer1/layer1.0/relu_1/Relu", "layer1.0.relu_1", 0),
        ("/layer1_1/layer1.0/conv/Conv", "layer1.0.conv", None),
        ("/shared/Gemm", "shared", 0),
        ("/shared_1/Gemm", "shared", 1),
        ("/alias/Gemm", "shared", 0),
        ("/layer1/layer1.0/Add", "layer1.0", 0),
        ("/layer1/layer1.7/conv/Conv", "layer1", None),
        ("/stranger/conv/Conv", "", None),
        ("/up/relu_2/Relu", "coder.up.relu", 2),
        ("/up_1/conv/Conv", "coder.up.conv", None),
        ("/both.1/conv/Conv", "", None),  # could be `coder.both[1]`, but two modules are named 1
        ("/conv/Conv", "", None),  # several modules are named conv
        ("/Add", "", 0),
    ],
)
def test_scope_from_a_traced_node_name(paths, name, path, call):
    assert paths.scope(helper.make_node("Op", [], [], name=name)) == ModuleScope(path, call)
