"""Faults of normalization layers."""

from __future__ import annotations

import onnx
import torch
from torch import nn

from benchmarks.corpus import graph
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import in_graph, in_layer, in_model
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DYNAMO_18,
    PRESERVED_17,
    SCRIPTED_17,
    TRACED_13,
    TRACED_17,
)
from benchmarks.corpus.trained import calibrate, to_tensors

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


@in_model("norm epsilon", ("resnet", TRACED_13), ("detector", DYNAMO_18))
def epsilon_of_tensorflow(model: nn.Module, _: Architecture) -> None:
    """Set the epsilon of every BatchNorm to 1e-3 instead of 1e-5."""
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS):
            module.eps = 1e-3


@in_layer("norm epsilon", ("mobilenet", "block1.norm1", DIRECT_17), ("vit", "norm", DIRECT_17))
def epsilon_of_pytorch(layer: nn.Module, _: Architecture) -> None:
    """Set the epsilon to PyTorch's default of 1e-5, while the model has another."""
    layer.eps = 1e-5


@in_layer(
    "norm epsilon",
    ("generator", "group", TRACED_17),
    ("stylist", "norm1", DIRECT_17),
    ("tokens", "norm2", DYNAMO_18),
)
def epsilon_of_keras(layer: nn.Module, _: Architecture) -> None:
    """Set the epsilon to Keras's default of 1e-3."""
    layer.eps = 1e-3


@in_layer(
    "running mean", ("resnet18", "layer1.0.bn1", DIRECT_17), ("pyramid", "body.norm", SCRIPTED_17)
)
def running_mean_lost(layer: nn.Module, _: Architecture) -> None:
    """Set the running mean to zero."""
    layer.running_mean.zero_()


@in_layer(
    "running variance", ("segmenter", "first.norm", DIRECT_13), ("two-inputs", "norm", DYNAMO_18)
)
def running_variance_lost(layer: nn.Module, _: Architecture) -> None:
    """Set the running variance to one."""
    layer.running_var.fill_(1.0)


@in_layer("running variance", ("camera", "backbone.two.norm", TRACED_13))
def biased_variance(layer: nn.Module, _: Architecture) -> None:
    """Scale the running variance by 0.999, as in a framework that stores the biased variance."""
    layer.running_var.mul_(1.0 - 1e-3)


@in_model("stale statistics", ("pyramid", DIRECT_17), ("resnet", DIRECT_17))
def one_batch_more(model: nn.Module, architecture: Architecture) -> None:
    """Update the running statistics by a forward pass in training mode."""
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS):
            module.train()
    model(*to_tensors(architecture.draw(16, 3000), 0, 16))
    model.eval()


@in_model("stale statistics", ("mobilenet", DYNAMO_18))
def other_calibration(model: nn.Module, architecture: Architecture) -> None:
    """Compute the running statistics on other samples of the same distribution."""
    calibrate(model, architecture.draw(64, 4000))


@in_layer(
    "training mode", ("resnet", "stage2.bn1", PRESERVED_17), ("two-inputs", "norm", PRESERVED_17)
)
def norm_in_training(layer: nn.Module, _: Architecture) -> None:
    """Leave one BatchNorm in training mode, so that it normalizes by batch statistics."""
    layer.train()


@in_layer(
    "training mode", ("pooling", "dropout", PRESERVED_17), ("mobilenet", "dropout", PRESERVED_17)
)
def dropout_in_training(layer: nn.Module, _: Architecture) -> None:
    """Leave dropout active in the file, so that two runs give different outputs."""
    layer.train()


@in_model("training mode", ("pyramid", PRESERVED_17))
def everything_in_training(model: nn.Module, _: Architecture) -> None:
    """Export the whole model in training mode."""
    model.train()


@in_layer("norm layout", ("generator", "group", DIRECT_17))
def other_groups(layer: nn.Module, _: Architecture) -> None:
    """Set GroupNorm to six groups instead of four."""
    layer.num_groups = 6


@in_layer("norm layout", ("generator", "instance", DYNAMO_18))
def instance_as_layer(layer: nn.Module, _: Architecture) -> nn.Module:
    """Normalize all channels together instead of each alone."""
    group = nn.GroupNorm(1, layer.num_features, eps=layer.eps)
    group.load_state_dict(layer.state_dict())
    return group


@in_layer("norm layout", ("recurrent", "norm", DIRECT_17), ("vit", "block1.norm2", DIRECT_17))
def affine_lost(layer: nn.Module, _: Architecture) -> nn.Module:
    """Remove the learned scale and shift of a LayerNorm."""
    return nn.LayerNorm(layer.normalized_shape, eps=layer.eps, elementwise_affine=False)


@in_graph("norm epsilon", ("resnet", PRESERVED_17), layer="stage3.bn2")
def folded_without_epsilon(model: onnx.ModelProto) -> None:
    """Set epsilon to zero, as a tool does that folds BatchNorm without epsilon."""
    graph.set_attribute(graph.find_node(model, "/stage3/bn2/BatchNormalization"), "epsilon", 0.0)


@in_layer("running mean", ("difference", "backbone.one.norm", DIRECT_17))
def neighbors_mean(layer: nn.Module, _: Architecture) -> None:
    """Shift the running means by one channel."""
    layer.running_mean.copy_(torch.roll(layer.running_mean, 1))
