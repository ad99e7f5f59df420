"""Faults of weights.

Which element is taken is the same rule everywhere: the largest magnitude of the layer's weight.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import in_layer, in_model
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    DYNAMO_18,
    EXTERNAL_18,
    PRESERVED_17,
    SCRIPTED_17,
    TRACED_13,
    TRACED_17,
)


def _weight(layer: nn.Module) -> torch.Tensor:
    for name in ("weight", "weight_ih_l0", "in_proj_weight"):
        weight = getattr(layer, name, None)
        if weight is not None:
            return weight
    raise AttributeError(f"{type(layer).__name__} has no weight")


def _largest_filter(layer: nn.Module) -> int:
    return int(_weight(layer).flatten(1).norm(dim=1).argmax())


@in_layer(
    "weight element",
    ("resnet", "stage2.conv1", TRACED_13),
    ("resnet18", "layer3.0.conv2", DIRECT_17),
    ("mobilenet", "block2.depthwise", DIRECT_13),
    ("vit", "block1.up", DYNAMO_18),
    ("recurrent", "gru", DIRECT_17),
    ("segmenter", "third.conv", SCRIPTED_17),
    ("texture", "conv2", DIRECT_17),
)
def one_weight_10_percent_larger(layer: nn.Module, _: Architecture) -> None:
    """One weight of the layer is 10 % larger."""
    weight = _weight(layer).view(-1)
    weight[weight.abs().argmax()] *= 1.1


@in_layer("weight element", ("tokens", "embedding", DIRECT_17))
def one_weight_of_a_frequent_token(layer: nn.Module, _: Architecture) -> None:
    """One weight of the most frequent token's embedding is 10 % larger."""
    row = _weight(layer)[1]
    row[row.abs().argmax()] *= 1.1


@in_layer(
    "weight channel",
    ("resnet", "stage1.conv2", DIRECT_17),
    ("generator", "grow", TRACED_17),
    ("two-inputs", "dense", DYNAMO_18),
)
def one_channel_5_percent_larger(layer: nn.Module, _: Architecture) -> None:
    """The filter with the largest norm is 5 % larger."""
    _weight(layer)[_largest_filter(layer)] *= 1.05


@in_layer(
    "zeroed channel",
    ("mobilenet", "block1.project", TRACED_13),
    ("pyramid", "side.conv", DIRECT_20),
)
def one_channel_zeroed(layer: nn.Module, _: Architecture) -> None:
    """Pruning for a speed test was never taken back: the filter with the largest norm is zero."""
    _weight(layer)[_largest_filter(layer)] = 0.0


@in_layer("sign", ("pooling", "conv2", DIRECT_17), ("detector", "backbone.two.conv", DYNAMO_18))
def one_channel_negated(layer: nn.Module, _: Architecture) -> None:
    """The filter with the largest norm has the other sign."""
    _weight(layer)[_largest_filter(layer)] *= -1.0


@in_layer("sign", ("tokens", "positions", DIRECT_13))
def all_negated(layer: nn.Module, _: Architecture) -> None:
    """The whole table has the other sign."""
    _weight(layer).neg_()


@in_layer("weight channel", ("camera", "backbone.three.conv", DIRECT_17))
def two_channels_exchanged(layer: nn.Module, _: Architecture) -> None:
    """The first two filters stand in each other's place."""
    weight = _weight(layer)
    weight[[0, 1]] = weight[[1, 0]].clone()


@in_layer("weight tensor", ("segmenter", "second.conv", DIRECT_17), ("points", "conv", DYNAMO_18))
def one_percent_larger(layer: nn.Module, _: Architecture) -> None:
    """All weights of the layer are 1 % larger: weight decay after the checkpoint was taken."""
    _weight(layer).mul_(1.01)


@in_layer("weight tensor", ("difference", "dense", TRACED_17), ("vit", "patches", DIRECT_17))
def bias_lost(layer: nn.Module, _: Architecture) -> None:
    """The layer's bias is zero: a loader that skips what it does not know."""
    layer.bias.zero_()


