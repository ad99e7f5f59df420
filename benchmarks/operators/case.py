"""One operator on one input, in PyTorch and as a graph of one or a few nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
Node = tuple[str, Sequence[str], dict[str, Any]]
"""Operator, inputs, attributes; a node's output is named `n0`, `n1`, ... in order."""


@dataclass(frozen=True)
class Case:
    """Inputs are `x0`, `x1`, ..., constants by their names; the last node is the result."""

    operator: str
    """The row of the table: a bare aten name."""
    label: str
    """What is special about the input."""
    compute: Callable[..., torch.Tensor]
    """Takes tensors, one an input, in float32 or float64."""
    inputs: tuple[Array, ...]
    nodes: tuple[Node, ...]
    constants: dict[str, Array] = field(default_factory=dict)
    opset: int = 20
    elementwise: bool = False
    """True if the largest error is bounded as well, not only the random walk."""

    @property
    def onnx(self) -> str:
        """The operators of the graph."""
        return " ".join(node[0] for node in self.nodes)

    def model(self) -> bytes:
        """The graph, serialized."""
        nodes = [
            helper.make_node(operator, list(inputs), [f"n{place}"], **attributes)
            for place, (operator, inputs, attributes) in enumerate(self.nodes)
        ]
        graph = helper.make_graph(
            nodes,
            self.operator,
            [_value(f"x{place}", array.ndim) for place, array in enumerate(self.inputs)],
            [helper.make_tensor_value_info(f"n{len(nodes) - 1}", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        opset = helper.make_opsetid("", self.opset)
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=[opset], ir_version=9)
        return bytes(model.SerializeToString())

    def run(self, *, optimized: bool) -> Array:
        """What ONNX Runtime's CPU kernels make of it, in one thread."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        level = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = (
            level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
        )
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(self.model(), options, providers=providers)
        feeds = {f"x{place}": array for place, array in enumerate(self.inputs)}
        result: Array = session.run(None, feeds)[0]
        return result


def _value(name: str, axes: int) -> onnx.ValueInfoProto:
    shape = [f"{name}_{axis}" for axis in range(axes)]
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def floats(values: object) -> Array:
    """As float32."""
    return np.asarray(values, np.float32)
