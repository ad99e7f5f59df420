"""Graphs that compute in a wrong precision or not deterministically."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from benchmarks.corpus import graph
from benchmarks.corpus.entry import in_graph
from benchmarks.corpus.exporters import DIRECT_17, DIRECT_20, DYNAMO_18, TRACED_13


@in_graph("float16 island", ("segmenter", DIRECT_17), ("recurrent", TRACED_13))
def tensor_through_float16(model: onnx.ModelProto) -> None:
    """Cast one tensor to float16 and back, as left over from a mixed-precision tool."""
    tensor = next(n for n in model.graph.node if n.op_type in ("Conv", "LSTM")).output[0]
    graph.insert_after(model, tensor, "Cast", to=TensorProto.FLOAT16)
    graph.insert_after(model, f"{tensor}_Cast", "Cast", to=TensorProto.FLOAT)


@in_graph("quantised tensor", ("mobilenet", DIRECT_17), ("vit", DYNAMO_18))
def activations_through_int8(model: onnx.ModelProto) -> None:
    """Quantize the last features to 8 bits and back, as left over from calibration."""
    features = graph.find_nodes(model, "Gemm")[-1].input[0]
    scale = graph.add_initializer(model, "scale", np.float32(0.04))
    zero = graph.add_initializer(model, "zero", np.int8(0))
    graph.insert_after(model, features, "QuantizeLinear").input.extend([scale, zero])
    graph.insert_after(model, f"{features}_QuantizeLinear", "DequantizeLinear").input.extend(
        [scale, zero]
    )


@in_graph("random", ("resnet", DIRECT_17), ("tokens", DIRECT_20))
def noise_added(model: onnx.ModelProto) -> None:
    """Add random noise, as by a training layer that is still in the graph."""
    tensor = graph.find_nodes(model, "Gemm")[-1].input[0]
    noise = onnx.helper.make_node(
        "RandomNormalLike", [tensor], ["noise"], mean=0.0, scale=0.01, name="noise"
    )
    producer_index = next(i for i, node in enumerate(model.graph.node) if tensor in node.output)
    graph.insert_after(model, tensor, "Add").input.append("noise")
    model.graph.node.insert(producer_index + 1, noise)
