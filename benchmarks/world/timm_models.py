"""Image classifiers of timm, narrow and shallow, built by its constructors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from timm.layers import GatedMlp
from timm.models.metaformer import MetaFormer
from timm.models.mlp_mixer import MlpMixer, ResBlock, SpatialGatingBlock
from torch import nn

from benchmarks.corpus import samples
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.corpus.trained import center_logits
from benchmarks.world.initial_weights import settle

CLASSES = 10
_NARROW: dict[str, Any] = {"channels": (16, 32, 48, 64)}
_SHALLOW: dict[str, Any] = {**_NARROW, "layers": (1, 1, 1, 1), "stem_width": 8}
_VIT: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 3,
}
_WINDOWS: dict[str, Any] = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 24,
    "depths": (2, 2),
    "num_heads": (2, 4),
}
_STAGES: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)}

_BY_NAME: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("resnet26d", 48, _SHALLOW),
    ("resnet26t", 48, _SHALLOW),
    ("seresnet18", 48, _NARROW),
    ("ecaresnet26t", 48, _SHALLOW),
    ("skresnet18", 48, _NARROW),
    (
        "resnetv2_50",
        48,
        {"layers": (1, 1, 1, 1), "channels": (64, 64, 96, 128), "stem_chs": 16},
    ),
    ("densenet121", 48, {"block_config": (2, 2, 2, 2), "growth_rate": 8}),
    ("mobilenetv3_small_050", 48, {}),
    ("lcnet_050", 48, {}),
    ("mnasnet_small", 48, {}),
    ("tinynet_e", 48, {}),
    ("dla46_c", 64, {}),
    ("ese_vovnet19b_slim", 48, {}),
    ("regnetx_002", 48, {}),
    ("convnext_atto", 32, _STAGES),
    ("convnextv2_atto", 32, _STAGES),
    ("edgenext_xx_small", 64, {}),
    ("mobilevitv2_050", 64, {}),
    (
        "visformer_tiny",
        64,
        {"img_size": 64, "embed_dim": 48, "depth": (1, 1, 1), "init_channels": 16},
    ),
    ("vit_tiny_patch16_224", 32, _VIT),
    ("deit_tiny_distilled_patch16_224", 32, _VIT),
    ("beit_base_patch16_224", 32, _VIT),
    ("eva02_tiny_patch14_224", 32, _VIT),
    ("cait_xxs24_224", 32, {**_VIT, "num_heads": 4}),
    ("xcit_nano_12_p8_224", 32, {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 4}),
    ("swin_tiny_patch4_window7_224", 32, _WINDOWS),
    ("swinv2_tiny_window8_256", 32, _WINDOWS),
)
_MLP: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "num_blocks": 2,
    "embed_dim": 48,
    "num_classes": CLASSES,
}


def _poolformer() -> nn.Module:
    return MetaFormer(depths=(1, 1, 1), dims=(16, 24, 32), num_classes=CLASSES, use_mlp_head=False)


_MIXERS: tuple[tuple[str, Callable[[], nn.Module]], ...] = (
    ("mixer", partial(MlpMixer, **_MLP)),
    (
        "gmlp",
        partial(
            MlpMixer, **_MLP, mlp_ratio=4.0, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp
        ),
    ),
    ("resmlp", partial(MlpMixer, **_MLP, block_layer=ResBlock, mlp_ratio=4.0)),
    ("poolformer", _poolformer),
)


def _build(name: str, **settings: Any) -> nn.Module:
    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)


def _timm_architecture(name: str, make: Callable[[], nn.Module], size: int) -> Architecture:
    return Architecture(
        f"timm-{name.replace('_', '-')}",
        make,
        lambda count, seed: {"pixels": samples.normalized(count, size, seed=seed)},
        head="",
        settle=_settle,
        count=32,
    )


def _settle(model: nn.Module, architecture: Architecture, arrays: Arrays) -> None:
    settle(model, architecture, arrays)
    heads = model.get_classifier()
    for head in heads if isinstance(heads, tuple) else (heads,):
        center_logits(model, head, arrays)


ARCHITECTURES = [
    *(
        _timm_architecture(name, partial(_build, name, **settings), size)
        for name, size, settings in _BY_NAME
    ),
    *(_timm_architecture(name, make, 32) for name, make in _MIXERS),
]
