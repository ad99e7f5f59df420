"""Narrow heads and backbones of torchvision, combined as in its detectors."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torchvision.models import MaxVit, RegNet, ShuffleNetV2, SqueezeNet
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.detection.ssd import SSDHead
from torchvision.models.regnet import BlockParams
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.segmentation.fcn import FCNHead
from torchvision.models.segmentation.lraspp import LRASPPHead
from torchvision.models.video.swin_transformer import SwinTransformer3d
from torchvision.ops import FeaturePyramidNetwork

CLASSES = 5


class Backbone(nn.Module):
    """Returns features at 1/4, 1/8 and 1/16 of the image size, with 16, 24 and 32 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _layer(3, 8)
        self.layer1, self.layer2, self.layer3 = _layer(8, 16), _layer(16, 24), _layer(24, 32)

    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        first = self.layer1(self.stem(image))
        second = self.layer2(first)
        return [first, second, self.layer3(second)]


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Pyramid(nn.Module):
    """The backbone with torchvision's feature pyramid."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = Backbone()
        self.fpn = FeaturePyramidNetwork([16, 24, 32], width)

    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        features_by_name = OrderedDict(
            (str(index), features) for index, features in enumerate(self.body(image))
        )
        return list(self.fpn(features_by_name).values())


class Retina(nn.Module):
    """Returns class scores with a prior of 1 %, and box deltas."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Pyramid()
        self.head = RetinaNetHead(16, 2, CLASSES, norm_layer=partial(nn.GroupNorm, 4))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.head(self.backbone(image))
        return outputs["cls_logits"].sigmoid(), outputs["bbox_regression"]


class Fcos(nn.Module):
    """Returns scores weighted by centeredness, and distances to the sides in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Pyramid(32)  # Its norm has 32 groups.
        self.head = FCOSHead(32, 1, CLASSES, num_convs=1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.head(self.backbone(image))
        scores = outputs["cls_logits"].sigmoid() * outputs["bbox_ctrness"].sigmoid()
        return scores.sqrt(), outputs["bbox_regression"] * 8.0


class Ssd(nn.Module):
    """SSD's head on features of three sizes, with a softmax over classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Backbone()
        self.head = SSDHead([16, 24, 32], [2, 3, 2], CLASSES)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.head(self.body(image))
        return functional.softmax(outputs["cls_logits"], dim=-1), outputs["bbox_regression"]


class Proposals(nn.Module):
    """The head of a region proposal network: objectness on two sizes, and box deltas."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Pyramid()
        self.head = RPNHead(16, 3)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        objects, deltas = self.head(self.backbone(image))
        return objects[0], objects[1], deltas[0]


class Keypoints(nn.Module):
    """Returns heat maps of four keypoints."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Backbone()
        self.head = KeypointRCNNHeads(24, (16, 16))
        self.predictor = KeypointRCNNPredictor(16, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.predictor(self.head(self.body(image)[1]))


class Resize(nn.Module):
    """Resizes scores to the size of the image."""

    def __init__(self, *, mode: str = "bilinear", align_corners: bool | None = False) -> None:
        super().__init__()
        self._settings = {"mode": mode, "align_corners": align_corners}

    def forward(self, scores: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(scores, size=image.shape[-2:], **self._settings)


class Segmenter(nn.Module):
    """A segmentation head of torchvision, with its scores resized to the size of the image."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = Backbone(), head
        self.resize = Resize()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.resize(self.head(self.body(image)[2]), image)


def fcn() -> nn.Module:
    return Segmenter(FCNHead(32, CLASSES))


def deeplab() -> nn.Module:
    return Segmenter(DeepLabHead(32, CLASSES, atrous_rates=(1, 2, 3)))


class Lraspp(nn.Module):
    """LRASPP on features of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Backbone(), LRASPPHead(16, 32, CLASSES, 16)
        self.resize = Resize()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        low, _, high = self.body(image)
        return self.resize(self.head({"low": low, "high": high}), image)


def swin_video() -> nn.Module:
    return SwinTransformer3d([2, 4, 4], 16, [1, 1], [2, 4], [2, 4, 4], num_classes=6)


def maxvit() -> nn.Module:
    return MaxVit((32, 32), 8, 4, [16, 24], [1, 1], 8, 0.0, num_classes=10)


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 2)], num_classes=10)


def shufflenet() -> nn.Module:
    return ShuffleNetV2([2, 2, 2], [16, 24, 32, 48, 64], num_classes=10)


def squeezenet() -> nn.Module:
    return SqueezeNet("1_1", num_classes=10)


def regnet() -> nn.Module:
    parameters = BlockParams([1, 1, 2], [16, 24, 32], [8, 8, 8], [1.0, 1.0, 1.0], [2, 2, 2], 0.25)
    return RegNet(parameters, num_classes=10, stem_width=8)
