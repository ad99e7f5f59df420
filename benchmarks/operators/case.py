"""One operator on one input, in PyTorch and as a graph of a few nodes."""

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
"""Operator, inputs and attributes. The output of the i-th node is named `n{i}`."""


@dataclass(frozen=True)
class Case:
    """An operator with inputs `x0`, `x1`, ... and named constants. The last node is the result."""

    operator: str
    """Name in aten, without a suffix: the row of the table."""
    label: str
    """The property of the input that distinguishes this case."""
    compute: Callable[..., torch.Tensor]
    """Takes one tensor per input, in float32 or float64."""
    inputs: tuple[Array, ...]
    nodes: tuple[Node, ...]
    constants: dict[str, Array] = field(default_factory=dict)
    opset: int = 20
    elementwise: bool = False
    """Whether the largest error is bounded as well, not only the rms."""

    @property
    def onnx(self) -> str:
        """Return the operators of the graph."""
        return " ".join(node[0] for node in self.nodes)

    def model(self) -> bytes:
        """Return the serialized model."""
        nodes = [
            helper.make_node(operator, list(inputs), [f"n{index}"], **attributes)
            for index, (operator, inputs, attributes) in enumerate(self.nodes)
        ]
        graph = helper.make_graph(
            nodes,
            self.operator,
            [_float_value_info(f"x{index}", array.ndim) for index, array in enumerate(self.inputs)],
            [helper.make_tensor_value_info(f"n{len(nodes) - 1}", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        opset = helper.make_opsetid("", self.opset)
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=[opset], ir_version=9)
        return bytes(model.SerializeToString())

    def run(self, *, optimized: bool) -> Array:
        """Return the output of ONNX Runtime's CPU kernels with one thread."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        level = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = (
            level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
        )
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(self.model(), options, providers=providers)
        feeds = {f"x{index}": array for index, array in enumerate(self.inputs)}
        result: Array = session.run(None, feeds)[0]
        return result


def _float_value_info(name: str, axes: int) -> onnx.ValueInfoProto:
    shape = [f"{name}_{axis}" for axis in range(axes)]
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def to_float32(values: object) -> Array:
    """Convert to float32."""
    return np.asarray(values, np.float32)
