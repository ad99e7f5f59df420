"""Models of transformers in small configurations: two layers, 32 dimensions, eager attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.world import sample_generators
from benchmarks.world.initial_weights import settle

Make = Callable[[], nn.Module]
Draw = Callable[[int, int], Arrays]

_EAGER: dict[str, Any] = {"attn_implementation": "eager"}
_VOCABULARY: dict[str, Any] = {"vocab_size": sample_generators.VOCABULARY}
_BLOCKS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_SMALL: dict[str, Any] = {**_VOCABULARY, **_BLOCKS, "max_position_embeddings": 64}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER: dict[str, Any] = {**_SMALL, **_EAGER, **_SPECIAL}
_DECODER: dict[str, Any] = {**_ENCODER, "use_cache": False}
_GROUPED: dict[str, Any] = {**_DECODER, "num_key_value_heads": 2}
_ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    **_EAGER,
}
_PATCHES: dict[str, Any] = {**_BLOCKS, **_EAGER, "image_size": 32, "patch_size": 8}
_WAVES: dict[str, Any] = {
    **_BLOCKS,
    **_EAGER,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 12,
}
_RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}

_STATES = ("last_hidden_state",)
_STATES_AND_POOLED = ("last_hidden_state", "pooler_output")
_TOWERS = ("logits_per_image", "text_embeds", "image_embeds")
_BOXES = ("logits", "pred_boxes")
_LENGTHS = {"input_ids": {1: "length"}, "attention_mask": {1: "length"}}
_PAIRS = {"logits_per_image": {1: "batch"}}


class NamedFields(nn.Module):
    """Call a model with named inputs and return fields in order, because exporters need tensors."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], fields: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self._inputs, self._fields = model, inputs, fields

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        outputs = self.model(**dict(zip(self._inputs, inputs, strict=True)))
        fields = tuple(outputs[field] for field in self._fields)
        return fields[0] if len(fields) == 1 else fields


def _architecture(
    name: str,
    make: Make,
    draw: Draw,
    *,
    fields: tuple[str, ...] = ("logits",),
    head: str = "",
    **options: Any,
) -> Architecture:
    """Return an architecture whose inputs are those that `draw` returns.

    `head` is the path of the layer that computes class scores.
    """
    inputs = tuple(draw(1, 0))
    return Architecture(
        f"hf-{name}",
        lambda: NamedFields(make(), inputs, fields),
        draw,
        outputs=fields,
        head=head,
        settle=settle,
        count=32,
        **{"classes": bool(head), **options},
    )


def _model(model: Any, config: Any, *settings: dict[str, Any], **more: Any) -> Make:
    merged = {name: value for part in (*settings, more) for name, value in part.items()}
    return lambda: model(config(**copy.deepcopy(merged)))


def _text(
    name: str, make: Make, *, padding: int = 0, masked: bool = True, **options: Any
) -> Architecture:
    draw = partial(sample_generators.text, padding=padding, masked=masked)
    return _architecture(name, make, draw, **{"axes": _LENGTHS, **options})


def _image(name: str, make: Make, *, size: int = 32, **options: Any) -> Architecture:
    return _architecture(name, make, partial(sample_generators.image, size=size), **options)


def _draw_pairs(count: int, seed: int) -> Arrays:
    return {**sample_generators.text(count, seed), **sample_generators.image(count, seed)}


def _draw_log_mel(count: int, seed: int) -> Arrays:
    return {"input_features": sample_generators.spectrum(count, seed)}


def _bart_encoder() -> nn.Module:
    config = hf.BartConfig(
        **_VOCABULARY, **_ENCODER_DECODER, decoder_layers=1, max_position_embeddings=64
    )
    return hf.BartModel(config).encoder


def _detr() -> nn.Module:
    config = hf.DetrConfig(
        **{**_ENCODER_DECODER, "encoder_layers": 1},
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=hf.ResNetConfig(**_RESNET),
        decoder_layers=2,
        num_queries=10,
        num_labels=7,
    )
    return hf.DetrForObjectDetection(config)


_BERT = _model(hf.BertForSequenceClassification, hf.BertConfig, _ENCODER, num_labels=5)
_ELECTRA = _model(
    hf.ElectraForSequenceClassification, hf.ElectraConfig, _ENCODER, embedding_size=16, num_labels=5
)
_ELECTRA_HEAD = "model.classifier.out_proj"

