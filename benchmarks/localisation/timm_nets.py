"""Nets of timm."""

from __future__ import annotations

import timm
from torch import nn

from benchmarks.localisation.architecture import architecture, images

SIDE = 32


@architecture("timm-resnet", images(SIDE))
def resnet() -> nn.Module:
    return timm.create_model("test_resnet", num_classes=10)


@architecture("timm-resnetv2", images(SIDE))
def resnetv2() -> nn.Module:
    from timm.models.resnetv2 import ResNetV2

    return ResNetV2(layers=(1, 1), channels=(128, 256), stem_chs=32, num_classes=10)


@architecture("timm-convnext", images(64))
def convnext() -> nn.Module:
    return timm.create_model("test_convnext", num_classes=10)


@architecture("timm-vit", images(SIDE))
def vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=SIDE, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10,
        init_values=0.1,
    )  # fmt: skip


@architecture("timm-swin", images(SIDE))
def swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=SIDE, patch_size=2, embed_dim=24, depths=(2, 2), num_heads=(2, 4),
        window_size=4, num_classes=10,
    )  # fmt: skip


@architecture("timm-mixer", images(SIDE))
def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(img_size=SIDE, patch_size=8, embed_dim=48, num_blocks=2, num_classes=10)


@architecture("timm-efficientnet", images(64))
def efficientnet() -> nn.Module:
    return timm.create_model("test_efficientnet", num_classes=10)


@architecture("timm-evonorm", images(64))
def evonorm() -> nn.Module:
    return timm.create_model("test_efficientnet_evos", num_classes=10)


@architecture("timm-mobilenetv3", images(64))
def mobilenetv3() -> nn.Module:
    return timm.create_model("mobilenetv3_small_050", num_classes=10)


@architecture("timm-regnet", images(64))
def regnet() -> nn.Module:
    return timm.create_model("regnetx_002", num_classes=10)


@architecture("timm-nfnet", images(64))
def nfnet() -> nn.Module:
    return timm.create_model("test_nfnet", num_classes=10)


@architecture("timm-levit", images(64))
def levit() -> nn.Module:
    from timm.models.levit import Levit

    return Levit(
        img_size=64, embed_dim=(32, 48), key_dim=8, depth=(1, 1), num_heads=(2, 3),
        num_classes=10,
    )  # fmt: skip


@architecture("timm-beit", images(SIDE))
def beit() -> nn.Module:
    from timm.models.beit import Beit

    return Beit(
        img_size=SIDE, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10,
        use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1,
    )  # fmt: skip


@architecture("timm-eva", images(SIDE), exporters=("dynamo",))
def eva() -> nn.Module:
    from timm.models.eva import Eva

    return Eva(
        img_size=SIDE, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10,
        use_rot_pos_emb=True, swiglu_mlp=True, scale_mlp=True, qkv_fused=False, mlp_ratio=2.0,
    )  # fmt: skip


@architecture("timm-cait", images(SIDE))
def cait() -> nn.Module:
    from timm.models.cait import Cait

    return Cait(
        img_size=SIDE, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10,
        init_values=0.1,
    )  # fmt: skip
