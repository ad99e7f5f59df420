"""Faults that change the outputs although intermediate values are correct."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import nn

from benchmarks.corpus import graph
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import in_graph, in_model
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DYNAMO_18,
    SCRIPTED_17,
    TRACED_13,
    TRACED_17,
)


@in_graph("output order", ("detector", DIRECT_17), ("detector", DYNAMO_18))
def reversed_outputs(model: onnx.ModelProto) -> None:
    """Reverse the order of the outputs; their names are right."""
    outputs = list(model.graph.output)
    del model.graph.output[:]
    model.graph.output.extend(reversed(outputs))


@in_graph("output names", ("detector", TRACED_13))
def exchanged_names(model: onnx.ModelProto) -> None:
    """Swap the names of two outputs, as if output_names had another order."""
    exchanged = {"scores": "embedding", "embedding": "scores"}
    for names in (names for node in model.graph.node for names in (node.input, node.output)):
        for index, name in enumerate(names):
            names[index] = exchanged.get(name, name)
    for output in model.graph.output:
        output.name = exchanged.get(output.name, output.name)


@in_graph("missing output", ("detector", TRACED_17))
def last_output_missing(model: onnx.ModelProto) -> None:
    """Remove the last output."""
    del model.graph.output[-1]


@in_graph("extra output", ("resnet", DIRECT_17), ("detector", DIRECT_13))
def debug_output_left(model: onnx.ModelProto) -> None:
    """Add an inner tensor as an output, as left over from debugging."""
    tensor = graph.find_nodes(model, "Conv")[0].output[0]
    shape = ["batch", None, None, None]
    model.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, shape))


@in_model("permuted labels", ("mobilenet", DIRECT_17), ("vit", DYNAMO_18))
def two_classes_exchanged(model: nn.Module, _: Architecture) -> None:
    """Swap two classes, as if the labels were sorted as text with 10 before 2."""
    for parameter in (model.fc.weight, model.fc.bias):
        parameter[[1, 2]] = parameter[[2, 1]].clone()


@in_model("permuted labels", ("pyramid", TRACED_13))
def classes_shifted(model: nn.Module, _: Architecture) -> None:
    """Shift all classes by one, as if a background class were counted."""
    for parameter in (model.fc.weight, model.fc.bias):
        parameter.copy_(torch.roll(parameter, 1, 0))


@in_graph("output dtype", ("detector", DIRECT_17))
def label_as_int32(model: onnx.ModelProto) -> None:
    """Cast the label to int32 instead of int64."""
    graph.insert_after(model, "label", "Cast", to=TensorProto.INT32)
    model.graph.output[-1].type.tensor_type.elem_type = TensorProto.INT32


@in_graph("output dtype", ("tokens", DIRECT_17))
def scores_as_float16(model: onnx.ModelProto) -> None:
    """Cast the scores to float16."""
    graph.insert_after(model, "logits", "Cast", to=TensorProto.FLOAT16)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16


@in_graph("output dtype", ("recurrent", DYNAMO_18))
def scores_as_float64(model: onnx.ModelProto) -> None:
    """Cast the scores to float64."""
    graph.insert_after(model, "logits", "Cast", to=TensorProto.DOUBLE)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE


@in_graph("output transform", ("resnet18", DIRECT_17), ("points", DYNAMO_18))
def probabilities_for_logits(model: onnx.ModelProto) -> None:
    """Append a softmax, which preserves the top-1 class."""
    graph.insert_after(model, "logits", "Softmax", axis=1)


@in_graph("output transform", ("camera", SCRIPTED_17))
def logarithms_for_logits(model: onnx.ModelProto) -> None:
    """Append a log-softmax, which preserves the top-1 class and the probabilities."""
    graph.insert_after(model, "logits", "LogSoftmax", axis=1)


@in_graph("output transform", ("segmenter", DIRECT_17))
def channels_last(model: onnx.ModelProto) -> None:
    """Transpose the scores to channels-last."""
    graph.insert_after(model, "scores", "Transpose", perm=[0, 2, 3, 1])
    shape = model.graph.output[0].type.tensor_type.shape
    dims = [type(dim).FromString(dim.SerializeToString()) for dim in shape.dim]
    del shape.dim[:]
    shape.dim.extend(dims[axis] for axis in (0, 2, 3, 1))


@in_graph("output transform", ("generator", TRACED_17))
def image_in_0_to_1(model: onnx.ModelProto) -> None:
    """Rescale the image from -1..1 to 0..1, as for a viewer."""
    half = graph.add_initializer(model, "half", np.array(0.5, np.float32))
    graph.insert_after(model, "generated", "Mul").input.append(half)
    graph.insert_after(model, "generated", "Add").input.append(half)