@in_layer("weight layout", ("tokens", "attention.query", DIRECT_17), ("recurrent", "fc", DIRECT_17))
def transposed(layer: nn.Module, _: Architecture) -> None:
    """Rows and columns of the weights are exchanged (of the square part): TensorFlow's layout."""
    side = min(layer.weight.shape)
    layer.weight[:side, :side] = layer.weight[:side, :side].T.clone()


@in_layer("weight layout", ("resnet", "stage3.conv2", SCRIPTED_17), ("pooling", "conv1", DYNAMO_18))
def kernel_turned(layer: nn.Module, _: Architecture) -> None:
    """Height and width of the kernel are exchanged."""
    layer.weight.copy_(layer.weight.transpose(2, 3).clone())


@in_layer("weight layout", ("generator", "shrink", DIRECT_13))
def kernel_flipped(layer: nn.Module, _: Architecture) -> None:
    """The kernel is flipped: a convolution where PyTorch computes a correlation."""
    layer.weight.copy_(layer.weight.flip(2, 3).clone())


@in_layer("weight layout", ("vit", "block2.attention", DIRECT_17))
def keys_and_values_exchanged(layer: nn.Module, _: Architecture) -> None:
    """The packed projection is read as query, value, key."""
    for packed in (layer.in_proj_weight, layer.in_proj_bias):
        query, key, value = packed.clone().chunk(3)
        packed.copy_(torch.cat([query, value, key]))


def _through(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype).to(tensor.dtype)


def _tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Ten bits of mantissa, rounded to nearest, as the tensor cores take them."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@in_layer(
    "fp16 weights",
    ("resnet", "stage3.conv1", DIRECT_17),
    ("recurrent", "lstm", TRACED_13),
    ("denoiser", "inner", DIRECT_20),
)
def layer_through_fp16(layer: nn.Module, _: Architecture) -> None:
    """The layer's weights were stored in half precision and widened again."""
    for parameter in layer.parameters():
        parameter.copy_(_through(torch.float16, parameter))


@in_model("fp16 weights", ("vit", DIRECT_17), ("segmenter", EXTERNAL_18))
def all_through_fp16(model: nn.Module, _: Architecture) -> None:
    """All weights were stored in half precision and widened again."""
    layer_through_fp16(model, _)


@in_layer(
    "bf16 weights", ("mobilenet", "block3.expand", DIRECT_13), ("generator", "expand", DYNAMO_18)
)
def layer_through_bf16(layer: nn.Module, _: Architecture) -> None:
    """The layer's weights were trained in bfloat16 and widened again."""
    for parameter in layer.parameters():
        parameter.copy_(_through(torch.bfloat16, parameter))


@in_model("bf16 weights", ("tokens", DIRECT_20))
def all_through_bf16(model: nn.Module, _: Architecture) -> None:
    """All weights were trained in bfloat16 and widened again."""
    layer_through_bf16(model, _)


@in_layer("tf32 weights", ("detector", "box", DIRECT_17), ("vit", "block1.down", DYNAMO_18))
def layer_through_tf32(layer: nn.Module, _: Architecture) -> None:
    """The layer's weights have the ten bits of mantissa of TensorFloat-32."""
    layer.weight.copy_(_tf32(layer.weight))


@in_model("tf32 weights", ("resnet18", DIRECT_17), ("mobilenet", TRACED_13))
def all_through_tf32(model: nn.Module, _: Architecture) -> None:
    """All weights have the ten bits of mantissa of TensorFloat-32."""
    for parameter in model.parameters():
        parameter.copy_(_tf32(parameter))


@in_layer("int8 weights", ("pooling", "dense", DIRECT_17), ("resnet", "stage1.conv1", PRESERVED_17))
def layer_through_int8(layer: nn.Module, _: Architecture) -> None:
    """The layer's weights were quantised to 8 bits, one scale for all, and widened again."""
    scale = layer.weight.abs().max() / 127.0
    layer.weight.copy_((layer.weight / scale).round() * scale)
