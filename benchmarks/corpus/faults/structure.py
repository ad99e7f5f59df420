"""Faults that change the network: activations, pooling, geometry, shortcuts, attention."""

from __future__ import annotations

import math

import onnx
import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus import graph
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import in_graph, in_layer, in_model
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    DYNAMO_18,
    SCRIPTED_17,
    TRACED_13,
    TRACED_17,
)
from benchmarks.corpus.models import attention, convolutional, wide


@in_layer(
    "missing activation",
    ("resnet", "stage2.relu1", DIRECT_17),
    ("pooling", "relu3", TRACED_13),
    ("difference", "relu", DYNAMO_18),
)
def activation_left_out(_: nn.Module, __: Architecture) -> nn.Module:
    """Remove the activation after a layer."""
    return nn.Identity()


@in_layer("other activation", ("mobilenet", "block2.act1", DIRECT_17))
def relu_for_relu6(_: nn.Module, __: Architecture) -> nn.Module:
    """Use ReLU instead of ReLU6."""
    return nn.ReLU()


@in_layer("other activation", ("segmenter", "first.relu", DIRECT_17), ("points", "relu", TRACED_17))
def relu6_for_relu(_: nn.Module, __: Architecture) -> nn.Module:
    """Use ReLU6 instead of ReLU, as in models prepared for quantization."""
    return nn.ReLU6()


@in_layer("gelu approximation", ("vit", "block1.gelu", DIRECT_17), ("tokens", "gelu", DYNAMO_18))
def gelu_by_tanh(_: nn.Module, __: Architecture) -> nn.Module:
    """Use GELU with the tanh approximation instead of erf."""
    return nn.GELU(approximate="tanh")


@in_layer("other activation", ("pooling", "relu2", DIRECT_17))
def default_slope(_: nn.Module, __: Architecture) -> nn.Module:
    """Set the slope of LeakyReLU to the default of 0.01 instead of 0.1."""
    return nn.LeakyReLU()


@in_layer("other activation", ("mobilenet", "act", DIRECT_20))
def swish_for_hardswish(_: nn.Module, __: Architecture) -> nn.Module:
    """Use Swish instead of its piecewise form."""
    return nn.SiLU()


@in_layer("other activation", ("detector", "scale", DIRECT_17))
def relu_for_softplus(_: nn.Module, __: Architecture) -> nn.Module:
    """Use ReLU instead of softplus."""
    return nn.ReLU()


@in_layer("other activation", ("generator", "prelu", TRACED_17))
def shared_slope(layer: nn.Module, _: Architecture) -> nn.Module:
    """Use one slope for all channels of a PReLU."""
    nn.init.uniform_(layer.weight, 0.1, 0.4)
    return nn.PReLU(1, init=float(layer.weight.mean()))


@in_graph("other activation", ("mobilenet", DIRECT_17), layer="block1.excite.gate")
def default_alpha(model: onnx.ModelProto) -> None:
    """Set the alpha of HardSigmoid to ONNX's default of 1/5 instead of PyTorch's 1/6."""
    gate = next(n for n in graph.find_nodes(model, "HardSigmoid") if "block1" in n.name)
    graph.set_attribute(gate, "alpha", 0.2)


@in_layer("pooling", ("pooling", "average", DIRECT_17))
def padding_counted(layer: nn.Module, _: Architecture) -> None:
    """Count the padding as zeros in average pooling."""
    layer.count_include_pad = True


@in_layer("pooling", ("resnet", "maxpool", TRACED_13), ("resnet18", "maxpool", DIRECT_17))
def ceil_mode(layer: nn.Module, _: Architecture) -> None:
    """Round the size of a pooling up, which a later global pooling hides."""
    layer.ceil_mode = True


@in_layer("pooling", ("mobilenet", "pool", DIRECT_13))
def maximum_for_average(_: nn.Module, __: Architecture) -> nn.Module:
    """Use a global maximum instead of the global average."""
    return nn.AdaptiveMaxPool2d(1)


@in_layer("pooling", ("pooling", "maximum", DYNAMO_18))
def average_for_maximum(layer: nn.Module, _: Architecture) -> nn.Module:
    """Use average pooling instead of max pooling."""
    return nn.AvgPool2d(layer.kernel_size, layer.stride, ceil_mode=layer.ceil_mode)


@in_layer("padding mode", ("pooling", "conv3", DIRECT_17), ("generator", "enter", DYNAMO_18))
def zeros_for_reflection(layer: nn.Module, _: Architecture) -> None:
    """Pad borders with zeros instead of reflecting them."""
    layer.padding_mode = "zeros"


@in_graph("padding mode", ("generator", DIRECT_17), layer="enter")
def edge_for_reflection(model: onnx.ModelProto) -> None:
    """Pad borders with the edge value instead of reflecting them."""
    graph.set_attribute(graph.find_nodes(model, "Pad")[0], "mode", "edge")


@in_layer("dilation", ("pooling", "conv2", TRACED_17), ("generator", "atrous", DIRECT_17))
def dilation_lost(layer: nn.Module, _: Architecture) -> None:
    """Set the dilation to 1 with fitting padding, so that shapes are unchanged."""
    layer.dilation, layer.padding = (1, 1), (1, 1)
    layer._reversed_padding_repeated_twice = [1, 1, 1, 1]


