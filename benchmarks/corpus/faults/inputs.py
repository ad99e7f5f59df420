"""Faults of the preprocessing in the file, and swapped inputs."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import nn

from benchmarks.corpus import graph
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import in_graph, in_layer, in_model
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DYNAMO_18,
    SCRIPTED_17,
    TRACED_13,
    TRACED_17,
)
from benchmarks.corpus.models import wiring


@in_layer("channel order", ("resnet", "stem", DIRECT_17), ("resnet18", "conv1", TRACED_13))
def bgr_for_rgb(layer: nn.Module, _: Architecture) -> None:
    """Reverse the channels of the first convolution, which then expects BGR as read by OpenCV."""
    layer.weight.copy_(layer.weight.flip(1).clone())


class _Bgr(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image[..., [2, 1, 0]])


@in_model("channel order", ("camera", DIRECT_17))
def channels_turned_round(model: nn.Module, _: Architecture) -> None:
    """Reverse the channels in the preprocessing."""
    model.__class__ = _Bgr


@in_model("mean and deviation", ("camera", TRACED_13))
def mean_and_deviation_of_a_half(model: nn.Module, _: Architecture) -> None:
    """Set mean and deviation to 0.5 instead of ImageNet's."""
    model.mean.fill_(0.5)
    model.std.fill_(0.5)


@in_model("mean and deviation", ("camera", DYNAMO_18))
def mean_in_bgr_order(model: nn.Module, _: Architecture) -> None:
    """Store the means in the order BGR."""
    model.mean.copy_(model.mean.flip(1).clone())


@in_model("mean and deviation", ("camera", DIRECT_13))
def rounded_mean(model: nn.Module, _: Architecture) -> None:
    """Round means and deviations to two digits."""
    model.mean.copy_((model.mean * 100).round() / 100)
    model.std.copy_((model.std * 100).round() / 100)


class _Unscaled(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.to(self.mean.dtype) * 255.0)


@in_model("scale 255", ("camera", TRACED_17))
def scale_missing(model: nn.Module, _: Architecture) -> None:
    """Omit the division by 255."""
    model.__class__ = _Unscaled


class _Scale256(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.to(self.mean.dtype) * (255.0 / 256.0))


@in_model("scale 255", ("camera", DIRECT_17))
def scale_of_256(model: nn.Module, _: Architecture) -> None:
    """Divide by 256 instead of 255."""
    model.__class__ = _Scale256


@in_graph("scale 255", ("branching", SCRIPTED_17))
def scaled_twice(model: onnx.ModelProto) -> None:
    """Divide images by 255 that are already in 0..1."""
    scale = graph.add_initializer(model, "scale_255", np.array(255.0, np.float32))
    graph.insert_after(model, "input", "Div").input.append(scale)


class _Transposed(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.transpose(1, 2))


@in_model("input layout", ("camera", DIRECT_17))
def height_for_width(model: nn.Module, _: Architecture) -> None:
    """Swap height and width of square images."""
    model.__class__ = _Transposed


@in_graph("input layout", ("segmenter", TRACED_17))
def upside_down(model: onnx.ModelProto) -> None:
    """Read rows from bottom to top, as some bitmap formats do."""
    slice_inputs = {"starts": -1, "ends": np.iinfo(np.int64).min + 1, "axes": 2, "steps": -1}
    names = [
        graph.add_initializer(model, f"flip_{name}", np.array([value], np.int64))
        for name, value in slice_inputs.items()
    ]
    graph.insert_after(model, "image", "Slice").input.extend(names)


@in_graph("input order", ("difference", DIRECT_17))
def inputs_exchanged(model: onnx.ModelProto) -> None:
    """Swap the names of two inputs of equal shape."""
    exchanged = {"before": "after", "after": "before"}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = exchanged.get(name, name)


@in_graph("input dtype", ("camera", DIRECT_17))
def bytes_as_floats(model: onnx.ModelProto) -> None:
    """Declare the input as float32 instead of uint8."""
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT


@in_graph("mean and deviation", ("vit", DIRECT_17))
def normalised_twice(model: onnx.ModelProto) -> None:
    """Add normalization to the file although the samples are already normalized."""
    mean = graph.add_initializer(model, "pre_mean", np.full((1, 3, 1, 1), 0.45, np.float32))
    std = graph.add_initializer(model, "pre_std", np.full((1, 3, 1, 1), 0.25, np.float32))
    graph.insert_after(model, "input", "Sub").input.append(mean)
    graph.insert_after(model, "input_Sub", "Div").input.append(std)


@in_graph("ignored input", ("two-inputs", DIRECT_17))
def second_input_frozen(model: onnx.ModelProto) -> None:
    """Replace the second input with constants."""
    zeros = graph.add_initializer(model, "frozen", np.zeros((1, 6), np.float32))
    graph.insert_after(model, "numbers", "Mul").input.append(zeros)
