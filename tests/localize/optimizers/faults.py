"""Real faults of the optimisers of ONNX Runtime 1.31.1: files that it computes rightly with
optimizations off, and otherwise, or not at all, with them on.

Where a later version has mended one, its test fails and says so: take another fault in its place,
as docs/adr/0023 says how they are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

from gate import TestedFile
from tests.localize import nets
from tests.measure import tiny

NUMBERS = np.random.default_rng(0)


class Weighs(nn.Module):
    """A sum over places with weights: a transposed matrix by a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weights = nn.Linear(2, 2), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.layer(x).transpose(1, 2) @ self.weights


class Clips(nn.Module):
    """In float64."""

    def forward(self, x):
        return torch.clip(torch.relu(x), -1, 1)


class Widens(nn.Module):
    """A norm whose weights make one column two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Square(nn.Module):
    """As a norm is written, but for the axis: what is taken from each row is of another one."""

    def forward(self, x):
        apart = x - x.mean(-1)
        return apart / torch.sqrt((apart**2).mean(-1) + 1e-5) * torch.ones(4) + torch.zeros(4)


class Pads(nn.Module):
    """The largest of negative numbers and of the zeros around them."""

    def forward(self, x):
        return functional.max_pool2d(functional.pad(-x.abs(), (1, 1, 1, 1)), 2, 1)


def _floats(*shape: int) -> np.ndarray:
    return NUMBERS.normal(size=shape).astype(np.float32)


def _written(path: Path) -> TestedFile:
    """`Pads`, as exporters write it that compute the pads beforehand."""
    pads = numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads")
    images = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1, size, size])
        for name, size in (("input", 4), ("logits", 5))
    )
    nodes = [
        helper.make_node("Abs", ["input"], ["abs"]),
        helper.make_node("Neg", ["abs"], ["neg"]),
        helper.make_node("Pad", ["neg", "pads"], ["padded"], name="pad"),
        helper.make_node("MaxPool", ["padded"], ["logits"], name="pool", kernel_shape=[2, 2]),
    ]
    used, arguments = images
    graph = helper.make_graph(nodes, "pads", [used], [arguments], [pads])
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return tiny.candidate(path)


@dataclass(frozen=True)
class OptimizerFault:
    """A file with one, and who is to blame."""

    model: Callable[[], nn.Module]
    inputs: np.ndarray
    names: tuple[str, ...]
    level: str
    after: str = ""
    """The operator that it makes."""
    raises: str | None = None
    written: Callable[[Path], TestedFile] | None = None
    dynamic: bool = True

    def file(self, path: Path) -> TestedFile:
        """Its file."""
        if self.written is not None:
            return self.written(path)
        if self.dynamic:
            return nets.export(self.model().eval(), path, self.inputs)
        return tiny.export(self.model().eval(), path, example={"input": self.inputs}, dynamic=False)


FAULTS = {
    # A vector is no matrix with one column: the transposed product takes the wrong axis.
    "a transposed matrix by a vector": OptimizerFault(
        Weighs, _floats(6, 3, 2), ("MatmulTransposeFusion",), "ORT_ENABLE_EXTENDED", "FusedMatMul"
    ),
    # microsoft/onnxruntime 10936, 23116, 24158: it knows no float64.
    "ReLU and clip in float64": OptimizerFault(
        Clips, NUMBERS.normal(size=(6, 3)), ("FuseReluClip",), "ORT_ENABLE_BASIC",
        raises="Unexpected data type for Clip 'min' input",
    ),
    # microsoft/onnxruntime 31980: the fused node can't widen.
    "a norm that widens": OptimizerFault(
        Widens, _floats(6, 1), ("SimplifiedLayerNormFusion",), "ORT_ENABLE_EXTENDED",
        "SimplifiedLayerNormalization", raises="Scale and \\(optional\\) bias must match",
    ),
    # microsoft/onnxruntime 30513: keepdims is not looked at. Where one is off, the other does it.
    "a norm of another axis": OptimizerFault(
        Square, _floats(4, 4), ("LayerNormFusionL2", "SimplifiedLayerNormFusion"),
        "ORT_ENABLE_EXTENDED", "LayerNormalization", dynamic=False,
    ),
    # A pool pads with the least number that there is, and not with 0.
    "zeros around a pool": OptimizerFault(
        Pads, _floats(6, 1, 4, 4), ("Pad_Fusion",), "ORT_ENABLE_BASIC", "MaxPool", written=_written
    ),
}  # fmt: skip
