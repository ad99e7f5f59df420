"""The faults, by architecture."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.localisation.fault import (
    another,
    clamped,
    dropped,
    element,
    forward,
    halved,
    of,
    rolled,
    row,
    scaled,
    setting,
    shifted,
)


def _reordered_merging(self, x):
    n, h, w, c = x.shape
    x = x.reshape(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).flatten(3)
    return self.reduction(self.norm(x))


def _weaker_residual(self, x, attn_mask=None, is_causal=False):
    x = x + self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal))
    return 0.99 * x + self.ls2(self.mlp(self.norm2(x)))


def _lost_residual(self, x):
    x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
    return self.mlp_channels(self.norm2(x))


def _weak_mask(_self, attention_mask, encoder_attention_mask=None, embedding_output=None, **_more):
    del encoder_attention_mask  # by name in the call
    mask = (1.0 - attention_mask[:, None, None, :].to(embedding_output.dtype)) * -3.0
    return mask, None


def _weaker_output(self, x):
    return type(self).__mro__[1].forward(self, x) * 0.98


def _joined_otherwise(_self, left, right):
    return torch.cat([right, left], 1)


of(
    "timm-resnet",
    ("conv-element", "layer2.0.conv1", element("layer2.0.conv1.weight")),
    ("bn-mean", "layer3.0.bn3", shifted("layer3.0.bn3.running_mean")),
    ("bn-eps", "layer1.0.bn2", setting("layer1.0.bn2", eps=1e-3)),
)
of(
    "timm-resnetv2",
    ("groupnormact-weight", "stages.0.blocks.0.norm2", scaled("stages.0.blocks.0.norm2.weight")),
    ("groupnormact-eps", "stages.1.blocks.0.norm3", setting("stages.1.blocks.0.norm3", eps=1e-3)),
    ("stdconv-eps", "stages.1.blocks.0.conv2", setting("stages.1.blocks.0.conv2", eps=1e-3)),
)
of(
    "timm-convnext",
    ("gamma", "stages.1.blocks.0.gamma", element("stages.1.blocks.0.gamma")),
    ("gelu-erf", "stages.2.blocks.1.mlp.act", another("stages.2.blocks.1.mlp.act", nn.GELU)),
    ("norm2d-eps", "stem.1", setting("stem.1", eps=1e-4)),
)
of(
    "timm-vit",
    ("pos-embed", "pos_embed", shifted("pos_embed")),
    ("cls-token", "cls_token", scaled("cls_token")),
    ("scale", "blocks.1.attn",
     setting("blocks.1.attn", fused_attn=False, scale=lambda s: 1.02 * s)),
    ("layer-scale", "blocks.0.ls1", element("blocks.0.ls1.gamma")),
    ("residual", "blocks.0", forward("blocks.0", _weaker_residual)),
)  # fmt: skip
of(
    "timm-swin",
    ("bias-table", "layers.1.blocks.0.attn.relative_position_bias_table",
     row("layers.1.blocks.0.attn.relative_position_bias_table", 20)),
    ("mask", "layers.0.blocks.1.attn_mask", clamped("layers.0.blocks.1.attn_mask", -2.0)),
    ("merging-order", "layers.1.downsample", forward("layers.1.downsample", _reordered_merging)),
    ("norm-eps", "layers.0.blocks.0.norm1", setting("layers.0.blocks.0.norm1", eps=1e-3)),
)  # fmt: skip
of(
    "timm-mixer",
    ("bias-dropped", "blocks.1.mlp_tokens.fc2", dropped("blocks.1.mlp_tokens.fc2.bias")),
    ("half", "blocks.0.mlp_channels.fc1", halved("blocks.0.mlp_channels.fc1.weight")),
    ("residual-lost", "blocks.1", forward("blocks.1", _lost_residual)),
)
of(
    "timm-efficientnet",
    ("bnact-bias", "blocks.3.0.bn2", shifted("blocks.3.0.bn2.bias")),
    ("bnact-var", "blocks.1.0.bn1", scaled("blocks.1.0.bn1.running_var")),
    ("conv-element", "blocks.4.0.conv_dw", element("blocks.4.0.conv_dw.weight")),
)
of(
    "timm-evonorm",
    ("v", "blocks.3.0.bn1.v", element("blocks.3.0.bn1.v")),
    ("eps", "blocks.1.0.bn1", setting("blocks.1.0.bn1", eps=1e-3)),
    ("weight", "blocks.4.0.bn2", scaled("blocks.4.0.bn2.weight")),
)
of(
    "timm-mobilenetv3",
    ("se-bias", "blocks.2.0.se.conv_reduce", dropped("blocks.2.0.se.conv_reduce.bias")),
    ("hardswish", "blocks.2.1.bn1.act", another("blocks.2.1.bn1.act", nn.SiLU)),
    ("gate", "blocks.2.0.se.gate", another("blocks.2.0.se.gate", nn.Sigmoid)),
)
of(
    "timm-regnet",
    ("bnact-weight", "s2.b1.conv2.bn", scaled("s2.b1.conv2.bn.weight")),
    ("conv-half", "s1.b1.downsample.conv", halved("s1.b1.downsample.conv.weight")),
)
of(
    "timm-nfnet",
    ("gain", "stages.1.0.conv2", element("stages.1.0.conv2.gain")),
    ("alpha", "stages.0.0", setting("stages.0.0", alpha=lambda alpha: 1.02 * alpha)),
)
of(
    "timm-levit",
    ("attention-bias", "stages.0.blocks.0.attn.attention_biases",
     element("stages.0.blocks.0.attn.attention_biases")),
    ("bn1d-mean", "stages.0.blocks.0.mlp.ln1.bn",
     shifted("stages.0.blocks.0.mlp.ln1.bn.running_mean")),
)  # fmt: skip
of(
    "timm-beit",
    ("bias-table", "blocks.1.attn.relative_position_bias_table",
     row("blocks.1.attn.relative_position_bias_table", 20)),
    ("gamma", "blocks.1.gamma_2", scaled("blocks.1.gamma_2")),
)  # fmt: skip
of(
    "timm-eva",
    ("rope", "rope.pos_embed", scaled("rope.pos_embed")),
    ("mlp-norm", "blocks.1.mlp.norm", element("blocks.1.mlp.norm.weight")),
)
of(
    "timm-cait",
    ("gamma", "blocks_token_only.0.gamma_1", scaled("blocks_token_only.0.gamma_1")),
    ("heads-order", "blocks.0.attn.proj_w", rolled("blocks.0.attn.proj_w.weight")),
)
of(
    "hf-bert",
    ("position-row", "model.embeddings.position_embeddings",
     row("model.embeddings.position_embeddings.weight", 3)),
    ("norm-eps", "model.encoder.layer.0.output.LayerNorm",
     setting("model.encoder.layer.0.output.LayerNorm", eps=1e-5)),
    ("query-row", "model.encoder.layer.1.attention.self.query",
     row("model.encoder.layer.1.attention.self.query.weight")),
    ("mask", "model",
     lambda model: setattr(
         model.model, "__class__",
         type("BertModel", (type(model.model),), {"_create_attention_masks": _weak_mask}))),
)  # fmt: skip
of(
    "hf-distilbert",
    ("scaling", "model.transformer.layer.1.attention",
     setting("model.transformer.layer.1.attention", scaling=lambda s: 1.02 * s)),
    ("bias-dropped", "model.transformer.layer.0.attention.out_lin",
     dropped("model.transformer.layer.0.attention.out_lin.bias")),
)  # fmt: skip
ALBERT = "model.encoder.albert_layer_groups.0.albert_layers.0"
of(
    "hf-albert",
    ("shared-weight", f"{ALBERT}.ffn", element(f"{ALBERT}.ffn.weight")),
    ("shared-eps", f"{ALBERT}.attention.LayerNorm",
     setting(f"{ALBERT}.attention.LayerNorm", eps=1e-4)),
)  # fmt: skip
of(
    "hf-gpt2",
    ("conv1d-element", "model.transformer.h.1.attn.c_attn",
     element("model.transformer.h.1.attn.c_attn.weight")),
    ("gelu-erf", "model.transformer.h.0.mlp.act",
     another("model.transformer.h.0.mlp.act", nn.GELU)),
    ("position-row", "model.transformer.wpe", row("model.transformer.wpe.weight", 3)),
)  # fmt: skip
of(
    "hf-t5",
    ("bias-row", "model.encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
     row("model.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 2)),
    ("rms-eps", "model.encoder.block.1.layer.1.layer_norm",
     setting("model.encoder.block.1.layer.1.layer_norm", variance_epsilon=1e-4)),
    ("half", "model.encoder.block.1.layer.1.DenseReluDense.wo",
     halved("model.encoder.block.1.layer.1.DenseReluDense.wo.weight")),
)  # fmt: skip
of(
    "hf-llama",
    ("rope-base", "model.model.rotary_emb", scaled("model.model.rotary_emb.inv_freq", 0.98)),
    ("rms-weight", "model.model.layers.1.post_attention_layernorm",
     element("model.model.layers.1.post_attention_layernorm.weight")),
    ("scaling", "model.model.layers.1.self_attn",
     setting("model.model.layers.1.self_attn", scaling=lambda s: 1.02 * s)),
)  # fmt: skip
of(
    "hf-deberta",
    ("relative-row", "model.encoder.rel_embeddings", row("model.encoder.rel_embeddings.weight", 8)),
    ("pos-key", "model.encoder.layer.0.attention.self.pos_key_proj",
     element("model.encoder.layer.0.attention.self.pos_key_proj.weight")),
)  # fmt: skip
CONVBERT = "model.encoder.layer.0.attention.self"
of(
    "hf-convbert",
    ("separable-bias", f"{CONVBERT}.key_conv_attn_layer",
     shifted(f"{CONVBERT}.key_conv_attn_layer.bias")),
    ("kernel-weight", f"{CONVBERT}.conv_kernel_layer",
     element(f"{CONVBERT}.conv_kernel_layer.weight")),
)  # fmt: skip
of(
    "hf-vit",
    ("position", "model.vit.embeddings.position_embeddings",
     shifted("model.vit.embeddings.position_embeddings")),
    ("gelu-tanh", "model.vit.layers.1.mlp.activation_fn",
     another("model.vit.layers.1.mlp.activation_fn", lambda: nn.GELU(approximate="tanh"))),
)  # fmt: skip
of(
    "hf-segformer",
    ("dwconv", "model.segformer.stages.0.blocks.0.mlp.dwconv.dwconv",
     element("model.segformer.stages.0.blocks.0.mlp.dwconv.dwconv.weight")),
    ("decoder-bn", "model.decode_head.batch_norm",
     shifted("model.decode_head.batch_norm.running_mean")),
)  # fmt: skip
WAV = "model.wav2vec2"
of(
    "hf-wav2vec2",
    ("weight-norm", f"{WAV}.encoder.pos_conv_embed.conv.parametrizations.weight.0",
     scaled(f"{WAV}.encoder.pos_conv_embed.conv.parametrizations.weight.original0")),
    ("groupnorm", f"{WAV}.feature_extractor.conv_layers.0.layer_norm",
     element(f"{WAV}.feature_extractor.conv_layers.0.layer_norm.weight")),
)  # fmt: skip
of(
    "hf-whisper",
    ("positions", "model.embed_positions", shifted("model.embed_positions.weight")),
    ("conv-channel", "model.conv2", row("model.conv2.weight")),
)
of(
    "own-lstm",
    ("hidden-weight", "lstm.weight_hh_l1", element("lstm.weight_hh_l1")),
    ("reverse-bias", "lstm.bias_ih_l0_reverse", element("lstm.bias_ih_l0_reverse")),
)
of(
    "own-gru",
    ("gate-row", "gru.weight_ih_l0", row("gru.weight_ih_l0", 20)),
    ("shared-weight", "mix", element("mix.weight")),
    ("factor", "", forward("", _weaker_output)),
)
of(
    "own-branches",
    ("frozen-var", "norm", scaled("norm.running_var")),
    ("gain", "gain", element("gain")),
    ("join-order", "", lambda model: setattr(
        model, "__class__", type("Branches", (type(model),), {"join": _joined_otherwise}))),
)  # fmt: skip
