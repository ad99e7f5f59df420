"""Node names are mapped to module paths."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from torch import nn

from gate.localize.model_runner import ComputedValue
from gate.localize.module_paths import ModulePaths, ModuleScope, NameHints


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


@pytest.mark.parametrize("name", ["", "Conv_0", "node_conv2d", "layer1/conv"])
def test_node_name_without_scope(paths, name):
    assert paths.scope(helper.make_node("Op", [], [], name=name)) is None


@pytest.mark.parametrize(("text", "scope"), [
    ("['', 'layer1', 'layer1.0', 'layer1.0.conv', 'conv2d']", ModuleScope("layer1.0.conv", None)),
    ("['', 'alias', 'linear']", ModuleScope("shared", None)),
    ("['', 'stranger', 'add']", ModuleScope("", None)),
    ("['add']", None),
    ("[]", None),
    ("'layer1'", None),
    ("not a list [", None),
    ("__import__('os').getcwd()", None),
])  # fmt: skip
def test_scope_from_dynamo_metadata(paths, text, scope):
    node = helper.make_node("Op", [], [], name="/shared/Gemm")
    entry = node.metadata_props.add()
    entry.key, entry.value = "pkg.torch.onnx.name_scopes", text
    assert paths.scope(node) == scope


def make_value(number: int, path: str, kind: str, *inputs: int) -> ComputedValue:
    return ComputedValue(
        number, path, kind, 0, None, inputs, (1,), np.full(1, number, np.float32), None
    )


VALUES = [
    make_value(0, "", ""),
    make_value(1, "c", "Conv2d", 0),
    make_value(2, "n", "BatchNorm2d", 1),
]


@pytest.mark.parametrize(("nodes", "folded"), [
    ([("Conv", "c")], True),
    ([("Conv", "n")], True),
    ([("Pad", "c"), ("Conv", "n")], True),
    ([("QLinearConv", "c")], True),
    ([("Conv", "c"), ("BatchNormalization", "n")], False),
    ([("Pad", "c"), ("Conv", "c"), ("BatchNormalization", "n")], False),
    ([("Conv", None)], True),
    ([("Conv", None), ("BatchNormalization", None)], False),
])  # fmt: skip
def test_layer_with_folded_batch_norm(nodes, folded):
    scoped = [(op, None if path is None else ModuleScope(path, 0)) for op, path in nodes]
    assert NameHints(VALUES, scoped).folded == ({1: 2} if folded else {})
