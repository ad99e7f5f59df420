"""Nets of transformers, behind a module that returns one tensor."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from benchmarks.localisation.architecture import architecture, images, tokens, vectors

WORDS = 60


class First(nn.Module):
    """The model's first output, for tokens with a mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, return_dict=False)[0]


class FirstOf(nn.Module):
    """The model's first output, for one input of any kind."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.model = model
        self.settings = settings

    def forward(self, x):
        return self.model(x, return_dict=False, **self.settings)[0]


def eager(config: Any) -> Any:
    """Attention by ordinary operators."""
    config._attn_implementation = "eager"
    return config


@architecture("hf-bert", tokens(12, WORDS, masked=True))
def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=24,
    )  # fmt: skip
    return First(transformers.BertModel(eager(config)))


@architecture("hf-distilbert", tokens(12, WORDS, masked=True))
def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=24
    )
    return First(transformers.DistilBertModel(eager(config)))


@architecture("hf-albert", tokens(12, WORDS, masked=True))
def albert() -> nn.Module:
    config = transformers.AlbertConfig(
        vocab_size=WORDS, embedding_size=16, hidden_size=32, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=24,
    )  # fmt: skip
    return First(transformers.AlbertModel(eager(config)))


@architecture("hf-gpt2", tokens(12, WORDS, masked=True))
def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=24, use_cache=False
    )
    return First(transformers.GPT2LMHeadModel(eager(config)))


@architecture("hf-t5", tokens(12, WORDS, masked=True))
def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, use_cache=False
    )
    return First(transformers.T5EncoderModel(eager(config)))


@architecture("hf-llama", tokens(12, WORDS, masked=True))
def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24, use_cache=False,
    )  # fmt: skip
    return First(transformers.LlamaForCausalLM(eager(config)))


@architecture("hf-deberta", tokens(12, WORDS, masked=True))
def deberta() -> nn.Module:
    config = transformers.DebertaV2Config(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=24, relative_attention=True,
        position_buckets=8, pos_att_type=["p2c", "c2p"], max_relative_positions=24,
    )  # fmt: skip
    return First(transformers.DebertaV2Model(eager(config)))


@architecture("hf-convbert", tokens(12, WORDS, masked=True))
def convbert() -> nn.Module:
    config = transformers.ConvBertConfig(
        vocab_size=WORDS, hidden_size=32, embedding_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=24,
    )  # fmt: skip
    return First(transformers.ConvBertModel(eager(config)))


@architecture("hf-vit", images(32))
def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return FirstOf(transformers.ViTForImageClassification(eager(config)))


@architecture("hf-segformer", images(64))
def segformer() -> nn.Module:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[16, 32],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=32, num_labels=4,
    )  # fmt: skip
    return FirstOf(transformers.SegformerForSemanticSegmentation(config))


@architecture("hf-wav2vec2", vectors(800))
def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    return FirstOf(transformers.Wav2Vec2ForCTC(eager(config)))


@architecture("hf-whisper", vectors(16, 40))
def whisper() -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        num_mel_bins=16, d_model=32, encoder_layers=2, encoder_attention_heads=4,
        encoder_ffn_dim=48, max_source_positions=20,
    )  # fmt: skip
    return FirstOf(WhisperEncoder(eager(config)))
