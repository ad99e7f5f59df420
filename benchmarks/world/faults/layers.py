"""One faulty layer in a model, which localization must name."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.exporters import DIRECT_17, DYNAMO_18
from benchmarks.world.fault import fault_of

_WEIGHTS = (
    ("timm-resnet26d", "layer2.0.conv2", DIRECT_17),
    ("timm-seresnet18", "layer3.0.se.fc1", DIRECT_17),
    ("timm-densenet121", "features.denseblock2.denselayer1.conv2", DIRECT_17),
    ("timm-convnext-atto", "stages.2.blocks.0.mlp.fc1", DYNAMO_18),
    ("timm-vit-tiny-patch16-224", "blocks.1.attn.proj", DIRECT_17),
    ("timm-beit-base-patch16-224", "blocks.0.mlp.fc2", DYNAMO_18),
    ("timm-swin-tiny-patch4-window7-224", "layers.1.blocks.0.mlp.fc1", DIRECT_17),
    ("timm-cait-xxs24-224", "blocks.1.attn.proj_l", DIRECT_17),
    ("timm-mixer", "blocks.0.mlp_tokens.fc1", DIRECT_17),
    ("timm-poolformer", "stages.1.downsample.conv", DIRECT_17),
    ("hf-bert", "model.bert.encoder.layer.0.attention.self.value", DIRECT_17),
    ("hf-distilbert", "model.distilbert.transformer.layer.1.ffn.lin1", DYNAMO_18),
    ("hf-gpt2", "model.transformer.h.0.mlp.c_fc", DIRECT_17),
    ("hf-gpt-neox", "model.gpt_neox.layers.0.attention.dense", DIRECT_17),
    ("hf-llama", "model.model.layers.1.mlp.down_proj", DIRECT_17),
    ("hf-t5", "model.encoder.block.1.layer.0.SelfAttention.o", DIRECT_17),
    ("hf-segformer", "model.segformer.stages.1.patch_embeddings.proj", DIRECT_17),
    ("hf-clip", "model.visual_projection", DIRECT_17),
    ("hf-wav2vec2", "model.wav2vec2.feature_extractor.conv_layers.1.conv", DIRECT_17),
    ("hf-whisper", "model.conv2", DIRECT_17),
)


@fault_of("one weight", *_WEIGHTS)
def one_weight(layer: nn.Module, _architecture: Architecture) -> None:
    """Scale the weight with the largest magnitude by 1.1."""
    weights = layer.weight.view(-1)
    weights[int(weights.abs().argmax())] *= 1.1


@fault_of(
    "weights in fp16",
    ("timm-ecaresnet26t", "layer3.0.conv1"),
    ("timm-skresnet18", "layer2.0.conv2.conv"),
    ("timm-mobilenetv3-small-050", "blocks.2.0.conv_pwl"),
    ("timm-xcit-nano-12-p8-224", "blocks.0.attn.qkv", DYNAMO_18),
    ("hf-albert", "model.albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"),
    ("hf-deberta", "model.deberta.encoder.layer.1.attention.self.query_proj"),
    ("hf-mpnet", "model.encoder.layer.0.attention.attn.v"),
    ("hf-detr", "model.class_labels_classifier"),
)
def in_half(layer: nn.Module, _architecture: Architecture) -> None:
    """Round the weights to float16."""
    layer.weight.copy_(layer.weight.half())


@fault_of(
    "one bias",
    ("timm-convnextv2-atto", "stages.1.blocks.0.mlp.fc2"),
    ("timm-deit-tiny-distilled-patch16-224", "blocks.0.attn.qkv"),
    ("hf-roberta", "model.roberta.encoder.layer.1.output.dense"),
    ("hf-electra", "model.electra.encoder.layer.0.intermediate.dense", DYNAMO_18),
    ("hf-layoutlm", "model.layoutlm.encoder.layer.0.attention.self.query"),
    ("hf-yolos", "model.class_labels_classifier.layers.0"),
)
def one_bias(layer: nn.Module, _architecture: Architecture) -> None:
    """Set the bias with the largest magnitude to zero."""
    layer.bias[int(layer.bias.abs().argmax())] = 0.0


@fault_of(
    "epsilon of a norm",
    ("timm-vit-tiny-patch16-224", "blocks.0.norm1"),
    ("timm-swinv2-tiny-window8-256", "layers.0.blocks.0.norm2"),
    ("timm-convnext-atto", "stages.1.blocks.0.norm"),
    ("hf-bert", "model.bert.embeddings.LayerNorm"),
    ("hf-distilbert", "model.distilbert.transformer.layer.0.sa_layer_norm", DYNAMO_18),
    ("hf-gpt2", "model.transformer.h.1.ln_2"),
    ("hf-whisper", "model.layers.0.self_attn_layer_norm"),
    ("hf-vit", "model.vit.layernorm"),
)
@fault_of(
    "epsilon of a batch norm",
    ("timm-resnet26t", "layer1.0.bn2"),
    ("timm-regnetx-002", "s1.b1.conv2.bn"),
)
def epsilon(layer: nn.Module, _architecture: Architecture) -> None:
    """Set the epsilon of the norm to 0.001, the default of another framework."""
    layer.eps = 1e-3


@fault_of(
    "stale statistics",
    ("timm-ese-vovnet19b-slim", "stages.1.blocks.0.conv_mid.0.bn"),
    ("timm-lcnet-050", "blocks.1.0.bn1"),
    ("timm-visformer-tiny", "stage1.0.norm2"),
)
def stale(layer: nn.Module, _architecture: Architecture) -> None:
    """Shift the running mean of one channel by a tenth of its standard deviation."""
    layer.running_mean[1] += 0.1 * float(layer.running_var[1]) ** 0.5


@fault_of(
    "gelu by tanh",
    ("timm-vit-tiny-patch16-224", "blocks.0.mlp.act"),
    ("timm-beit-base-patch16-224", "blocks.1.mlp.act", DYNAMO_18),
    ("hf-bert", "model.bert.encoder.layer.0.intermediate.intermediate_act_fn"),
    ("hf-gpt-neox", "model.gpt_neox.layers.1.mlp.act"),
    ("hf-segformer", "model.segformer.stages.0.blocks.0.mlp.activation_fn"),
)
def by_tanh(_layer: nn.Module, _architecture: Architecture) -> nn.Module:
    """Replace GELU by erf with its tanh approximation."""
    return nn.GELU(approximate="tanh")


@fault_of(
    "sigmoid hardened",
    ("timm-seresnet18", "layer1.0.se.gate"),
    ("timm-ecaresnet26t", "layer2.0.se.gate"),
)
def hardened(_layer: nn.Module, _architecture: Architecture) -> nn.Module:
    """Replace the sigmoid of the gate with a piecewise linear function."""
    return nn.Hardsigmoid()


@fault_of(
    "embedding row",
    ("hf-bert", "model.bert.embeddings.word_embeddings"),
    ("hf-esm", "model.esm.embeddings.word_embeddings"),
    ("hf-mamba", "model.backbone.embeddings", DYNAMO_18),
)
def frequent_row(layer: nn.Module, _architecture: Architecture) -> None:
    """Swap the rows 3 and 4, which belong to frequent tokens."""
    layer.weight[[3, 4]] = layer.weight[[4, 3]]


@fault_of(
    "order of queries and keys",
    ("timm-vit-tiny-patch16-224", "blocks.1.attn.qkv"),
    ("timm-swin-tiny-patch4-window7-224", "layers.0.blocks.0.attn.qkv", DYNAMO_18),
)
def order_of_three(layer: nn.Module, _architecture: Architecture) -> None:
    """Swap the packed weights of queries and keys."""
    for packed in (layer.weight, layer.bias):
        first, second, third = packed.chunk(3)
        packed.copy_(torch.cat([second, first, third]))


@fault_of(
    "border of a pooling",
    ("timm-poolformer", "stages.0.blocks.0.token_mixer.pool"),
    ("timm-poolformer", "stages.1.blocks.0.token_mixer.pool", DYNAMO_18),
)
def border_counted(layer: nn.Module, _architecture: Architecture) -> None:
    """Include the padding in the average."""
    layer.count_include_pad = True
