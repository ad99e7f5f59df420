"""Vision, sound and time series models of transformers in small configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import transformers as hf
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.world import sample_generators
from benchmarks.world.architectures.named_fields import hf_architecture, per_token
from benchmarks.world.architectures.text import EAGER, SMALL

_BLOCKS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    **EAGER,
}
_PATCHES: dict[str, Any] = {**_BLOCKS, "image_size": 32, "patch_size": 8}
_WAVES: dict[str, Any] = {
    **_BLOCKS,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 12,
}
_TEXT = {**SMALL, "projection_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**_PATCHES, num_labels=10))


def _dinov2() -> nn.Module:
    return hf.Dinov2Model(hf.Dinov2Config(**_PATCHES))


def _swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
        num_labels=10,
        **EAGER,
    )
    return hf.SwinForImageClassification(config)


def _segformer() -> nn.Module:
    config = hf.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 16, 32, 32],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=32,
        num_labels=6,
    )
    return hf.SegformerForSemanticSegmentation(config)


def _clip() -> nn.Module:
    return hf.CLIPModel(
        hf.CLIPConfig(
            text_config=_TEXT,
            vision_config={**_PATCHES, "projection_dim": 16},
            projection_dim=16,
            **EAGER,
        )
    )


def _siglip() -> nn.Module:
    return hf.SiglipModel(
        hf.SiglipConfig(text_config=dict(SMALL), vision_config=dict(_PATCHES), **EAGER)
    )


def _clipseg() -> nn.Module:
    config = hf.CLIPSegConfig(
        text_config=_TEXT,
        vision_config={**_PATCHES, "projection_dim": 16},
        projection_dim=16,
        extract_layers=[0, 1],
        reduce_dim=16,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
    )
    return hf.CLIPSegForImageSegmentation(config)


def _detr() -> nn.Module:
    backbone = hf.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=10,
        num_labels=7,
        **EAGER,
    )
    return hf.DetrForObjectDetection(config)


def _yolos() -> nn.Module:
    settings = {**_PATCHES, "image_size": [32, 32]}
    return hf.YolosForObjectDetection(
        hf.YolosConfig(**settings, num_detection_tokens=10, num_labels=7)
    )


def _wav2vec2() -> nn.Module:
    return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_WAVES))


def _hubert() -> nn.Module:
    config = hf.HubertConfig(**_WAVES, num_labels=5, classifier_proj_size=16)
    return hf.HubertForSequenceClassification(config)


def _wavlm() -> nn.Module:
    return hf.WavLMModel(hf.WavLMConfig(**_WAVES))


def _whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=sample_generators.VOCABULARY,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **EAGER,
    )
    return WhisperEncoder(config)


def _spectrogram_transformer() -> nn.Module:
    config = hf.ASTConfig(
        **_BLOCKS,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=64,
        num_mel_bins=16,
        num_labels=5,
    )
    return hf.ASTForAudioClassification(config)


def _patchtst() -> nn.Module:
    config = hf.PatchTSTConfig(
        num_input_channels=4,
        context_length=48,
        prediction_length=12,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        scaling="std",
        loss="mse",
    )
    return hf.PatchTSTForPrediction(config)


def _patch_mixer() -> nn.Module:
    config = hf.PatchTSMixerConfig(
        num_input_channels=4,
        context_length=48,
        prediction_length=12,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_layers=2,
        scaling="std",
    )
    return hf.PatchTSMixerForPrediction(config)


_FORECASTER: dict[str, Any] = {
    "prediction_length": 8,
    "context_length": 24,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "d_model": 16,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "use_cache": False,
}


def _time_series() -> nn.Module:
    return hf.TimeSeriesTransformerModel(hf.TimeSeriesTransformerConfig(**_FORECASTER))


def _decision() -> nn.Module:
    config = hf.DecisionTransformerConfig(
        state_dim=5,
        act_dim=3,
        hidden_size=32,
        max_ep_len=50,
        n_layer=2,
        n_head=4,
        n_inner=64,
        n_positions=64,
        vocab_size=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.DecisionTransformerModel(config)


def _univnet() -> nn.Module:
    config = hf.UnivNetConfig(
        model_in_channels=8,
        model_hidden_channels=8,
        num_mel_bins=10,
        resblock_kernel_sizes=[3],
        resblock_stride_sizes=[4],
        resblock_dilation_sizes=[[1, 3]],
        kernel_predictor_num_blocks=1,
        kernel_predictor_hidden_channels=8,
    )
    return hf.UnivNetModel(config)


def _pairs(count: int, seed: int) -> Arrays:
    return {**sample_generators.text(count, seed), **sample_generators.image(count, seed)}


def _log_mel(count: int, seed: int) -> Arrays:
    return {"input_features": sample_generators.spectrum(count, seed)}


def _frames(count: int, seed: int) -> Arrays:
    spectrum = sample_generators.spectrum(count, seed, frames=64)
    return {"input_values": np.ascontiguousarray(spectrum.transpose(0, 2, 1))}


def _past(count: int, seed: int) -> Arrays:
    return {"past_values": sample_generators.past(count, seed)}


def _mel_and_noise(count: int, seed: int) -> Arrays:
    noise = np.random.default_rng(seed).normal(size=(count, 10, 8))
    mel = sample_generators.spectrum(count, seed, bands=10, frames=10).transpose(0, 2, 1)
    return {
        "input_features": np.ascontiguousarray(mel),
        "noise_sequence": noise.astype(np.float32),
    }


def _episodes(count: int, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = {"states": 5, "actions": 3, "rewards": 1, "returns_to_go": 1}
    arrays = {
        name: rng.normal(size=(count, 6, width)).astype(np.float32)
        for name, width in shapes.items()
    }
    start = rng.integers(0, 40, (count, 1))
    clock = (start + np.arange(6)).astype(np.int64)
    mask = (np.arange(6) >= rng.integers(0, 4, (count, 1))).astype(np.int64)
    return {**arrays, "timesteps": clock, "attention_mask": mask}


_EMBEDDED = ("last_hidden_state",)
_TOWERS = ("logits_per_image", "text_embeds", "image_embeds")
_PAIR_AXES = {"logits_per_image": {1: "batch"}}
_FORECAST = ("last_hidden_state", "loc", "scale")
_BOXES = ("logits", "pred_boxes")
_ACTIONS = ("state_preds", "action_preds", "return_preds")
_PREDICTED = ("prediction_outputs", "loc", "scale")

ARCHITECTURES: list[Architecture] = [
    hf_architecture("vit", _vit, sample_generators.image, head="model.classifier"),
    hf_architecture(
        "dinov2", _dinov2, sample_generators.image, fields=("last_hidden_state", "pooler_output")
    ),
    hf_architecture("swin", _swin, sample_generators.image, head="model.classifier"),
    hf_architecture(
        "segformer",
        _segformer,
        partial(sample_generators.image, size=64),
        head="model.decode_head.classifier",
    ),
    hf_architecture("clip", _clip, _pairs, fields=_TOWERS, axes=_PAIR_AXES),
    hf_architecture("siglip", _siglip, _pairs, fields=_TOWERS, axes=_PAIR_AXES),
    hf_architecture("clipseg", _clipseg, _pairs),
    hf_architecture("detr", _detr, partial(sample_generators.image, size=64), fields=_BOXES),
    hf_architecture("yolos", _yolos, sample_generators.image, fields=_BOXES),
    per_token(
        hf_architecture("wav2vec2", _wav2vec2, sample_generators.sound, head="model.lm_head")
    ),
    hf_architecture("hubert", _hubert, sample_generators.sound, head="model.classifier"),
    hf_architecture(
        "wavlm", _wavlm, sample_generators.sound, fields=("last_hidden_state", "extract_features")
    ),
    hf_architecture("whisper", _whisper, _log_mel, fields=_EMBEDDED),
    hf_architecture(
        "spectrogram", _spectrogram_transformer, _frames, head="model.classifier.dense"
    ),
    hf_architecture("patchtst", _patchtst, _past, fields=_PREDICTED),
    hf_architecture("patch-mixer", _patch_mixer, _past, fields=_PREDICTED),
    hf_architecture("time-series", _time_series, sample_generators.forecast, fields=_FORECAST),
    hf_architecture("decision", _decision, _episodes, fields=_ACTIONS),
    hf_architecture("univnet", _univnet, _mel_and_noise, fields=("waveforms",)),
]
