"""Faults of weights.

Edits of one element change the one with the largest magnitude of the layer's weight.
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


def _get_weight(layer: nn.Module) -> torch.Tensor:
    for name in ("weight", "weight_ih_l0", "in_proj_weight"):
        weight = getattr(layer, name, None)
        if weight is not None:
            return weight
    raise AttributeError(f"{type(layer).__name__} has no weight")


def _find_largest_filter(layer: nn.Module) -> int:
    return int(_get_weight(layer).flatten(1).norm(dim=1).argmax())


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
    """Scale one weight of the layer by 1.1."""
    weight = _get_weight(layer).view(-1)
    weight[weight.abs().argmax()] *= 1.1


@in_layer("weight element", ("tokens", "embedding", DIRECT_17))
def one_weight_of_a_frequent_token(layer: nn.Module, _: Architecture) -> None:
    """Scale one weight in the embedding of the most frequent token by 1.1."""
    row = _get_weight(layer)[1]
    row[row.abs().argmax()] *= 1.1


@in_layer(
    "weight channel",
    ("resnet", "stage1.conv2", DIRECT_17),
    ("generator", "grow", TRACED_17),
    ("two-inputs", "dense", DYNAMO_18),
)
def one_channel_5_percent_larger(layer: nn.Module, _: Architecture) -> None:
    """Scale the filter with the largest norm by 1.05."""
    _get_weight(layer)[_find_largest_filter(layer)] *= 1.05


@in_layer(
    "zeroed channel",
    ("mobilenet", "block1.project", TRACED_13),
    ("pyramid", "side.conv", DIRECT_20),
)
def one_channel_zeroed(layer: nn.Module, _: Architecture) -> None:
    """Set the filter with the largest norm to zero, as by pruning that was not reverted."""
    _get_weight(layer)[_find_largest_filter(layer)] = 0.0


@in_layer("sign", ("pooling", "conv2", DIRECT_17), ("detector", "backbone.two.conv", DYNAMO_18))
def one_channel_negated(layer: nn.Module, _: Architecture) -> None:
    """Negate the filter with the largest norm."""
    _get_weight(layer)[_find_largest_filter(layer)] *= -1.0


@in_layer("sign", ("tokens", "positions", DIRECT_13))
def all_negated(layer: nn.Module, _: Architecture) -> None:
    """Negate the whole table."""
    _get_weight(layer).neg_()


@in_layer("weight channel", ("camera", "backbone.three.conv", DIRECT_17))
def two_channels_exchanged(layer: nn.Module, _: Architecture) -> None:
    """Swap the first two filters."""
    weight = _get_weight(layer)
    weight[[0, 1]] = weight[[1, 0]].clone()


@in_layer("weight tensor", ("segmenter", "second.conv", DIRECT_17), ("points", "conv", DYNAMO_18))
def one_percent_larger(layer: nn.Module, _: Architecture) -> None:
    """Scale all weights of the layer by 1.01, as by weight decay after the checkpoint."""
    _get_weight(layer).mul_(1.01)


@in_layer("weight tensor", ("difference", "dense", TRACED_17), ("vit", "patches", DIRECT_17))
def bias_lost(layer: nn.Module, _: Architecture) -> None:
    """Set the layer's bias to zero, as by a loader that skips unknown keys."""
    layer.bias.zero_()


@in_layer("weight layout", ("tokens", "attention.query", DIRECT_17), ("recurrent", "fc", DIRECT_17))
def transposed(layer: nn.Module, _: Architecture) -> None:
    """Transpose the square part of the weights, as in TensorFlow's layout."""
    side = min(layer.weight.shape)
    layer.weight[:side, :side] = layer.weight[:side, :side].T.clone()


@in_layer("weight layout", ("resnet", "stage3.conv2", SCRIPTED_17), ("pooling", "conv1", DYNAMO_18))
def kernel_turned(layer: nn.Module, _: Architecture) -> None:
    """Swap height and width of the kernel."""
    layer.weight.copy_(layer.weight.transpose(2, 3).clone())


@in_layer("weight layout", ("generator", "shrink", DIRECT_13))
def kernel_flipped(layer: nn.Module, _: Architecture) -> None:
    """Flip the kernel: PyTorch computes a correlation, not a convolution."""
    layer.weight.copy_(layer.weight.flip(2, 3).clone())


@in_layer("weight layout", ("vit", "block2.attention", DIRECT_17))
def keys_and_values_exchanged(layer: nn.Module, _: Architecture) -> None:
    """Read the packed projection as query, value, key."""
    for packed in (layer.in_proj_weight, layer.in_proj_bias):
        query, key, value = packed.clone().chunk(3)
        packed.copy_(torch.cat([query, value, key]))


def _round_to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype).to(tensor.dtype)


def _round_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Round to ten bits of mantissa, like tensor cores."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@in_layer(
    "fp16 weights",
    ("resnet", "stage3.conv1", DIRECT_17),
    ("recurrent", "lstm", TRACED_13),
    ("denoiser", "inner", DIRECT_20),
)
def layer_through_fp16(layer: nn.Module, _: Architecture) -> None:
    """Round the layer's weights to float16."""
    for parameter in layer.parameters():
        parameter.copy_(_round_to(torch.float16, parameter))


@in_model("fp16 weights", ("vit", DIRECT_17), ("segmenter", EXTERNAL_18))
def all_through_fp16(model: nn.Module, _: Architecture) -> None:
    """Round all weights to float16."""
    layer_through_fp16(model, _)


@in_layer(
    "bf16 weights", ("mobilenet", "block3.expand", DIRECT_13), ("generator", "expand", DYNAMO_18)
)
def layer_through_bf16(layer: nn.Module, _: Architecture) -> None:
    """Round the layer's weights to bfloat16."""
    for parameter in layer.parameters():
        parameter.copy_(_round_to(torch.bfloat16, parameter))


@in_model("bf16 weights", ("tokens", DIRECT_20))
def all_through_bf16(model: nn.Module, _: Architecture) -> None:
    """Round all weights to bfloat16."""
    layer_through_bf16(model, _)


@in_layer("tf32 weights", ("detector", "box", DIRECT_17), ("vit", "block1.down", DYNAMO_18))
def layer_through_tf32(layer: nn.Module, _: Architecture) -> None:
    """Round the layer's weights to TensorFloat-32."""
    layer.weight.copy_(_round_to_tf32(layer.weight))


@in_model("tf32 weights", ("resnet18", DIRECT_17), ("mobilenet", TRACED_13))
def all_through_tf32(model: nn.Module, _: Architecture) -> None:
    """Round all weights to TensorFloat-32."""
    for parameter in model.parameters():
        parameter.copy_(_round_to_tf32(parameter))


@in_layer("int8 weights", ("pooling", "dense", DIRECT_17), ("resnet", "stage1.conv1", PRESERVED_17))
def layer_through_int8(layer: nn.Module, _: Architecture) -> None:
    """Quantize the layer's weights to 8 bits with one scale and dequantize them."""
    scale = layer.weight.abs().max() / 127.0
    layer.weight.copy_((layer.weight / scale).round() * scale)
