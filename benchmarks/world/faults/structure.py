"""Faults of exporters and of rewritten attention: masks, scales, rotations, tables."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.world.architectures.named_fields import NamedFields
from benchmarks.world.fault import (
    DIRECT_17,
    DYNAMO_18,
    AppliedBefore,
    as_exported,
    fault_of,
)


class Unmasked(nn.Module):
    """A model whose attention gets a mask of four axes that hides nothing."""

    def __init__(self, model: NamedFields) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> object:
        zeros = (mask * 0).to(torch.get_default_dtype())
        return self.model(ids, zeros[:, None, None, :] + zeros[:, None, :, None])


_CAUSAL = ("hf-gpt2", "hf-llama", "hf-gpt-neox", "hf-qwen2", "hf-phi", "hf-olmo")


@fault_of("causal mask", *_CAUSAL)
def causal_mask_left_out(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Remove the causal mask, so that tokens attend to later tokens."""
    return Unmasked(model)


@fault_of(
    "padding mask",
    "hf-bert",
    "hf-distilbert",
    "hf-electra",
    "hf-mpnet",
    "hf-bart",
    "hf-t5",
    ("hf-albert", "", DYNAMO_18),
)
def padding_seen(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Remove the padding mask, so that tokens attend to padding."""
    return AppliedBefore(model, lambda ids, mask: (ids, mask * 0 + 1))


@fault_of(
    "scale of attention",
    "timm-swin-tiny-patch4-window7-224",
    "hf-bert",
    "hf-gpt-neox",
    "hf-llama",
    "hf-vit",
    ("hf-whisper", "", DYNAMO_18),
)
def other_scale(model: nn.Module, _architecture: Architecture) -> None:
    """Scale the factor of the first attention by 1.01."""
    module, name = next(
        (module, name)
        for module in model.modules()
        for name in ("scale", "scaling")
        if isinstance(getattr(module, name, None), float)
    )
    setattr(module, name, getattr(module, name) * 1.01)


@fault_of(
    "base of the rotation", "hf-llama", "hf-qwen2", "hf-gpt-neox", ("hf-gemma", "", DYNAMO_18)
)
def other_base(model: nn.Module, _architecture: Architecture) -> None:
    """Scale the frequencies of the rotary positions by 0.99."""
    module = next(candidate for candidate in model.modules() if hasattr(candidate, "inv_freq"))
    module.inv_freq.mul_(0.99)


_TABLES = {
    "timm-vit-tiny-patch16-224": "pos_embed",
    "timm-deit-tiny-distilled-patch16-224": "pos_embed",
    "timm-beit-base-patch16-224": "blocks.0.attn.relative_position_bias_table",
    "timm-swin-tiny-patch4-window7-224": "layers.0.blocks.1.attn.relative_position_bias_table",
    "timm-cait-xxs24-224": "cls_token",
    "timm-convnext-atto": "stages.1.blocks.0.gamma",
    "timm-xcit-nano-12-p8-224": "blocks.0.attn.temperature",
    "hf-mamba": "model.backbone.layers.0.mixer.A_log",
    "hf-patchtst": "model.model.encoder.positional_encoder.position_enc",
}


@fault_of(
    "parameter of no layer",
    *(name for name in _TABLES if name != "hf-patchtst"),
    ("hf-patchtst", "", DYNAMO_18),
    ("timm-vit-tiny-patch16-224", "", DYNAMO_18),
)
def one_of_a_table(model: nn.Module, architecture: Architecture) -> None:
    """Scale the largest element of a parameter that belongs to no layer by 1.1."""
    numbers = model.get_parameter(_TABLES[architecture.name]).view(-1)
    numbers[int(numbers.abs().argmax())] *= 1.1


as_exported(
    "words that see nothing",
    "hf-decision",
    DYNAMO_18,
    "Where all that a word could attend to is masked, the exporter's attention gives something "
    "else than PyTorch's.",
)
for broken in ("hf-patchtst", "hf-patch-mixer"):
    as_exported(
        "graph that does not load",
        broken,
        DIRECT_17,
        "The exporter writes a graph whose types or shapes contradict each other.",
    )