_TEXTS = [
    _text("bert", _BERT, head="model.classifier"),
    _text("bert-words", _model(hf.BertForMaskedLM, hf.BertConfig, _ENCODER)),
    _text(
        "distilbert",
        _model(
            hf.DistilBertForQuestionAnswering,
            hf.DistilBertConfig,
            _VOCABULARY,
            _EAGER,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=64,
            max_position_embeddings=64,
        ),
        fields=("start_logits", "end_logits"),
    ),
    _text(
        "albert",
        _model(
            hf.AlbertForSequenceClassification,
            hf.AlbertConfig,
            _ENCODER,
            embedding_size=16,
            num_labels=5,
        ),
        head="model.classifier",
    ),
    _text("electra", _ELECTRA, head=_ELECTRA_HEAD),
    _text(
        "deberta",
        _model(
            hf.DebertaV2ForSequenceClassification,
            hf.DebertaV2Config,
            _SMALL,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            num_labels=5,
        ),
        head="model.classifier",
    ),
    _text("mpnet", _model(hf.MPNetModel, hf.MPNetConfig, _ENCODER), fields=_STATES_AND_POOLED),
    _text(
        "gpt2",
        _model(
            hf.GPT2LMHeadModel,
            hf.GPT2Config,
            _VOCABULARY,
            _EAGER,
            _SPECIAL,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            use_cache=False,
        ),
    ),
    _text("gpt-neox", _model(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, _DECODER)),
    _text("llama", _model(hf.LlamaForCausalLM, hf.LlamaConfig, _GROUPED)),
    _text("mistral", _model(hf.MistralForCausalLM, hf.MistralConfig, _GROUPED, sliding_window=6)),
    _text("qwen2", _model(hf.Qwen2ForCausalLM, hf.Qwen2Config, _GROUPED)),
    _text(
        "gemma",
        _model(hf.GemmaForCausalLM, hf.GemmaConfig, _DECODER, num_key_value_heads=1, head_dim=8),
    ),
    _text("phi", _model(hf.PhiForCausalLM, hf.PhiConfig, _DECODER)),
    _text("falcon", _model(hf.FalconForCausalLM, hf.FalconConfig, _DECODER)),
    _text("bloom", _model(hf.BloomForCausalLM, hf.BloomConfig, _DECODER, n_head=4, n_layer=2)),
    _text("olmo", _model(hf.OlmoForCausalLM, hf.OlmoConfig, _DECODER)),
    _text(
        "opt",
        _model(
            hf.OPTForCausalLM,
            hf.OPTConfig,
            _DECODER,
            intermediate_size=None,
            ffn_dim=64,
            word_embed_proj_dim=32,
        ),
    ),
    _text(
        "t5",
        _model(
            hf.T5EncoderModel,
            hf.T5Config,
            _VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
        ),
        fields=_STATES,
    ),
    _text("bart", _bart_encoder, fields=_STATES),
    _text(
        "modernbert",
        _model(hf.ModernBertModel, hf.ModernBertConfig, _ENCODER, cls_token_id=1, sep_token_id=2),
        fields=_STATES,
    ),
    _text("bert-unpadded", _BERT, masked=False, head="model.classifier"),
    _text("electra-unpadded", _ELECTRA, masked=False, head=_ELECTRA_HEAD),
    _text(
        "roberta",
        _model(
            hf.RobertaForTokenClassification,
            hf.RobertaConfig,
            _ENCODER,
            num_labels=5,
            pad_token_id=1,
        ),
        padding=1,
        head="model.classifier",
        classes=False,
    ),
    _text(
        "esm",
        _model(
            hf.EsmForMaskedLM,
            hf.EsmConfig,
            _ENCODER,
            mask_token_id=2,
            pad_token_id=1,
            position_embedding_type="rotary",
        ),
        padding=1,
    ),
    _architecture(
        "layoutlm",
        _model(
            hf.LayoutLMForTokenClassification,
            hf.LayoutLMConfig,
            _ENCODER,
            num_labels=5,
            max_2d_position_embeddings=64,
        ),
        sample_generators.pages,
        head="model.classifier",
        classes=False,
    ),
    _architecture(
        "mamba",
        _model(
            hf.MambaForCausalLM,
            hf.MambaConfig,
            _VOCABULARY,
            _SPECIAL,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            use_cache=False,
        ),
        sample_generators.tokens,
    ),
]

_IMAGES_AND_PAIRS = [
    _image(
        "vit",
        _model(hf.ViTForImageClassification, hf.ViTConfig, _PATCHES, num_labels=10),
        head="model.classifier",
    ),
    _image("dinov2", _model(hf.Dinov2Model, hf.Dinov2Config, _PATCHES), fields=_STATES_AND_POOLED),
    _image(
        "segformer",
        _model(
            hf.SegformerForSemanticSegmentation,
            hf.SegformerConfig,
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 16, 32, 32],
            num_attention_heads=[1, 2, 4, 4],
            decoder_hidden_size=32,
            num_labels=6,
        ),
        size=64,
        head="model.decode_head.classifier",
    ),
    _architecture(
        "clip",
        _model(
            hf.CLIPModel,
            hf.CLIPConfig,
            _EAGER,
            text_config={**_SMALL, **_SPECIAL, "projection_dim": 16},
            vision_config={**_PATCHES, "projection_dim": 16},
            projection_dim=16,
        ),
        _draw_pairs,
        fields=_TOWERS,
        axes=_PAIRS,
    ),
    _architecture(
        "siglip",
        _model(
            hf.SiglipModel,
            hf.SiglipConfig,
            _EAGER,
            text_config=_SMALL,
            vision_config=_PATCHES,
        ),
        _draw_pairs,
        fields=_TOWERS,
        axes=_PAIRS,
    ),
    _image("detr", _detr, size=64, fields=_BOXES),
    _image(
        "yolos",
        _model(
            hf.YolosForObjectDetection,
            hf.YolosConfig,
            _PATCHES,
            image_size=[32, 32],
            num_detection_tokens=10,
            num_labels=7,
        ),
        fields=_BOXES,
    ),
]

_SOUNDS = [
    _architecture(
        "wav2vec2",
        _model(hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config, _WAVES),
        sample_generators.sound,
        head="model.lm_head",
        classes=False,
    ),
    _architecture(
        "whisper",
        _model(
            WhisperEncoder,
            hf.WhisperConfig,
            _VOCABULARY,
            _SPECIAL,
            _EAGER,
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            num_mel_bins=16,
            max_source_positions=40,
            decoder_start_token_id=1,
        ),
        _draw_log_mel,
        fields=_STATES,
    ),
]

ARCHITECTURES: list[Architecture] = [*_TEXTS, *_IMAGES_AND_PAIRS, *_SOUNDS]
