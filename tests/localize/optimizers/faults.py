"""Real faults of optimizers of ONNX Runtime 1.31.1.

ONNX Runtime computes these files correctly without optimizations; with them it returns a different
result or an error. When a later version fixes a fault, its test fails with a message. Replace the
fault then; docs/adr/0023 describes how to find one.
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


class WeightedSum(nn.Module):
    """A weighted sum over positions: a transposed matrix times a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weights = nn.Linear(2, 2), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.layer(x).transpose(1, 2) @ self.weights


class ReluClip(nn.Module):
    """A ReLU and a clip, used in float64."""

    def forward(self, x):
        return torch.clip(torch.relu(x), -1, 1)


class WideningNorm(nn.Module):
    """A norm whose weights widen one column to two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class OtherAxisNorm(nn.Module):
    """A computation like a norm that subtracts the mean of a different axis."""

    def forward(self, x):
        centered = x - x.mean(-1)
        return centered / torch.sqrt((centered**2).mean(-1) + 1e-5) * torch.ones(4) + torch.zeros(4)


class ZeroPaddedPool(nn.Module):
    """A max pool of negative numbers padded with zeros."""

    def forward(self, x):
        return functional.max_pool2d(functional.pad(-x.abs(), (1, 1, 1, 1)), 2, 1)


def _floats(*shape: int) -> np.ndarray:
    return NUMBERS.normal(size=shape).astype(np.float32)


def write_padded_pool(path: Path) -> TestedFile:
    """Write ZeroPaddedPool as exporters do that compute the pads in advance."""
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
    input_info, output_info = images
    graph = helper.make_graph(nodes, "pads", [input_info], [output_info], [pads])
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return tiny.candidate(path)


@dataclass(frozen=True)
class OptimizerFault:
    """A file that triggers a fault, and the optimizers that cause it."""

    model: Callable[[], nn.Module]
    inputs: np.ndarray
    names: tuple[str, ...]
    level: str
    after: str = ""
    """The operator type of the fused node."""
    raises: str | None = None
    written: Callable[[Path], TestedFile] | None = None
    dynamic: bool = True

    def file(self, path: Path) -> TestedFile:
        """Write the file of this fault."""
        if self.written is not None:
            return self.written(path)
        if self.dynamic:
            return nets.export(self.model().eval(), path, self.inputs)
        return tiny.export(self.model().eval(), path, example={"input": self.inputs}, dynamic=False)


FAULTS = {
    # The fusion treats a vector as a matrix with one column; the transposed product has the wrong
    # axis.
    "a transposed matrix by a vector": OptimizerFault(
        WeightedSum, _floats(6, 3, 2), ("MatmulTransposeFusion",), "ORT_ENABLE_EXTENDED", "FusedMatMul"
    ),
    # microsoft/onnxruntime 10936, 23116, 24158: the fusion does not support float64.
    "ReLU and clip in float64": OptimizerFault(
        ReluClip, NUMBERS.normal(size=(6, 3)), ("FuseReluClip",), "ORT_ENABLE_BASIC",
        raises="Unexpected data type for Clip 'min' input",
    ),
    # microsoft/onnxruntime 31980: the fused node can't broadcast to a wider shape.
    "a norm that widens": OptimizerFault(
        WideningNorm, _floats(6, 1), ("SimplifiedLayerNormFusion",), "ORT_ENABLE_EXTENDED",
        "SimplifiedLayerNormalization", raises="Scale and \\(optional\\) bias must match",
    ),
    # microsoft/onnxruntime 30513: keepdims is ignored. If one fusion is disabled, the other
    # applies.
    "a norm of another axis": OptimizerFault(
        OtherAxisNorm, _floats(4, 4), ("LayerNormFusionL2", "SimplifiedLayerNormFusion"),
        "ORT_ENABLE_EXTENDED", "LayerNormalization", dynamic=False,
    ),
    # The fused pool pads with the smallest number instead of 0.
    "zeros around a pool": OptimizerFault(
        ZeroPaddedPool, _floats(6, 1, 4, 4), ("Pad_Fusion",), "ORT_ENABLE_BASIC", "MaxPool", written=write_padded_pool
    ),
}  # fmt: skip