@in_graph("stride", ("resnet", DIRECT_17), layer="stage2.conv1")
def padded_as_same(model: onnx.ModelProto) -> None:
    """Pad a strided convolution only at the end, as TensorFlow's SAME does."""
    graph.set_attribute(graph.find_node(model, "/stage2/conv1/Conv"), "pads", [0, 0, 1, 1])


class _LateStrideBlock(convolutional.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.conv2d(x, self.conv1.weight, None, 1, 1)
        y = self.relu1(self.bn1(y))
        y = functional.conv2d(y, self.conv2.weight, None, 2, 1)
        return self.relu2(self.bn2(y) + self.shortcut(x))


@in_model("stride", ("resnet", DIRECT_13))
def strided_later(model: nn.Module, _: Architecture) -> None:
    """Move the stride to the second convolution of the block."""
    model.stage2.__class__ = _LateStrideBlock


@in_graph("pixel order", ("generator", DIRECT_17), layer="shuffle")
def depth_before_columns(model: onnx.ModelProto) -> None:
    """Set DepthToSpace to its default order DCR instead of PixelShuffle's CRD."""
    graph.set_attribute(graph.find_nodes(model, "DepthToSpace")[0], "mode", "DCR")


class _BlockWithoutShortcut(convolutional.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu2(self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x))))))


@in_model("residual", ("resnet", TRACED_17))
def shortcut_missing(model: nn.Module, _: Architecture) -> None:
    """Remove the shortcut of one block."""
    model.stage1.__class__ = _BlockWithoutShortcut


class _PostNormEncoder(attention.Encoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = y + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(self.gelu(self.up(self.norm2(x))))


@in_model("residual", ("vit", DIRECT_17))
def shortcut_behind_norm(model: nn.Module, _: Architecture) -> None:
    """Start the shortcut of one block after the norm."""
    model.block2.__class__ = _PostNormEncoder


@in_model("residual", ("mobilenet", DYNAMO_18))
def shortcut_switched_off(model: nn.Module, _: Architecture) -> None:
    """Disable the shortcut of one block by a flag."""
    model.block3.same = False


@in_layer("softmax axis", ("tokens", "attention.softmax", DIRECT_17))
def softmax_over_queries(_: nn.Module, __: Architecture) -> nn.Module:
    """Apply softmax over the queries instead of the keys."""
    return nn.Softmax(dim=-2)


@in_model("attention", ("tokens", DIRECT_13))
def scale_of_width(model: nn.Module, _: Architecture) -> None:
    """Divide attention scores by the root of the width instead of the head's width."""
    model.attention.scale = 32**-0.5


class _UnmaskedAttention(attention.SelfAttention):
    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return super().forward(x, torch.zeros_like(padding))


@in_model("attention", ("tokens", DYNAMO_18))
def mask_lost(model: nn.Module, _: Architecture) -> None:
    """Remove the padding mask, so that tokens attend to padding."""
    model.attention.__class__ = _UnmaskedAttention


class _LeakyAttention(attention.SelfAttention):
    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            self.split(projection(x)) for projection in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) * self.scale
        scores = scores - 8.0 * padding[:, None, None, :].to(x.dtype)
        return self.out((self.softmax(scores) @ value).transpose(1, 2).flatten(2))


@in_model("attention", ("tokens", DIRECT_20))
def mask_too_small(model: nn.Module, _: Architecture) -> None:
    """Use -8 instead of -inf in the attention mask, so that 0.1 % of the attention leaks."""
    model.attention.__class__ = _LeakyAttention


@in_layer("attention", ("vit", "block1.attention", DIRECT_17))
def two_heads(layer: nn.Module, _: Architecture) -> None:
    """Split the attention into two heads of twice the width; shapes are unchanged."""
    layer.num_heads, layer.head_dim = 2, layer.embed_dim // 2


class _CosinesFirstDenoiser(wide.Denoiser):
    def forward(self, image: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        indices = torch.arange(half, device=image.device).to(image.dtype)
        angles = step[:, None] * torch.exp(indices * (-math.log(1000.0) / half))
        step_features = self.time(torch.cat([angles.cos(), angles.sin()], dim=1))
        y = self.enter(image) + step_features[:, :, None, None]
        y = y + self.inner(self.act1(self.norm1(y)))
        return self.leave(self.act2(self.norm2(y)))


@in_model("embedding", ("denoiser", DIRECT_17))
def cosines_before_sines(model: nn.Module, _: Architecture) -> None:
    """Embed the step with cosines before sines, as another library does."""
    model.__class__ = _CosinesFirstDenoiser


@in_graph("recurrent gates", ("recurrent", DIRECT_17), layer="gru")
def reset_before_product(model: onnx.ModelProto) -> None:
    """Apply the reset gate of a GRU before the product: ONNX's default, not PyTorch's."""
    graph.set_attribute(graph.find_nodes(model, "GRU")[0], "linear_before_reset", 0)


@in_layer("recurrent gates", ("recurrent", "lstm", SCRIPTED_17))
def gates_in_other_order(layer: nn.Module, _: Architecture) -> None:
    """Swap the weights of the forget gate and the cell gate, as in another framework."""
    for parameter in layer.parameters():
        gates = parameter.clone().chunk(4)
        parameter.copy_(torch.cat([gates[0], gates[2], gates[1], gates[3]]))
