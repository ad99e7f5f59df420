"""Faults of rewritten attention, and parameters of no layer: masks, scales, rotations, tables."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.exporters import DYNAMO_18
from benchmarks.world.fault import Wrapped, fault_of

_CAUSAL = ("hf-gpt2", "hf-llama", "hf-gpt-neox", "hf-qwen2", "hf-phi", "hf-olmo")


@fault_of("causal mask", *_CAUSAL)
def causal_mask_left_out(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Remove the causal mask, so that tokens attend to later tokens."""

    def unmask(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = (mask * 0).to(torch.get_default_dtype())
        return ids, zeros[:, None, None, :] + zeros[:, None, :, None]

    return Wrapped(model, inputs=unmask)


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
    return Wrapped(model, inputs=lambda ids, mask: (ids, mask * 0 + 1))


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
}


@fault_of("parameter of no layer", *_TABLES, ("timm-vit-tiny-patch16-224", "", DYNAMO_18))
def one_of_a_table(model: nn.Module, architecture: Architecture) -> None:
    """Scale the largest element of a parameter that belongs to no layer by 1.1."""
    numbers = model.get_parameter(_TABLES[architecture.name]).view(-1)
    numbers[int(numbers.abs().argmax())] *= 1.1
