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
    """The first convolution expects BGR, as OpenCV reads images."""
    layer.weight.copy_(layer.weight.flip(1).clone())


class _Bgr(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image[..., [2, 1, 0]])


@in_model("channel order", ("camera", DIRECT_17))
def channels_turned_round(model: nn.Module, _: Architecture) -> None:
    """The preprocessing turns the channels round."""
    model.__class__ = _Bgr


@in_model("mean and deviation", ("camera", TRACED_13))
def mean_and_deviation_of_a_half(model: nn.Module, _: Architecture) -> None:
    """Mean and deviation are 0.5, the model has ImageNet's."""
    model.mean.fill_(0.5)
    model.std.fill_(0.5)


@in_model("mean and deviation", ("camera", DYNAMO_18))
def mean_in_bgr_order(model: nn.Module, _: Architecture) -> None:
    """The means stand in the order BGR."""
    model.mean.copy_(model.mean.flip(1).clone())


@in_model("mean and deviation", ("camera", DIRECT_13))
def rounded_mean(model: nn.Module, _: Architecture) -> None:
    """Means and deviations are rounded to two digits."""
    model.mean.copy_((model.mean * 100).round() / 100)
    model.std.copy_((model.std * 100).round() / 100)


class _Unscaled(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.to(self.mean.dtype) * 255.0)


@in_model("scale 255", ("camera", TRACED_17))
def scale_missing(model: nn.Module, _: Architecture) -> None:
    """Bytes are not divided by 255."""
    model.__class__ = _Unscaled


class _Scale256(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.to(self.mean.dtype) * (255.0 / 256.0))


@in_model("scale 255", ("camera", DIRECT_17))
def scale_of_256(model: nn.Module, _: Architecture) -> None:
    """Bytes are divided by 256."""
    model.__class__ = _Scale256


@in_graph("scale 255", ("branching", SCRIPTED_17))
def scaled_twice(model: onnx.ModelProto) -> None:
    """Images that are in 0..1 already are divided by 255."""
    scale = graph.constant(model, "scale_255", np.array(255.0, np.float32))
    graph.behind(model, "input", "Div").input.append(scale)


class _Turned(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.transpose(1, 2))


@in_model("input layout", ("camera", DIRECT_17))
def height_for_width(model: nn.Module, _: Architecture) -> None:
    """Height and width are exchanged; the images are square."""
    model.__class__ = _Turned


@in_graph("input layout", ("segmenter", TRACED_17))
def upside_down(model: onnx.ModelProto) -> None:
    """Rows are read from the bottom, as some bitmap formats have them."""
    ints = {"starts": -1, "ends": np.iinfo(np.int64).min + 1, "axes": 2, "steps": -1}
    names = [
        graph.constant(model, f"flip_{name}", np.array([value], np.int64))
        for name, value in ints.items()
    ]
    graph.behind(model, "image", "Slice").input.extend(names)


@in_graph("input order", ("difference", DIRECT_17))
def inputs_exchanged(model: onnx.ModelProto) -> None:
    """Two inputs of equal shape have each other's name."""
    exchanged = {"before": "after", "after": "before"}
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = exchanged.get(name, name)


@in_graph("input dtype", ("camera", DIRECT_17))
def bytes_as_floats(model: onnx.ModelProto) -> None:
    """The file takes floats, the model takes bytes."""
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT


@in_graph("mean and deviation", ("vit", DIRECT_17))
def normalised_twice(model: onnx.ModelProto) -> None:
    """A preprocessing was built into the file; the samples are normalised already."""
    mean = graph.constant(model, "pre_mean", np.full((1, 3, 1, 1), 0.45, np.float32))
    std = graph.constant(model, "pre_std", np.full((1, 3, 1, 1), 0.25, np.float32))
    graph.behind(model, "input", "Sub").input.append(mean)
    graph.behind(model, "input_Sub", "Div").input.append(std)


@in_graph("ignored input", ("two-inputs", DIRECT_17))
def second_input_frozen(model: onnx.ModelProto) -> None:
    """The second input is taken and not used: constants of the example stand in its place."""
    zeros = graph.constant(model, "frozen", np.zeros((1, 6), np.float32))
    graph.behind(model, "numbers", "Mul").input.append(zeros)
