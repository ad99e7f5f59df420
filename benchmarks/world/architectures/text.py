"""Language models of transformers with two layers, 32 dimensions and eager attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import transformers as hf
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.world import sample_generators
from benchmarks.world.architectures.named_fields import hf_architecture, per_token

SMALL: dict[str, Any] = {
    "vocab_size": sample_generators.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER: dict[str, Any] = {**SMALL, **EAGER, **_SPECIAL}
_DECODER: dict[str, Any] = {**_ENCODER, "use_cache": False}
_GROUPED: dict[str, Any] = {**_DECODER, "num_key_value_heads": 2}
_LENGTHS = {"input_ids": {1: "length"}, "attention_mask": {1: "length"}}


def _factory(model: Any, config: Any, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: model(config(**settings))


def _encoder(model: Any, config: Any, **settings: Any) -> Callable[[], nn.Module]:
    return _factory(model, config, **{**_ENCODER, **settings})


def _decoder(model: Any, config: Any, **settings: Any) -> Callable[[], nn.Module]:
    return _factory(model, config, **{**_DECODER, **settings})


def _distilbert() -> nn.Module:
    config = hf.DistilBertConfig(
        vocab_size=sample_generators.VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=64,
        **EAGER,
    )
    return hf.DistilBertForQuestionAnswering(config)


def _deberta() -> nn.Module:
    config = hf.DebertaV2Config(
        **SMALL,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        num_labels=5,
    )
    return hf.DebertaV2ForSequenceClassification(config)


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=sample_generators.VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        use_cache=False,
        **EAGER,
        **_SPECIAL,
    )
    return hf.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=sample_generators.VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
    )
    return hf.T5EncoderModel(config)


def _bart() -> nn.Module:
    config = hf.BartConfig(
        vocab_size=sample_generators.VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        **EAGER,
    )
    return hf.BartModel(config).encoder


def _opt() -> nn.Module:
    config = hf.OPTConfig(
        **{**_DECODER, "intermediate_size": None}, ffn_dim=64, word_embed_proj_dim=32
    )
    return hf.OPTForCausalLM(config)


_SQUEEZE = {**SMALL, "embedding_size": 32, "num_labels": 5}
_STATES = ("last_hidden_state",)

_PADDED_MODELS: tuple[tuple[str, Callable[[], nn.Module], tuple[str, ...], str], ...] = (
    (
        "bert",
        _encoder(hf.BertForSequenceClassification, hf.BertConfig, num_labels=5),
        ("logits",),
        "model.classifier",
    ),
    ("bert-words", _encoder(hf.BertForMaskedLM, hf.BertConfig), ("logits",), ""),
    ("distilbert", _distilbert, ("start_logits", "end_logits"), ""),
    (
        "albert",
        _encoder(hf.AlbertForSequenceClassification, hf.AlbertConfig, embedding_size=16,
                 num_labels=5),
        ("logits",),
        "model.classifier",
    ),
    (
        "electra",
        _encoder(hf.ElectraForSequenceClassification, hf.ElectraConfig, embedding_size=16,
                 num_labels=5),
        ("logits",),
        "model.classifier.out_proj",
    ),
    ("deberta", _deberta, ("logits",), "model.classifier"),
    ("mpnet", _encoder(hf.MPNetModel, hf.MPNetConfig), ("last_hidden_state", "pooler_output"), ""),
    ("gpt2", _gpt2, ("logits",), ""),
    ("gpt-neox", _decoder(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig), ("logits",), ""),
    ("llama", _factory(hf.LlamaForCausalLM, hf.LlamaConfig, **_GROUPED), ("logits",), ""),
    (
        "mistral",
        _factory(hf.MistralForCausalLM, hf.MistralConfig, **_GROUPED, sliding_window=6),
        ("logits",),
        "",
    ),
    ("qwen2", _factory(hf.Qwen2ForCausalLM, hf.Qwen2Config, **_GROUPED), ("logits",), ""),
    (
        "gemma",
        _factory(hf.GemmaForCausalLM, hf.GemmaConfig, **{**_GROUPED, "num_key_value_heads": 1},
            head_dim=8),
        ("logits",),
        "",
    ),
    ("phi", _decoder(hf.PhiForCausalLM, hf.PhiConfig), ("logits",), ""),
    ("falcon", _decoder(hf.FalconForCausalLM, hf.FalconConfig), ("logits",), ""),
    (
        "bloom",
        _decoder(hf.BloomForCausalLM, hf.BloomConfig, n_head=4, n_layer=2),
        ("logits",),
        "",
    ),
    ("olmo", _decoder(hf.OlmoForCausalLM, hf.OlmoConfig), ("logits",), ""),
    ("opt", _opt, ("logits",), ""),
    ("t5", _t5, _STATES, ""),
    ("bart", _bart, _STATES, ""),
    (
        "squeezebert",
        _factory(hf.SqueezeBertForSequenceClassification, hf.SqueezeBertConfig, **_SQUEEZE),
        ("logits",),
        "model.classifier",
    ),
    (
        "modernbert",
        _encoder(hf.ModernBertModel, hf.ModernBertConfig, cls_token_id=1, sep_token_id=2),
        _STATES,
        "",
    ),
)  # fmt: skip

ARCHITECTURES: list[Architecture] = [
    *(
        hf_architecture(name, make, sample_generators.text, fields=fields, head=head, axes=_LENGTHS)
        for name, make, fields, head in _PADDED_MODELS
    ),
    *(
        hf_architecture(
            f"{name}-unpadded",
            make,
            partial(sample_generators.text, masked=False),
            head=head,
            axes=_LENGTHS,
        )
        for name, make, _, head in (_PADDED_MODELS[0], _PADDED_MODELS[4])
    ),
    per_token(
        hf_architecture(
            "roberta",
            _encoder(
                hf.RobertaForTokenClassification, hf.RobertaConfig, num_labels=5, pad_token_id=1
            ),
            partial(sample_generators.text, padding=1),
            head="model.classifier",
            axes=_LENGTHS,
        )
    ),
    hf_architecture(
        "esm",
        _encoder(
            hf.EsmForMaskedLM,
            hf.EsmConfig,
            mask_token_id=2,
            pad_token_id=1,
            position_embedding_type="rotary",
        ),
        partial(sample_generators.text, padding=1),
        axes=_LENGTHS,
    ),
    per_token(
        hf_architecture(
            "layoutlm",
            _encoder(
                hf.LayoutLMForTokenClassification,
                hf.LayoutLMConfig,
                num_labels=5,
                max_2d_position_embeddings=64,
            ),
            sample_generators.pages,
            head="model.classifier",
        )
    ),
    hf_architecture(
        "mamba",
        _factory(
            hf.MambaForCausalLM,
            hf.MambaConfig,
            vocab_size=sample_generators.VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            use_cache=False,
            **_SPECIAL,
        ),
        sample_generators.tokens,
    ),
    hf_architecture(
        "fnet",
        _factory(
            hf.FNetModel,
            hf.FNetConfig,
            vocab_size=sample_generators.VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            max_position_embeddings=64,
        ),
        sample_generators.tokens,
        fields=("last_hidden_state", "pooler_output"),
    ),
]
